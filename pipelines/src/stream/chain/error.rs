//! Why a partition cannot be written.

use std::{io, path::PathBuf};

use thiserror::Error;

use crate::{
    error::{Exit, Fault},
    sink::SinkError,
    stores::StoreError,
    stream::TopicPartition,
};

/// Why a dataset cannot be opened, or a partition of it cannot be written.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ChainError {
    /// The store fails.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Rows cannot be encoded.
    #[error(transparent)]
    Sink(#[from] SinkError),
    /// The dataset was begun with other settings.
    #[error("{output} was begun by a stream with other settings:\n{}", differences.join("\n"))]
    Differs {
        /// The dataset.
        output: String,
        /// One line per difference.
        differences: Vec<String>,
    },
    /// The folder belongs to something else.
    #[error("{output} contains {file}, {what}")]
    Foreign {
        /// The dataset.
        output: String,
        /// One of the files.
        file: String,
        /// What the file says.
        what: &'static str,
    },
    /// There is nothing of a stream in the output.
    #[error("{output}: no dataset of a stream here")]
    NoDataset {
        /// The output.
        output: String,
    },
    /// The output, or a folder above it, is a file.
    #[error("{output}: {file} is a file, but an output must be a folder")]
    NoFolder {
        /// The dataset.
        output: String,
        /// The file.
        file: String,
    },
    /// An object of the chain that is not as a stream writes it.
    #[error("{file}: not a valid object of a stream: {reason}")]
    Damaged {
        /// The object.
        file: String,
        /// What is wrong.
        reason: String,
    },
    /// The store takes no object of this size.
    #[error("{file}: the store takes no object of {bytes} bytes in one request")]
    TooLarge {
        /// The object.
        file: String,
        /// Its size.
        bytes: u64,
    },
    /// The local disk on which encoded files wait.
    #[error("{}: cannot keep an encoded file here until it is published: {source}", folder.display())]
    Spill {
        /// The folder.
        folder: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The open file of a partition was left in the middle of a write.
    #[error("{partition}: the open file was left in the middle of a write; it must be dropped")]
    Aborted {
        /// The partition.
        partition: TopicPartition,
    },
    /// The broker has deleted messages that are not in the dataset.
    #[error(
        "{partition}: the dataset ends at offset {end}, but the broker has deleted all messages before offset {low}: \
         {} are lost", low - end
    )]
    Gap {
        /// The partition.
        partition: TopicPartition,
        /// The end of its chain.
        end: i64,
        /// The first offset that the broker has.
        low: i64,
    },
    /// The dataset has messages of another topic of this name.
    #[error(
        "{partition}: the id of the topic was {was} when the dataset was begun, and is {now}: it was created again"
    )]
    OtherTopic {
        /// The partition.
        partition: TopicPartition,
        /// The id of the topic when the chain was begun.
        was: String,
        /// Its id now.
        now: String,
    },
    /// The dataset has offsets that the topic has not reached.
    #[error("{partition}: the dataset ends at offset {end}, but the topic ends at offset {high}: it was created again")]
    Recreated {
        /// The partition.
        partition: TopicPartition,
        /// The end of its chain.
        end: i64,
        /// The end of the topic.
        high: i64,
    },
}

impl Fault for ChainError {
    fn exit(&self) -> Exit {
        match self {
            Self::Store(error) => error.exit(),
            Self::Sink(error) => error.exit(),
            Self::Differs { .. } | Self::NoFolder { .. } | Self::NoDataset { .. } => Exit::Usage,
            Self::Aborted { .. } => Exit::Failed,
            _ => Exit::Storage,
        }
    }

    fn help(&self) -> Option<String> {
        let help = match self {
            Self::Store(error) => return error.help(),
            Self::Sink(error) => return error.help(),
            Self::Differs { .. } => {
                "use the settings of that stream to continue it, or another --output, or a new --generation in the same one"
            }
            Self::Foreign { .. } => "use an empty --output",
            Self::NoDataset { .. } => {
                "give the folder that --output of elmo stream named, and its --generation if it had one"
            }
            Self::NoFolder { .. } => "give the name of a folder as --output; it is created when needed",
            Self::Damaged { .. } => {
                "restore the object from a backup; elmo inspect of the output shows what else is wrong with it"
            }
            Self::TooLarge { .. } => "make files smaller: --mb-per-file, or --rows-per-file",
            Self::Spill { .. } => "free space on this disk, or name another folder with --spill-dir",
            Self::Aborted { .. } => return None,
            Self::Gap { .. } => {
                "accept the loss with --on-gap skip, which records the gap in the next file; and raise retention.ms of the \
                 topic, so that it keeps messages for longer than the stream may be down"
            }
            Self::OtherTopic { .. } => {
                "start over beside the old rows with --generation, one more than the current one; or, if other topics should go on where \
                 they are and the old rows of this one may go, move its folders away, topic=TOPIC and _elmo/chain/TOPIC (below \
                 generation=N if there is one): it then begins anew; if it is the same topic, which was moved to another cluster with \
                 its offsets, remove topic_id from _elmo/chain/TOPIC/PARTITION/genesis.json"
            }
            Self::Recreated { .. } => {
                "start over beside the old rows with --generation, one more than the current one; if the broker lost its \
                 newest messages instead, the dataset still has them"
            }
        };
        Some(help.to_owned())
    }
}
