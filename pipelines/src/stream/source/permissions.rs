//! What this user may do, and which topic has a name, as far as the brokers say. rdkafka has no functions for that.

use std::{
    ffi::{CStr, CString, c_char, c_int},
    ptr::NonNull,
};

use rdkafka::{
    bindings::{
        RD_KAFKA_EVENT_DESCRIBECONSUMERGROUPS_RESULT, RD_KAFKA_EVENT_DESCRIBETOPICS_RESULT, rd_kafka_AclOperation_t,
        rd_kafka_AdminOptions_destroy, rd_kafka_AdminOptions_new,
        rd_kafka_AdminOptions_set_include_authorized_operations, rd_kafka_AdminOptions_set_request_timeout,
        rd_kafka_AdminOptions_t, rd_kafka_ConsumerGroupDescription_authorized_operations,
        rd_kafka_ConsumerGroupDescription_error, rd_kafka_DescribeConsumerGroups,
        rd_kafka_DescribeConsumerGroups_result_groups, rd_kafka_DescribeTopics, rd_kafka_DescribeTopics_result_topics,
        rd_kafka_TopicCollection_destroy, rd_kafka_TopicCollection_of_topic_names,
        rd_kafka_TopicDescription_authorized_operations, rd_kafka_TopicDescription_error, rd_kafka_TopicDescription_t,
        rd_kafka_TopicDescription_topic_id, rd_kafka_Uuid_base64str, rd_kafka_Uuid_least_significant_bits,
        rd_kafka_Uuid_most_significant_bits, rd_kafka_admin_op_t, rd_kafka_error_code, rd_kafka_error_destroy,
        rd_kafka_error_t, rd_kafka_event_DescribeConsumerGroups_result, rd_kafka_event_DescribeTopics_result,
        rd_kafka_event_destroy, rd_kafka_event_error, rd_kafka_event_t, rd_kafka_event_type, rd_kafka_queue_destroy,
        rd_kafka_queue_new, rd_kafka_queue_poll, rd_kafka_queue_t,
    },
    consumer::{BaseConsumer, Consumer as _, ConsumerContext},
    error::{KafkaError, KafkaResult, RDKafkaErrorCode as Code},
    types::RDKafka,
};

/// How long the brokers may take for an answer, in milliseconds.
const TIMEOUT: c_int = 5000;

/// What a user does with a topic or a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    Read = rd_kafka_AclOperation_t::RD_KAFKA_ACL_OPERATION_READ as isize,
    Write = rd_kafka_AclOperation_t::RD_KAFKA_ACL_OPERATION_WRITE as isize,
}

/// Whether this user may do something with a topic; `None` when the brokers do not say.
pub(super) fn of_topic<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    topic: &str,
    operation: Operation,
) -> Option<bool> {
    let found = described(consumer, topic, |topic| {
        let mut operations = 0;
        // SAFETY: the topic is valid, and what it holds lives as long.
        unsafe {
            let list = rd_kafka_TopicDescription_authorized_operations(topic, &mut operations);
            judged(rd_kafka_TopicDescription_error(topic), (list, operations), operation)
        }
    });
    found.ok().flatten()
}

/// The id of a topic, which no other topic has, also if it has the same name later; `None` when the brokers have none,
/// or do not tell this user.
///
/// # Errors
/// When there is no answer in time, or none about this topic.
pub(super) fn id_of_topic<C: ConsumerContext>(consumer: &BaseConsumer<C>, topic: &str) -> KafkaResult<Option<String>> {
    let mut refused = None;
    let found = described(consumer, topic, |topic| {
        // SAFETY: the topic is valid, and what it holds lives as long. The text ends with a zero byte.
        unsafe {
            let error = rd_kafka_TopicDescription_error(topic);
            if !error.is_null() {
                refused = Some(Code::from(rd_kafka_error_code(error)));
                return None;
            }
            let id = NonNull::new(rd_kafka_TopicDescription_topic_id(topic).cast_mut())?.as_ptr();
            // Brokers without ids say zero.
            if (rd_kafka_Uuid_most_significant_bits(id), rd_kafka_Uuid_least_significant_bits(id)) == (0, 0) {
                return None;
            }
            let text = NonNull::new(rd_kafka_Uuid_base64str(id).cast_mut())?;
            Some(CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned())
        }
    })?;
    match refused {
        // Asking again would not help.
        None | Some(Code::TopicAuthorizationFailed) => Ok(found),
        Some(code) => Err(KafkaError::AdminOp(code)),
    }
}

/// What `look` finds in the description of a topic, which is valid while it looks. `None` from brokers that describe no topics.
///
/// # Errors
/// When there is no answer in time.
fn described<C: ConsumerContext, T>(
    consumer: &BaseConsumer<C>,
    topic: &str,
    look: impl FnOnce(*const rd_kafka_TopicDescription_t) -> Option<T>,
) -> KafkaResult<Option<T>> {
    let late = || KafkaError::AdminOp(Code::OperationTimedOut);
    let Ok(name) = CString::new(topic) else { return Ok(None) };
    let client = consumer.client().native_ptr();
    let event = ask(client, rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_DESCRIBETOPICS, |options, queue| {
        let mut names = [name.as_ptr()];
        // SAFETY: all are valid; the collection copies the names, and the request the collection.
        unsafe {
            let topics = rd_kafka_TopicCollection_of_topic_names(names.as_mut_ptr(), names.len());
            rd_kafka_DescribeTopics(client, topics, options, queue);
            rd_kafka_TopicCollection_destroy(topics);
        }
    });
    let event = event.ok_or_else(late)?;
    // SAFETY: the event has this type, and what it holds lives as long as the event.
    unsafe {
        match Code::from(rd_kafka_event_error(event.0.as_ptr())) {
            Code::NoError => {}
            Code::UnsupportedFeature | Code::UnsupportedVersion => return Ok(None),
            code => return Err(KafkaError::AdminOp(code)),
        }
        if rd_kafka_event_type(event.0.as_ptr()) != RD_KAFKA_EVENT_DESCRIBETOPICS_RESULT {
            return Err(late());
        }
        let result =
            NonNull::new(rd_kafka_event_DescribeTopics_result(event.0.as_ptr()).cast_mut()).ok_or_else(late)?;
        let mut count = 0;
        let topics = NonNull::new(rd_kafka_DescribeTopics_result_topics(result.as_ptr(), &mut count));
        match topics.filter(|_| count > 0) {
            Some(topics) => Ok(look(*topics.as_ptr().cast_const())),
            None => Err(late()),
        }
    }
}

/// Whether this user may do something with a group, which need not exist; `None` when the brokers do not say.
pub(super) fn of_group<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    group: &str,
    operation: Operation,
) -> Option<bool> {
    let name = CString::new(group).ok()?;
    let client = consumer.client().native_ptr();
    let event = ask(client, rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_DESCRIBECONSUMERGROUPS, |options, queue| {
        let mut names = [name.as_ptr()];
        // SAFETY: all are valid; the request copies the names.
        unsafe { rd_kafka_DescribeConsumerGroups(client, names.as_mut_ptr(), names.len(), options, queue) }
    })?;
    // SAFETY: as for a topic.
    unsafe {
        if rd_kafka_event_type(event.0.as_ptr()) != RD_KAFKA_EVENT_DESCRIBECONSUMERGROUPS_RESULT {
            return None;
        }
        let result = NonNull::new(rd_kafka_event_DescribeConsumerGroups_result(event.0.as_ptr()).cast_mut())?;
        let mut count = 0;
        let groups = NonNull::new(rd_kafka_DescribeConsumerGroups_result_groups(result.as_ptr(), &mut count))?;
        if count == 0 {
            return None;
        }
        let group = *groups.as_ptr().cast_const();
        let mut operations = 0;
        let list = rd_kafka_ConsumerGroupDescription_authorized_operations(group, &mut operations);
        judged(rd_kafka_ConsumerGroupDescription_error(group), (list, operations), operation)
    }
}

/// # Safety
/// The error is null or valid, and the list is null or has this many operations.
unsafe fn judged(
    error: *const rd_kafka_error_t,
    (list, count): (*const rd_kafka_AclOperation_t, usize),
    operation: Operation,
) -> Option<bool> {
    // SAFETY: as above. The operations are read as numbers, since a later librdkafka may have more of them.
    unsafe {
        if !error.is_null() {
            let code = Code::from(rd_kafka_error_code(error));
            let is_denied = matches!(code, Code::GroupAuthorizationFailed | Code::TopicAuthorizationFailed);
            return (is_denied).then_some(false);
        }
        let list = NonNull::new(list.cast_mut().cast::<u32>())?;
        let operations = std::slice::from_raw_parts(list.as_ptr(), count);
        Some(operations.contains(&(operation as u32)))
    }
}

/// Sends a request, and waits for the answer.
fn ask(
    client: *mut RDKafka,
    api: rd_kafka_admin_op_t,
    send: impl FnOnce(*const rd_kafka_AdminOptions_t, *mut rd_kafka_queue_t),
) -> Option<Event> {
    let mut reason: [c_char; 256] = [0; 256];
    // SAFETY: the client is valid, as its consumer is borrowed by the callers; what is made here is destroyed here.
    unsafe {
        let options = Options(NonNull::new(rd_kafka_AdminOptions_new(client, api))?);
        let at = options.0.as_ptr();
        rd_kafka_AdminOptions_set_request_timeout(at, TIMEOUT, reason.as_mut_ptr(), reason.len());
        let error = rd_kafka_AdminOptions_set_include_authorized_operations(at, 1);
        if !error.is_null() {
            rd_kafka_error_destroy(error);
            return None;
        }
        let queue = Queue(NonNull::new(rd_kafka_queue_new(client))?);
        send(at, queue.0.as_ptr());
        NonNull::new(rd_kafka_queue_poll(queue.0.as_ptr(), 2 * TIMEOUT)).map(Event)
    }
}

struct Options(NonNull<rd_kafka_AdminOptions_t>);
struct Queue(NonNull<rd_kafka_queue_t>);
struct Event(NonNull<rd_kafka_event_t>);

impl Drop for Options {
    fn drop(&mut self) {
        // SAFETY: it is valid and ours.
        unsafe { rd_kafka_AdminOptions_destroy(self.0.as_ptr()) }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: it is valid and ours.
        unsafe { rd_kafka_queue_destroy(self.0.as_ptr()) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: it is valid and ours.
        unsafe { rd_kafka_event_destroy(self.0.as_ptr()) }
    }
}
