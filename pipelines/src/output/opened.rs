//! An output without its rows: its files, the common content of their footers, and its manifest.

use super::{
    footer::Footer,
    manifest::{Manifest, ManifestCheck, Problem, repair_help},
    parquet::{Listing, OpenFile, no_files, open_file},
};
use crate::{
    error::{Error, Result},
    stores::{Location, Stores},
    stream::chain::{Span, tiling::StreamFolder},
};

/// An output whose footers have been read.
#[derive(Debug)]
pub(super) struct Output {
    /// The files in the order of their names; their footers agree.
    pub(super) files: Vec<OutputFile>,
    /// The footer that all files have.
    pub(super) footer: Footer,
    /// The manifest in the folder, if there is one.
    pub(super) manifest: Option<Manifest>,
    /// The dataset of a stream, if it is one.
    pub(super) stream: Option<StreamFolder>,
    /// Files in the folder that the manifest, or the stream, does not name. They are not part of the output.
    pub(super) unnamed: Vec<String>,
    /// The whole folder was asked for, not one file in it.
    pub(super) is_folder: bool,
}

/// One file of an output.
#[derive(Debug)]
pub(super) struct OutputFile {
    pub(super) location: Location,
    pub(super) bytes: u64,
    pub(super) rows: u64,
    pub(super) row_groups: usize,
    /// The messages in it, if a stream wrote it; or what is wrong with its footer.
    pub(super) span: Option<Result<Span, String>>,
}

impl OutputFile {
    /// Its name in the folder.
    pub(super) fn name(&self) -> &str {
        self.location.path.filename().unwrap_or_default()
    }
}

impl Output {
    /// Reads the manifest and the footers.
    pub(super) async fn open(address: &str, stores: &Stores) -> Result<Self> {
        let Listing { folder, mut files, others, is_folder, stream } = Listing::of(address, stores).await?;
        let manifest = Manifest::read(&folder).await?;
        let mut unnamed = if stream.is_some() { others.clone() } else { Vec::new() };
        if let Some(manifest) = manifest.as_ref().filter(|_| is_folder) {
            let members = manifest.members();
            unnamed =
                members.strays(files.iter().map(|(file, _)| file_name(file)).chain(others.iter().map(String::as_str)));
            files.retain(|(file, _)| members.has(file_name(file)));
        }
        let mut output = Self { files: Vec::new(), footer: Footer::default(), manifest, stream, unnamed, is_folder };
        for (location, bytes) in files {
            output.add(location, bytes).await?;
        }
        match output.files.is_empty() {
            true => Err(output.check().await?.and_then(|check| check.error()).unwrap_or_else(|| no_files(&folder))),
            false => Ok(output),
        }
    }

    async fn add(&mut self, location: Location, bytes: u64) -> Result<()> {
        let opened = match open_file(&location).await {
            Ok(opened) => opened,
            Err(Error::Input { file, row, reason, help }) => {
                let help = help.or(self.is_named(&location).then(repair_help));
                return Err(Error::Input { file, row, reason, help });
            }
            Err(error) => return Err(error),
        };
        let footer = Footer::of(&opened);
        let metadata = opened.metadata();
        let rows = u64::try_from(metadata.file_metadata().num_rows()).unwrap_or(0);
        let file = OutputFile { bytes, rows, row_groups: metadata.num_row_groups(), span: span(&opened), location };
        let Some(first) = self.files.first() else {
            self.footer = footer;
            self.files.push(file);
            return Ok(());
        };
        if let Some(difference) = self.footer.difference(&footer) {
            let message = format!(
                "{}: made differently from {}: {difference}; the files of an output share one model and its settings",
                file.location,
                first.name(),
            );
            return Err(Error::Check { message, help: self.replaced_part_help(&file).await? });
        }
        self.files.push(file);
        Ok(())
    }

    fn is_named(&self, file: &Location) -> bool {
        self.manifest.as_ref().is_some_and(|manifest| manifest.members().has(file_name(file)))
    }

    /// How to restore `file`, or the first file before it, if it is not the file that the job wrote.
    async fn replaced_part_help(&self, file: &OutputFile) -> Result<Option<String>> {
        let Some(manifest) = &self.manifest else { return Ok(None) };
        for file in self.files.iter().take(1).chain([file]) {
            if manifest.problem_of(file).await?.is_some() {
                return Ok(Some(format!("{} is not as the job wrote it: {}", file.name(), repair_help())));
            }
        }
        Ok(None)
    }

    /// Checks the files against the manifest, which reads all of them to hash them; `None` without a manifest.
    pub(super) async fn check(&self) -> Result<Option<ManifestCheck>> {
        let Some(manifest) = &self.manifest else { return Ok(None) };
        let mut problems = Vec::new();
        for file in &self.files {
            problems.extend(manifest.problem_of(file).await?);
        }
        problems.extend(self.unnamed.iter().map(|file| Problem::Unnamed { file: file.clone() }));
        if self.is_folder {
            problems.extend(manifest.missing(&self.files));
        }
        problems.extend(manifest.lost_entries());
        if !self.files.is_empty() {
            problems.extend(manifest.other_settings(&self.footer.pairs));
        }
        // A single part is complete as soon as it has an entry.
        Ok(Some(ManifestCheck { complete: manifest.is_complete() || !self.is_folder, problems }))
    }
}

fn span(file: &OpenFile) -> Option<Result<Span, String>> {
    let pairs = file.metadata().file_metadata().key_value_metadata().into_iter().flatten();
    Span::parse(&pairs.map(|pair| (pair.key.clone(), pair.value.clone().unwrap_or_default())).collect())
}

fn file_name(location: &Location) -> &str {
    location.path.filename().unwrap_or_default()
}
