//! The stores of a process: one client per origin, with credentials from the environment.

use std::{
    collections::HashMap,
    env,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use object_store::{ObjectStore, ObjectStoreScheme, multipart::MultipartStore, path::Path};
use url::Url;

use super::{
    Location, RETRY_FOR, StoreError,
    address::{is_http, normalise, origin, parse_url, redacted, rejection},
    local::LocalFiles,
    location::Kind,
};

/// Stores by origin, each opened once, with credentials from the environment.
#[derive(Debug, Clone)]
pub struct Stores {
    /// Lower-case `aws_*`, `azure_*` and `google_*` pairs.
    settings: Arc<Vec<(String, String)>>,
    /// Behind a std mutex: it is never held across an await.
    open: Arc<Mutex<Open>>,
    /// For how long requests are retried.
    retry_for: Duration,
}

/// Stores that are open.
#[derive(Debug, Default)]
struct Open {
    /// By origin and retry budget, which is a setting of the client.
    clients: HashMap<(String, Duration), Client>,
    /// Those that tests inserted, by origin.
    inserted: HashMap<String, Client>,
}

/// The client of a store.
#[derive(Clone)]
pub(super) struct Client {
    pub(super) store: Arc<dyn ObjectStore>,
    /// The same store, where its uploads have an id.
    pub(super) uploads: Option<Arc<dyn MultipartStore>>,
    pub(super) retry_for: Duration,
    /// How to open a client with another retry budget.
    source: Option<Source>,
}

/// What a client was opened with. The registry is not kept alive by its own clients.
#[derive(Clone)]
struct Source {
    settings: Arc<Vec<(String, String)>>,
    open: Weak<Mutex<Open>>,
    url: Arc<Url>,
}

impl Source {
    fn client(&self, budget: Duration) -> Option<Client> {
        let scheme = ObjectStoreScheme::parse(&self.url).ok()?.0;
        let stores = Stores { settings: Arc::clone(&self.settings), open: self.open.upgrade()?, retry_for: budget };
        stores.client(&scheme, &self.url).ok()
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("store", &self.store).finish_non_exhaustive()
    }
}

impl Client {
    fn new(store: Arc<dyn ObjectStore>) -> Self {
        Self { store, uploads: None, retry_for: RETRY_FOR, source: None }
    }

    fn with_uploads<S: ObjectStore + MultipartStore>(store: Arc<S>) -> Self {
        let uploads = Arc::clone(&store);
        Self { uploads: Some(uploads), ..Self::new(store) }
    }

    /// A client of the same store with another retry budget. A store that has none, such as a local one, keeps its client.
    pub(super) fn retrying_for(&self, budget: Duration) -> Self {
        let other = self.source.as_ref().filter(|_| budget != self.retry_for).and_then(|source| source.client(budget));
        other.unwrap_or_else(|| Self { retry_for: budget, ..self.clone() })
    }
}

impl Default for Stores {
    fn default() -> Self {
        Self::from_env()
    }
}

impl Stores {
    /// Takes `AWS_*`, `AZURE_*` and `GOOGLE_*` from the environment.
    ///
    /// Only these prefixes: the builders of the stores also know bare names such as `token`, which may mean anything in
    /// an environment.
    pub fn from_env() -> Self {
        let prefixes = ["aws_", "azure_", "google_"];
        let settings = env::vars_os()
            .filter_map(|(k, v)| Some((k.into_string().ok()?.to_ascii_lowercase(), v.into_string().ok()?)))
            .filter(|(k, _)| prefixes.iter().any(|prefix| k.starts_with(prefix)));
        Self::with_settings(settings)
    }

    /// With the given settings instead of the environment's.
    pub fn with_settings(settings: impl IntoIterator<Item = (String, String)>) -> Self {
        Self { settings: Arc::new(settings.into_iter().collect()), open: Arc::default(), retry_for: RETRY_FOR }
    }

    /// The same stores, whose failed requests are retried for `budget` instead of [`RETRY_FOR`].
    #[must_use]
    pub fn retrying_for(&self, budget: Duration) -> Self {
        Self { retry_for: budget, ..self.clone() }
    }

    /// Uses `store` for every URL with this scheme and host, e.g. `memory://bucket`: tests insert faulty stores.
    pub fn insert(&self, origin: &str, store: Arc<dyn ObjectStore>) {
        self.insert_client(origin, Client::new(store));
    }

    /// As [`Stores::insert`], for a store whose uploads have an id.
    pub fn insert_with_uploads<S: ObjectStore + MultipartStore>(&self, origin: &str, store: Arc<S>) {
        self.insert_client(origin, Client::with_uploads(store));
    }

    fn insert_client(&self, origin: &str, client: Client) {
        self.open().inserted.insert(format!("{}/", origin.trim_end_matches('/')), client);
    }

    /// Resolves a path or a URL to a store and a path in it. Sends no request.
    ///
    /// # Errors
    /// [`StoreError::Address`] when it is empty, is neither a path nor a URL of a known scheme, or holds a password or a
    /// query; [`StoreError::Setup`] when a setting of the store is missing in the environment.
    pub fn locate(&self, address: &str) -> Result<Location, StoreError> {
        if address.is_empty() {
            return Err(StoreError::Address { address: "\"\"".to_owned(), reason: "is empty".to_owned() });
        }
        match parse_url(address)? {
            Some(url) => self.locate_url(&url),
            None => self.locate_path(address),
        }
    }

    fn open(&self) -> std::sync::MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn locate_path(&self, address: &str) -> Result<Location, StoreError> {
        let wrong = |reason: String| StoreError::Address { address: address.to_owned(), reason };
        let absolute = std::path::absolute(address).map_err(|e| wrong(e.to_string()))?;
        let path = Path::from_absolute_path(normalise(absolute)).map_err(|e| wrong(e.to_string()))?;
        let key = ("file:///".to_owned(), RETRY_FOR);
        let client = self.open().clients.entry(key).or_insert_with(|| Client::new(Arc::new(LocalFiles::new()))).clone();
        Ok(Location { store: Arc::clone(&client.store), path, client, origin: "/".into(), kind: Kind::Local })
    }

    fn locate_url(&self, url: &Url) -> Result<Location, StoreError> {
        let address = redacted(url);
        let wrong = |reason: &str| StoreError::Address { address: address.clone(), reason: reason.to_owned() };
        if let Some(reason) = rejection(url) {
            return Err(wrong(reason));
        }
        if url.scheme() == "file" {
            let path = url.to_file_path().map_err(|()| wrong("is not a local path"))?;
            return self.locate_path(&path.to_string_lossy());
        }
        let origin = origin(url);
        if let Some(client) = self.open().inserted.get(&origin).cloned() {
            let client = client.retrying_for(self.retry_for);
            let path = match ObjectStoreScheme::parse(url) {
                Ok((_, path)) => path,
                // A test inserted a store with a scheme of its own.
                Err(_) => Path::from_url_path(url.path()).map_err(|e| wrong(&e.to_string()))?,
            };
            let kind = if is_http(url) { Kind::Http } else { Kind::Remote };
            return Ok(Location { store: Arc::clone(&client.store), path, client, origin: origin.into(), kind });
        }
        let unknown = match url.host_str() {
            None | Some("") => "names no bucket, or has a scheme that is not known",
            Some(_) => "has a scheme that is not known",
        };
        let (scheme, path) = ObjectStoreScheme::parse(url).map_err(|_| wrong(unknown))?;
        if scheme == ObjectStoreScheme::Memory {
            return Err(wrong("is a store in memory, which only tests have"));
        }
        let client = self
            .client(&scheme, url)
            .map_err(|source| StoreError::Setup { address: address.clone(), source: Box::new(source) })?;
        let kind = if scheme == ObjectStoreScheme::Http { Kind::Http } else { Kind::Remote };
        Ok(Location { store: Arc::clone(&client.store), path, client, origin: origin.into(), kind })
    }

    /// The client of a URL's store with our retry budget, opened on first use.
    fn client(&self, scheme: &ObjectStoreScheme, url: &Url) -> object_store::Result<Client> {
        let key = (origin(url), self.retry_for);
        if let Some(client) = self.open().clients.get(&key) {
            return Ok(client.clone());
        }
        let settings = self.settings.iter().map(|(k, v)| (k.as_str(), v.as_str()));
        check_endpoints(settings.clone())?;
        let http = [("allow_http", "true")].into_iter().filter(|_| url.scheme() == "http");
        let opened = open_store(scheme, url, settings.chain(http), self.retry_for)?;
        let (settings, open) = (Arc::clone(&self.settings), Arc::downgrade(&self.open));
        let source = Source { settings, open, url: Arc::new(url.clone()) };
        let client = Client { retry_for: self.retry_for, source: Some(source), ..opened };
        self.open().clients.insert(key, client.clone());
        Ok(client)
    }
}

/// Checks that the address of a server is one: the clients of the stores panic when they send a request to anything else. The
/// value may hold a password.
fn check_endpoints<'a>(mut settings: impl Iterator<Item = (&'a str, &'a str)>) -> object_store::Result<()> {
    const ENDPOINTS: [&str; 5] =
        ["aws_endpoint", "aws_endpoint_url", "aws_endpoint_url_s3", "azure_endpoint", "azure_storage_endpoint"];
    let is_url = |value: &str| {
        let is_legal = |c: char| c.is_ascii_graphic() && !"\"<>\\^`{|}".contains(c);
        value.is_empty() || (value.chars().all(is_legal) && Url::parse(value).is_ok_and(|url| url.has_host()))
    };
    match settings.find(|(key, value)| ENDPOINTS.contains(key) && !is_url(value)) {
        Some((key, _)) => {
            let reason = format!("{} is not the URL of a server", key.to_ascii_uppercase());
            Err(object_store::Error::Generic { store: "settings", source: reason.into() })
        }
        None => Ok(()),
    }
}

/// The builders of the stores have the same methods, but no trait in common.
#[allow(unused_macros)] // in a build without stores
macro_rules! build {
    ($builder:ty, $url:expr, $settings:expr, $retry_for:expr) => {{
        let builder = <$builder>::new()
            .with_url($url)
            .with_retry(super::client::retries($retry_for))
            .with_client_options(super::client::options())
            .with_http_connector(super::client::Connector::new($retry_for));
        let builder = $settings.fold(builder, |builder, (key, value)| match key.parse() {
            Ok(key) => builder.with_config(key, value),
            // A setting of another store.
            Err(_) => builder,
        });
        Arc::new(builder.build()?)
    }};
}

/// As [`object_store::parse_url_opts`], with clients that notice a server that stops sending.
#[allow(unused_variables)] // in a build without stores
fn open_store<'a>(
    scheme: &ObjectStoreScheme,
    url: &Url,
    settings: impl Iterator<Item = (&'a str, &'a str)>,
    retry_for: Duration,
) -> object_store::Result<Client> {
    match scheme {
        #[cfg(feature = "aws")]
        ObjectStoreScheme::AmazonS3 => {
            Ok(Client::with_uploads(build!(object_store::aws::AmazonS3Builder, url.as_str(), settings, retry_for)))
        }
        #[cfg(feature = "azure")]
        ObjectStoreScheme::MicrosoftAzure => {
            let store = build!(object_store::azure::MicrosoftAzureBuilder, url.as_str(), settings, retry_for);
            Ok(Client::with_uploads(store))
        }
        #[cfg(feature = "gcp")]
        ObjectStoreScheme::GoogleCloudStorage => {
            let store = build!(object_store::gcp::GoogleCloudStorageBuilder, url.as_str(), settings, retry_for);
            Ok(Client::with_uploads(store))
        }
        #[cfg(feature = "http")]
        ObjectStoreScheme::Http => {
            let url = &url[..url::Position::BeforePath];
            Ok(Client::new(super::http::HttpFiles::open(url, settings, retry_for)?))
        }
        other => {
            let reason = format!("this elmo was built without {other:?}");
            Err(object_store::Error::NotSupported { source: reason.into() })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use object_store::memory::InMemory;

    fn stores() -> Stores {
        Stores::with_settings([("aws_region".to_owned(), "eu-west-1".to_owned())])
    }

    #[test]
    fn addresses() {
        let here = std::env::current_dir().unwrap();
        let cases = [
            ("a/../b c.txt".to_owned(), here.join("b c.txt").display().to_string()),
            ("/x/./y".to_owned(), "/x/y".to_owned()),
            ("file:///x/y%20z".to_owned(), "/x/y z".to_owned()),
            ("file:///x/y%3Fz%231".to_owned(), "/x/y?z#1".to_owned()),
            ("s3://bucket/a/b.parquet".to_owned(), "s3://bucket/a/b.parquet".to_owned()),
            ("http://127.0.0.1:8000/a.txt".to_owned(), "http://127.0.0.1:8000/a.txt".to_owned()),
            ("https://example.org/a.txt".to_owned(), "https://example.org/a.txt".to_owned()),
        ];
        for (given, shown) in cases {
            assert_eq!(stores().locate(&given).unwrap().to_string(), shown, "{given}");
        }
    }

    #[test]
    fn every_known_scheme_has_a_store() {
        let stores = Stores::with_settings(
            [("aws_region", "eu-west-1"), ("azure_storage_account_name", "a"), ("google_skip_signature", "true")]
                .map(|(key, value)| (key.to_owned(), value.to_owned())),
        );
        for address in ["s3://b/x", "az://c/x", "gs://b/x", "http://h/x", "https://a.blob.core.windows.net/c/x"] {
            assert_eq!(stores.locate(address).unwrap().path.as_ref(), "x", "{address}");
        }
    }

    #[test]
    fn refused_addresses_show_no_secret() {
        for address in [
            "ftp://user:hunter2@host/x",
            "s3://key:hunter2@bucket/x",
            "https://h/x?sig=hunter2",
            "http://[hunter2/x",
            "s3://bucket/x?sig=hunter2",
            "az://container/part-0?.txt?hunter2",
            "https://a.blob.core.windows.net/c/x?sig=hunter2",
            "file:///x?hunter2",
            "gs://bucket/x#hunter2",
            "memory:///x",
            "",
        ] {
            let error = stores().locate(address).unwrap_err();
            assert!(error.is_usage(), "{error}");
            assert!(!error.to_string().contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn an_endpoint_is_a_url() {
        let open = |key: &str, value: &str| {
            let settings = [("aws_region", "eu-west-1"), (key, value)];
            Stores::with_settings(settings.map(|(key, value)| (key.to_owned(), value.to_owned())))
                .locate("s3://bucket/x")
        };
        for value in ["http://me:hunter2@[x", "hunter2", "http://hunter2 x", "http://h/{hunter2}", "mailto:hunter2"] {
            let error = open("aws_endpoint_url", value).unwrap_err().to_string();
            assert!(
                error.contains("AWS_ENDPOINT_URL is not the URL of a server") && !error.contains("hunter2"),
                "{error}"
            );
        }
        for value in ["", "http://127.0.0.1:9000", "https://s3.Example.org/path"] {
            assert!(open("aws_endpoint", value).is_ok(), "{value}");
        }
    }

    #[test]
    fn a_url_without_a_bucket_is_shown_as_it_was_given() {
        let said = |address: &str| stores().locate(address).unwrap_err().to_string();
        assert!(said("s3://").starts_with("s3://: names no bucket, or has a scheme"), "{}", said("s3://"));
        assert!(said("s4://bucket/x").starts_with("s4://bucket/x: has a scheme that is not known; give a local path"));
    }

    #[test]
    fn what_follows_a_question_mark_is_not_dropped() {
        let said = |address: &str| stores().locate(address).unwrap_err().to_string();
        for address in ["s3://bucket/part-?.txt", "https://a.blob.core.windows.net/c/x?sig=s"] {
            assert!(said(address).contains("in a pattern use `*`, a `?` of a name is written %3F"), "{address}");
        }
        assert!(said("https://h/x?a=b").contains("download the file first"));
        assert!(said("").starts_with("\"\": is empty; give a local path"));
    }

    #[test]
    fn a_store_is_opened_once_and_can_be_replaced() {
        let stores = stores();
        let one = stores.locate("s3://bucket/a").unwrap();
        let two = stores.locate("s3://bucket/b").unwrap();
        assert!(Arc::ptr_eq(&one.store, &two.store));
        stores.insert("memory://test", Arc::new(InMemory::new()));
        assert_eq!(
            stores.locate("memory://test/out").unwrap().child("_elmo/job.json").path.as_ref(),
            "out/_elmo/job.json"
        );
    }

    /// The budget is a setting of the client, so each budget has its own.
    #[test]
    #[cfg(feature = "aws")]
    fn a_retry_budget_is_chosen_by_the_caller() {
        let stores = stores();
        let patient = stores.locate("s3://bucket/a").unwrap();
        let budget = std::time::Duration::from_secs(25);
        let (one, two) = (patient.retrying_for(budget), stores.retrying_for(budget).locate("s3://bucket/b").unwrap());
        assert!(Arc::ptr_eq(&one.store, &two.store) && !Arc::ptr_eq(&one.store, &patient.store));
        assert!(Arc::ptr_eq(&one.child("c").retrying_for(RETRY_FOR).store, &patient.store));
        assert_eq!((one.client.retry_for, patient.client.retry_for), (budget, RETRY_FOR));
    }
}
