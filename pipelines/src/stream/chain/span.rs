//! What the footer of an object says about its messages.
//!
//! These pairs differ from object to object, so their keys begin with `stream.`. The pairs `elmo.*` beside them are the
//! same in all objects of a dataset.

use std::{collections::BTreeMap, ops::Range, str::FromStr};

use crate::stream::TopicPartition;

/// Prefix of the counts of rejected messages.
const REJECTED: &str = "stream.rejected.";

/// Messages that were rejected, by the label of the reason.
pub type Rejected = BTreeMap<String, u64>;

/// The messages of one object, and who wrote it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// Where the messages are from.
    pub partition: TopicPartition,
    /// The first offset: the end of the object before it.
    pub start: i64,
    /// The offset after the last one.
    pub end: i64,
    /// Rows. Fewer than offsets where messages were skipped or offsets left out.
    pub rows: u64,
    /// Messages that were rejected.
    pub rejected: Rejected,
    /// Offsets within the span whose messages the broker had deleted before they were read.
    pub gaps: Vec<Range<i64>>,
    /// The generation of the dataset.
    pub generation: u32,
    /// The process that wrote it: a random id.
    pub writer: String,
    /// Number of the file among those of its writer. Together they identify the file after a request without an answer.
    pub attempt: u64,
}

impl Span {
    /// The pairs for a footer.
    pub(crate) fn pairs(&self) -> Vec<(String, String)> {
        let gaps: Vec<String> = self.gaps.iter().map(|gap| format!("{}-{}", gap.start, gap.end)).collect();
        let fixed = [
            ("stream.topic", self.partition.topic.to_string()),
            ("stream.partition", self.partition.partition.to_string()),
            ("stream.start", self.start.to_string()),
            ("stream.end", self.end.to_string()),
            ("stream.rows", self.rows.to_string()),
            ("stream.gaps", gaps.join(",")),
            ("stream.generation", self.generation.to_string()),
            ("stream.writer", self.writer.clone()),
            ("stream.attempt", self.attempt.to_string()),
        ];
        let rejected = self.rejected.iter().map(|(label, count)| (format!("{REJECTED}{label}"), count.to_string()));
        fixed.into_iter().map(|(key, value)| (key.to_owned(), value)).chain(rejected).collect()
    }

    /// Parses the pairs of a footer; `None` where none is of a stream.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn parse(pairs: &BTreeMap<String, String>) -> Option<Result<Self, String>> {
        pairs.keys().any(|key| key.starts_with("stream.")).then(|| Self::of_pairs(pairs))
    }

    fn of_pairs(pairs: &BTreeMap<String, String>) -> Result<Self, String> {
        let get = |key: &str| pairs.get(key).map(String::as_str).ok_or_else(|| format!("its footer has no {key}"));
        fn number<T: FromStr>(key: &str, value: &str) -> Result<T, String> {
            value.parse().map_err(|_| format!("{key} in its footer is no number in its range"))
        }
        let offset = |key: &str| number::<i64>(key, get(key)?);
        let gap = |gap: &str| {
            let ends = gap.split_once('-').and_then(|(start, end)| Some(start.parse().ok()?..end.parse().ok()?));
            ends.ok_or_else(|| "stream.gaps in its footer is no list of ranges".to_owned())
        };
        let rejected = pairs.iter().filter_map(|(key, count)| Some((key, key.strip_prefix(REJECTED)?, count)));
        let span = Self {
            partition: TopicPartition::new(get("stream.topic")?, number("stream.partition", get("stream.partition")?)?),
            start: offset("stream.start")?,
            end: offset("stream.end")?,
            rows: number("stream.rows", get("stream.rows")?)?,
            rejected: rejected
                .map(|(key, label, count)| Ok((label.to_owned(), number(key, count)?)))
                .collect::<Result<_, String>>()?,
            gaps: get("stream.gaps")?.split(',').filter(|gap| !gap.is_empty()).map(gap).collect::<Result<_, _>>()?,
            generation: number("stream.generation", get("stream.generation")?)?,
            writer: get("stream.writer")?.to_owned(),
            attempt: number("stream.attempt", get("stream.attempt")?)?,
        };
        if span.start < 0 || span.end < span.start {
            return Err(format!("its footer says that it reaches from offset {} to {}", span.start, span.end));
        }
        Ok(span)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span() -> Span {
        Span {
            partition: TopicPartition::new("reviews", 3),
            start: 10,
            end: 90,
            rows: 40,
            rejected: [("tombstone".to_owned(), 3), ("not-json".to_owned(), 1)].into(),
            gaps: vec![10..20, 30..31],
            generation: 2,
            writer: "w".into(),
            attempt: 7,
        }
    }

    #[test]
    fn a_span_comes_back_from_its_footer() {
        let pairs: BTreeMap<String, String> = span().pairs().into_iter().collect();
        assert_eq!(pairs["stream.gaps"], "10-20,30-31");
        assert_eq!(pairs["stream.rejected.tombstone"], "3");
        assert!(pairs.keys().all(|key| key.starts_with("stream.")));
        assert_eq!(Span::parse(&pairs), Some(Ok(span())));
        let without_gaps = Span { gaps: vec![], rejected: Rejected::new(), ..span() };
        assert_eq!(Span::parse(&without_gaps.pairs().into_iter().collect()), Some(Ok(without_gaps)));
    }

    #[test]
    fn broken_footers_are_refused() {
        assert_eq!(Span::parse(&[("elmo.version".to_owned(), "1".to_owned())].into()), None);
        for (key, value) in [
            ("stream.start", "91"),
            ("stream.start", "-1"),
            ("stream.end", "many"),
            ("stream.gaps", "1"),
            ("stream.rejected.x", "-1"),
        ] {
            let mut pairs: BTreeMap<String, String> = span().pairs().into_iter().collect();
            pairs.insert(key.into(), value.into());
            assert!(matches!(Span::parse(&pairs), Some(Err(_))), "{key}={value}");
        }
        for (key, _) in span().pairs().into_iter().filter(|(key, _)| !key.starts_with(REJECTED)) {
            let mut pairs: BTreeMap<String, String> = span().pairs().into_iter().collect();
            pairs.remove(&key);
            assert_eq!(Span::parse(&pairs), Some(Err(format!("its footer has no {key}"))));
        }
    }
}
