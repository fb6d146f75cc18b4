//! HDF5 in the layout of bilm-tf: one dataset per tensor, found by its path.
//!
//! Files are read with `hdf5-pure`, which contains no C and rejects external storage, virtual datasets and all links
//! but hard ones; each of these could make a model file read other local files into tensors. In addition a dataset is
//! compared with the plan before its values are read, and `BoundedSource` limits the work that the structure of a file
//! can cause.
//!
//! A model with one layer uses the same names as the others, with `MultiRNNCell/Cell0`. bilm-tf omits that level when
//! it dumps such a model, but its own readers do not find the tensors then, so these names are not accepted.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File as StdFile,
    io::{Cursor, Read, Seek, Write},
    path::Path,
};

use half::f16;
use hdf5_pure::{
    Dataset, Datatype, DatatypeByteOrder, Error as H5Error, File, FileBuilder, FloatingPointLayout, FormatError,
    GroupBuilder, Layout, LibVer,
};

use super::{
    bounded_source::BoundedSource,
    error::{Problem, WeightsError, What},
    file::{broken, io, open},
    links::{LinkScan, SCANNED},
    tensors::{Loaded, Tensor, Weights, check_size, finite, refuse},
};
use crate::{file_kind::FileKind, messages::printable, options::TensorSpec};

/// Supported filters: gzip, shuffle, Fletcher-32 and LZF. All of them are lossless.
const FILTERS: [u16; 4] = [1, 2, 3, 32000];
/// Maximum number of chunks of one dataset.
const MAX_CHUNKS: u64 = 1 << 16;

const BINARY16: FloatingPointLayout = FloatingPointLayout {
    bit_offset: 0,
    bit_precision: 16,
    exponent_location: 10,
    exponent_size: 5,
    mantissa_location: 0,
    mantissa_size: 10,
    exponent_bias: 15,
};

/// Reads the tensors of `plan` from the bytes of a file; `path` names it in errors.
///
/// Datasets may be float32, float16 (converted exactly) or float64 (rounded to the nearest float32; values out of its
/// range are errors), little or big endian, contiguous, compact or chunked, with gzip, shuffle, Fletcher-32 or LZF.
/// Datasets that are not in the plan are listed and not read.
///
/// # Errors
/// All problems with the tensors of the plan, in one error and by full name; the first value that is not finite.
pub fn read(bytes: &[u8], path: &Path, plan: &[TensorSpec]) -> Result<Loaded, WeightsError> {
    let scan = || LinkScan::new(&bytes[..bytes.len().min(SCANNED)]);
    read_from(Cursor::new(bytes.to_vec()), path, plan, &scan)
}

/// As [`read`], from a file that is not read into memory as a whole.
///
/// # Errors
/// As [`read`], and when the operating system fails.
pub fn read_file(path: &Path, plan: &[TensorSpec]) -> Result<Loaded, WeightsError> {
    // The scan only improves error messages, so a failure to read the file again is ignored.
    let scan = || LinkScan::new(&start_of(path).unwrap_or_default());
    read_from(open(path)?, path, plan, &scan)
}

fn start_of(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    StdFile::open(path)?.take(SCANNED as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn read_from<R: Read + Seek + Send + 'static>(
    file: R,
    path: &Path,
    plan: &[TensorSpec],
    scan: &dyn Fn() -> LinkScan,
) -> Result<Loaded, WeightsError> {
    let wrong = |e: &dyn std::fmt::Display| broken(path, FileKind::Hdf5, e);
    let source = BoundedSource::new(file).map_err(|e| wrong(&e))?;
    let file = File::from_source(source).map_err(|e| match e {
        H5Error::Io(e) => io(path, e),
        e => wrong(&e),
    })?;
    if file.superblock().length_size != 8 {
        return Err(wrong(&"lengths of other than 8 bytes, which no library writes by default"));
    }
    let datasets = open_all(&file, path, plan, scan)?;
    let mut loaded = Loaded { surplus: surplus(&file, plan), ..Loaded::default() };
    for (spec, dataset, float) in datasets {
        let data = values(&dataset, float)
            .and_then(|data| if data.len() == spec.len() { Ok(data) } else { Err(What::Unwritten) })
            .or_else(|what| {
                let problem = Problem { name: spec.name.clone(), what };
                refuse(path, vec![problem]).map(|()| Vec::new())
            })?;
        finite(spec, &data, path)?;
        if float != Float::F32 {
            loaded.converted.push((spec.name.clone(), float.name()));
        }
        loaded.weights.insert(spec.name.clone(), Tensor { shape: spec.shape.clone(), data });
    }
    Ok(loaded)
}

/// Opens every dataset of the plan and compares it with the plan, without reading values.
fn open_all<'a>(
    file: &File,
    path: &Path,
    plan: &'a [TensorSpec],
    scan: &dyn Fn() -> LinkScan,
) -> Result<Vec<(&'a TensorSpec, Dataset, Float)>, WeightsError> {
    let mut datasets = Vec::with_capacity(plan.len());
    let mut problems = Vec::new();
    let mut links = None;
    for spec in plan {
        let opened = file.dataset(&spec.name).map_err(|e| {
            let links = links.get_or_insert_with(scan);
            not_found(&spec.name, &e, links)
        });
        match opened.and_then(|dataset| Ok((check(&dataset, spec)?, dataset))) {
            Ok((float, dataset)) => datasets.push((spec, dataset, float)),
            Err(what) => problems.push(Problem { name: spec.name.clone(), what }),
        }
    }
    refuse(path, problems)?;
    Ok(datasets)
}

/// `hdf5-pure` ignores links; the error names them.
fn not_found(name: &str, error: &H5Error, links: &mut LinkScan) -> What {
    if let Some(kind) = links.kind_on_path(name) {
        return What::Link(kind);
    }
    match error {
        H5Error::Format(FormatError::PathNotFound(_)) => What::Missing { hint: "" },
        H5Error::NotADataset(_) | H5Error::NotAGroup(_) => What::NotADataset,
        _ if links.old_soft_links => What::Link("a soft link"),
        e => What::Broken(printable(&e.to_string())),
    }
}

/// Number formats that are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Float {
    F16 { big: bool },
    F32,
    F64,
}

impl Float {
    fn name(self) -> &'static str {
        match self {
            Self::F16 { .. } => "float16",
            Self::F32 => "float32",
            Self::F64 => "float64",
        }
    }
}

fn check(dataset: &Dataset, spec: &TensorSpec) -> Result<Float, What> {
    let shape = dataset.shape().map_err(unreadable)?;
    if !shape.iter().copied().eq(spec.shape.iter().map(|&d| d as u64)) {
        return Err(What::Shape { expected: spec.shape.clone(), found: shape });
    }
    let float = float(dataset)?;
    check_storage(dataset, &shape)?;
    Ok(float)
}

fn float(dataset: &Dataset) -> Result<Float, What> {
    let datatype = dataset.datatype().map_err(unreadable)?;
    let (size, order, layout) = match &datatype {
        Datatype::FloatingPoint { size, byte_order, layout } => (*size, *byte_order, *layout),
        _ => return Err(What::Type { found: type_name(dataset) }),
    };
    // `hdf5-pure` reads any type of 4 bytes as float32, whatever its layout.
    match (size, layout, order) {
        (_, _, DatatypeByteOrder::Vax) => Err(What::Type { found: "VAX float".to_owned() }),
        (4, FloatingPointLayout::IEEE754_BINARY32, _) => Ok(Float::F32),
        (8, FloatingPointLayout::IEEE754_BINARY64, _) => Ok(Float::F64),
        (2, BINARY16, order) => Ok(Float::F16 { big: order == DatatypeByteOrder::BigEndian }),
        _ => Err(What::Type { found: type_name(dataset) }),
    }
}

fn type_name(dataset: &Dataset) -> String {
    let name = dataset.dtype().map_or_else(|e| e.to_string(), |t| t.to_string());
    printable(&name)
}

/// Checks where the values are stored and how they are compressed.
fn check_storage(dataset: &Dataset, shape: &[u64]) -> Result<(), What> {
    match dataset.layout().map_err(unreadable)? {
        Layout::Virtual => Err(What::Virtual),
        Layout::Contiguous { address: None, .. } => Err(no_address(dataset)),
        Layout::Chunked { chunk_shape, .. } => {
            check_filters(dataset)?;
            check_chunks(dataset, shape, &chunk_shape)
        }
        _ => Ok(()),
    }
}

/// External storage differs from a dataset that was never written in the error on reading values only.
fn no_address(dataset: &Dataset) -> What {
    match dataset.read_raw_rows(0, 1) {
        Err(H5Error::Format(FormatError::UnsupportedExternalStorage)) => What::ExternalStorage,
        _ => What::Unwritten,
    }
}

fn check_filters(dataset: &Dataset) -> Result<(), What> {
    match dataset.filter_pipeline().into_iter().find(|f| !FILTERS.contains(&f.id)) {
        Some(filter) => Err(What::Filter { name: printable(&filter.to_string()) }),
        None => Ok(()),
    }
}

/// A chunk is decompressed as a whole, so its size is bounded. A missing chunk would read as zeros, so all must exist.
fn check_chunks(dataset: &Dataset, shape: &[u64], chunk: &[u64]) -> Result<(), What> {
    let bytes = |dims: &[u64]| dims.iter().fold(8u64, |n, &d| n.saturating_mul(d));
    if chunk.len() != shape.len() || chunk.contains(&0) || bytes(chunk) > bytes(shape).saturating_mul(2) + (1 << 16) {
        return Err(What::Chunk { bytes: bytes(chunk) });
    }
    let expected = shape.iter().zip(chunk).fold(1u64, |n, (&d, &c)| n.saturating_mul(d.div_ceil(c)));
    if expected > MAX_CHUNKS {
        return Err(What::Broken(format!("{expected} chunks, more than {MAX_CHUNKS}")));
    }
    let written = dataset.chunks().map_err(unreadable)?.len() as u64;
    if written < expected { Err(What::Unwritten) } else { Ok(()) }
}

fn values(dataset: &Dataset, float: Float) -> Result<Vec<f32>, What> {
    match float {
        Float::F32 => dataset.read_f32().map_err(unreadable),
        Float::F64 => {
            let wide = dataset.read_f64().map_err(unreadable)?;
            // Rounds to nearest. A value out of range becomes infinite, which `finite` rejects.
            Ok(wide.into_iter().map(|v| v as f32).collect())
        }
        Float::F16 { big } => {
            let raw = dataset.read_raw().map_err(unreadable)?;
            let decode = if big { f16::from_be_bytes } else { f16::from_le_bytes };
            Ok(raw.as_chunks().0.iter().map(|b| decode(*b).to_f32()).collect())
        }
    }
}

fn unreadable(error: H5Error) -> What {
    match error {
        H5Error::Format(FormatError::UnsupportedExternalStorage) => What::ExternalStorage,
        H5Error::Format(FormatError::UnsupportedVirtualLayout) => What::Virtual,
        H5Error::Format(FormatError::InvalidLayoutVersion(version)) => What::Broken(format!(
            "storage of version {version} is newer than HDF5 1.14; write the file with libver=\"v114\", or uncompressed"
        )),
        H5Error::Format(FormatError::UnsupportedFilter(id)) => What::Filter { name: id.to_string() },
        e => What::Broken(printable(&e.to_string())),
    }
}

/// Names that are not in the plan, from the groups of the plan. Other groups are named but not listed, so that groups
/// that contain each other do no harm.
fn surplus(file: &File, plan: &[TensorSpec]) -> Vec<String> {
    let wanted: BTreeSet<&str> = plan.iter().map(|s| s.name.as_str()).collect();
    let groups: BTreeSet<&str> =
        plan.iter().flat_map(|s| s.name.match_indices('/').map(|(i, _)| &s.name[..i])).collect();
    let mut names = Vec::new();
    for &group in std::iter::once(&"").chain(&groups) {
        let Ok(handle) = file.group(group) else { continue };
        let full = |name: &String| if group.is_empty() { name.clone() } else { format!("{group}/{name}") };
        // Listing may fail although the tensors of the group were found by name.
        let datasets = handle.datasets().unwrap_or_default();
        names.extend(datasets.iter().map(full).filter(|n| !wanted.contains(n.as_str())));
        let subgroups = handle.groups().unwrap_or_default();
        names.extend(subgroups.iter().map(full).filter(|n| !groups.contains(n.as_str())).map(|n| n + "/"));
    }
    names.sort();
    names
}

/// Writes every tensor as a contiguous little-endian float32 dataset under its name. The same weights give the same
/// bytes. HDF5 1.8 and later, h5py and AllenNLP read the file.
///
/// # Errors
/// A tensor whose shape and number of values disagree, or a name that is invalid in HDF5.
pub fn write(weights: &Weights) -> Result<Vec<u8>, WeightsError> {
    let mut bytes = Vec::with_capacity(4 * weights.parameters() + (1 << 16));
    write_to(&mut bytes, Path::new("memory"), weights)?;
    Ok(bytes)
}

/// As [`write()`], without the whole file in memory; `path` names it in errors. The builder copies the values.
///
/// # Errors
/// As [`write()`], and when `out` fails.
pub fn write_to<W: Write>(out: &mut W, path: &Path, weights: &Weights) -> Result<(), WeightsError> {
    builder(weights)?.finish_to(out).map_err(|e| match e {
        H5Error::Io(e) => io(path, e),
        e => WeightsError::Write { reason: e.to_string() },
    })
}

fn builder(weights: &Weights) -> Result<FileBuilder, WeightsError> {
    let mut tree = Node::default();
    for (name, tensor) in weights.iter() {
        check_size(name, tensor)?;
        tree.add(name, tensor);
    }
    let mut file = FileBuilder::new();
    file.with_libver_bounds(LibVer::Earliest, LibVer::V18);
    for (name, tensor) in tree.tensors {
        fill(file.create_dataset(name), tensor);
    }
    for (name, node) in tree.groups {
        let group = file.create_group(name);
        file.add_group(node.into_group(group).finish());
    }
    Ok(file)
}

/// A group of the file to be written.
#[derive(Default)]
struct Node<'a> {
    groups: BTreeMap<&'a str, Self>,
    tensors: Vec<(&'a str, &'a Tensor)>,
}

impl<'a> Node<'a> {
    fn add(&mut self, name: &'a str, tensor: &'a Tensor) {
        match name.split_once('/') {
            Some((group, rest)) => self.groups.entry(group).or_default().add(rest, tensor),
            None => self.tensors.push((name, tensor)),
        }
    }

    fn into_group(self, mut group: GroupBuilder) -> GroupBuilder {
        for (name, tensor) in self.tensors {
            fill(group.create_dataset(name), tensor);
        }
        for (name, node) in self.groups {
            let child = group.create_group(name);
            group.add_group(node.into_group(child).finish());
        }
        group
    }
}

fn fill(dataset: &mut hdf5_pure::DatasetBuilder, tensor: &Tensor) {
    let shape: Vec<u64> = tensor.shape.iter().map(|&d| d as u64).collect();
    dataset.with_f32_data(&tensor.data).with_shape(&shape);
}
