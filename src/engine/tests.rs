//! Lanes whose devices fail.

#![allow(clippy::unwrap_used)]

use std::{
    collections::HashSet,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    faults::{Faults, Hook},
    job::{Answer, Job, lock},
    lane::Lane,
    shared::Shared,
    *,
};
use crate::{
    model::{BiLm, DeviceError, DeviceName, StartState},
    tiny,
};

/// Every sentence starts from zeros.
#[derive(Debug)]
struct Zeros;

impl StartStates for Zeros {
    fn state(&self, model: &BiLm, _warm: bool) -> Result<StartState, DeviceError> {
        model.zero_state()
    }
}

fn model() -> BiLm {
    let options = tiny::options();
    BiLm::new(&options, &tiny::weights(&options), DeviceName::Cpu, Precision::F32).unwrap()
}

fn settings() -> EmbedderSettings {
    EmbedderSettings { batch_tokens: Some(64), ..EmbedderSettings::default() }
}

/// An engine of so many lanes with these faults.
fn engine(lanes: usize, hook: impl Hook + 'static) -> Embedder {
    engine_with(lanes, &settings(), hook)
}

fn engine_with(lanes: usize, settings: &EmbedderSettings, hook: impl Hook + 'static) -> Embedder {
    let model = model();
    let models: Vec<BiLm> = (0..lanes).map(|_| model.share()).collect();
    let mut shared = Shared::new(&models, settings, Box::new(Zeros));
    shared.queue.faults = Faults(Some(Arc::new(hook)));
    Embedder::run(shared, models).unwrap()
}

struct Healthy;

impl Hook for Healthy {}

/// A lane that keeps words on its device, as one of a GPU does, in `bytes`.
fn engine_with_device_words(bytes: usize) -> Embedder {
    let options = tiny::options();
    let weights = tiny::weights(&options);
    let model = BiLm::with_torch_operations(&options, &weights, DeviceName::Cpu, Precision::F32).unwrap();
    let models = vec![model];
    let mut shared = Shared::new(&models, &settings(), Box::new(Zeros));
    (shared.device_cache, shared.all_on_device) = (bytes, true);
    Embedder::run(shared, models).unwrap()
}

/// Vectors have 32 numbers, so that a table of 1 KiB has 8 rows: fewer than a batch has words, and begins anew all the time.
#[test]
fn words_on_the_device_change_no_vector() {
    let largest = |bytes: usize| -> (Vec<Vec<f32>>, EmbedderMetrics) {
        let embedder = engine_with_device_words(bytes);
        let mut all = Vec::new();
        for n in [1, 40, 3, 200, 200] {
            all.extend(embed(&embedder, n).into_iter().map(|answer| match answer.unwrap() {
                Vectors::Tokens(values) => values,
                Vectors::Pooled(_) => panic!("the recipe asks for tokens"),
            }));
        }
        (all, embedder.metrics())
    };
    let (expected, without) = largest(0);
    assert_eq!(without.cache_hits, 0);
    for bytes in [1 << 10, 8 << 10, 1 << 20] {
        let (found, metrics) = largest(bytes);
        assert!(found == expected, "{bytes} bytes");
        assert_eq!(metrics.tokens, without.tokens);
        assert_eq!(metrics.cache_hits + metrics.cache_misses, metrics.tokens);
    }
    let (_, all_kept) = largest(1 << 20);
    // 204 words: those of the longest request, each computed once.
    assert_eq!((all_kept.words_computed, all_kept.cache_hits > all_kept.tokens / 2), (204, true));
    // The passes over memory of the CPU have other sums.
    let on_host = engine(1, Healthy);
    for (n, sentence) in
        [1, 40, 3, 200, 200].into_iter().flat_map(|n| embed(&on_host, n)).zip(&expected).map(|(a, b)| (b, a))
    {
        let Vectors::Tokens(values) = sentence.unwrap() else { panic!("the recipe asks for tokens") };
        assert!(values.iter().zip(n).all(|(a, b)| (a - b).abs() < 1e-5));
    }
}

/// Expected: by hand. A product of a word's input, `[P] x [P, 4D]`, is computed once for each distinct word and direction.
#[test]
fn operations_of_products_that_tokens_share_count_once() {
    let embedder = engine_with(1, &EmbedderSettings::default(), Healthy);
    let distinct: HashSet<String> = sentences(200).iter().flat_map(|s| s.words.iter().map(str::to_owned)).collect();
    embed(&embedder, 200).into_iter().for_each(|answer| drop(answer.unwrap()));
    let (metrics, model, lstm) = (embedder.metrics(), model(), tiny::options().lstm);
    let shared = 2.0 * (metrics.tokens as usize - distinct.len()) as f64;
    let saved = shared * 2.0 * (lstm.projection_dim * 4 * lstm.dim) as f64;
    let all = model.flop_per_token() * metrics.tokens as f64 + model.flop_of_words(distinct.iter().map(String::as_str));
    assert_eq!((metrics.batches, metrics.words_computed), (1, distinct.len() as u64));
    assert!((metrics.gflop * 1e9 - (all - saved)).abs() < 1.0 && saved > 0.1 * all, "{metrics:?}");
}

fn recipe() -> Arc<Recipe> {
    let output = Output::Combined(vec![(2, 1.0)]);
    Arc::new(Recipe { warm: false, boundaries: false, output, pooling: None })
}

fn sentence(n: usize) -> Sentence {
    let mut words = Words::default();
    (0..1 + n % 5).for_each(|i| words.push(&format!("word{}", n + i)));
    Sentence { keep: 0..words.len(), words }
}

fn sentences(n: usize) -> Vec<Sentence> {
    (0..n).map(sentence).collect()
}

fn submit(embedder: &Embedder, sentences: Vec<Sentence>) -> Result<Ticket, EngineError> {
    block_on(embedder.submit(sentences, &recipe()))
}

fn embed(embedder: &Embedder, n: usize) -> Vec<Result<Vectors, EngineError>> {
    block_on(submit(embedder, sentences(n)).unwrap()).0
}

/// Fails instead of hanging.
fn within_a_minute(work: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel();
    let worker = thread::spawn(move || {
        work();
        let _ = done.send(());
    });
    let ended = ended.recv_timeout(Duration::from_secs(60));
    assert_ne!(ended, Err(mpsc::RecvTimeoutError::Timeout), "a caller waits for ever");
    if let Err(panic) = worker.join() {
        std::panic::resume_unwind(panic);
    }
}

/// A condition that a thread can wait for.
#[derive(Default)]
struct Event {
    happened: Mutex<bool>,
    changed: Condvar,
}

impl Event {
    fn set(&self) {
        *lock(&self.happened) = true;
        self.changed.notify_all();
    }

    fn wait(&self) {
        drop(self.changed.wait_while(lock(&self.happened), |happened| !*happened).unwrap());
    }
}

fn broken() -> DeviceError {
    DeviceError::Torch { message: "injected: the device is lost".to_owned() }
}

/// Lane 0 fails for good. Lane 1 begins after that, so that lane 0 has taken a batch in every run.
#[derive(Default)]
struct FirstLaneFails {
    failed: Event,
    batches: [AtomicUsize; 2],
}

impl Hook for Arc<FirstLaneFails> {
    fn on_batch(&self, lane: usize) -> Result<(), DeviceError> {
        self.batches[lane].fetch_add(1, Ordering::SeqCst);
        match lane {
            0 => {
                self.failed.set();
                Err(broken())
            }
            _ => {
                self.failed.wait();
                Ok(())
            }
        }
    }

    fn on_check(&self, lane: usize) -> Result<(), DeviceError> {
        if lane == 0 { Err(broken()) } else { Ok(()) }
    }
}

#[test]
fn a_device_that_fails_for_good_leaves_its_sentences_to_the_others() {
    within_a_minute(|| {
        let expected: Vec<Vectors> = embed(&engine(1, Healthy), 300).into_iter().map(Result::unwrap).collect();
        let faults = Arc::new(FirstLaneFails::default());
        let embedder = engine(2, Arc::clone(&faults));
        for _ in 0..3 {
            let found: Vec<Vectors> = embed(&embedder, 300).into_iter().map(Result::unwrap).collect();
            assert!(found == expected);
        }
        assert_eq!(faults.batches[0].load(Ordering::SeqCst), 1, "the lane has retired");
        assert_eq!(embedder.metrics().lanes_retired, 1);
    });
}

/// Every device fails for good, once a request is waiting behind the first one.
struct AllFail(Arc<Event>);

impl Hook for AllFail {
    fn on_batch(&self, _lane: usize) -> Result<(), DeviceError> {
        self.0.wait();
        Err(broken())
    }

    fn on_check(&self, _lane: usize) -> Result<(), DeviceError> {
        Err(broken())
    }
}

#[test]
fn callers_are_told_when_no_device_is_left() {
    within_a_minute(|| {
        let begin = Arc::new(Event::default());
        // The second request does not fit the queue beside the first.
        let embedder = engine_with(2, &EmbedderSettings { queue_tokens: 1, ..settings() }, AllFail(Arc::clone(&begin)));
        let first = submit(&embedder, sentences(300)).unwrap();
        thread::scope(|scope| {
            let second = scope.spawn(|| submit(&embedder, sentences(3)));
            begin.set();
            let errors: Vec<EngineError> = block_on(first).0.into_iter().map(Result::unwrap_err).collect();
            let no_device = |error: &&EngineError| matches!(error, EngineError::NoDeviceLeft { .. });
            let device = |error: &&EngineError| matches!(error, EngineError::Device(_));
            assert_eq!(errors.iter().filter(|e| no_device(e) || device(e)).count(), 300);
            assert!(errors.iter().any(|error| no_device(&error)));
            // Refused, or accepted before the last device failed and then answered with an error.
            match second.join().unwrap() {
                Err(error) => assert!(no_device(&&error)),
                Ok(ticket) => assert!(block_on(ticket).0.iter().all(Result::is_err)),
            }
        });
        let error = submit(&embedder, sentences(3)).unwrap_err().to_string();
        assert_eq!(error, "no device is left: the last one failed with: libtorch: injected: the device is lost");
        assert_eq!(embedder.metrics().lanes_retired, 2);
        assert!(submit(&embedder, sentences(3)).is_err());
        embedder.close();
        assert!(matches!(submit(&embedder, sentences(3)), Err(EngineError::Closed)));
    });
}

/// The first batch fails, and the device passes its check: the batch is to blame.
#[derive(Default)]
struct FirstBatchFails(AtomicUsize);

impl Hook for FirstBatchFails {
    fn on_batch(&self, _lane: usize) -> Result<(), DeviceError> {
        if self.0.fetch_add(1, Ordering::SeqCst) == 0 { Err(broken()) } else { Ok(()) }
    }
}

#[test]
fn a_batch_that_fails_on_a_healthy_device_is_an_error_of_its_callers_only() {
    within_a_minute(|| {
        let embedder = engine(1, FirstBatchFails::default());
        let errors: Vec<EngineError> = embed(&embedder, 1).into_iter().map(Result::unwrap_err).collect();
        assert!(matches!(errors[..], [EngineError::Device(DeviceError::Torch { .. })]), "{errors:?}");
        assert!(embed(&embedder, 300).iter().all(Result::is_ok));
        assert_eq!(embedder.metrics().lanes_retired, 0);
    });
}

/// A bug of ours in the first batch.
#[derive(Default)]
struct FirstBatchPanics(AtomicUsize);

impl Hook for FirstBatchPanics {
    fn on_batch(&self, _lane: usize) -> Result<(), DeviceError> {
        assert!(self.0.fetch_add(1, Ordering::SeqCst) > 0, "injected panic");
        Ok(())
    }
}

#[test]
fn a_batch_that_panics_is_reported_as_a_bug_and_not_as_libtorch() {
    within_a_minute(|| {
        let embedder = engine(1, FirstBatchPanics::default());
        let errors: Vec<EngineError> = embed(&embedder, 1).into_iter().map(Result::unwrap_err).collect();
        assert_eq!(errors[0].to_string(), "a device thread panicked; this is a bug in elmo");
        assert!(embed(&embedder, 30).iter().all(Result::is_ok));
    });
}

/// The first lane that takes a batch panics outside of every `catch_unwind`, while it holds the lock of the queue.
#[derive(Default)]
struct FirstTakePanics(AtomicUsize);

impl Hook for FirstTakePanics {
    fn on_take(&self) {
        assert!(self.0.fetch_add(1, Ordering::SeqCst) > 0, "injected panic");
    }
}

#[test]
fn a_lane_that_panics_leaves_no_caller_waiting() {
    within_a_minute(|| {
        let embedder = engine(1, FirstTakePanics::default());
        let errors = embed(&embedder, 300);
        assert!(errors.iter().all(|answer| matches!(answer, Err(EngineError::NoDeviceLeft { .. }))), "{errors:?}");
        assert!(submit(&embedder, sentences(1)).is_err());

        // The batch that was being taken is left to the other lane.
        let expected: Vec<Vectors> = embed(&engine(1, Healthy), 300).into_iter().map(Result::unwrap).collect();
        let embedder = engine(2, FirstTakePanics::default());
        let found: Vec<Vectors> = embed(&embedder, 300).into_iter().map(Result::unwrap).collect();
        assert!(found == expected);
    });
}

/// Fails in every way at every point, by a fixed sequence.
struct Erratic(AtomicUsize);

impl Erratic {
    /// True once in `n` calls.
    fn once_in(&self, n: usize) -> bool {
        // The finaliser of SplitMix64: neighbouring seeds give unlike sequences.
        let mut x = (self.0.fetch_add(1, Ordering::SeqCst) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)).is_multiple_of(n as u64)
    }

    fn panic_once_in(&self, n: usize) {
        if self.once_in(n) {
            // No message for each of them.
            std::panic::resume_unwind(Box::new("injected"));
        }
    }
}

impl Hook for Erratic {
    fn on_batch(&self, _lane: usize) -> Result<(), DeviceError> {
        self.panic_once_in(12);
        match (self.once_in(8), self.once_in(4)) {
            (true, _) => Err(broken()),
            (_, true) => Err(DeviceError::OutOfMemory { message: "injected".to_owned() }),
            _ => Ok(()),
        }
    }

    fn on_check(&self, _lane: usize) -> Result<(), DeviceError> {
        self.panic_once_in(6);
        if self.once_in(4) { Err(broken()) } else { Ok(()) }
    }

    fn on_take(&self) {
        self.panic_once_in(20);
    }
}

/// Callers that wait, callers that cancel, and an engine that is closed in the middle.
#[test]
fn every_caller_gets_its_vectors_or_an_error_whatever_fails() {
    within_a_minute(|| {
        let expected: Vec<Vectors> = embed(&engine(1, Healthy), 40).into_iter().map(Result::unwrap).collect();
        let (answered, refused) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let call = |embedder: &Embedder, cancels: bool| match submit(embedder, sentences(40)) {
            Ok(ticket) if cancels => drop(ticket),
            Ok(ticket) => {
                let answers = block_on(ticket).0;
                assert_eq!(answers.len(), expected.len());
                let mut pairs = answers.iter().zip(&expected);
                assert!(pairs.all(|(found, expected)| found.as_ref().map_or(true, |vectors| vectors == expected)));
                answered.fetch_add(answers.iter().flatten().count(), Ordering::SeqCst);
            }
            Err(error) => {
                assert!(matches!(error, EngineError::NoDeviceLeft { .. } | EngineError::Closed), "{error}");
                refused.fetch_add(1, Ordering::SeqCst);
            }
        };
        for seed in 0..40 {
            let settings = EmbedderSettings { queue_tokens: 100, ..settings() };
            let embedder = engine_with(3, &settings, Erratic(AtomicUsize::new(seed << 32)));
            thread::scope(|scope| {
                for caller in 0..4 {
                    let (embedder, call) = (&embedder, &call);
                    scope.spawn(move || (0..6).for_each(|round| call(embedder, (caller + round) % 5 == 0)));
                }
                if seed % 4 == 0 {
                    embedder.close();
                }
            });
        }
        let (answered, refused) = (answered.into_inner(), refused.into_inner());
        assert!(answered > 1000 && refused > 40, "{answered} sentences answered, {refused} requests refused");
    });
}

/// A sentence may be what breaks the devices that compute it.
#[test]
fn a_sentence_is_not_given_to_a_third_device_after_two_have_failed() {
    let model = model();
    let models = vec![model.share(), model.share(), model];
    let shared = Arc::new(Shared::new(&models, &settings(), Box::new(Zeros)));
    let answer = Answer::new(1);
    let queue = &shared.queue;
    let mut jobs = vec![Job::new(0, sentence(0), recipe(), &answer, 0)];
    queue.lane_ended(jobs, &broken().into());
    jobs = queue.next_jobs().unwrap();
    assert_eq!(jobs.len(), 1, "the second device gets it");
    queue.lane_ended(jobs, &broken().into());
    queue.close();
    assert!(queue.next_jobs().is_none(), "the third device does not");
    let (vectors, _) = block_on(std::future::poll_fn(|context| answer.poll(context)));
    assert!(matches!(vectors[..], [Err(EngineError::Device(_))]), "{vectors:?}");
}

/// By hand: the sentences have waited 100 s when their batch is taken, and not a second time when it is split.
#[test]
fn the_time_in_the_queue_counts_once() {
    let model = model();
    let mut shared = Shared::new(std::slice::from_ref(&model), &settings(), Box::new(Zeros));
    shared.queue.faults = Faults::default();
    let shared = Arc::new(shared);
    let answer = Answer::new(8);
    let mut jobs = Vec::new();
    for place in 0..8 {
        let mut words = Words::default();
        words.push("room-for-1");
        let sentence = Sentence { words, keep: 0..1 };
        let mut job = Job::new(place as u64, sentence, recipe(), &answer, place);
        job.queued = Instant::now().checked_sub(Duration::from_secs(100)).unwrap();
        jobs.push(job);
    }
    Lane::new(0, model, Arc::clone(&shared)).serve_jobs(jobs).unwrap_or_else(|_| panic!("the device failed"));
    let metrics = *lock(&shared.metrics);
    assert_eq!(metrics.oom_splits, 7);
    assert!((800.0..1000.0).contains(&metrics.queue_seconds), "{}", metrics.queue_seconds);
}
