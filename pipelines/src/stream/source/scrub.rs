//! Removes the user's secrets from what librdkafka says.

use std::{fmt, sync::Arc};

use crate::redact::redact;

/// Shorter values would match by accident, and protect nothing.
const MIN_LEN: usize = 4;

/// Knows the values of all secret settings. Clones share them.
#[derive(Clone, Default)]
pub(super) struct Scrubber(Arc<[String]>);

impl Scrubber {
    pub(super) fn new<'a>(secrets: impl Iterator<Item = &'a str>) -> Self {
        let mut all: Vec<String> = Vec::new();
        for secret in secrets {
            // Of a PEM file each line is a secret: messages quote lines.
            let lines = secret.lines().map(str::trim).filter(|line| !line.starts_with("-----"));
            all.extend(std::iter::once(secret).chain(lines).filter(|s| s.len() >= MIN_LEN).map(str::to_owned));
        }
        // A longer secret first: a shorter one may be a part of it.
        all.sort_by(|a, b| b.len().cmp(&a.len()).then_with(|| a.cmp(b)));
        all.dedup();
        Self(all.into())
    }

    /// `text` without secrets.
    pub(super) fn scrub(&self, text: &str) -> String {
        let hidden = self.0.iter().fold(text.to_owned(), |text, secret| match text.contains(secret) {
            true => text.replace(secret, "***"),
            false => text,
        });
        redact(&hidden)
    }
}

impl fmt::Debug for Scrubber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Scrubber({} secrets)", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_and_lines_of_secrets_are_hidden() {
        let pem = "-----BEGIN PRIVATE KEY-----\nMIIBVQIBADAN\nBgkqhkiG9w0B\n-----END PRIVATE KEY-----";
        let scrubber = Scrubber::new(["hunter2", "hunter2hunter2", pem, "abc"].into_iter());
        let text = "login hunter2hunter2 as hunter2: line BgkqhkiG9w0B of abc";
        assert_eq!(scrubber.scrub(text), "login *** as ***: line *** of abc");
        assert_eq!(format!("{scrubber:?}"), "Scrubber(5 secrets)");
    }
}
