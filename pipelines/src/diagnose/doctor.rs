//! A description of this installation for bug reports: versions, devices, threads, memory, the cache, a self-test.
//!
//! It contains no secrets: no environment variables, no host name, no user name. The home directory is shown as `~`.

use std::{env, fmt, path::Path};

use elmo::{
    BuiltIn, ModelData,
    model::{BiLm, DeviceChoice, DeviceName, Precision},
};
use serde::Serialize;

use super::{
    fastest::{self, Speed},
    sizes::Size,
};
use crate::{
    error::{Error, Result},
    memory::Memory,
    models::Cache,
    report::{bytes, count, table},
};

/// The description of an installation.
#[derive(Debug, Serialize)]
pub struct Diagnosis {
    /// Version of this program.
    pub elmo: &'static str,
    /// Operating system and processor.
    pub platform: String,
    /// Cargo features of this build.
    pub features: Vec<&'static str>,
    /// Version of libtorch.
    pub libtorch: String,
    /// Version of DataFusion, and the names of our SQL functions.
    pub sql: String,
    /// Version of librdkafka, if it is built in.
    pub librdkafka: Option<String>,
    /// Devices that libtorch can use.
    pub devices: Vec<String>,
    /// Threads that embed on the CPU, each with its own batch.
    pub threads: usize,
    /// Processors that this process may use.
    pub processors: usize,
    /// Memory of the machine; `None` except on Linux.
    pub memory: Option<Memory>,
    /// The cache of models.
    pub cache: CacheInfo,
    /// `None` when it was skipped.
    pub self_test: Option<SelfTest>,
    /// The speed of matrix products in each precision, with the shapes of size small on all devices; empty when the self-test was
    /// skipped.
    pub precisions: Vec<Speed>,
}

/// The cache directory.
#[derive(Debug, Serialize)]
pub struct CacheInfo {
    /// Its path.
    pub path: String,
    /// Whether it exists.
    pub exists: bool,
    /// Whether it can be written.
    pub writable: bool,
}

/// The result of the self-test.
#[derive(Debug, Serialize)]
pub struct SelfTest {
    /// All checks passed.
    pub passed: bool,
    /// Duration in seconds.
    pub seconds: f64,
    /// All checks.
    pub checks: Vec<SelfCheck>,
}

/// The result of one check.
#[derive(Debug, Serialize)]
pub struct SelfCheck {
    /// The property that is checked.
    pub name: String,
    /// The property holds.
    pub passed: bool,
    /// Details.
    pub found: String,
}

impl Diagnosis {
    /// Describes this installation. With `self_test`, also runs a self-test of a few seconds, and measures which precision is
    /// the fastest.
    ///
    /// # Errors
    /// [`elmo::Error`] when the self-test cannot run. A failed check is not an error.
    pub fn make(self_test: bool) -> Result<Self> {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let devices = (0..elmo::model::cuda_devices()).map(|n| format!("cuda:{n}"));
        Ok(Self {
            elmo: env!("CARGO_PKG_VERSION"),
            platform: format!("{} {}", env::consts::OS, env::consts::ARCH),
            features: features(),
            libtorch: elmo::model::libtorch_version().replace(&env::var("HOME").unwrap_or_else(|_| "~".into()), "~"),
            sql: sql(),
            librdkafka: librdkafka(),
            devices: std::iter::once("cpu".to_owned()).chain(devices).collect(),
            threads: processors,
            processors,
            memory: Memory::now(),
            cache: cache_info(Cache::from_env().dir()),
            self_test: if self_test { Some(run_self_test()?) } else { None },
            precisions: if self_test { precisions()? } else { Vec::new() },
        })
    }

    /// The self-test passed or was skipped.
    pub fn is_healthy(&self) -> bool {
        self.self_test.as_ref().is_none_or(|test| test.passed)
    }
}

/// Maximum difference of two numbers in vectors of the built-in model, between devices or between batches on a GPU.
/// They sum float32 products in another order.
const MAX_ROUNDING: f32 = 1e-4;

/// How long the products of a precision are measured.
const PRECISION_SECONDS: f64 = 0.3;

/// Compares bits on the CPU. On each GPU, compares numbers with those of the CPU.
fn run_self_test() -> Result<SelfTest> {
    let started = std::time::Instant::now();
    let device = |error: elmo::model::DeviceError| Error::from(elmo::Error::from(error));
    let books = ModelData::built_in(BuiltIn::Books)?;
    let on = |device| BiLm::new(&books.options, &books.weights, device, Precision::F32);
    let cpu = on(DeviceName::Cpu).map_err(device)?;
    let int8 = BiLm::new(&books.options, &books.weights, DeviceName::Cpu, Precision::Int8).map_err(device)?;
    let mut checks = Vec::new();
    for (precision, model) in [(Precision::F32, &cpu), (Precision::Int8, &int8)] {
        let test = elmo::model::self_test(model).map_err(device)?;
        checks.push(batches_check(DeviceName::Cpu, precision, &test));
    }
    for n in 0..elmo::model::cuda_devices() {
        let name = DeviceName::Cuda(n);
        let gpu = on(name).map_err(device)?;
        checks.push(batches_check(name, Precision::F32, &elmo::model::self_test(&gpu).map_err(device)?));
        checks.push(difference_check(name, elmo::model::compare(&cpu, &gpu).map_err(device)?));
        checks.extend(kernels_check(name));
    }
    let passed = checks.iter().all(|check| check.passed);
    Ok(SelfTest { passed, seconds: started.elapsed().as_secs_f64(), checks })
}

/// The speeds of the first kind of device that `--device auto` would use.
fn precisions() -> Result<Vec<Speed>> {
    let devices = elmo::model::resolve_devices(&[DeviceChoice::Auto]).map_err(elmo::Error::from)?;
    fastest::measure(&Size::Small.options(), &elmo::engine::lanes(&devices, None), PRECISION_SECONDS)
}

fn batches_check(device: DeviceName, precision: Precision, test: &elmo::model::SelfTest) -> SelfCheck {
    let (batches, largest) = (test.batches, test.largest_difference);
    SelfCheck {
        name: format!("{device}, {precision}: vectors do not depend on the batch"),
        passed: test.bit_equal() || (device != DeviceName::Cpu && largest < MAX_ROUNDING),
        found: match test.bit_equal() {
            true => format!("the same bits in {batches} different batches"),
            false => format!("differences up to {largest:e} in {batches} different batches"),
        },
    }
}

fn difference_check(device: DeviceName, largest: f32) -> SelfCheck {
    SelfCheck {
        name: format!("{device}: vectors equal those of the CPU except for rounding"),
        passed: largest < MAX_ROUNDING,
        found: format!("differences up to {largest:e}"),
    }
}

/// Without kernels of our own a GPU is slower, and in formats of 16 bits its cell states have 16 bits too.
/// Of the precisions that have kernels of their own; tf32 has those of f32.
fn kernels_check(device: DeviceName) -> Option<SelfCheck> {
    let all = [Precision::F32, Precision::Bf16, Precision::F16].into_iter().map(|precision| device.kernels(precision));
    let kernels: std::result::Result<(), String> = all.collect::<Option<Vec<_>>>()?.into_iter().collect();
    Some(SelfCheck {
        name: format!("{device}: elmo's own kernels"),
        passed: true,
        found: match kernels {
            Ok(()) => "compiled and in use".to_owned(),
            Err(reason) => format!("not in use, so that inference is several times slower: {reason}"),
        },
    })
}

fn features() -> Vec<&'static str> {
    let all = [
        ("aws", cfg!(feature = "aws")),
        ("azure", cfg!(feature = "azure")),
        ("gcp", cfg!(feature = "gcp")),
        ("http", cfg!(feature = "http")),
        ("kafka", cfg!(feature = "kafka")),
    ];
    all.into_iter().filter(|(_, built)| *built).map(|(name, _)| name).collect()
}

fn sql() -> String {
    let functions = elmo_udfs::functions::NAMES.join(", ");
    format!("DataFusion {} with {functions}", datafusion::DATAFUSION_VERSION)
}

#[cfg(feature = "kafka")]
fn librdkafka() -> Option<String> {
    Some(rdkafka::util::get_rdkafka_version().1)
}

#[cfg(not(feature = "kafka"))]
fn librdkafka() -> Option<String> {
    None
}

fn cache_info(dir: &Path) -> CacheInfo {
    let exists = dir.is_dir();
    // The nearest existing ancestor, in which the cache would be created.
    let existing = dir.ancestors().find(|dir| dir.is_dir());
    let writable = existing.is_some_and(|dir| tempfile::tempfile_in(dir).is_ok());
    CacheInfo { path: without_home(dir), exists, writable }
}

fn without_home(path: &Path) -> String {
    let home = env::var_os("HOME").filter(|home| !home.is_empty());
    match home.and_then(|home| path.strip_prefix(home).ok().map(Path::to_path_buf)) {
        Some(rest) => Path::new("~").join(rest).display().to_string(),
        None => path.display().to_string(),
    }
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let yes = |b: bool, yes: &'static str, no: &'static str| if b { yes } else { no };
        let memory =
            self.memory.map_or("unknown".into(), |m| format!("{}, {} free", bytes(m.total), bytes(m.available)));
        let cache = format!(
            "{} ({}, {})",
            self.cache.path,
            yes(self.cache.exists, "exists", "does not exist yet"),
            yes(self.cache.writable, "writable", "NOT writable")
        );
        let mut rows = vec![
            ("elmo", self.elmo.to_owned()),
            ("platform", self.platform.clone()),
            ("features", self.features.join(" ")),
            ("libtorch", self.libtorch.clone()),
            ("sql", self.sql.clone()),
            ("librdkafka", self.librdkafka.clone().unwrap_or_else(|| "not built in".into())),
            ("devices", self.devices.join(", ")),
            ("threads", format!("{} of {} processors", count(self.threads as u64), count(self.processors as u64))),
            ("memory", memory),
            ("cache", cache),
        ];
        match &self.self_test {
            None => rows.push(("self-test", "skipped".into())),
            Some(test) => {
                let passed = yes(test.passed, "passed", "FAILED");
                rows.push(("self-test", format!("{passed} in {:.1} s", test.seconds)));
                rows.extend(test.checks.iter().map(|check| {
                    ("", format!("{}  {}: {}", yes(check.passed, "ok  ", "FAIL"), check.name, check.found))
                }));
            }
        }
        if !self.precisions.is_empty() {
            rows.push(("fastest precision", fastest::text(&self.precisions)));
        }
        f.write_str(&table(&rows))
    }
}
