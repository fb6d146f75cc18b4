//! ELMo: exact, deterministic, batched inference of the character-based biLM (Peters et al. 2018).
//!
//! ```no_run
//! use std::sync::Arc;
//! use arrow::array::{ArrayRef, StringArray};
//! use elmo::{ColumnEmbedder, Elmo, EmbedSpec};
//!
//! let elmo = Elmo::open("models/original")?;
//! let columns = ColumnEmbedder::new(&elmo, EmbedSpec::default())?;
//! let texts: ArrayRef = Arc::new(StringArray::from(vec!["The bank was steep.", "The bank was shut."]));
//! let vectors = columns.embed(&texts)?.vectors; // FixedSizeList<Float32, 1024>, two rows
//! # Ok::<(), elmo::Error>(())
//! ```
//!
//! The way of a text, and the module that walks each step:
//!
//! | step | module |
//! |---|---|
//! | Arrow column to texts | `rows` |
//! | text to sentences, tokens with byte offsets, windows | [`text`] |
//! | waiting sentences of all callers to batches | `planner` |
//! | device threads, answers in order | [`embedder`] |
//! | token to character ids | [`chars`] |
//! | distinct words to token vectors, and the ones seen before | [`model`], `word_cache` |
//! | two LSTM stacks, layers out | [`model`] |
//! | layers to one vector per token, tokens to one per text | [`mix`], `pooling` |
//! | vectors to Arrow columns | [`columns`], [`ColumnLayout`], `vectors` |
//!
//! A model is [`options`] and [`weights`], found by [`model_dir`], known by its [`fingerprint`].
//! What a caller may choose is in [`spec`].
//!
//! This crate knows nothing of SQL, Kafka, object stores or files of rows.

use std::{
    collections::BTreeSet,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

pub mod chars;
pub mod columns;
pub mod embedder;
pub mod error;
pub mod fingerprint;
mod layout;
pub mod lm_head;
pub mod mix;
pub mod model;
pub mod model_dir;
pub mod options;
mod planner;
mod pooling;
mod rows;
pub mod spec;
mod states;
pub mod surprisal;
pub mod text;
mod vectors;
pub mod weights;
mod word_cache;

pub use columns::{ColumnEmbedder, ColumnStats, EmbeddedColumns, PendingColumns};
pub use embedder::{Embedder, EmbedderMetrics, EmbedderSettings};
pub use error::{Error, ErrorKind, Result};
pub use fingerprint::Fingerprint;
pub use layout::ColumnLayout;
pub use model_dir::ModelData;
pub use options::ModelOptions;
pub use spec::EmbedSpec;

use model::{BiLm, Precision};

/// A model on its devices: cheap to clone, safe to share.
#[derive(Debug, Clone)]
pub struct Elmo {
    inner: Arc<Loaded>,
}

#[derive(Debug)]
struct Loaded {
    options: ModelOptions,
    fingerprint: Fingerprint,
    mix: Option<mix::ScalarMix>,
    name: String,
    untrained: bool,
    precision: Precision,
    devices: Vec<model::DeviceName>,
    embedder: Embedder,
    starts: Arc<states::Starts>,
    lm_head: lm_head::LazyHead,
    /// A handle on the first device's tensors, for work outside the engine.
    spare: Mutex<BiLm>,
}

impl Elmo {
    /// Opens a model directory with default settings.
    ///
    /// # Errors
    /// As [`ModelData::open`] when the directory holds no model or the model is broken, and as [`Elmo::from_data`].
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        Self::from_data(ModelData::open(dir.as_ref())?, &EmbedderSettings::default())
    }

    /// The small model that is built in: untrained, for trying things out.
    ///
    /// # Errors
    /// As [`Elmo::from_data`].
    pub fn tiny() -> Result<Self> {
        Self::from_data(ModelData::tiny(), &EmbedderSettings::default())
    }

    /// Puts a model on devices; the host's copy of the weights is dropped.
    ///
    /// # Errors
    /// [`Error::Device`] when a device is not there, has no room for the weights, or a thread for it cannot be started.
    pub fn from_data(data: ModelData, settings: &EmbedderSettings) -> Result<Self> {
        let devices = model::resolve_devices(&settings.devices)?;
        if devices.contains(&model::DeviceName::Cpu) && settings.precision == Precision::F32 {
            check_products(&data.options)?;
        }
        let mut models: Vec<BiLm> = Vec::new();
        let ModelData { options, weights, fingerprint, mix, warm_state, lm_head, name, untrained, .. } = data;
        for device in embedder::lanes(&devices, settings.threads) {
            let model = match models.iter().find(|model| model.device() == device) {
                Some(there) => there.share(),
                None => BiLm::new(&options, &weights, device, settings.precision)?,
            };
            models.push(model);
        }
        drop(weights);
        let spare = models.first().map(BiLm::share);
        let spare = spare.ok_or_else(|| model::DeviceError::Torch { message: "no device at all".to_owned() })?;
        let starts = Arc::new(states::Starts::new(warm_state));
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
            lm_head: lm_head::LazyHead::new(lm_head),
            spare: Mutex::new(spare),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Shape of the model.
    pub fn options(&self) -> &ModelOptions {
        &self.inner.options
    }

    /// Identity of the model.
    pub fn fingerprint(&self) -> &Fingerprint {
        &self.inner.fingerprint
    }

    /// The fitted scalar mix that came with the model.
    pub fn mix(&self) -> Option<&mix::ScalarMix> {
        self.inner.mix.as_ref()
    }

    /// Short name for people.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Whether the model is a language model: whether its vocabulary and softmax lie beside its weights.
    pub fn has_lm_head(&self) -> bool {
        self.inner.lm_head.is_there()
    }

    /// What tells the LM head from others, [`lm_head::LmHeadFiles::mark`]; `None` when the model has none.
    ///
    /// # Errors
    /// [`Error::Io`] when its files cannot be read.
    pub fn lm_head_mark(&self) -> Result<Option<String>> {
        self.inner.lm_head.mark().transpose()
    }

    /// The vocabulary and softmax, read and put on the first device when somebody first asks.
    ///
    /// # Errors
    /// [`Error::LmHead`] when the model has none, and as [`lm_head::LmHeadFiles::read`].
    pub fn lm_head(&self) -> Result<Arc<lm_head::LmHead>> {
        let Loaded { lm_head, name, options, devices, .. } = self.inner.as_ref();
        let device = devices.first().copied().unwrap_or(model::DeviceName::Cpu);
        lm_head.get(name, options.lstm.projection_dim, device)
    }

    /// Whether the weights are random numbers.
    pub fn is_untrained(&self) -> bool {
        self.inner.untrained
    }

    /// Number format on the devices.
    pub fn precision(&self) -> Precision {
        self.inner.precision
    }

    /// Where the model runs.
    pub fn devices(&self) -> &[model::DeviceName] {
        &self.inner.devices
    }

    /// The engine.
    pub fn embedder(&self) -> &Embedder {
        &self.inner.embedder
    }

    /// Checks on this machine that a row's vector does not depend on its neighbours: runs this model in many batches.
    ///
    /// # Errors
    /// [`Error::Device`] when the device fails; vectors that differ are no error.
    pub fn self_test(&self) -> Result<model::SelfTest> {
        Ok(model::self_test(&self.spare())?)
    }

    fn spare(&self) -> BiLm {
        self.inner.spare.lock().unwrap_or_else(PoisonError::into_inner).share()
    }

    pub(crate) fn carry(&self) -> Result<states::Carry> {
        Ok(states::Carry::new(self.spare())?)
    }

    /// The numbers of the start state `warm`, for [`ModelData::warm_state`], in the order given there: computed once,
    /// unless they came with the model.
    ///
    /// # Errors
    /// [`Error::Device`] when the device fails.
    pub fn warm_state(&self) -> Result<Vec<f32>> {
        Ok(self.inner.starts.warm(&self.spare())?.numbers.clone())
    }

    pub(crate) fn warm_digest(&self) -> Result<String> {
        Ok(self.inner.starts.warm(&self.spare())?.digest.clone())
    }
}

/// The start-up self-test: a vector keeps its bits in every batch only if rows of products keep theirs. What the machine
/// does is asked once for each shape of model.
fn check_products(options: &ModelOptions) -> Result<()> {
    static CHECKED: Mutex<BTreeSet<Vec<(i64, i64)>>> = Mutex::new(BTreeSet::new());
    if !CHECKED.lock().unwrap_or_else(PoisonError::into_inner).insert(model::products(options)) {
        return Ok(());
    }
    if model::steady_height(options, model::Heights::Some)?.is_none() {
        tracing::warn!(
            "on this CPU the rows of libtorch's matrix products depend on how many there are, so vectors may differ in \
             their last bits from batch to batch; `elmo doctor` says more"
        );
    }
    Ok(())
}
