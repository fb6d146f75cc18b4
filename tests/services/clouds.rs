//! A stream into Azure Blob Storage (Azurite) and into Google Cloud Storage (an imitation in this process).

use std::{thread, time::Duration};

use super::{
    broker::{self, Broker, Record},
    dataset::Dataset,
    google::Google,
    streaming::{Stream, kill},
};
use elmo_pipelines::stores::Stores;

const ELMO: &str = env!("CARGO_BIN_EXE_elmo");

/// Two streams by mistake, of different groups, into one output; both are killed, and a third one ends the work.
fn two_streams_and_a_third(output: &str, env: &[(&str, &str)]) {
    let broker = Broker::shared();
    let topic = broker.topic("clouds", 2);
    let written: Vec<Record> = broker.produce(&topic, broker::texts(600, 2));
    let stream = |group: &str, output: &str| {
        let group = format!("{}-{group}", topic.name);
        let stream = Stream::new(ELMO, &broker, &topic, &group, output);
        let stream =
            stream.with("--rows-per-file 20 --max-age 1s -X session.timeout.ms=1000 -X heartbeat.interval.ms=300");
        env.iter().fold(stream, |stream, (name, value)| stream.with_env(name, value))
    };
    let output = format!("{output}/{}", topic.name);
    let (ours, mistake) = (stream("ours", &output), stream("mistake", &output));
    let (first, second) = (ours.start(), mistake.start());
    thread::sleep(Duration::from_millis(1500));
    kill(first);
    kill(second);
    let last = stream("last", &output);
    last.drain();
    let local = tempfile::tempdir().unwrap();
    let undisturbed = stream("undisturbed", local.path().to_str().unwrap());
    undisturbed.drain();
    let found = dataset(&output, env);
    found.check_offsets(&topic.name, written.iter().map(|record| (record.partition, record.offset)));
    found.assert_same_rows(&undisturbed.dataset());
}

/// The dataset, read with these settings of the store.
fn dataset(output: &str, env: &[(&str, &str)]) -> Dataset {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    if env.is_empty() {
        return Dataset::read(output);
    }
    let settings = env.iter().map(|(name, value)| (name.to_ascii_lowercase(), (*value).to_owned()));
    runtime.block_on(Dataset::from_stores(&Stores::with_settings(settings), output))
}

#[test]
#[ignore = "needs the servers that scripts/services starts, so Java 17 and Maven"]
fn a_stream_into_azure() {
    two_streams_and_a_third("az://elmo-test", &[]);
}

#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn a_stream_into_google_cloud_creates_every_file_on_condition() {
    let google = Google::start();
    // GOOGLE_SKIP_SIGNATURE does not keep object_store 0.13 from asking for a token before it writes.
    let account = serde_json::json!({
        "gcs_base_url": google.url,
        "disable_oauth": true,
        "client_email": "",
        "private_key": "",
        "private_key_id": "",
    });
    let account = account.to_string();
    let env = [("GOOGLE_SERVICE_ACCOUNT_KEY", account.as_str()), ("GOOGLE_ALLOW_HTTP", "true")];
    two_streams_and_a_third("gs://elmo-test", &env);
    // The hints under `_elmo/` may be replaced, the files may not.
    let files: Vec<String> =
        google.unconditional("elmo-test/").into_iter().filter(|name| name.ends_with(".parquet")).collect();
    assert_eq!(files, Vec::<String>::new());
}
