//! Recognises what a file is by its first bytes, to name it when it is not what was expected.

use std::fmt;

/// The kind of a file, by its first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileKind {
    /// HDF5.
    Hdf5,
    /// safetensors.
    Safetensors,
    /// HTML or XML.
    Markup,
    /// A zip archive; also what `torch.save` writes today.
    Zip,
    /// gzip.
    Gzip,
    /// A Python pickle.
    Pickle,
    /// A pointer of Git LFS.
    LfsPointer,
    /// JSON.
    Json,
    /// An empty file.
    Empty,
    /// Any other file.
    Unknown,
}

impl FileKind {
    /// What a user can do about a file of this kind.
    pub fn remedy(self) -> &'static str {
        match self {
            Self::Markup => "it is probably an error page: open it in a text editor and download again",
            Self::Zip => "unpack it, or give the archive itself as the model; weights saved by torch must be converted",
            Self::Gzip => "unpack it first",
            Self::Pickle => "pickles can run code when opened and are never read: convert them to safetensors",
            Self::LfsPointer => "fetch the file itself with `git lfs pull`",
            Self::Json => "are options and weights exchanged?",
            Self::Empty => "download it again",
            _ => "weights are HDF5 in the bilm-tf layout or safetensors",
        }
    }
}

impl fmt::Display for FileKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hdf5 => "HDF5",
            Self::Safetensors => "safetensors",
            Self::Markup => "an HTML or XML page",
            Self::Zip => "a zip archive",
            Self::Gzip => "a gzip file",
            Self::Pickle => "a Python pickle",
            Self::LfsPointer => "a Git LFS pointer",
            Self::Json => "JSON",
            Self::Empty => "an empty file",
            Self::Unknown => "an unknown kind of file",
        })
    }
}

/// Recognises a file by its first bytes; 64 of them are enough.
pub fn file_kind(head: &[u8]) -> FileKind {
    let text = head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(head).trim_ascii_start();
    match head {
        [] => FileKind::Empty,
        [0x89, b'H', b'D', b'F', b'\r', b'\n', 0x1a, b'\n', ..] => FileKind::Hdf5,
        [_, _, _, _, _, 0, 0, 0, b'{', ..] => FileKind::Safetensors,
        [b'P', b'K', 3 | 5, ..] => FileKind::Zip,
        [0x1f, 0x8b, ..] => FileKind::Gzip,
        [0x80, 2..=5, ..] => FileKind::Pickle,
        // A vocabulary begins with the boundary of a sentence.
        _ if text.starts_with(b"<") && !text.starts_with(b"<S>") => FileKind::Markup,
        _ if text.starts_with(b"version https://git-lfs") => FileKind::LfsPointer,
        _ if text.starts_with(b"{") || text.starts_with(b"[") => FileKind::Json,
        _ => FileKind::Unknown,
    }
}
