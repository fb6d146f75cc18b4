//! A client of schema registries (Confluent's protocol): schemas by their ids.

use std::{collections::HashMap, fmt, time::Duration};

use reqwest::{Client, StatusCode};
use serde::Deserialize;
use serde_json::Value;
use url::Url;

use super::schema::inline;
use crate::{redact::redact, stream::StreamError};

/// A request that is not answered within this time has failed.
const TIMEOUT: Duration = Duration::from_secs(10);
/// A connection that is not made within this time has failed.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Pauses before a request is repeated; after the last one it has failed.
const PAUSES: [Duration; 4] =
    [Duration::from_millis(200), Duration::from_millis(500), Duration::from_secs(1), Duration::from_secs(2)];
/// The most schemas that one schema may refer to, at any depth.
const MAX_REFERENCES: usize = 100;

/// Where a registry is, and who asks.
#[derive(Clone, PartialEq, Eq)]
pub struct RegistrySettings {
    /// Its address.
    pub url: String,
    /// `user:password` for basic authentication; never shown.
    pub user_info: Option<String>,
}

impl fmt::Debug for RegistrySettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let user_info = self.user_info.as_ref().map(|_| "***");
        f.debug_struct("RegistrySettings").field("url", &redact(&self.url)).field("user_info", &user_info).finish()
    }
}

/// A client.
pub(super) struct Registry {
    client: Client,
    url: Url,
    user: Option<(String, String)>,
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry").field("url", &redact(self.url.as_str())).finish_non_exhaustive()
    }
}

/// Answer to a request for a schema.
#[derive(Deserialize)]
struct Answer {
    schema: String,
    #[serde(rename = "schemaType", default)]
    kind: Option<String>,
    #[serde(default)]
    references: Vec<Reference>,
}

/// A schema of another subject that defines a named type.
#[derive(Deserialize)]
struct Reference {
    name: String,
    subject: String,
    version: i64,
}

/// Why a request was not answered with a schema.
enum Refusal {
    /// There is no such schema.
    Unknown,
    /// No request will be answered before a setting is changed.
    Denied(StreamError),
    /// The next attempt may succeed.
    Failed(String),
}

impl Registry {
    /// A client for the registry at an address. It is not asked yet.
    pub(super) fn new(settings: &RegistrySettings) -> Result<Self, StreamError> {
        let refuse = |reason: String| StreamError::Settings {
            message: format!("--schema-registry {}: {reason}", redact(&settings.url)),
            help: Some("give the address of a schema registry, for example http://registry:8081".to_owned()),
        };
        let mut url = Url::parse(&settings.url).map_err(|e| refuse(e.to_string()))?;
        if !matches!(url.scheme(), "http" | "https") || url.host().is_none() {
            return Err(refuse("not an address of http or https".to_owned()));
        }
        let user = match &settings.user_info {
            // The client takes the user of an address by itself.
            None => None,
            Some(user_info) => {
                let pair = user_info.split_once(':');
                let (user, password) =
                    pair.ok_or_else(|| refuse("the user information is not user:password".to_owned()))?;
                if url.set_username("").is_err() || url.set_password(None).is_err() {
                    return Err(refuse("the address cannot be one with a user".to_owned()));
                }
                Some((user.to_owned(), password.to_owned()))
            }
        };
        url.set_query(None);
        url.set_fragment(None);
        let client = Client::builder().timeout(TIMEOUT).connect_timeout(CONNECT_TIMEOUT).build();
        Ok(Self { client: client.map_err(|e| refuse(e.without_url().to_string()))?, url, user })
    }

    /// Checks that the registry answers, and whether this user may ask: for a schema that no registry has, as ids begin at 1.
    pub(super) async fn probe(&self) -> Result<(), StreamError> {
        self.get(&["schemas", "ids", "0"]).await.map(|_| ())
    }

    /// The Avro schema with this id, with the schemas that it refers to in it; or why there is none that can be used.
    ///
    /// # Errors
    /// The registry does not answer, or refuses. It is asked again a few times.
    pub(super) async fn schema(&self, id: u32) -> Result<Result<Value, String>, StreamError> {
        let Some(answer) = self.get(&["schemas", "ids", &id.to_string()]).await? else {
            return Ok(Err("the registry does not know it".to_owned()));
        };
        let Some(schema) = avro(&answer) else { return Ok(Err("is not an Avro schema".to_owned())) };
        self.with_references(schema, answer.references).await
    }

    /// Replaces the first mention of each type that is defined elsewhere by its definition.
    async fn with_references(
        &self,
        mut schema: Value,
        mut references: Vec<Reference>,
    ) -> Result<Result<Value, String>, StreamError> {
        let mut definitions = HashMap::new();
        while let Some(reference) = references.pop() {
            if definitions.contains_key(&reference.name) {
                continue;
            }
            if definitions.len() == MAX_REFERENCES {
                return Ok(Err(format!("refers to more than {MAX_REFERENCES} schemas")));
            }
            let path = ["subjects", &reference.subject, "versions", &reference.version.to_string()];
            let answer = self.get(&path).await?;
            let Some(definition) = answer.as_ref().and_then(avro) else {
                return Ok(Err("refers to a schema that the registry does not have".to_owned()));
            };
            references.extend(answer.into_iter().flat_map(|answer| answer.references));
            definitions.insert(reference.name, definition);
        }
        inline(&mut schema, "", &mut definitions);
        Ok(Ok(schema))
    }

    /// Asks until there is an answer; `None` when there is no such schema.
    async fn get(&self, path: &[&str]) -> Result<Option<Answer>, StreamError> {
        let mut pauses = PAUSES.iter();
        loop {
            let reason = match self.ask(path).await {
                Ok(answer) => return Ok(Some(answer)),
                Err(Refusal::Unknown) => return Ok(None),
                Err(Refusal::Denied(error)) => return Err(error),
                Err(Refusal::Failed(reason)) => reason,
            };
            let Some(pause) = pauses.next() else {
                let help = "check the address, and that the registry runs; no message is lost meanwhile";
                return Err(self.error(reason, help));
            };
            tracing::debug!(registry = %redact(self.url.as_str()), reason, "the schema registry is asked again");
            tokio::time::sleep(*pause).await;
        }
    }

    async fn ask(&self, path: &[&str]) -> Result<Answer, Refusal> {
        let mut url = self.url.clone();
        match url.path_segments_mut() {
            Ok(mut segments) => _ = segments.pop_if_empty().extend(path),
            Err(()) => return Err(Refusal::Failed("the address has no path".to_owned())),
        }
        let mut request = self.client.get(url).header("Accept", "application/vnd.schemaregistry.v1+json");
        if let Some((user, password)) = &self.user {
            request = request.basic_auth(user, Some(password));
        }
        let failed = |error: reqwest::Error| Refusal::Failed(reason(&error));
        let response = request.send().await.map_err(failed)?;
        match response.status() {
            StatusCode::OK => {}
            StatusCode::NOT_FOUND => return self.not_found(response).await,
            status @ (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => {
                let help = "check the user information of the registry, and that its user may read schemas";
                return Err(Refusal::Denied(self.error(format!("refused with {status}"), help)));
            }
            status => return Err(Refusal::Failed(format!("answered {status}"))),
        }
        let body = response.bytes().await.map_err(failed)?;
        serde_json::from_slice(&body)
            .map_err(|_| Refusal::Failed("the answer is not that of a schema registry".to_owned()))
    }

    /// A registry says in the body what it did not find. Anybody else who answers 404 is no registry.
    async fn not_found(&self, response: reqwest::Response) -> Result<Answer, Refusal> {
        #[derive(Deserialize)]
        struct NotFound {
            error_code: i64,
        }
        let body = response.bytes().await.unwrap_or_default();
        match serde_json::from_slice::<NotFound>(&body) {
            // 40401 subject, 40402 version, 40403 schema not found.
            Ok(NotFound { error_code: 40401..=40403 }) => Err(Refusal::Unknown),
            _ => Err(Refusal::Failed("answered 404, and not as a schema registry does".to_owned())),
        }
    }

    fn error(&self, reason: String, help: &str) -> StreamError {
        let what = format!("schema registry {}", redact(self.url.as_str()));
        StreamError::Broker { what, reason, help: Some(help.to_owned()) }
    }
}

/// The schema of an answer, if it is one of Avro. Old registries know no other kind, and name none.
fn avro(answer: &Answer) -> Option<Value> {
    let is_avro = answer.kind.as_deref().is_none_or(|kind| kind == "AVRO");
    serde_json::from_str(&answer.schema).ok().filter(|_| is_avro)
}

/// The innermost cause: the outer ones say that a request failed, and name the address, with whatever is in it.
fn reason(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    if error.is_timeout() { "no answer in time".to_owned() } else { redact(&cause.to_string()) }
}
