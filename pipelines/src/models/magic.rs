//! Recognises file formats by their first bytes, so that a saved error page is reported as such and not as a corrupt
//! file.

use std::{fmt, fs::File, io::Read, path::Path};

use elmo::weights::{FileKind, file_kind};

use super::error::ModelsError;

/// The role of a file in a model, which determines its format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// `options.json`
    Options,
    /// HDF5 or safetensors.
    Weights,
    /// A zip of a model directory.
    Zip,
    /// Anything but an error page.
    Other,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Options => "JSON",
            Self::Weights => "HDF5 or safetensors",
            Self::Zip => "a zip archive",
            Self::Other => "a file of a model",
        })
    }
}

/// A file whose format does not fit its role.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrongContent {
    /// Its role.
    pub role: Role,
    /// Its format.
    pub found: FileKind,
    /// The beginning of an error page, printable characters only.
    pub beginning: Option<String>,
}

impl fmt::Display for WrongContent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "this is {}, not {}", self.found, self.role)?;
        match &self.beginning {
            Some(beginning) => write!(f, "; it begins {beginning:?}"),
            None => Ok(()),
        }
    }
}

impl WrongContent {
    /// What to do next.
    pub fn remedy(&self) -> &'static str {
        match (self.role, self.found) {
            (Role::Zip, FileKind::Hdf5 | FileKind::Safetensors | FileKind::Json | FileKind::Unknown) => {
                "--model takes a directory, a zip or a URL; single files go to --options FILE --weights FILE"
            }
            (Role::Options, FileKind::Unknown) => "options are the JSON file that came with the weights",
            _ => self.found.remedy(),
        }
    }
}

/// Bytes that [`Role::check`] needs.
const HEAD: u64 = 64;

impl Role {
    /// Checks the first `HEAD` bytes of a file.
    ///
    /// # Errors
    /// [`WrongContent`] when the format does not fit.
    pub fn check(self, head: &[u8]) -> Result<(), WrongContent> {
        let found = file_kind(head);
        let fits = match self {
            Self::Options => found == FileKind::Json,
            Self::Weights => matches!(found, FileKind::Hdf5 | FileKind::Safetensors),
            Self::Zip => found == FileKind::Zip,
            Self::Other => !matches!(found, FileKind::Markup | FileKind::Empty | FileKind::LfsPointer),
        };
        let beginning = (found == FileKind::Markup).then(|| printable(head));
        if fits { Ok(()) } else { Err(WrongContent { role: self, found, beginning }) }
    }

    /// Checks the file at `path`; the error names it `name`.
    ///
    /// # Errors
    /// [`ModelsError::Content`] when the format does not fit, [`ModelsError::Io`] when it cannot be read.
    pub fn check_file(self, path: &Path, name: &str) -> Result<(), ModelsError> {
        let mut head = Vec::new();
        let file = File::open(path).map_err(|e| ModelsError::io(path, e))?;
        file.take(HEAD).read_to_end(&mut head).map_err(|e| ModelsError::io(path, e))?;
        self.check(&head).map_err(|wrong| ModelsError::Content { file: name.to_owned(), wrong })
    }
}

fn printable(head: &[u8]) -> String {
    let text = String::from_utf8_lossy(head);
    text.trim_start().chars().take(40).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    // The first bytes come from the specifications of HDF5 (format signature), ZIP (local file header) and safetensors.
    #[test]
    fn knows_what_it_asked_for() {
        for (role, head) in [
            (Role::Options, &b"\xef\xbb\xbf \n{\"lstm\": {}}"[..]),
            (Role::Weights, b"\x89HDF\r\n\x1a\n\0\0"),
            (Role::Weights, b"\x3c\0\0\0\0\0\0\0{\"a\":1}"),
            (Role::Zip, b"PK\x03\x04\x14"),
            (Role::Other, b"word\nword\n"),
            (Role::Other, b"<S>\n</S>\n<UNK>\n"),
        ] {
            assert_eq!(role.check(head), Ok(()), "{role:?}");
        }
    }

    #[test]
    fn says_what_it_is_instead() {
        let page = b"\n<?xml version=\"1.0\"?><Error><Code>AccessDenied</Code></Error>";
        for role in [Role::Options, Role::Weights, Role::Zip, Role::Other] {
            assert_eq!(
                role.check(page).unwrap_err().to_string(),
                format!(
                    "this is an HTML or XML page, not {role}; it begins \"<?xml version=\\\"1.0\\\"?><Error><Code>Access\""
                )
            );
            assert_eq!(role.check(b"").unwrap_err().to_string(), format!("this is an empty file, not {role}"));
        }
        assert_eq!(
            Role::Weights.check(b"PK\x03\x04").unwrap_err().to_string(),
            "this is a zip archive, not HDF5 or safetensors"
        );
    }
}
