//! A [`Plan`] on its way to another process, which reads the same files in the same way.

use std::{io::Cursor, ops::Range, sync::Arc};

use arrow::{
    array::{ArrayRef, RecordBatch},
    datatypes::{DataType, Field, Schema, SchemaRef},
    error::ArrowError,
    ipc::{reader::StreamReader, writer::StreamWriter},
};
use serde::{Deserialize, Serialize};

use super::{
    Compression, Format, InputFile, Plan, Reading,
    plan::{FilePlan, Kept},
};
use crate::{
    error::{Error, Result},
    stores::Stores,
};

/// Some files of a plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SentPlan {
    files: Vec<SentFile>,
    /// The schemas of the files, each once, as Arrow IPC streams.
    schemas: Vec<Vec<u8>>,
    /// The type of the texts, as the only column of a schema.
    text: Vec<u8>,
    /// The kept columns.
    kept: Vec<u8>,
}

/// A file of a plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct SentFile {
    address: String,
    format: Format,
    compression: Compression,
    size: u64,
    version: Option<String>,
    reading: Reading,
    /// Index of its schema.
    schema: usize,
    read: Vec<usize>,
    text: usize,
    kept: Vec<SentKept>,
    wants_all: bool,
}

/// As [`Kept`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
enum SentKept {
    Read(usize),
    /// A row of one column, as an Arrow IPC stream.
    Folder(Vec<u8>),
    Missing,
}

impl SentPlan {
    /// Files `range` of a plan.
    ///
    /// # Errors
    /// [`Error::Usage`] for standard input, which no other process can read.
    pub fn new(plan: &Plan, range: Range<usize>) -> Result<Self> {
        let mut schemas: Vec<&SchemaRef> = Vec::new();
        let files = plan.files.get(range).unwrap_or_default().iter().map(|file| {
            let schema = schemas.iter().position(|known| **known == file.schema).unwrap_or_else(|| {
                schemas.push(&file.schema);
                schemas.len() - 1
            });
            SentFile::new(file, schema)
        });
        let files = files.collect::<Result<_>>()?;
        let text = Arc::new(Schema::new(vec![Field::new("text", plan.text.clone(), true)]));
        Ok(Self {
            files,
            schemas: schemas.into_iter().map(schema_bytes).collect::<Result<_>>()?,
            text: schema_bytes(&text)?,
            kept: schema_bytes(&plan.kept)?,
        })
    }

    /// The plan in this process. Its first file is the first one of the range.
    ///
    /// # Errors
    /// [`StoreError`](crate::stores::StoreError) when a store cannot be set up; [`Error::Failed`] when it is not a plan of this
    /// version.
    pub fn received(&self, stores: &Stores) -> Result<Plan> {
        let schemas: Vec<SchemaRef> = self.schemas.iter().map(|bytes| schema(bytes)).collect::<Result<_>>()?;
        let text = schema(&self.text)?.fields().first().map_or(DataType::Utf8, |field| field.data_type().clone());
        let files = self.files.iter().map(|file| file.received(&schemas, stores)).collect::<Result<_>>()?;
        Ok(Plan { files, text, kept: schema(&self.kept)? })
    }
}

impl SentFile {
    fn new(plan: &FilePlan, schema: usize) -> Result<Self> {
        let file = &plan.file;
        let Some(location) = &file.location else {
            return Err(Error::usage("standard input cannot be read by workers", "save it to a file that they reach"));
        };
        let kept = plan.kept.iter().map(|kept| match kept {
            Kept::Read(place) => Ok(SentKept::Read(*place)),
            Kept::Folder(value) => row_bytes(value).map(SentKept::Folder),
            Kept::Missing => Ok(SentKept::Missing),
        });
        Ok(Self {
            address: location.address(),
            format: file.format,
            compression: file.compression,
            size: file.size,
            version: file.version.clone(),
            reading: file.reading,
            schema,
            read: plan.read.clone(),
            text: plan.text,
            kept: kept.collect::<Result<_>>()?,
            wants_all: plan.wants_all,
        })
    }

    fn received(&self, schemas: &[SchemaRef], stores: &Stores) -> Result<FilePlan> {
        let file = InputFile {
            location: Some(stores.locate(&self.address)?),
            format: self.format,
            compression: self.compression,
            size: self.size,
            version: self.version.clone(),
            // Their values are in `kept`.
            partitions: Vec::new(),
            reading: self.reading,
            pipe: Arc::default(),
        };
        let kept = self.kept.iter().map(|kept| match kept {
            SentKept::Read(place) => Ok(Kept::Read(*place)),
            SentKept::Folder(bytes) => row(bytes).map(Kept::Folder),
            SentKept::Missing => Ok(Kept::Missing),
        });
        Ok(FilePlan {
            file,
            schema: schemas.get(self.schema).cloned().ok_or_else(|| invalid(&"a schema is missing"))?,
            read: self.read.clone(),
            text: self.text,
            kept: kept.collect::<Result<_>>()?,
            wants_all: self.wants_all,
        })
    }
}

fn invalid(reason: &dyn std::fmt::Display) -> Error {
    Error::Failed(format!("a plan for workers is invalid: {reason}; run the same version of elmo everywhere"))
}

fn schema_bytes(schema: &SchemaRef) -> Result<Vec<u8>> {
    let written = StreamWriter::try_new(Vec::new(), schema).and_then(StreamWriter::into_inner);
    written.map_err(|e| invalid(&e))
}

fn schema(bytes: &[u8]) -> Result<SchemaRef> {
    let reader = StreamReader::try_new(Cursor::new(bytes), None).map_err(|e| invalid(&e))?;
    Ok(reader.schema())
}

fn row_bytes(value: &ArrayRef) -> Result<Vec<u8>> {
    let write = || -> Result<Vec<u8>, ArrowError> {
        let batch = RecordBatch::try_from_iter([("value", Arc::clone(value))])?;
        let mut writer = StreamWriter::try_new(Vec::new(), &batch.schema())?;
        writer.write(&batch)?;
        writer.into_inner()
    };
    write().map_err(|e| invalid(&e))
}

fn row(bytes: &[u8]) -> Result<ArrayRef> {
    let mut reader = StreamReader::try_new(Cursor::new(bytes), None).map_err(|e| invalid(&e))?;
    let batch = reader.next().ok_or_else(|| invalid(&"a row is missing"))?.map_err(|e| invalid(&e))?;
    batch.columns().first().cloned().ok_or_else(|| invalid(&"a column is missing"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::{Position, Request, Rows, list};

    async fn rows(plan: Plan) -> Vec<(Position, ArrayRef, RecordBatch)> {
        let (mut reader, mut all) = (Rows::new(Arc::new(plan), Position::default()), Vec::new());
        while let Some(slice) = reader.next().await.unwrap() {
            all.push((slice.start, slice.text, slice.kept));
        }
        all
    }

    /// Files of all formats, with names that URLs encode and columns from folders, are read as by the process that planned.
    #[tokio::test]
    async fn another_process_reads_the_same_rows() {
        let dir = tempfile::tempdir().unwrap();
        let files = [
            ("day=2024-01-02/a b%20.csv", "id;text\n1;one\n2;\"a;b\"\n"),
            ("day=2024-01-03/ä#?.jsonl", "{\"id\": 3, \"text\": \"three\"}\n"),
            ("day=2024-01-04/c.tsv", "text\tid\nfour\t4\n"),
            ("day=2024-01-05/empty.csv", ""),
            ("d.txt", "five\n"),
        ];
        for (name, content) in files {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content.replace(';', if name.contains("a b") { ";" } else { "," })).unwrap();
        }
        let stores = Stores::with_settings([]);
        let reading = Reading { delimiter: None, ..Reading::default() };
        let listed = list(&stores, &[dir.path().display().to_string()], None).await.unwrap();
        let listed = listed.into_iter().map(|file| {
            let delimiter = (file.format == Format::Csv).then(|| ";".parse().unwrap());
            InputFile { reading: Reading { delimiter, ..reading }, ..file }
        });
        let request = Request { keep: "all".parse().unwrap(), ..Request::texts("text") };
        let plan = Plan::resolve(listed.collect(), &request).await.unwrap();
        let sent = SentPlan::new(&plan, 0..plan.files.len()).unwrap();
        let sent: SentPlan = serde_json::from_slice(&serde_json::to_vec(&sent).unwrap()).unwrap();
        let received = sent.received(&Stores::with_settings([])).unwrap();
        let names = |plan: &Plan| plan.files().map(|f| (f.to_string(), f.version.clone())).collect::<Vec<_>>();
        assert_eq!(names(&received), names(&plan));
        let expected = rows(plan.clone()).await;
        assert_eq!(expected.iter().map(|(.., kept)| kept.num_rows()).sum::<usize>(), 5);
        assert_eq!(rows(received).await, expected);
        // Of a range, the first file has number 0.
        let part = rows(SentPlan::new(&plan, 2..4).unwrap().received(&stores).unwrap()).await;
        let there: Vec<_> = expected.into_iter().filter(|(start, ..)| (2..4).contains(&start.file)).collect();
        assert_eq!(part.len(), there.len());
        for ((start, text, kept), (there, same_text, same_kept)) in part.iter().zip(&there) {
            assert_eq!((start.file + 2, start.row), (there.file, there.row));
            assert_eq!((text, kept), (same_text, same_kept));
        }
    }
}
