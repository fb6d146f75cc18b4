//! Settings: what is refused, what overrides what.

use std::{ffi::OsString, io::Write as _};

use super::*;
use crate::error::{Exit, Fault as _};

fn given(kafka: &[&str]) -> Given {
    Given {
        brokers: "b:1".into(),
        topics: vec!["t".into()],
        group: "g".into(),
        kafka: kafka.iter().map(ToString::to_string).collect(),
        ..Given::default()
    }
}

fn refusal(given: Given) -> (String, Option<String>) {
    let error = Settings::new(given).unwrap_err();
    assert_eq!(error.exit(), Exit::Usage);
    (error.to_string(), error.help())
}

fn variables(pairs: &[(&str, &str)]) -> Vec<(OsString, OsString)> {
    pairs.iter().map(|(name, value)| (OsString::from(name), OsString::from(value))).collect()
}

#[test]
fn the_command_line_overrides_the_environment_which_overrides_the_file() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    writeln!(file, "client.rack=file\nsasl.username = file\nsasl.password=file\nbasic.auth.user.info=a:b").unwrap();
    let environment = [
        ("ELMO_KAFKA_SASL_USERNAME", "environment"),
        ("ELMO_KAFKA_SASL_PASSWORD", "environment"),
        ("ELMO_KAFKA_SECRETS", "/not/a/property"),
        ("ELMO_KAFKA_CLIENT_RACK", ""),
        ("ELMO_KAFKA_SERVICE_HOST", "10.0.0.1"),
        ("ELMO_KAFKA_PORT_9092_TCP", "tcp://10.0.0.1:9092"),
        ("ELMO_MODEL", "tiny"),
    ];
    let settings = Settings::new(Given {
        secrets: Some(file.path().to_owned()),
        environment: variables(&environment),
        ..given(&[
            "sasl.password=line",
            "isolation.level=read_uncommitted",
            "group.instance.id=i",
            "sasl.password=last=1",
        ])
    })
    .unwrap();
    for (name, value) in [("client.rack", "file"), ("sasl.username", "environment"), ("sasl.password", "last=1")] {
        assert_eq!(settings.get(name), Some(value), "{name}");
    }
    assert_eq!(settings.instance(), Some("i"));
    assert_eq!(settings.registry()["basic.auth.user.info"], "a:b");
    let config = settings.consumer(1 << 30);
    for (name, value) in [
        ("isolation.level", "read_uncommitted"),
        ("enable.auto.commit", "false"),
        ("enable.auto.offset.store", "false"),
        ("auto.offset.reset", "error"),
        ("partition.assignment.strategy", "cooperative-sticky"),
        ("bootstrap.servers", "b:1"),
        ("group.id", "g"),
        ("queued.max.messages.kbytes", "65536"),
    ] {
        assert_eq!(config.get(name), Some(value), "{name}");
    }
    let producer = settings.producer();
    assert_eq!(producer.get("sasl.password"), Some("last=1"));
    assert!(["group.id", "group.instance.id", "isolation.level"].iter().all(|name| producer.get(name).is_none()));
}

#[test]
fn the_new_protocol_has_no_strategy_of_the_client() {
    let settings = Settings::new(given(&["group.protocol=consumer"])).unwrap();
    let config = settings.consumer(8 << 20);
    assert_eq!(config.get("partition.assignment.strategy"), None);
    assert_eq!(
        (config.get("queued.max.messages.kbytes"), config.get("fetch.max.bytes")),
        (Some("2048"), Some("2097152"))
    );
    // librdkafka takes it.
    let _: rdkafka::consumer::BaseConsumer = config.create().unwrap();
}

#[test]
fn what_is_ours_cannot_be_set() {
    for (pair, reason) in [
        ("enable.auto.commit=true", "commits an offset when the rows before it are stored"),
        ("enable.auto.offset.store=true", "commits an offset"),
        ("auto.offset.reset=latest", "use --start"),
    ] {
        let (message, _) = refusal(given(&[pair]));
        assert!(message.contains("cannot be set") && message.contains(reason), "{message}");
    }
    // Without statistics, --once would never end.
    let (message, _) = refusal(given(&["statistics.interval.ms=0"]));
    assert!(message.contains("cannot be 0") && message.contains("the end of --once"), "{message}");
    let (message, help) = refusal(given(&["group.id=x"]));
    assert_eq!((message.as_str(), help.as_deref()), ("group.id is not a setting of -X", Some("use --group")));
    assert_eq!(refusal(given(&["bootstrap.servers=x"])).1.as_deref(), Some("use --brokers"));
}

#[test]
fn mistakes_are_named() {
    for (pair, message, help) in [
        ("sasl.passwort=hunter2", "librdkafka has no setting sasl.passwort", Some("did you mean sasl.password?")),
        ("no.such=1", "librdkafka has no setting no.such", None),
        ("hunter2", "-X number 1 is not KEY=VALUE", None),
        ("=hunter2", "-X number 1 is not KEY=VALUE", None),
    ] {
        assert_eq!(refusal(given(&[pair])), (message.to_owned(), help.map(str::to_owned)), "{pair}");
    }
    let (message, _) = refusal(given(&["session.timeout.ms=soon"]));
    assert!(message.starts_with("librdkafka refuses session.timeout.ms: Invalid value"), "{message}");
    let (message, _) = refusal(Given { environment: variables(&[("ELMO_KAFKA_SASL_PASSWORT", "x")]), ..given(&[]) });
    assert_eq!(message, "librdkafka has no setting sasl.passwort");
    let (_, help) = refusal(given(&["sasl.jaas.config=x"]));
    assert!(help.unwrap().contains("sasl.username and sasl.password"));
    assert_eq!(refusal(Given { group: " ".into(), ..given(&[]) }).0, "--group is empty");
    assert_eq!(refusal(Given { topics: Vec::new(), ..given(&[]) }).0, "no topic to read");
    let (message, _) = refusal(Given { topics: vec!["^reviews-(".into()], ..given(&[]) });
    assert_eq!(message, "--topic '^reviews-(', character 10: this parenthesis is not closed");
    let missing = refusal(Given { secrets: Some("/no/such/file".into()), ..given(&[]) }).0;
    assert!(missing.starts_with("cannot read /no/such/file: No such file"), "{missing}");
}

/// A file that holds a password alone, a key file given by mistake, a password in Base64 without its name.
#[test]
fn a_name_that_may_be_a_secret_is_not_shown() {
    let unnamed =
        |place: &str| format!("{place}: librdkafka has no such setting; it is not shown, as it may be a secret");
    for (text, line) in [
        ("hunter2", 1),
        ("# the password\n\nhunter.two hunter2", 3),
        ("-----BEGIN PRIVATE KEY-----\nhunter2/8w==\n-----END PRIVATE KEY-----", 1),
        ("sasl.username=me\nhunter2==", 2),
    ] {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        writeln!(file, "{text}").unwrap();
        let (message, help) = refusal(Given { secrets: Some(file.path().to_owned()), ..given(&[]) });
        assert_eq!(message, unnamed(&format!("{}, line {line}", file.path().display())));
        assert!(help.unwrap().contains("KEY=VALUE"));
    }
    assert_eq!(refusal(given(&["client.id=x", "aHVudGVyMg=="])).0, unnamed("-X number 2"));
    let (message, help) = refusal(Given { brokers: "me:hunter2@b:9092".into(), ..given(&[]) });
    assert!(message.starts_with("--brokers has an @") && !message.contains("hunter2"), "{message}");
    assert!(help.unwrap().contains("sasl.password"));
}

#[test]
fn a_certificate_that_does_not_exist_is_refused_when_the_consumer_is_made() {
    let settings = Settings::new(given(&["security.protocol=ssl", "ssl.ca.location=/no/such/ca.pem"])).unwrap();
    let result = tokio::runtime::Runtime::new().unwrap().block_on(describe(&settings, &[]));
    let error = result.unwrap_err();
    assert_eq!(error.exit(), Exit::Usage);
    assert!(error.to_string().contains("ssl.ca.location"), "{error}");
}
