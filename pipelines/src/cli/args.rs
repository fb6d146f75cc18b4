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
    embedder::{DeviceChoice, Precision, parse_devices},
    spec::SpecError,
};

use crate::{
    error::{Error, Result},
    models::{Cache, ModelSpec, Models, warn_untrained},
    stores::Stores,
};

/// A parser for one of `legal`, which help, completions and errors list.
pub(super) fn words<T>(legal: &'static [&'static str]) -> impl TypedValueParser<Value = T>
where
    T: FromStr + Clone + Send + Sync + 'static,
    T::Err: std::error::Error + Send + Sync + 'static,
{
    PossibleValuesParser::new(legal).try_map(|word| word.parse::<T>())
}

/// A whole number from 1.
pub(super) fn positive(text: &str) -> Result<usize, String> {
    match text.replace('_', "").parse::<usize>() {
        Ok(0) => Err("it must be at least 1".to_owned()),
        Ok(n) => Ok(n),
        Err(e) if *e.kind() == IntErrorKind::PosOverflow => Err("it is too large".to_owned()),
        Err(_) => Err("it must be a whole number".to_owned()),
    }
}

/// Threads of one process: more than any machine's cores, and few enough that the system still starts them all.
const MOST_THREADS: usize = 1024;

/// A number of threads.
pub(super) fn threads(text: &str) -> Result<usize, String> {
    match positive(text)? {
        n if n > MOST_THREADS => Err(format!("it must be at most {MOST_THREADS}")),
        n => Ok(n),
    }
}

/// A size with a unit.
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
        bytes.map(Self).ok_or_else(|| "it must be at least 1KB, and a number this machine can count".to_owned())
    }
}

/// Which model, by its strongest source: flags beat the environment, that beats the file.
///
/// `--model` and the pair `--options --weights` exclude each other only within one source, so that a model in
/// `elmo.toml` does not stand in the way of a pair on the command line.
#[derive(Debug, Clone)]
pub(super) struct ModelArgs {
    spec: Option<ModelSpec>,
    offline: bool,
}

/// As typed.
#[derive(Debug, Args)]
#[command(next_help_heading = "Model")]
struct ModelWords {
    /// The model: a directory, a zip or a URL of either, or the built-in name tiny
    ///
    /// A directory holds options.json and weights.hdf5 or weights.safetensors. URLs are s3://, gs://, az://, http(s)://
    /// and file://; what they name is fetched once into the cache ($ELMO_CACHE, else elmo in the user's cache
    /// directory). tiny is untrained: good for trying things out, its vectors mean nothing.
    #[arg(long, short, value_name = "MODEL", value_hint = ValueHint::AnyPath)]
    model: Option<String>,

    /// Options file of a published pair, path or URL; needs --weights
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    options: Option<String>,

    /// Weights file of a published pair, HDF5 or safetensors, path or URL; needs --options
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    weights: Option<String>,

    /// Never open a socket for the model: use what is on this machine and in the cache, or fail
    #[arg(long)]
    offline: bool,
}

impl Args for ModelArgs {
    fn augment_args(command: Command) -> Command {
        ModelWords::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        ModelWords::augment_args_for_update(command)
    }
}

impl FromArgMatches for ModelArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let words = ModelWords::from_arg_matches(matches)?;
        let rank = |id| matches.value_source(id).map_or(0, strength);
        let (model, pair) = (rank("model"), rank("options").max(rank("weights")));
        let words = match model.cmp(&pair) {
            std::cmp::Ordering::Greater => ModelWords { options: None, weights: None, ..words },
            std::cmp::Ordering::Less => ModelWords { model: None, ..words },
            std::cmp::Ordering::Equal => words,
        };
        let spec = words.spec().map_err(|(kind, message)| clap::Error::raw(kind, message + "\n"))?;
        Ok(Self { spec, offline: words.offline })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// A value of `elmo.toml` is a default to clap.
fn strength(source: ValueSource) -> u8 {
    match source {
        ValueSource::CommandLine => 3,
        ValueSource::EnvVariable => 2,
        _ => 1,
    }
}

impl ModelWords {
    fn spec(&self) -> Result<Option<ModelSpec>, (ErrorKind, String)> {
        let invalid = |e: crate::models::ModelsError| (ErrorKind::ValueValidation, e.to_string());
        match (&self.model, &self.options, &self.weights) {
            (None, None, None) => Ok(None),
            (Some(model), None, None) => model.parse().map(Some).map_err(invalid),
            (None, Some(options), Some(weights)) => {
                let options = options.parse().map_err(invalid)?;
                Ok(Some(ModelSpec::Pair { options, weights: weights.parse().map_err(invalid)? }))
            }
            (Some(_), _, _) => Err((ErrorKind::ArgumentConflict, "--model excludes --options and --weights".into())),
            (None, Some(_), None) => Err((ErrorKind::MissingRequiredArgument, "--options needs --weights too".into())),
            (None, None, Some(_)) => Err((ErrorKind::MissingRequiredArgument, "--weights needs --options too".into())),
        }
    }
}

impl ModelArgs {
    /// The model, or how to name one.
    ///
    /// # Errors
    /// [`Error::Usage`] when no model was named.
    pub(super) fn spec(&self) -> Result<ModelSpec> {
        let help = "give --model DIR, ZIP, URL or tiny (built in, untrained), or set ELMO_MODEL or model in elmo.toml";
        self.spec.clone().ok_or_else(|| Error::usage("no model was given", help))
    }

    /// The model, if one was named.
    pub(super) fn spec_if_given(&self) -> Option<&ModelSpec> {
        self.spec.as_ref()
    }

    /// Whether the network may not be used for the model.
    pub(super) fn offline(&self) -> bool {
        self.offline
    }

    /// Finds, fetches and reads the model; warns when it is untrained.
    ///
    /// # Errors
    /// As [`ModelArgs::spec`]; [`Error::Models`] when the model cannot be found, fetched or used.
    pub(super) async fn open(&self, stores: &Stores) -> Result<elmo::ModelData> {
        open(&self.spec()?, self.offline, stores).await
    }
}

/// Finds, fetches and reads a model; warns when it is untrained.
pub(super) async fn open(spec: &ModelSpec, offline: bool, stores: &Stores) -> Result<elmo::ModelData> {
    let cache = Cache::from_env();
    let data = Models { stores, cache: &cache, offline }.resolve(spec).await?;
    warn_untrained(&data);
    Ok(data)
}

/// Where and how the biLM runs. Nothing here changes a result on CPU.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Speed and devices")]
pub(super) struct EngineArgs {
    /// Devices: auto, cpu, cuda (all), or cuda:0,1
    ///
    /// auto takes every CUDA device there is, else the CPU. Vectors of different kinds of device differ by rounding.
    #[arg(long, value_name = "DEVICES", default_value = "auto")]
    device: Devices,

    /// Precision of the matrix products: f32 is exact, bf16 is faster on new GPUs and good to 2-3 digits
    #[arg(long, value_name = "PRECISION", default_value = "f32", value_parser = clap::value_parser!(Precision))]
    precision: Precision,

    /// Budget of padded tokens per batch [default: 8192 for a CPU core, 65536 for a GPU]
    ///
    /// A padded token is a place in a batch, filled or not: rows side by side times steps. More is faster up to a point
    /// and needs more memory; it never changes a vector on CPU. A batch has room for 16 rows, also above the budget.
    #[arg(long, value_name = "N", value_parser = positive)]
    batch_tokens: Option<usize>,

    /// CPU threads for the biLM [default: all cores]
    #[arg(long, value_name = "N", value_parser = threads)]
    threads: Option<usize>,

    /// Memory in MiB for token layers of words seen before; natural text finds over 80 % of its words there
    #[arg(long, value_name = "N", default_value = "256")]
    word_cache_mb: usize,
}

impl EngineArgs {
    /// Settings of an embedder.
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

    /// Puts a model on the devices.
    ///
    /// # Errors
    /// [`Error::Elmo`] when a device is not there or has no room, [`Error::Failed`] when loading panics.
    pub(super) async fn load(&self, data: elmo::ModelData) -> Result<elmo::Elmo> {
        let settings = self.settings();
        let load = tokio::task::spawn_blocking(move || elmo::Elmo::from_data(data, &settings));
        Ok(load.await.map_err(|e| Error::Failed(format!("loading the model failed: {e}")))??)
    }
}

/// The value of `--device`. A type of its own, because clap would take a `Vec` for an option given several times.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Devices(Vec<DeviceChoice>);

impl FromStr for Devices {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        parse_devices(text).map(Self)
    }
}

/// Bytes of a thread's stack, of which only what is used costs memory: a long condition of a query is a deep tree.
const STACK: usize = 64 << 20;

/// Gives the same stack to threads that others start, as Ballista does for tasks. Only before the first thread.
#[cfg(feature = "cluster")]
pub(super) fn give_stacks() {
    const SIZE: &str = "RUST_MIN_STACK";
    if std::env::var_os(SIZE).is_none() {
        // SAFETY: the process has one thread, so nobody reads the environment meanwhile.
        unsafe { std::env::set_var(SIZE, STACK.to_string()) };
    }
}

/// How long the threads of a command have to end.
const ENDING: std::time::Duration = std::time::Duration::from_millis(200);

/// A runtime for the parts of a command that wait; the biLM has threads of its own.
pub(crate) fn block_on<T>(future: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_multi_thread().thread_stack_size(STACK).enable_all().build();
    let runtime = runtime.map_err(|e| Error::Failed(format!("cannot start threads: {e}")))?;
    let outcome = runtime.block_on(future);
    #[cfg(feature = "cluster")]
    runtime.block_on(crate::cluster::release_jobs());
    // What was left in the middle removes its temporary files. A read of standard input that waits for a line cannot be
    // called off, and the process must end without it.
    runtime.shutdown_timeout(ENDING);
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
