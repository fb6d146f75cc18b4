//! What librdkafka logs, without secrets.

use rdkafka::{ClientContext, config::RDKafkaLogLevel, error::KafkaError};

use super::scrub::Scrubber;

/// Failures of connections and of transactions, which come as errors, too: whoever asked decides who hears of them.
const REPORTED: [&str; 5] = ["FAIL", "ERROR", "FATAL", "TXNERR", "GETPID"];

/// The context of a client that has no other.
#[derive(Debug, Clone, Default)]
pub struct Logs(Scrubber);

impl Logs {
    pub(super) fn new(scrub: Scrubber) -> Self {
        Self(scrub)
    }
}

impl ClientContext for Logs {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        write(level, facility, &self.0.scrub(message));
    }

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(target: "librdkafka", "{}", self.0.scrub(&format!("{error}: {reason}")));
    }
}

/// Logs a message without secrets.
pub(super) fn write(level: RDKafkaLogLevel, facility: &str, message: &str) {
    use RDKafkaLogLevel::{Alert, Critical, Debug, Emerg, Error, Info, Notice, Warning};
    match level {
        _ if REPORTED.contains(&facility) => tracing::debug!(target: "librdkafka", facility, "{message}"),
        Emerg | Alert | Critical | Error => tracing::error!(target: "librdkafka", facility, "{message}"),
        Warning => tracing::warn!(target: "librdkafka", facility, "{message}"),
        Notice | Info => tracing::info!(target: "librdkafka", facility, "{message}"),
        Debug => tracing::debug!(target: "librdkafka", facility, "{message}"),
    }
}
