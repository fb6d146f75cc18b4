//! Addresses: which URLs are accepted, and how they are shown without secrets.

use std::path::{Component, PathBuf};

use object_store::ObjectStoreScheme;
use url::Url;

use super::StoreError;

/// Parses `address` as a URL; `None` for a path. A Windows drive letter is not a scheme, and neither is `a:` in
/// `a:b.txt`.
pub(super) fn parse_url(address: &str) -> Result<Option<Url>, StoreError> {
    if !address.contains("://") {
        return Ok(None);
    }
    Url::parse(address).map(Some).map_err(|e| StoreError::Address {
        // Which part of an invalid URL is secret is unknown: show the scheme only.
        address: format!("{}://…", address.split("://").next().unwrap_or_default()),
        reason: format!("is not a URL ({e})"),
    })
}

/// Why a URL is rejected; otherwise a token, or part of a name or pattern, would be dropped silently.
pub(super) fn rejection(url: &Url) -> Option<&'static str> {
    if url.password().is_some() {
        return Some("has a password in it; put credentials into the environment");
    }
    let store = !matches!(ObjectStoreScheme::parse(url), Ok((ObjectStoreScheme::Http, _)));
    match (url.query(), url.fragment()) {
        (Some(_), _) if !store => Some("has a query after `?`, which is not sent on; download the file first"),
        (Some(_), _) => Some(
            "has a query after `?`; in a pattern use `*`, a `?` of a name is written %3F, and a SAS token goes into \
             AZURE_STORAGE_SAS_TOKEN",
        ),
        (None, Some(_)) if store => Some("has a fragment after `#`; a `#` of a name is written %23"),
        _ => None,
    }
}

pub(super) fn is_http(url: &Url) -> bool {
    matches!(url.scheme(), "http" | "https")
}

/// `scheme://host:port/`, followed by the bucket where the URL's path begins with it.
pub(super) fn origin(url: &Url) -> String {
    let port = url.port().map(|p| format!(":{p}")).unwrap_or_default();
    let origin = format!("{}://{}{port}/", url.scheme(), url.host_str().unwrap_or_default());
    match ObjectStoreScheme::parse(url) {
        // `https://account.blob.core.windows.net/container/path`: one store per container.
        Ok((scheme, path)) if is_http(url) && scheme != ObjectStoreScheme::Http => {
            let bucket = url.path().trim_start_matches('/').trim_end_matches(path.as_ref());
            format!("{origin}{bucket}")
        }
        _ => origin,
    }
}

/// The URL without user, password and query, any of which may be secret.
pub(super) fn redacted(url: &Url) -> String {
    let origin = origin(url);
    // The path begins with the slash.
    format!("{}{}", origin.strip_suffix('/').unwrap_or(&origin), url.path())
}

/// Resolves `.` and `..` lexically, since the path need not exist yet.
pub(super) fn normalise(path: PathBuf) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => {
                out.pop();
            }
            part => out.push(part),
        }
    }
    out
}
