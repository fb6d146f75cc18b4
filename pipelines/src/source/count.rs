//! Estimates the number of rows of a file from a sample of its bytes.

use std::sync::Arc;

use arrow::datatypes::Schema;

use super::{Mark, Plan, Position, Rows, SourceError, plan::FilePlan, row_bytes};

/// Rows of a Parquet file that are read to measure texts: its footer counts texts that are stored once, as in dictionaries,
/// only once.
const SAMPLE_ROWS: u64 = 4096;

/// Minimum distance of marks in bytes.
const MARK_BYTES: u64 = 4 << 20;
/// Maximum number of marks of a file.
const MAX_MARKS: u64 = 4096;

/// Number of rows of a file, and size of its texts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Counted {
    /// Number of rows.
    pub rows: u64,
    /// Bytes of text, extrapolated from the part that was read.
    pub text_bytes: u64,
    /// Whether `rows` is exact: counted to the end of the file, or taken from its footer.
    pub exact: bool,
}

impl Plan {
    /// Counts the rows of file `number`. The footer of a Parquet file holds their number, and some thousand rows are read
    /// to measure texts. Of other formats about `max_bytes` are read at most, and the result is extrapolated. Rows after the
    /// first `limit` do not count.
    ///
    /// # Errors
    /// [`SourceError::Malformed`] or [`SourceError::Store`] when the file cannot be read.
    pub async fn count(&self, number: usize, max_bytes: u64, limit: Option<u64>) -> Result<Counted, SourceError> {
        let Some(plan) = self.files.get(number) else { return Ok(Counted { rows: 0, text_bytes: 0, exact: true }) };
        let mut reader = Rows::new(Arc::new(self.texts(plan)), Position::default());
        let (mut rows, mut text_bytes) = (0, 0);
        let limit = limit.unwrap_or(u64::MAX);
        while let Some(slice) = reader.next().await? {
            let wanted = usize::try_from(limit - rows).unwrap_or(usize::MAX).min(slice.len());
            let slice = slice.slice(0, wanted);
            let mut sizes = vec![0; slice.len()];
            row_bytes(&slice.text, &mut sizes);
            rows += slice.len() as u64;
            text_bytes += sizes.iter().sum::<u64>();
            let scale = |n: u64, whole: u64, part: u64| (n as f64 * whole as f64 / part as f64) as u64;
            let taken = reader.bytes_read();
            if rows == limit {
                break;
            }
            match reader.rows_in_footer() {
                Some(all) if rows >= SAMPLE_ROWS.min(all) => {
                    let all = all.min(limit);
                    return Ok(Counted { rows: all, text_bytes: scale(text_bytes, all, rows), exact: true });
                }
                None if taken >= max_bytes && taken < plan.file.size => {
                    let [rows, text_bytes] = [rows, text_bytes].map(|n| scale(n, plan.file.size, taken));
                    let whole = limit.min(rows);
                    let text_bytes = scale(text_bytes, whole, rows);
                    return Ok(Counted { rows: whole, text_bytes, exact: false });
                }
                _ => {}
            }
        }
        Ok(Counted { rows, text_bytes, exact: true })
    }

    /// Counts the rows of file `number` and returns byte offsets of some of them, if the file can be read from an offset.
    ///
    /// # Errors
    /// As [`Plan::count`].
    #[cfg_attr(not(feature = "cluster"), expect(dead_code, reason = "workers count rows"))]
    pub(crate) async fn count_marked(&self, number: usize) -> Result<(u64, Vec<Mark>), SourceError> {
        let Some(plan) = self.files.get(number) else { return Ok((0, Vec::new())) };
        let apart = MARK_BYTES.max(plan.file.size / MAX_MARKS);
        let mut reader = Rows::new(Arc::new(self.texts(plan)), Position::default());
        let (mut rows, mut marks): (u64, Vec<Mark>) = (0, Vec::new());
        while let Some(slice) = reader.next().await? {
            if let Some(all) = reader.rows_in_footer() {
                return Ok((all, marks));
            }
            rows += slice.len() as u64;
            let last = marks.last().map_or(0, |mark| mark.byte);
            marks.extend(reader.mark().filter(|mark| mark.byte - last >= apart));
        }
        Ok((rows, marks))
    }

    /// A plan that reads only the texts of file `number`, which is its file 0.
    pub(crate) fn only(&self, number: usize) -> Option<Self> {
        self.files.get(number).map(|file| self.texts(file))
    }

    /// A plan that reads only the texts of one file.
    fn texts(&self, file: &FilePlan) -> Self {
        let read = file.read.get(file.text).copied().into_iter().collect();
        let file = FilePlan { read, text: 0, kept: Vec::new(), wants_all: false, ..file.clone() };
        Self { files: vec![file], text: self.text.clone(), kept: Arc::new(Schema::empty()) }
    }
}

#[cfg(test)]
mod tests {
    use arrow::{array::ArrayRef, compute::concat};

    use super::*;
    use crate::{
        source::{Reading, Request, listing},
        stores::Stores,
    };

    /// All rows from one on, and where rows begin among them.
    async fn read(plan: &Arc<Plan>, row: u64, mark: Option<Mark>) -> (ArrayRef, Vec<Mark>) {
        let mut reader = Rows::from_mark(Arc::clone(plan), Position { file: 0, row }, mark);
        let (mut texts, mut marks, mut next) = (Vec::new(), Vec::new(), row);
        while let Some(slice) = reader.next().await.unwrap() {
            assert_eq!(slice.start, Position { file: 0, row: next });
            next += slice.len() as u64;
            texts.push(slice.text);
            marks.extend(reader.mark());
        }
        (concat(&texts.iter().map(AsRef::as_ref).collect::<Vec<_>>()).unwrap(), marks)
    }

    /// Rows that are read from a mark are those that are read from the beginning of the file.
    #[tokio::test]
    async fn rows_after_a_mark() {
        let rows = |row: &dyn Fn(usize) -> String| (0..30_000).map(row).collect::<String>();
        let json = |n: usize| format!("{{\"id\": {n}, \"text\": \"no. {n}: ä {{}}\"}}\n");
        let quoted = |n: usize| match n % 3 {
            0 => format!("{n},\"a \"\"{n}\"\",\nb\"\r\n"),
            1 => format!("{n},plain {n}\r\n"),
            _ => format!("{n},\"{}\"\r\n", "x".repeat(n % 97)),
        };
        let files = [
            ("a.txt", rows(&|n| format!("line {n}\n")), true),
            ("crlf.txt", rows(&|n| if n % 7 == 0 { "\r\n".to_owned() } else { format!("{n}\r\n") }), true),
            ("a.jsonl", rows(&json), true),
            ("mark.jsonl", "\u{feff}".to_owned() + &rows(&json), true),
            ("apart.jsonl", rows(&|n| format!("{}\n \n", json(n))), true),
            ("a.csv", "id,text\r\n".to_owned() + &rows(&quoted), true),
            ("mark.csv", "\u{feff}id,text\r\n".to_owned() + &rows(&quoted), true),
            ("a.tsv", "text\tid\n".to_owned() + &rows(&|n| format!("{n}!\t{n}\n")), true),
            // Escapes that are rewritten, an array, and space in front: only what is sure.
            ("escapes.jsonl", rows(&|n| format!("{{\"text\": \"\\ud83d\\ude00 {n} \\ud800\"}}\n")), false),
            (
                "array.json",
                format!("[{}]", rows(&|n| json(n).trim_end().to_owned() + ",").trim_end_matches(',')),
                false,
            ),
            ("space.jsonl", " \r\n".to_owned() + &rows(&json), false),
        ];
        let folder = tempfile::tempdir().unwrap();
        for (name, content, has_marks) in files {
            let path = folder.path().join(name);
            std::fs::write(&path, content).unwrap();
            for (no_header, malformed) in [(false, "fail"), (true, "fail"), (false, "skip")] {
                if no_header && !name.ends_with(".tsv") {
                    continue;
                }
                let reading = Reading { no_header, malformed: malformed.parse().unwrap(), ..Reading::default() };
                let address = path.display().to_string();
                let listed = listing(&Stores::with_settings([]), &[address], None, reading).await.unwrap();
                let column = if no_header { "column_1" } else { "text" };
                let plan = Arc::new(Plan::resolve(listed.files, &Request::texts(column)).await.unwrap());
                let (all, marks) = read(&plan, 0, None).await;
                assert_eq!(all.len(), 30_000 + usize::from(no_header), "{name}");
                let is_marked = has_marks && (malformed == "fail" || name.ends_with(".txt"));
                assert!(marks.len() >= 2 || !is_marked, "{name}: {marks:?}");
                for mark in marks {
                    for row in [mark.row, mark.row + 1, mark.row + 9000].into_iter().filter(|row| *row < 30_000) {
                        let (rest, _) = read(&plan, row, Some(mark)).await;
                        let row = row as usize;
                        assert_eq!(&rest, &all.slice(row, all.len() - row), "{name}: row {row} from {mark:?}");
                    }
                }
                let (count, marks) = plan.count_marked(0).await.unwrap();
                assert_eq!((count, marks.len()), (all.len() as u64, 0), "{name}");
            }
        }
    }

    /// An error after a mark names the row of the file.
    #[tokio::test]
    async fn errors_after_a_mark() {
        let folder = tempfile::tempdir().unwrap();
        let csv = |n: usize| if n == 25_000 { "x\n".to_owned() } else { format!("{n},a\n") };
        let json =
            |n: usize| if n == 25_000 { "{\"text\": [}\n".to_owned() } else { format!("{{\"text\": \"{n}\"}}\n") };
        let csv = "id,text\n".to_owned() + &(0..30_000).map(csv).collect::<String>();
        for (name, content) in [("a.csv", csv), ("a.jsonl", (0..30_000).map(json).collect::<String>())] {
            let path = folder.path().join(name);
            std::fs::write(&path, content).unwrap();
            let address = path.display().to_string();
            let listed = listing(&Stores::with_settings([]), &[address], None, Reading::default()).await.unwrap();
            let plan = Arc::new(Plan::resolve(listed.files, &Request::texts("text")).await.unwrap());
            let mut reader = Rows::new(Arc::clone(&plan), Position::default());
            let (mut mark, mut expected) = (None, None);
            while expected.is_none() {
                match reader.next().await {
                    Ok(_) => mark = reader.mark().or(mark),
                    Err(error) => expected = Some(error.to_string()),
                }
            }
            let mut reader = Rows::from_mark(plan, Position { file: 0, row: 24_000 }, mark);
            let found = loop {
                if let Err(error) = reader.next().await {
                    break error.to_string();
                }
            };
            assert_eq!(Some(found), expected, "{name} from {mark:?}");
            assert!(mark.is_some_and(|mark| mark.row > 0), "{name}");
        }
    }
}
