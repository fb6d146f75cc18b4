//! The failure table of the offset chain, row by row, and what a start refuses.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use elmo_pipelines::{
    Exit,
    error::Fault as _,
    stores::Stores,
    stream::{
        TopicPartition,
        chain::{
            Chain, ChainError, Dataset, EncodedFile, FileFormat, Hint, HintCheck, OnGap, OpenFile, Published, Rejected,
            Spill, partitions, position, status,
        },
    },
};
use futures::FutureExt;
use object_store::{ObjectStoreExt, PutPayload, memory::InMemory, path::Path};

use super::{
    chain, encoded, format, identity, next_file, objects, offsets, output, process, publish, reviews, rows, spans,
    store::{Fate, Scripted},
    tiling,
};
use crate::unconditional::Unconditional;

/// The process is killed while its request hangs.
async fn killed_in_request(chain: &mut Chain, file: &EncodedFile, store: &Scripted) {
    tokio::select! {
        published = chain.publish(file) => panic!("{published:?}"),
        () = store.hangs.notified() => {}
    }
}

fn all(end: i64) -> Vec<i64> {
    (0..end).collect()
}

fn ours(published: &Published) -> (i64, u64) {
    match published {
        Published::Ours { end, retries, .. } => (*end, *retries),
        Published::Foreign { .. } => panic!("{published:?}"),
    }
}

#[tokio::test]
async fn a_crash_before_the_request_leaves_nothing() {
    let store = Scripted::new();
    let output = output(Arc::<Scripted>::clone(&store));
    store.then([Fate::Hangs { applied: false }]);
    let mut first = chain(&process(&output).await, None).await;
    let file = next_file(&first, 5).await;
    killed_in_request(&mut first, &file, &store).await;
    assert!(offsets(&store.inner).await.is_empty());

    let mut second = chain(&process(&output).await, None).await;
    assert_eq!(second.end(), 0);
    ours(&publish(&mut second, 7).await);
    assert_eq!(offsets(&store.inner).await, all(7));
}

#[tokio::test]
async fn an_object_whose_answer_was_lost_is_recognised() {
    for (fates, retries) in [
        (vec![Fate::Lost { applied: true }], 1),
        (vec![Fate::Lost { applied: false }], 1),
        (vec![Fate::Lost { applied: false }, Fate::Lost { applied: true }], 2),
        (vec![Fate::Forbidden, Fate::Lost { applied: false }, Fate::Forbidden], 3),
    ] {
        let store = Scripted::new();
        store.then(fates.clone());
        let mut chain = chain(&process(&output(Arc::<Scripted>::clone(&store))).await, None).await;
        assert_eq!(ours(&publish(&mut chain, 5).await), (5, retries), "{fates:?}");
        assert_eq!(ours(&publish(&mut chain, 9).await), (9, 0));
        let found = objects(&store.inner, "out/topic=reviews/partition=3").await;
        let expected = [
            ("00000000000000000000.parquet".to_owned(), all(5)),
            ("00000000000000000005.parquet".to_owned(), (5..9).collect()),
        ];
        assert_eq!(found, expected);
    }
}

/// The caller may give up and try again: a file is published once.
#[tokio::test]
async fn a_publication_that_was_given_up_can_be_repeated() {
    for applied in [false, true] {
        let store = Scripted::new();
        store.then([Fate::Hangs { applied }]);
        let mut chain = chain(&process(&output(Arc::<Scripted>::clone(&store))).await, None).await;
        let file = next_file(&chain, 5).await;
        killed_in_request(&mut chain, &file, &store).await;
        assert_eq!(chain.end(), 0);
        ours(&chain.publish(&file).await.unwrap());
        assert_eq!((chain.end(), offsets(&store.inner).await), (5, all(5)));
    }
}

/// The partition is revoked and assigned to the same process again, while a request of its first time is under way.
#[tokio::test]
async fn a_process_does_not_take_an_earlier_file_of_its_own_for_another() {
    let store = Scripted::new();
    store.then([Fate::Late, Fate::Delayed]);
    let process = process(&output(Arc::<Scripted>::clone(&store))).await;
    let mut first = chain(&process, None).await;
    let file = next_file(&first, 5).await;
    killed_in_request(&mut first, &file, &store).await;
    let mut second = chain(&process, None).await;
    assert_eq!(second.end(), 0);
    assert_eq!(publish(&mut second, 3).await, Published::Foreign { end: 5 });
    ours(&publish(&mut second, 8).await);
    assert_eq!(offsets(&store.inner).await, all(8));
}

/// A topic that was deleted and made again may be as long as the output.
#[tokio::test]
async fn a_topic_of_another_id_is_refused() {
    let output = output(Scripted::new());
    let open = async |number: i32, id: Option<&str>| {
        let partition = TopicPartition::new("reviews", number);
        let start = || async { Ok::<_, ChainError>(0) };
        process(&output).await.chain_of_topic(&partition, id.map(str::to_owned), start, None).await
    };
    let mut first = open(3, Some("old")).await.unwrap();
    ours(&publish(&mut first, 5).await);
    for id in [Some("old"), None] {
        assert_eq!(open(3, id).await.unwrap().end(), 5);
    }
    let refused = open(3, Some("new")).await.unwrap_err();
    assert_eq!(
        refused.to_string(),
        "reviews[3]: the id of the topic was old when the dataset was begun, and is new: it was created again"
    );
    assert_eq!(refused.exit(), Exit::Storage);
    assert!(refused.help().unwrap().contains("--generation"));
    // A chain of an older version, or whose brokers said no id, is continued.
    for id in [None, Some("new"), Some("newer")] {
        open(4, id).await.unwrap();
    }
}

#[tokio::test]
async fn a_crash_before_the_commit_costs_a_listing() {
    let store = Scripted::new();
    let output = output(Arc::<Scripted>::clone(&store));
    let mut first = chain(&process(&output).await, None).await;
    ours(&publish(&mut first, 5).await);
    let hint = first.hint().unwrap();
    ours(&publish(&mut first, 9).await);
    store.then([Fate::Hangs { applied: true }]);
    let file = next_file(&first, 12).await;
    killed_in_request(&mut first, &file, &store).await;

    let second = chain(&process(&output).await, Some(&hint)).await;
    assert_eq!((second.end(), second.found()), (12, &HintCheck::Agrees));
    assert_eq!(second.hint().map(|hint| hint.end), Some(12));
    assert_eq!(offsets(&store.inner).await, all(12));
}

#[tokio::test]
async fn a_file_that_a_killed_process_did_not_complete_is_invisible() {
    let folder = tempfile::tempdir().unwrap();
    let output = Stores::with_settings([]).locate(folder.path().join("out").to_str().unwrap()).unwrap();
    let mut first = chain(&process(&output).await, None).await;
    ours(&publish(&mut first, 5).await);
    // As a file is called until it is linked to its name, by this version and by older ones.
    let partition = folder.path().join("out/topic=reviews/partition=3");
    let left = [".00000000000000000005.parquet#1", "00000000000000000005.parquet#1"].map(|name| partition.join(name));
    left.iter().for_each(|left| std::fs::write(left, "PAR1 half").unwrap());
    let mut second = chain(&process(&output).await, None).await;
    assert_eq!(second.end(), 5);
    ours(&publish(&mut second, 9).await);
    let names = || {
        let mut names: Vec<_> = std::fs::read_dir(&partition).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let published = ["00000000000000000000.parquet", "00000000000000000005.parquet"];
    assert_eq!(
        names(),
        [".00000000000000000005.parquet#1", published[0], published[1], "00000000000000000005.parquet#1"]
    );
    // Nobody writes them any more.
    let long_ago = std::time::SystemTime::now() - Duration::from_secs(7200);
    left.iter()
        .for_each(|left| std::fs::File::options().write(true).open(left).unwrap().set_modified(long_ago).unwrap());
    process(&output).await;
    assert_eq!(names(), published);
}

/// The folder into which this test, run as a process of its own, writes until it is killed.
const WRITES_TO: &str = "ELMO_TEST_WRITES_TO";

/// Files of one message each, and of 32 MB, so that writing one takes time.
async fn write_until_killed(folder: &std::ffi::OsStr) {
    let output = Stores::with_settings([]).locate(folder.to_str().unwrap()).unwrap();
    let mut chain = chain(&process(&output).await, None).await;
    let large = FileFormat { footer: vec![("padding".into(), "x".repeat(32 << 20))], ..format() };
    loop {
        let at = chain.end();
        let mut file = OpenFile::new(chain.id(), at, &large).unwrap();
        file.write(&rows(&[at]), at + 1, &Rejected::new(), Instant::now()).await.unwrap();
        let file = file.finish(at + 1).await.unwrap();
        ours(&chain.publish(&file).await.unwrap());
    }
}

/// By SIGKILL, as soon as there is a file that is not complete, and again if it was complete by then.
#[tokio::test]
async fn a_kill_in_the_middle_of_a_write_leaves_nothing_that_is_read() {
    if let Some(folder) = std::env::var_os(WRITES_TO) {
        return write_until_killed(&folder).await;
    }
    let folder = tempfile::tempdir().unwrap();
    let partition = folder.path().join("out/topic=reviews/partition=3");
    let names = |complete: bool| -> Vec<String> {
        let Ok(listed) = std::fs::read_dir(&partition) else { return Vec::new() };
        let names = listed.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.starts_with('.') != complete).collect()
    };
    for kills in 1.. {
        let mut writer = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "chain::table::a_kill_in_the_middle_of_a_write_leaves_nothing_that_is_read"])
            .env(WRITES_TO, folder.path().join("out"))
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        while names(false).is_empty() {
            assert_eq!(writer.try_wait().unwrap(), None, "it writes until it is killed");
            std::thread::sleep(Duration::from_millis(1));
        }
        writer.kill().unwrap();
        writer.wait().unwrap();
        if !names(false).is_empty() {
            break;
        }
        assert!(kills < 100, "no kill came in the middle of a write");
    }
    let whole = names(true).len();
    let output = Stores::with_settings([]).locate(folder.path().join("out").to_str().unwrap()).unwrap();
    let mut second = chain(&process(&output).await, None).await;
    let begun = second.end();
    assert_eq!(usize::try_from(begun).unwrap(), whole, "a file of one message each");
    ours(&publish(&mut second, begun + 3).await);
    let found = status(&output, 1, &BTreeMap::new()).await.unwrap().pop().unwrap();
    assert_eq!((found.end, found.objects), (begun + 3, whole + 1));
    let store = object_store::local::LocalFileSystem::new_with_prefix(folder.path()).unwrap();
    assert_eq!(offsets(&store).await, all(begun + 3));
    assert_eq!(names(false).len(), 1, "it is swept when it is an hour old");
}

#[tokio::test]
async fn the_one_that_publishes_first_wins() {
    for zombie_first in [true, false] {
        let store = Scripted::new();
        let output = output(Arc::<Scripted>::clone(&store));
        let (mut zombie, mut owner) =
            (chain(&process(&output).await, None).await, chain(&process(&output).await, None).await);
        let (first, second) = if zombie_first { (&mut zombie, &mut owner) } else { (&mut owner, &mut zombie) };
        ours(&publish(first, 5).await);
        let mut file = OpenFile::new(second.id(), 0, &format()).unwrap();
        file.write(&rows(&all(8)), 8, &Rejected::new(), Instant::now()).await.unwrap();
        // Its next file is begun before the first is published.
        let next = encoded(second.id(), 8, &[8, 9], 10).await;
        let file = file.finish(8).await.unwrap();
        assert_eq!(second.publish(&file).await.unwrap(), Published::Foreign { end: 5 });
        assert_eq!(second.publish(&next).await.unwrap(), Published::Foreign { end: 5 });
        ours(&publish(second, 10).await);
        assert_eq!(publish(first, 6).await, Published::Foreign { end: 10 });
        assert_eq!(offsets(&store.inner).await, all(10));
        assert_eq!(tiling(spans(&store.inner, "out/topic=reviews").await, 0).problems, []);
    }
}

#[tokio::test]
async fn an_old_hint_costs_a_longer_listing_and_a_wrong_one_is_not_used() {
    let store = Scripted::new();
    let output = output(Arc::<Scripted>::clone(&store));
    let mut first = chain(&process(&output).await, None).await;
    let mut hints = Vec::new();
    for end in [5, 9, 12] {
        ours(&publish(&mut first, end).await);
        hints.push(first.hint().unwrap());
    }
    assert_eq!(hints[1], Hint { end: 9, object: "topic=reviews/partition=3/00000000000000000005.parquet".into() });
    // That of a zombie.
    let process = process(&output).await;
    for hint in &hints {
        let found = chain(&process, Some(hint)).await;
        assert_eq!((found.end(), found.found()), (12, &HintCheck::Agrees));
    }
    let object = |end, object: &str| Hint { end, object: object.to_owned() };
    let wrong = [
        // An operator reset the group: the tool writes no metadata.
        object(7, ""),
        object(1_000_000, ""),
        // The offset was changed, the object was not.
        object(8, &hints[1].object),
        // Of another partition, another topic, another generation; of another program; of a root where more was written.
        object(9, "topic=reviews/partition=4/00000000000000000005.parquet"),
        object(9, "topic=other/partition=3/00000000000000000005.parquet"),
        object(9, "generation=2/topic=reviews/partition=3/00000000000000000005.parquet"),
        object(9, "checkpoint 7"),
        object(99, "topic=reviews/partition=3/00000000000000000050.parquet"),
    ];
    for hint in wrong {
        let found = chain(&process, Some(&hint)).await;
        assert_eq!(found.end(), 12, "{hint:?}");
        assert!(matches!(found.found(), HintCheck::Disagrees(_)), "{hint:?}: {:?}", found.found());
    }
}

#[tokio::test]
async fn without_hints_the_objects_are_listed() {
    let store = Scripted::new();
    let output = output(Arc::<Scripted>::clone(&store));
    let mut first = chain(&process(&output).await, None).await;
    ours(&publish(&mut first, 5).await);
    let old_head = store.inner.get(&HEAD.into()).await.unwrap().bytes().await.unwrap();
    ours(&publish(&mut first, 9).await);
    for head in [None, Some(old_head), Some("{\"end\": 7, \"object\": \"x\"}".into()), Some("{".into())] {
        match &head {
            Some(head) => drop(store.inner.put(&HEAD.into(), PutPayload::from(head.clone())).await.unwrap()),
            None => store.inner.delete(&HEAD.into()).await.unwrap(),
        }
        let found = chain(&process(&output).await, None).await;
        assert_eq!((found.end(), found.found()), (9, &HintCheck::Absent), "{head:?}");
    }
}

const HEAD: &str = "out/_elmo/chain/reviews/3/head.json";

/// A rule of the bucket deletes what is old, and the newest object of a quiet topic too.
#[tokio::test]
async fn the_head_survives_the_objects() {
    let store = Scripted::new();
    let output = output(Arc::<Scripted>::clone(&store));
    let mut first = chain(&process(&output).await, None).await;
    ours(&publish(&mut first, 5).await);
    ours(&publish(&mut first, 9).await);
    for object in ["00000000000000000005.parquet", "00000000000000000000.parquet"] {
        let path = format!("out/topic=reviews/partition=3/{object}");
        store.inner.delete(&Path::from(path)).await.unwrap();
        let mut second = chain(&process(&output).await, first.hint().as_ref()).await;
        assert_eq!(second.end(), 9);
        assert!(matches!(second.found(), HintCheck::Disagrees(_)));
        assert_eq!(second.hint(), None);
        let _ = &mut second;
    }
}

#[tokio::test]
async fn messages_that_retention_has_deleted_are_a_gap() {
    let store = Scripted::new();
    let output = output(Arc::<Scripted>::clone(&store));
    let mut chain = chain(&process(&output).await, None).await;
    ours(&publish(&mut chain, 5).await);
    let failed = position(&reviews(), chain.end(), (8, 20), OnGap::Fail).unwrap_err();
    assert!(matches!(failed, ChainError::Gap { end: 5, low: 8, .. }));
    let position = position(&reviews(), chain.end(), (8, 20), OnGap::Skip).unwrap();
    let mut file = OpenFile::new(chain.id(), chain.end(), &format()).unwrap();
    file.gap(position.gap.unwrap());
    let rejected: Rejected = [("tombstone".to_owned(), 2)].into();
    file.write(&rows(&[8, 9, 12]), 15, &rejected, Instant::now()).await.unwrap();
    file.write(&rows(&[]), 16, &rejected, Instant::now()).await.unwrap();
    assert_eq!((file.start(), file.end(), file.rows()), (5, 16, 3));
    let file = file.finish(16).await.unwrap();
    ours(&chain.publish(&file).await.unwrap());
    let spans = spans(&store.inner, "out/topic=reviews").await;
    let last = spans.last().unwrap();
    assert_eq!((last.start, last.end, last.rows, last.gaps.len()), (5, 16, 3, 1));
    assert_eq!(last.gaps[0], 5..8);
    assert_eq!(last.rejected["tombstone"], 4);
    let check = tiling(spans, 0);
    assert_eq!((check.problems.len(), check.partitions[0].lost, check.partitions[0].rows), (0, 3, 8));
    assert_eq!(offsets(&store.inner).await, [0, 1, 2, 3, 4, 8, 9, 12]);
}

#[tokio::test]
async fn a_topic_that_was_created_again_needs_a_generation() {
    let store = Scripted::new();
    let output = output(Arc::<Scripted>::clone(&store));
    let mut old = chain(&process(&output).await, None).await;
    ours(&publish(&mut old, 9).await);
    for on_gap in [OnGap::Fail, OnGap::Skip] {
        let refused = position(&reviews(), old.end(), (0, 4), on_gap).unwrap_err();
        assert!(refused.help().unwrap().contains("--generation"));
    }
    let second = Dataset::open(&output, &identity("other model"), 2).await.unwrap();
    let mut second = chain(&second, old.hint().as_ref()).await;
    assert_eq!(second.end(), 0);
    assert!(matches!(second.found(), HintCheck::Disagrees(_)));
    ours(&publish(&mut second, 4).await);
    assert_eq!(second.hint().unwrap().object, "generation=2/topic=reviews/partition=3/00000000000000000000.parquet");
    assert_eq!(offsets(&store.inner).await, all(9));
    let found = objects(&store.inner, "out/generation=2/topic=reviews/partition=3").await;
    assert_eq!(found, [("00000000000000000000.parquet".to_owned(), all(4))]);
    assert_eq!(spans(&store.inner, "out/generation=2/topic=reviews").await[0].generation, 2);
}

#[tokio::test]
async fn another_identity_is_refused() {
    let store = Scripted::new();
    let output = output(Arc::<Scripted>::clone(&store));
    process(&output).await;
    let refused = Dataset::open(&output, &identity("other"), 1).await.unwrap_err();
    assert_eq!(refused.exit(), Exit::Usage);
    let expected = "memory://x/out was begun by a stream with other settings:\n  elmo.fingerprint: was m, now other";
    assert_eq!(refused.to_string(), expected);
}

/// The record of the dataset was replaced, or two processes began it in an output that was emptied in between.
#[tokio::test]
async fn a_chain_of_another_identity_is_refused() {
    let store = Scripted::new();
    let output = output(Arc::<Scripted>::clone(&store));
    chain(&process(&output).await, None).await;
    store.inner.delete(&"out/_elmo/stream.json".into()).await.unwrap();
    let other = Dataset::open(&output, &identity("other"), 1).await.unwrap();
    let refused = other.chain(&reviews(), || async { Ok::<_, ChainError>(0) }, None).await.unwrap_err();
    assert!(matches!(refused, ChainError::Differs { .. }), "{refused}");
}

#[tokio::test]
async fn all_begin_a_chain_at_one_offset() {
    let store = Scripted::new();
    let output = output(Arc::<Scripted>::clone(&store));
    let (first, second) = (process(&output).await, process(&output).await);
    let begin = |process: Dataset, start| async move {
        process.chain(&reviews(), || async move { Ok::<_, ChainError>(start) }, None).await.unwrap().end()
    };
    let (first, second) = tokio::join!(begin(first, 7), begin(second, 8));
    assert_eq!(first, second);
    let later = process(&output).await;
    let never = || async { panic!("the chain exists") };
    assert_eq!(later.chain::<_, ChainError>(&reviews(), never, None).await.unwrap().end(), first);
}

#[tokio::test]
async fn the_error_of_the_first_offset_is_returned() {
    let process = process(&output(Scripted::new())).await;
    let failing = || async { Err(elmo_pipelines::Error::Failed("no broker".into())) };
    let failed = process.chain(&reviews(), failing, None).await.unwrap_err();
    assert_eq!(failed.to_string(), "no broker");
}

#[tokio::test]
async fn a_store_that_lets_two_win_is_refused() {
    for checks in [false, true] {
        let store = Arc::new(Unconditional { inner: InMemory::new(), checks });
        let refused = Dataset::open(&output(store), &identity("m"), 1).await.unwrap_err();
        assert_eq!(refused.exit(), Exit::Storage);
        assert!(refused.to_string().contains("does not honour conditional writes (If-None-Match)"), "{refused}");
    }
}

#[tokio::test]
async fn an_output_of_something_else_is_refused() {
    for (file, expected) in [
        ("out/_elmo/job.json", "contains _elmo/job.json, so it belongs to a job of elmo embed"),
        ("out/part-00000.parquet", "contains part-00000.parquet, but no record of a stream"),
    ] {
        for generation in [1, 2] {
            let store = Arc::new(InMemory::new());
            store.put(&file.into(), PutPayload::from("{}")).await.unwrap();
            let refused = Dataset::open(&output(store), &identity("m"), generation).await;
            // Beside the files of a generation there may be anything but a job.
            if generation == 2 && !file.contains("job") {
                refused.unwrap();
                continue;
            }
            let refused = refused.unwrap_err();
            assert!(refused.to_string().ends_with(expected), "{refused}");
        }
    }
    let folder = tempfile::NamedTempFile::new().unwrap();
    let output = Stores::with_settings([]).locate(folder.path().join("out").to_str().unwrap()).unwrap();
    let refused = Dataset::open(&output, &identity("m"), 1).await.unwrap_err();
    assert!(matches!(refused, ChainError::NoFolder { .. }), "{refused}");
}

#[tokio::test]
async fn what_cannot_heal_is_an_error() {
    let store = Scripted::new();
    let mut chain = chain(&process(&output(Arc::<Scripted>::clone(&store))).await, None).await;
    store.then([Fate::Unsupported]);
    let file = next_file(&chain, 5).await;
    assert!(matches!(chain.publish(&file).await.unwrap_err(), ChainError::Store(_)));
    store.then([Fate::TooLarge]);
    let too_large = chain.publish(&file).await.unwrap_err();
    assert!(
        too_large.to_string().ends_with(&format!("no object of {} bytes in one request", file.bytes())),
        "{too_large}"
    );
    assert!(too_large.help().unwrap().contains("--mb-per-file"));
    // An object that no stream wrote.
    let path = "out/topic=reviews/partition=3/00000000000000000000.parquet";
    for bytes in [&b"PAR1"[..], b"", b"not Parquet at all, but long enough for a footer"] {
        store.inner.put(&path.into(), PutPayload::from(bytes.to_vec())).await.unwrap();
        let damaged = chain.publish(&file).await.unwrap_err();
        assert!(matches!(damaged, ChainError::Damaged { .. }), "{damaged}");
        assert!(damaged.to_string().contains(path), "{damaged}");
    }
}

/// Above the bound a file waits on the disk, in a file without a name: nothing is left when the process is killed.
#[tokio::test]
async fn a_large_file_waits_on_the_disk() {
    let (folder, store) = (tempfile::tempdir().unwrap(), Scripted::new());
    let process = process(&output(Arc::<Scripted>::clone(&store))).await;
    let wide: Vec<i64> = all(20_000);
    let mut files = Vec::new();
    for above in [1 << 30, 1000] {
        let spill = Spill { folder: Some(folder.path().to_path_buf()), above };
        // Row groups of 100 kB, so that bytes are written before the end.
        let mut spilling = FileFormat { spill, ..format() };
        spilling.encoding.row_group_bytes = 100_000;
        let id = Arc::clone(chain(&process, None).await.id());
        let mut file = OpenFile::new(&id, 0, &spilling).unwrap();
        // As many rows as are encoded together: the last ones keep no others in memory.
        for part in wide.chunks(4096) {
            file.write(&rows(part), part[part.len() - 1] + 1, &Rejected::new(), Instant::now()).await.unwrap();
        }
        assert!(file.bytes() > 100_000, "{}", file.bytes());
        // What is not on the disk: one row group, and the last rows.
        assert_eq!(file.memory() < 100_000, above == 1000, "{} of {}", file.memory(), file.bytes());
        files.push(file.finish(20_000).await.unwrap());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
    assert_eq!((files[0].memory(), files[1].memory()), (files[0].bytes(), 0));
    // Their footers differ in the number of the file, which is one digit.
    assert_eq!(files[0].bytes(), files[1].bytes());
    let mut chain = chain(&process, None).await;
    store.then([Fate::Lost { applied: false }, Fate::Lost { applied: true }]);
    // Each request reads it again, and has its memory counted meanwhile.
    let held = std::sync::Mutex::new(Vec::new());
    let hold = |bytes| held.lock().unwrap().push(bytes);
    ours(&chain.publish_watched(&files[1], hold, || ()).await.unwrap());
    assert_eq!(*held.lock().unwrap(), [files[1].bytes(); 3]);
    assert_eq!(offsets(&store.inner).await, wide);
    let missing = Spill { folder: Some(folder.path().join("missing")), above: 0 };
    let mut file = OpenFile::new(chain.id(), 20_000, &FileFormat { spill: missing, ..format() }).unwrap();
    file.write(&rows(&[20_000]), 20_001, &Rejected::new(), Instant::now()).await.unwrap();
    // Where the disk has no room, it stays in memory.
    let file = file.finish(20_001).await.unwrap();
    assert_eq!((file.memory(), file.bytes() > 0), (file.bytes(), true));
    ours(&chain.publish_watched(&file, |_| panic!("it is counted already"), || ()).await.unwrap());
}

/// Its rows may be lost with the thread that encoded them.
#[tokio::test]
async fn a_file_that_was_left_in_the_middle_of_a_write_is_refused() {
    let process = process(&output(Scripted::new())).await;
    let id = Arc::clone(chain(&process, None).await.id());
    let mut file = OpenFile::new(&id, 0, &format()).unwrap();
    let wide = rows(&all(100_000));
    assert!(file.write(&wide, 100_000, &Rejected::new(), Instant::now()).now_or_never().is_none());
    let error = file.write(&rows(&[7]), 100_000, &Rejected::new(), Instant::now()).await.unwrap_err();
    assert!(matches!(error, ChainError::Aborted { .. }), "{error}");
    assert!(matches!(file.finish(100_000).await, Err(ChainError::Aborted { .. })));
}

#[tokio::test]
async fn an_object_without_rows_lets_the_chain_advance() {
    let store = Scripted::new();
    let mut chain = chain(&process(&output(Arc::<Scripted>::clone(&store))).await, None).await;
    let file = encoded(chain.id(), 0, &[], 7).await;
    assert_eq!(ours(&chain.publish(&file).await.unwrap()), (7, 0));
    let found = objects(&store.inner, "out/topic=reviews/partition=3").await;
    assert_eq!(found, [("00000000000000000000.parquet".to_owned(), vec![])]);
    ours(&publish(&mut chain, 9).await);
    assert_eq!(offsets(&store.inner).await, [7, 8]);
}

#[tokio::test]
async fn the_partitions_of_a_dataset_are_known_without_its_objects() {
    let store = Scripted::new();
    let output = output(Arc::<Scripted>::clone(&store));
    assert!(matches!(partitions(&output, 1).await, Err(ChainError::NoDataset { .. })));
    let first = process(&output).await;
    let mut chain = chain(&first, None).await;
    ours(&publish(&mut chain, 5).await);
    let other = TopicPartition::new("other", 0);
    first.chain(&other, || async { Ok::<_, ChainError>(40) }, None).await.unwrap();
    let object = "out/topic=reviews/partition=3/00000000000000000000.parquet";
    store.inner.put(&object.into(), PutPayload::from_static(b"damaged")).await.unwrap();
    assert_eq!(partitions(&output, 1).await.unwrap(), [other, reviews()]);
    assert!(matches!(status(&output, 1, &BTreeMap::new()).await, Err(ChainError::Damaged { .. })));
    // What had begun when a process started: topics of which a partition has a chain, whichever it is.
    assert!(first.begun().is_empty());
    assert_eq!(*process(&output).await.begun(), ["other", "reviews"].map(Arc::from).into());
}

#[tokio::test]
async fn the_state_of_a_dataset() {
    let store = Scripted::new();
    let output = output(Arc::<Scripted>::clone(&store));
    let none = status(&output, 1, &BTreeMap::new()).await.unwrap_err();
    assert_eq!(none.to_string(), "memory://x/out: no dataset of a stream here");
    let process = process(&output).await;
    let other = TopicPartition::new("other", 0);
    process.chain(&other, || async { Ok::<_, ChainError>(40) }, None).await.unwrap();
    let mut chain = chain(&process, None).await;
    ours(&publish(&mut chain, 5).await);
    let hint = chain.hint().unwrap();
    ours(&publish(&mut chain, 9).await);
    let wrong = Hint { end: 50, object: String::new() };
    let found = status(&output, 1, &[(reviews(), hint.clone()), (other, wrong)].into()).await.unwrap();
    let ends: Vec<_> =
        found.iter().map(|p| (p.topic.as_str(), p.partition, p.start, p.end, p.objects, p.rows)).collect();
    assert_eq!(ends, [("other", 0, 40, 40, 0, 0), ("reviews", 3, 0, 9, 2, 9)]);
    assert_eq!((&found[0].newest, &found[0].head), (&None, &HintCheck::Absent));
    assert!(matches!(found[0].hint, HintCheck::Disagrees(_)));
    assert_eq!((&found[1].head, &found[1].hint), (&HintCheck::Agrees, &HintCheck::Agrees));
    let newest = found[1].newest.as_ref().unwrap();
    assert_eq!((newest.object.as_str(), newest.rows), ("topic=reviews/partition=3/00000000000000000005.parquet", 4));

    // Whatever became of the hints, the objects say where the output ends.
    let disagrees = |reason: &str| HintCheck::Disagrees(reason.to_owned());
    for (of_group, head, expected) in [
        (None, Some("{"), (HintCheck::Absent, HintCheck::Absent)),
        (None, None, (HintCheck::Absent, HintCheck::Absent)),
        (
            Some(Hint { end: 7, ..hint.clone() }),
            Some(r#"{"end": 5, "object": "topic=reviews/partition=3/00000000000000000005.parquet"}"#),
            (
                disagrees("its offset is 7, but the object ends at 5"),
                disagrees("its offset is 5, but the object ends at 9"),
            ),
        ),
        (
            Some(Hint { end: 99, object: "topic=reviews/partition=3/00000000000000000050.parquet".into() }),
            None,
            (disagrees("the object that it names does not exist"), HintCheck::Absent),
        ),
        (Some(Hint { end: 0, object: String::new() }), None, (disagrees("it names no object"), HintCheck::Absent)),
    ] {
        match head {
            Some(head) => drop(store.inner.put(&HEAD.into(), PutPayload::from(head)).await.unwrap()),
            None => drop(store.inner.delete(&HEAD.into()).await),
        }
        let hints = of_group.into_iter().map(|hint| (reviews(), hint)).collect();
        let found = status(&output, 1, &hints).await.unwrap().pop().unwrap();
        assert_eq!((found.end, found.objects, found.rows), (9, 2, 9));
        assert_eq!((found.hint, found.head), expected);
        assert_eq!(found.newest.unwrap().object, "topic=reviews/partition=3/00000000000000000005.parquet");
    }
}

/// What has begun begins as one, and keeps its offsets: the next process finds the ends of the topics further on.
#[tokio::test]
async fn all_partitions_begin_with_one_request() {
    let store = Scripted::new();
    let output = output(Arc::<Scripted>::clone(&store));
    let partitions = [("a", 0), ("a", 1), ("b", 0)].map(|(topic, number)| TopicPartition::new(topic, number));
    let starts = |offset| partitions.clone().map(|partition| (partition, offset));
    let mut first = process(&output).await;
    first.record_starts(starts(5), |_, _| panic!("nobody else records")).await.unwrap();
    let record = store.inner.get(&"out/_elmo/starts/00000000000000000001.json".into()).await.unwrap();
    assert_eq!(record.bytes().await.unwrap(), r#"{"topics":{"a":{"0":5,"1":5},"b":{"0":5}}}"#);
    let mut second = process(&output).await;
    assert_eq!(*second.begun(), ["a", "b"].map(Arc::from).into());
    // Topics that it is given later have a record of their own.
    let later = TopicPartition::new("c", 0);
    let more = starts(9).into_iter().chain([(later.clone(), 9)]);
    second.record_starts(more, |_, _| panic!("nobody else records")).await.unwrap();
    let third = process(&output).await;
    for (partition, expected) in partitions.iter().map(|partition| (partition, 5)).chain([(&later, 9)]) {
        let never = || async { panic!("its start is recorded") };
        let chain = third.chain::<_, ChainError>(partition, never, None).await.unwrap();
        assert_eq!((chain.end(), chain.is_new()), (expected, false), "{partition}");
    }
    let added = TopicPartition::new("a", 2);
    let chain = third.chain(&added, || async { Ok::<_, ChainError>(0) }, None).await.unwrap();
    assert_eq!((chain.end(), chain.is_new()), (0, true));
}

/// Both were opened before either recorded anything. By hand: the first one decides what it has; of the rest, the second one is
/// asked with the topics that have begun by then.
#[tokio::test]
async fn of_two_processes_that_begin_at_once_one_decides() {
    let output = output(Scripted::new());
    let (mut first, mut second) = (process(&output).await, process(&output).await);
    let [a, b, c] = ["a", "b", "c"].map(|topic| TopicPartition::new(topic, 0));
    first.record_starts([(a.clone(), 5)], |_, _| true).await.unwrap();
    let starts = [(a.clone(), 7), (b.clone(), 7), (c.clone(), 7)];
    let asked = |begun: &HashSet<Arc<str>>, partition: &TopicPartition| {
        assert_eq!(*begun, ["a"].map(Arc::from).into());
        *partition == b
    };
    second.record_starts(starts, asked).await.unwrap();
    for process in [second, process(&output).await] {
        for (partition, expected) in [(&a, 5), (&b, 7), (&c, 0)] {
            let chain = process.chain(partition, || async { Ok::<_, ChainError>(0) }, None).await.unwrap();
            assert_eq!(chain.end(), expected, "{partition}");
        }
    }
}

#[tokio::test]
async fn a_record_of_starts_that_cannot_be_parsed_is_an_error() {
    let store = Scripted::new();
    let output = output(Arc::<Scripted>::clone(&store));
    let mut process = process(&output).await;
    store.inner.put(&"out/_elmo/starts/00000000000000000001.json".into(), PutPayload::from("{")).await.unwrap();
    let failed = process.record_starts([(reviews(), 5)], |_, _| true).await.unwrap_err();
    assert!(matches!(failed, ChainError::Damaged { .. }), "{failed}");
    let failed = Dataset::open(&output, &identity("m"), 1).await.unwrap_err();
    assert!(matches!(failed, ChainError::Damaged { .. }), "{failed}");
}

/// The job loop runs each partition in a task of its own.
#[test]
fn the_work_of_a_partition_can_be_spawned() {
    fn spawns(_: impl Send) {}
    let _ = |process: Dataset, mut chain: Chain, mut file: OpenFile, whole: EncodedFile| {
        spawns(async move {
            let batch = rows(&[]);
            let _ = process.chain(&reviews(), || async { Ok::<_, ChainError>(0) }, None).await;
            let _ = file.write(&batch, 1, &Rejected::new(), Instant::now()).await;
            let _ = file.finish(1).await;
            let _ = chain.publish(&whole).await;
        });
    };
}
