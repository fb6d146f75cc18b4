//! The LM head: the vocabulary and the softmax that the biLM was trained with. With them it is a language model.
//!
//! Published weights come without an LM head (`bilm-tf`, `bin/dump_weights.py`); training writes it beside the weights.

use std::{
    collections::{BTreeMap, HashMap},
    fs::File,
    io::{BufRead, BufReader, Cursor, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

pub use crate::error::LmHeadError;
use crate::{
    built_in::BuiltIn,
    chars::{BEGIN_SENTENCE_TOKEN, END_SENTENCE_TOKEN},
    error::{Error, Result},
    files::{write_all, write_file},
    fingerprint::Fingerprint,
    json::without_mark,
    model::{DeviceName, Softmax},
    options::TensorSpec,
    weights::{self, Loaded, Tensor, Weights, safetensors::Numbers},
};
use sha2::{Digest, Sha256};

/// One word per line, the most frequent first. The id of a word is the number of its line, from 0.
pub const VOCAB: &str = "vocab.txt";
/// `softmax/W [V, P]` and `softmax/b [V]`.
pub const SOFTMAX: &str = "softmax.safetensors";
/// Stands for words that are not in the vocabulary.
pub const UNKNOWN: &str = "<UNK>";

/// Key of the metadata of the softmax that names its weights, as in the other files of a model.
const FINGERPRINT: &str = "elmo.fingerprint";
/// Key of the metadata of the softmax with [`digest_of_words`] for the words of its rows.
const WORDS: &str = "elmo.vocabulary";
const WEIGHT: &str = "softmax/W";
const BIAS: &str = "softmax/b";
/// Maximum size in bytes of a line of a vocabulary.
const MAX_LINE_BYTES: u64 = 64 << 10;
/// Maximum number of words of a vocabulary: ten times the published one.
const MAX_WORDS: usize = 10_000_000;
/// Blocks of a softmax that its digest covers.
const DIGEST_BLOCKS: u64 = 64;
/// Size in bytes of each of these blocks.
const DIGEST_BLOCK_BYTES: u64 = 64 << 10;

/// The files of an LM head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LmHeadFiles {
    place: Place,
    /// The weights to which the softmax must belong, if they are known.
    model: Option<Fingerprint>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    Directory(PathBuf),
    BuiltIn(BuiltIn),
}

/// A file, on disk or in memory.
trait Source: Read + Seek {}

impl<T: Read + Seek> Source for T {}

impl LmHeadFiles {
    /// The LM head in a model directory; `None` unless both files exist.
    pub fn find(dir: &Path) -> Option<Self> {
        let exists = dir.join(VOCAB).is_file() && dir.join(SOFTMAX).is_file();
        exists.then(|| Self { place: Place::Directory(dir.to_owned()), model: None })
    }

    /// Refuses a model directory that has a softmax without the words of its rows, which [`LmHeadFiles::find`] takes for a model without
    /// an LM head. A vocabulary alone belongs to models of other programs.
    ///
    /// # Errors
    /// [`LmHeadError::Half`].
    pub fn refuse_half(dir: &Path) -> Result<(), LmHeadError> {
        match [VOCAB, SOFTMAX].map(|name| dir.join(name).is_file()) {
            [false, true] => Err(LmHeadError::Half { missing: dir.join(VOCAB), found: SOFTMAX }),
            _ => Ok(()),
        }
    }

    /// The LM head of a built-in model; `None` unless it has one.
    pub fn built_in(model: BuiltIn) -> Option<Self> {
        model.file(SOFTMAX).map(|_| Self { place: Place::BuiltIn(model), model: None })
    }

    /// The path of a file, for messages.
    fn path(&self, name: &str) -> PathBuf {
        match &self.place {
            Place::Directory(dir) => dir.join(name),
            Place::BuiltIn(model) => Path::new(model.name()).join(name),
        }
    }

    fn open(&self, name: &str) -> Result<(PathBuf, Box<dyn Source>)> {
        let path = self.path(name);
        let source: Box<dyn Source> = match &self.place {
            Place::Directory(_) => Box::new(BufReader::new(File::open(&path).map_err(|e| Error::io(&path, e))?)),
            Place::BuiltIn(model) => Box::new(Cursor::new(model.file(name).unwrap_or_default())),
        };
        Ok((path, source))
    }

    /// The LM head beside weights that were read. A softmax that names other weights is refused: training replaces both,
    /// one after the other. One that names none is accepted.
    ///
    /// # Errors
    /// [`LmHeadError::OtherModel`] in [`Error::LmHead`]; [`Error::Weights`] when the softmax is not a safetensors file.
    pub fn beside(dir: &Path, model: &Fingerprint) -> Result<Option<Self>> {
        let Some(files) = Self::find(dir) else { return Ok(None) };
        let files = Self { model: Some(model.clone()), ..files };
        // A softmax that cannot be read is an error of whoever needs it.
        if let Ok(header) = weights::safetensors::read_file(&dir.join(SOFTMAX), &[]) {
            files.check(&header)?;
        }
        Ok(Some(files))
    }

    fn check(&self, softmax: &Loaded) -> Result<(), LmHeadError> {
        match (&self.model, softmax.metadata.get(FINGERPRINT)) {
            (Some(model), Some(named)) if named != model.as_str() => Err(LmHeadError::OtherModel {
                path: self.path(SOFTMAX),
                expected: model.to_string(),
                found: named.clone(),
            }),
            _ => Ok(()),
        }
    }

    /// Identifies this LM head: the SHA-256, in hexadecimal, of its vocabulary, of the size of its softmax file, and of
    /// 64 blocks of 64 KiB spread evenly over that file. A softmax has gigabytes, and two that were trained separately
    /// differ everywhere.
    ///
    /// # Errors
    /// [`Error::Io`] when a file cannot be read.
    pub fn digest(&self) -> Result<String> {
        let mut hash = Sha256::new();
        let (path, mut vocab) = self.open(VOCAB)?;
        std::io::copy(&mut vocab, &mut hash).map_err(|e| Error::io(&path, e))?;
        let (path, mut file) = self.open(SOFTMAX)?;
        let mut blocks = || {
            let size = file.seek(SeekFrom::End(0))?;
            hash.update(size.to_le_bytes());
            // The last block ends where the file ends; those of a small file overlap.
            let last = size.saturating_sub(DIGEST_BLOCK_BYTES);
            for block in 0..DIGEST_BLOCKS {
                file.seek(SeekFrom::Start(last * block / (DIGEST_BLOCKS - 1)))?;
                std::io::copy(&mut file.by_ref().take(DIGEST_BLOCK_BYTES), &mut hash)?;
            }
            Ok(())
        };
        blocks().map_err(|e| Error::io(&path, e))?;
        Ok(hex(&hash.finalize()))
    }

    /// Reads vocabulary and softmax for a model whose projection has `width` numbers. A softmax that names the words of its rows is
    /// refused beside others, or beside the same ones in another order, with which every probability would be that of another word. One
    /// that names none is accepted.
    ///
    /// # Errors
    /// [`Error::LmHead`] when the vocabulary is invalid or not that of the softmax, [`Error::Weights`] when the softmax has the size of
    /// another model, [`Error::Io`] when a file cannot be read.
    pub fn read(&self, width: usize) -> Result<LmHeadData> {
        let (path, vocab) = self.open(VOCAB)?;
        let words = vocab_lines(BufReader::new(vocab), &path)?;
        let (path, mut softmax) = self.open(SOFTMAX)?;
        let shape = weights::safetensors::shape(&mut softmax, &path, WEIGHT)?;
        if let Some(rows) = shape.and_then(|shape| shape.first().copied()).filter(|rows| *rows != words.len()) {
            let words = words.len();
            let reason = format!(
                "has {words} words, but {SOFTMAX} has rows for {rows}; copy {VOCAB} and {SOFTMAX} of one model"
            );
            return Err(LmHeadError::Vocab { path: self.path(VOCAB), reason }.into());
        }
        let plan = [
            TensorSpec { name: WEIGHT.to_owned(), shape: vec![words.len(), width] },
            TensorSpec { name: BIAS.to_owned(), shape: vec![words.len()] },
        ];
        let loaded = weights::safetensors::read_from(&mut softmax, &path, &plan)?;
        self.check(&loaded)?;
        word_ids(&words)?;
        if loaded.metadata.get(WORDS).is_some_and(|named| *named != digest_of_words(&words)) {
            return Err(LmHeadError::OtherWords { path: self.path(VOCAB), softmax: path }.into());
        }
        let mut loaded = loaded.weights;
        Ok(LmHeadData { words, weight: take(&mut loaded, WEIGHT), bias: take(&mut loaded, BIAS) })
    }
}

/// Identifies words in their order: the SHA-256, in hexadecimal, of a file with a word per line. Line ends and byte-order mark of the
/// file that was read do not matter.
fn digest_of_words(words: &[String]) -> String {
    let mut hash = Sha256::new();
    for word in words {
        hash.update(word);
        hash.update("\n");
    }
    hex(&hash.finalize())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Removes a tensor that was checked to exist.
fn take(weights: &mut Weights, name: &str) -> Tensor {
    weights.remove(name).unwrap_or_else(|| Tensor { shape: vec![0], data: Vec::new() })
}

/// The words of a vocabulary, the most frequent first, from the bytes of its file; `path` names it in errors.
///
/// # Errors
/// [`Error::LmHead`] when a line is too long, empty or not UTF-8, a word occurs twice, or one of `<S>`, `</S>` and `<UNK>`
/// is missing.
pub fn parse_vocab(bytes: &[u8], path: &Path) -> Result<Vec<String>> {
    let words = vocab_lines(bytes, path)?;
    // Models that were trained with such a word are read all the same.
    if let Some(empty) = words.iter().position(String::is_empty) {
        let reason = format!("line {} is empty", empty + 1);
        return Err(LmHeadError::Vocab { path: path.to_owned(), reason }.into());
    }
    word_ids(&words).map_err(|error| match error {
        LmHeadError::Vocab { reason, .. } => LmHeadError::Vocab { path: path.to_owned(), reason },
        other => other,
    })?;
    Ok(words)
}

fn vocab_lines(mut lines: impl BufRead, path: &Path) -> Result<Vec<String>> {
    let wrong = |reason: String| Error::from(LmHeadError::Vocab { path: path.to_owned(), reason });
    let mut words = Vec::new();
    loop {
        let mut line = Vec::new();
        let read = lines.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut line).map_err(|e| Error::io(path, e))?;
        if read == 0 {
            return Ok(words);
        }
        let number = words.len() + 1;
        if read as u64 == MAX_LINE_BYTES {
            return Err(wrong(format!("line {number} is longer than {MAX_LINE_BYTES} bytes")));
        }
        if words.len() == MAX_WORDS {
            return Err(wrong(format!("more than {MAX_WORDS} words")));
        }
        let line = if words.is_empty() { without_mark(&line) } else { &line };
        let word = str::from_utf8(line).map_err(|_| wrong(format!("line {number} is not UTF-8")))?;
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
    /// Creates an LM head from `weight [V, P]` and `bias [V]` for `V` words, the most frequent first.
    ///
    /// # Errors
    /// [`Error::LmHead`] when a word occurs twice, or one of `<S>`, `</S>` and `<UNK>` is missing; [`Error::Weights`]
    /// when the shapes do not fit.
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
        word_ids(&words)?;
        Ok(Self { words, weight: take(&mut all, WEIGHT), bias: take(&mut all, BIAS) })
    }

    /// The words, the most frequent first.
    pub fn words(&self) -> &[String] {
        &self.words
    }

    /// `[V, P]`: what training resumes from.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// `[V]`
    pub fn bias(&self) -> &Tensor {
        &self.bias
    }

    /// Writes both files into a model directory, each of them atomically.
    ///
    /// # Errors
    /// [`Error::Io`] when the system fails.
    pub fn save(&self, dir: &Path) -> Result<()> {
        self.write(dir, Numbers::F32, BTreeMap::new())
    }

    /// As [`LmHeadData::save`]; the softmax names the weights to which it belongs, and is refused beside others. Its numbers
    /// may be rounded to float16.
    ///
    /// # Errors
    /// As [`LmHeadData::save`]; [`Error::Weights`] when a number is above the largest of float16.
    pub fn save_for(&self, model: &Fingerprint, dir: &Path, numbers: Numbers) -> Result<()> {
        self.write(dir, numbers, BTreeMap::from([(FINGERPRINT.to_owned(), model.to_string())]))
    }

    fn write(&self, dir: &Path, numbers: Numbers, mut header: BTreeMap<String, String>) -> Result<()> {
        header.insert(WORDS.to_owned(), digest_of_words(&self.words));
        let path = dir.join(VOCAB);
        let text = self.words.iter().map(|word| format!("{word}\n")).collect::<String>();
        write_file(&path, |out| write_all(out, &path, text.as_bytes()))?;
        let path = dir.join(SOFTMAX);
        let mut all = Weights::default();
        all.insert(WEIGHT.to_owned(), self.weight.clone());
        all.insert(BIAS.to_owned(), self.bias.clone());
        write_file(&path, |out| weights::safetensors::write_as(out, &path, &all, &header, numbers))
    }
}

/// The ids of words, and of those that every vocabulary has.
struct Vocab {
    ids: HashMap<Box<str>, i64>,
    begin: i64,
    end: i64,
    unknown: i64,
}

fn word_ids(words: &[String]) -> Result<Vocab, LmHeadError> {
    let wrong = |reason: String| LmHeadError::Vocab { path: VOCAB.into(), reason };
    let mut ids = HashMap::with_capacity(words.len());
    for (id, word) in words.iter().enumerate() {
        if ids.insert(word.as_str().into(), id as i64).is_some() {
            return Err(wrong(format!("the word of line {} occurs twice", id + 1)));
        }
    }
    let special = |word: &str| {
        let id = ids.get(word).copied();
        id.ok_or_else(|| wrong(format!("{word} is missing; every vocabulary has <S>, </S> and <UNK>")))
    };
    let (begin, end, unknown) = (special(BEGIN_SENTENCE_TOKEN)?, special(END_SENTENCE_TOKEN)?, special(UNKNOWN)?);
    Ok(Vocab { ids, begin, end, unknown })
}

/// An LM head on a device.
pub struct LmHead {
    /// [`LmHeadFiles::digest`], if it was read from files.
    digest: Option<String>,
    vocab: Vocab,
    softmax: Mutex<Softmax>,
}

impl std::fmt::Debug for LmHead {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LmHead({} words)", self.vocab.ids.len())
    }
}

impl LmHead {
    /// Loads an LM head onto a device.
    ///
    /// # Errors
    /// [`Error::Device`] when the device has no room.
    pub fn new(data: &LmHeadData, device: DeviceName) -> Result<Self> {
        let softmax = Softmax::new(&data.weight, &data.bias, device)?;
        Ok(Self { digest: None, vocab: word_ids(&data.words)?, softmax: Mutex::new(softmax) })
    }

    /// [`LmHeadFiles::digest`], if it was read from files.
    pub fn digest(&self) -> Option<&str> {
        self.digest.as_deref()
    }

    /// The id of a word, and whether it is in the vocabulary.
    pub(crate) fn id(&self, word: &str) -> (i64, bool) {
        let id = self.vocab.ids.get(word).copied();
        (id.unwrap_or(self.vocab.unknown), id.is_some_and(|id| id != self.vocab.unknown))
    }

    pub(crate) fn begin(&self) -> i64 {
        self.vocab.begin
    }

    pub(crate) fn end(&self) -> i64 {
        self.vocab.end
    }

    /// Natural logarithms of the probabilities of `targets [N]` after `states [N, P]`.
    pub(crate) fn log_probabilities(&self, states: &[f32], targets: &[i64]) -> Result<Vec<f32>> {
        // The lock is released before the product, so that several threads can compute at once.
        let softmax = lock(&self.softmax).share();
        Ok(softmax.log_probabilities(states, targets)?)
    }
}

/// A poisoned lock is harmless: tensors are valid at any time.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The LM head of a model, loaded on first use.
#[derive(Debug)]
pub(crate) struct LazyHead {
    files: Option<LmHeadFiles>,
    head: Mutex<Option<Arc<LmHead>>>,
}

impl LazyHead {
    pub(crate) fn new(files: Option<LmHeadFiles>) -> Self {
        Self { files, head: Mutex::default() }
    }

    pub(crate) fn exists(&self) -> bool {
        self.files.is_some()
    }

    /// Digest of the LM head if it is loaded, otherwise of its files.
    pub(crate) fn digest(&self) -> Option<Result<String>> {
        let loaded = lock(&self.head).as_ref().and_then(|head| head.digest.clone());
        loaded.map(Ok).or_else(|| self.files.as_ref().map(LmHeadFiles::digest))
    }

    pub(crate) fn get(&self, model: &str, width: usize, device: DeviceName) -> Result<Arc<LmHead>> {
        let mut head = lock(&self.head);
        if let Some(head) = head.as_ref() {
            return Ok(Arc::clone(head));
        }
        let files = self.files.as_ref().ok_or_else(|| LmHeadError::Missing(model.to_owned()))?;
        let digest = files.digest()?;
        let data = files.read(width)?;
        if files.digest()? != digest {
            let reason = "this file or the softmax beside it changed while they were read; try again".to_owned();
            return Err(LmHeadError::Vocab { path: files.path(VOCAB), reason }.into());
        }
        let loaded = Arc::new(LmHead { digest: Some(digest), ..LmHead::new(&data, device)? });
        *head = Some(Arc::clone(&loaded));
        Ok(loaded)
    }
}
