//! Where a partition without output begins.

use std::{fmt, str::FromStr};

use chrono::{DateTime, SecondsFormat};

/// Where a partition begins that has no output yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// At the first message that the broker has.
    Earliest,
    /// Behind the last message.
    Latest,
    /// At the first message of this time or later, in milliseconds since 1970.
    At(i64),
}

impl FromStr for Start {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "earliest" => Ok(Self::Earliest),
            "latest" => Ok(Self::Latest),
            time => DateTime::parse_from_rfc3339(time).map(|time| Self::At(time.timestamp_millis())).map_err(|_| {
                "it must be earliest, latest or a time with its zone, such as 2026-11-22T08:00:00Z".to_owned()
            }),
        }
    }
}

impl fmt::Display for Start {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Earliest => f.write_str("earliest"),
            Self::Latest => f.write_str("latest"),
            Self::At(millis) => match DateTime::from_timestamp_millis(*millis) {
                Some(time) => f.write_str(&time.to_rfc3339_opts(SecondsFormat::AutoSi, true)),
                None => write!(f, "{millis} ms"),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2026-11-22T08:00:00Z is 1,795,334,400 s after 1970: 20,779 days and 8 hours (`date -u -d … +%s`).
    #[test]
    fn a_start_is_a_word_or_a_time() {
        assert_eq!("earliest".parse(), Ok(Start::Earliest));
        assert_eq!("latest".parse(), Ok(Start::Latest));
        assert_eq!("2026-11-22T08:00:00Z".parse(), Ok(Start::At(1_795_334_400_000)));
        assert_eq!("2026-11-22T09:00:00.5+01:00".parse(), Ok(Start::At(1_795_334_400_500)));
        for wrong in ["", "first", "2026-11-22", "2026-11-22T08:00:00", "1795334400"] {
            assert!(wrong.parse::<Start>().is_err(), "{wrong}");
        }
        for text in ["earliest", "latest", "2026-11-22T08:00:00Z"] {
            assert_eq!(text.parse::<Start>().unwrap().to_string(), text);
        }
    }
}
