//! A stop before the group is joined.

use std::{net::TcpListener, sync::Arc, time::Duration};

use super::world::{Constant, World};
use crate::{
    sink::Codec,
    stage::Stage,
    stores::Stores,
    stream::{
        OnError, OnGap, StreamJob, Target,
        chain::Spill,
        decode::DecodeSettings,
        rotation::Limits,
        run,
        source::{Given, Settings, Start},
    },
};

/// Less than the time for which the brokers are asked for what they have.
const LIMIT: Duration = Duration::from_secs(15);

fn job(brokers: String, output: &str) -> StreamJob {
    let given = Given { brokers, topics: vec!["t".into()], group: "g".into(), ..Given::default() };
    let limits = Limits { rows: 5, bytes: 1 << 20, max_age: Duration::from_secs(60), idle: None };
    StreamJob {
        kafka: Settings::new(given).unwrap(),
        decode: DecodeSettings::default(),
        on_error: OnError::Null,
        dead_letter_topic: None,
        start: Start::Beginning,
        on_gap: OnGap::Fail,
        target: Target::Files {
            output: Stores::with_settings([]).locate(output).unwrap(),
            generation: 1,
            limits,
            row_group_bytes: 1 << 20,
            codec: Codec::None,
            spill: Spill::default(),
        },
        once: false,
        metrics: None,
        memory_limit: 1 << 20,
        grace: Duration::from_secs(1),
    }
}

/// A broker that takes connections, and never answers. The stop comes when the model is loaded, or before.
#[test]
fn a_stop_before_the_group_is_joined_ends_at_once_whoever_does_not_answer() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("out");
    for loads in [true, false] {
        let job = job(silent.local_addr().unwrap().to_string(), output.to_str().unwrap());
        let stage: Arc<dyn Stage> = Constant::new(&World::new(1, 1));
        let loaded = tokio::sync::Notify::new();
        let load = async {
            loaded.notify_one();
            if loads { Ok(stage) } else { std::future::pending().await }
        };
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let ended = runtime.block_on(async { tokio::time::timeout(LIMIT, run(job, load, loaded.notified())).await });
        // The thread that asks the broker goes on for a while.
        runtime.shutdown_background();
        assert!(matches!(ended, Ok(Ok(ref streamed)) if streamed.complete), "{ended:?}");
        assert!(!output.exists());
    }
}
