//! Completion of the word before the cursor.

use std::path::Path;

use datafusion::sql::sqlparser::tokenizer::Token;

use super::{
    command::{Argument, COMMANDS},
    names::{Choice, Names},
    scan::Scan,
    settings::SETTINGS,
};

/// SQL keywords.
const KEYWORDS: &[&str] = &[
    "AND",
    "AS",
    "ASC",
    "BETWEEN",
    "BY",
    "CASE",
    "COPY",
    "CREATE EXTERNAL TABLE",
    "CREATE TABLE",
    "CREATE VIEW",
    "CROSS JOIN",
    "DESC",
    "DESCRIBE",
    "DISTINCT",
    "DROP TABLE",
    "DROP VIEW",
    "ELSE",
    "END",
    "EXPLAIN ANALYZE",
    "FROM",
    "FULL JOIN",
    "GROUP BY",
    "HAVING",
    "INNER JOIN",
    "INSERT INTO",
    "IS NOT NULL",
    "IS NULL",
    "LEFT JOIN",
    "LIKE",
    "LIMIT",
    "LOCATION",
    "NOT",
    "OFFSET",
    "OR",
    "ORDER BY",
    "OVER",
    "PARTITION BY",
    "SELECT",
    "SET",
    "SHOW TABLES",
    "STORED AS",
    "THEN",
    "UNION ALL",
    "UNNEST",
    "VALUES",
    "WHEN",
    "WHERE",
    "WITH",
];

/// What may replace the text from `start` to the cursor.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Completion {
    pub(super) start: usize,
    pub(super) candidates: Vec<String>,
}

impl Completion {
    /// Sorted, without duplicates.
    fn new(start: usize, candidates: impl IntoIterator<Item = String>) -> Self {
        let mut candidates: Vec<String> = candidates.into_iter().collect();
        candidates.sort();
        candidates.dedup();
        Self { start, candidates }
    }

    /// Those candidates that begin with the word from `start`, in any case.
    fn of_word(before: &str, start: usize, candidates: impl IntoIterator<Item = String>) -> Self {
        let word = before[start..].to_lowercase();
        Self::new(start, candidates.into_iter().filter(|candidate| candidate.to_lowercase().starts_with(&word)))
    }
}

/// Completes the text before the cursor.
pub(super) fn complete(before: &str, names: &Names) -> Completion {
    if before.trim_start().starts_with('\\') {
        return of_command(before, names);
    }
    let scan = Scan::new(before);
    match scan.open {
        _ if scan.in_comment => Completion::default(),
        Some(open) => in_quotation(before, open, &scan.tokens, names),
        None => in_code(before, names),
    }
}

/// Completes a backslash command and its arguments.
fn of_command(before: &str, names: &Names) -> Completion {
    let start = before.rfind(char::is_whitespace).map_or(0, |at| at + 1);
    let words: Vec<&str> = before[..start].split_whitespace().collect();
    let Some(command) = words.first() else {
        return Completion::of_word(before, start, COMMANDS.iter().map(|(name, ..)| (*name).to_owned()));
    };
    let Some((.., argument)) = COMMANDS.iter().find(|(name, ..)| name == command) else { return Completion::default() };
    let texts = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    match argument {
        Argument::None => Completion::default(),
        Argument::Table if before[start..].starts_with('\'') => files(before, start + 1, true),
        Argument::Table => Completion::of_word(before, start, names.tables.iter().map(|table| table.name.clone())),
        Argument::Function => {
            Completion::of_word(before, start, names.functions.iter().map(|function| function.name.clone()))
        }
        Argument::File => files(before, start, false),
        Argument::Words(legal) => Completion::of_word(before, start, texts(legal)),
        Argument::Setting => {
            let known = words.get(1).and_then(|name| SETTINGS.iter().find(|(known, ..)| known == name));
            let names = || SETTINGS.iter().map(|(name, ..)| (*name).to_owned()).collect();
            Completion::of_word(before, start, known.map_or_else(names, |(_, values, _)| texts(values)))
        }
    }
}

/// Completes a string, which is the name of a file or the value of an option, or a quoted name.
fn in_quotation(before: &str, open: usize, tokens: &[Token], names: &Names) -> Completion {
    let start = open + 1;
    if before[open..].starts_with('"') {
        let columns = names.tables.iter().flat_map(|table| &table.columns).chain(&names.file_columns);
        let all = columns.chain(names.tables.iter().map(|table| &table.name));
        return Completion::of_word(before, start, all.map(|name| name.replace('"', "\"\"") + "\""));
    }
    if !before[open..].starts_with('\'') {
        return Completion::default();
    }
    match tokens {
        [.., option, Token::RArrow] => {
            let values = values(option, tokens, names);
            Completion::of_word(before, start, values.into_iter().map(|value| value + "'"))
        }
        [.., word] if is_one_of(word, &["FROM", "JOIN", "LOCATION", "TO", "INTO", "DESCRIBE"]) => {
            files(before, start, true)
        }
        _ => Completion::default(),
    }
}

/// Completes a word outside of quotations.
fn in_code(before: &str, names: &Names) -> Completion {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    let start =
        before.rfind(|c| !is_part(c)).map_or(0, |at| at + before[at..].chars().next().map_or(1, char::len_utf8));
    let (word, tokens) = (&before[start..], Scan::new(&before[..start]).tokens);
    let tables = || names.tables.iter().map(|table| table.name.clone());
    let table_functions = || names.table_functions.iter().map(|name| format!("{name}("));
    match tokens.as_slice() {
        _ if is_setting(&tokens) => {
            let start = before.rfind(char::is_whitespace).map_or(0, |at| at + 1);
            Completion::of_word(before, start, names.settings.iter().cloned())
        }
        [.., owner, Token::Period] => Completion::of_word(before, start, columns(owner, names)),
        [.., word] if is_one_of(word, &["FROM", "JOIN", "INTO", "TABLE", "VIEW", "DESCRIBE"]) => {
            Completion::of_word(before, start, tables().chain(table_functions()))
        }
        [.., option, Token::RArrow] => {
            let values = values(option, &tokens, names);
            Completion::of_word(before, start, values.into_iter().map(|value| format!("'{value}'")))
        }
        _ => {
            let options = match tokens.last() {
                Some(Token::LParen | Token::Comma) => missing_options(&tokens, names),
                _ => Vec::new(),
            };
            // Without a first letter, there would be hundreds.
            let others: Vec<String> = match word.is_empty() {
                true => Vec::new(),
                false => {
                    let functions = names.functions.iter().map(|function| format!("{}(", function.name));
                    let columns = names.tables.iter().flat_map(|table| table.columns.clone());
                    let columns = columns.chain(names.file_columns.iter().cloned());
                    functions.chain(columns).chain(tables()).chain(table_functions()).chain(keywords(word)).collect()
                }
            };
            Completion::of_word(before, start, options.into_iter().chain(others))
        }
    }
}

/// The keywords in the case of a word.
fn keywords(word: &str) -> impl Iterator<Item = String> {
    let is_lower = word.chars().all(|c| !c.is_uppercase());
    KEYWORDS.iter().map(move |keyword| if is_lower { keyword.to_lowercase() } else { (*keyword).to_owned() })
}

/// Whether the tokens are SET or SHOW and the beginning of a setting such as `datafusion.sql.`.
fn is_setting(tokens: &[Token]) -> bool {
    let statement = tokens.rsplit(|token| *token == Token::SemiColon).next().unwrap_or_default();
    match statement.split_first() {
        Some((first, rest)) if is_one_of(first, &["SET", "SHOW"]) => {
            rest.iter().all(|token| matches!(token, Token::Word(_) | Token::Period))
                && rest.last().is_none_or(|token| *token == Token::Period)
        }
        _ => false,
    }
}

/// The columns of a table, or all columns for an alias.
fn columns(owner: &Token, names: &Names) -> Vec<String> {
    let owner = word(owner).unwrap_or_default();
    match names.tables.iter().find(|table| table.name.eq_ignore_ascii_case(owner)) {
        Some(table) => table.columns.clone(),
        None => {
            let columns = names.tables.iter().flat_map(|table| table.columns.iter());
            columns.chain(&names.file_columns).cloned().collect()
        }
    }
}

/// The legal values of an option of the innermost call.
fn values(option: &Token, tokens: &[Token], names: &Names) -> Vec<String> {
    let option = word(option).unwrap_or_default();
    if option.eq_ignore_ascii_case("model") {
        return names.models.clone();
    }
    let choice =
        call(tokens, names).and_then(|(choices, _)| choices.iter().find(|c| c.name.eq_ignore_ascii_case(option)));
    choice.map(|choice| choice.values.clone()).unwrap_or_default()
}

/// The options that the innermost call does not have yet.
fn missing_options(tokens: &[Token], names: &Names) -> Vec<String> {
    let Some((choices, arguments)) = call(tokens, names) else { return Vec::new() };
    // The first argument is a text.
    if arguments.is_empty() {
        return Vec::new();
    }
    let is_given = |name: &str| {
        arguments.windows(2).any(|pair| pair[1] == Token::RArrow && word(&pair[0]).is_some_and(|w| w == name))
    };
    choices.iter().filter(|choice| !is_given(&choice.name)).map(|choice| format!("{} => ", choice.name)).collect()
}

/// The options of the function whose call is open at the end, and the tokens of its arguments.
fn call<'a>(tokens: &'a [Token], names: &'a Names) -> Option<(&'a [Choice], &'a [Token])> {
    let mut depth = 0;
    let at = tokens.iter().rposition(|token| {
        match token {
            Token::RParen => depth += 1,
            Token::LParen if depth == 0 => return true,
            Token::LParen => depth -= 1,
            _ => {}
        }
        false
    })?;
    let name = word(tokens.get(at.checked_sub(1)?)?)?;
    let function = names.functions.iter().find(|function| function.name.eq_ignore_ascii_case(name))?;
    Some((&function.options, &tokens[at + 1..]))
}

fn word(token: &Token) -> Option<&str> {
    match token {
        Token::Word(word) => Some(&word.value),
        _ => None,
    }
}

fn is_one_of(token: &Token, keywords: &[&str]) -> bool {
    word(token).is_some_and(|word| keywords.iter().any(|keyword| keyword.eq_ignore_ascii_case(word)))
}

/// Completes the path from `start`. Inside a quotation, a file gets the closing quote.
fn files(before: &str, start: usize, is_quoted: bool) -> Completion {
    let path = before[start..].replace("''", "'");
    let (folder, prefix) = path.rsplit_once('/').map_or(("", path.as_str()), |(folder, name)| (folder, name));
    let start = start + before[start..].rfind('/').map_or(0, |at| at + 1);
    let place = match (folder, path.starts_with('/')) {
        ("", true) => Path::new("/"),
        ("", false) => Path::new("."),
        (folder, _) => Path::new(folder),
    };
    // Without a folder of this name, as for a URL, there are no candidates.
    let entries = std::fs::read_dir(place).into_iter().flatten().flatten();
    let candidates = entries.filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let is_hidden = name.starts_with('.') && !prefix.starts_with('.');
        let text = if is_quoted { name.replace('\'', "''") } else { name.clone() };
        let end = match (entry.path().is_dir(), is_quoted) {
            (true, _) => "/",
            (false, true) => "'",
            (false, false) => "",
        };
        (name.starts_with(prefix) && !is_hidden).then(|| text + end)
    });
    Completion::new(start, candidates)
}

#[cfg(test)]
mod tests {
    use super::{
        super::names::{Function, Table},
        *,
    };

    fn names() -> Names {
        let texts = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        let choice = |name: &str, values: &[&str]| Choice { name: name.into(), values: texts(values) };
        let options = vec![choice("layers", &["top"]), choice("pooling", &["max", "mean"]), choice("model", &[])];
        Names {
            tables: vec![
                Table { name: "reviews".into(), columns: texts(&["id", "text"]) },
                Table { name: "users".into(), columns: texts(&["id", "town", "Full name"]) },
            ],
            file_columns: texts(&["tokens"]),
            functions: vec![
                Function { name: "elmo_embed".into(), options },
                Function { name: "upper".into(), options: Vec::new() },
            ],
            table_functions: texts(&["elmo_models"]),
            settings: texts(&["elmo.cache_mb", "elmo.rules", "datafusion.sql_parser.dialect"]),
            models: texts(&["tiny"]),
        }
    }

    /// The texts that a completion makes of `before`.
    fn completed(before: &str) -> Vec<String> {
        let Completion { start, candidates } = complete(before, &names());
        candidates.into_iter().map(|candidate| format!("{}{candidate}", &before[..start])).collect()
    }

    #[test]
    fn words_are_completed() {
        for (before, expected) in [
            ("SELECT elmo_e", &["SELECT elmo_embed("][..]),
            ("SELECT * FROM ", &["SELECT * FROM elmo_models(", "SELECT * FROM reviews", "SELECT * FROM users"]),
            ("SELECT * FROM Rev", &["SELECT * FROM reviews"]),
            ("sel", &["select"]),
            ("SEL", &["SELECT"]),
            ("SELECT to", &["SELECT tokens", "SELECT town"]),
            ("SELECT users.t", &["SELECT users.town"]),
            ("SELECT u.i", &["SELECT u.id"]),
            ("SELECT \"Full", &["SELECT \"Full name\""]),
            ("SELECT é", &[]),
            ("SELECT ", &[]),
            ("SELECT 1 -- sel", &[]),
            ("SELECT 'sel", &[]),
            ("SELECT $$sel", &[]),
            ("DESCRIBE us", &["DESCRIBE users"]),
        ] {
            assert_eq!(completed(before), expected, "{before}");
        }
    }

    #[test]
    fn options_and_their_values_are_completed() {
        for (before, expected) in [
            ("SELECT elmo_embed(text, po", &["SELECT elmo_embed(text, pooling => "][..]),
            ("SELECT elmo_embed(upper(text), po", &["SELECT elmo_embed(upper(text), pooling => "]),
            (
                "elmo_embed(text, layers => 'top', ",
                &["elmo_embed(text, layers => 'top', model => ", "elmo_embed(text, layers => 'top', pooling => "],
            ),
            ("elmo_embed(upper(text, po", &[]),
            (
                "elmo_embed(text,\n pooling => ",
                &["elmo_embed(text,\n pooling => 'max'", "elmo_embed(text,\n pooling => 'mean'"],
            ),
            ("elmo_embed(text, pooling => 'me", &["elmo_embed(text, pooling => 'mean'"]),
            ("elmo_embed(text, model => 't", &["elmo_embed(text, model => 'tiny'"]),
            ("elmo_embed(", &[]),
        ] {
            assert_eq!(completed(before), expected, "{before}");
        }
    }

    #[test]
    fn settings_and_commands_are_completed() {
        for (before, expected) in [
            ("SET elmo.", &["SET elmo.cache_mb", "SET elmo.rules"][..]),
            ("SELECT 1; set elmo.r", &["SELECT 1; set elmo.rules"]),
            ("SHOW data", &["SHOW datafusion.sql_parser.dialect"]),
            ("SET elmo.rules = fa", &[]),
            ("\\d", &["\\d", "\\df"]),
            ("\\d re", &["\\d reviews"]),
            ("\\df elmo_e", &["\\df elmo_embed"]),
            ("\\f c", &["\\f csv"]),
            ("\\set ma", &["\\set max_rows"]),
            ("\\set expanded a", &["\\set expanded auto"]),
            ("\\x o", &["\\x off", "\\x on"]),
            ("\\nothing ", &[]),
        ] {
            assert_eq!(completed(before), expected, "{before}");
        }
    }

    #[test]
    fn files_in_quotes_are_completed() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["reviews.jsonl", "it's.csv", ".hidden"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        std::fs::create_dir(folder.path().join("rest")).unwrap();
        let path = folder.path().display();
        for (before, expected) in [
            (
                format!("SELECT * FROM '{path}/re"),
                vec![format!("SELECT * FROM '{path}/rest/"), format!("SELECT * FROM '{path}/reviews.jsonl'")],
            ),
            (format!("SELECT * FROM '{path}/it"), vec![format!("SELECT * FROM '{path}/it''s.csv'")]),
            (format!("COPY (SELECT 1) TO '{path}/.h"), vec![format!("COPY (SELECT 1) TO '{path}/.hidden'")]),
            (format!("\\i {path}/rev"), vec![format!("\\i {path}/reviews.jsonl")]),
            (format!("\\d '{path}/rev"), vec![format!("\\d '{path}/reviews.jsonl'")]),
            ("SELECT * FROM 's3://bucket/".to_owned(), vec![]),
            (format!("SELECT * FROM t WHERE text = '{path}/re"), vec![]),
        ] {
            assert_eq!(completed(&before), expected, "{before}");
        }
    }
}
