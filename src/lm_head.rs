//! The LM head: the vocabulary and the softmax that the biLM was trained with, which make it a language model again.
//! Published weights come without it (`bilm-tf`, `bin/dump_weights.py`); training keeps it beside them.

use std::{
    collections::HashMap,
    fs::File,
    io::{BufRead, BufReader, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use sha2::{Digest, Sha256};
use thiserror::Error;

use crate::{
    chars::{BEGIN_SENTENCE_TOKEN, END_SENTENCE_TOKEN},
    error::{Error, Result},
    model::{DeviceName, Softmax},
    model_dir::{write_all, write_file},
    options::TensorSpec,
    weights::{self, Tensor, Weights},
};

/// A word per line, the most frequent first; the line is the word's number.
pub const VOCAB: &str = "vocab.txt";
/// `softmax/W [V, P]` and `softmax/b [V]`.
pub const SOFTMAX: &str = "softmax.safetensors";
/// What stands for words that are not in the vocabulary.
pub const UNKNOWN: &str = "<UNK>";

const WEIGHT: &str = "softmax/W";
const BIAS: &str = "softmax/b";
/// Longest line of a vocabulary, in bytes.
const LONGEST_WORD: u64 = 64 << 10;
/// Most words of a vocabulary: ten times the published one.
const MOST_WORDS: usize = 10_000_000;
/// Blocks of a softmax that its mark is made of, and their bytes.
const MARKED: (u64, u64) = (64, 64 << 10);

/// The head of a model is not there, or is not one.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum LmHeadError {
    /// The model has none.
    #[error(
        "the model {0} has no LM head: surprisal and perplexity need {VOCAB} and {SOFTMAX} beside the weights, which \
         training keeps and published weights lack"
    )]
    Missing(String),
    /// The vocabulary cannot be used.
    #[error("{path}: {reason}")]
    Vocab {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
}

/// Where the head of a model lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LmHeadFiles {
    dir: PathBuf,
}

impl LmHeadFiles {
    /// The head in a model directory, if both of its files are there.
    pub fn find(dir: &Path) -> Option<Self> {
        let is_there = dir.join(VOCAB).is_file() && dir.join(SOFTMAX).is_file();
        is_there.then(|| Self { dir: dir.to_owned() })
    }

    /// What tells this head from others: the SHA-256, in hexadecimal, of its vocabulary, of the size of its softmax file,
    /// and of 64 blocks of 64 KiB spread evenly over that file. A softmax has gigabytes; those that were trained apart
    /// differ everywhere.
    ///
    /// # Errors
    /// [`Error::Io`] when a file cannot be read.
    pub fn mark(&self) -> Result<String> {
        let mut hash = Sha256::new();
        let path = self.dir.join(VOCAB);
        let vocab = File::open(&path).and_then(|mut file| std::io::copy(&mut file, &mut hash));
        vocab.map_err(|e| Error::io(&path, e))?;
        let path = self.dir.join(SOFTMAX);
        let softmax = File::open(&path).and_then(|mut file| {
            let size = file.metadata()?.len();
            hash.update(size.to_le_bytes());
            let (blocks, bytes) = MARKED;
            // The last block ends where the file ends; those of a small file overlap.
            let last = size.saturating_sub(bytes);
            for block in 0..blocks {
                file.seek(SeekFrom::Start(last * block / (blocks - 1)))?;
                std::io::copy(&mut file.by_ref().take(bytes), &mut hash)?;
            }
            Ok(())
        });
        softmax.map_err(|e| Error::io(&path, e))?;
        Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// Reads vocabulary and softmax for a model whose projection has `width` numbers.
    ///
    /// # Errors
    /// [`Error::LmHead`] when the vocabulary is none, [`Error::Weights`] when the softmax is of another vocabulary or
    /// model, [`Error::Io`] when a file cannot be read.
    pub fn read(&self, width: usize) -> Result<LmHeadData> {
        let words = read_vocab(&self.dir.join(VOCAB))?;
        let plan = [
            TensorSpec { name: WEIGHT.to_owned(), shape: vec![words.len(), width] },
            TensorSpec { name: BIAS.to_owned(), shape: vec![words.len()] },
        ];
        let mut loaded = weights::safetensors::read_file(&self.dir.join(SOFTMAX), &plan)?.weights;
        numbers(&words)?;
        Ok(LmHeadData { words, weight: taken(&mut loaded, WEIGHT), bias: taken(&mut loaded, BIAS) })
    }
}

/// A tensor that was checked to be there.
fn taken(weights: &mut Weights, name: &str) -> Tensor {
    weights.remove(name).unwrap_or_else(|| Tensor { shape: vec![0], data: Vec::new() })
}

fn read_vocab(path: &Path) -> Result<Vec<String>> {
    let wrong = |reason: String| Error::from(LmHeadError::Vocab { path: path.to_owned(), reason });
    let file = File::open(path).map_err(|e| Error::io(path, e))?;
    let mut lines = BufReader::new(file);
    let mut words = Vec::new();
    loop {
        let mut line = Vec::new();
        let read = lines.by_ref().take(LONGEST_WORD).read_until(b'\n', &mut line).map_err(|e| Error::io(path, e))?;
        if read == 0 {
            return Ok(words);
        }
        let number = words.len() + 1;
        if read as u64 == LONGEST_WORD {
            return Err(wrong(format!("line {number} is longer than {LONGEST_WORD} bytes")));
        }
        if words.len() == MOST_WORDS {
            return Err(wrong(format!("more than {MOST_WORDS} words")));
        }
        let word = String::from_utf8(line).map_err(|_| wrong(format!("line {number} is not UTF-8")))?;
        words.push(word.trim_end_matches(['\n', '\r']).to_owned());
    }
}

/// Vocabulary and softmax, in memory.
#[derive(Debug, Clone, PartialEq)]
pub struct LmHeadData {
    words: Vec<String>,
    /// `[V, P]`
    weight: Tensor,
    /// `[V]`
    bias: Tensor,
}

impl LmHeadData {
    /// Puts a head together: `weight [V, P]`, `bias [V]` for `V` words, the first the most frequent.
    ///
    /// # Errors
    /// [`Error::LmHead`] when a word comes twice, or one of `<S>`, `</S>` and `<UNK>` is missing; [`Error::Weights`] when
    /// the shapes do not fit.
    pub fn new(words: Vec<String>, weight: Tensor, bias: Tensor) -> Result<Self> {
        let mut all = Weights::default();
        let width = weight.shape.get(1).copied().unwrap_or_default();
        all.insert(WEIGHT.to_owned(), weight);
        all.insert(BIAS.to_owned(), bias);
        let plan = [
            TensorSpec { name: WEIGHT.to_owned(), shape: vec![words.len(), width] },
            TensorSpec { name: BIAS.to_owned(), shape: vec![words.len()] },
        ];
        all.check(&plan, Path::new(SOFTMAX))?;
        numbers(&words)?;
        Ok(Self { words, weight: taken(&mut all, WEIGHT), bias: taken(&mut all, BIAS) })
    }

    /// Writes both files into a model directory; each appears under its name only when it is complete.
    ///
    /// # Errors
    /// [`Error::Io`] when the system fails.
    pub fn save(&self, dir: &Path) -> Result<()> {
        let path = dir.join(VOCAB);
        let text = self.words.iter().map(|word| format!("{word}\n")).collect::<String>();
        write_file(&path, |out| write_all(out, &path, text.as_bytes()))?;
        let path = dir.join(SOFTMAX);
        let mut all = Weights::default();
        all.insert(WEIGHT.to_owned(), self.weight.clone());
        all.insert(BIAS.to_owned(), self.bias.clone());
        write_file(&path, |out| weights::safetensors::write_to(out, &path, &all, &Default::default()))
    }
}

/// Numbers of words, and of those that every vocabulary has.
struct Vocab {
    numbers: HashMap<Box<str>, i64>,
    begin: i64,
    end: i64,
    unknown: i64,
}

fn numbers(words: &[String]) -> Result<Vocab, LmHeadError> {
    let wrong = |reason: String| LmHeadError::Vocab { path: VOCAB.into(), reason };
    let mut numbers = HashMap::with_capacity(words.len());
    for (number, word) in words.iter().enumerate() {
        if numbers.insert(word.as_str().into(), number as i64).is_some() {
            return Err(wrong(format!("line {} comes twice", number + 1)));
        }
    }
    let special = |word: &str| {
        let number = numbers.get(word).copied();
        number.ok_or_else(|| wrong(format!("{word} is missing; every vocabulary has <S>, </S> and <UNK>")))
    };
    let (begin, end, unknown) = (special(BEGIN_SENTENCE_TOKEN)?, special(END_SENTENCE_TOKEN)?, special(UNKNOWN)?);
    Ok(Vocab { numbers, begin, end, unknown })
}

/// A head on a device.
pub struct LmHead {
    /// [`LmHeadFiles::mark`], of a head that was read from files.
    mark: Option<String>,
    vocab: Vocab,
    softmax: Mutex<Softmax>,
}

impl std::fmt::Debug for LmHead {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LmHead({} words)", self.vocab.numbers.len())
    }
}

impl LmHead {
    /// Puts a head on a device.
    ///
    /// # Errors
    /// [`Error::Device`] when the device has no room.
    pub fn new(data: &LmHeadData, device: DeviceName) -> Result<Self> {
        let softmax = Softmax::new(&data.weight, &data.bias, device)?;
        Ok(Self { mark: None, vocab: numbers(&data.words)?, softmax: Mutex::new(softmax) })
    }

    /// [`LmHeadFiles::mark`] of the files that it was read from, if it was.
    pub fn mark(&self) -> Option<&str> {
        self.mark.as_deref()
    }

    /// The number of a word, and whether it is in the vocabulary.
    pub(crate) fn number(&self, word: &str) -> (i64, bool) {
        let number = self.vocab.numbers.get(word).copied();
        (number.unwrap_or(self.vocab.unknown), number.is_some_and(|number| number != self.vocab.unknown))
    }

    pub(crate) fn begin(&self) -> i64 {
        self.vocab.begin
    }

    pub(crate) fn end(&self) -> i64 {
        self.vocab.end
    }

    /// Natural logarithms of the probabilities of `targets [N]` after `states [N, P]`.
    pub(crate) fn log_probabilities(&self, states: &[f32], targets: &[i64]) -> Result<Vec<f32>> {
        // Held only for a handle: several threads compute side by side.
        let softmax = lock(&self.softmax).share();
        Ok(softmax.log_probabilities(states, targets)?)
    }
}

/// Tensors are valid at any time.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The head of a model, read and put on its device when somebody first asks.
#[derive(Debug)]
pub(crate) struct LazyHead {
    files: Option<LmHeadFiles>,
    head: Mutex<Option<Arc<LmHead>>>,
}

impl LazyHead {
    pub(crate) fn new(files: Option<LmHeadFiles>) -> Self {
        Self { files, head: Mutex::default() }
    }

    pub(crate) fn is_there(&self) -> bool {
        self.files.is_some()
    }

    /// Of the head that was read, else of the files as they are.
    pub(crate) fn mark(&self) -> Option<Result<String>> {
        let read = lock(&self.head).as_ref().and_then(|head| head.mark.clone());
        read.map(Ok).or_else(|| self.files.as_ref().map(LmHeadFiles::mark))
    }

    pub(crate) fn get(&self, model: &str, width: usize, device: DeviceName) -> Result<Arc<LmHead>> {
        let mut head = lock(&self.head);
        if let Some(head) = head.as_ref() {
            return Ok(Arc::clone(head));
        }
        let files = self.files.as_ref().ok_or_else(|| LmHeadError::Missing(model.to_owned()))?;
        let mark = files.mark()?;
        let data = files.read(width)?;
        if files.mark()? != mark {
            let reason = "it or the softmax beside it changed while they were read; try again".to_owned();
            return Err(LmHeadError::Vocab { path: files.dir.join(VOCAB), reason }.into());
        }
        let read = Arc::new(LmHead { mark: Some(mark), ..LmHead::new(&data, device)? });
        *head = Some(Arc::clone(&read));
        Ok(read)
    }
}
