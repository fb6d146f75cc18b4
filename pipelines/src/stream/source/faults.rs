//! Errors of librdkafka: what they mean, what to check, and which of them the user must see.

use std::collections::BTreeSet;

use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};

use super::scrub::Scrubber;
use crate::stream::StreamError;

/// The error of a request that the brokers refused, or that nobody answered.
pub(super) fn broker(what: impl Into<String>, code: Option<Code>, reason: &str, scrub: &Scrubber) -> StreamError {
    let help = code.and_then(|code| help(code, reason)).map(str::to_owned);
    StreamError::Broker { what: what.into(), reason: scrub.scrub(reason), help }
}

/// As [`broker`], with librdkafka's own words for the reason.
pub(super) fn kafka(what: impl Into<String>, error: &KafkaError, scrub: &Scrubber) -> StreamError {
    let code = error.rdkafka_error_code();
    let reason = code.map_or_else(|| error.to_string(), |code| code.to_string());
    broker(what, code, &reason, scrub)
}

/// The error of a question for the offsets of a group. While an open transaction hides them, librdkafka repeats the request
/// (`rd_kafka_handle_OffsetFetch`) until it reports a time-out.
pub(super) fn offsets(what: impl Into<String>, error: &KafkaError, scrub: &Scrubber) -> StreamError {
    match error.rdkafka_error_code() {
        Some(Code::OperationTimedOut) => {
            let reason = "no answer in time: the brokers are away, or an open transaction hides the offsets \
                          (UNSTABLE_OFFSET_COMMIT)";
            broker(what, Some(Code::UnstableOffsetCommit), reason, scrub)
        }
        _ => kafka(what, error, scrub),
    }
}

/// What to check.
fn help(code: Code, reason: &str) -> Option<&'static str> {
    let help = match code {
        Code::Authentication | Code::SaslAuthenticationFailed | Code::IllegalSASLState => {
            "check sasl.mechanisms, sasl.username and sasl.password (--kafka-secrets FILE, or ELMO_KAFKA_SASL_PASSWORD)"
        }
        Code::UnsupportedSASLMechanism => "check sasl.mechanisms: the brokers do not offer this one",
        Code::SSL if reason.contains("verify") || reason.contains("certificate") => {
            "check ssl.ca.location: it must name the certificate of the authority that signed those of the brokers; and \
             that the brokers' certificates are valid for the host names in --brokers"
        }
        Code::SSL => {
            "check security.protocol, ssl.ca.location, and if the brokers want it the client's own certificate \
             (ssl.certificate.location, ssl.key.location, ssl.key.password)"
        }
        Code::Resolve => "check the host names in --brokers, and those that the brokers advertise",
        Code::AllBrokersDown | Code::BrokerTransportFailure | Code::OperationTimedOut | Code::RequestTimedOut => {
            "check that the brokers run, the addresses in --brokers, and that security.protocol is that of the listener \
             (-X security.protocol=SASL_SSL)"
        }
        Code::UnknownTopic | Code::UnknownTopicOrPartition => {
            "create the topic, or correct --topic; brokers give the same answer when DESCRIBE on the topic is not granted"
        }
        Code::TopicAuthorizationFailed => "grant READ and DESCRIBE on the topic to this user",
        Code::GroupAuthorizationFailed => "grant READ and DESCRIBE on the group to this user",
        Code::ClusterAuthorizationFailed => "grant this user the operation on the cluster",
        Code::InvalidTopic => "correct --topic: names have letters, digits, '.', '_' and '-'",
        Code::InconsistentGroupProtocol => {
            "the group has members with another assignment strategy; stop them, take another --group, or set theirs with -X \
             partition.assignment.strategy"
        }
        Code::FencedInstanceId | Code::UnreleasedInstanceId => {
            "another process has the same group.instance.id; give each process its own"
        }
        Code::InvalidSessionTimeout => {
            "set -X session.timeout.ms within group.min.session.timeout.ms and group.max.session.timeout.ms of the brokers"
        }
        Code::InvalidGroupId => "correct --group: the brokers refuse this name",
        Code::GroupMaxSizeReached => {
            "start no more processes than group.max.size of the brokers allows in one group, or raise it"
        }
        Code::UnstableOffsetCommit => {
            "check that the brokers run, and the addresses in --brokers; if a transaction stays open for longer than \
             transaction.timeout.ms, restart the process that began it, which aborts it if the process has a \
             group.instance.id; or abort it in __consumer_offsets with kafka-transactions.sh (find-hanging, abort)"
        }
        Code::UnsupportedVersion | Code::UnsupportedFeature => {
            "group.protocol=consumer needs brokers of version 4.0 or later; leave it out for older ones"
        }
        _ => return None,
    };
    Some(help)
}

/// What to do with an error.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Not for the user: it passes, was reported already, or is no error.
    Ignore,
    /// Offsets are out of the range of a partition.
    OutOfRange,
    /// A topic may have been deleted. Whether that one is needed, the error does not say in a form that could be relied on.
    TopicGone,
    /// For the user.
    Report {
        /// The consumer cannot go on.
        fatal: bool,
    },
}

/// Which errors were reported since the brokers answered last.
#[derive(Debug, Default)]
pub(super) struct Health {
    down: bool,
    reported: BTreeSet<String>,
    /// Why a connection failed last: better than "all brokers are down".
    pub(super) last_failure: Option<String>,
}

impl Health {
    /// Judges an error that librdkafka reports while the consumer runs. Until the group has said once what this process has
    /// (`was_member`), nothing but the user can help one whose request to join is refused.
    pub(super) fn judge(&mut self, code: Code, reason: &str, was_member: bool) -> Verdict {
        match code {
            Code::PartitionEOF => Verdict::Ignore,
            Code::AutoOffsetReset => Verdict::OutOfRange,
            Code::UnknownTopic | Code::UnknownTopicOrPartition | Code::UnknownTopicId => Verdict::TopicGone,
            // librdkafka connects again; when it is the last broker, AllBrokersDown follows.
            Code::BrokerTransportFailure | Code::Resolve | Code::OperationTimedOut | Code::RequestTimedOut => {
                self.last_failure = Some(reason.to_owned());
                Verdict::Ignore
            }
            Code::AllBrokersDown => {
                self.down = true;
                self.once("down", false)
            }
            Code::Authentication | Code::SaslAuthenticationFailed | Code::SSL => {
                self.down = true;
                self.last_failure = Some(reason.to_owned());
                self.once(&format!("{code:?}"), false)
            }
            Code::Fatal
            | Code::InvalidTopic
            | Code::TopicAuthorizationFailed
            | Code::GroupAuthorizationFailed
            | Code::ClusterAuthorizationFailed
            | Code::InconsistentGroupProtocol
            | Code::FencedInstanceId
            | Code::UnsupportedVersion
            | Code::UnsupportedFeature => self.once(&format!("{code:?} {reason}"), true),
            Code::InvalidSessionTimeout | Code::InvalidGroupId | Code::GroupMaxSizeReached => {
                self.once(&format!("{code:?}"), !was_member)
            }
            _ => self.once(&format!("{code:?}"), false),
        }
    }

    fn once(&mut self, what: &str, fatal: bool) -> Verdict {
        if self.reported.insert(what.to_owned()) { Verdict::Report { fatal } } else { Verdict::Ignore }
    }

    /// The brokers answer. Returns whether it was reported that they do not.
    pub(super) fn up(&mut self) -> bool {
        self.reported.clear();
        self.last_failure = None;
        std::mem::take(&mut self.down)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Exit, Fault as _};

    fn judge(health: &mut Health, code: Code, reason: &str) -> Verdict {
        health.judge(code, reason, true)
    }

    #[test]
    fn a_refusal_to_join_is_fatal_until_the_process_was_a_member() {
        for code in [Code::InvalidSessionTimeout, Code::InvalidGroupId, Code::GroupMaxSizeReached] {
            assert_eq!(Health::default().judge(code, "", false), Verdict::Report { fatal: true });
            assert_eq!(Health::default().judge(code, "", true), Verdict::Report { fatal: false });
            assert!(help(code, "").is_some(), "{code:?}");
        }
    }

    #[test]
    fn an_outage_is_reported_once_and_again_after_the_brokers_answered() {
        let mut health = Health::default();
        let report = Verdict::Report { fatal: false };
        assert_eq!(judge(&mut health, Code::BrokerTransportFailure, "b:1: Connection refused"), Verdict::Ignore);
        assert_eq!(judge(&mut health, Code::AllBrokersDown, "1/1 brokers are down"), report);
        assert_eq!(judge(&mut health, Code::AllBrokersDown, "1/1 brokers are down"), Verdict::Ignore);
        assert_eq!(health.last_failure.as_deref(), Some("b:1: Connection refused"));
        assert!(health.up() && !health.up());
        assert_eq!(judge(&mut health, Code::AllBrokersDown, "1/1 brokers are down"), report);
        let denied = "Subscribed topic not available: t: Broker: Topic authorization failed";
        assert_eq!(judge(&mut health, Code::TopicAuthorizationFailed, denied), Verdict::Report { fatal: true });
        assert_eq!(judge(&mut health, Code::TopicAuthorizationFailed, denied), Verdict::Ignore);
        let missing = "Subscribed topic not available: t: Broker: Unknown topic or partition";
        assert_eq!(judge(&mut health, Code::UnknownTopicOrPartition, missing), Verdict::TopicGone);
    }

    #[test]
    fn a_time_out_of_offsets_names_both_causes() {
        for code in [Code::OperationTimedOut, Code::UnstableOffsetCommit] {
            let error = KafkaError::MetadataFetch(code);
            let error = offsets("offsets of group g", &error, &Scrubber::default());
            assert!(error.help().unwrap().contains("kafka-transactions.sh"), "{code:?}");
            let text = error.to_string();
            assert_eq!(text.contains("the brokers are away"), code == Code::OperationTimedOut, "{text}");
        }
        let denied = KafkaError::MetadataFetch(Code::GroupAuthorizationFailed);
        let error = offsets("offsets of group g", &denied, &Scrubber::default());
        assert!(error.help().unwrap().contains("on the group"));
    }

    #[test]
    fn errors_say_what_to_check() {
        for (code, reason, expected) in [
            (Code::Authentication, "SASL authentication error: Authentication failed", "sasl.password"),
            (Code::SSL, "SSL handshake failed: certificate verify failed: self-signed certificate", "ssl.ca.location"),
            (Code::AllBrokersDown, "1/1 brokers are down", "--brokers"),
            (Code::Resolve, "Failed to resolve 'b:1'", "host names"),
            (Code::UnknownTopicOrPartition, "Unknown topic", "create the topic"),
            (Code::TopicAuthorizationFailed, "Topic authorization failed", "grant READ"),
            (Code::GroupAuthorizationFailed, "Group authorization failed", "on the group"),
        ] {
            let error = broker("topic reviews", Some(code), reason, &Scrubber::default());
            assert_eq!(error.exit(), Exit::Storage);
            assert_eq!(error.to_string(), format!("topic reviews: {reason}"));
            assert!(error.help().unwrap().contains(expected), "{code:?}");
        }
    }
}
