//! A model on its devices.

use std::{
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use crate::{
    built_in::BuiltIn,
    engine::{self, Embedder, EmbedderSettings, EngineError},
    error::Result,
    fingerprint::Fingerprint,
    lm_head::{LazyHead, LmHead},
    mix::ScalarMix,
    model::{self, BiLm, DeviceName, Precision, SelfTest},
    model_dir::ModelData,
    options::ModelOptions,
    spec::EmbedSpec,
    states::{Carry, Starts, WarmState},
    weights::Weights,
};

/// A model on its devices: cheap to clone, safe to share.
#[derive(Debug, Clone)]
pub struct Elmo {
    inner: Arc<Loaded>,
}

#[derive(Debug)]
struct Loaded {
    options: ModelOptions,
    fingerprint: Fingerprint,
    mix: Option<ScalarMix>,
    name: String,
    untrained: bool,
    precision: Precision,
    devices: Vec<DeviceName>,
    embedder: Embedder,
    starts: Arc<Starts>,
    lm_head: LazyHead,
    /// A handle to the tensors of the first device, for work outside the engine.
    first: Mutex<BiLm>,
}

impl Elmo {
    /// Opens a model directory with default settings.
    ///
    /// # Errors
    /// As [`ModelData::open`] and [`Elmo::from_data`].
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        Self::from_data(ModelData::open(dir.as_ref())?, &EmbedderSettings::default())
    }

    /// The built-in model `books`: small, and trained on English novels. `src/books/MODEL.md` describes it.
    ///
    /// # Errors
    /// As [`Elmo::from_data`].
    pub fn books() -> Result<Self> {
        Self::from_data(ModelData::built_in(BuiltIn::Books)?, &EmbedderSettings::default())
    }

    /// The built-in model `tiny`, which is untrained: for tests.
    ///
    /// # Errors
    /// As [`Elmo::from_data`].
    pub fn tiny() -> Result<Self> {
        Self::from_data(ModelData::tiny(), &EmbedderSettings::default())
    }

    /// Loads a model onto devices and drops the host's copy of the weights.
    ///
    /// # Errors
    /// [`Error::Device`](crate::error::Error::Device) when a device does not exist or has no room for the weights,
    /// [`Error::Engine`](crate::error::Error::Engine) when a thread cannot be started.
    pub fn from_data(data: ModelData, settings: &EmbedderSettings) -> Result<Self> {
        let devices = model::resolve_devices(&settings.devices)?;
        let ModelData { options, weights, fingerprint, mix, warm_state, lm_head, name, untrained, .. } = data;
        let models = load(&options, &weights, &engine::lanes(&devices, settings.threads), settings.precision)?;
        drop(weights);
        let no_device = || EngineError::NoDeviceLeft { reason: "no device was given".to_owned() };
        let first = models.first().map(BiLm::share).ok_or_else(no_device)?;
        let starts = Arc::new(Starts::new(warm_state));
        let embedder = Embedder::start(models, settings, Box::new(Arc::clone(&starts)))?;
        let inner = Loaded {
            options,
            fingerprint,
            mix,
            name,
            untrained,
            precision: settings.precision,
            devices,
            embedder,
            starts,
            lm_head: LazyHead::new(lm_head),
            first: Mutex::new(first),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Sizes and switches of the model.
    pub fn options(&self) -> &ModelOptions {
        &self.inner.options
    }

    /// The settings of an embedder where nothing else is asked for: the defaults, with the tokenizer, sentence mode
    /// and start state that the model records.
    pub fn spec(&self) -> EmbedSpec {
        self.inner.options.spec()
    }

    /// Identity of the model.
    pub fn fingerprint(&self) -> &Fingerprint {
        &self.inner.fingerprint
    }

    /// The fitted scalar mix that came with the model.
    pub fn mix(&self) -> Option<&ScalarMix> {
        self.inner.mix.as_ref()
    }

    /// Name of the model, for messages.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Whether the model is a language model: whether its vocabulary and softmax are stored beside its weights.
    pub fn has_lm_head(&self) -> bool {
        self.inner.lm_head.exists()
    }

    /// Digest of the LM head, [`LmHeadFiles::digest`](crate::lm_head::LmHeadFiles::digest); `None` when the model has
    /// none.
    ///
    /// # Errors
    /// [`Error::Io`](crate::error::Error::Io) when its files cannot be read.
    pub fn lm_head_digest(&self) -> Result<Option<String>> {
        self.inner.lm_head.digest().transpose()
    }

    /// The vocabulary and softmax. The first call reads them and loads them onto the first device.
    ///
    /// # Errors
    /// [`Error::LmHead`](crate::error::Error::LmHead) when the model has none, and as
    /// [`LmHeadFiles::read`](crate::lm_head::LmHeadFiles::read).
    pub fn lm_head(&self) -> Result<Arc<LmHead>> {
        let Loaded { lm_head, name, options, devices, .. } = self.inner.as_ref();
        let device = devices.first().copied().unwrap_or(DeviceName::Cpu);
        lm_head.get(name, options.lstm.projection_dim, device)
    }

    /// Whether the weights are those of the built-in model, which are random numbers.
    pub fn is_untrained(&self) -> bool {
        self.inner.untrained
    }

    /// Number format on the devices.
    pub fn precision(&self) -> Precision {
        self.inner.precision
    }

    /// Where the model runs.
    pub fn devices(&self) -> &[DeviceName] {
        &self.inner.devices
    }

    /// The engine.
    pub fn embedder(&self) -> &Embedder {
        &self.inner.embedder
    }

    /// Runs this model in many batches to check that on this machine a row's vector does not depend on its neighbours.
    ///
    /// # Errors
    /// [`Error::Device`](crate::error::Error::Device) when the device fails; vectors that differ are no error.
    pub fn self_test(&self) -> Result<SelfTest> {
        Ok(model::self_test(&self.first())?)
    }

    fn first(&self) -> BiLm {
        self.inner.first.lock().unwrap_or_else(PoisonError::into_inner).share()
    }

    pub(crate) fn carry(&self) -> Result<Carry> {
        Ok(Carry::new(self.first())?)
    }

    /// The numbers of start state `warm`, in the order of [`ModelData::warm_state`]. They are computed once, unless
    /// they came with the model.
    ///
    /// # Errors
    /// [`Error::Device`](crate::error::Error::Device) when the device fails.
    pub fn warm_state(&self) -> Result<Vec<f32>> {
        Ok(self.inner.starts.warm(&self.first())?.numbers.clone())
    }

    /// The numbers of a start state like `warm`, after another text: sentences of tokens, which are read repeatedly until the
    /// state converges (at most 20 times). A sentence without tokens is passed over.
    ///
    /// # Errors
    /// [`Error::Device`](crate::error::Error::Device) when the device fails.
    pub fn state_after(&self, text: &[Vec<impl AsRef<str>>]) -> Result<Vec<f32>> {
        Ok(WarmState::compute(&self.first(), text)?)
    }

    pub(crate) fn warm_digest(&self) -> Result<String> {
        Ok(self.inner.starts.warm(&self.first())?.digest.clone())
    }
}

/// A model for each lane; those on one device share its tensors.
fn load(options: &ModelOptions, weights: &Weights, lanes: &[DeviceName], precision: Precision) -> Result<Vec<BiLm>> {
    let mut models: Vec<BiLm> = Vec::new();
    for &device in lanes {
        let model = match models.iter().find(|model| model.device() == device) {
            Some(loaded) => loaded.share(),
            None => BiLm::new(options, weights, device, precision)?,
        };
        models.push(model);
    }
    Ok(models)
}
