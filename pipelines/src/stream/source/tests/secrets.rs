//! No secret is ever shown.

use std::{
    io::Write,
    sync::{Arc, Mutex},
};

use rdkafka::{ClientContext as _, config::RDKafkaLogLevel, error::KafkaError, error::RDKafkaErrorCode};

use super::*;
use crate::{error::Fault as _, redact::redact};

/// Settings that hold a secret, with the value `canaryNN`, and where it is given.
const SECRETS: [&str; 20] = [
    "sasl.password",
    "ssl.key.password",
    "ssl.key.pem",
    "ssl.keystore.password",
    "sasl.oauthbearer.client.secret",
    "sasl.oauthbearer.client.credentials.client.secret",
    "sasl.oauthbearer.config",
    "sasl.oauthbearer.assertion.private.key.passphrase",
    "sasl.oauthbearer.assertion.private.key.pem",
    "basic.auth.user.info",
    "schema.registry.basic.auth.user.info",
    "schema.registry.ssl.key.password",
    "schema.registry.ssl.keystore.password",
    "schema.registry.ssl.key.pem",
    "bearer.auth.token",
    "bearer.auth.client.secret",
    // librdkafka has none of these, and its errors must not show them either.
    "sasl.jaas.config",
    "ssl.truststore.password",
    "ssl.keystore.key",
    "sasl.passwort",
];

fn canary(at: usize) -> String {
    format!("canary{at:02}")
}

fn check(text: &str) {
    assert!(!text.contains("canary"), "{text}");
}

fn given(at: usize, place: usize) -> Given {
    let (name, value) = (SECRETS[at], canary(at));
    let mut given =
        Given { brokers: "127.0.0.1:1".into(), topics: vec!["t".into()], group: "g".into(), ..Given::default() };
    match place {
        0 => given.kafka = vec![format!("{name}={value}")],
        1 => {
            given.environment =
                vec![(format!("ELMO_KAFKA_{}", name.replace('.', "_").to_uppercase()).into(), value.into())]
        }
        _ => {
            let mut file = tempfile::NamedTempFile::new().unwrap();
            writeln!(file, "{name}: {value}").unwrap();
            given.secrets = Some(file.into_temp_path().keep().unwrap());
        }
    }
    given
}

#[test]
fn settings_and_their_errors_do_not_show_them() {
    for (at, name) in SECRETS.iter().enumerate() {
        for place in 0..3 {
            let given = given(at, place);
            check(&format!("{given:?}"));
            let file = given.secrets.clone();
            match Settings::new(given) {
                Ok(settings) => {
                    check(&format!("{settings:?} {settings:#?}"));
                    let message = format!("login with {} failed", canary(at));
                    check(&settings.scrub(&message));
                    check(&format!("{:?}", settings.broker_error("x", None, &message)));
                    check(&format!("{:?}", settings.refused(&KafkaError::ClientCreation(message))));
                }
                Err(error) => {
                    let absent = error.to_string().contains("not supported in this build");
                    assert!(at >= 16 || absent, "{name} is legal: {error}");
                    check(&format!("{error} {error:?} {:?}", error.help()));
                }
            }
            file.into_iter().for_each(|path| std::fs::remove_file(path).unwrap());
        }
    }
}

#[test]
fn redaction_knows_their_names() {
    for (at, name) in SECRETS.iter().enumerate().filter(|(_, name)| **name != "sasl.passwort") {
        let value = canary(at);
        for text in [
            format!("-X {name}={value}"),
            format!("{name}: {value}"),
            format!("{{\"{name}\": \"{value}\"}}"),
            format!("ELMO_KAFKA_{}={value}", name.replace('.', "_").to_uppercase()),
        ] {
            check(&redact(&text));
        }
        check(&crate::redact::redact_json(&format!("{{\"{name}\": \"{value} {value}\"}}")));
    }
}

/// Collects what is logged on this thread.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn logs_and_events_do_not_show_them() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber =
        tracing_subscriber::fmt().with_max_level(tracing::Level::TRACE).with_writer(move || writer.clone());
    // Those that librdkafka and a registry take, all in one.
    let legal: Vec<usize> = (0..16).filter(|at| Settings::new(given(*at, 0)).is_ok()).collect();
    assert!(legal.len() >= 12, "{legal:?}");
    let kafka = legal.iter().map(|at| format!("{}={}", SECRETS[*at], canary(*at))).collect();
    let settings = Settings::new(Given { kafka, ..given(0, 0) }).unwrap();
    let (events, mut received) = unbounded_channel();
    tracing::subscriber::with_default(subscriber.finish(), || {
        let context = Context(Arc::new(
            Setup {
                budget: Budget::new(1),
                scrub: settings.scrubber(),
                events,
                brokers: settings.brokers().to_owned(),
                group: "g".into(),
                max_poll_interval: Duration::from_secs(1),
                consumer_protocol: false,
                named: HashSet::new(),
            }
            .shared(),
        ));
        for at in legal {
            let message = format!("[thrd:main]: could not use {} here", canary(at));
            for level in
                [RDKafkaLogLevel::Error, RDKafkaLogLevel::Warning, RDKafkaLogLevel::Info, RDKafkaLogLevel::Debug]
            {
                context.log(level, "CONF", &message);
                context.log(level, "COMMITFAIL", &message);
            }
            for code in [RDKafkaErrorCode::Resolve, RDKafkaErrorCode::Authentication, RDKafkaErrorCode::AllBrokersDown]
            {
                context.error(KafkaError::Global(code), &message);
            }
        }
    });
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert!(text.lines().count() >= 12 * 4, "{text}");
    check(&text);
    let mut count = 0;
    while let Ok(event) = received.try_recv() {
        check(&format!("{event:?}"));
        count += 1;
    }
    assert_eq!(count, 2);
}
