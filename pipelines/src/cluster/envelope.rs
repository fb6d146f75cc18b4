//! The error envelope: transports an error's message, exit code and hint from an executor to the client.
//!
//! Ballista formats an executor's error several times with `{:?}` before the client sees it. The envelope is
//! URL-encoded, which none of these layers changes.

use url::form_urlencoded;

use crate::{
    error::{Error, Exit},
    redact::redact,
};

const START: &str = "elmo-error(";
const END: &str = ")elmo-error";

/// Encodes an error.
pub(super) fn encode(error: &Error) -> String {
    let fields = form_urlencoded::Serializer::new(String::new())
        .append_pair("exit", &(error.exit() as u8).to_string())
        .append_pair("message", &redact(&error.to_string()))
        .append_pair("help", &error.help().unwrap_or_default())
        .finish();
    format!("{START}{fields}{END}")
}

/// Finds an envelope in a text and decodes it: message, exit code, hint.
pub(super) fn decode(text: &str) -> Option<(String, Exit, Option<String>)> {
    let fields = text.split_once(START)?.1.split_once(END)?.0;
    let (mut message, mut exit, mut help) = (None, Exit::Failed, None);
    for (key, value) in form_urlencoded::parse(fields.as_bytes()) {
        match key.as_ref() {
            "message" => message = Some(value.into_owned()),
            "help" if !value.is_empty() => help = Some(value.into_owned()),
            "exit" => exit = Exit::from_code(&value).unwrap_or(exit),
            _ => {}
        }
    }
    message.map(|message| (message, exit, help))
}

#[cfg(test)]
mod tests {
    use ballista_core::error::BallistaError;

    use super::*;
    use crate::sql::SqlError;

    #[test]
    fn an_error_survives_all_layers() {
        let message = "row 3 of \"a\\b\": it’s 100 % (no)elmo; give\n--on-error";
        let error = SqlError { message: message.into(), exit: Exit::Model, help: Some("a=b&c".into()) }.into();
        let layers = format!("Job failed: {:?}", BallistaError::General(format!("{:?}", encode(&error))));
        assert_eq!(decode(&layers), Some((message.to_owned(), Exit::Model, Some("a=b&c".to_owned()))));
        assert_eq!(decode("Job failed due to stage 1"), None);
    }
}
