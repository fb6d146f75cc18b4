//! Pauses keep memory bounded.

use super::*;

const LIMIT_BYTES: usize = 256 << 10;

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_job_keeps_memory_flat_and_gets_all_messages_in_order() {
    let cluster = Cluster::new(&[("t", 3)]);
    // Six times the limit.
    for number in 0..3 {
        cluster.produce_padded("t", number, 0..500, 1000);
    }
    let budget = Budget::new(LIMIT_BYTES);
    let mut member = cluster.join_with(&["t"], &[NEW], budget.clone()).await;
    member.hold = Some(Vec::new());
    let end = Instant::now() + LIMIT;
    let mut paused = 0;
    while member.count() < 1500 {
        assert!(Instant::now() < end, "{:?}", member.counts());
        member.during(Duration::from_millis(100)).await;
        paused = paused.max(member.source.counters().paused);
        // The job is done with what it has.
        member.hold = Some(Vec::new());
    }
    assert_eq!(paused, 3);
    // A round of reading ends at an eighth of the limit, and with it the message that exceeded that.
    assert!(budget.peak() <= LIMIT_BYTES / 8 * 9 + 2048, "{} bytes", budget.peak());
    assert!(budget.peak() >= LIMIT_BYTES / 2, "{} bytes: nothing was tested", budget.peak());
    for number in 0..3 {
        assert_eq!(member.seen[&partition("t", number)], (0..500).collect::<Vec<_>>());
    }
    assert_eq!(budget.used(), 0);
    member.source.stop(LIMIT).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_that_is_held_does_not_stop_the_others() {
    let cluster = Cluster::new(&[("t", 2)]);
    for number in 0..2 {
        cluster.produce_padded("t", number, 0..400, 1000);
    }
    let budget = Budget::new(LIMIT_BYTES);
    let mut member = cluster.join_with(&["t"], &[NEW], budget.clone()).await;
    member.until("both partitions", |m| m.owned.len() == 2).await;
    // The job holds all that it gets of partition 0, and of partition 1 nothing.
    let (held, other) = (partition("t", 0), partition("t", 1));
    let mut permits = Vec::new();
    let end = Instant::now() + LIMIT;
    while member.seen.get(&other).map_or(0, Vec::len) < 400 {
        assert!(Instant::now() < end, "{:?}", member.counts());
        match timeout(Duration::from_millis(20), member.events.recv()).await {
            Ok(Some(Event::Messages(mut batch))) => {
                if batch.messages.source == held {
                    permits.push(std::mem::replace(&mut batch.permit, budget.permit(&held, 0)));
                }
                member.read(batch);
            }
            Ok(Some(event)) => member.handle(event),
            _ => {}
        }
    }
    let share = LIMIT_BYTES / 2;
    assert!(budget.used_by(&held) <= share + LIMIT_BYTES / 8 + 2048, "{} bytes", budget.used_by(&held));
    assert!(member.seen[&held].len() < 400);
    drop(permits);
    member.until("the rest", |m| m.count() == 800).await;
    assert_eq!(member.seen[&held], (0..400).collect::<Vec<_>>());
    member.source.stop(LIMIT).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_job_pauses_and_resumes() {
    let cluster = Cluster::new(&[("t", 2)]);
    let mut member = cluster.join(&["t"], &[NEW]).await;
    member.until("both partitions", |m| m.owned.len() == 2).await;
    member.source.pause_all(true);
    member.until("the pause", |m| m.source.counters().paused == 2).await;
    (0..2).for_each(|number| cluster.produce("t", number, 0..10));
    member.during(Duration::from_millis(800)).await;
    assert_eq!(member.count(), 0);
    member.source.pause(&partition("t", 0), true);
    member.source.pause_all(false);
    member.until("one partition", |m| m.count() == 10).await;
    member.during(Duration::from_millis(300)).await;
    assert_eq!(member.seen.keys().collect::<Vec<_>>(), [&partition("t", 1)]);
    member.source.pause(&partition("t", 0), false);
    member.until("the other", |m| m.count() == 20).await;
    member.source.stop(LIMIT).await;
}
