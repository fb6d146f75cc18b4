//! Columns of text in, columns of vectors out: what SQL, bulk jobs and streams share.
//!
//! Rows in are rows out, in order. A row that cannot be embedded is NULL with a reason, left out, or an
//! error, as [`OnError`] says; the rows beside it never notice.

use std::{
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
};

use arrow::{
    array::{ArrayRef, BooleanArray, StringArray, UInt32Array},
    datatypes::Field,
};

use crate::{
    Elmo,
    embedder::{Cost, Embedder, EmbedderMetrics, Recipe, Sentence, Ticket, Vectors, Words},
    error::{Error, Result},
    layout::ColumnLayout,
    model::{DeviceError, DeviceName},
    pooling::{self, Joiner},
    rows::{Row, Rows},
    spec::{EmbedSpec, Level, OnError, OnLong, SentenceMode, StateMode},
    states::Carry,
    text::{self, windows::windows},
    vectors::{self, TokenRow, VectorType},
};

/// Texts above this many bytes are embedded piece by piece, so that one huge cell never needs more memory
/// than its pieces.
const HUGE_TEXT: usize = 1 << 20;
/// Sentences of a huge text that are under way at once.
const HUGE_PIECE: usize = 2048;
/// Most bytes of one sentence: with sentences off a text of any size would be one, and all of its tokens are in memory
/// at a time.
const MOST_SENTENCE: usize = 8 << 20;
/// Most bytes of token vectors that one row may have; beyond it a list is no way to keep them.
const MOST_TOKEN_BYTES: usize = 256 << 20;

/// Embeds columns of text with one model and one set of settings.
#[derive(Debug, Clone)]
pub struct ColumnEmbedder {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    embedder: Embedder,
    spec: EmbedSpec,
    recipe: Arc<Recipe>,
    vector_type: VectorType,
    metadata: Vec<(String, String)>,
    device_kind: &'static str,
    /// State `carry` only: runs in the order of the calls, outside the engine.
    carry: Option<Mutex<Carry>>,
}

impl ColumnEmbedder {
    /// Checks `spec` against itself and the model. State `warm` computes the warm state here, unless it came with the
    /// model or was computed before.
    ///
    /// # Errors
    /// [`Error::Spec`] when settings exclude each other, the model has no such layer, or the mix is for another number
    /// of layers; [`Error::Device`] when the device fails (states `warm` and `carry` only).
    pub fn new(elmo: &Elmo, spec: EmbedSpec) -> Result<Self> {
        let ColumnLayout { vector_type, output } = ColumnLayout::new(elmo.options(), elmo.fingerprint(), &spec)?;
        let recipe = Arc::new(Recipe {
            warm: spec.state == StateMode::Warm,
            boundaries: spec.boundaries,
            output,
            pooling: (spec.level == Level::Sentence).then_some(spec.pooling),
        });
        let carry = match spec.state {
            StateMode::Carry => Some(Mutex::new(elmo.carry()?)),
            StateMode::Zero | StateMode::Warm => None,
        };
        let metadata = metadata(elmo, &spec)?;
        let embedder = elmo.embedder().clone();
        let device_kind = if elmo.devices().contains(&DeviceName::Cpu) { "cpu" } else { "cuda" };
        Ok(Self { inner: Arc::new(Inner { embedder, spec, recipe, vector_type, metadata, device_kind, carry }) })
    }

    /// The settings.
    pub fn spec(&self) -> &EmbedSpec {
        &self.inner.spec
    }

    /// Values of one vector: `2P`, times the layers with `layers all`.
    pub fn width(&self) -> usize {
        self.inner.vector_type.width()
    }

    /// The vector field (`embedding` or `tokens`), then `truncated` and `error`.
    pub fn fields(&self) -> Vec<Field> {
        self.inner.vector_type.fields()
    }

    /// The `elmo.*` pairs that say which model and settings made an output.
    pub fn metadata(&self) -> Vec<(String, String)> {
        self.inner.metadata.clone()
    }

    /// Counters of the engine since it started, whoever used it.
    pub fn metrics(&self) -> EmbedderMetrics {
        self.inner.embedder.metrics()
    }

    /// `cpu` or `cuda`: vectors of one kind of device differ from the other's by rounding.
    pub fn device_kind(&self) -> &'static str {
        self.inner.device_kind
    }

    /// Tokens that all devices take at once.
    pub fn tokens_at_once(&self) -> usize {
        self.inner.embedder.tokens_at_once()
    }

    /// Queues a column; blocks while the queue is full.
    ///
    /// `column` holds strings, binary (UTF-8) or lists of strings, in any Arrow encoding. State `carry` embeds the
    /// column before this returns, in batches of `batch_rows`; where the rows are no multiple of that, the last batch
    /// is shorter.
    ///
    /// # Errors
    /// [`Error::Column`] when the column's type holds no text, [`Error::Closed`] when the engine was closed,
    /// [`Error::Device`] when the device fails in state `carry`. Errors of rows come with the answer.
    pub fn submit(&self, column: &ArrayRef) -> Result<PendingColumns> {
        let mut request = self.inner.read(column)?;
        if let Some(carry) = &self.inner.carry {
            return self.inner.run_carried(carry, request);
        }
        let sentences = std::mem::take(&mut request.sentences);
        let ticket = self.inner.embedder.submit(sentences, &self.inner.recipe)?;
        Ok(PendingColumns::new(Arc::clone(&self.inner), Waiting::Queued(ticket), request))
    }

    /// Queues a column; yields while the queue is full. State `carry` embeds the column here and does not yield.
    ///
    /// # Errors
    /// As [`ColumnEmbedder::submit`].
    pub async fn submit_async(&self, column: &ArrayRef) -> Result<PendingColumns> {
        if self.inner.carry.is_some() {
            return self.submit(column);
        }
        let mut request = self.inner.read(column)?;
        let sentences = std::mem::take(&mut request.sentences);
        let ticket = self.inner.embedder.submit_async(sentences, &self.inner.recipe).await?;
        Ok(PendingColumns::new(Arc::clone(&self.inner), Waiting::Queued(ticket), request))
    }

    /// Embeds a column and waits: for callers that are not asynchronous.
    ///
    /// # Errors
    /// As [`ColumnEmbedder::submit`] and [`PendingColumns::wait`].
    pub fn embed(&self, column: &ArrayRef) -> Result<EmbeddedColumns> {
        self.submit(column)?.wait()
    }
}

/// Columns of an answer; as many rows as the column given, in its order.
#[derive(Debug)]
pub struct EmbeddedColumns {
    /// The column `embedding` or `tokens`, with `V` = `FixedSizeList<Float32, W>`, or `List<Float32>` with list type
    /// `list`, and `W` = [`ColumnEmbedder::width`] values:
    ///
    /// * level `sentence`: `V`; NULL for a NULL text, a text without tokens and a row with an error.
    /// * level `token`: `List<Struct<token: Utf8, start: UInt32, end: UInt32, sentence: UInt32, embedding: V>>`;
    ///   `start` and `end` are byte offsets in the text (of a list of tokens: in the tokens joined by single spaces),
    ///   `sentence` counts from 0 in it. A text without tokens is an empty list, a NULL text and a row with an error
    ///   are NULL.
    pub vectors: ArrayRef,
    /// Whether a sentence of the row was cut.
    pub truncated: BooleanArray,
    /// Why a row has no vector; NULL when fine.
    pub error: StringArray,
    /// Tokens of a row that were read, boundaries and the overlap of windows not counted.
    pub tokens: UInt32Array,
    /// Rows to keep with on-error `skip`; `None` when all stay.
    pub keep: Option<BooleanArray>,
    /// Counts.
    pub stats: ColumnStats,
    /// What it cost; zero in state `carry`.
    pub cost: Cost,
}

/// Counts of one column.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ColumnStats {
    /// Rows.
    pub rows: usize,
    /// NULL texts.
    pub nulls: usize,
    /// Empty or blank texts.
    pub empty: usize,
    /// Sentences given to the biLM, windows counted one by one.
    pub sentences: usize,
    /// Tokens given to the biLM, the overlap of windows counted twice.
    pub tokens: usize,
    /// Rows with a truncated sentence.
    pub truncated: usize,
    /// Rows with an error.
    pub errors: usize,
}

/// An answer on its way: block on [`PendingColumns::wait`], or await it.
#[must_use]
pub struct PendingColumns {
    state: Pin<Box<dyn Future<Output = Result<EmbeddedColumns>> + Send>>,
    /// For `wait`: the same work, blocking.
    blocking: Arc<Mutex<Option<Parts>>>,
}

/// What is left to do for a request.
struct Parts {
    inner: Arc<Inner>,
    waiting: Waiting,
    request: Request,
}

enum Waiting {
    Queued(Ticket),
    Done(Vec<std::result::Result<Vectors, DeviceError>>),
}

impl std::fmt::Debug for PendingColumns {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PendingColumns").finish_non_exhaustive()
    }
}

impl PendingColumns {
    fn new(inner: Arc<Inner>, waiting: Waiting, request: Request) -> Self {
        let blocking = Arc::new(Mutex::new(Some(Parts { inner, waiting, request })));
        let parts = Arc::clone(&blocking);
        let state = Box::pin(async move {
            match take(&parts) {
                Some(parts) => parts.finish_async().await,
                None => Err(Error::Closed),
            }
        });
        Self { state, blocking }
    }

    /// Blocks until the answer is there.
    ///
    /// # Errors
    /// [`Error::Row`] for the first row that cannot be embedded, with on-error `fail`; [`Error::Device`] when the
    /// device fails; [`Error::Arrow`] when there are more values than Arrow's offsets count; [`Error::Closed`] when the
    /// engine was closed before all of a huge text was queued, or this was polled before.
    pub fn wait(self) -> Result<EmbeddedColumns> {
        take(&self.blocking).map_or(Err(Error::Closed), Parts::finish)
    }
}

fn take(parts: &Mutex<Option<Parts>>) -> Option<Parts> {
    parts.lock().unwrap_or_else(PoisonError::into_inner).take()
}

impl Future for PendingColumns {
    type Output = Result<EmbeddedColumns>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.state.as_mut().poll(context)
    }
}

impl Parts {
    fn finish(mut self) -> Result<EmbeddedColumns> {
        let answers = match self.waiting {
            Waiting::Queued(ticket) => self.request.paid(ticket.wait()),
            Waiting::Done(answers) => answers,
        };
        self.request.fill(&self.inner, answers)?;
        for row in self.request.huge_rows() {
            let mut huge = HugeText::new(&self.inner, &self.request, row);
            while let Some(piece) = huge.next_piece() {
                let (answers, cost) = self.inner.embedder.submit(piece, &self.inner.recipe)?.wait();
                huge.add(answers, cost)?;
            }
            let done = huge.finish();
            self.request.set_huge(row, done);
        }
        self.request.finish(&self.inner)
    }

    async fn finish_async(mut self) -> Result<EmbeddedColumns> {
        let answers = match self.waiting {
            Waiting::Queued(ticket) => self.request.paid(ticket.await),
            Waiting::Done(answers) => answers,
        };
        self.request.fill(&self.inner, answers)?;
        for row in self.request.huge_rows() {
            let mut huge = HugeText::new(&self.inner, &self.request, row);
            while let Some(piece) = huge.next_piece() {
                let (answers, cost) = self.inner.embedder.submit_async(piece, &self.inner.recipe).await?.await;
                huge.add(answers, cost)?;
            }
            let done = huge.finish();
            self.request.set_huge(row, done);
        }
        self.request.finish(&self.inner)
    }
}

/// One column on its way through the engine.
struct Request {
    rows: Rows,
    plans: Vec<RowPlan>,
    sentences: Vec<Sentence>,
    outcomes: Vec<Outcome>,
    stats: ColumnStats,
    cost: Cost,
}

/// What a row asks of the engine.
enum RowPlan {
    Null,
    /// `sentences[first..first + places.len()]`, and where their kept tokens stand in the text.
    Sentences {
        first: usize,
        places: Vec<Vec<Place>>,
        truncated: bool,
        tokens: usize,
    },
    Huge,
    Bad(String),
}

/// One token of the output.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub(crate) start: u32,
    pub(crate) end: u32,
    /// Index of the sentence in its text.
    pub(crate) sentence: u32,
    /// The word when it is not `text[start..end]`: a boundary.
    pub(crate) boundary: Option<&'static str>,
}

/// What became of a row.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// NULL text, or no tokens with a sentence vector wanted.
    Null,
    Pooled(Vec<f32>),
    Tokens(TokenRow),
    Bad(String),
}

impl Outcome {
    /// Bytes of the words of a token row.
    pub(crate) fn word_bytes(&self) -> usize {
        match self {
            Self::Tokens(row) => row.words.iter().map(|word| word.len()).sum(),
            Self::Null | Self::Pooled(_) | Self::Bad(_) => 0,
        }
    }
}

impl Inner {
    fn cutter(&self) -> Cutter<'_> {
        let most_tokens = match self.spec.level {
            Level::Sentence => usize::MAX,
            Level::Token => MOST_TOKEN_BYTES / (size_of::<f32>() * self.vector_type.width()),
        };
        Cutter { spec: &self.spec, most_tokens, sentences: Vec::new() }
    }

    /// Cuts every row into sentences for the engine.
    fn read(&self, column: &ArrayRef) -> Result<Request> {
        let rows = Rows::new(column)?;
        let mut stats = ColumnStats { rows: rows.len(), ..ColumnStats::default() };
        let mut cutter = self.cutter();
        let mut plans = Vec::with_capacity(rows.len());
        for i in 0..rows.len() {
            plans.push(cutter.plan(&rows.get(i), self.carry.is_some(), &mut stats));
        }
        let sentences = cutter.sentences;
        stats.sentences = sentences.len();
        stats.tokens = sentences.iter().map(|s| s.words.len()).sum();
        Ok(Request { rows, plans, sentences, outcomes: Vec::new(), stats, cost: Cost::default() })
    }

    /// State `carry`: every row is one slot of a batch, blank and NULL rows too.
    fn run_carried(self: &Arc<Self>, carry: &Mutex<Carry>, mut request: Request) -> Result<PendingColumns> {
        let sentences = std::mem::take(&mut request.sentences);
        let mut carry = carry.lock().unwrap_or_else(PoisonError::into_inner);
        let mut answers = Vec::with_capacity(sentences.len());
        for batch in sentences.chunks(self.spec.batch_rows.unwrap_or(1)) {
            answers.extend(carry.run(batch, &self.recipe)?.into_iter().map(Ok));
        }
        drop(carry);
        Ok(PendingColumns::new(Arc::clone(self), Waiting::Done(answers), request))
    }
}

/// Turns texts into sentences of at most `max_tokens` tokens.
struct Cutter<'s> {
    spec: &'s EmbedSpec,
    /// Tokens of a row whose vectors are wanted, at the most.
    most_tokens: usize,
    sentences: Vec<Sentence>,
}

impl Cutter<'_> {
    fn plan(&mut self, row: &Row<'_>, carried: bool, stats: &mut ColumnStats) -> RowPlan {
        let first = self.sentences.len();
        let mut cut = Cut { places: Vec::new(), truncated: false, sentence: 0, tokens: 0 };
        let done = match row {
            Row::Null => {
                stats.nulls += 1;
                if carried {
                    self.push_carried(&[], &mut cut);
                }
                return RowPlan::Null;
            }
            Row::Bad(reason) => Err(reason.clone()),
            Row::Text(text) if text.len() > HUGE_TEXT && !carried => return RowPlan::Huge,
            Row::Text(text) => self.text(text, carried, &mut cut),
            Row::Tokens(tokens) => self.tokens(tokens, carried, &mut cut),
        };
        if let Err(reason) = done {
            self.sentences.truncate(first);
            if carried {
                self.push_carried(&[], &mut cut);
            }
            stats.errors += 1;
            return RowPlan::Bad(reason);
        }
        stats.empty += usize::from(cut.places.iter().all(Vec::is_empty));
        stats.truncated += usize::from(cut.truncated);
        RowPlan::Sentences { first, places: cut.places, truncated: cut.truncated, tokens: cut.tokens }
    }

    fn text(&mut self, text: &str, carried: bool, cut: &mut Cut) -> std::result::Result<(), String> {
        check_size(text, self.spec.sentences)?;
        let sentences = text::tokenize(text, self.spec.tokenizer, self.spec.sentences);
        if sentences.is_empty() && carried {
            self.push_carried(&[], cut);
        }
        for tokens in sentences {
            let tokens: Vec<_> = tokens.iter().map(|t| (t.read(text), t.start as u32, t.end as u32)).collect();
            self.sentence(&tokens, carried, cut)?;
        }
        Ok(())
    }

    /// One sentence of given tokens; offsets count in the tokens joined by single spaces.
    fn tokens(&mut self, tokens: &[&str], carried: bool, cut: &mut Cut) -> std::result::Result<(), String> {
        let mut start = 0_usize;
        let mut placed = Vec::with_capacity(tokens.len());
        for token in tokens {
            let end = start + token.len();
            if end > MOST_SENTENCE {
                return Err(format!("a list of tokens of more than {} MiB: one sentence", MOST_SENTENCE >> 20));
            }
            placed.push((*token, start as u32, end as u32));
            start = end + 1;
        }
        if placed.is_empty() {
            if carried {
                self.push_carried(&[], cut);
            }
            return Ok(());
        }
        self.sentence(&placed, carried, cut)
    }

    fn sentence(
        &mut self,
        tokens: &[(&str, u32, u32)],
        carried: bool,
        cut: &mut Cut,
    ) -> std::result::Result<(), String> {
        let max = self.spec.max_tokens;
        let mut tokens = tokens;
        if tokens.len() > max {
            match self.spec.on_long {
                OnLong::Window => {}
                OnLong::Truncate => {
                    tokens = &tokens[..max];
                    cut.truncated = true;
                }
                OnLong::Error => {
                    return Err(format!("a sentence of {} tokens; max-tokens is {max}", tokens.len()));
                }
            }
        }
        cut.tokens += tokens.len();
        if cut.tokens > self.most_tokens {
            return Err(too_many_tokens());
        }
        if carried {
            self.push_carried(tokens, cut);
        } else {
            self.push_windows(tokens, cut);
        }
        cut.sentence += 1;
        Ok(())
    }

    fn push_windows(&mut self, tokens: &[(&str, u32, u32)], cut: &mut Cut) {
        let boundaries = self.spec.boundaries;
        for window in windows(tokens.len(), self.spec.max_tokens) {
            let mut words = Words::default();
            tokens[window.range.clone()].iter().for_each(|(word, _, _)| words.push(word));
            let (first, last) = (window.keep.start == 0, window.keep.end == tokens.len());
            // With boundaries the engine puts `<S>` at place 0; the outermost windows keep theirs.
            let shift = usize::from(boundaries);
            let from = window.keep.start - window.range.start + shift - usize::from(boundaries && first);
            let to = window.keep.end - window.range.start + shift + usize::from(boundaries && last);
            let mut places = Vec::with_capacity(to - from);
            if boundaries && first {
                places.push(cut.boundary(tokens, crate::chars::BEGIN_SENTENCE_TOKEN));
            }
            places.extend(cut.places_of(&tokens[window.keep.clone()]));
            if boundaries && last {
                places.push(cut.boundary(tokens, crate::chars::END_SENTENCE_TOKEN));
            }
            self.sentences.push(Sentence { words, keep: from..to });
            cut.places.push(places);
        }
    }

    /// State `carry` reads the boundaries itself, always.
    fn push_carried(&mut self, tokens: &[(&str, u32, u32)], cut: &mut Cut) {
        let words = crate::states::with_boundaries(tokens.iter().map(|(word, _, _)| word));
        let n = words.len();
        let mut places = Vec::with_capacity(n);
        if self.spec.boundaries {
            places.push(cut.boundary(tokens, crate::chars::BEGIN_SENTENCE_TOKEN));
        }
        places.extend(cut.places_of(tokens));
        if self.spec.boundaries {
            places.push(cut.boundary(tokens, crate::chars::END_SENTENCE_TOKEN));
        }
        let keep = if self.spec.boundaries { 0..n } else { 1..n - 1 };
        self.sentences.push(Sentence { words, keep });
        cut.places.push(places);
    }
}

/// What the cutter found in one row.
struct Cut {
    places: Vec<Vec<Place>>,
    truncated: bool,
    sentence: u32,
    tokens: usize,
}

impl Cut {
    fn places_of<'t>(&self, tokens: &'t [(&str, u32, u32)]) -> impl Iterator<Item = Place> + use<'t> {
        let sentence = self.sentence;
        tokens.iter().map(move |&(_, start, end)| Place { start, end, sentence, boundary: None })
    }

    /// A boundary stands at the edge of its sentence and covers no byte of the text.
    fn boundary(&self, tokens: &[(&str, u32, u32)], word: &'static str) -> Place {
        let at = if word == crate::chars::BEGIN_SENTENCE_TOKEN {
            tokens.first().map_or(0, |t| t.1)
        } else {
            tokens.last().map_or(0, |t| t.2)
        };
        Place { start: at, end: at, sentence: self.sentence, boundary: Some(word) }
    }
}

impl Request {
    /// Notes what answers cost.
    fn paid<T>(&mut self, (answers, cost): (T, Cost)) -> T {
        self.cost += cost;
        answers
    }

    fn huge_rows(&self) -> Vec<usize> {
        (0..self.plans.len()).filter(|&i| matches!(self.plans[i], RowPlan::Huge)).collect()
    }

    /// Gives every row the answers of its sentences.
    fn fill(&mut self, inner: &Inner, answers: Vec<std::result::Result<Vectors, DeviceError>>) -> Result<()> {
        let mut answers = answers.into_iter().map(Some).collect::<Vec<_>>();
        let mut outcomes = Vec::with_capacity(self.plans.len());
        for (i, plan) in self.plans.iter_mut().enumerate() {
            outcomes.push(match plan {
                RowPlan::Null | RowPlan::Huge => Outcome::Null,
                RowPlan::Bad(reason) => Outcome::Bad(std::mem::take(reason)),
                RowPlan::Sentences { first, places, .. } => {
                    let mut parts = Vec::with_capacity(places.len());
                    let mut bad = None;
                    for answer in &mut answers[*first..*first + places.len()] {
                        match answer.take() {
                            Some(Ok(vectors)) => parts.push(vectors),
                            Some(Err(error)) if error.is_out_of_memory() => bad = Some(too_big(&error)),
                            Some(Err(error)) => return Err(error.into()),
                            None => {}
                        }
                    }
                    match bad {
                        Some(reason) => {
                            self.stats.errors += 1;
                            Outcome::Bad(reason)
                        }
                        None => inner.outcome(&self.rows.get(i), parts, std::mem::take(places)),
                    }
                }
            });
        }
        self.outcomes = outcomes;
        Ok(())
    }

    fn set_huge(&mut self, row: usize, (outcome, stats, tokens, cost): (Outcome, ColumnStats, usize, Cost)) {
        self.cost += cost;
        self.outcomes[row] = outcome;
        self.stats.sentences += stats.sentences;
        self.stats.tokens += stats.tokens;
        self.stats.truncated += stats.truncated;
        self.stats.errors += stats.errors;
        self.stats.empty += stats.empty;
        self.plans[row] = RowPlan::Sentences { first: 0, places: Vec::new(), truncated: stats.truncated > 0, tokens };
    }

    /// Builds the Arrow columns.
    fn finish(mut self, inner: &Inner) -> Result<EmbeddedColumns> {
        let read = |plan: &RowPlan| match plan {
            RowPlan::Sentences { truncated, tokens, .. } => (*truncated, u32::try_from(*tokens).unwrap_or(u32::MAX)),
            RowPlan::Null | RowPlan::Huge | RowPlan::Bad(_) => (false, 0),
        };
        let (truncated, tokens): (Vec<bool>, Vec<u32>) = self.plans.iter().map(read).unzip();
        let mut errors = Vec::with_capacity(self.outcomes.len());
        for (i, outcome) in self.outcomes.iter_mut().enumerate() {
            let reason = match outcome {
                Outcome::Bad(reason) => Some(std::mem::take(reason)),
                _ => None,
            };
            if let (Some(reason), OnError::Fail) = (&reason, inner.spec.on_error) {
                return Err(Error::Row { row: i, reason: reason.clone() });
            }
            errors.push(reason);
        }
        let skip = inner.spec.on_error == OnError::Skip && errors.iter().any(Option::is_some);
        let keep = skip.then(|| errors.iter().map(|e| Some(e.is_none())).collect());
        Ok(EmbeddedColumns {
            vectors: vectors::build(&inner.vector_type, self.outcomes)?,
            truncated: BooleanArray::from(truncated),
            error: StringArray::from(errors),
            tokens: UInt32Array::from(tokens),
            keep,
            stats: self.stats,
            cost: self.cost,
        })
    }
}

/// What can be read at all: offsets are of 32 bits, and a sentence is tokenised in one piece.
fn check_size(text: &str, sentences: SentenceMode) -> std::result::Result<(), String> {
    let bytes = text.len();
    if u32::try_from(bytes).is_err() {
        return Err(format!("a text of {bytes} bytes; offsets count to 4 GiB"));
    }
    if sentences == SentenceMode::Off && bytes > MOST_SENTENCE {
        let most = MOST_SENTENCE >> 20;
        return Err(format!("one sentence of {bytes} bytes; the most is {most} MiB; use sentences split"));
    }
    Ok(())
}

fn too_many_tokens() -> String {
    format!(
        "the vectors of its tokens have more than {} MiB, the most of one row: cut the text",
        MOST_TOKEN_BYTES >> 20
    )
}

fn too_big(error: &DeviceError) -> String {
    format!("a sentence that does not fit the device by itself ({error}); lower max-tokens")
}

impl Inner {
    /// Joins the parts of one row.
    fn outcome(&self, row: &Row<'_>, parts: Vec<Vectors>, places: Vec<Vec<Place>>) -> Outcome {
        if let Some(pooling) = self.recipe.pooling {
            let mut joiner = Joiner::new(pooling, self.vector_type.layer);
            push_all(&mut joiner, parts);
            return self.pooled(joiner);
        }
        let mut values = Vec::new();
        for part in parts {
            if let Vectors::Tokens(tokens) = part {
                values.extend(tokens);
            }
        }
        let places = places.concat();
        let words = match row {
            Row::Text(text) => places.iter().map(|p| word_at(text, p)).collect(),
            Row::Tokens(tokens) => {
                let mut tokens = tokens.iter();
                let next = |p: &Place| p.boundary.or_else(|| tokens.next().copied()).unwrap_or("").into();
                places.iter().map(next).collect()
            }
            Row::Null | Row::Bad(_) => Vec::new(),
        };
        Outcome::Tokens(TokenRow { words, places, values: self.finish_vector(values) })
    }

    fn pooled(&self, joiner: Joiner) -> Outcome {
        joiner.finish().map_or(Outcome::Null, |vector| Outcome::Pooled(self.finish_vector(vector)))
    }

    fn finish_vector(&self, mut values: Vec<f32>) -> Vec<f32> {
        if self.spec.normalize == crate::spec::Normalize::L2 {
            pooling::normalize_l2(&mut values, self.vector_type.layer);
        }
        vectors::round(&mut values, self.vector_type.float);
        values
    }
}

fn push_all(joiner: &mut Joiner, parts: Vec<Vectors>) {
    for part in parts {
        if let Vectors::Pooled(partial) = part {
            joiner.push(partial);
        }
    }
}

/// The token as written.
fn word_at(text: &str, place: &Place) -> Box<str> {
    place.boundary.unwrap_or_else(|| &text[place.start as usize..place.end as usize]).into()
}

/// A text of many megabytes: a bounded number of its sentences is under way at any time.
struct HugeText<'r> {
    inner: &'r Inner,
    text: &'r str,
    sentences: Box<dyn Iterator<Item = Vec<text::Token>> + Send + 'r>,
    joiner: Option<Joiner>,
    tokens: TokenRow,
    places: Vec<Vec<Place>>,
    sentence: u32,
    /// Tokens of the text so far.
    n_tokens: usize,
    cost: Cost,
    bad: Option<String>,
    /// Sentences, tokens, and whether one was cut: for the counts of the column.
    stats: ColumnStats,
}

impl<'r> HugeText<'r> {
    fn new(inner: &'r Inner, request: &'r Request, row: usize) -> Self {
        let text = match request.rows.get(row) {
            Row::Text(text) => text,
            _ => "",
        };
        Self {
            inner,
            text,
            sentences: Box::new(text::sentences(text, inner.spec.tokenizer, inner.spec.sentences)),
            joiner: inner.recipe.pooling.map(|pooling| Joiner::new(pooling, inner.vector_type.layer)),
            tokens: TokenRow::default(),
            places: Vec::new(),
            sentence: 0,
            n_tokens: 0,
            cost: Cost::default(),
            bad: check_size(text, inner.spec.sentences).err(),
            stats: ColumnStats::default(),
        }
    }

    fn next_piece(&mut self) -> Option<Vec<Sentence>> {
        if self.bad.is_some() {
            return None;
        }
        let mut cutter = self.inner.cutter();
        let mut cut = Cut { places: Vec::new(), truncated: false, sentence: self.sentence, tokens: 0 };
        while cutter.sentences.len() < HUGE_PIECE {
            let Some(tokens) = self.sentences.next() else { break };
            let tokens: Vec<_> = tokens.iter().map(|t| (t.read(self.text), t.start as u32, t.end as u32)).collect();
            if let Err(reason) = cutter.sentence(&tokens, false, &mut cut) {
                self.bad = Some(reason);
                return None;
            }
        }
        self.sentence = cut.sentence;
        self.n_tokens += cut.tokens;
        self.places = cut.places;
        self.stats.truncated |= usize::from(cut.truncated);
        self.stats.sentences += cutter.sentences.len();
        self.stats.tokens += cutter.sentences.iter().map(|s| s.words.len()).sum::<usize>();
        (!cutter.sentences.is_empty()).then_some(cutter.sentences)
    }

    fn add(&mut self, answers: Vec<std::result::Result<Vectors, DeviceError>>, cost: Cost) -> Result<()> {
        self.cost += cost;
        let mut parts = Vec::with_capacity(answers.len());
        for answer in answers {
            match answer {
                Ok(vectors) => parts.push(vectors),
                Err(error) if error.is_out_of_memory() => self.bad = Some(too_big(&error)),
                Err(error) => return Err(error.into()),
            }
        }
        let places = std::mem::take(&mut self.places);
        if let Some(joiner) = &mut self.joiner {
            push_all(joiner, parts);
            return Ok(());
        }
        if let Outcome::Tokens(row) = self.inner.outcome(&Row::Text(self.text), parts, places) {
            self.tokens.append(row);
        }
        if self.tokens.values.len() * size_of::<f32>() > MOST_TOKEN_BYTES {
            self.bad = Some(too_many_tokens());
        }
        Ok(())
    }

    fn finish(self) -> (Outcome, ColumnStats, usize, Cost) {
        let mut stats = self.stats;
        let outcome = match (self.bad, self.joiner) {
            (Some(reason), _) => Outcome::Bad(reason),
            (None, Some(joiner)) => self.inner.pooled(joiner),
            (None, None) => Outcome::Tokens(self.tokens),
        };
        stats.errors += usize::from(matches!(outcome, Outcome::Bad(_)));
        stats.empty += usize::from(stats.sentences == 0 && stats.errors == 0);
        (outcome, stats, self.n_tokens, self.cost)
    }
}

/// Version of the columns and footer pairs; changes when a reader would have to.
pub const SCHEMA_VERSION: u32 = 1;

fn metadata(elmo: &Elmo, spec: &EmbedSpec) -> Result<Vec<(String, String)>> {
    let mut pairs: Vec<(String, String)> =
        spec.identity().into_iter().map(|(key, value)| (format!("elmo.{key}"), value)).collect();
    if spec.state == StateMode::Warm {
        let digest = elmo.warm_digest()?;
        if let Some(state) = pairs.iter_mut().find(|(key, _)| key == "elmo.state") {
            state.1 = format!("warm:{digest}");
        }
    }
    let mut push = |key: &str, value: String| pairs.push((format!("elmo.{key}"), value));
    push("fingerprint", elmo.fingerprint().to_string());
    push("options", elmo.options().canonical_json());
    push("precision", elmo.precision().to_string());
    push("version", env!("CARGO_PKG_VERSION").to_owned());
    push("schema_version", SCHEMA_VERSION.to_string());
    if elmo.is_untrained() {
        push("untrained", "true".to_owned());
    }
    pairs.sort();
    Ok(pairs)
}
