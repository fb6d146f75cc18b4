//! The sentences of a column, for those who read text without embedding it: vocabularies and training.

use arrow::array::ArrayRef;

use super::rows::{Row, Rows};
use crate::{
    error::Result,
    row_error::RowError,
    spec::{SentenceMode, TokenizerKind},
    text::{Cutter, Token},
};

/// The tokens of a sentence, as the model reads them.
#[derive(Debug, Clone, Copy)]
pub struct Tokens<'s>(Source<'s>);

#[derive(Debug, Clone, Copy)]
enum Source<'s> {
    List(&'s [&'s str]),
    /// The text, and the tokens that were cut from it.
    Text(&'s str, &'s [Token]),
}

impl<'s> Tokens<'s> {
    /// Number of tokens.
    pub fn len(self) -> usize {
        match self.0 {
            Source::List(words) => words.len(),
            Source::Text(_, tokens) => tokens.len(),
        }
    }

    /// Whether there is no token.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// The tokens in order.
    pub fn iter(self) -> impl Iterator<Item = &'s str> {
        let (list, text, tokens) = match self.0 {
            Source::List(words) => (words, "", &[][..]),
            Source::Text(text, tokens) => (&[][..], text, tokens),
        };
        list.iter().copied().chain(tokens.iter().map(move |token| token.read(text)))
    }
}

/// Calls `each` with the row and the tokens of every sentence of a column, in order. A list of tokens is one sentence. NULL
/// and rows without a token have none. Returns the rows that cannot be read, with their reasons.
///
/// # Errors
/// [`Error::Column`](crate::Error::Column) when the column holds no text.
pub fn for_each_sentence(
    column: &ArrayRef,
    tokenizer: TokenizerKind,
    mode: SentenceMode,
    mut each: impl FnMut(usize, Tokens<'_>),
) -> Result<Vec<(usize, RowError)>> {
    let rows = Rows::new(column)?;
    let (mut bad, mut cutter) = (Vec::new(), Cutter::new(tokenizer, mode));
    for index in 0..rows.len() {
        match rows.get(index) {
            Row::Null => {}
            Row::Bad(error) => bad.push((index, error)),
            Row::Tokens(tokens) if tokens.is_empty() => {}
            Row::Tokens(tokens) => each(index, Tokens(Source::List(&tokens))),
            Row::Text(text) => cutter.cut(text, |tokens| each(index, Tokens(Source::Text(text, tokens)))),
        }
    }
    Ok(bad)
}

/// Calls `each` with every text of a column as it is, before it is cut. Lists of tokens, NULLs and rows that are no text are
/// passed over.
///
/// # Errors
/// As [`for_each_sentence`].
pub fn for_each_text(column: &ArrayRef, mut each: impl FnMut(&str)) -> Result<()> {
    let rows = Rows::new(column)?;
    for index in 0..rows.len() {
        if let Row::Text(text) = rows.get(index) {
            each(text);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{BinaryArray, ListBuilder, StringArray, StringBuilder};

    use super::*;

    fn sentences(column: ArrayRef, mode: SentenceMode) -> (Vec<Vec<String>>, Vec<usize>) {
        let (mut found, mut last) = (Vec::new(), 0);
        let keep = |row: usize, words: Tokens<'_>| {
            assert!(row >= last && row < column.len());
            last = row;
            found.push(words.iter().map(str::to_owned).collect());
        };
        let bad = for_each_sentence(&column, TokenizerKind::Whitespace, mode, keep).unwrap();
        (found, bad.into_iter().map(|(row, _)| row).collect())
    }

    #[test]
    fn texts_and_lists_have_sentences_and_bad_rows_are_named() {
        let texts: ArrayRef = Arc::new(StringArray::from(vec![Some("It is late. Go home."), None, Some("  ")]));
        let (split, bad) = sentences(Arc::clone(&texts), SentenceMode::Split);
        assert_eq!(
            (split, bad),
            (vec![vec!["It".into(), "is".into(), "late.".into()], vec!["Go".into(), "home.".into()]], vec![])
        );
        assert_eq!(sentences(texts, SentenceMode::Off).0[0].len(), 5);

        let mut lists = ListBuilder::new(StringBuilder::new());
        lists.append_value([Some("a"), Some("b c")]);
        lists.append_value([Some("a"), None]);
        lists.append_value(Vec::<Option<&str>>::new());
        let (found, bad) = sentences(Arc::new(lists.finish()), SentenceMode::Split);
        assert_eq!((found, bad), (vec![vec!["a".to_owned(), "b c".to_owned()]], vec![1]));

        let bytes: ArrayRef = Arc::new(BinaryArray::from(vec![&b"fine"[..], b"\xff"]));
        assert_eq!(sentences(bytes, SentenceMode::Off).1, [1]);
    }
}
