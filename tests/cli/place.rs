//! A temporary folder for each test, with the reviews of `examples/data`, in which the program runs.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    thread,
    time::Duration,
};

pub(crate) struct Place {
    folder: tempfile::TempDir,
}

/// The result of a command.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Ended {
    /// The result as a snapshot shows it.
    pub(crate) fn shown(&self, words: &str) -> String {
        let (out, err) = (self.out.trim_end(), self.err.trim_end());
        let code = self.code.map_or("killed".to_owned(), |code| code.to_string());
        let parts = [format!("$ elmo {words}"), out.to_owned(), err.to_owned(), format!("exit code {code}")];
        parts.into_iter().filter(|part| !part.is_empty()).map(|part| part + "\n").collect()
    }

    /// stdout as JSON.
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.out).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }
}

impl Place {
    pub(crate) fn new() -> Self {
        let place = Self { folder: tempfile::tempdir().unwrap() };
        // Read at run time, because several clones may share a target folder.
        let clone = std::env::var_os("CARGO_MANIFEST_DIR").unwrap();
        let reviews = Path::new(&clone).join("../examples/data/reviews.jsonl");
        fs::copy(reviews, place.path("reviews.jsonl")).unwrap();
        place
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    /// The program, without the settings of this machine.
    pub(crate) fn elmo(&self) -> Command {
        self.clean(Command::new(env!("CARGO_BIN_EXE_elmo")))
    }

    /// Runs a line in a shell that finds the program.
    pub(crate) fn shell(&self, line: &str) -> Ended {
        ended(self.shell_command(line).output().unwrap())
    }

    /// A shell that finds the program, with a line to run.
    pub(crate) fn shell_command(&self, line: &str) -> Command {
        let mut command = self.clean(Command::new("sh"));
        let folder = Path::new(env!("CARGO_BIN_EXE_elmo")).parent().unwrap();
        command.env("PATH", format!("{}:/usr/bin:/bin", folder.display())).args(["-c", line]);
        command
    }

    fn clean(&self, mut command: Command) -> Command {
        command.current_dir(self.folder.path()).env_clear().stdin(Stdio::null());
        command.env("HOME", self.path("home")).env("ELMO_CACHE", self.path("cache"));
        command
    }

    /// Runs a job on a long `a.txt`, and interrupts it when its first part in `out` is durable.
    pub(crate) fn interrupted(&self, words: &str) -> Ended {
        self.write("a.txt", "It rained all day, and we stayed in and read what there was.\n".repeat(6000));
        let mut command = self.elmo();
        command.args(words.split_whitespace()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().unwrap();
        self.wait_for_entry();
        Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
        ended(child.wait_with_output().unwrap())
    }

    /// Waits until the manifest of `out` names a part.
    pub(crate) fn wait_for_entry(&self) {
        for _ in 0..1200 {
            if self.has_entry() {
                return;
            }
            thread::sleep(Duration::from_millis(50));
        }
        panic!("no part was ever durable");
    }

    fn has_entry(&self) -> bool {
        let files = fs::read_dir(self.path("out/_elmo")).into_iter().flatten().flatten();
        files.map(|file| file.file_name()).any(|name| name.to_string_lossy().starts_with("part-"))
    }

    /// Path of a part of an output, whatever fingerprint is in its name.
    pub(crate) fn part(&self, output: &str, number: usize) -> String {
        let names = std::fs::read_dir(self.path(output)).unwrap().map(|file| file.unwrap().file_name());
        let mut names = names.map(|name| name.into_string().unwrap());
        let name = names.find(|name| name.starts_with(&format!("part-{number:05}-")));
        format!("{output}/{}", name.unwrap_or_else(|| panic!("no part {number} in {output}")))
    }

    /// Runs a command whose arguments need no quoting.
    pub(crate) fn run(&self, words: &str) -> Ended {
        self.run_with(words, &[])
    }

    /// Runs a command with settings in the environment.
    pub(crate) fn run_with(&self, words: &str, env: &[(&str, &str)]) -> Ended {
        ended(self.elmo().args(words.split_whitespace()).envs(env.iter().copied()).output().unwrap())
    }

    /// The rows of a query as CSV.
    pub(crate) fn exits_sql(&self, query: &str) -> String {
        let ended = ended(self.elmo().args(["sql", "-q", "--format", "csv", "-c", query]).output().unwrap());
        assert_eq!(ended.code, Some(0), "{query}: {ended:?}");
        ended.out
    }

    /// Runs a command that must exit with `code`.
    pub(crate) fn exits(&self, words: &str, code: i32) -> Ended {
        let ended = self.run(words);
        assert_eq!(ended.code, Some(code), "elmo {words}: {ended:?}");
        ended
    }
}

pub(crate) fn ended(output: Output) -> Ended {
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Ended { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

/// Compares with a snapshot after replacing what differs from run to run.
pub(crate) fn snapshot(name: &str, text: &str) {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path("../snapshots");
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    for (pattern, shown) in [
        (r"/[^\s\x22,:)]*/\.tmp[A-Za-z0-9]{6}", "[FOLDER]"),
        (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", "[TIME]"),
        (r#""(seconds|tokens_per_second|load_seconds)": [0-9.e-]+"#, r#""$1": [MEASURED]"#),
        (r#""bytes": \d+"#, r#""bytes": [BYTES]"#),
    ] {
        settings.add_filter(pattern, shown);
    }
    // Clap pads empty lines with spaces.
    let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
    settings.bind(|| insta::assert_snapshot!(name, lines.join("\n")));
}

/// Replaces sizes and speeds in text reports.
pub(crate) fn steady(text: &str) -> String {
    let mut lines = Vec::new();
    for line in text.lines() {
        let volatile = ["seconds", "tokens/s", "files", "Parquet", "time", "size", "speed"];
        match volatile.iter().find(|name| line.starts_with(*name)) {
            Some(name) => lines.push(format!("{name}  [MEASURED]")),
            None => lines.push(line.to_owned()),
        }
    }
    lines.join("\n")
}
