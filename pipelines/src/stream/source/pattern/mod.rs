//! Patterns of topics, such as `^reviews-.*`.
//!
//! Three engines match them: the plan has the crate `regex`, librdkafka POSIX extended regular expressions, and a broker RE2
//! (`group.protocol=consumer`), which matches whole names. So a pattern is parsed here, in a dialect that all three have in
//! common, and each of them gets an expression that means the same to all:
//!
//! ```text
//! ^reviews         ^reviews.*$                 anchored at both ends
//! ^a$|^b-[^0-9]    ^(a|b-[^0123456789].*)$     classes without ranges and names
//! ^.*              ^([^_].*|_[^_].*|_)$        without the topics of Kafka itself
//! ```

mod chars;
mod expression;
mod parse;

use regex::Regex;

use self::expression::Expression;
use crate::stream::StreamError;

/// A pattern of `--topic`.
#[derive(Debug, Clone)]
pub(super) struct Pattern {
    regex: Regex,
}

impl Pattern {
    /// Whether a value of `--topic` is a pattern.
    pub(super) fn is_pattern(topic: &str) -> bool {
        topic.starts_with('^')
    }

    /// # Errors
    /// [`StreamError::Settings`] for what is not in the dialect, and for a pattern that no topic can match.
    pub(super) fn parse(topic: &str) -> Result<Self, StreamError> {
        let parsed = parse::parse(topic).map_err(|refusal| StreamError::Settings {
            message: format!("--topic '{topic}', character {}: {}", refusal.at + 1, refusal.reason),
            help: Some(refusal.help),
        })?;
        let expression = parsed.without_internal();
        if expression.is_nothing() {
            return Err(StreamError::Settings {
                message: format!("--topic '{topic}' matches only topics that begin with __, which no pattern reads"),
                help: Some("give the name of the topic, without ^".into()),
            });
        }
        let anchored = match expression {
            Expression::Choice(_) => format!("^({expression})$"),
            _ => format!("^{expression}$"),
        };
        let regex = Regex::new(&anchored).map_err(|_| StreamError::Settings {
            message: format!("--topic '{topic}' repeats too much: the expression would take too much memory"),
            help: Some("write * or + instead of numbers".into()),
        })?;
        Ok(Self { regex })
    }

    pub(super) fn matches(&self, topic: &str) -> bool {
        self.regex.is_match(topic)
    }

    /// The expression for librdkafka and brokers.
    pub(super) fn expression(&self) -> &str {
        self.regex.as_str()
    }
}

#[cfg(test)]
mod tests;
