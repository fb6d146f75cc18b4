//! The program in a folder of its own.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    thread,
    time::Duration,
};

use arrow::array::RecordBatch;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use tempfile::TempDir;

/// A folder of its own for each test, in which the program runs.
pub(crate) struct Place(TempDir);

impl Place {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, content: &str) {
        fs::write(self.path(name), content).unwrap();
    }

    pub(crate) fn command(&self, words: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_elmo"));
        command.current_dir(self.0.path()).args(words.split_whitespace()).stdin(Stdio::null());
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("ELMO_") || name == "FAILPOINTS") {
            command.env_remove(name);
        }
        command
    }

    pub(crate) fn run(&self, words: &str) -> Output {
        self.command(words).output().unwrap()
    }

    /// Runs and expects an exit code; returns stdout and stderr.
    pub(crate) fn exits(&self, words: &str, code: i32) -> (String, String) {
        let output = self.run(words);
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(code), "elmo {words}\n{out}\n{err}");
        (out, err)
    }

    /// The bytes of every part of an output.
    pub(crate) fn parts(&self, output: &str) -> BTreeMap<String, Vec<u8>> {
        let files = fs::read_dir(self.path(output)).unwrap().map(|file| file.unwrap().path());
        files
            .filter(|path| path.extension().is_some_and(|e| e == "parquet"))
            .map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(&path).unwrap()))
            .collect()
    }

    pub(crate) fn rows(&self, output: &str) -> Vec<RecordBatch> {
        self.parts(output)
            .into_values()
            .flat_map(|bytes| {
                let bytes = bytes::Bytes::from(bytes);
                ParquetRecordBatchReaderBuilder::try_new(bytes).unwrap().build().unwrap().map(Result::unwrap)
            })
            .collect()
    }
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub(crate) fn lines(n: usize) -> String {
    (0..n).map(|i| format!("Line {i} is one of {} that were made for this, and it ends here.\n", i % 13)).collect()
}

pub(crate) fn wait_for(path: &Path) {
    for _ in 0..600 {
        if path.exists() {
            return;
        }
        thread::sleep(Duration::from_millis(50));
    }
    panic!("{} never appeared", path.display());
}
