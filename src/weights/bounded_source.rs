//! A file for `hdf5-pure` that limits how much can be read.
//!
//! An HDF5 file is a graph. Forty B-tree nodes that each refer to the next one twice make a file of 20 kB and 2^40
//! visits. The crate limits the depth of a traversal but not its work, so the work is limited here.

use std::{
    io::{Read, Seek},
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
};

use hdf5_pure::{FormatError, ReadSeekSource, Source};

/// Maximum number of bytes of structure (headers, trees, heaps, indexes). Measured: 0.1 to 0.8 MB for the original
/// model, depending on its compression, and 8.4 MB for the widest model that the options allow, in the newest format.
const STRUCTURE_BYTES: u64 = 24 << 20;
/// Maximum number of reads: of structure, and of values, which are read in blocks of up to 256 KiB.
const READS: u64 = 1 << 20;
/// Maximum size in bytes of the heap of link names of a group.
const HEAP_BYTES: u64 = 1 << 16;
/// Maximum size in bytes of a link name.
const NAME_BYTES: usize = 127;

pub(super) struct BoundedSource<R> {
    file: ReadSeekSource<R>,
    structure_bytes: AtomicU64,
    reads: AtomicU64,
    /// The header of a heap of names was read, and its names are read next.
    names_next: AtomicBool,
}

impl<R: Read + Seek> BoundedSource<R> {
    pub(super) fn new(file: R) -> Result<Self, FormatError> {
        Ok(Self {
            file: ReadSeekSource::new(file)?,
            structure_bytes: AtomicU64::new(0),
            reads: AtomicU64::new(0),
            names_next: AtomicBool::new(false),
        })
    }

    fn structure(&self, len: usize) -> Result<(), FormatError> {
        match self.structure_bytes.fetch_add(len as u64, Relaxed) + len as u64 {
            0..=STRUCTURE_BYTES => Ok(()),
            _ => Err(refused("more structure than any model needs; it probably refers to itself")),
        }
    }

    /// Every entry of an old-style group copies its name from one heap, up to the next NUL. Without NULs each of a
    /// thousand entries would copy nearly the whole heap.
    fn names(&self, bytes: &[u8]) -> Result<(), FormatError> {
        if self.names_next.swap(false, Relaxed) && bytes.split(|&b| b == 0).any(|name| name.len() > NAME_BYTES) {
            return Err(refused("a link name of more than 127 bytes"));
        }
        if bytes.starts_with(b"HEAP") {
            self.names_next.store(true, Relaxed);
            if heap_size(bytes) > HEAP_BYTES {
                return Err(refused("a heap of link names of more than 64 KiB"));
            }
        }
        Ok(())
    }
}

impl<R: Read + Seek> Source for BoundedSource<R> {
    fn len(&self) -> u64 {
        self.file.len()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), FormatError> {
        if self.reads.fetch_add(1, Relaxed) >= READS {
            return Err(refused("more pieces than any model needs"));
        }
        self.file.read_at(offset, buf)
    }

    fn read_metadata_at(&self, offset: u64, len: usize) -> Result<Vec<u8>, FormatError> {
        self.structure(len)?;
        let bytes = self.read_exact_at(offset, len)?;
        self.names(&bytes)?;
        Ok(bytes)
    }
}

/// Bytes 8..16 of the header: files whose lengths have other than 8 bytes are rejected when they are opened.
fn heap_size(header: &[u8]) -> u64 {
    header.get(8..16).and_then(|b| b.try_into().ok()).map_or(u64::MAX, u64::from_le_bytes)
}

fn refused(reason: &str) -> FormatError {
    FormatError::Source(reason.to_owned())
}
