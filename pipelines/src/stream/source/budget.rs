//! Memory of the messages that were read and are not done with.
//!
//! Every batch of messages carries a [`Permit`] for its bytes. Whoever holds the messages, or what was made of them, holds
//! the permit and resizes it. The consumer pauses a partition whose permits exceed its share, and all partitions while all
//! permits exceed the limit.

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc, Weak,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use parking_lot::Mutex;

use crate::stream::TopicPartition;

/// One partition may hold an eighth of the limit, or its fair share if that is more. So a slow partition cannot pause
/// the others, and a fast one among hundreds is not limited to a hundredth.
const MAX_SHARES: usize = 8;

/// A limit in bytes for the messages of all partitions. Clones share it.
#[derive(Clone)]
pub struct Budget(Arc<Inner>);

struct Inner {
    limit: usize,
    used: AtomicUsize,
    peak: AtomicUsize,
    /// Weak, so that an account ends with the last permit and the last assignment that use it. A partition that returns
    /// while permits of its former epoch are held continues its account.
    accounts: Mutex<HashMap<TopicPartition, Weak<Account>>>,
}

/// Bytes of one partition.
#[derive(Debug, Default)]
pub(super) struct Account(AtomicUsize);

impl Account {
    pub(super) fn used(&self) -> usize {
        self.0.load(Relaxed)
    }
}

impl Budget {
    /// A budget of `limit` bytes.
    pub fn new(limit: usize) -> Self {
        let (used, peak) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Self(Arc::new(Inner { limit, used, peak, accounts: Mutex::default() }))
    }

    /// The limit. Reading stops when it is reached, so that one round of reading may exceed it.
    pub fn limit(&self) -> usize {
        self.0.limit
    }

    /// Bytes in use.
    pub fn used(&self) -> usize {
        self.0.used.load(Relaxed)
    }

    /// The most bytes that were in use at once.
    pub fn peak(&self) -> usize {
        self.0.peak.load(Relaxed)
    }

    /// Bytes in use by a partition. A job whose open files hold most of the memory closes those of the largest
    /// partition, because nothing is read until memory is released.
    pub fn used_by(&self, partition: &TopicPartition) -> usize {
        self.0.accounts.lock().get(partition).and_then(Weak::upgrade).map_or(0, |account| account.used())
    }

    /// A permit of `bytes`, granted even above the limit: the bytes exist already.
    pub fn permit(&self, partition: &TopicPartition, bytes: usize) -> Permit {
        self.charge(self.account(partition), bytes)
    }

    pub(super) fn charge(&self, account: Arc<Account>, bytes: usize) -> Permit {
        let mut permit = Permit { budget: self.clone(), account, bytes: 0 };
        permit.resize(bytes);
        permit
    }

    pub(super) fn account(&self, partition: &TopicPartition) -> Arc<Account> {
        let mut accounts = self.0.accounts.lock();
        if let Some(account) = accounts.get(partition).and_then(Weak::upgrade) {
            return account;
        }
        accounts.retain(|_, account| account.strong_count() > 0);
        let account = Arc::new(Account::default());
        accounts.insert(partition.clone(), Arc::downgrade(&account));
        account
    }

    /// Bytes above which one of `partitions` partitions is paused.
    pub(super) fn share(&self, partitions: usize) -> usize {
        self.0.limit / partitions.clamp(1, MAX_SHARES)
    }

    /// Whether a partition is to be paused. A paused one resumes at half its share, and when a quarter of the limit is
    /// free: each pause makes librdkafka drop what it has fetched ahead.
    pub(super) fn exceeded(&self, account: &Account, partitions: usize, paused: bool) -> bool {
        let (share, limit) = (self.share(partitions), self.0.limit);
        match paused {
            false => account.used() >= share || self.used() >= limit,
            true => account.used() > share / 2 || self.used() > limit / 4 * 3,
        }
    }
}

impl fmt::Debug for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Budget").field("limit", &self.limit()).field("used", &self.used()).finish()
    }
}

/// Bytes taken from a [`Budget`], returned when dropped.
#[derive(Debug)]
pub struct Permit {
    budget: Budget,
    account: Arc<Account>,
    bytes: usize,
}

impl Permit {
    /// Its bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Takes more bytes, or returns some.
    pub fn resize(&mut self, bytes: usize) {
        let (inner, before) = (&self.budget.0, self.bytes);
        if bytes >= before {
            let more = bytes - before;
            self.account.0.fetch_add(more, Relaxed);
            let used = inner.used.fetch_add(more, Relaxed) + more;
            inner.peak.fetch_max(used, Relaxed);
        } else {
            self.account.0.fetch_sub(before - bytes, Relaxed);
            inner.used.fetch_sub(before - bytes, Relaxed);
        }
        self.bytes = bytes;
    }

    /// Adds the bytes of `other`, which must be of the same partition.
    pub fn merge(&mut self, mut other: Self) {
        debug_assert!(Arc::ptr_eq(&self.account, &other.account), "permits of two partitions");
        // The sum in use does not change, so neither does the peak.
        self.bytes += std::mem::take(&mut other.bytes);
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.resize(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn partition(number: i32) -> TopicPartition {
        TopicPartition::new("t", number)
    }

    #[test]
    fn permits_add_up_and_are_returned() {
        let budget = Budget::new(100);
        let mut a = budget.permit(&partition(0), 30);
        let b = budget.permit(&partition(0), 10);
        let c = budget.permit(&partition(1), 80);
        assert_eq!((budget.used(), budget.used_by(&partition(0)), budget.used_by(&partition(1))), (120, 40, 80));
        a.resize(5);
        a.merge(b);
        assert_eq!((a.bytes(), budget.used(), budget.used_by(&partition(0))), (15, 95, 15));
        drop((a, c));
        assert_eq!((budget.used(), budget.peak(), budget.used_by(&partition(0))), (0, 120, 0));
    }

    #[test]
    fn an_account_outlives_an_assignment_whose_permits_are_held() {
        let budget = Budget::new(100);
        let first = budget.account(&partition(0));
        let permit = budget.charge(Arc::clone(&first), 7);
        drop(first);
        assert_eq!(budget.account(&partition(0)).used(), 7);
        drop(permit);
        assert_eq!(budget.account(&partition(0)).used(), 0);
    }

    #[test]
    fn a_partition_pauses_at_its_share_and_resumes_at_half_of_it() {
        let budget = Budget::new(800);
        let account = budget.account(&partition(0));
        let mut permit = budget.charge(Arc::clone(&account), 399);
        assert!(!budget.exceeded(&account, 2, false));
        permit.resize(400);
        assert!(budget.exceeded(&account, 2, false));
        permit.resize(201);
        assert!(budget.exceeded(&account, 2, true));
        permit.resize(200);
        assert!(!budget.exceeded(&account, 2, true));
        // Of a hundred partitions, each may hold an eighth.
        assert_eq!((budget.share(1), budget.share(100)), (800, 100));
    }

    #[test]
    fn all_pause_at_the_limit() {
        let budget = Budget::new(800);
        let idle = budget.account(&partition(1));
        let mut permit = budget.permit(&partition(0), 800);
        assert!(budget.exceeded(&idle, 2, false));
        permit.resize(601);
        assert!(!budget.exceeded(&idle, 2, false) && budget.exceeded(&idle, 2, true));
        permit.resize(600);
        assert!(!budget.exceeded(&idle, 2, true));
    }
}
