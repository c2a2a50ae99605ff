//! What a replica tells about itself.

use std::{
    collections::BTreeMap,
    fmt,
    net::SocketAddrV4,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use serde::{Deserialize, Serialize};
use underpass_protocol::{
    control::Copying,
    replica::{Count, Replica},
};

/// The counters of one thread: written by that thread alone, read by anybody.
#[repr(align(128))]
pub struct Counters {
    counts: [AtomicU64; Count::LEN],
    batches: AtomicU64,
    send_refused: AtomicU64,
}

/// Adds to a counter that no other thread writes: cheaper than an atomic addition, as no value can be lost.
fn add(counter: &AtomicU64, by: u64) {
    counter.store(counter.load(Relaxed) + by, Relaxed);
}

impl Counters {
    pub fn new() -> Self {
        Self {
            counts: [const { AtomicU64::new(0) }; Count::LEN],
            batches: AtomicU64::new(0),
            send_refused: AtomicU64::new(0),
        }
    }

    pub fn count(&self, count: Count) {
        add(&self.counts[count.index()], 1);
    }

    pub fn batches(&self) -> u64 {
        self.batches.load(Relaxed)
    }

    /// The kernel did not take a datagram.
    pub fn refused(&self) {
        add(&self.send_refused, 1);
    }

    pub fn batch(&self, send_refused: u64) {
        add(&self.batches, 1);
        if send_refused > 0 {
            add(&self.send_refused, send_refused);
        }
    }
}

/// Counters and contents of a replica.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// Address that it serves at.
    pub listen: SocketAddrV4,
    /// This life of the replica.
    pub incarnation: u64,
    /// Shard it serves; absent while it takes part in none.
    pub shard: Option<u32>,
    /// Epoch it takes part in; 0: none.
    pub epoch: u32,
    /// Its member index.
    pub index: Option<u8>,
    /// The epoch's coordinator.
    pub coordinator: Option<SocketAddrV4>,
    /// The epoch at which that coordinator took over; 0: none.
    pub tenure: u32,
    /// Whether it is active: it has all that is committed. Otherwise it is a learner.
    pub active: bool,
    /// Milliseconds for which it may answer reads unless its lease is renewed; 0: it may not.
    pub lease_ms: u64,
    /// How far a learner's copying is; absent: it was not told to copy.
    pub copying: Option<Copying>,
    /// Every write up to here is resolved on every member.
    pub stable: u64,
    /// Keys whose newest version is an item.
    pub items: u64,
    /// Keys with any version.
    pub keys: u64,
    /// Versions in all chains.
    pub versions: u64,
    /// Versions above `stable`.
    pub unsettled: u64,
    /// Bytes of the budget in use.
    pub used_bytes: u64,
    /// The budget in bytes.
    pub budget_bytes: u64,
    /// Threads.
    pub threads: usize,
    /// What became of datagrams, by operation and reason; every datagram is counted once. Beside them `batches` (of
    /// datagrams received at once) and `send_refused` (answers that the kernel did not take).
    pub counters: BTreeMap<String, u64>,
}

impl Stats {
    pub(crate) fn of(replica: &Replica, now_ms: u64, listen: SocketAddrV4, threads: &[Counters]) -> Self {
        let usage = replica.usage();
        let membership = replica.membership();
        let sum = |pick: &dyn Fn(&Counters) -> u64| threads.iter().map(pick).sum::<u64>();
        let mut counters: BTreeMap<_, _> = Count::all()
            .map(|(count, name)| (name, sum(&|thread| thread.counts[count.index()].load(Relaxed))))
            .collect();
        counters.insert("batches".into(), sum(&Counters::batches));
        counters.insert("send_refused".into(), sum(&|thread| thread.send_refused.load(Relaxed)));
        Self {
            listen,
            incarnation: replica.incarnation(),
            shard: membership.map(|membership| membership.shard),
            epoch: membership.map_or(0, |membership| membership.epoch),
            index: membership.map(|membership| membership.index),
            coordinator: membership.map(|membership| membership.coordinator.into()),
            tenure: membership.map_or(0, |membership| membership.tenure),
            active: membership.is_some_and(|membership| membership.active),
            lease_ms: membership.map_or(0, |membership| membership.lease_until_ms.saturating_sub(now_ms)),
            copying: replica.copying(),
            stable: replica.stable(),
            items: usage.items,
            keys: usage.keys,
            versions: usage.versions,
            unsettled: usage.unsettled,
            used_bytes: usage.used_bytes,
            budget_bytes: usage.budget_bytes,
            threads: threads.len(),
            counters,
        }
    }
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.shard, self.index, self.coordinator) {
            (Some(shard), Some(index), Some(coordinator)) => {
                let part = if self.active { "member" } else { "learner" };
                writeln!(
                    f,
                    "replica {}: shard {shard}, epoch {}, {part} {index} of coordinator {coordinator} (since epoch {})",
                    self.listen, self.epoch, self.tenure
                )?;
                match self.lease_ms {
                    0 => writeln!(f, "lease            none: it answers no reads")?,
                    ms => writeln!(f, "lease            {ms:>14} ms left")?,
                }
            }
            _ => writeln!(f, "replica {}: takes part in no shard", self.listen)?,
        }
        if let Some(Copying { donor, items, bytes, of, done, trouble }) = &self.copying {
            let donor = donor.map_or("nobody".into(), |(addr, port)| format!("{addr}:{port}"));
            let state = if *done { "done" } else { "under way" };
            writeln!(f, "copying          {items:>14} of {of} items, {bytes} bytes, from {donor}: {state}")?;
            if !trouble.is_empty() {
                writeln!(f, "copying stopped  {trouble}")?;
            }
        }
        let percent = 100.0 * self.used_bytes as f64 / self.budget_bytes as f64;
        writeln!(f, "items            {:>14}", self.items)?;
        writeln!(f, "versions         {:>14}, of these not stable {}", self.versions, self.unsettled)?;
        writeln!(f, "memory           {:>14} of {} bytes ({percent:.1} %)", self.used_bytes, self.budget_bytes)?;
        writeln!(f, "stable           {:>14}", self.stable)?;
        writeln!(f, "incarnation      {}", self.incarnation)?;
        for (name, count) in self.counters.iter().filter(|&(_, &count)| count > 0) {
            writeln!(f, "{name:<30} {count:>14}")?;
        }
        Ok(())
    }
}
