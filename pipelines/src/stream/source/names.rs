//! Names of settings: those of librdkafka, for suggestions, and those of Java clients that librdkafka does not have.

/// Names that a stream may need, from librdkafka 2.12. Only for suggestions: librdkafka decides what is legal.
const KNOWN: &str = "
allow.auto.create.topics api.version.request.timeout.ms broker.address.family broker.address.ttl check.crcs client.dns.lookup
client.id client.rack compression.codec compression.level connections.max.idle.ms coordinator.query.interval.ms debug
enable.idempotence enable.partition.eof enable.sasl.oauthbearer.unsecure.jwt enable.ssl.certificate.verification
fetch.error.backoff.ms fetch.max.bytes fetch.message.max.bytes fetch.min.bytes fetch.queue.backoff.ms fetch.wait.max.ms
group.instance.id group.protocol group.remote.assignor heartbeat.interval.ms https.ca.location https.ca.pem isolation.level
linger.ms log_level max.in.flight.requests.per.connection max.partition.fetch.bytes max.poll.interval.ms message.max.bytes
message.timeout.ms metadata.max.age.ms metadata.recovery.strategy partition.assignment.strategy queue.buffering.max.kbytes
queue.buffering.max.messages queue.buffering.max.ms queued.max.messages.kbytes queued.min.messages receive.message.max.bytes
reconnect.backoff.max.ms reconnect.backoff.ms request.timeout.ms retries retry.backoff.max.ms retry.backoff.ms
sasl.kerberos.keytab sasl.kerberos.kinit.cmd sasl.kerberos.min.time.before.relogin sasl.kerberos.principal
sasl.kerberos.service.name sasl.mechanism sasl.mechanisms sasl.oauthbearer.client.credentials.client.id
sasl.oauthbearer.client.credentials.client.secret sasl.oauthbearer.client.id sasl.oauthbearer.client.secret
sasl.oauthbearer.config sasl.oauthbearer.extensions sasl.oauthbearer.method sasl.oauthbearer.scope
sasl.oauthbearer.token.endpoint.url sasl.password sasl.username security.protocol session.timeout.ms
socket.connection.setup.timeout.ms socket.keepalive.enable socket.max.fails socket.nagle.disable socket.receive.buffer.bytes
socket.send.buffer.bytes socket.timeout.ms ssl.ca.location ssl.ca.pem ssl.certificate.location ssl.certificate.pem
ssl.cipher.suites ssl.crl.location ssl.curves.list ssl.endpoint.identification.algorithm ssl.engine.id ssl.engine.location
ssl.key.location ssl.key.password ssl.key.pem ssl.keystore.location ssl.keystore.password ssl.providers ssl.sigalgs.list
statistics.interval.ms topic.blacklist topic.metadata.refresh.interval.ms transaction.timeout.ms";

/// Names of Java clients and what to write instead.
const OF_JAVA: [(&str, &str); 9] = [
    ("sasl.jaas.config", "sasl.username and sasl.password"),
    ("ssl.truststore.location", "ssl.ca.location, with the certificates as PEM"),
    ("ssl.truststore.password", "ssl.ca.location, with the certificates as PEM, which needs no password"),
    ("ssl.truststore.type", "ssl.ca.location, with the certificates as PEM"),
    ("ssl.truststore.certificates", "ssl.ca.pem"),
    ("ssl.keystore.type", "ssl.keystore.location, which must be PKCS#12"),
    ("ssl.keystore.key", "ssl.key.pem"),
    ("ssl.keystore.certificate.chain", "ssl.certificate.pem"),
    ("sasl.login.callback.handler.class", "sasl.oauthbearer.method"),
];

/// Settings of consumers, which a producer would warn about.
const OF_CONSUMERS: [&str; 15] = [
    "group.",
    "partition.assignment.strategy",
    "session.timeout.ms",
    "heartbeat.interval.ms",
    "coordinator.query.interval.ms",
    "max.poll.interval.ms",
    "enable.auto.",
    "auto.",
    "queued.",
    "fetch.",
    "max.partition.fetch.bytes",
    "offset.store.",
    "isolation.level",
    "enable.partition.eof",
    "check.crcs",
];

/// Settings of producers, which a consumer would warn about.
const OF_PRODUCERS: [&str; 17] = [
    "transaction",
    "enable.idempotence",
    "enable.gapless.guarantee",
    "queue.buffering.",
    "linger.ms",
    "message.send.max.retries",
    "message.timeout.ms",
    "retries",
    "compression.",
    "batch.",
    "delivery.",
    "sticky.partitioning.linger.ms",
    "request.required.acks",
    "request.timeout.ms",
    "acks",
    "produce.",
    "partitioner",
];

pub(super) fn is_of_consumers(name: &str) -> bool {
    OF_CONSUMERS.iter().any(|prefix| name.starts_with(prefix))
}

pub(super) fn is_of_producers(name: &str) -> bool {
    OF_PRODUCERS.iter().any(|prefix| name.starts_with(prefix))
}

/// Whether somebody meant this as the name of a setting: `no.such.setting`, and not a password whose name was forgotten.
pub(super) fn looks_like_a_name(name: &str) -> bool {
    let is_of_names = |c: char| c.is_ascii_lowercase() || matches!(c, '.' | '_' | '-');
    name.chars().all(is_of_names) && name.contains('.')
}

/// What to write instead of a name that librdkafka does not have.
pub(super) fn instead_of(name: &str) -> Option<String> {
    of_java(name).or_else(|| nearest(name).map(|nearest| format!("did you mean {nearest}?")))
}

/// What to write instead of a name that only Java clients have.
pub(super) fn of_java(name: &str) -> Option<String> {
    let (_, instead) = OF_JAVA.iter().find(|(java, _)| *java == name)?;
    Some(format!("Java clients have it; use {instead}"))
}

/// The most similar name.
fn nearest(name: &str) -> Option<&'static str> {
    /// `sasl.passwort`/`sasl.password` has 0.92, two unrelated names of settings seldom more than 0.6.
    const SIMILAR: f64 = 0.7;
    let rated = KNOWN.split_whitespace().map(|known| (strsim::normalized_damerau_levenshtein(name, known), known));
    rated.filter(|(similarity, _)| *similarity >= SIMILAR).max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, known)| known)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suggestions() {
        assert_eq!(instead_of("sasl.passwort").unwrap(), "did you mean sasl.password?");
        assert_eq!(instead_of("security-protocol").unwrap(), "did you mean security.protocol?");
        assert!(instead_of("ssl.truststore.location").unwrap().contains("ssl.ca.location"));
        assert_eq!(instead_of("service.host"), None);
    }

    #[test]
    fn librdkafka_has_every_known_name() {
        let unset = rdkafka::ClientConfig::new().create_native_config().unwrap();
        for name in KNOWN.split_whitespace() {
            // Secrets and settings without a default have no value, which is not an unknown name.
            if let Err(error) = unset.get(name) {
                let mut config = rdkafka::ClientConfig::new();
                let error = config
                    .set(name, "")
                    .create_native_config()
                    .err()
                    .map(|e| e.to_string())
                    .unwrap_or(error.to_string());
                assert!(!error.contains("No such configuration property"), "{name}: {error}");
            }
        }
    }
}
