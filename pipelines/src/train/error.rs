//! Why a run cannot start or resume.

use std::{io::ErrorKind, path::PathBuf};

use elmo::{model::DeviceName, train::TrainError};
use thiserror::Error;

use crate::{
    error::{Exit, Fault},
    report::bytes,
};

/// Why a run cannot start or resume.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TrainFault {
    /// The folder holds a run with other settings.
    #[error("{output} holds a run with other settings:\n{}", indented(differences))]
    Differs {
        /// The folder of the run.
        output: PathBuf,
        /// One line per difference.
        differences: Vec<String>,
    },
    /// The corpus, or the held-out text, is not what it was when the run began.
    #[error("{output}: the {what} of this run has changed since the run started:\n{}", indented(differences))]
    Corpus {
        /// The folder of the run.
        output: PathBuf,
        /// Which text.
        what: &'static str,
        /// One line per difference.
        differences: Vec<String>,
    },
    /// There are checkpoints, but none of them is complete.
    #[error("{folder}: all checkpoints are damaged:\n{}", indented(problems))]
    Damaged {
        /// The folder of the checkpoints.
        folder: PathBuf,
        /// One line per checkpoint.
        problems: Vec<String>,
    },
    /// The run has made checkpoints, and none of them is left.
    #[error("{folder}: this run has made checkpoints, and none of them is left to resume from")]
    Lost {
        /// The folder of the checkpoints.
        folder: PathBuf,
    },
    /// The run is complete, a file of its model is missing, and there is no checkpoint with these weights.
    #[error(
        "{path} is missing: it belongs to the model of step {step}, and there is no complete checkpoint of that step"
    )]
    ModelLost {
        /// The file.
        path: PathBuf,
        /// Step of the model.
        step: u64,
    },
    /// The copy of a checkpoint in a store is not what was written.
    #[error("{copy}: damaged: {reason}")]
    DamagedCopy {
        /// The folder of the copy.
        copy: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The run is complete, and its last checkpoint was not copied.
    #[error("the last checkpoint of the run was not copied to {url}: {reason}")]
    NotUploaded {
        /// Where it should be.
        url: String,
        /// Why.
        reason: String,
    },
    /// The folder holds something else.
    #[error("{output} contains {file}, which was not written by `elmo train`")]
    Foreign {
        /// The folder.
        output: PathBuf,
        /// The file.
        file: String,
    },
    /// Another process trains there.
    #[error("{output}: another process is training there")]
    Locked {
        /// The folder.
        output: PathBuf,
    },
    /// Another run was begun there while the text of this one was read.
    #[error("{output}: another run was started there in the meantime")]
    Begun {
        /// The folder.
        output: PathBuf,
    },
    /// The vocabulary cannot be used for training.
    #[error("{file}: {reason}")]
    Vocabulary {
        /// The file.
        file: String,
        /// Why.
        reason: String,
    },
    /// A file of the run cannot be written.
    #[error("{path}: {source}")]
    Write {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: std::io::Error,
        /// The last checkpoint that is complete.
        last: Option<PathBuf>,
    },
    /// The loss has jumped, or the loss, a gradient or a weight is not finite.
    #[error("{reason}; {}{}", last_good(last), if *went_back { ", and going back to a checkpoint did not help" } else { "" })]
    Spike {
        /// The step, and what is wrong.
        reason: String,
        /// It is a loss that jumped: the run could go on.
        is_finite: bool,
        /// The last checkpoint.
        last: Option<PathBuf>,
        /// The run has gone back to checkpoints, in vain.
        went_back: bool,
    },
    /// The run ended with an error of the text, after its state was written.
    #[error("{error}; the state after step {step} is in {}", checkpoint.display())]
    Saved {
        /// The error.
        error: Box<crate::error::Error>,
        /// Steps that were made.
        step: u64,
        /// The checkpoint.
        checkpoint: PathBuf,
    },
    /// The processes do not fit into memory, whatever they compute.
    #[error(
        "{processes} processes take at least {} for the program alone, but only {} of memory are free",
        bytes(*needed),
        bytes(*available)
    )]
    Processes {
        /// Processes of this machine.
        processes: usize,
        /// Bytes that they need.
        needed: u64,
        /// Bytes that are free.
        available: u64,
    },
    /// The run does not fit into memory.
    #[error(
        "weights and the state of the optimiser take {}, and with the gradients and activations of a step, or the copy of a \
         checkpoint, at least {}{}; but only {} of {} are free",
        bytes(*state),
        bytes(*needed),
        of_processes(*processes),
        bytes(*available),
        if *device == DeviceName::Cpu { "memory".to_owned() } else { format!("the memory of {device}") }
    )]
    Memory {
        /// Bytes of weights and the state of the optimiser.
        state: u64,
        /// Bytes that the processes of this machine need, by an estimate that is low.
        needed: u64,
        /// Bytes that are free.
        available: u64,
        /// Processes of this machine that take them.
        processes: usize,
        /// The device.
        device: DeviceName,
    },
    /// The sampled softmax draws negatives by rank, and the vocabulary has not the order of this corpus.
    #[error("{file} is not sorted by the frequency of words in this corpus: {words}, and negatives are drawn by rank")]
    Unsorted {
        /// The vocabulary.
        file: String,
        /// The first words that are out of order, with their counts.
        words: String,
    },
    /// A step failed.
    #[error(transparent)]
    Step(TrainError),
    /// Another process of the run has failed.
    #[error("process {rank} of this run has failed{}", said(reason))]
    Elsewhere {
        /// The process.
        rank: usize,
        /// What it says.
        reason: Option<String>,
    },
    /// A process of the run reads other text, or has other settings, than process 0.
    #[error("process {rank} has other settings or another corpus than process 0:\n{}", indented(differences))]
    Unequal {
        /// The process.
        rank: usize,
        /// One line per difference.
        differences: Vec<String>,
    },
    /// A process of the run was killed.
    #[error("process {rank} of this run was killed by signal {signal}; the others were stopped")]
    Killed {
        /// The process.
        rank: usize,
        /// The signal.
        signal: i32,
    },
    /// The run was interrupted.
    #[error("interrupted after step {step}; its checkpoint is {}", checkpoint.display())]
    Interrupted {
        /// Steps that were made.
        step: u64,
        /// The checkpoint.
        checkpoint: PathBuf,
    },
}

/// What takes less memory, what a run can go on with first.
const LESS_MEMORY: &str = "give fewer --rows and as many times more --accumulate, with which a run also goes on, and on a CPU fewer \
                           --threads; or start over with a smaller --size, a shorter --unroll, fewer --samples or a vocabulary of \
                           fewer words; --optimizer adagrad takes less than adamw, and --dry-run measures the memory";

fn indented(lines: &[String]) -> String {
    lines.iter().map(|line| format!("  {line}")).collect::<Vec<_>>().join("\n")
}

fn of_processes(processes: usize) -> String {
    if processes == 1 { String::new() } else { format!(" in {processes} processes") }
}

fn said(reason: &Option<String>) -> String {
    reason.as_ref().map_or_else(|| "; its own message says why".to_owned(), |reason| format!(": {reason}"))
}

/// What lets a file be written.
fn remedy(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => "make room on the disk",
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => "correct the permissions of the folder",
        ErrorKind::NotFound | ErrorKind::NotADirectory => "restore the folder",
        _ => "correct the cause",
    }
}

fn last_good(last: &Option<PathBuf>) -> String {
    match last {
        Some(last) => format!("the last good checkpoint is {}", last.display()),
        None => "there is no checkpoint yet".to_owned(),
    }
}

impl From<TrainError> for TrainFault {
    fn from(error: TrainError) -> Self {
        Self::Step(error)
    }
}

impl Fault for TrainFault {
    fn exit(&self) -> Exit {
        match self {
            Self::Differs { .. } | Self::Foreign { .. } | Self::Step(TrainError::Recipe(_)) => Exit::Usage,
            Self::Corpus { .. } | Self::Vocabulary { .. } | Self::Unsorted { .. } => Exit::Input,
            Self::DamagedCopy { .. } | Self::NotUploaded { .. } => Exit::Storage,
            Self::Damaged { .. } | Self::Lost { .. } | Self::ModelLost { .. } => Exit::Storage,
            Self::Locked { .. } | Self::Begun { .. } | Self::Write { .. } => Exit::Storage,
            Self::Spike { .. } | Self::Step(_) | Self::Elsewhere { .. } | Self::Killed { .. } => Exit::Failed,
            Self::Unequal { .. } | Self::Memory { .. } | Self::Processes { .. } => Exit::Usage,
            Self::Interrupted { .. } => Exit::Interrupted,
            Self::Saved { error, .. } => error.exit(),
        }
    }

    fn help(&self) -> Option<String> {
        let help = match self {
            Self::Differs { .. } => {
                "give the settings of that run to resume it, or another --output (and --upload), or --overwrite to start over"
            }
            Self::Corpus { .. } => {
                "restore the files as they were; or train on the new text with another --output and --init, which starts \
                 from the weights of this run"
            }
            Self::Damaged { .. } => "start over with --overwrite, or restore a checkpoint from a backup",
            Self::Lost { .. } => {
                "restore a checkpoint from a backup, or give another --output; or start over with --overwrite, which replaces \
                 the model of that run"
            }
            Self::ModelLost { .. } => {
                "restore all files of the model from a backup; or give more --steps or --epochs, with which the run goes on from \
                 its last checkpoint and writes the model of that step; or start over with --overwrite"
            }
            Self::DamagedCopy { .. } => {
                "remove that folder to resume from the copy before it; or start over with --overwrite, which removes all copies"
            }
            Self::NotUploaded { .. } => "the model is in the folder of the run; the same command tries the copy again",
            Self::Foreign { .. } => "give an empty or new folder as --output",
            Self::Locked { .. } => "wait for it, or give another --output",
            Self::Begun { .. } => "run the same command again to resume that run, or give another --output",
            Self::Vocabulary { .. } => {
                "negatives are drawn by the rank of a word, so the most frequent words must come first: write the \
                 vocabulary with elmo vocab, or remove the counts if they are of another text"
            }
            Self::Write { source, last: Some(last), .. } => {
                let first = remedy(source.kind());
                return Some(format!("{first} and run the same command again: it resumes from {}", last.display()));
            }
            Self::Write { source, .. } => {
                return Some(format!(
                    "{} and run the same command again, or give another --output",
                    remedy(source.kind())
                ));
            }
            Self::Unsorted { .. } => {
                "write the vocabulary of this corpus with elmo vocab, or give --samples 0 for the softmax over all words"
            }
            Self::Memory { .. } => LESS_MEMORY,
            Self::Processes { .. } => "give fewer --processes: more than the machine has cores are not faster",
            Self::Saved { error, .. } => {
                let first = error.help().map_or_else(String::new, |help| format!("{help}; "));
                return Some(format!("{first}the same command, without --overwrite, resumes from there"));
            }
            Self::Spike { went_back: true, .. } => {
                "start over with a lower --learning-rate, a lower --clip-norm, or --schedule inverse-sqrt with a --warm-up"
            }
            Self::Spike { is_finite: true, .. } => {
                "give --on-spike rollback, which returns to a checkpoint and skips the text that caused it, or \
                 --on-spike ignore if the text explains the jump; or start over with a lower --learning-rate, or --schedule inverse-sqrt with a --warm-up"
            }
            Self::Spike { .. } => {
                "give --on-spike rollback, which returns to a checkpoint and skips the text that caused it; or start over \
                 with a lower --learning-rate"
            }
            Self::Step(TrainError::Collective(error)) if error.is_start() => {
                "start all processes of the run, with the same MASTER_ADDR and MASTER_PORT; for those that need longer, give a \
                 longer --start-timeout"
            }
            Self::Step(TrainError::Collective(_)) => {
                "another process of the run has exited or does not respond: see its messages. The same command resumes from \
                 the last checkpoint"
            }
            Self::Step(TrainError::Device(error)) if error.is_out_of_memory() => LESS_MEMORY,
            Self::Elsewhere { .. } => {
                "the same command, without --overwrite, resumes from the last checkpoint, if there is one"
            }
            Self::Step(_) => return None,
            Self::Unequal { .. } => "give all processes the same arguments, and the same files",
            Self::Killed { signal: libc::SIGKILL, .. } => {
                "if memory was short, give fewer --rows and more --accumulate; the same command, without --overwrite, resumes \
                 from the last checkpoint"
            }
            Self::Killed { .. } => "the same command, without --overwrite, resumes from the last checkpoint",
            Self::Interrupted { .. } => "run the same command again, without --overwrite, to resume",
        };
        Some(help.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_be_written_has_the_help_of_its_cause() {
        let help = |kind: ErrorKind, last: Option<&str>| {
            let (path, last) = (PathBuf::from("run/steps.jsonl"), last.map(PathBuf::from));
            TrainFault::Write { path, source: kind.into(), last }.help().unwrap()
        };
        let again = "and run the same command again: it resumes from step-7";
        for (kind, first) in [
            (ErrorKind::StorageFull, "make room on the disk"),
            (ErrorKind::QuotaExceeded, "make room on the disk"),
            (ErrorKind::ReadOnlyFilesystem, "correct the permissions of the folder"),
            (ErrorKind::NotADirectory, "restore the folder"),
            (ErrorKind::Other, "correct the cause"),
        ] {
            assert_eq!(help(kind, Some("step-7")), format!("{first} {again}"));
        }
        let denied = help(ErrorKind::PermissionDenied, None);
        assert_eq!(
            denied,
            "correct the permissions of the folder and run the same command again, or give another --output"
        );
    }
}
