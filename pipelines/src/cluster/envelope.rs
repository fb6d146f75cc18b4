//! The error envelope: transports an error's message, exit code and hint from a worker to the client.
//!
//! DataFusion and gRPC wrap the text of an error several times before the client sees it. The envelope is URL-encoded, which none
//! of these layers changes.

use url::form_urlencoded;

use super::error::ClusterError;
use crate::{
    error::{Error, Exit},
    redact::redact,
};

const START: &str = "elmo-error(";
const END: &str = ")elmo-error";

/// Encodes an error.
pub(super) fn encode(error: &Error) -> String {
    let mut fields = form_urlencoded::Serializer::new(String::new());
    match error.module() {
        // A worker has lost another one.
        Some(ClusterError::Lost { worker, reason }) => {
            fields.append_pair("lost", worker).append_pair("message", reason)
        }
        _ => fields
            .append_pair("exit", &(error.exit() as u8).to_string())
            .append_pair("message", &redact(&error.to_string()))
            .append_pair("help", &error.help().unwrap_or_default()),
    };
    format!("{START}{}{END}", fields.finish())
}

/// Finds an envelope in a text and decodes it.
pub(super) fn decode(text: &str) -> Option<ClusterError> {
    let fields = text.split_once(START)?.1.split_once(END)?.0;
    let (mut message, mut exit, mut help, mut lost) = (None, Exit::Failed, None, None);
    for (key, value) in form_urlencoded::parse(fields.as_bytes()) {
        match key.as_ref() {
            "message" => message = Some(value.into_owned()),
            "lost" => lost = Some(value.into_owned()),
            "help" if !value.is_empty() => help = Some(value.into_owned()),
            "exit" => exit = Exit::from_code(&value).unwrap_or(exit),
            _ => {}
        }
    }
    Some(match (message?, lost) {
        (reason, Some(worker)) => ClusterError::Lost { worker, reason },
        (message, None) => ClusterError::Failed { message, exit, help },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sql::SqlError;

    #[test]
    fn an_error_survives_all_layers() {
        let message = "row 3 of \"a\\b\": it’s 100 % (no)elmo; give\n--on-error";
        let error = SqlError { message: message.into(), exit: Exit::Model, help: Some("a=b&c".into()) }.into();
        let layers = format!("Task failed: {:?}", format!("Execution error: {:?}", encode(&error)));
        let Some(ClusterError::Failed { message: found, exit, help }) = decode(&layers) else { panic!("{layers}") };
        assert_eq!((found.as_str(), exit, help.as_deref()), (message, Exit::Model, Some("a=b&c")));
        let lost = ClusterError::Lost { worker: "b:1".into(), reason: "no answer".into() };
        let Some(ClusterError::Lost { worker, reason }) = decode(&encode(&lost.into())) else { panic!("not lost") };
        assert_eq!((worker.as_str(), reason.as_str()), ("b:1", "no answer"));
        assert!(decode("Task failed").is_none());
    }
}
