//! What an error of a transaction means: whether it passes, is that of a record, or ends the stream.

use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};

/// The place of a record: its part, and its number in it.
pub(super) type Place = (usize, usize);

/// What to do after a transaction that was aborted.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Repeat it.
    Passing,
    /// Repeat it a few times: it is not known whether the error passes.
    Unknown,
    /// The broker refuses these records, each for itself.
    Refused(Vec<(Place, Code)>),
    /// The broker refuses the batches of these records, for one of them or for their size.
    InDoubt(Vec<(Place, Code)>),
    /// No repetition helps.
    Final {
        /// The record whose delivery failed.
        place: Option<Place>,
        error: KafkaError,
    },
}

/// Judges the error of a transaction and those of its records.
pub(super) fn judge(error: &KafkaError, failed: &[(Place, KafkaError)]) -> Verdict {
    let codes = || failed.iter().filter_map(|(place, error)| Some((*place, error.rdkafka_error_code()?)));
    if let Some((place, error)) = failed.iter().find(|(_, error)| is_final(error)) {
        return Verdict::Final { place: Some(*place), error: error.clone() };
    }
    if is_final(error) {
        return Verdict::Final { place: None, error: error.clone() };
    }
    let refused: Vec<(Place, Code)> = codes().filter(|(_, code)| is_of_record(*code)).collect();
    // Brokers since 2.4 name the records for which they refuse a batch. librdkafka gives these this code, if they are several,
    // and all others of the batch another one.
    let named: Vec<_> = refused.iter().copied().filter(|(_, code)| *code == Code::InvalidRecord).collect();
    match (refused.len(), named.is_empty()) {
        (0, _) => {}
        (1, _) => return Verdict::Refused(refused),
        (_, false) => return Verdict::Refused(named),
        (_, true) => return Verdict::InDoubt(refused),
    }
    let cause = codes().map(|(_, code)| code).find(|code| !is_consequence(*code));
    match cause.or(error.rdkafka_error_code()) {
        Some(code) if is_passing(code) => Verdict::Passing,
        _ => Verdict::Unknown,
    }
}

/// As [`judge`], of offsets that could not be added to a transaction: a source topic may have been deleted, and its partitions will
/// be revoked.
pub(super) fn judge_offsets(error: &KafkaError) -> Verdict {
    match error.rdkafka_error_code() {
        Some(Code::UnknownTopic | Code::UnknownTopicOrPartition | Code::UnknownTopicId) => Verdict::Unknown,
        _ => judge(error, &[]),
    }
}

/// Whether brokers have refused records, whose sequence numbers they wait for from then on. librdkafka goes on with the next
/// ones (`rd_kafka_handle_Produce_error` fails the transaction, but does not bump the epoch), which the brokers refuse as out
/// of order, until the transaction after that fails, too.
pub(super) fn skips_numbers(failed: &[(Place, KafkaError)]) -> bool {
    let codes = failed.iter().filter_map(|(_, error)| error.rdkafka_error_code());
    codes.into_iter().any(|code| !is_consequence(code) && !is_passing(code))
}

/// Whether a record was not delivered because of another one.
fn is_consequence(code: Code) -> bool {
    matches!(code, Code::PurgeQueue | Code::PurgeInflight | Code::InvalidDifferentRecord | Code::State)
}

/// Whether the broker refuses what is in a record or how large it is.
fn is_of_record(code: Code) -> bool {
    matches!(code, Code::InvalidRecord | Code::InvalidTimestamp) || is_of_size(code)
}

/// Whether a record, or a batch, is too large.
pub(super) fn is_of_size(code: Code) -> bool {
    matches!(code, Code::MessageSizeTooLarge | Code::InvalidMessageSize | Code::MessageBatchTooLarge)
}

/// Whether no repetition heals it: the brokers refuse the topic, the group or the user, or cannot do what is asked.
fn is_final(error: &KafkaError) -> bool {
    if matches!(error, KafkaError::Nul(_)) {
        return true;
    }
    matches!(
        error.rdkafka_error_code(),
        Some(
            Code::UnknownTopic
                | Code::UnknownTopicOrPartition
                | Code::UnknownPartition
                | Code::InvalidTopic
                | Code::TopicAuthorizationFailed
                | Code::GroupAuthorizationFailed
                | Code::TransactionalIdAuthorizationFailed
                | Code::ClusterAuthorizationFailed
                | Code::SecurityDisabled
                | Code::InvalidRequiredAcks
                | Code::InvalidArgument
                | Code::UnsupportedVersion
                | Code::UnsupportedFeature
                | Code::UnsupportedForMessageFormat
                | Code::UnsupportedCompressionType
                | Code::NotImplemented
                | Code::PolicyViolation
                | Code::InvalidTransactionTimeout
        )
    )
}

/// Whether the coordinator of a group was not found, or has not answered. One that refuses is there.
pub(super) fn is_unanswered(error: &KafkaError) -> bool {
    matches!(
        error.rdkafka_error_code(),
        Some(
            Code::OperationTimedOut
                | Code::TimedOutQueue
                | Code::RequestTimedOut
                | Code::BrokerTransportFailure
                | Code::AllBrokersDown
                | Code::Resolve
                | Code::WaitingForCoordinator
                | Code::CoordinatorLoadInProgress
                | Code::CoordinatorNotAvailable
                | Code::NotCoordinator
        )
    )
}

/// Whether it is known to pass: a broker is away, a coordinator moves, a group rebalances, or a producer lost its place.
fn is_passing(code: Code) -> bool {
    matches!(
        code,
        Code::MessageTimedOut
            | Code::OperationTimedOut
            | Code::TimedOutQueue
            | Code::RequestTimedOut
            | Code::BrokerTransportFailure
            | Code::BrokerDestroy
            | Code::AllBrokersDown
            | Code::Resolve
            | Code::WaitingForCoordinator
            | Code::Retry
            | Code::PurgeQueue
            | Code::PurgeInflight
            | Code::LeaderNotAvailable
            | Code::NotLeaderForPartition
            | Code::BrokerNotAvailable
            | Code::ReplicaNotAvailable
            | Code::NetworkException
            | Code::CoordinatorLoadInProgress
            | Code::CoordinatorNotAvailable
            | Code::NotCoordinator
            | Code::NotEnoughReplicas
            | Code::NotEnoughReplicasAfterAppend
            | Code::KafkaStorageError
            | Code::FencedLeaderEpoch
            | Code::UnknownLeaderEpoch
            | Code::ThrottlingQuotaExceeded
            | Code::IllegalGeneration
            | Code::UnknownMemberId
            | Code::RebalanceInProgress
            | Code::FencedMemberEpoch
            | Code::StaleMemberEpoch
            | Code::MemberIdRequired
            | Code::FencedInstanceId
            | Code::UnreleasedInstanceId
            | Code::ConcurrentTransactions
            | Code::OutOfOrderSequenceNumber
            | Code::DuplicateSequenceNumber
            | Code::UnknownProducerId
            | Code::InvalidProducerIdMapping
            | Code::OperationNotAttempted
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_record(code: Code) -> KafkaError {
        KafkaError::MessageProduction(code)
    }

    fn verdict(codes: &[Code]) -> Verdict {
        let failed: Vec<_> = codes.iter().enumerate().map(|(at, code)| ((0, at), of_record(*code))).collect();
        judge(&of_record(codes[0]), &failed)
    }

    /// What librdkafka reports for a batch of three records, by its `rd_kafka_msgbatch_handle_Produce_result_record_errors`.
    #[test]
    fn the_records_that_a_broker_names_are_refused_and_their_neighbours_are_not() {
        let other = Code::InvalidDifferentRecord;
        let one = verdict(&[other, Code::InvalidTimestamp, other]);
        assert_eq!(one, Verdict::Refused(vec![((0, 1), Code::InvalidTimestamp)]));
        let two = verdict(&[Code::InvalidRecord, other, Code::InvalidRecord]);
        assert_eq!(two, Verdict::Refused(vec![((0, 0), Code::InvalidRecord), ((0, 2), Code::InvalidRecord)]));
        let alone = verdict(&[Code::MessageSizeTooLarge]);
        assert_eq!(alone, Verdict::Refused(vec![((0, 0), Code::MessageSizeTooLarge)]));
    }

    #[test]
    fn a_batch_that_is_refused_as_a_whole_says_nothing_of_its_records() {
        for code in [Code::MessageSizeTooLarge, Code::MessageBatchTooLarge, Code::InvalidTimestamp] {
            assert_eq!(
                verdict(&[code, code, Code::PurgeQueue]),
                Verdict::InDoubt(vec![((0, 0), code), ((0, 1), code)]),
                "{code:?}"
            );
        }
    }

    /// librdkafka itself counts anew after what passes, such as a time that is over.
    #[test]
    fn sequence_numbers_are_skipped_by_records_that_brokers_refuse() {
        let skips =
            |codes: &[Code]| skips_numbers(&codes.iter().map(|code| ((0, 0), of_record(*code))).collect::<Vec<_>>());
        for code in [Code::MessageSizeTooLarge, Code::InvalidRecord, Code::InvalidTimestamp, Code::LogDirNotFound] {
            assert!(skips(&[Code::PurgeQueue, code]), "{code:?}");
        }
        assert!(!skips(&[Code::PurgeQueue, Code::MessageTimedOut, Code::OutOfOrderSequenceNumber]));
    }

    #[test]
    fn errors_pass_or_end_the_stream_or_are_repeated_a_few_times() {
        for code in [Code::MessageTimedOut, Code::NotEnoughReplicas, Code::PurgeQueue, Code::OutOfOrderSequenceNumber] {
            assert_eq!(verdict(&[code]), Verdict::Passing, "{code:?}");
        }
        let denied = of_record(Code::TopicAuthorizationFailed);
        let failed = [((0, 0), of_record(Code::PurgeQueue)), ((1, 3), denied.clone())];
        assert_eq!(judge(&denied, &failed), Verdict::Final { place: Some((1, 3)), error: denied.clone() });
        assert_eq!(judge(&denied, &[]), Verdict::Final { place: None, error: denied });
        let unsupported = of_record(Code::UnsupportedForMessageFormat);
        assert_eq!(judge(&unsupported, &[]), Verdict::Final { place: None, error: unsupported });
        assert_eq!(verdict(&[Code::LogDirNotFound]), Verdict::Unknown);
        let unknown = of_record(Code::UnknownTopicOrPartition);
        assert_eq!(judge_offsets(&unknown), Verdict::Unknown);
        assert_eq!(judge(&unknown, &[]), Verdict::Final { place: None, error: unknown });
        assert_eq!(judge(&KafkaError::Canceled, &[]), Verdict::Unknown);
    }
}
