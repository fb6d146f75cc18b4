//! The shell of `elmo sql` in a terminal: statements and commands, Ctrl-C, the pager, and the width of results.

use std::{fs, process::Command, thread, time::Duration};

use crate::{
    place::{Place, ended},
    terminal::{Terminal, screen},
};

/// A folder with a CSV file of three rows.
fn place() -> Place {
    let place = Place::new();
    place.write("a.csv", "id,text\n1,It rained.\n2,\n3,\"We stayed in, and read.\"\n");
    place
}

/// A shell in a terminal of 80 columns and 24 rows, at its prompt.
fn shell(place: &Place, env: &[(&str, &str)]) -> Terminal {
    let mut command = place.elmo();
    command.args(["sql", "--no-color"]).envs(env.iter().copied());
    let mut terminal = Terminal::start(command, 80, 24);
    terminal.prompt();
    terminal
}

/// Leaves the shell, which must succeed.
fn leave(mut terminal: Terminal) -> String {
    terminal.keys("\\q\r");
    let (status, seen) = terminal.end();
    assert_eq!(status.code(), Some(0), "{seen}");
    seen
}

#[test]
fn statements_commands_and_errors() {
    let place = place();
    let mut shell = shell(&place, &[]);
    shell.keys("SELECT max(id) AS largest\r");
    shell.wait_for("   -> ");
    assert!(shell.line("FROM 'a.csv';").contains("| 3       |"));
    assert!(shell.line("SELECT 1 FROM nowhere;").contains("nowhere: neither a table nor a file of this name exists"));
    // Ctrl-C discards an unfinished statement.
    shell.keys("SELECT\r");
    shell.wait_for("   -> ");
    shell.keys("given_up\x03");
    shell.prompt();
    for (line, parts) in [
        ("help", &["\\timing [on|off]", "Ctrl-C"][..]),
        ("\\d", &["there are no tables yet"]),
        ("CREATE TABLE cities AS SELECT 'Rome' AS city;", &["done"]),
        ("CREATE VIEW larger AS SELECT * FROM cities;", &["done"]),
        ("\\d", &["| cities | table |", "| larger | view  |", "2 rows"]),
        ("\\d cities", &["| city        | Utf8"]),
        ("\\d a.csv", &["| text        | Utf8"]),
        ("\\df", &["| elmo_span ", "aggregate"]),
        ("\\df elmo_span", &["elmo_span(", "\r\nExample\r\n"]),
        ("\\df array_sor", &["| array_sort ", "scalar"]),
        ("\\df elmo_embd", &["no function elmo_embd; did you mean elmo_embed?"]),
        ("\\m", &["| books | true", "| tiny  | false"]),
        ("\\pset pager off", &["\\pset: unknown command; did you mean \\set?"]),
        (".tables", &["did you mean \\d?"]),
        ("\\timing off", &["timing is off"]),
        ("\\set max_rows 2", &["max_rows is 2"]),
        ("SELECT id FROM 'a.csv' ORDER BY id;", &["| 2  |", "only the first 2 rows are shown; \\set max_rows"]),
        ("\\set max_rows 3", &["max_rows is 3"]),
        ("SELECT id FROM 'a.csv' ORDER BY id;", &["| 3  |", "\r\n3 rows\r\n"]),
        ("\\f csv", &["format is csv"]),
        ("\\d 'a.csv'", &["text,Utf8"]),
        ("\\set", &["format    csv ", "timing    off "]),
    ] {
        let said = shell.line(line);
        for part in parts {
            assert!(said.contains(part), "{line}: no {part:?} in {said}");
        }
        assert!(!said.contains("information_schema"), "{line}: {said}");
    }
    shell.keys("exit\r");
    let (status, seen) = shell.end();
    assert_eq!(status.code(), Some(0), "{seen}");
    let history = fs::read_to_string(place.path("home/.local/state/elmo/sql_history")).unwrap();
    assert!(history.contains("\\f csv") && !history.contains("given_up"), "{history}");
}

#[test]
fn names_options_and_files_are_completed() {
    let place = place();
    let mut shell = shell(&place, &[]);
    // A tab completes the only candidate.
    let statement = "SELECT elmo_embe\ttext, poo\t'fir\t) IS NULL AS is_null FROM 'a.c\t;";
    assert!(shell.line(statement).contains("| is_null |"), "{}", leave(shell));
    // A column of a file that was queried.
    assert!(shell.line("SELECT upper(tex\t) AS up FROM 'a.csv' WHERE id = 1;").contains("| IT RAINED. |"));
    shell.line("CREATE TABLE destinations AS SELECT 'Rome' AS city;");
    assert!(shell.line("SELECT city FROM dest\t;").contains("| Rome |"));
    assert!(shell.line("SET elmo.ru\t = false;").contains("done"));
    assert!(shell.line("\\tim\t off").contains("timing is off"));
    leave(shell);
}

#[test]
fn control_c_ends_the_statement_only() {
    let place = place();
    let mut shell = shell(&place, &[]);
    shell.line("CREATE TABLE kept AS SELECT 7 AS seven;");
    for signals in [1, 3] {
        shell.keys("SELECT sum(value) FROM range(0, 100000000000);\r");
        thread::sleep(Duration::from_secs(1));
        for _ in 0..signals {
            // The terminal is not in raw mode, and sends SIGINT for the key.
            shell.keys("\x03");
            thread::sleep(Duration::from_millis(30));
        }
        shell.wait_for("error: interrupted");
        shell.prompt();
    }
    // Between statements, too.
    Command::new("kill").args(["-INT", &shell.id().to_string()]).status().unwrap();
    shell.keys("SELECT seven FROM kept;\r");
    shell.wait_for("| 7     |");
    shell.prompt();
    shell.keys("SELECT 1\x03");
    shell.prompt();
    // Ctrl-D leaves.
    shell.keys("\x04");
    let (status, seen) = shell.end();
    assert_eq!(status.code(), Some(0), "{seen}");
}

#[test]
fn results_fit_the_terminal() {
    let place = Place::new();
    let long = "It rained all day, and we stayed in and read what there was. ".repeat(3);
    place.write("wide.csv", format!("id,text,city\n1,\"{long}\",東京\n"));
    let mut shell = shell(&place, &[]);
    let query = "SELECT id, text, elmo_embed(text) AS v, city FROM 'wide.csv';";
    let said = screen(&shell.line(query));
    assert!(said.contains("] (256) | 東京 |") && said.contains("… |"), "{said}");
    // 東 and 京 take two columns each.
    let wide = |line: &str| line.chars().count() + line.matches(['東', '京']).count();
    let table = || said.lines().filter(|line| line.starts_with(['|', '+']));
    assert!(table().count() == 5 && table().all(|line| wide(line) == 80), "{said}");
    // Numbers are not cut: columns are hidden instead.
    let columns: Vec<String> = (10..30).map(|n| format!("{n}000000 AS c{n}")).collect();
    let said = shell.line(&format!("SELECT {};", columns.join(", ")));
    assert!(said.contains("| 10000000 |") && said.contains("| … |") && said.contains("| 29000000 |"), "{said}");
    assert!(said.contains("columns that do not fit the terminal: 14; \\x shows all"), "{said}");
    shell.line("\\x auto");
    let said = shell.line("SELECT id, text, city FROM 'wide.csv';");
    assert!(said.contains("-[ RECORD 1 ]-") && said.contains("city | 東京"), "{said}");
    assert!(said.contains(&format!("text | {}", long.trim_end())), "{said}");
    assert!(shell.line("SELECT id FROM 'wide.csv';").contains("| 1  |"));
    leave(shell);
    // Elsewhere nothing is cut.
    let output = ended(place.elmo().args(["sql", "-c", "SELECT text FROM 'wide.csv'"]).output().unwrap());
    assert!(output.out.contains(long.trim_end()), "{output:?}");
}

#[test]
fn a_high_table_goes_through_the_pager() {
    let place = place();
    // The pager adds a line, and must not read the keys of the shell.
    let mut shell = shell(&place, &[("PAGER", "sed 's/^/paged /'"), ("PATH", "/usr/bin:/bin")]);
    let high = "SELECT value FROM range(0, 50);";
    assert!(shell.line(high).contains("paged | 49    |"));
    assert!(!shell.line("SELECT value FROM range(0, 3);").contains("paged"));
    shell.line("\\set pager off");
    let said = shell.line(high);
    assert!(!said.contains("paged") && said.contains("| 49    |"), "{said}");
    leave(shell);
    // A pager that is not installed.
    let mut shell = super::shell::shell(&place, &[("PAGER", "/nowhere/pager"), ("PATH", "/usr/bin:/bin")]);
    assert!(shell.line(high).contains("| 49    |"));
    leave(shell);
}

#[test]
fn no_progress_line_stays_on_the_screen() {
    let place = place();
    let embed = ["embed", "--no-color", "--model", "tiny", "--input"];
    for (words, code, last) in [
        (vec!["reviews.jsonl", "--output", "out"], 0, "tokens/s"),
        (vec!["reviews.jsonl", "--output", "other", "--dry-run"], 0, "output"),
        (vec!["nothing.txt", "--output", "none"], 3, "error: "),
    ] {
        let mut command = place.elmo();
        command.args(embed).args(&words);
        let (status, seen) = Terminal::start(command, 120, 40).end();
        assert_eq!(status.code(), Some(code), "{words:?}: {seen}");
        let shown = screen(&seen);
        assert!(shown.contains(last), "{words:?}: {shown}");
        for stale in ["starting", "rows/s", "padding", "=>"] {
            assert!(!shown.contains(stale), "{words:?}: {stale} in {shown}");
        }
        // Every message has a line of its own.
        let warning = shown.lines().find(|line| line.contains("untrained"));
        assert!(warning.is_none_or(|line| line.trim_start().starts_with("WARN ")), "{shown}");
    }
    // Interrupted once, and twice.
    place.write("a.txt", "It rained all day, and we stayed in and read what there was.\n".repeat(50_000));
    for (output, signals, last) in [("once", 1, "to resume: "), ("twice", 2, "a second signal stops at once")] {
        let mut command = place.elmo();
        command.args(embed).args(["a.txt", "--threads", "1", "--rows-per-file", "200", "--output", output]);
        let mut job = Terminal::start(command, 120, 40);
        job.wait_for("rows/s");
        job.keys("\x03");
        job.wait_for("a second signal stops at once");
        if signals == 2 {
            job.keys("\x03");
        }
        let (status, seen) = job.end();
        let shown = screen(&seen);
        assert_eq!(status.code(), Some(130), "{shown}");
        assert!(shown.contains(last) && !shown.contains("rows/s"), "{shown}");
    }
    let mut shell = shell(&place, &[("ELMO_MODEL", "tiny")]);
    shell.line("SELECT elmo_embed('It rained.') IS NULL AS is_null;");
    shell.line("SELECT elmo_embed(text) FROM 'nothing.csv';");
    // Embeds until it is interrupted.
    shell.keys("SELECT count(elmo_embed(value::text)) FROM range(0, 10000000);\r");
    shell.wait_for("rows/s");
    shell.keys("\x03");
    shell.wait_for("error: interrupted");
    shell.prompt();
    let shown = screen(&leave(shell));
    for stale in ["starting", "rows/s", "padding"] {
        assert!(!shown.contains(stale), "{stale} in {shown}");
    }
    assert_eq!(shown.matches("untrained").count(), 1, "{shown}");
    assert!(shown.contains("| is_null |\n+---------+\n| false   |\n+---------+\n1 row, "), "{shown}");
}

#[test]
fn the_untrained_model_is_reported_once_and_after_all_checks() {
    let place = place();
    place.exits("embed -q --model tiny --input reviews.jsonl --output done", 0);
    for words in [
        "embed --model tiny --input nothing.txt --output o",
        "embed --model tiny --input reviews.jsonl --column nothing --output o",
        "embed --model tiny --input reviews.jsonl --output done --pooling max",
        "sql --model tiny -f nothing.sql",
    ] {
        let ended = place.run(words);
        assert!(ended.code != Some(0) && !ended.err.contains("untrained"), "{words}: {ended:?}");
    }
    for statement in ["SELECT elmo_embed(text, pooling => 'sum') FROM 'a.csv'", "SELECT elmo_embed(txt) FROM 'a.csv'"] {
        let ended = ended(place.elmo().args(["sql", "--model", "tiny", "-c", statement]).output().unwrap());
        assert!(ended.code == Some(2) && !ended.err.contains("untrained"), "{statement}: {ended:?}");
    }
    let two = "SELECT elmo_embed('a') IS NULL; SELECT elmo_embed('a', model => 'other') IS NULL";
    for words in [
        vec!["sql", "--model", "tiny", "--add-model", "other=tiny", "-c", two],
        vec!["embed", "--model", "tiny", "--input", "reviews.jsonl", "--output", "out"],
        vec!["embed", "--model", "tiny", "--input", "reviews.jsonl", "--output", "dry", "--dry-run"],
        vec!["demo", "--model", "tiny"],
    ] {
        let ended = ended(place.elmo().args(&words).output().unwrap());
        assert_eq!(ended.code, Some(0), "{ended:?}");
        assert_eq!(ended.err.matches("untrained").count(), 1, "{words:?}: {ended:?}");
    }
}
