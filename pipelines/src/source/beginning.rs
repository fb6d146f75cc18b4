//! The first bytes of a text, CSV or JSON file: byte order marks are skipped, and a file of another kind is named. Read as
//! text, an endless or compressed one would be one huge row.

use super::reason::own_io;

/// U+FEFF in UTF-8. A file that was converted twice has two of them.
pub(crate) const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// A file that is no text in UTF-8.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Foreign {
    /// A byte order mark of UTF-16 or UTF-32.
    Utf16,
    /// Compressed, although its name does not say so.
    Compressed(&'static str),
    /// A file with columns, in another format.
    Columns(&'static str),
    /// NUL bytes: a device, a binary file, or UTF-16 without a mark.
    Nul,
}

impl Foreign {
    /// What it is.
    pub(crate) fn what(self) -> String {
        match self {
            Self::Utf16 => "it is UTF-16".to_owned(),
            Self::Compressed(how) => format!("it is compressed with {how}"),
            Self::Columns(format) => format!("it is {format}"),
            Self::Nul => "it begins with NUL bytes, as UTF-16 and binary files do".to_owned(),
        }
    }

    /// What to do with it.
    pub(crate) fn help(self) -> &'static str {
        match self {
            Self::Utf16 | Self::Nul => "text, CSV and JSON are read as UTF-8: iconv -f utf-16 -t utf-8 converts a file",
            Self::Compressed("gzip") => {
                "decompress it with gunzip; of files, those whose name ends in .gz are decompressed"
            }
            Self::Compressed("zstd") => {
                "decompress it with unzstd; of files, those whose name ends in .zst are decompressed"
            }
            Self::Compressed(_) => {
                "decompress it; only gzip and zstd are read, of files whose name ends in .gz or .zst"
            }
            Self::Columns(_) => "name its format with --input-format",
        }
    }
}

/// Beginnings that no text in UTF-8 has, or hardly any.
const FOREIGN: &[(&[u8], Foreign)] = &[
    (b"\xff\xff\xff\xff", Foreign::Columns("an Arrow stream")),
    (b"\xff\xfe", Foreign::Utf16),
    (b"\xfe\xff", Foreign::Utf16),
    (b"\x1f\x8b\x08", Foreign::Compressed("gzip")),
    (b"\x28\xb5\x2f\xfd", Foreign::Compressed("zstd")),
    (b"\xfd7zXZ\0", Foreign::Compressed("xz")),
    (b"BZh91AY&SY", Foreign::Compressed("bzip2")),
    (b"PK\x03\x04", Foreign::Compressed("zip")),
    (b"PAR1\x15", Foreign::Columns("Parquet")),
    (b"ARROW1\0", Foreign::Columns("an Arrow file")),
    (b"\0", Foreign::Nul),
];

/// What the first bytes tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Beginning {
    /// The bytes after that many of byte order marks are text.
    Text(usize),
    Foreign(Foreign),
}

/// Judges the first bytes of a file; `None` if more are needed.
pub(crate) fn judge(start: &[u8]) -> Option<Beginning> {
    let marks = marks(start);
    let rest = &start[marks..];
    if let Some((_, foreign)) = FOREIGN.iter().find(|(beginning, _)| rest.starts_with(beginning)) {
        return Some(Beginning::Foreign(*foreign));
    }
    let begins = |whole: &[u8]| whole.starts_with(rest);
    if begins(BYTE_ORDER_MARK) || FOREIGN.iter().any(|(beginning, _)| begins(beginning)) {
        return None;
    }
    match rest {
        // ASCII in UTF-16.
        [_, 0, ..] => Some(Beginning::Foreign(Foreign::Nul)),
        // A row may be complete.
        [b'\n'] | [_, _, ..] => Some(Beginning::Text(marks)),
        _ => None,
    }
}

/// Bytes of byte order marks at the beginning.
pub(crate) fn marks(start: &[u8]) -> usize {
    start.chunks(BYTE_ORDER_MARK.len()).take_while(|chunk| *chunk == BYTE_ORDER_MARK).count() * BYTE_ORDER_MARK.len()
}

/// Takes byte after byte until the beginning of a file can be judged.
#[derive(Debug, Default)]
pub(crate) struct Judge(Vec<u8>);

impl Judge {
    /// Takes the next byte, `None` at the end. Returns the first bytes of the text once they are known.
    ///
    /// # Errors
    /// What the file is, if it is no text.
    pub(crate) fn take(&mut self, byte: Option<u8>) -> Result<Option<Vec<u8>>, Foreign> {
        self.0.extend(byte);
        match (judge(&self.0), byte) {
            (Some(Beginning::Foreign(foreign)), _) => Err(foreign),
            (Some(Beginning::Text(marks)), _) => Ok(Some(self.0.split_off(marks))),
            (None, None) => Ok(Some(self.0.split_off(marks(&self.0)))),
            (None, Some(_)) => Ok(None),
        }
    }
}

impl From<Foreign> for std::io::Error {
    fn from(foreign: Foreign) -> Self {
        own_io(format!("not text in UTF-8: {}", foreign.what()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(bytes: &[u8]) -> Result<Vec<u8>, Foreign> {
        let mut judge = Judge::default();
        for (at, byte) in bytes.iter().enumerate() {
            if let Some(start) = judge.take(Some(*byte))? {
                return Ok([&start, &bytes[at + 1..]].concat());
            }
        }
        judge.take(None).map(Option::unwrap_or_default)
    }

    #[test]
    fn texts_lose_their_marks_only() {
        let texts: [(&[u8], &[u8]); 13] = [
            (b"", b""),
            (b"a", b"a"),
            (b"\n", b"\n"),
            (b"id,text\n", b"id,text\n"),
            (b"\xef\xbb\xbfid", b"id"),
            (b"\xef\xbb\xbf\xef\xbb\xbfid", b"id"),
            (b"\xef\xbb\xbf\xef\xbb\xbf", b""),
            (b"\xef\xbb", b"\xef\xbb"),
            (b"\xef\xbb\xbf\xef\xbb", b"\xef\xbb"),
            (b"\xffbad", b"\xffbad"),
            (b"PAR1,PAR2\n", b"PAR1,PAR2\n"),
            (b"BZh", b"BZh"),
            (b"a\n\0", b"a\n\0"),
        ];
        for (bytes, text) in texts {
            assert_eq!(judged(bytes), Ok(text.to_vec()), "{bytes:?}");
        }
        // A row of a pipe does not wait for the next one.
        assert_eq!(Judge::default().take(Some(b'\n')), Ok(Some(b"\n".to_vec())));
    }

    /// By the specifications of the formats, and by `printf a | gzip`, `zstd`, `xz` and `bzip2`.
    #[test]
    fn other_files_are_named() {
        let others: [(&[u8], Foreign); 12] = [
            (b"\xff\xfea\0", Foreign::Utf16),
            (b"\xfe\xff\0a", Foreign::Utf16),
            (b"\xff\xfe\0\0", Foreign::Utf16),
            (b"\x1f\x8b\x08\x00\x00\x00\x00\x00", Foreign::Compressed("gzip")),
            (b"\x28\xb5\x2f\xfd\x04\x58", Foreign::Compressed("zstd")),
            (b"\xfd7zXZ\0\0\x04", Foreign::Compressed("xz")),
            (b"BZh91AY&SY\x19", Foreign::Compressed("bzip2")),
            (b"PK\x03\x04\x14", Foreign::Compressed("zip")),
            (b"PAR1\x15\x04", Foreign::Columns("Parquet")),
            (b"ARROW1\0\0\xff\xff\xff\xff", Foreign::Columns("an Arrow file")),
            (b"\xff\xff\xff\xff\x78\0\0\0", Foreign::Columns("an Arrow stream")),
            (b"\0\0\0\0", Foreign::Nul),
        ];
        for (bytes, foreign) in others {
            assert_eq!(judged(bytes), Err(foreign), "{bytes:?}");
            assert_eq!(judged(&[BYTE_ORDER_MARK, bytes].concat()), Err(foreign), "{bytes:?}");
        }
        for utf_16 in ["id,text\n1,a\n", "{\"text\": 1}"] {
            let little: Vec<u8> = utf_16.encode_utf16().flat_map(u16::to_le_bytes).collect();
            let big: Vec<u8> = utf_16.encode_utf16().flat_map(u16::to_be_bytes).collect();
            assert_eq!([judged(&little), judged(&big)], [Err(Foreign::Nul), Err(Foreign::Nul)]);
        }
    }
}
