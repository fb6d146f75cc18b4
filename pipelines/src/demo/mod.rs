//! `elmo demo`: a bulk job on built-in reviews and a search for nearest neighbours in its output; one word in two senses; the
//! surprisal of a sentence's words; a picture of both.

mod picture;
mod senses;
mod surprise;

use std::{
    fmt, fs,
    io::{ErrorKind, Write},
    path::{Path, PathBuf},
    time::Duration,
};

use arrow::array::{Array, AsArray};
use elmo::{ColumnEmbedder, Elmo};
use futures::StreamExt;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

pub use self::{
    senses::{Context, Senses},
    surprise::Surprise,
};
use crate::{
    bulk::{self, BulkJob, BulkReport},
    error::{Error, Result},
    output::{
        parquet::{open_file, parquet_files, unreadable},
        vectors::vectors_of_row,
    },
    report::{Progress, bytes, count, table},
    sink::Codec,
    source::{InferRows, Keep, KeptTypes, Reading},
    stage::EmbedStage,
    stores::Stores,
};

/// Two hundred short reviews, written for this project; also in `examples/data`.
const REVIEWS: &str = include_str!("../../../examples/data/reviews.jsonl");
/// Name of the folder that the demo creates, so that it does not touch other files of the user.
const FOLDER: &str = "elmo-demo";
/// Name of the picture in it.
const PICTURE: &str = "demo.html";
/// What tells it from other files.
const MARK: &str = "<title>elmo demo</title>";
/// Maximum bits that are drawn.
const WIDEST_BAR: f64 = 40.0;
/// Number of neighbours to show.
const NEIGHBOURS: usize = 5;

#[derive(Deserialize)]
struct Review {
    text: String,
}

/// The texts of the reviews.
pub fn texts() -> Vec<String> {
    REVIEWS.lines().filter_map(|line| serde_json::from_str::<Review>(line).ok()).map(|review| review.text).collect()
}

/// Settings of the demo.
#[derive(Debug)]
pub struct Demo {
    /// The folder in which to create the folder of the demo; `None` for a temporary one.
    pub output: Option<PathBuf>,
    /// Row whose neighbours to show.
    pub row: usize,
}

/// The result of the demo.
#[derive(Debug, Serialize)]
pub struct DemoReport {
    /// The report of the bulk job.
    pub job: BulkReport,
    /// The text of the row.
    pub text: String,
    /// Its nearest neighbours, the nearest first.
    pub nearest: Vec<Neighbour>,
    /// A word in two senses.
    pub senses: Senses,
    /// The surprisal of each word of a sentence; empty when the model has no LM head.
    pub surprisal: Vec<Surprise>,
    /// The model is untrained, so its vectors have no meaning.
    pub untrained: bool,
    /// The folder with the files; `None` when it was temporary.
    pub kept_in: Option<PathBuf>,
}

/// A row near another.
#[derive(Debug, Serialize)]
pub struct Neighbour {
    /// Cosine of the two vectors.
    pub cosine: f64,
    /// Its text.
    pub text: String,
}

/// Writes the reviews to a file, embeds it, and finds neighbours in the output.
///
/// # Errors
/// [`Error::Failed`] or [`Error::Io`] when the folder or the input cannot be written, [`Error::Usage`] when the input
/// or the picture exists with other content, or the row does not exist, [`Error::Input`] when the output cannot be read, and as
/// [`bulk::run`].
pub async fn run(
    demo: &Demo,
    elmo: Elmo,
    stores: Stores,
    shutdown: impl Future<Output = ()>,
    progress: &dyn Progress,
) -> Result<DemoReport> {
    let temporary = match &demo.output {
        Some(_) => None,
        None => Some(tempfile::tempdir().map_err(|e| Error::Failed(format!("no temporary folder: {e}")))?),
    };
    let parent = demo.output.as_deref().or(temporary.as_ref().map(TempDir::path)).unwrap_or(Path::new(""));
    let folder = parent.join(FOLDER);
    let input = write_reviews(&folder)?;
    let picture = folder.join(PICTURE);
    check_picture(&picture)?;
    let output = folder.join("vectors").display().to_string();
    let columns = ColumnEmbedder::new(&elmo, elmo.spec())?;
    let width = columns.width();
    let stage = EmbedStage::new(columns, width);
    let job = BulkJob {
        inputs: vec![input.display().to_string()],
        output: output.clone(),
        column: "text".into(),
        id: Some("id".into()),
        keep: Keep::All,
        types: KeptTypes::default(),
        infer_rows: InferRows::default(),
        reading: Reading::default(),
        limit: None,
        rows_per_file: None,
        row_group_bytes: 64 << 20,
        codec: Codec::Zstd,
        window_rows: 8192,
        overwrite: true,
        check: false,
        grace: Duration::from_secs(1),
    };
    let report = bulk::run(&job, stage.as_ref(), &stores, shutdown, progress).await?;
    let (text, nearest) = neighbours(&output, demo.row, &stores).await?;
    let (senses, surprisal) = words(elmo.clone()).await?;
    let kept_in = demo.output.is_some().then_some(folder);
    if kept_in.is_some() {
        fs::write(&picture, picture::page(&senses, &surprisal)).map_err(|error| Error::io(&picture, error))?;
    }
    Ok(DemoReport { job: report, text, nearest, senses, surprisal, untrained: elmo.is_untrained(), kept_in })
}

/// What the model makes of single words.
async fn words(elmo: Elmo) -> Result<(Senses, Vec<Surprise>)> {
    let work = tokio::task::spawn_blocking(move || Ok((Senses::of(&elmo)?, surprise::of(&elmo)?)));
    work.await.map_err(|error| Error::Failed(format!("a thread died: {error}")))?
}

/// Creates the input. An existing file is never overwritten: it is either that of an earlier demo or an error.
fn write_reviews(folder: &Path) -> Result<PathBuf> {
    let path = folder.join("reviews.jsonl");
    let failed = |error| Error::io(&path, error);
    fs::create_dir_all(folder).map_err(failed)?;
    match fs::File::create_new(&path) {
        Ok(mut file) => file.write_all(REVIEWS.as_bytes()).map_err(failed)?,
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            if fs::read(&path).map_err(failed)? != REVIEWS.as_bytes() {
                let message = format!("{} already exists with other content", path.display());
                return Err(Error::usage(message, "give another --output, or move the file"));
            }
        }
        Err(error) => return Err(failed(error)),
    }
    Ok(path)
}

/// Refuses a picture that cannot be written, before anything is computed. That of an earlier demo is replaced, any other file not.
fn check_picture(path: &Path) -> Result<()> {
    let failed = |error| Error::io(path, error);
    match fs::read(path) {
        Ok(bytes) if !bytes.windows(MARK.len()).any(|part| part == MARK.as_bytes()) => {
            let message = format!("{} already exists, and no demo has written it", path.display());
            Err(Error::usage(message, "give another --output, or move the file"))
        }
        Ok(_) => fs::OpenOptions::new().write(true).open(path).map(drop).map_err(failed),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(failed(error)),
    }
}

/// Reads texts and vectors from the Parquet files and ranks the rows by cosine similarity.
async fn neighbours(output: &str, row: usize, stores: &Stores) -> Result<(String, Vec<Neighbour>)> {
    let mut rows: Vec<(String, Vec<f32>)> = Vec::new();
    for location in parquet_files(output, stores).await? {
        let mut batches = open_file(&location).await?.build().map_err(|e| unreadable(&location, &e))?;
        while let Some(batch) = batches.next().await {
            let batch = batch.map_err(|e| unreadable(&location, &e))?;
            let (Some(texts), Some(vectors)) = (batch.column_by_name("text"), batch.column_by_name("embedding")) else {
                return Err(unreadable(&location, &"no columns text and embedding"));
            };
            let texts = arrow::compute::cast(texts, &arrow::datatypes::DataType::Utf8).map_err(elmo::Error::from)?;
            for i in (0..batch.num_rows()).filter(|&i| vectors.is_valid(i)) {
                let vector = vectors_of_row(vectors, i).pop().map(|v| v.values().to_vec()).unwrap_or_default();
                rows.push((texts.as_string::<i32>().value(i).to_owned(), vector));
            }
        }
    }
    let Some((text, query)) = rows.get(row).cloned() else {
        return Err(Error::usage(
            format!("row {row} does not exist"),
            format!("rows are numbered from 0 to {}", rows.len() - 1),
        ));
    };
    let others = rows.into_iter().enumerate().filter(|(i, _)| *i != row);
    let mut nearest: Vec<Neighbour> =
        others.map(|(_, (text, vector))| Neighbour { cosine: cosine(&query, &vector), text }).collect();
    nearest.sort_by(|a, b| b.cosine.total_cmp(&a.cosine));
    nearest.truncate(NEIGHBOURS);
    Ok((text, nearest))
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt().max(f64::MIN_POSITIVE)
}

impl fmt::Display for DemoReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let job = &self.job;
        f.write_str(&table(&[
            ("rows", count(job.counts.rows_out)),
            ("tokens", count(job.counts.tokens)),
            ("tokens/s", count(job.tokens_per_second as u64)),
            ("Parquet", format!("{} file, {}", job.parts, bytes(job.bytes))),
        ]))?;
        writeln!(f, "\nnearest to: {}", self.text)?;
        for neighbour in &self.nearest {
            writeln!(f, "  {:.3}  {}", neighbour.cosine, neighbour.text)?;
        }
        self.write_senses(f)?;
        self.write_surprisal(f)?;
        if self.untrained {
            writeln!(
                f,
                "\nThe model is untrained, so none of this has a meaning. Leave out --model, or name a trained one."
            )?;
        }
        match self.kept_in.as_ref().map(|folder| folder.display()) {
            Some(folder) => {
                writeln!(f, "\nThe files are in {folder}. To look at them: elmo inspect {folder}/vectors")?;
                writeln!(f, "The senses and the surprisals as a picture, for a browser: {folder}/{PICTURE}")
            }
            None => writeln!(
                f,
                "\nNothing was kept. The vectors, and the senses and the surprisals as a picture: elmo demo --output DIR"
            ),
        }
    }
}

impl DemoReport {
    fn write_senses(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Senses { word, contexts, .. } = &self.senses;
        writeln!(f, "\n{word} in {} sentences, each with the one in which its vector is nearest", contexts.len())?;
        for context in contexts {
            let nearest = &contexts[context.nearest];
            writeln!(f, "  {:<8} {}", context.sense, context.text)?;
            writeln!(f, "      {:.3}  {:<8} {}", context.cosine, nearest.sense, nearest.text)?;
        }
        writeln!(f, "  {} of {} nearest sentences have the same sense", self.senses.right(), contexts.len())
    }

    fn write_surprisal(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.surprisal.is_empty() {
            return Ok(());
        }
        writeln!(f, "\nsurprisal in bits, after the words before it and before those after it")?;
        for Surprise { word, forward, backward } in &self.surprisal {
            let bar = "#".repeat(forward.clamp(0.0, WIDEST_BAR).round() as usize);
            writeln!(f, "  {word:<8} {forward:>5.1} {backward:>5.1}  {bar}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_review_is_read() {
        assert_eq!(texts().len(), REVIEWS.lines().count());
    }

    #[test]
    fn cosine_by_hand() {
        assert!((cosine(&[3.0, 4.0], &[4.0, 3.0]) - 24.0 / 25.0).abs() < 1e-12);
        assert_eq!(cosine(&[0.0], &[1.0]), 0.0);
    }
}
