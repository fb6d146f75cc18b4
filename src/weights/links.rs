//! Finds links in the raw bytes of an HDF5 file, so that an error can say that a tensor is a link.
//!
//! `hdf5-pure` ignores soft and external links, so a linked tensor looks missing. The scan only improves the message of
//! an error; links are never followed.

use std::collections::BTreeMap;

/// Number of bytes that are scanned, from the start of the file. Libraries write links before large values.
pub(super) const SCANNED: usize = 16 << 20;

const SOFT: u8 = 1;
const EXTERNAL: u8 = 64;

/// The start of a file.
pub(super) struct LinkScan {
    bytes: Vec<u8>,
    /// The symbol table of an old-style group holds a soft link of unknown name.
    pub(super) old_soft_links: bool,
    /// Results by name: tensors share parts of their paths.
    known: BTreeMap<String, Option<&'static str>>,
}

impl LinkScan {
    pub(super) fn new(bytes: &[u8]) -> Self {
        Self { bytes: bytes.to_vec(), old_soft_links: old_soft_links(bytes), known: BTreeMap::new() }
    }

    /// The kind of link that some part of the path `name` is.
    pub(super) fn kind_on_path(&mut self, name: &str) -> Option<&'static str> {
        name.split('/').find_map(|part| match self.known.get(part) {
            Some(&kind) => kind,
            None => *self.known.entry(part.to_owned()).or_insert(kind(&self.bytes, part.as_bytes())),
        })
    }
}

fn kind(bytes: &[u8], name: &[u8]) -> Option<&'static str> {
    let first = name.first()?;
    let starts = (0..bytes.len()).filter(|&i| bytes[i] == *first && bytes[i..].starts_with(name));
    starts.into_iter().find_map(|i| link_type(&bytes[..i], name.len())).map(|t| match t {
        EXTERNAL => "a link into another file",
        _ => "a soft link",
    })
}

/// Reads a link message backwards from where its name starts: version 1, flags, type, optional
/// creation order (8 bytes) and character set (1), length of the name (1, 2, 4 or 8 bytes).
fn link_type(before: &[u8], length: usize) -> Option<u8> {
    for (width_bits, order, charset) in (0..16u8).map(|i| (i & 3, i & 4, (i & 8) << 1)) {
        let width = 1usize << width_bits;
        let head = 3 + if order > 0 { 8 } else { 0 } + usize::from(charset > 0);
        let Some(message) = before.len().checked_sub(head + width).map(|start| &before[start..]) else { continue };
        let [1, flags, kind @ (SOFT | EXTERNAL), ..] = message else { continue };
        let mut size = [0; 8];
        size[..width].copy_from_slice(&message[head..]);
        if *flags == width_bits | order | 8 | charset && u64::from_le_bytes(size) == length as u64 {
            return Some(*kind);
        }
    }
    None
}

/// Symbol table nodes: `SNOD`, version 1, a count, then entries of 40 bytes with a type at byte 16
/// that is 2 for a soft link.
fn old_soft_links(bytes: &[u8]) -> bool {
    let nodes = bytes.windows(5).enumerate().filter(|(_, w)| *w == b"SNOD\x01").map(|(i, _)| i);
    nodes.into_iter().any(|i| {
        let count = bytes.get(i + 6..i + 8).map_or(0, |b| usize::from(b[0]) + 256 * usize::from(b[1]));
        (0..count.min(64)).any(|k| bytes.get(i + 8 + 40 * k + 16..).is_some_and(|e| e.starts_with(&[2, 0, 0, 0])))
    })
}
