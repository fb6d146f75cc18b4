//! Tagged sentences: a token and its tag on each line, in columns, and a blank line between sentences.
//!
//! The first line of a file tells its form: columns are separated by tabs if it has one, else by white space, and every line
//! has as many of them. Lines of `-DOCSTART-` (CoNLL-2003) are passed over.

use std::sync::Arc;

use arrow::array::{AsArray, ListBuilder, StringBuilder};

use super::dataset::{Dataset, Labels, PART_BYTES, Place, at};
use crate::{
    error::{Error, Result},
    source::{self, Format, Plan, Position, Reading, Request, Rows},
    stores::{Location, Stores},
};

/// The token of a line that separates documents.
const DOCUMENT: &str = "-DOCSTART-";

/// The columns of tokens and tags, counted from 1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TagColumns {
    /// The first if `None`.
    pub token: Option<usize>,
    /// The last if `None`.
    pub tag: Option<usize>,
}

/// Where the fields of a file are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Form {
    has_tabs: bool,
    columns: usize,
    token: usize,
    tag: usize,
}

fn fields(line: &str, has_tabs: bool) -> Vec<&str> {
    match has_tabs {
        true => line.split('\t').collect(),
        false => line.split_ascii_whitespace().collect(),
    }
}

impl Form {
    fn of(line: &str, wanted: TagColumns) -> Result<Self, String> {
        let has_tabs = line.contains('\t');
        let columns = fields(line, has_tabs).len();
        let (token, tag) = (wanted.token.unwrap_or(1), wanted.tag.unwrap_or(columns));
        if let Some(missing) = [token, tag].into_iter().find(|column| *column == 0 || *column > columns) {
            return Err(format!("there is no column {missing}: the line has {columns}"));
        }
        if token == tag {
            return Err(format!("tokens and tags are both in column {tag} of {columns}; a line needs two columns"));
        }
        Ok(Self { has_tabs, columns, token: token - 1, tag: tag - 1 })
    }

    /// The token and the tag of a line.
    fn read(self, line: &str) -> Result<(&str, &str), String> {
        let fields = fields(line, self.has_tabs);
        if fields.len() != self.columns {
            let separated = if self.has_tabs { "tabs" } else { "white space" };
            let (found, columns) = (fields.len(), self.columns);
            return Err(format!("{found} columns separated by {separated}; the first line has {columns}"));
        }
        let (token, tag) = (fields[self.token].trim(), fields[self.tag].trim());
        for (text, what, column) in [(token, "token", self.token), (tag, "tag", self.tag)] {
            if text.is_empty() {
                return Err(format!("the {what} in column {} is empty", column + 1));
            }
        }
        Ok((token, tag))
    }
}

/// A tagged sentence.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Sentence {
    /// Its first line, from 1.
    line: u64,
    tokens: Vec<String>,
    tags: Vec<String>,
}

/// Reads one file.
#[derive(Debug)]
struct Reader {
    wanted: TagColumns,
    form: Option<Form>,
    open: Sentence,
}

impl Reader {
    fn new(wanted: TagColumns) -> Self {
        Self { wanted, form: None, open: Sentence::default() }
    }

    /// Reads a line; the sentence that it ends.
    fn line(&mut self, number: u64, line: &[u8]) -> Result<Option<Sentence>, String> {
        let line = std::str::from_utf8(line).map_err(|_| "not UTF-8".to_owned())?;
        if line.trim().is_empty() {
            return Ok(self.end());
        }
        let form = match self.form {
            Some(form) => form,
            None => *self.form.insert(Form::of(line, self.wanted)?),
        };
        let (token, tag) = form.read(line)?;
        if token == DOCUMENT {
            return Ok(self.end());
        }
        if self.open.tokens.is_empty() {
            self.open.line = number;
        }
        self.open.tokens.push(token.to_owned());
        self.open.tags.push(tag.to_owned());
        Ok(None)
    }

    /// The sentence that was not ended.
    fn end(&mut self) -> Option<Sentence> {
        Some(std::mem::take(&mut self.open)).filter(|sentence| !sentence.tokens.is_empty())
    }
}

/// Sentences as a data set.
struct Builder<'l> {
    labels: &'l mut Labels,
    data: Dataset,
    lists: ListBuilder<StringBuilder>,
    bytes: usize,
}

impl Builder<'_> {
    fn push(&mut self, file: usize, sentence: &Sentence) {
        for token in &sentence.tokens {
            self.lists.values().append_value(token);
            self.bytes += token.len() + 1;
        }
        self.lists.append(true);
        self.data.labels.push(sentence.tags.iter().map(|tag| self.labels.number(tag)).collect());
        self.data.places.push(Place::Line { file, line: sentence.line });
        if self.bytes >= PART_BYTES {
            self.close_part();
        }
    }

    fn close_part(&mut self) {
        self.data.parts.push(Arc::new(self.lists.finish()));
        self.bytes = 0;
    }
}

/// Reads files of tagged sentences.
///
/// # Errors
/// [`SourceError`](crate::source::SourceError) for files that cannot be read or that `output` would replace, [`Error::Input`]
/// with its line for a line of another form, and for files without a sentence.
pub(super) async fn read(
    stores: &Stores,
    inputs: &[String],
    output: &Location,
    wanted: TagColumns,
    labels: &mut Labels,
) -> Result<Dataset> {
    let reading = Reading { format: Some(Format::Text), ..Reading::default() };
    let files = source::listing(stores, inputs, None, reading).await?.files;
    source::check_kept(&files, output)?;
    let names: Vec<String> = files.iter().map(ToString::to_string).collect();
    let plan = Arc::new(Plan::resolve(files, &Request::texts("text")).await?);
    let mut rows = Rows::new(plan, Position::default());
    let data = Dataset { files: names, ..Dataset::default() };
    let mut builder = Builder { labels, data, lists: ListBuilder::new(StringBuilder::new()), bytes: 0 };
    let (mut reader, mut file) = (Reader::new(wanted), 0);
    while let Some(slice) = rows.next().await? {
        if slice.start.file != file {
            reader.end().iter().for_each(|sentence| builder.push(file, sentence));
            (reader, file) = (Reader::new(wanted), slice.start.file);
        }
        for (line, number) in slice.text.as_binary::<i32>().iter().zip(slice.start.row + 1..) {
            let ended = reader.line(number, line.unwrap_or_default());
            let ended = ended
                .map_err(|reason| with_help(at(&builder.data.files, Place::Line { file, line: number }, &reason)))?;
            ended.iter().for_each(|sentence| builder.push(file, sentence));
        }
    }
    reader.end().iter().for_each(|sentence| builder.push(file, sentence));
    builder.close_part();
    match builder.data.len() {
        0 => Err(builder.data.empty("sentence")),
        _ => Ok(builder.data),
    }
}

fn with_help(error: Error) -> Error {
    let Error::Input { file, row, reason, .. } = error else { return error };
    let help = "a line is a token and its tag in columns, the same number of columns in every line, and a blank line ends a \
                sentence; for labelled texts give --label COLUMN";
    Error::Input { file, row, reason, help: Some(help.to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_all(text: &str, wanted: TagColumns) -> Result<Vec<Sentence>, (u64, String)> {
        let (mut reader, mut sentences) = (Reader::new(wanted), Vec::new());
        for (line, number) in text.lines().zip(1..) {
            sentences.extend(reader.line(number, line.as_bytes()).map_err(|reason| (number, reason))?);
        }
        sentences.extend(reader.end());
        Ok(sentences)
    }

    fn sentence(line: u64, words: &[(&str, &str)]) -> Sentence {
        let (tokens, tags) = words.iter().map(|(token, tag)| ((*token).to_owned(), (*tag).to_owned())).unzip();
        Sentence { line, tokens, tags }
    }

    #[test]
    fn sentences_are_separated_by_blank_lines() {
        let expected = [sentence(2, &[("New", "B-loc"), ("York", "I-loc")]), sentence(6, &[("#", "O")])];
        let text = "\nNew\tB-loc\nYork\tI-loc\n\n \t\n#\tO";
        assert_eq!(read_all(text, TagColumns::default()).unwrap(), expected);
    }

    /// The form of CoNLL-2003: token, part of speech, chunk, entity.
    #[test]
    fn other_columns_are_passed_over() {
        let text = "-DOCSTART- -X- -X- O\n\nEU NNP B-NP B-ORG\nrejects VBZ B-VP O\n";
        let expected = [sentence(3, &[("EU", "B-ORG"), ("rejects", "O")])];
        assert_eq!(read_all(text, TagColumns::default()).unwrap(), expected);
        let chunks = read_all(text, TagColumns { token: Some(1), tag: Some(3) }).unwrap();
        assert_eq!(chunks, [sentence(3, &[("EU", "B-NP"), ("rejects", "B-VP")])]);
    }

    /// A tab separates, so a token may hold a blank.
    #[test]
    fn tabs_separate_where_there_are_any() {
        assert_eq!(read_all("1 000\tO\n", TagColumns::default()).unwrap(), [sentence(1, &[("1 000", "O")])]);
    }

    #[test]
    fn a_line_of_another_form_is_an_error_with_its_number() {
        let none = TagColumns::default();
        let columns = |token, tag| TagColumns { token: Some(token), tag: Some(tag) };
        for (text, wanted, line, says) in [
            ("a O\nb\n", none, 2, "1 columns separated by white space; the first line has 2"),
            ("a\tO\n\nb\tc\tO\n", none, 3, "3 columns separated by tabs; the first line has 2"),
            ("a\tO\nb\t\n", none, 2, "the tag in column 2 is empty"),
            ("\tO\n", none, 1, "the token in column 1 is empty"),
            ("a\nb\n", none, 1, "tokens and tags are both in column 1 of 1"),
            ("a O\n", columns(1, 3), 1, "there is no column 3: the line has 2"),
        ] {
            let (number, reason) = read_all(text, wanted).unwrap_err();
            assert_eq!(number, line, "{text:?}");
            assert!(reason.contains(says), "{text:?}: {reason}");
        }
        let mut reader = Reader::new(none);
        assert_eq!(reader.line(1, b"caf\xe9\tO"), Err("not UTF-8".to_owned()));
    }
}
