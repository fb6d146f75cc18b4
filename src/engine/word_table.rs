//! The distinct words of a batch and their token vectors.

use std::collections::HashMap;

use super::job::Job;
use crate::{
    chars,
    model::{BiLm, DeviceError},
    word_cache::WordCache,
};

/// Token vectors of the distinct words of a batch, and each sentence as indices into them.
#[derive(Debug)]
pub(super) struct WordTable<'j> {
    /// `[U, P]`; empty where the vectors are on the device.
    pub(super) vectors: Vec<f32>,
    /// `[U]`: where they are there ([`DeviceWords`](super::device_words::DeviceWords)).
    pub(super) rows: Vec<i64>,
    /// An index `0..U` per token, boundaries included where they are read.
    pub(super) sentences: Vec<Vec<i64>>,
    /// Tokens whose word was in the cache.
    pub(super) hits: u64,
    /// Words that were not in the cache.
    pub(super) computed: Vec<&'j str>,
}

impl<'j> WordTable<'j> {
    /// Reads vectors from the cache, and computes and caches the others.
    pub(super) fn new(jobs: &'j [Job], boundaries: bool, model: &BiLm, cache: &WordCache) -> Result<Self, DeviceError> {
        let (words, sentences) = DistinctWords::of(jobs, boundaries);
        let width = model.projection_dim();
        let mut vectors = vec![0.0; words.words.len() * width]; // [U, P]
        let mut missing = Vec::new();
        let mut hits = 0;
        for (i, word) in words.words.iter().enumerate() {
            match cache.get(word) {
                Some(vector) => {
                    vectors[i * width..(i + 1) * width].copy_from_slice(&vector);
                    hits += words.uses[i];
                }
                None => missing.push(i),
            }
        }
        let computed: Vec<&str> = missing.iter().map(|&i| words.words[i]).collect();
        let new = model.token_vectors(&computed)?; // [missing, P]
        for ((&i, word), vector) in missing.iter().zip(&computed).zip(new.chunks_exact(width)) {
            vectors[i * width..(i + 1) * width].copy_from_slice(vector);
            cache.insert(word, vector);
        }
        Ok(Self { vectors, rows: Vec::new(), sentences, hits, computed })
    }
}

/// The distinct words of a batch, in the order in which they first occur.
#[derive(Debug, Default)]
pub(super) struct DistinctWords<'j> {
    index: HashMap<&'j str, i64>,
    pub(super) words: Vec<&'j str>,
    /// Tokens per word.
    pub(super) uses: Vec<u64>,
}

impl<'j> DistinctWords<'j> {
    /// The words of a batch, and each sentence as indices into them.
    pub(super) fn of(jobs: &'j [Job], boundaries: bool) -> (Self, Vec<Vec<i64>>) {
        let mut words = Self::default();
        let sentences = jobs.iter().map(|job| words.indices(job, boundaries)).collect();
        (words, sentences)
    }

    fn indices(&mut self, job: &'j Job, boundaries: bool) -> Vec<i64> {
        let words = &job.sentence.words;
        let boundary = |word: &'static str| boundaries.then_some(word);
        let mut indices = Vec::with_capacity(words.len() + 2);
        let first = boundary(chars::BEGIN_SENTENCE_TOKEN).into_iter();
        for word in first.chain(words.iter()).chain(boundary(chars::END_SENTENCE_TOKEN)) {
            indices.push(self.index_of(word));
        }
        indices
    }

    fn index_of(&mut self, word: &'j str) -> i64 {
        let next = self.words.len() as i64;
        let index = *self.index.entry(word).or_insert(next);
        if index == next {
            self.words.push(word);
            self.uses.push(0);
        }
        self.uses[index as usize] += 1;
        index
    }
}
