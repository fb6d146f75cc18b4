//! Secrets of a user, in every place where one can stand, are nowhere in what a stream says and writes.
//!
//! Every secret here, and everything that users wrote into messages, has `canary` in it.

use std::{
    fs,
    process::{Command, Output, Stdio},
    thread,
    time::Duration,
};

use elmo_pipelines::stores::Stores;
use tempfile::TempDir;

use super::{
    broker::{Broker, Record, Topic, needed},
    dataset::Dataset,
    node::Node,
    proxy::{Proxy, Weather},
    running::Running,
    streaming,
};
use crate::without_settings;

const ELMO: &str = env!("CARGO_BIN_EXE_elmo");

/// What no output may hold, in lower case: the word in all secrets, and in Base64, as in a header of HTTP, where it begins at a
/// multiple of three bytes.
const TRACES: [&str; 2] = ["canary", "y2fuyxj5"];

fn check(what: &str, text: &str) {
    let lower = text.to_ascii_lowercase();
    for trace in TRACES {
        if let Some(at) = lower.find(trace) {
            let from = (0..=at.saturating_sub(300)).rev().find(|at| lower.is_char_boundary(*at)).unwrap_or(0);
            let end = (at + 100..).find(|at| *at >= text.len() || text.is_char_boundary(*at)).unwrap();
            panic!("{what} shows a secret: …{}…", &text[from..end.min(text.len())]);
        }
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// `elmo` in a folder of its own, with files.
struct Place(TempDir);

impl Place {
    fn new(files: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for (name, content) in files {
            fs::write(folder.path().join(name), content).unwrap();
        }
        Self(folder)
    }

    /// Of the tests' own environment it sees that of the stores.
    fn command(&self, words: &[String], variables: &[(&str, &str)]) -> Command {
        let mut command = without_settings(Command::new(ELMO));
        command.current_dir(self.0.path()).args(words).stdin(Stdio::null());
        command.envs(variables.iter().copied());
        command
    }
}

fn words(words: &str) -> Vec<String> {
    words.split_whitespace().map(str::to_owned).collect()
}

/// The broker with TLS and a password, a topic with messages of users, and topics for dead letters and enriched messages.
struct Case {
    topic: Topic,
    letters: Topic,
    enriched: Topic,
    written: Vec<Record>,
}

/// Settings of librdkafka and of registries, in the file of secrets. The password of the broker is in the environment.
const FILE: &str = "\
# canary00
ssl.key.password=canary01
sasl.oauthbearer.config: principal=canary02
basic.auth.user.info = me:canary03
schema.registry.basic.auth.user.info=me:canary04
schema.registry.ssl.key.password=canary05
schema.registry.ssl.keystore.password=canary06
schema.registry.ssl.key.pem=canary07
bearer.auth.token=canary08
";

/// `-X` in `elmo.toml`.
const TOML: &str = "[stream]
kafka = ['ssl.keystore.password=canary09', 'client.rack=none']
[stream-status]
kafka = ['ssl.keystore.password=canary10']
";

/// The environment, beside the password of the broker. The account key of Azure is canary14 in Base64.
const ENVIRONMENT: [(&str, &str); 9] = [
    ("ELMO_KAFKA_BEARER_AUTH_CLIENT_SECRET", "canary11"),
    ("AWS_SECRET_ACCESS_KEY", "canary12"),
    ("AWS_SESSION_TOKEN", "canary13"),
    ("AZURE_STORAGE_ACCOUNT_KEY", "Y2FuYXJ5MTQ="),
    ("AZURE_STORAGE_SAS_KEY", "sv=2024-11-04&sig=canary15"),
    ("AZURE_STORAGE_CLIENT_SECRET", "canary16"),
    ("GOOGLE_SERVICE_ACCOUNT_KEY", "{\"private_key\": \"canary17\"}"),
    ("AWS_ACCESS_KEY_ID", "canary18"),
    ("ELMO_KAFKA_DEBUG", "all"),
];

impl Case {
    /// Messages of every kind, with canaries in their texts, keys and headers.
    fn new() -> Self {
        let broker = Broker::shared();
        let (topic, letters) = (broker.topic("secrets", 1), broker.topic("secrets-letters", 1));
        // Takes each enriched message, and not all of them in one batch: the limit is asked for.
        let enriched = broker.topic_with("secrets-enriched", 1, &[("max.message.bytes", "4000")]);
        let long = format!("{{\"id\": 1, \"text\": \"{}\"}}", "canary19 ".repeat(30));
        let values: [Option<&[u8]>; 13] = [
            Some(b"{\"id\": 1, \"text\": \"A text of canary19.\"}"),
            Some(b"{\"id\": 2, \"text\": \"canary19"),
            Some(b"{\"id\": 3, \"text\": \"canary19\" canary19}"),
            Some(b"{\"id\": \"canary19\", \"text\": \"A text.\"}"),
            Some(b"{\"id\": 4, \"text\": {\"canary19\": \"canary19\"}}"),
            Some(b"{\"id\": 5, \"canary19\": \"canary19\"}"),
            Some(b"{\"id\": 6, \"text\": \"canary19 \xff canary19\"}"),
            Some(b"{\"id\": 7, \"text\": \"\\ud800 canary19 \\x canary19\"}"),
            Some(b"canary19"),
            Some(b"[\"canary19\"]"),
            Some(b"{\"id\": 99999999999999999999999, \"text\": \"canary19\"}"),
            Some(long.as_bytes()),
            None,
        ];
        let record = |value: &Option<&[u8]>| Record {
            key: Some(b"canary20".to_vec()),
            value: value.map(<[u8]>::to_vec),
            headers: vec![("canary21".into(), Some(b"canary21".to_vec()))],
            ..Record::default()
        };
        let written = broker.produce(&topic, values.iter().map(record).collect());
        Self { topic, letters, enriched, written }
    }

    fn output(&self, name: &str) -> String {
        format!("s3://elmo-test/{}/{name}", self.topic.name)
    }

    fn place() -> Place {
        Place::new(&[("secrets", FILE), ("elmo.toml", TOML)])
    }

    /// A command with all secrets.
    fn command(&self, place: &Place, command: &str) -> Command {
        let password = needed("ELMO_TEST_KAFKA_PASSWORD");
        let user = needed("ELMO_TEST_KAFKA_USER");
        let ca = needed("ELMO_TEST_KAFKA_CA");
        let variables = [
            ("ELMO_KAFKA_SASL_PASSWORD", password.as_str()),
            ("ELMO_KAFKA_SASL_USERNAME", &user),
            ("ELMO_KAFKA_SASL_MECHANISM", "SCRAM-SHA-256"),
            ("ELMO_KAFKA_SECURITY_PROTOCOL", "SASL_SSL"),
            ("ELMO_KAFKA_SSL_CA_LOCATION", &ca),
        ];
        let brokers = format!("{command} --kafka-secrets secrets --brokers {}", needed("ELMO_TEST_KAFKA_SASL_SSL"));
        place.command(&words(&brokers), &[&variables[..], &ENVIRONMENT[..]].concat())
    }

    fn stream(&self, output: &str) -> String {
        format!("{} --output {}", self.stream_of(output), self.output(output))
    }

    /// Without an output.
    fn stream_of(&self, group: &str) -> String {
        format!(
            "stream --topic {0} --group {0}-{group} --model tiny --threads 1 --format json --drop-text \
             --columns id=/id:int64 --max-tokens 20 --on-long error",
            self.topic.name
        )
    }

    /// What a stream has written: footers, errors, all other objects, and what its group has committed.
    fn check_output(&self, name: &str) {
        let dataset = Dataset::read(&self.output(name));
        for object in &dataset.objects {
            check(&object.path, &format!("{} {:?} {:?}", object.path, object.footer, object.rows.schema()));
        }
        dataset.strings("error").into_iter().flatten().for_each(|error| check("the column error", &error));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let root = Stores::from_env().locate(&self.output(name)).unwrap();
        let mut kinds = Vec::new();
        runtime.block_on(async {
            for meta in root.below(&root.path, 64, |_| true).await.unwrap() {
                let bytes = root.at(meta.location.clone()).get().await.unwrap().unwrap();
                let path = meta.location.to_string();
                if !path.ends_with(".parquet") {
                    check(&path, &format!("{path} {}", text(&bytes)));
                    kinds.push(path.rsplit('/').next().unwrap().to_owned());
                }
            }
        });
        kinds.sort();
        assert_eq!(kinds, ["genesis.json", "head.json", "stream.json"]);
        let group = format!("{}-{name}", self.topic.name);
        let committed = Broker::shared().committed(&group, &self.topic);
        assert_eq!(committed.len(), 1);
        check("a committed offset", &format!("{committed:?}"));
    }

    /// As text at -vv, with metrics, until it is stopped.
    fn null_rows(&self) {
        let place = Self::place();
        let command =
            self.command(&place, &format!("{} --metrics 127.0.0.1:0 --max-age 200ms -vv", self.stream("null")));
        let mut stream = Running::of(command);
        stream.wait_for(&self.output("null"), self.written.len(), Duration::from_secs(60));
        for path in ["/metrics", "/readyz", "/livez"] {
            check(path, &streaming::get(&stream.metrics, path).1);
        }
        let node = &mut stream.node;
        node.signal("-TERM");
        assert_eq!(node.wait(), Some(0), "{}", node.stderr());
        check("stderr", &node.stderr());
        self.check_output("null");
        let status = format!("stream status -vv --output {0} --group {1}-null", self.output("null"), self.topic.name);
        let status = self.command(&place, &status).output().unwrap();
        assert!(status.status.success(), "{}", text(&status.stderr));
        check("status", &(text(&status.stdout) + &text(&status.stderr)));
    }

    /// As JSON with everything that librdkafka says, into dead letters.
    fn dead_letters(&self) {
        let place = Self::place();
        let stream = self.stream("letters");
        let letters = format!("--on-error dead-letter --dead-letter-topic {}", self.letters.name);
        let plan = self.command(&place, &format!("{stream} {letters} --dry-run -vv")).output().unwrap();
        assert!(plan.status.success(), "{}", text(&plan.stderr));
        check("the plan", &(text(&plan.stdout) + &text(&plan.stderr)));
        let logs = "--once --json -vvv --log-format json";
        let done = self.command(&place, &format!("{stream} {letters} {logs}")).output().unwrap();
        let (stdout, stderr) = (text(&done.stdout), text(&done.stderr));
        check("stdout", &stdout);
        check("stderr", &stderr);
        assert!(done.status.success(), "{stderr}");
        assert!(stderr.contains("sasl.password"), "librdkafka shows its settings");
        self.check_output("letters");
        let read = Broker::shared().read(&self.letters);
        assert_eq!(read.len(), self.written.len() - 1);
        for letter in read {
            let (theirs, ours) = letter.headers.split_at(1);
            assert_eq!(theirs, &self.written[0].headers);
            let ours: Vec<_> =
                ours.iter().map(|(name, value)| (name, text(value.as_deref().unwrap_or_default()))).collect();
            check("a dead letter", &format!("{ours:?}"));
        }
    }
}

impl Case {
    /// Into another topic, with everything that librdkafka says about transactions and limits.
    fn enriched_messages(&self) {
        let place = Self::place();
        let command = format!("{} --output-topic {} --once -vvv", self.stream_of("enriched"), self.enriched.name);
        let done = self.command(&place, &command).output().unwrap();
        let (stdout, stderr) = (text(&done.stdout), text(&done.stderr));
        check("stdout", &stdout);
        check("stderr", &stderr);
        assert!(done.status.success(), "{stderr}");
        assert!(stderr.contains("the topic takes no larger batches"), "the limit was not asked for: {stderr}");
        assert!(stderr.contains("InitProducerId"), "librdkafka shows the requests of transactions");
        assert_eq!(Broker::shared().read(&self.enriched).len(), self.written.len());
    }
}

#[test]
#[ignore = "needs the servers that scripts/services starts, so Java 17 and Maven"]
fn a_stream_shows_no_secret() {
    let case = Case::new();
    thread::scope(|scope| {
        scope.spawn(|| case.null_rows());
        scope.spawn(|| case.dead_letters());
        scope.spawn(|| case.enriched_messages());
    });
}

/// A command that fails, with a secret in it.
#[derive(Clone, Default)]
struct Failing<'c> {
    /// Options that replace or complement those of [`Failing::run`].
    options: Vec<(&'c str, String)>,
    variables: Vec<(&'c str, String)>,
    files: Vec<(&'c str, &'c str)>,
    /// What the error says, and its exit code.
    says: &'c str,
    code: i32,
}

/// An error of the settings.
fn refused<'c>(says: &'c str) -> Failing<'c> {
    Failing { says, code: 2, ..Failing::default() }
}

/// An error of a broker or a store.
fn denied<'c>(says: &'c str) -> Failing<'c> {
    Failing { says, code: 5, ..Failing::default() }
}

impl<'c> Failing<'c> {
    fn option(mut self, name: &'c str, value: &str) -> Self {
        self.options.push((name, value.to_owned()));
        self
    }

    fn variable(mut self, name: &'c str, value: &str) -> Self {
        self.variables.push((name, value.to_owned()));
        self
    }

    fn file(mut self, name: &'c str, content: &'c str) -> Self {
        self.files.push((name, content));
        self
    }

    /// The file that `--kafka-secrets` names.
    fn secrets(self, content: &'c str) -> Self {
        self.option("--kafka-secrets", "secrets").file("secrets", content)
    }

    fn command(&self, topic: &Topic, place: &Place, logs: &str) -> Command {
        let broker = needed("ELMO_TEST_KAFKA");
        let output = format!("s3://elmo-test/{}/failing", topic.name);
        let usual = [
            ("--brokers", broker.as_str()),
            ("--topic", &topic.name),
            ("--group", "secrets"),
            ("--model", "tiny"),
            ("--output", &output),
        ];
        let mut all = words(&format!("stream --threads 1 --once {logs}"));
        for (name, value) in usual.iter().filter(|(name, _)| !self.options.iter().any(|(given, _)| given == name)) {
            all.extend([(*name).to_owned(), (*value).to_owned()]);
        }
        for (name, value) in &self.options {
            all.extend([(*name).to_owned(), value.clone()]);
        }
        let variables: Vec<_> = self.variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
        place.command(&all, &variables)
    }

    fn run(&self, topic: &Topic, logs: &str) {
        let place = Place::new(&self.files);
        let Output { status, stdout, stderr } = self.command(topic, &place, logs).output().unwrap();
        let all = text(&stdout) + &text(&stderr);
        check(self.says, &all);
        assert_eq!(status.code(), Some(self.code), "{all}");
        assert!(all.contains(self.says), "{} is not in {all}", self.says);
    }
}

const PEM: &str = "-----BEGIN PRIVATE KEY-----\nMIIBcanary/8w==\nAcanaryQ==\n-----END PRIVATE KEY-----\n";
const UNNAMED: &str = "it may be a secret";

/// Mistakes that are found before anybody is asked.
fn mistakes() -> Vec<Failing<'static>> {
    let azure =
        |says| refused(says).option("--output", "az://container/x").variable("AZURE_STORAGE_ACCOUNT_NAME", "me");
    vec![
        // librdkafka.
        refused("did you mean sasl.password?").option("-X", "sasl.passwort=canary"),
        refused("sasl.username and sasl.password").option("-X", "sasl.jaas.config=password=\"canary\";"),
        refused("-X number 1 is not KEY=VALUE").option("-X", "canary"),
        refused(UNNAMED).option("-X", "Canary=="),
        refused("not a setting of -X").option("-X", "bootstrap.servers=me:canary@host"),
        refused("ssl.key.pem").option("-X", "security.protocol=ssl").option("-X", &format!("ssl.key.pem={PEM}")),
        // Without libcurl, this build has no such setting.
        refused("sasl.oauthbearer.client.secret").option("-X", "sasl.oauthbearer.client.secret=canary"),
        refused("has no setting sasl.passwort").variable("ELMO_KAFKA_SASL_PASSWORT", "canary"),
        refused("--brokers has an @").option("--brokers", "me:canary@127.0.0.1:9092"),
        refused("--brokers has an @").option("--brokers", "SASL_SSL://me:canary@127.0.0.1:9092"),
        // The file of secrets.
        refused(UNNAMED).secrets("canary\n"),
        refused(UNNAMED).secrets("sasl.username=me\ncanary canary\n"),
        refused(UNNAMED).secrets("my.own.canary=canary\n"),
        refused(UNNAMED).secrets(PEM),
        refused("u needs four hexadecimal digits").secrets("a=b\nsasl.password=canary\\u12zz\n"),
        refused("cannot read").option("--kafka-secrets", "missing").variable("ELMO_KAFKA_SASL_PASSWORD", "canary"),
        // elmo.toml.
        refused("is not TOML").file("elmo.toml", "[stream]\nkafka = [\"sasl.password=ab\"canary\"]\n"),
        refused("is not TOML").file("elmo.toml", "[stream]\nkafka = [\"ssl.key.pem=\\\n  canary\n\"\"]\n"),
        refused("unknown key stream.sasl").file("elmo.toml", "[stream]\nsasl.password = \"canary\"\n"),
        refused("found array").file("elmo.toml", "[stream]\nkafka = [[\"sasl.password\", \"canary\"]]\n"),
        refused("-X number 1 is not KEY=VALUE").file("elmo.toml", "[stream]\nkafka = \"canary\"\n"),
        // Addresses.
        refused("s3://").option("--output", "s3://me:canary@bucket/x"),
        refused("https://").option("--output", "https://me.blob.core.windows.net/c/x?sv=1&sig=canary"),
        refused("s3://").option("--model", "s3://me:canary@bucket/model"),
        refused("--schema-registry ftp://")
            .option("--format", "avro")
            .option("--schema-registry", "ftp://me:canary@host/x?canary"),
        refused("not user:password")
            .option("--format", "avro")
            .option("--schema-registry", "http://127.0.0.1:1")
            .secrets("basic.auth.user.info=canary\n"),
        refused("cannot be used with").option("--output", "s3://me:canary@bucket/x").option("--output-topic", "t"),
        // Stores.
        Failing { code: 5, ..azure("") }.variable("AZURE_STORAGE_ACCOUNT_KEY", "canary is not Base64"),
        Failing { code: 5, ..azure("") }
            .variable("AZURE_STORAGE_SAS_KEY", "canary")
            .variable("AZURE_STORAGE_ACCOUNT_KEY", ""),
        denied("")
            .option("--output", "gs://bucket/x")
            .variable("GOOGLE_SERVICE_ACCOUNT_KEY", "{\"private_key\": \"canary\"}"),
        denied("").option("--output", "gs://bucket/x").variable("GOOGLE_SERVICE_ACCOUNT_KEY", "canary"),
        denied("AWS_ENDPOINT_URL is not the URL").variable("AWS_ENDPOINT_URL", "http://me:canary@[x"),
    ]
}

/// What brokers, registries and stores refuse.
fn refusals(proxy: &Proxy) -> Vec<Failing<'static>> {
    let secured = needed("ELMO_TEST_KAFKA_SASL_SSL");
    let scram = || {
        let ca = format!("ssl.ca.location={}", needed("ELMO_TEST_KAFKA_CA"));
        let of_tls = denied("sasl.password").option("--brokers", &secured).option("-X", "security.protocol=SASL_SSL");
        of_tls.option("-X", &ca).option("-X", "sasl.mechanism=SCRAM-SHA-256").option("-X", "sasl.username=elmo")
    };
    let azurite = |says| {
        denied(says).option("--output", "az://elmo-test/secrets").variable("AZURE_STORAGE_ACCOUNT_KEY", "Y2FuYXJ5MTQ=")
    };
    let address = proxy.url().replace("http://", "http://me:canary@");
    vec![
        scram().variable("ELMO_KAFKA_SASL_PASSWORD", "canary"),
        scram().secrets("sasl.password=canary\n"),
        scram().option("-X", "sasl.password=canary").option("-X", "debug=all"),
        denied("403")
            .variable("AWS_ENDPOINT_URL", &proxy.url())
            .variable("AWS_ACCESS_KEY_ID", "canary")
            .variable("AWS_SECRET_ACCESS_KEY", "canary")
            .variable("AWS_SESSION_TOKEN", "canary"),
        denied("403").variable("AWS_ENDPOINT_URL", &address),
        azurite("403"),
        azurite("403").variable("AZURE_STORAGE_SAS_KEY", "sv=2024-11-04&sig=canary"),
        denied("refused with 403")
            .option("--format", "avro")
            .option("--schema-registry", &format!("{address}/x?token=canary"))
            .secrets("basic.auth.user.info=me:canary\n"),
        denied("schema registry")
            .option("--format", "avro")
            .option("--schema-registry", "http://me:canary@127.0.0.1:1/?token=canary"),
    ]
}

#[test]
#[ignore = "needs the servers that scripts/services starts, so Java 17 and Maven"]
fn a_failing_command_shows_no_secret() {
    let topic = Broker::shared().topic("secrets-failing", 1);
    let proxy = Proxy::before(&needed("ELMO_TEST_S3_ENDPOINT"));
    proxy.set(Weather::Denies);
    let all = [mistakes(), refusals(&proxy)].concat();
    let logs = ["-vv", "-vvv --log-format json"];
    thread::scope(|scope| {
        for lane in 0..2 {
            let (all, topic) = (&all, &topic);
            scope.spawn(move || {
                for (number, failing) in all.iter().enumerate().filter(|(number, _)| number % 2 == lane) {
                    failing.run(topic, logs[number / 2 % 2]);
                }
            });
        }
        scope.spawn(|| unreachable_store(&topic));
    });
    help_shows_no_secret();
}

/// A store that nobody serves is asked for two minutes; what it says at first is enough.
fn unreachable_store(topic: &Topic) {
    let failing = denied("").variable("AWS_ENDPOINT_URL", "http://me:canary@127.0.0.1:1/?token=canary");
    let place = Place::new(&[]);
    let mut node = Node::spawn(failing.command(topic, &place, "-vvv"), "");
    node.wait_for("retrying for up to");
    check("stderr", &node.stderr());
}

/// Help lists defaults, which may come from the environment and from `elmo.toml`.
fn help_shows_no_secret() {
    let place = Place::new(&[("elmo.toml", TOML)]);
    let variables = [("ELMO_KAFKA", "sasl.password=canary"), ("ELMO_SCHEMA_REGISTRY", "http://me:canary@host")];
    for asked in ["stream --help", "stream status --help"] {
        let help = place.command(&words(asked), &variables).output().unwrap();
        assert!(help.status.success(), "{}", text(&help.stderr));
        check(asked, &(text(&help.stdout) + &text(&help.stderr)));
    }
}
