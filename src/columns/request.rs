//! One column on its way through the engine: rows to sentences, and their vectors to Arrow columns.

use std::sync::Arc;

use arrow::array::{ArrayRef, BooleanArray, StringArray, UInt32Array};

use crate::{
    columns::{
        cutter::{Cutter, RowPlan},
        embedded::{ColumnStats, EmbeddedColumns},
        huge::{HugeRow, HugeText, out_of_memory, values_of},
        rows::{Row, Rows},
        setup::{Setup, push_all},
        vectors::{self, Outcome, Place, TokenRow, words_of_text},
    },
    engine::{Cost, EngineError, Sentence, Ticket, Vectors},
    error::{Error, Result},
    row_error::RowError,
    spec::OnError,
};

/// One column on its way through the engine.
pub(super) struct Request {
    setup: Arc<Setup>,
    rows: Rows,
    plans: Vec<RowPlan>,
    outcomes: Vec<Outcome>,
    stats: ColumnStats,
    cost: Cost,
}

impl Request {
    /// Cuts every row into sentences for the engine. With `carried` every row is one sentence, NULL and blank rows too.
    pub(super) fn new(setup: &Arc<Setup>, column: &ArrayRef, carried: bool) -> Result<(Self, Vec<Sentence>)> {
        let rows = Rows::new(column)?;
        let (plans, sentences, stats) = Cutter::new(setup, carried).rows(&rows);
        let setup = Arc::clone(setup);
        Ok((Self { setup, rows, plans, outcomes: Vec::new(), stats, cost: Cost::default() }, sentences))
    }

    /// Awaits the vectors of the queued sentences, embeds the huge texts, and builds the columns.
    pub(super) async fn finish(mut self, ticket: Ticket) -> Result<EmbeddedColumns> {
        let (answers, cost) = ticket.await;
        self.cost += cost;
        self.fill(answers)?;
        let huge = (0..self.plans.len()).filter(|&row| matches!(self.plans[row], RowPlan::Huge));
        for row in huge.collect::<Vec<_>>() {
            let done = self.embed_huge(row).await?;
            self.set_huge(row, done);
        }
        self.into_columns()
    }

    /// Builds the columns from vectors that were computed outside the engine.
    pub(super) fn finish_with(mut self, vectors: Vec<Vectors>) -> Result<EmbeddedColumns> {
        self.fill(vectors.into_iter().map(Ok).collect())?;
        self.into_columns()
    }

    async fn embed_huge(&self, row: usize) -> Result<HugeRow> {
        let text = match self.rows.get(row) {
            Row::Text(text) => text,
            _ => "",
        };
        let mut huge = HugeText::new(&self.setup, text);
        while let Some(piece) = huge.next_piece() {
            let (answers, cost) = self.setup.embedder.submit(piece, &self.setup.recipe).await?.await;
            huge.add(answers, cost)?;
        }
        Ok(huge.finish())
    }

    /// Gives every row the vectors of its sentences.
    fn fill(&mut self, answers: Vec<Result<Vectors, EngineError>>) -> Result<()> {
        let mut answers = answers.into_iter().map(Some).collect::<Vec<_>>();
        let mut outcomes = Vec::with_capacity(self.plans.len());
        for (i, plan) in self.plans.iter_mut().enumerate() {
            outcomes.push(match plan {
                RowPlan::Null | RowPlan::Huge => Outcome::Null,
                RowPlan::Bad(error) => Outcome::Bad(error.clone()),
                RowPlan::Sentences { first, count, places, .. } => {
                    let answers = &mut answers[*first..*first + *count];
                    match vectors_of(answers)? {
                        Ok(vectors) => outcome(&self.setup, &self.rows.get(i), vectors, std::mem::take(places)),
                        Err(error) => {
                            self.stats.errors += 1;
                            Outcome::Bad(error)
                        }
                    }
                }
            });
        }
        self.outcomes = outcomes;
        Ok(())
    }

    fn set_huge(&mut self, row: usize, HugeRow { outcome, stats, tokens, cost }: HugeRow) {
        self.cost += cost;
        self.outcomes[row] = outcome;
        self.stats.sentences += stats.sentences;
        self.stats.tokens += stats.tokens;
        self.stats.truncated += stats.truncated;
        self.stats.errors += stats.errors;
        self.stats.empty += stats.empty;
        self.plans[row] =
            RowPlan::Sentences { first: 0, count: 0, places: Vec::new(), truncated: stats.truncated > 0, tokens };
    }

    fn into_columns(mut self) -> Result<EmbeddedColumns> {
        let read = |plan: &RowPlan| match plan {
            RowPlan::Sentences { truncated, tokens, .. } => (*truncated, u32::try_from(*tokens).unwrap_or(u32::MAX)),
            RowPlan::Null | RowPlan::Huge | RowPlan::Bad(_) => (false, 0),
        };
        let (truncated, tokens): (Vec<bool>, Vec<u32>) = self.plans.iter().map(read).unzip();
        let row_errors = take_errors(&mut self.outcomes);
        let on_error = self.setup.spec.on_error;
        if let (OnError::Fail, Some((row, reason))) = (on_error, row_errors.first()) {
            return Err(Error::Row { row: *row, reason: reason.clone() });
        }
        let mut messages: Vec<Option<String>> = vec![None; self.outcomes.len()];
        row_errors.iter().for_each(|(row, error)| messages[*row] = Some(error.to_string()));
        let skip = on_error == OnError::Skip && !row_errors.is_empty();
        let keep = skip.then(|| messages.iter().map(|message| Some(message.is_none())).collect());
        Ok(EmbeddedColumns {
            vectors: vectors::build(&self.setup.vector_type, self.outcomes)?,
            truncated: BooleanArray::from(truncated),
            error: StringArray::from(messages),
            row_errors,
            tokens: UInt32Array::from(tokens),
            keep,
            stats: self.stats,
            cost: self.cost,
        })
    }
}

fn take_errors(outcomes: &mut [Outcome]) -> Vec<(usize, RowError)> {
    let mut errors = Vec::new();
    for (row, outcome) in outcomes.iter_mut().enumerate() {
        if let Outcome::Bad(error) = outcome {
            errors.push((row, error.clone()));
        }
    }
    errors
}

/// The vectors of the sentences of a row, or the error of the row. Any error of the engine but a lack of memory is one
/// of the whole request.
fn vectors_of(answers: &mut [Option<Result<Vectors, EngineError>>]) -> Result<Result<Vec<Vectors>, RowError>> {
    let mut vectors = Vec::with_capacity(answers.len());
    let mut bad = None;
    for answer in answers.iter_mut().filter_map(Option::take) {
        match answer {
            Ok(sentence) => vectors.push(sentence),
            Err(error) if error.is_out_of_memory() => bad = Some(out_of_memory(&error)),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(bad.map_or(Ok(vectors), Err))
}

/// Joins the sentences of one row.
fn outcome(setup: &Setup, row: &Row<'_>, sentences: Vec<Vectors>, places: Vec<Place>) -> Outcome {
    if let Some(mut joiner) = setup.joiner() {
        push_all(&mut joiner, sentences);
        return setup.pooled(joiner);
    }
    let words = match row {
        Row::Text(text) => words_of_text(text, &places),
        Row::Tokens(tokens) => {
            let mut tokens = tokens.iter();
            let next = |p: &Place| p.boundary.or_else(|| tokens.next().copied()).unwrap_or("").into();
            places.iter().map(next).collect()
        }
        Row::Null | Row::Bad(_) => Vec::new(),
    };
    Outcome::Tokens(TokenRow { words, places, values: setup.finish_vector(values_of(sentences)) })
}
