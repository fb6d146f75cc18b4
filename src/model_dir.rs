//! Models on disk: directories and pairs of files, and the built-in model.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use crate::{
    built_in::BuiltIn,
    error::{Error, Result},
    files::{read_up_to, write_all, write_file},
    fingerprint::Fingerprint,
    lm_head::{LmHeadError, LmHeadFiles},
    mix::ScalarMix,
    options::{MAX_OPTIONS_BYTES, ModelOptions, TensorSpec},
    tiny,
    weights::{self, Loaded, Tensor, Weights, safetensors::Numbers},
};
pub use crate::{error::ModelDirError, tiny::TINY_DESCRIPTION};

/// Everything that defines a model, in memory and checked.
#[derive(Debug, Clone)]
pub struct ModelData {
    /// Sizes and switches.
    pub options: ModelOptions,
    /// The tensors that the options require.
    pub weights: Weights,
    /// SHA-256 of options and weights.
    pub fingerprint: Fingerprint,
    /// The fitted scalar mix stored beside the weights, if any.
    pub mix: Option<ScalarMix>,
    /// The start state `warm` stored beside the weights, if any; otherwise it is computed on first use. `2 L (P + D)`
    /// numbers: for each layer, the lowest first, `h` forward (`P`), `h` backward (`P`), `c` forward (`D`), `c`
    /// backward (`D`).
    pub warm_state: Option<Vec<f32>>,
    /// The files of the LM head, if they are stored beside the weights.
    pub lm_head: Option<LmHeadFiles>,
    /// Name for messages: of the directory, of the options file, or `tiny`.
    pub name: String,
    /// The weights are those of [`ModelData::tiny`], which are random numbers.
    pub untrained: bool,
    /// Remarks on the files: unused datasets, converted types.
    pub notes: Vec<String>,
}

/// File format of the weights in a directory that is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightsFormat {
    /// `weights.hdf5`, the layout of bilm-tf and AllenNLP.
    Hdf5,
    /// `weights.safetensors`.
    Safetensors,
    /// `weights.safetensors` with float16 numbers, for models of [`ModelData::to_half`].
    HalfSafetensors,
}

impl WeightsFormat {
    /// File name in a model directory.
    pub const fn file_name(self) -> &'static str {
        match self {
            Self::Hdf5 => "weights.hdf5",
            Self::Safetensors | Self::HalfSafetensors => "weights.safetensors",
        }
    }

    fn other(self) -> Self {
        match self {
            Self::Hdf5 => Self::Safetensors,
            Self::Safetensors | Self::HalfSafetensors => Self::Hdf5,
        }
    }
}

impl ModelData {
    /// Opens a model directory: `options.json`, the weights and, if they exist, `mix.json`, `warm_state.safetensors`
    /// and the LM head. Weights and LM head of different steps of a training run are read again for a few seconds, in
    /// which the run replaces the rest, and then refused.
    ///
    /// Weights are `weights.safetensors`, else `weights.hdf5` (a directory with both holds the same model twice, and
    /// safetensors is the simpler format). The names of published models work too: exactly one `*_options.json`, and
    /// exactly one of `*_weights.hdf5`, `*_weights.safetensors` and `model.hdf5`.
    ///
    /// # Errors
    /// [`Error::ModelDir`] when a file is missing or belongs to another model, when several files match, or when the
    /// mix is invalid; [`Error::LmHead`] when the LM head belongs to other weights; [`Error::Options`] or [`Error::Weights`] when one of these files is invalid; [`Error::Io`] when
    /// the operating system fails.
    pub fn open(dir: &Path) -> Result<Self> {
        let deadline = Instant::now() + SETTLING;
        loop {
            match Self::open_now(dir) {
                Err(Error::LmHead(LmHeadError::OtherModel { .. })) if Instant::now() < deadline && is_fresh(dir) => {
                    thread::sleep(POLL);
                }
                outcome => return outcome,
            }
        }
    }

    fn open_now(dir: &Path) -> Result<Self> {
        let files = file_names(dir)?;
        let options = find(dir, &files, &OPTIONS)?;
        let weights = find(dir, &files, &WEIGHTS)?;
        let mut model = Self::open_pair(&options, &weights)?;
        model.name = name_of(dir);
        model.lm_head = LmHeadFiles::beside(dir, &model.fingerprint)?;
        model.mix = mix_of(dir, &model.options)?;
        if files.iter().any(|f| f == WARM_STATE) {
            let path = dir.join(WARM_STATE);
            model.warm_state =
                Some(warm_state(weights::safetensors::read_file(&path, &model.warm_plan())?, &path, &model)?);
        }
        Ok(model)
    }

    /// Reads a built-in model.
    ///
    /// # Errors
    /// None, unless the program was built from damaged files: those of [`ModelData::open`].
    pub fn built_in(model: BuiltIn) -> Result<Self> {
        if model == BuiltIn::Tiny {
            return Ok(Self::tiny());
        }
        let file = |name: &str| (Path::new(model.name()).join(name), model.file(name).unwrap_or_default());
        let (path, bytes) = file(OPTIONS_FILE);
        let options = ModelOptions::from_json(bytes, &path.display().to_string())?;
        let (path, bytes) = file(WeightsFormat::Safetensors.file_name());
        let loaded = weights::safetensors::read(bytes, &path, &options.weight_plan())?;
        let mut data = Self::from_loaded(options, loaded, model.name().to_owned());
        let (path, bytes) = file(WARM_STATE);
        let loaded = weights::safetensors::read(bytes, &path, &data.warm_plan())?;
        data.warm_state = Some(warm_state(loaded, &path, &data)?);
        data.lm_head = LmHeadFiles::built_in(model);
        Ok(data)
    }

    /// Opens a pair of options and weights.
    ///
    /// # Errors
    /// [`Error::Options`] or [`Error::Weights`] when a file is invalid, or the weights belong to another model than the
    /// options; [`Error::Io`] or [`WeightsError::Io`](crate::weights::WeightsError::Io) in [`Error::Weights`] when one
    /// cannot be read.
    pub fn open_pair(options: &Path, weights: &Path) -> Result<Self> {
        let parsed = ModelOptions::from_json(&read_up_to(options, MAX_OPTIONS_BYTES)?, &options.display().to_string())?;
        let loaded = weights::load(weights, &parsed.weight_plan())?;
        loaded.refuse_parts_of_another_model(weights)?;
        Ok(Self::from_loaded(parsed, loaded, name_of(options)))
    }

    /// Creates a model from options and weights, as a trainer does.
    ///
    /// # Errors
    /// [`Error::Weights`], with `name`, when tensors are missing, have another shape or are not finite.
    pub fn new(options: ModelOptions, weights: Weights, name: &str) -> Result<Self> {
        weights.check(&options.weight_plan(), Path::new(name))?;
        Ok(Self::from_loaded(options, Loaded { weights, ..Loaded::default() }, name.to_owned()))
    }

    /// A model with random weights, for measurements: speed does not depend on the weights. Those of a layer are uniform numbers of
    /// variance 1 over its inputs; each tensor has a generator that its name seeds.
    ///
    /// # Errors
    /// As [`ModelData::new`]; none with options that are valid.
    pub fn random(options: ModelOptions, name: &str) -> Result<Self> {
        let mut weights = Weights::default();
        for spec in options.weight_plan() {
            let inputs: usize = spec.shape[..spec.shape.len() - 1].iter().product::<usize>().max(1);
            let data = uniform(&spec.name, spec.len(), (3.0 / inputs as f32).sqrt());
            weights.insert(spec.name, Tensor { shape: spec.shape, data });
        }
        Self::new(options, weights, name)
    }

    fn from_loaded(options: ModelOptions, loaded: Loaded, name: String) -> Self {
        let fingerprint = Fingerprint::of(&options, &loaded.weights);
        let untrained = fingerprint.as_str() == tiny::FINGERPRINT;
        Self {
            notes: loaded.notes(),
            options,
            weights: loaded.weights,
            fingerprint,
            mix: None,
            warm_state: None,
            lm_head: None,
            name,
            untrained,
        }
    }

    /// The built-in model; see [`TINY_DESCRIPTION`]. The same bits on every machine.
    pub fn tiny() -> Self {
        let options = tiny::options();
        let weights = tiny::weights(&options);
        let loaded = Loaded { weights, ..Loaded::default() };
        Self { untrained: true, ..Self::from_loaded(options, loaded, "tiny".to_owned()) }
    }

    /// The model with every weight rounded to float16, which makes it another model with another fingerprint. The warm
    /// state stays: it is a constant of a model, however it was computed.
    ///
    /// # Errors
    /// [`Error::Weights`] when a weight is above the largest number of float16, 65,504.
    pub fn to_half(&self) -> Result<Self> {
        let weights = self.weights.to_half(Path::new(&self.name))?;
        let rounded =
            Self::from_loaded(self.options.clone(), Loaded { weights, ..Loaded::default() }, self.name.clone());
        let (mix, warm_state, lm_head) = (self.mix.clone(), self.warm_state.clone(), self.lm_head.clone());
        Ok(Self { mix, warm_state, lm_head, ..rounded })
    }

    /// Writes a model directory: `options.json`, the weights and, if there are any, the mix and the warm state. `dir`
    /// is created if it does not exist. Each file is written atomically.
    ///
    /// # Errors
    /// [`ModelDirError::Occupied`] when `dir` holds weights in the other format, [`Error::Io`] when the operating
    /// system fails, [`Error::Weights`] when a tensor's shape and number of values disagree.
    pub fn save(&self, dir: &Path, format: WeightsFormat) -> Result<()> {
        fs::create_dir_all(dir).map_err(|e| Error::io(dir, e))?;
        let other = format.other().file_name();
        if dir.join(other).exists() {
            return Err(ModelDirError::Occupied { dir: dir.to_owned(), file: other }.into());
        }
        self.write_weights(&dir.join(format.file_name()), format)?;
        if let Some(mix) = &self.mix {
            let text = serde_json::to_vec_pretty(mix).map_err(|e| Error::io(&dir.join(MIX), e.into()))?;
            let path = dir.join(MIX);
            write_file(&path, |out| write_all(out, &path, &text))?;
        }
        if let Some(numbers) = &self.warm_state {
            let state = Tensor { shape: vec![numbers.len()], data: numbers.clone() };
            let mut weights = Weights::default();
            weights.insert(WARM_STATE_TENSOR.to_owned(), state);
            let path = dir.join(WARM_STATE);
            write_file(&path, |out| weights::safetensors::write_to(out, &path, &weights, &self.header()))?;
        }
        // Last, so that an incomplete copy is not a model: a directory without options is none.
        self.write_options(&dir.join(OPTIONS_FILE))
    }

    /// Writes the pair that AllenNLP and bilm-tf load: `PREFIX_options.json` and
    /// `PREFIX_weights.hdf5`. Returns both paths.
    ///
    /// # Errors
    /// [`Error::Io`] when the system fails, [`Error::Weights`] when a tensor's shape and number of values disagree.
    pub fn save_pair(&self, dir: &Path, prefix: &str) -> Result<(PathBuf, PathBuf)> {
        fs::create_dir_all(dir).map_err(|e| Error::io(dir, e))?;
        let options = dir.join(format!("{prefix}_options.json"));
        let weights = dir.join(format!("{prefix}_weights.hdf5"));
        self.write_weights(&weights, WeightsFormat::Hdf5)?;
        self.write_options(&options)?;
        Ok((options, weights))
    }

    fn write_options(&self, path: &Path) -> Result<()> {
        write_file(path, |out| write_all(out, path, self.options.to_json_pretty().as_bytes()))
    }

    fn write_weights(&self, path: &Path, format: WeightsFormat) -> Result<()> {
        write_file(path, |out| match format {
            WeightsFormat::Hdf5 => weights::hdf5::write_to(out, path, &self.weights),
            WeightsFormat::Safetensors => weights::safetensors::write_to(out, path, &self.weights, &self.header()),
            WeightsFormat::HalfSafetensors => {
                weights::safetensors::write_as(out, path, &self.weights, &self.header(), Numbers::F16)
            }
        })
    }

    /// The tensors of [`WARM_STATE`].
    fn warm_plan(&self) -> [TensorSpec; 1] {
        let lstm = &self.options.lstm;
        let numbers = 2 * lstm.n_layers * (lstm.dim + lstm.projection_dim);
        [TensorSpec { name: WARM_STATE_TENSOR.to_owned(), shape: vec![numbers] }]
    }

    /// Metadata of a safetensors file, for people who open it with other tools. Only that of `warm_state.safetensors`
    /// is read.
    fn header(&self) -> BTreeMap<String, String> {
        let mut header = BTreeMap::from([("elmo.fingerprint".to_owned(), self.fingerprint.to_string())]);
        if self.untrained {
            header.insert("elmo.untrained".to_owned(), "true".to_owned());
        }
        header
    }
}

/// How long weights and LM head of different steps are taken for a model that is being replaced.
const SETTLING: Duration = Duration::from_secs(3);
/// A run has replaced no file of a folder that has not changed for so long, whatever the clocks of its disk and this machine say.
const FRESH: Duration = Duration::from_secs(60);
/// Between two readings of it.
const POLL: Duration = Duration::from_millis(50);

/// Sizes and switches.
pub const OPTIONS_FILE: &str = "options.json";
/// What a model is, for people.
pub const DESCRIPTION: &str = "MODEL.md";
/// State `warm`, as [`ModelData::warm_state`] has it.
pub const WARM_STATE: &str = "warm_state.safetensors";
const MIX: &str = "mix.json";
/// The only tensor of [`WARM_STATE`]: layer by layer `h` before `c`, forward before backward.
const WARM_STATE_TENSOR: &str = "warm_state";

/// Whether files of a folder may be being replaced. A rename changes the time of its folder.
fn is_fresh(dir: &Path) -> bool {
    let age = fs::metadata(dir).and_then(|meta| meta.modified()).ok().and_then(|time| time.elapsed().ok());
    age.is_none_or(|age| age < FRESH)
}

/// How one part of a model is found among the names of a directory.
struct Part {
    what: &'static str,
    wanted: &'static str,
    /// Names that are tried in this order.
    names: &'static [&'static str],
    /// Names of published models, of which exactly one may exist.
    published: fn(&str) -> bool,
}

const OPTIONS: Part = Part {
    what: "options",
    wanted: "options.json (or one *_options.json)",
    names: &[OPTIONS_FILE],
    published: |name| name.ends_with("_options.json"),
};

const WEIGHTS: Part = Part {
    what: "weights",
    wanted: "weights.safetensors or weights.hdf5 (or one *_weights.hdf5 or model.hdf5)",
    names: &["weights.safetensors", "weights.hdf5"],
    published: |name| name.ends_with("_weights.hdf5") || name.ends_with("_weights.safetensors") || name == "model.hdf5",
};

fn file_names(dir: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(|e| Error::io(dir, e))? {
        let entry = entry.map_err(|e| Error::io(dir, e))?;
        names.push(entry.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

fn find(dir: &Path, files: &[String], part: &Part) -> Result<PathBuf, ModelDirError> {
    let ours = part.names.iter().find(|name| files.iter().any(|f| f == *name));
    if let Some(name) = ours {
        return Ok(dir.join(name));
    }
    let candidates: Vec<&str> = files.iter().map(String::as_str).filter(|f| (part.published)(f)).collect();
    match candidates.as_slice() {
        [one] => Ok(dir.join(one)),
        [] => Err(ModelDirError::Missing { dir: dir.to_owned(), wanted: part.wanted, found: listing(files) }),
        _ => {
            Err(ModelDirError::Ambiguous { dir: dir.to_owned(), wanted: part.what, candidates: candidates.join(", ") })
        }
    }
}

fn listing(files: &[String]) -> String {
    const SHOWN: usize = 10;
    match files {
        [] => "nothing".to_owned(),
        few if few.len() <= SHOWN => few.join(", "),
        many => format!("{} and {} more", many[..SHOWN].join(", "), many.len() - SHOWN),
    }
}

fn name_of(path: &Path) -> String {
    let resolved = path.canonicalize();
    let path = resolved.as_deref().unwrap_or(path);
    path.file_stem().map_or_else(|| path.display().to_string(), |n| n.to_string_lossy().into_owned())
}

/// The scalar mix in a model directory, if there is one.
///
/// # Errors
/// [`Error::ModelDir`] when it is invalid, or for another number of layers than that of the model; [`Error::Io`] when it
/// cannot be read.
pub fn mix_of(dir: &Path, options: &ModelOptions) -> Result<Option<ScalarMix>> {
    let path = dir.join(MIX);
    path.symlink_metadata().is_ok().then(|| read_mix(&path, options)).transpose()
}

fn read_mix(path: &Path, options: &ModelOptions) -> Result<ScalarMix> {
    let bytes = read_up_to(path, MAX_OPTIONS_BYTES)?;
    let mix = ScalarMix::from_json(&bytes, &path.display().to_string()).map_err(ModelDirError::InvalidMix)?;
    let (expected, found) = (options.n_layers_out(), mix.scalars.len());
    if expected == found { Ok(mix) } else { Err(ModelDirError::Mix { path: path.to_owned(), expected, found }.into()) }
}

/// Uniform numbers in `[-bound, bound)` by a linear congruential generator.
fn uniform(seed: &str, n: usize, bound: f32) -> Vec<f32> {
    // FNV-1a.
    let hashed = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    let mut state = seed.bytes().fold(0xcbf2_9ce4_8422_2325, hashed);
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * bound
    };
    (0..n).map(|_| next()).collect()
}

/// The warm state of `model`, whose fingerprint is in the header.
fn warm_state(loaded: Loaded, path: &Path, model: &ModelData) -> Result<Vec<f32>> {
    let found = loaded.metadata.get("elmo.fingerprint").cloned().unwrap_or_else(|| "none".to_owned());
    if found != model.fingerprint.as_str() {
        let expected = model.fingerprint.to_string();
        return Err(ModelDirError::WarmState { path: path.to_owned(), expected, found }.into());
    }
    let state = loaded.weights.get(WARM_STATE_TENSOR).map(|tensor| tensor.data.clone());
    Ok(state.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used)]
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn books_has_a_vocabulary_and_a_warm_state_of_its_own() {
        let model = ModelData::built_in(BuiltIn::Books).unwrap();
        assert!(!model.untrained && model.warm_state.is_some());
        let head = model.lm_head.unwrap().read(model.options.lstm.projection_dim).unwrap();
        assert_eq!(head.words().len(), 10_000);
        assert_eq!(&head.words()[..3], ["<S>", "</S>", "<UNK>"]);
    }

    #[test]
    fn names_are_those_of_the_models() {
        for model in BuiltIn::ALL {
            assert_eq!(BuiltIn::named(model.name()), Some(model));
            assert_eq!(ModelData::built_in(model).unwrap().name, model.name());
        }
        assert_eq!(BuiltIn::named("other"), None);
    }

    #[test]
    fn tiny_is_what_the_python_script_computes() {
        // tests/reference/make_tiny.py prints both numbers.
        let tiny = ModelData::tiny();
        assert_eq!(tiny.weights.parameters(), 228_060);
        assert_eq!(tiny.fingerprint.as_str(), tiny::FINGERPRINT);
        assert!(tiny.untrained);
    }

    #[test]
    fn a_saved_model_is_the_same_model() {
        let tiny = ModelData::tiny();
        for format in [WeightsFormat::Hdf5, WeightsFormat::Safetensors] {
            let dir = tempfile::tempdir().unwrap();
            tiny.save(dir.path(), format).unwrap();
            let back = ModelData::open(dir.path()).unwrap();
            assert_eq!(back.fingerprint, tiny.fingerprint);
            assert!(back.weights == tiny.weights, "tensors differ in {format:?}");
            assert!(back.untrained && back.notes.is_empty());
            let again = tiny.save(dir.path(), format.other()).unwrap_err().to_string();
            assert!(again.contains(format.file_name()), "{again}");
        }
    }

    #[test]
    fn published_names_are_found_when_there_is_one_of_each() {
        let dir = tempfile::tempdir().unwrap();
        let tiny = ModelData::tiny();
        let (options, weights) = tiny.save_pair(dir.path(), "elmo_tiny").unwrap();
        assert_eq!(ModelData::open(dir.path()).unwrap().fingerprint, tiny.fingerprint);
        assert_eq!(ModelData::open_pair(&options, &weights).unwrap().name, "elmo_tiny_options");
        fs::copy(&weights, dir.path().join("model.hdf5")).unwrap();
        let error = ModelData::open(dir.path()).unwrap_err().to_string();
        assert!(error.contains("elmo_tiny_weights.hdf5, model.hdf5 could all be the weights"), "{error}");
    }

    #[test]
    fn a_directory_without_a_model_says_what_it_holds() {
        let dir = tempfile::tempdir().unwrap();
        let empty = ModelData::open(dir.path()).unwrap_err().to_string();
        assert!(empty.contains("no options.json") && empty.contains("it holds nothing"), "{empty}");
        fs::write(dir.path().join("options.json"), tiny::options().to_json_pretty()).unwrap();
        fs::write(dir.path().join("weights.th"), b"x").unwrap();
        let other = ModelData::open(dir.path()).unwrap_err().to_string();
        assert!(other.contains("it holds options.json, weights.th"), "{other}");
        let missing = ModelData::open(&dir.path().join("nowhere")).unwrap_err().to_string();
        assert!(missing.contains("nowhere: No such file"), "{missing}");
    }

    #[test]
    fn a_mix_for_another_number_of_layers_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let mut tiny = ModelData::tiny();
        tiny.mix = Some(ScalarMix { scalars: vec![0.5, -1.0, 2.0], gamma: 1.5, layer_norm: false });
        tiny.save(dir.path(), WeightsFormat::Safetensors).unwrap();
        assert_eq!(ModelData::open(dir.path()).unwrap().mix, tiny.mix);
        fs::write(dir.path().join(MIX), br#"{"scalars": [0, 1]}"#).unwrap();
        let error = ModelData::open(dir.path()).unwrap_err().to_string();
        assert!(error.contains("2 scalars, but the model has 3 layers"), "{error}");
    }

    /// The file belongs to the model, so it is the model that is broken, not the command line.
    #[test]
    fn a_broken_mix_is_an_error_of_the_model() {
        let dir = tempfile::tempdir().unwrap();
        ModelData::tiny().save(dir.path(), WeightsFormat::Safetensors).unwrap();
        for json in ["{", r#"{"scalars": []}"#, r#"{"scalars": [1, 2, 3], "gamma": 1e7}"#, r#"{"scalars": [1]}"#] {
            fs::write(dir.path().join(MIX), json).unwrap();
            let error = ModelData::open(dir.path()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Model, "{json}: {error}");
            assert!(error.to_string().contains(MIX), "{error}");
        }
    }
}
