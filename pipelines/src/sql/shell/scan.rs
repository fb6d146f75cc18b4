//! The tokens of an unfinished text: whether its last statement is complete, and what is open at its end.

use datafusion::sql::sqlparser::{
    dialect::GenericDialect,
    tokenizer::{Location, Token, TokenWithSpan, Tokenizer, Whitespace},
};

/// A text, or the part of it before the cursor.
#[derive(Debug)]
pub(super) struct Scan {
    /// Tokens without spaces and comments.
    pub(super) tokens: Vec<Token>,
    /// Where a quotation or comment begins that does not end.
    pub(super) open: Option<usize>,
    /// Whether the text ends in a comment.
    pub(super) in_comment: bool,
}

impl Scan {
    pub(super) fn new(text: &str) -> Self {
        let mut tokens: Vec<TokenWithSpan> = Vec::new();
        // The tokenizer fails at an open quotation or comment, and keeps the tokens before it.
        let failed = Tokenizer::new(&GenericDialect {}, text).tokenize_with_location_into_buf(&mut tokens).is_err();
        let end = tokens.last().map_or(Location { line: 1, column: 1 }, |token| token.span.end);
        let open = failed.then(|| offset(text, end));
        let in_comment = match (open, tokens.last().map(|token| &token.token)) {
            (Some(open), _) => text[open..].starts_with("/*"),
            (None, Some(Token::Whitespace(Whitespace::SingleLineComment { .. }))) => !text.ends_with('\n'),
            (None, _) => false,
        };
        let tokens = tokens.into_iter().map(|token| token.token);
        Self { tokens: tokens.filter(|token| !matches!(token, Token::Whitespace(_))).collect(), open, in_comment }
    }

    /// Whether the text ends with a semicolon outside of quotations and comments.
    pub(super) fn is_complete(&self) -> bool {
        self.open.is_none() && self.tokens.last() == Some(&Token::SemiColon)
    }

    /// Whether the text consists of spaces and comments.
    pub(super) fn is_blank(&self) -> bool {
        self.open.is_none() && self.tokens.is_empty()
    }
}

/// The byte offset of a location, whose columns are characters.
fn offset(text: &str, location: Location) -> usize {
    let lines = usize::try_from(location.line - 1).unwrap_or(usize::MAX);
    let start: usize = text.split_inclusive('\n').take(lines).map(str::len).sum();
    let characters = usize::try_from(location.column - 1).unwrap_or(usize::MAX);
    text[start..].char_indices().nth(characters).map_or(text.len(), |(at, _)| start + at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_statement_ends_with_a_semicolon_outside_of_quotes_and_comments() {
        for whole in ["SELECT 1;", "SELECT ';' ; ", "SELECT 1; -- done", "SELECT 'it''s';", "SELECT 1; SELECT 2;", ";"]
        {
            assert!(Scan::new(whole).is_complete(), "{whole}");
        }
        for part in
            ["", "SELECT 1", "SELECT ';", "SELECT 1 -- ;", "SELECT /* ;", "SELECT 1; SELECT 2", "SELECT \"a;", "$$;"]
        {
            assert!(!Scan::new(part).is_complete(), "{part}");
        }
        assert!(Scan::new(" -- nothing\n").is_blank() && !Scan::new("/* nothing").is_blank());
    }

    // Offsets by hand; é has two bytes.
    #[test]
    fn the_open_quotation_is_found() {
        for (text, open) in [
            ("SELECT 'a", Some(7)),
            ("SELECT 'é',\n 'é' /*", Some(19)),
            ("SELECT \"é\", \"b", Some(13)),
            ("SELECT 'a' -- it's", None),
        ] {
            assert_eq!(Scan::new(text).open, open, "{text}");
        }
        assert!(Scan::new("SELECT 1 -- x").in_comment && Scan::new("SELECT 1 /* x").in_comment);
        assert!(!Scan::new("SELECT 1 -- x\n").in_comment && !Scan::new("SELECT 'x").in_comment);
    }
}
