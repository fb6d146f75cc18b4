//! Why an output cannot be written to.

use thiserror::Error;

use super::lock::LEASE;
use crate::{
    error::{Exit, Fault},
    stores::{Obstacle, StoreError},
};

/// Why an output cannot be written to.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ManifestError {
    /// The store fails.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The output was begun with other settings or other inputs.
    #[error("{output} was begun by a job with other settings or inputs:\n{}", differences.join("\n"))]
    Differs {
        /// The output.
        output: String,
        /// One line per difference.
        differences: Vec<String>,
    },
    /// Another job holds the lock of the output.
    #[error("{output}: another job is writing there ({holder})")]
    Locked {
        /// The output.
        output: String,
        /// Its process and host, as far as known.
        holder: String,
    },
    /// Another job created this file after us.
    #[error("{file}: written by another job; this job stops so that no row is written twice")]
    Overtaken {
        /// The file.
        file: String,
    },
    /// The output contains files that no job of elmo wrote.
    #[error("{output} contains {file}, {}", foreign(*manifest))]
    Foreign {
        /// The output.
        output: String,
        /// One of the files.
        file: String,
        /// There is a manifest, which does not name it.
        manifest: bool,
    },
    /// There are files that readers of the folder take for parts, and that the manifest does not name.
    #[error("{output} contains files that are not parts of its job: {}", listed(files))]
    Unlisted {
        /// The output.
        output: String,
        /// Names of the files.
        files: Vec<String>,
    },
    /// The output, or one of its parent folders, is a file or a broken link.
    #[error("{output}: {obstacle}, but an output must be a folder")]
    NoFolder {
        /// The output.
        output: String,
        /// The file or the link.
        obstacle: Obstacle,
    },
    /// A file that the job wrote no longer exists.
    #[error("{file}: deleted or replaced while the job ran")]
    Vanished {
        /// The file.
        file: String,
    },
    /// A file of the manifest that cannot be parsed, or an entry that does not follow from the one before it.
    #[error("{file}: not a valid manifest entry: {reason}")]
    Broken {
        /// The file.
        file: String,
        /// What is wrong.
        reason: String,
    },
    /// The settings of the job that began the output are lost, and the names of its parts do not have this job's
    /// fingerprint.
    #[error("{file} is missing or damaged, and the parts beside it were not made with the settings of this job")]
    JobLost {
        /// The file.
        file: String,
    },
    /// A file of the manifest that is read without the lock, and that the job repairs when it is run again.
    #[error("{file} is missing or damaged")]
    Damaged {
        /// The file.
        file: String,
    },
    /// A part is written again and would end at another row, or its rows were read from other data.
    #[error("{file} cannot be written again: {reason}")]
    Repair {
        /// The part.
        file: String,
        /// What is wrong.
        reason: String,
    },
}

fn foreign(manifest: bool) -> &'static str {
    if manifest { "which its job did not write" } else { "but no manifest of a job" }
}

/// Names that a message lists.
const MAX_LISTED: usize = 5;

fn listed(files: &[String]) -> String {
    let first = files.iter().take(MAX_LISTED).map(String::as_str).collect::<Vec<_>>().join(", ");
    match files.len().saturating_sub(MAX_LISTED) {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}

impl Fault for ManifestError {
    fn exit(&self) -> Exit {
        match self {
            Self::Store(error) => error.exit(),
            Self::Differs { .. } | Self::NoFolder { .. } => Exit::Usage,
            _ => Exit::Storage,
        }
    }

    fn help(&self) -> Option<String> {
        let help = match self {
            Self::Store(error) => return error.help(),
            Self::Differs { .. } => {
                "use the settings and inputs of that job to resume it, or another --output, or --overwrite"
            }
            Self::Locked { .. } => {
                return Some(format!(
                    "wait for it, or use another --output; the lease of a killed job in an object store expires after {} s",
                    LEASE.as_secs()
                ));
            }
            Self::Overtaken { .. } => "run one job per output",
            Self::Foreign { .. } => {
                "use an empty --output; --overwrite removes the parts of an earlier job and nothing else"
            }
            Self::Unlisted { .. } => {
                "delete these files, or move them elsewhere, because readers of the folder read them too; then run the same \
                 command again"
            }
            Self::NoFolder { .. } => "give the name of a folder as --output; it is created when needed",
            Self::Vanished { .. } => {
                "do not change the output while a job runs; the same command again writes what is missing"
            }
            Self::Broken { .. } => "start over with --overwrite",
            Self::Damaged { .. } => {
                "run the elmo command of this output again, which repairs it when settings and rows are the same"
            }
            Self::JobLost { .. } => "use the settings of that job, or start over with --overwrite",
            Self::Repair { .. } => "restore the inputs as they were, or start over with --overwrite",
        };
        Some(help.to_owned())
    }
}
