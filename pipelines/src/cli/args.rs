//! Options that several commands share.

use std::{
    fmt,
    num::{IntErrorKind, NonZeroUsize},
    str::FromStr,
};

use clap::{
    ArgMatches, Args, Command, FromArgMatches, ValueHint,
    builder::{PossibleValuesParser, TypedValueParser},
    error::ErrorKind,
    parser::ValueSource,
};
use elmo::{
    EmbedderSettings,
    engine::{DeviceChoice, Precision, parse_devices},
    spec::SpecError,
};

use crate::{
    error::{Error, Result},
    models::{Cache, ModelSpec, Models, warn_untrained},
    stores::Stores,
};

/// A parser for one of the values `legal`, which help, completions and errors list.
pub(super) fn one_of<T>(legal: &'static [&'static str]) -> impl TypedValueParser<Value = T>
where
    T: FromStr + Clone + Send + Sync + 'static,
    T::Err: std::error::Error + Send + Sync + 'static,
{
    PossibleValuesParser::new(legal).try_map(|value| value.parse::<T>())
}

/// A share.
pub(super) fn fraction(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|number| (0.0..1.0).contains(number));
    number.ok_or_else(|| "it must be a number from 0 to below 1".to_owned())
}

/// Parses a positive integer.
pub(super) fn positive(text: &str) -> Result<usize, String> {
    match text.replace('_', "").parse::<usize>() {
        Ok(0) => Err("it must be at least 1".to_owned()),
        Ok(n) => Ok(n),
        Err(e) if *e.kind() == IntErrorKind::PosOverflow => Err("it is too large".to_owned()),
        Err(_) => Err("it must be a whole number".to_owned()),
    }
}

/// Maximum number of threads: above the cores of any machine, and still within the limits of the system.
const MAX_THREADS: usize = 1024;

/// Parses a number of threads.
pub(super) fn threads(text: &str) -> Result<usize, String> {
    match positive(text)? {
        n if n > MAX_THREADS => Err(format!("it must be at most {MAX_THREADS}")),
        n => Ok(n),
    }
}

/// A size in bytes, parsed from a number and a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Bytes(pub(super) NonZeroUsize);

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim().replace('_', "");
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let unit = match text[digits..].trim().to_ascii_uppercase().as_str() {
            "KB" | "K" | "KIB" => 1 << 10,
            "MB" | "M" | "MIB" => 1 << 20,
            "GB" | "G" | "GIB" => 1 << 30,
            _ => return Err("it must be a number and a unit: KB, MB or GB".to_owned()),
        };
        let number = text[..digits].parse::<usize>().ok();
        let bytes = number.and_then(|number| number.checked_mul(unit)).and_then(NonZeroUsize::new);
        bytes.map(Self).ok_or_else(|| "it must be at least 1KB and fit the address space".to_owned())
    }
}

/// The model, taken from the source with the highest precedence: command line, environment, file.
///
/// `--model` and the pair `--options --weights` conflict only within one source, so that a pair on the command line
/// overrides a model in `elmo.toml`.
#[derive(Debug, Clone)]
pub(super) struct ModelArgs {
    spec: Option<ModelSpec>,
    offline: bool,
}

/// The options of [`ModelArgs`] for clap.
#[derive(Debug, Args)]
#[command(next_help_heading = "Model")]
struct ModelOptions {
    /// The model: a directory, a zip, a URL of either, or a built-in model [default: books]
    ///
    /// A directory contains options.json and weights.hdf5 or weights.safetensors. URLs are s3://, gs://, az://,
    /// http(s):// and file://; they are fetched once into the cache ($ELMO_CACHE, by default elmo in the user's cache
    /// directory). The built-in model books is small and was trained on English novels. The built-in model tiny is
    /// untrained: it is for tests, and its vectors have no meaning.
    #[arg(long, short, value_name = "MODEL", value_hint = ValueHint::AnyPath)]
    model: Option<String>,

    /// Options file of a published pair, a path or URL; requires --weights
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    options: Option<String>,

    /// Weights file of a published pair, a path or URL of HDF5 or safetensors; requires --options
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    weights: Option<String>,

    /// Do not use the network for the model: use local files and the cache, or fail
    #[arg(long)]
    offline: bool,
}

impl Args for ModelArgs {
    fn augment_args(command: Command) -> Command {
        ModelOptions::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        ModelOptions::augment_args_for_update(command)
    }
}

impl FromArgMatches for ModelArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let options = ModelOptions::from_arg_matches(matches)?;
        let rank = |id| matches.value_source(id).map_or(0, precedence);
        let (model, pair) = (rank("model"), rank("options").max(rank("weights")));
        let options = match model.cmp(&pair) {
            std::cmp::Ordering::Greater => ModelOptions { options: None, weights: None, ..options },
            std::cmp::Ordering::Less => ModelOptions { model: None, ..options },
            std::cmp::Ordering::Equal => options,
        };
        let spec = options.spec().map_err(|(kind, message)| clap::Error::raw(kind, message + "\n"))?;
        Ok(Self { spec, offline: options.offline })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// The precedence of a source, 0 for none. Clap takes values of `elmo.toml` for defaults.
pub(super) fn precedence(source: ValueSource) -> u8 {
    match source {
        ValueSource::CommandLine => 3,
        ValueSource::EnvVariable => 2,
        _ => 1,
    }
}

impl ModelOptions {
    fn spec(&self) -> Result<Option<ModelSpec>, (ErrorKind, String)> {
        let invalid = |e: crate::models::ModelsError| (ErrorKind::ValueValidation, e.to_string());
        match (&self.model, &self.options, &self.weights) {
            (None, None, None) => Ok(None),
            (Some(model), None, None) => model.parse().map(Some).map_err(invalid),
            (None, Some(options), Some(weights)) => {
                let options = options.parse().map_err(invalid)?;
                Ok(Some(ModelSpec::Pair { options, weights: weights.parse().map_err(invalid)? }))
            }
            (Some(_), _, _) => {
                Err((ErrorKind::ArgumentConflict, "--model cannot be used with --options and --weights".into()))
            }
            (None, Some(_), None) => Err((ErrorKind::MissingRequiredArgument, "--options requires --weights".into())),
            (None, None, Some(_)) => Err((ErrorKind::MissingRequiredArgument, "--weights requires --options".into())),
        }
    }
}

impl ModelArgs {
    /// The model that was given, or else the default.
    pub(super) fn spec(&self) -> ModelSpec {
        self.spec.clone().unwrap_or_default()
    }

    /// As [`ModelArgs::spec`], for a job that writes vectors: the default is logged, so that a lost setting is noticed.
    pub(super) fn spec_of_job(&self) -> ModelSpec {
        if self.spec.is_none() {
            let model = ModelSpec::default();
            tracing::info!(target: crate::report::TARGET, %model, "no model was named: the built-in one is used");
        }
        self.spec()
    }

    /// The model, if one was given.
    pub(super) fn spec_if_given(&self) -> Option<&ModelSpec> {
        self.spec.as_ref()
    }

    /// Whether `--offline` was given.
    pub(super) fn offline(&self) -> bool {
        self.offline
    }

    /// Finds, fetches and reads the model. Warns if it is untrained.
    ///
    /// # Errors
    /// [`ModelsError`](crate::models::ModelsError) when the model cannot be found, fetched or
    /// used.
    pub(super) async fn open(&self, stores: &Stores) -> Result<elmo::ModelData> {
        let data = open(&self.spec(), self.offline, stores).await?;
        if data.untrained {
            warn_untrained();
        }
        Ok(data)
    }
}

/// Finds, fetches and reads a model, for a job that warns when everything is checked.
pub(super) async fn open(spec: &ModelSpec, offline: bool, stores: &Stores) -> Result<elmo::ModelData> {
    let cache = Cache::from_env();
    Ok(Models { stores, cache: &cache, offline }.resolve(spec).await?)
}

/// How the biLM runs. Except for the precision, none of these options changes a vector on the CPU.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Speed and devices")]
pub(super) struct EngineArgs {
    /// Devices: auto, cpu, cuda (all CUDA devices), or cuda:0,1
    ///
    /// auto uses all CUDA devices, or the CPU if there are none. CPU and CUDA vectors differ by rounding.
    #[arg(long, value_name = "DEVICES", default_value = "auto")]
    device: Devices,

    /// Precision of matrix products: f32; tf32, bf16 or f16, for GPUs, good to 2-3 digits; or int8, for CPUs, good to 2 digits
    ///
    /// tf32, bf16 and f16 are faster on recent GPUs, bf16 also on CPUs with instructions for it, and int8 is about three times
    /// as fast as f32 on CPUs with AVX-512 VNNI. `elmo bench --drift` measures how far their vectors are from those in f32.
    /// Outputs name the precision. docs/precision.md says what each is good enough for.
    #[arg(long, value_name = "PRECISION", default_value = "f32", value_parser = clap::value_parser!(Precision))]
    precision: Precision,

    /// Maximum padded tokens of a batch [default: 8192 per CPU core, 65536 per GPU]
    ///
    /// The padded tokens of a batch are its rows times its time steps. Larger batches are faster up to a point and use
    /// more memory. On the CPU they never change a vector. A batch always has room for 16 rows.
    #[arg(long, value_name = "N", value_parser = positive)]
    batch_tokens: Option<usize>,

    /// Number of CPU threads for the biLM [default: all cores]
    #[arg(long, value_name = "N", value_parser = threads)]
    threads: Option<usize>,

    /// Size of the word cache in MiB
    ///
    /// It holds the token layer of words seen before. In natural text, over 80 % of the words are found there. On a GPU, each of its three
    /// threads has a cache of this size in the memory of the device.
    #[arg(long, value_name = "N", default_value = "256", hide_short_help = true)]
    word_cache_mb: usize,
}

impl EngineArgs {
    /// The settings of the embedder.
    pub(super) fn settings(&self) -> EmbedderSettings {
        EmbedderSettings {
            devices: self.device.0.clone(),
            threads: self.threads,
            batch_tokens: self.batch_tokens,
            cache_bytes: self.word_cache_mb.saturating_mul(1 << 20),
            precision: self.precision,
            ..EmbedderSettings::default()
        }
    }

    /// Loads a model onto the devices.
    ///
    /// # Errors
    /// [`elmo::Error`] when a device does not exist or has too little memory, [`Error::Failed`] when loading panics.
    pub(super) async fn load(&self, data: elmo::ModelData) -> Result<elmo::Elmo> {
        let settings = self.settings();
        let load = tokio::task::spawn_blocking(move || elmo::Elmo::from_data(data, &settings));
        Ok(load.await.map_err(|e| Error::Failed(format!("loading the model failed: {e}")))??)
    }
}

/// The value of `--device`. A newtype, because clap treats a `Vec` as an option that may be repeated.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Devices(Vec<DeviceChoice>);

impl FromStr for Devices {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        parse_devices(text).map(Self)
    }
}

/// Stack size of threads in bytes. A long condition of a query is a deep tree. Unused stack takes no memory.
const STACK: usize = 64 << 20;

/// Sets the same stack size for threads that libraries start, such as those of gRPC. Must be called before the
/// first thread is started.
#[cfg(feature = "cluster")]
pub(super) fn set_stack_size() {
    const VARIABLE: &str = "RUST_MIN_STACK";
    if std::env::var_os(VARIABLE).is_none() {
        // SAFETY: the process has one thread, so no other thread reads the environment at the same time.
        unsafe { std::env::set_var(VARIABLE, STACK.to_string()) };
    }
}

/// How long a command waits for its threads at the end.
const SHUTDOWN_TIMEOUT: std::time::Duration = std::time::Duration::from_millis(200);

/// Runs the asynchronous part of a command. The biLM has threads of its own.
pub(crate) fn block_on<T>(future: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_multi_thread().thread_stack_size(STACK).enable_all().build();
    let runtime = runtime.map_err(|e| Error::Failed(format!("cannot start threads: {e}")))?;
    let outcome = runtime.block_on(future);
    // Cancelled tasks remove their temporary files. A blocking read of standard input cannot be cancelled, so the
    // process must end without waiting for it.
    runtime.shutdown_timeout(SHUTDOWN_TIMEOUT);
    outcome
}

impl fmt::Display for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        let bytes = |text: &str| text.parse::<Bytes>().map(|bytes| bytes.0.get()).ok();
        assert_eq!(bytes("512MB"), Some(512 << 20));
        assert_eq!(bytes("2 gib"), Some(2 << 30));
        assert_eq!(bytes("1_000K"), Some(1000 << 10));
        for wrong in ["", "12", "MB", "-1MB", "0GB", "1TB", "99999999999999999999GB", "18014398509481984KB"] {
            assert_eq!(bytes(wrong), None, "{wrong}");
        }
    }
}
