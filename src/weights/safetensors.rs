//! safetensors: one header with names, types and offsets, then the values.
//!
//! Names are those of the HDF5 file. The header is parsed and checked by the `safetensors` crate
//! (no gaps, no overlaps, the file exactly as long as the header says); values are read straight
//! into their tensors, so reading needs the tensors and one small buffer.

use std::{
    collections::BTreeMap,
    io::{Cursor, Read, Seek, SeekFrom, Write},
    path::Path,
};

use half::{bf16, f16};
use safetensors::{
    Dtype,
    tensor::{Metadata, TensorInfo},
};
use serde::Serialize;

use super::{
    error::{Problem, WeightsError, What},
    file::{broken, io, open},
    tensors::{Loaded, Tensor, Weights, check_size, finite, refuse},
};
use crate::{file_kind::FileKind, json, options::TensorSpec};

/// Maximum size in bytes of a header. The crate allows 100 MB, which take several times as much memory when parsed; a
/// model with the maximum number of layers needs less than 100 kB.
const MAX_HEADER: u64 = 4 << 20;
/// Size in bytes of the buffer for conversions.
const BUFFER: usize = 1 << 16;

/// Reads the tensors of `plan` from the bytes of a file; `path` names it in errors.
///
/// Values may be F32, or F16 and BF16, which float32 represents exactly. F64 is rejected: no writer of ELMo models
/// produces it.
///
/// # Errors
/// Missing, mis-shaped and mis-typed tensors, all in one error; a header that does not match the file; values that are
/// not finite.
pub fn read(bytes: &[u8], path: &Path, plan: &[TensorSpec]) -> Result<Loaded, WeightsError> {
    read_from(&mut Cursor::new(bytes), path, plan)
}

/// As [`read`], from a file.
///
/// # Errors
/// As [`read`], and when the operating system fails.
pub fn read_file(path: &Path, plan: &[TensorSpec]) -> Result<Loaded, WeightsError> {
    read_from(&mut open(path)?, path, plan)
}

pub(crate) fn read_from<R: Read + Seek + ?Sized>(
    file: &mut R,
    path: &Path,
    plan: &[TensorSpec],
) -> Result<Loaded, WeightsError> {
    let (start, header) = header(file, path)?;
    let tensors = header.tensors();
    refuse(path, plan.iter().filter_map(|spec| problem(spec, tensors.get(&spec.name).copied())).collect())?;
    let mut loaded = Loaded {
        surplus: surplus(&header, plan),
        metadata: header.metadata().clone().unwrap_or_default().into_iter().collect(),
        ..Loaded::default()
    };
    for spec in plan {
        let Some(info) = tensors.get(&spec.name) else { continue };
        file.seek(SeekFrom::Start(start + info.data_offsets.0 as u64)).map_err(|e| io(path, e))?;
        let data = values(file, info.dtype, spec.len()).map_err(|e| io(path, e))?;
        finite(spec, &data, path)?;
        if info.dtype != Dtype::F32 {
            loaded.converted.push((spec.name.clone(), if info.dtype == Dtype::F16 { "float16" } else { "bfloat16" }));
        }
        loaded.weights.insert(spec.name.clone(), Tensor { shape: spec.shape.clone(), data });
    }
    Ok(loaded)
}

/// The shape of a tensor; `None` when there is no tensor of this name.
///
/// # Errors
/// A header that does not match the file, and those of the operating system.
pub(crate) fn shape<R: Read + Seek + ?Sized>(
    file: &mut R,
    path: &Path,
    name: &str,
) -> Result<Option<Vec<usize>>, WeightsError> {
    let (_, header) = header(file, path)?;
    Ok(header.info(name).map(|info| info.shape.clone()))
}

/// The header and the offset of the values.
fn header<R: Read + Seek + ?Sized>(file: &mut R, path: &Path) -> Result<(u64, Metadata), WeightsError> {
    let wrong = |reason: String| broken(path, FileKind::Safetensors, reason);
    let length = file.seek(SeekFrom::End(0)).map_err(|e| io(path, e))?;
    file.rewind().map_err(|e| io(path, e))?;
    let mut size = [0; 8];
    file.read_exact(&mut size).map_err(|e| wrong(format!("no header: {e}")))?;
    let size = u64::from_le_bytes(size);
    if size > MAX_HEADER.min(length.saturating_sub(8)) {
        return Err(wrong(format!("a header of {size} bytes in a file of {length} bytes")));
    }
    let mut text = vec![0; size as usize];
    file.read_exact(&mut text).map_err(|e| wrong(format!("no header: {e}")))?;
    let header: Metadata =
        serde_json::from_slice(&text).map_err(|e| wrong(format!("the header: {}", json::reason(&e))))?;
    let expected = (8 + size).saturating_add(header.data_len() as u64);
    if expected != length {
        return Err(wrong(format!("the header describes {expected} bytes, the file has {length}")));
    }
    Ok((8 + size, header))
}

fn problem(spec: &TensorSpec, info: Option<&TensorInfo>) -> Option<Problem> {
    let what = match info {
        None => What::Missing { hint: "" },
        Some(info) if info.shape != spec.shape => What::wrong_shape(spec, &info.shape),
        Some(info) if !matches!(info.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) => {
            What::Type { found: info.dtype.to_string() }
        }
        Some(_) => return None,
    };
    Some(Problem { name: spec.name.clone(), what })
}

fn surplus(header: &Metadata, plan: &[TensorSpec]) -> Vec<String> {
    let mut names = header.offset_keys();
    names.retain(|name| plan.iter().all(|spec| spec.name != *name));
    names.sort();
    names
}

fn values<R: Read + ?Sized>(file: &mut R, dtype: Dtype, n: usize) -> std::io::Result<Vec<f32>> {
    match dtype {
        Dtype::F16 => converted(file, n, |b| f16::from_le_bytes(b).to_f32()),
        Dtype::BF16 => converted(file, n, |b| bf16::from_le_bytes(b).to_f32()),
        _ => converted(file, n, f32::from_le_bytes),
    }
}

fn converted<R: Read + ?Sized, const W: usize>(
    file: &mut R,
    n: usize,
    convert: fn([u8; W]) -> f32,
) -> std::io::Result<Vec<f32>> {
    let mut data = Vec::with_capacity(n);
    let mut buffer = [0; BUFFER];
    while data.len() < n {
        let bytes = &mut buffer[..BUFFER.min((n - data.len()) * W)];
        file.read_exact(bytes)?;
        data.extend(bytes.as_chunks::<W>().0.iter().map(|b| convert(*b)));
    }
    Ok(data)
}

/// How a number is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Numbers {
    /// In four bytes.
    F32,
    /// Rounded to two bytes.
    F16,
}

impl Numbers {
    fn name(self) -> &'static str {
        if self == Self::F32 { "F32" } else { "F16" }
    }

    fn bytes(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }

    fn encode(self, values: &[f32], buffer: &mut Vec<u8>) {
        match self {
            Self::F32 => buffer.extend(values.iter().flat_map(|v| v.to_le_bytes())),
            Self::F16 => buffer.extend(values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes())),
        }
    }
}

/// Writes every tensor as F32, in byte order of the names, with `metadata` in the header. The same
/// input gives the same bytes.
///
/// # Errors
/// A tensor whose shape and number of values disagree.
pub fn write(weights: &Weights, metadata: &BTreeMap<String, String>) -> Result<Vec<u8>, WeightsError> {
    let mut bytes = Vec::with_capacity(4 * weights.parameters() + (1 << 14));
    write_to(&mut bytes, Path::new("memory"), weights, metadata)?;
    Ok(bytes)
}

/// As [`write()`], without a copy in memory; `out` should be buffered, `path` names it in errors.
///
/// The header is written here and not by the `safetensors` crate, which keeps the metadata in a hash
/// map and so writes it in another order each time.
///
/// # Errors
/// As [`write()`], and when `out` fails.
pub fn write_to<W: Write>(
    out: &mut W,
    path: &Path,
    weights: &Weights,
    metadata: &BTreeMap<String, String>,
) -> Result<(), WeightsError> {
    write_as(out, path, weights, metadata, Numbers::F32)
}

/// As [`write_to`], with numbers in another format.
///
/// # Errors
/// As [`write_to`], and when a finite value is infinite as a float16.
pub fn write_as<W: Write>(
    out: &mut W,
    path: &Path,
    weights: &Weights,
    metadata: &BTreeMap<String, String>,
    numbers: Numbers,
) -> Result<(), WeightsError> {
    if numbers == Numbers::F16 {
        weights.to_half(path)?;
    }
    let header = write_header(weights, metadata, numbers)?;
    let failed = |e| io(path, e);
    out.write_all(&(header.len() as u64).to_le_bytes()).map_err(failed)?;
    out.write_all(&header).map_err(failed)?;
    let mut buffer = Vec::with_capacity(BUFFER);
    for chunk in weights.iter().flat_map(|(_, tensor)| tensor.data.chunks(BUFFER / 4)) {
        buffer.clear();
        numbers.encode(chunk, &mut buffer);
        out.write_all(&buffer).map_err(failed)?;
    }
    Ok(())
}

#[derive(Serialize)]
#[serde(untagged)]
enum Entry<'a> {
    Metadata(&'a BTreeMap<String, String>),
    Tensor { dtype: &'static str, shape: &'a [usize], data_offsets: (usize, usize) },
}

fn write_header(
    weights: &Weights,
    metadata: &BTreeMap<String, String>,
    numbers: Numbers,
) -> Result<Vec<u8>, WeightsError> {
    // `__metadata__` sorts after the upper-case names; readers take any order.
    let mut entries = BTreeMap::from([("__metadata__", Entry::Metadata(metadata))]);
    let mut start = 0;
    for (name, tensor) in weights.iter() {
        check_size(name, tensor)?;
        let end = start + numbers.bytes() * tensor.data.len();
        entries.insert(name, Entry::Tensor { dtype: numbers.name(), shape: &tensor.shape, data_offsets: (start, end) });
        start = end;
    }
    let mut header = serde_json::to_vec(&entries).map_err(|e| WeightsError::Write { reason: e.to_string() })?;
    // Values start at a multiple of 8, so that a memory map of the file is aligned.
    header.resize(header.len().next_multiple_of(8), b' ');
    Ok(header)
}
