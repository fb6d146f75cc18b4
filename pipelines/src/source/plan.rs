//! Which columns are read from each file, and as what type. Determined before anything is computed.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use arrow::{
    array::ArrayRef,
    datatypes::{DataType, Field, Schema, SchemaRef},
};
use futures::{StreamExt, TryStreamExt, stream};

use super::{
    Format, InputFile, KeptTypes, SourceError,
    hive::{self, Partition},
    reason::in_column,
    request::{Keep, Request},
    schema, types,
};

/// Number of files whose schemas are read at the same time.
const CONCURRENT_SCHEMAS: usize = 16;

/// What is read from one file.
#[derive(Debug, Clone)]
pub(super) struct FilePlan {
    pub(super) file: InputFile,
    /// The file's columns, with the types that they are read as.
    pub(super) schema: SchemaRef,
    /// Indices into `schema` of the columns that are read, ascending.
    pub(super) read: Vec<usize>,
    /// Index of the text among the columns read.
    pub(super) text: usize,
    /// Where the values of each kept column are.
    pub(super) kept: Vec<Kept>,
    /// All columns are wanted: one that the schema lacks would be lost.
    pub(super) wants_all: bool,
}

/// Where the values of a kept column of one file are.
#[derive(Debug, Clone)]
pub(super) enum Kept {
    /// In the column with this index among the columns read.
    Read(usize),
    /// In the names of the file's folders: an array of one row.
    Folder(ArrayRef),
    /// The file lacks the column.
    Missing,
}

impl FilePlan {
    fn empty(file: &InputFile, kept: usize) -> Self {
        let (schema, read) = (Arc::new(Schema::empty()), Vec::new());
        Self { file: file.clone(), schema, read, text: 0, kept: vec![Kept::Missing; kept], wants_all: false }
    }

    /// Whether the file has no columns, and so no rows.
    pub(super) fn is_empty(&self) -> bool {
        self.schema.fields().is_empty()
    }
}

/// What is read from all files.
#[derive(Debug, Clone)]
pub struct Plan {
    pub(super) files: Vec<FilePlan>,
    /// The type in which the texts of all files are passed to the embedder.
    pub(super) text: DataType,
    pub(super) kept: SchemaRef,
}

impl Plan {
    /// Reads the schemas of all files, and determines which columns are read and as what type.
    ///
    /// # Errors
    /// [`SourceError::Column`] when a file lacks a column that is asked for, [`SourceError::NotText`] when the text
    /// column holds something else, [`SourceError::Disagree`] when no type holds a column of two files,
    /// [`SourceError::Unstorable`] when Parquet cannot hold a kept column, [`SourceError::Collision`] when one has a
    /// reserved name; [`SourceError::Malformed`] or [`SourceError::Store`] when a file cannot be read.
    pub async fn resolve(files: Vec<InputFile>, request: &Request) -> Result<Self, SourceError> {
        // A closure in `map` would be inferred to take one lifetime only.
        let lookups: Vec<_> = files.iter().map(|file| schema::of_file(file, request)).collect();
        let lookups = stream::iter(lookups).buffered(CONCURRENT_SCHEMAS);
        let schemas: Vec<Option<SchemaRef>> = lookups.try_collect().await?;
        Self::settle(&files, &schemas, request)
    }

    /// The kept columns, in the order of the output.
    pub fn kept(&self) -> &SchemaRef {
        &self.kept
    }

    /// The files, in the order in which they are read.
    pub fn files(&self) -> impl ExactSizeIterator<Item = &InputFile> {
        self.files.iter().map(|plan| &plan.file)
    }

    /// Files without a schema are empty, and so compatible with any other.
    fn settle(files: &[InputFile], schemas: &[Option<SchemaRef>], request: &Request) -> Result<Self, SourceError> {
        let folders = folder_columns(files, request);
        let columns = |(file, schema)| -> Option<Columns<'_>> {
            Option::as_ref(schema).map(|schema| Columns::new(file, schema, &folders))
        };
        let columns: Vec<Option<Columns<'_>>> = files.iter().zip(schemas).map(columns).collect();
        let seen: Vec<&Columns<'_>> = columns.iter().flatten().collect();
        let text = text_type(&seen, &request.column)?;
        let kept = kept_fields(&seen, request)?;
        let wanted: HashMap<&str, &DataType> = kept.iter().map(|f| (f.name().as_str(), f.data_type())).collect();
        let plan = |(file, columns): (&InputFile, &Option<Columns<'_>>)| match columns {
            Some(columns) => file_plan(columns, request, &text, (&kept, &wanted)),
            None => Ok(FilePlan::empty(file, kept.len())),
        };
        let files = files.iter().zip(&columns).map(plan).collect::<Result<_, _>>()?;
        Ok(Self { files, text, kept: Arc::new(Schema::new(kept)) })
    }
}

/// The columns whose values are in the names of folders. The column to embed is always one of the file.
fn folder_columns(files: &[InputFile], request: &Request) -> Vec<Field> {
    let fields = hive::fields(files.iter().map(|file| file.partitions.as_slice())).into_iter();
    let typed = |field: Field| match request.types {
        KeptTypes::Guess => field,
        KeptTypes::Strings => field.with_data_type(DataType::Utf8),
    };
    fields.filter(|field| field.name() != &request.column).map(typed).collect()
}

/// An index of the columns of one file by name: there may be thousands.
struct Columns<'a> {
    file: &'a InputFile,
    schema: &'a SchemaRef,
    /// The first column of this name, and whether there are others.
    places: HashMap<&'a str, (usize, bool)>,
    /// The columns that the names of its folders give, with the type that they have in all files. They replace columns of
    /// the file with the same name, as in DuckDB.
    folders: Vec<(&'a Field, &'a Partition)>,
}

impl<'a> Columns<'a> {
    fn new(file: &'a InputFile, schema: &'a SchemaRef, folders: &'a [Field]) -> Self {
        let mut places = HashMap::new();
        for (place, field) in schema.fields().iter().enumerate() {
            places.entry(field.name().as_str()).and_modify(|(_, twice)| *twice = true).or_insert((place, false));
        }
        let of_file = |field: &'a Field| {
            let partition = file.partitions.iter().find(|partition| &partition.key == field.name());
            partition.map(|partition| (field, partition))
        };
        Self { file, schema, places, folders: folders.iter().filter_map(of_file).collect() }
    }

    /// The names of all columns, those of the file first.
    fn names(&self) -> impl Iterator<Item = &'a str> {
        let of_file = self.schema.fields().iter().map(|field| field.name().as_str());
        of_file.chain(self.folders.iter().map(|(field, _)| field.name().as_str()))
    }

    /// The column that a folder's name gives, and its value.
    fn folder(&self, name: &str) -> Option<(&'a Field, &'a Partition)> {
        self.folders.iter().find(|(field, _)| field.name() == name).copied()
    }

    fn has(&self, name: &str) -> bool {
        self.folder(name).is_some() || self.places.contains_key(name)
    }

    fn place(&self, name: &str) -> Option<usize> {
        self.places.get(name).map(|(place, _)| *place)
    }

    /// The column `name`, which must be unique.
    fn find(&self, name: &str) -> Result<(usize, &'a Field), SourceError> {
        let file = self.file.to_string();
        match self.places.get(name) {
            Some((_, true)) => Err(SourceError::Twice { file, column: name.to_owned() }),
            Some((place, false)) => Ok((*place, self.schema.field(*place))),
            None => {
                let found: Vec<String> = self.names().map(str::to_owned).collect();
                let distance = |a: &String| strsim::damerau_levenshtein(&a.to_lowercase(), &name.to_lowercase());
                let nearest = found
                    .iter()
                    .filter(|a| !a.is_empty())
                    .map(|a| (distance(a), a))
                    .min()
                    .filter(|(distance, _)| *distance <= 2);
                let nearest = nearest.map(|(_, a)| a.clone());
                Err(SourceError::Column { file, column: name.to_owned(), found, nearest })
            }
        }
    }
}

/// The type in which the text column of `file` is read, without regard to other files.
fn text_read_as(file: &InputFile, found: &Field) -> Result<DataType, SourceError> {
    let kind = found.data_type();
    let not_text =
        || SourceError::NotText { file: file.to_string(), column: found.name().clone(), found: types::shown(kind) };
    match file.format {
        // Numbers are texts too, and later rows may hold words.
        Format::Csv | Format::Tsv => Ok(DataType::Utf8),
        Format::Json if types::is_words(kind) => Ok(types::words()),
        Format::Json if kind == &DataType::Null => Ok(DataType::Null),
        Format::Json if !kind.is_nested() => Ok(DataType::Utf8),
        _ if types::is_text(kind) => Ok(types::text(kind)),
        _ => Err(not_text()),
    }
}

/// The type in which the texts of all files are passed to the embedder.
fn text_type(seen: &[&Columns<'_>], column: &str) -> Result<DataType, SourceError> {
    let mut common: Option<(DataType, &InputFile)> = None;
    for columns in seen {
        let file = columns.file;
        let kind = text_read_as(file, columns.find(column)?.1)?;
        common = Some(match common {
            None => (kind, file),
            Some((before, first)) => match types::unify_text(&before, &kind) {
                Some(both) => (both, first),
                None => return Err(disagree(file, column, &kind, first, &before)),
            },
        });
    }
    Ok(common.map(|(kind, _)| kind).filter(|kind| kind != &DataType::Null).unwrap_or(DataType::Utf8))
}

fn disagree(file: &InputFile, column: &str, found: &DataType, first: &InputFile, expected: &DataType) -> SourceError {
    SourceError::Disagree {
        file: file.to_string(),
        column: column.to_owned(),
        found: types::shown(found),
        first: first.to_string(),
        expected: types::shown(expected),
    }
}

/// Names of the kept columns in the order of the output: the id, then the others as they are first seen.
fn kept_names<'a>(seen: &[&Columns<'a>], request: &'a Request) -> Vec<&'a str> {
    let names: Vec<&str> = match &request.keep {
        Keep::None => Vec::new(),
        Keep::Columns(columns) => columns.iter().map(String::as_str).collect(),
        Keep::All => {
            // As in DuckDB, columns of folders come after those of files.
            let of_files = seen.iter().flat_map(|columns| columns.schema.fields()).map(|f| f.name().as_str());
            let of_folders = seen.iter().flat_map(|columns| &columns.folders).map(|(field, _)| field.name().as_str());
            of_files.chain(of_folders).collect()
        }
    };
    let mut known = HashSet::new();
    request.id.as_deref().into_iter().chain(names).filter(|name| known.insert(*name)).collect()
}

fn kept_fields(seen: &[&Columns<'_>], request: &Request) -> Result<Vec<Field>, SourceError> {
    let names = kept_names(seen, request);
    if let Some(name) = names.iter().find(|name| request.reserved.iter().any(|reserved| reserved == **name)) {
        let owner = seen.iter().find(|columns| columns.has(name));
        let file = owner.or(seen.first()).map(|columns| columns.file.to_string()).unwrap_or_default();
        return Err(SourceError::Collision { file, column: (*name).to_owned() });
    }
    names.iter().map(|name| kept_field(seen, name, request).and_then(|field| storable(seen, field))).collect()
}

/// Rejects types that the Parquet writer would reject when the first rows are written.
fn storable(seen: &[&Columns<'_>], field: Field) -> Result<Field, SourceError> {
    if types::is_storable(&field) {
        return Ok(field);
    }
    let owner = seen.iter().find(|columns| columns.place(field.name()).is_some());
    let file = owner.map(|columns| columns.file.to_string()).unwrap_or_default();
    Err(SourceError::Unstorable { file, column: field.name().clone(), found: types::shown(field.data_type()) })
}

/// Whether `file` may lack the column: JSON omits missing values, and with `all` no file needs to have it.
fn may_lack(file: &InputFile, name: &str, request: &Request) -> bool {
    let asked_for = request.id.as_deref() == Some(name) || matches!(request.keep, Keep::Columns(_));
    !asked_for || file.format == Format::Json
}

fn kept_field(seen: &[&Columns<'_>], name: &str, request: &Request) -> Result<Field, SourceError> {
    let mut common: Option<(Field, bool, &InputFile)> = None;
    for columns in seen {
        let file = columns.file;
        if !columns.has(name) && may_lack(file, name, request) {
            continue;
        }
        let (field, guessed) = match columns.folder(name) {
            Some((field, _)) => (field.clone(), true),
            None => (kept_as(file, columns.find(name)?.1, name == request.column), file.format.is_untyped()),
        };
        common = Some(match common {
            None => (field, guessed, file),
            Some((before, before_guessed, first)) => {
                let both = types::unify((before.data_type(), before_guessed), (field.data_type(), guessed));
                let kind = both.ok_or_else(|| disagree(file, name, field.data_type(), first, before.data_type()))?;
                (before.with_data_type(kind), before_guessed && guessed, first)
            }
        });
    }
    let is_untyped = |columns: &&Columns<'_>| columns.file.format.is_untyped() && columns.place(name).is_some();
    match (common, seen.first()) {
        // Always nullable: another file may lack the column, and the output's schema should not depend on that.
        // Later rows of an untyped file may hold values.
        (Some((field, ..)), _) if field.data_type() == &DataType::Null && seen.iter().any(is_untyped) => {
            Ok(Field::new(name, DataType::Utf8, true))
        }
        (Some((field, ..)), _) => Ok(field.with_nullable(true)),
        (None, Some(columns)) => columns.find(name).map(|(_, field)| field.clone()),
        (None, None) => Ok(Field::new(name, DataType::Utf8, true)),
    }
}

/// The type of a kept column, without regard to other files. Lines are read as bytes and kept as strings.
fn kept_as(file: &InputFile, field: &Field, is_text: bool) -> Field {
    let string = || Field::new(field.name(), DataType::Utf8, true);
    let kind = field.data_type();
    match file.format {
        Format::Text => string(),
        Format::Csv | Format::Tsv if is_text => string(),
        Format::Json if is_text && !kind.is_nested() && kind != &DataType::Null => string(),
        _ => field.clone().with_data_type(types::stored(kind)),
    }
}

/// The columns of a file that are read: the text, cast to `text` later, and `kept`, cast to the types in `wanted`.
fn file_plan(
    columns: &Columns<'_>,
    request: &Request,
    text: &DataType,
    (kept, wanted): (&[Field], &HashMap<&str, &DataType>),
) -> Result<FilePlan, SourceError> {
    let file = columns.file;
    let (text_place, _) = columns.find(&request.column)?;
    let kept = kept.iter().map(|field| kept_of(columns, field)).collect::<Result<Vec<_>, _>>()?;
    let places = kept.iter().filter_map(|kept| if let Kept::Read(place) = kept { Some(*place) } else { None });
    let mut read: Vec<usize> = places.chain([text_place]).collect();
    read.sort_unstable();
    read.dedup();
    let as_read = |(place, field): (usize, &Arc<Field>)| -> Result<Field, SourceError> {
        let kind = match wanted.get(field.name().as_str()) {
            _ if place == text_place => match text_read_as(file, field)? {
                // All values seen are NULL; later ones may be texts.
                DataType::Null if file.format.is_untyped() && types::is_words(text) => types::words(),
                DataType::Null if file.format.is_untyped() => DataType::Utf8,
                kind => kind,
            },
            Some(target) if file.format.is_untyped() => types::as_written(target),
            _ => field.data_type().clone(),
        };
        Ok(field.as_ref().clone().with_data_type(kind))
    };
    let fields = columns.schema.fields().iter().enumerate().map(as_read).collect::<Result<Vec<_>, _>>();
    // A column that is not read may be of any type, even if it is named like the text column.
    let schema = fields.map(|fields| Arc::new(Schema::new(fields)))?;
    let among_read = |place: usize| read.binary_search(&place).unwrap_or(0);
    let kept = kept.into_iter().map(|kept| match kept {
        Kept::Read(place) => Kept::Read(among_read(place)),
        kept => kept,
    });
    let kept = kept.collect();
    let wants_all = request.keep == Keep::All && read.len() == schema.fields().len();
    Ok(FilePlan { file: file.clone(), schema, text: among_read(text_place), kept, read, wants_all })
}

/// Where the values of a kept column are; a column that is read, by its place in the schema.
fn kept_of(columns: &Columns<'_>, field: &Field) -> Result<Kept, SourceError> {
    let Some((_, partition)) = columns.folder(field.name()) else {
        return Ok(columns.place(field.name()).map_or(Kept::Missing, Kept::Read));
    };
    let value = hive::value(partition.value.as_deref(), field.data_type());
    value.map(Kept::Folder).map_err(|e| SourceError::malformed(columns.file, 0, in_column(field.name(), &e)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{error::Fault as _, source::list, stores::Stores};

    async fn plan(files: &[(&str, &str)], request: Request) -> Result<Plan, SourceError> {
        let dir = tempfile::tempdir().unwrap();
        for (name, content) in files {
            std::fs::write(dir.path().join(name), content).unwrap();
        }
        let inputs = [dir.path().display().to_string()];
        let files = list(&Stores::with_settings([]), &inputs, None).await?;
        Plan::resolve(files, &request).await
    }

    fn request(column: &str, keep: &str) -> Request {
        let reserved = ["embedding", "truncated", "error"].map(str::to_owned).to_vec();
        Request { keep: keep.parse().unwrap(), reserved, ..Request::texts(column) }
    }

    fn shown(plan: &Plan) -> String {
        let fields: Vec<_> = plan.kept().fields().iter().map(|f| format!("{}: {}", f.name(), f.data_type())).collect();
        fields.join(", ")
    }

    #[tokio::test]
    async fn kept_columns_of_unlike_files() {
        let files = [
            ("a.csv", "id,text,score\n1,one,2\n"),
            ("b.csv", "text,id,score\ntwo,2,2.5\n"),
            ("c.jsonl", "{\"text\": \"three\", \"id\": 3, \"lang\": \"en\"}\n"),
            ("d.txt", "four\n"),
        ];
        let all = plan(&files, request("text", "all")).await.unwrap();
        assert_eq!(shown(&all), "id: Int64, text: Utf8, score: Float64, lang: Utf8");
        assert_eq!(all.text, DataType::Binary);
        assert_eq!(shown(&plan(&files, request("text", "none")).await.unwrap()), "");
        let error = plan(&files, request("text", "id")).await.unwrap_err();
        assert!(matches!(&error, SourceError::Column { file, .. } if file.ends_with("d.txt")), "{error}");
        let with_id = Request { id: Some("id".to_owned()), ..request("text", "text") };
        assert_eq!(shown(&plan(&files[..3], with_id).await.unwrap()), "id: Int64, text: Utf8");
    }

    #[tokio::test]
    async fn errors_name_the_file_and_what_was_meant() {
        let error = plan(&[("a.csv", "id,Text\n1,x\n")], request("text", "all")).await.unwrap_err().to_string();
        assert!(
            error.ends_with("a.csv: no column \"text\"; existing columns: id, Text; did you mean \"Text\"?"),
            "{error}"
        );
        for (delimiter, written) in [(";", ";"), ("\t", "\\t")] {
            let text = ["id,text", "1,x", ""].join("\n").replace(',', delimiter);
            let help = plan(&[("a.csv", &text)], request("text", "all")).await.unwrap_err().help().unwrap();
            assert_eq!(help, format!("if '{written}' separates the columns, give --delimiter '{written}'"));
        }
        let error = plan(&[("a.csv", "text,error\nx,y\n")], request("text", "all")).await.unwrap_err();
        assert!(matches!(&error, SourceError::Collision { column, .. } if column == "error"), "{error}");
        let nested = [("a.jsonl", "{\"text\": {\"a\": 1}}\n")];
        let error = plan(&nested, request("text", "all")).await.unwrap_err();
        assert!(matches!(&error, SourceError::NotText { .. }), "{error}");
        let lists = [("a.jsonl", "{\"text\": [\"a\"]}\n"), ("b.jsonl", "{\"text\": \"a\"}\n")];
        let error = plan(&lists, request("text", "none")).await.unwrap_err();
        assert!(matches!(&error, SourceError::Disagree { .. }), "{error}");
    }

    #[tokio::test]
    async fn a_text_column_in_which_nothing_was_seen_agrees_with_every_other() {
        let (none, list, string) = (
            ("a.jsonl", "{\"text\": null}\n"),
            ("b.jsonl", "{\"text\": [\"a\"]}\n"),
            ("c.jsonl", "{\"text\": \"a\"}\n"),
        );
        for (files, expected) in
            [(vec![none], DataType::Utf8), (vec![none, list], types::words()), (vec![none, string], DataType::Utf8)]
        {
            let plan = plan(&files, request("text", "all")).await.unwrap();
            assert_eq!((&plan.text, plan.kept.field(0).data_type()), (&expected, &expected));
            assert!(plan.files.iter().all(|file| file.schema.field(file.text).data_type() == &expected));
        }
    }
}
