//! The stage of `elmo score`: perplexity and surprisal by the model's LM head.
//!
//! The columns have the types and numbers of the SQL functions `elmo_perplexity` and `elmo_surprisal`.

use std::sync::Arc;

use arrow::{
    array::{ArrayRef, StructArray},
    datatypes::{Field, Fields},
};
use async_trait::async_trait;
use elmo::{
    ColumnEmbedder, Elmo, EmbedSpec, EmbeddedColumns,
    lm_head::LmHeadError,
    spec::Level,
    surprisal::{Scorer, perplexity_type, surprisal_type},
};
use tokio::task::{JoinSet, spawn_blocking};

use crate::stage::{EmbedStage, Pending, REMARKS, Stage, Work};

/// Column with the perplexity of each text.
pub const PERPLEXITY: &str = "perplexity";
/// Column with the surprisal of each token.
pub const SURPRISAL: &str = "surprisal";
/// Key of a footer that holds scores: their level.
pub const LEVEL: &str = "elmo.scores";
/// Digest of the LM head.
const LM_HEAD: &str = "elmo.lm_head";

/// Settings that determine vectors and not scores.
const OF_VECTORS: [&str; 6] =
    ["elmo.boundaries", "elmo.float", "elmo.layers", "elmo.level", "elmo.normalize", "elmo.pooling"];

/// Expected bytes of the scores of a text, and of each token of it.
const BYTES: (u64, u64) = (36, 40);

/// Scores texts.
#[derive(Debug, Clone)]
pub struct ScoreStage {
    top: EmbedStage,
    scorer: Arc<Scorer>,
    level: Level,
    metadata: Vec<(String, String)>,
}

impl ScoreStage {
    /// Scores with the tokenizer, sentences, state and long sentences of `spec`: texts only, or with level `token` also their
    /// tokens.
    ///
    /// # Errors
    /// [`elmo::Error::LmHead`] when the model has no LM head; as [`ColumnEmbedder::new`].
    pub fn new(elmo: &Elmo, spec: &EmbedSpec) -> elmo::Result<Arc<Self>> {
        let scorer = Arc::new(Scorer::new(elmo, spec)?);
        let head = elmo.lm_head_digest()?.ok_or_else(|| LmHeadError::Missing(elmo.name().to_owned()))?;
        let columns = ColumnEmbedder::new(elmo, Scorer::spec(spec))?;
        let own = [(LEVEL.to_owned(), spec.level.to_string()), (LM_HEAD.to_owned(), head)];
        let of_model = columns.metadata().into_iter().filter(|(key, _)| !OF_VECTORS.contains(&key.as_str()));
        let mut metadata: Vec<(String, String)> = of_model.chain(own).collect();
        metadata.sort();
        let width = columns.width();
        let top = Arc::unwrap_or_clone(EmbedStage::new(columns, width));
        Ok(Arc::new(Self { top, scorer, level: spec.level, metadata }))
    }

    fn results(level: Level) -> Fields {
        let perplexity = Field::new(PERPLEXITY, perplexity_type(), true);
        let surprisal = Field::new(SURPRISAL, surprisal_type(), true);
        match level {
            Level::Sentence => Fields::from(vec![perplexity]),
            Level::Token => Fields::from(vec![perplexity, surprisal]),
        }
    }
}

/// Replaces vectors by scores.
fn scored(scorer: &Scorer, level: Level, texts: &ArrayRef, embedded: EmbeddedColumns) -> elmo::Result<EmbeddedColumns> {
    let scored = scorer.score(texts, &embedded)?;
    let perplexities = scored.perplexities()?;
    let vectors = match level {
        Level::Sentence => perplexities,
        Level::Token => {
            let columns = vec![perplexities, scored.surprisals()?];
            Arc::new(StructArray::try_new(ScoreStage::results(level), columns, None)?)
        }
    };
    Ok(EmbeddedColumns { vectors, ..embedded })
}

#[async_trait]
impl Stage for ScoreStage {
    fn spec(&self) -> &EmbedSpec {
        self.top.spec()
    }

    fn fields(&self) -> Vec<Field> {
        let remarks = self.top.fields();
        let results = Self::results(self.level);
        let results = results.iter().map(|field| field.as_ref().clone());
        results.chain(remarks.into_iter().rev().take(REMARKS).rev()).collect()
    }

    fn metadata(&self) -> Vec<(String, String)> {
        self.metadata.clone()
    }

    /// The softmax is computed in a task, so that several columns are scored at a time, while later ones are embedded.
    async fn submit(&self, texts: &ArrayRef) -> elmo::Result<Pending> {
        let embedded = self.top.submit(texts).await?;
        let (scorer, level, texts) = (Arc::clone(&self.scorer), self.level, Arc::clone(texts));
        // Dropping the set cancels the task.
        let mut task = JoinSet::new();
        task.spawn(async move {
            let embedded = embedded.await?;
            let scores = spawn_blocking(move || scored(&scorer, level, &texts, embedded)).await;
            scores.unwrap_or(Err(elmo::Error::Closed))
        });
        Ok(Box::pin(async move {
            // It dies only with the runtime, or of a defect that was reported where it happened.
            task.join_next().await.and_then(Result::ok).unwrap_or(Err(elmo::Error::Closed))
        }))
    }

    fn device(&self) -> String {
        self.top.device()
    }

    fn tokens_at_once(&self) -> usize {
        self.top.tokens_at_once()
    }

    fn work(&self) -> Option<Work> {
        self.top.work()
    }

    fn output_bytes(&self, rows: u64, tokens: u64) -> u64 {
        let tokens = if self.level == Level::Token { tokens } else { 0 };
        rows.saturating_mul(BYTES.0).saturating_add(tokens.saturating_mul(BYTES.1))
    }

    /// Of the top layer, from which scores are computed: it is in memory, and not in the output.
    fn width(&self) -> usize {
        self.top.width()
    }
}
