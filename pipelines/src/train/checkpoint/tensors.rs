//! The tensors of a snapshot as a safetensors file, in float32 or float64.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, BufReader, Read, Write},
    path::Path,
};

use elmo::train::{Saved, Values};
use serde::{Deserialize, Serialize};

/// Bytes that are converted at once.
const BUFFER: usize = 1 << 16;
/// Largest header in bytes.
const MAX_HEADER: u64 = 64 << 20;

#[derive(Serialize, Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

/// Bytes of a value.
fn width(values: &Values) -> (&'static str, u64, usize) {
    match values {
        Values::F32(values) => ("F32", 4, values.len()),
        Values::F64(values) => ("F64", 8, values.len()),
    }
}

/// Writes all tensors, by name.
///
/// # Errors
/// Those of `out`.
pub(super) fn write(out: &mut impl Write, tensors: &BTreeMap<String, Saved>) -> io::Result<()> {
    let (mut header, mut start) = (BTreeMap::new(), 0);
    for (name, Saved { shape, values }) in tensors {
        let (dtype, width, n) = width(values);
        let end = start + width * n as u64;
        header.insert(name, Entry { dtype: dtype.to_owned(), shape: shape.clone(), data_offsets: (start, end) });
        start = end;
    }
    let mut header = serde_json::to_vec(&header)?;
    // Values begin at a multiple of 8.
    header.resize(header.len().next_multiple_of(8), b' ');
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(&header)?;
    for Saved { values, .. } in tensors.values() {
        match values {
            Values::F32(values) => write_all(out, values, |v| v.to_le_bytes())?,
            Values::F64(values) => write_all(out, values, |v| v.to_le_bytes())?,
        }
    }
    Ok(())
}

fn write_all<T: Copy, const W: usize>(out: &mut impl Write, values: &[T], bytes: fn(T) -> [u8; W]) -> io::Result<()> {
    let mut buffer = Vec::with_capacity(BUFFER);
    for chunk in values.chunks(BUFFER / W) {
        buffer.clear();
        buffer.extend(chunk.iter().flat_map(|&value| bytes(value)));
        out.write_all(&buffer)?;
    }
    Ok(())
}

/// Reads what [`write()`] has written. Its caller has compared the file's digest.
///
/// # Errors
/// Those of the disk, and files of another form.
pub(super) fn read(path: &Path) -> io::Result<BTreeMap<String, Saved>> {
    let wrong = |reason: &str| io::Error::new(io::ErrorKind::InvalidData, reason.to_owned());
    let file = File::open(path)?;
    let length = file.metadata()?.len();
    let mut file = BufReader::with_capacity(BUFFER, file);
    let mut size = [0; 8];
    file.read_exact(&mut size)?;
    let size = u64::from_le_bytes(size);
    if size > MAX_HEADER.min(length.saturating_sub(8)) {
        return Err(wrong("its header is too long"));
    }
    let mut header = vec![0; size as usize];
    file.read_exact(&mut header)?;
    let header: BTreeMap<String, Entry> = serde_json::from_slice(&header)?;
    let (mut tensors, mut start) = (BTreeMap::new(), 0);
    for (name, Entry { dtype, shape, data_offsets }) in header {
        let n = shape.iter().try_fold(1_usize, |n, &dim| n.checked_mul(dim)).ok_or_else(|| wrong("a huge tensor"))?;
        let bytes = data_offsets.1.saturating_sub(data_offsets.0);
        let width = if dtype == "F64" { 8 } else { 4 };
        if data_offsets.0 != start || n as u64 * width != bytes || data_offsets.1 > length {
            return Err(wrong("its header does not fit its values"));
        }
        start = data_offsets.1;
        let values = match dtype.as_str() {
            "F32" => Values::F32(read_values(&mut file, n, f32::from_le_bytes)?),
            "F64" => Values::F64(read_values(&mut file, n, f64::from_le_bytes)?),
            _ => return Err(wrong("a type that no run writes")),
        };
        tensors.insert(name, Saved { shape, values });
    }
    Ok(tensors)
}

fn read_values<T, const W: usize>(file: &mut impl Read, n: usize, value: fn([u8; W]) -> T) -> io::Result<Vec<T>> {
    let mut values = Vec::with_capacity(n);
    let mut buffer = vec![0; BUFFER];
    while values.len() < n {
        let bytes = &mut buffer[..BUFFER.min((n - values.len()) * W)];
        file.read_exact(bytes)?;
        values.extend(bytes.as_chunks::<W>().0.iter().map(|bytes| value(*bytes)));
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_are_read_back_bit_for_bit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tensors");
        let many = (0..40_000).map(|n| f64::from(n).sqrt()).collect();
        let odd = vec![f32::MIN_POSITIVE / 8.0, -0.0, f32::INFINITY, 1.0 / 3.0];
        let tensors = BTreeMap::from([
            ("a/odd".to_owned(), Saved { shape: vec![2, 2], values: Values::F32(odd) }),
            ("b".to_owned(), Saved { shape: vec![40_000], values: Values::F64(many) }),
            ("c".to_owned(), Saved { shape: vec![3, 0], values: Values::F32(vec![]) }),
        ]);
        let mut bytes = Vec::new();
        write(&mut bytes, &tensors).unwrap();
        std::fs::write(&path, &bytes).unwrap();
        let found = read(&path).unwrap();
        assert_eq!(found, tensors);
        let Values::F32(values) = &found["a/odd"].values else { panic!("float32") };
        assert!(values[1].is_sign_negative());
        for length in [0, 7, 30, bytes.len() - 1] {
            std::fs::write(&path, &bytes[..length]).unwrap();
            read(&path).unwrap_err();
        }
    }
}
