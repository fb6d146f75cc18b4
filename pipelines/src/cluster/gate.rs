//! Who may use a worker: callers with its token, of its version.

use std::sync::Arc;

use elmo_udfs::codec::VERSION;
use http::header::AUTHORIZATION;
use tonic::{Request, Status, service::Interceptor};

use super::peers::VERSION_HEADER;

/// The version that `elmo cluster status` gives. It may ask any worker how it is, and nothing else.
pub(super) const ANY_VERSION: &str = "any";

/// Checks the headers of all requests.
#[derive(Clone)]
pub(super) struct Gate {
    token: Option<Arc<str>>,
    /// Whether [`ANY_VERSION`] will do.
    any_version: bool,
}

impl Gate {
    pub(super) fn new(token: Option<Arc<str>>) -> Self {
        Self { token, any_version: false }
    }

    /// A gate that also lets callers of [`ANY_VERSION`] pass.
    pub(super) fn for_any_version(self) -> Self {
        Self { any_version: true, ..self }
    }
}

impl Interceptor for Gate {
    fn call(&mut self, request: Request<()>) -> Result<Request<()>, Status> {
        let header =
            |name: &str| request.metadata().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        if let Some(token) = &self.token {
            match header(AUTHORIZATION.as_str()).strip_prefix("Bearer ") {
                None => {
                    return Err(Status::unauthenticated("it asks for a token; give --token-file with the worker's"));
                }
                Some(given) if !is_equal(given.as_bytes(), token.as_bytes()) => {
                    return Err(Status::unauthenticated("wrong token; give --token-file with the worker's"));
                }
                Some(_) => {}
            }
        }
        match header(VERSION_HEADER) {
            VERSION => Ok(request),
            ANY_VERSION if self.any_version => Ok(request),
            "" => Err(Status::failed_precondition(format!("it is elmo {VERSION}, and the caller is not elmo"))),
            other => Err(Status::failed_precondition(format!(
                "it is elmo {VERSION}, and the caller elmo {other}; run the same version everywhere"
            ))),
        }
    }
}

/// Whether two texts are equal, in a time that does not tell where they differ.
fn is_equal(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    fn answer(gate: &Gate, token: Option<&str>, version: Option<&'static str>) -> Result<(), Status> {
        let mut request = Request::new(());
        if let Some(token) = token {
            request.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
        }
        if let Some(version) = version {
            request.metadata_mut().insert(VERSION_HEADER, version.parse().unwrap());
        }
        gate.clone().call(request).map(|_| ())
    }

    #[test]
    fn only_callers_with_token_and_version_pass() {
        let gate = Gate::new(Some("secret".into()));
        assert!(answer(&gate, Some("secret"), Some(VERSION)).is_ok());
        for wrong in [None, Some(""), Some("secre"), Some("secret2"), Some("Secret")] {
            let refused = answer(&gate, wrong, Some(VERSION)).unwrap_err();
            assert_eq!(refused.code(), Code::Unauthenticated, "{wrong:?}");
            // What is expected stays a secret.
            assert!(!refused.message().contains("secret"), "{refused}");
        }
        for wrong in [None, Some("0.0.1"), Some(ANY_VERSION)] {
            assert_eq!(answer(&gate, Some("secret"), wrong).unwrap_err().code(), Code::FailedPrecondition, "{wrong:?}");
        }
        let status = gate.for_any_version();
        assert!(answer(&status, Some("secret"), Some(ANY_VERSION)).is_ok());
        assert!(answer(&status, None, Some(ANY_VERSION)).is_err());
        assert!(answer(&Gate::new(None), None, Some(VERSION)).is_ok());
    }
}
