//! A client that drives the whole system: closed loop or open loop, latencies, and what to check afterwards.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use hdrhistogram::Histogram;
use rand::{SeedableRng, distr::Distribution as _, rngs::SmallRng};
use rand_distr::Exp1;
use serde::Serialize;
use underpass_client::engine::{Completion, Engine, Kind, Operand, Outcome, Refused, Request};
use underpass_protocol::wire::Status;

use crate::{
    history::{Log, Record, Result as Recorded},
    process::check_interrupt,
    workload::{Operation, Workload, value, value_number},
};

/// How requests come.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Arrival {
    /// As many clients as this, each of which asks again as soon as it has an answer.
    Closed(usize),
    /// This many a second, independently of answers, at random moments (a Poisson process).
    Open(f64),
}

/// What one client shall do.
#[derive(Clone, Copy, Debug)]
pub struct Task {
    /// What is asked for.
    pub workload: Workload,
    /// How requests come.
    pub arrival: Arrival,
    /// How long they come.
    pub length: Duration,
    /// How long they come before anything is counted.
    pub warmup: Duration,
    /// How long one may take.
    pub deadline: Duration,
    /// Number of this client and task: distinct tasks ask for other things and write other values.
    pub stream: u64,
}

/// What one or several clients saw.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Latencies of reads, in nanoseconds.
    pub reads: Histogram<u64>,
    /// Latencies of writes, in nanoseconds.
    pub writes: Histogram<u64>,
    /// Requests without an answer before their deadline.
    pub unanswered: u64,
    /// Requests that were refused for good.
    pub failed: u64,
    /// Reads that found nothing.
    pub missing: u64,
    /// Datagrams sent beyond one for each request.
    pub resent: u64,
    /// Rejects received.
    pub rejects: u64,
    /// Seconds over which answers were counted.
    pub seconds: f64,
}

impl Default for Seen {
    fn default() -> Self {
        Self {
            reads: histogram(),
            writes: histogram(),
            unanswered: 0,
            failed: 0,
            missing: 0,
            resent: 0,
            rejects: 0,
            seconds: 0.0,
        }
    }
}

/// From 1 ns to a minute, to three digits.
pub fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("the bounds are in order")
}

impl Seen {
    /// Requests that were answered.
    pub fn answered(&self) -> u64 {
        self.reads.len() + self.writes.len()
    }

    /// Requests answered in a second.
    pub fn rate(&self) -> f64 {
        self.answered() as f64 / self.seconds
    }

    /// Adds what another client saw at the same time.
    ///
    /// # Panics
    /// Never: all histograms have the same bounds.
    pub fn merge(&mut self, other: &Self) {
        self.reads.add(&other.reads).expect("same bounds");
        self.writes.add(&other.writes).expect("same bounds");
        self.unanswered += other.unanswered;
        self.failed += other.failed;
        self.missing += other.missing;
        self.resent += other.resent;
        self.rejects += other.rejects;
        self.seconds = self.seconds.max(other.seconds);
    }
}

struct Pending {
    operation: Operation,
    /// When it was meant to be sent.
    intended_ns: u64,
    value: u64,
    counted: bool,
}

/// A client at its task.
struct Driver<'a> {
    engine: &'a mut Engine,
    task: Task,
    log: Option<&'a mut Log>,
    pending: Vec<Option<Pending>>,
    free: Vec<usize>,
    seen: Seen,
    values: u64,
    key: Vec<u8>,
    value: Vec<u8>,
}

/// Performs a task. `progress` counts answers as they come, for display.
///
/// # Errors
/// The engine's, a value that no client wrote, an interrupt.
pub fn perform(engine: &mut Engine, task: Task, log: Option<&mut Log>, progress: &AtomicU64) -> Result<Seen> {
    let mut driver = Driver::new(engine, task, log);
    let mut operations = task.workload.operations(task.stream);
    let mut moments = SmallRng::seed_from_u64(task.workload.seed.wrapping_add(task.stream << 8));
    let mut gap_ns = |rate: f64| {
        let gap: f64 = Exp1.sample(&mut moments);
        gap / rate * 1e9
    };

    let start_ns = driver.engine.now();
    let count_from_ns = start_ns + nanoseconds(task.warmup);
    let end_ns = count_from_ns + nanoseconds(task.length);
    // In fractions of a nanosecond, so that no rate is rounded.
    let mut next_ns = start_ns as f64;
    let mut due: Option<Operation> = None;
    let mut done = Vec::new();
    loop {
        let now = driver.engine.now();
        if now >= end_ns {
            break;
        }
        let (mut budget, mut wait_ns) = match task.arrival {
            Arrival::Closed(clients) => (clients.saturating_sub(driver.in_flight()), end_ns - now),
            Arrival::Open(_) => (usize::MAX, end_ns - now),
        };
        while budget > 0 {
            let intended_ns = match task.arrival {
                Arrival::Closed(_) => now,
                Arrival::Open(_) if next_ns as u64 > now => {
                    wait_ns = wait_ns.min(next_ns as u64 - now);
                    break;
                }
                Arrival::Open(_) => next_ns as u64,
            };
            let operation = due.take().unwrap_or_else(|| operations.next_operation());
            if !driver.submit(operation, intended_ns, intended_ns >= count_from_ns)? {
                // All sessions are busy: it waits, and its waiting counts.
                due = Some(operation);
                break;
            }
            budget -= 1;
            if let Arrival::Open(rate) = task.arrival {
                next_ns += gap_ns(rate);
            }
        }
        let count = driver.poll(Duration::from_nanos(wait_ns.min(50_000_000)), &mut done)?;
        progress.fetch_add(count, Ordering::Relaxed);
        check_interrupt()?;
    }
    driver.finish(&mut done, progress)?;
    driver.seen.seconds = task.length.as_secs_f64();
    Ok(driver.seen)
}

/// Writes each of these items once, sending again what fails, as fast as answers come.
///
/// # Errors
/// As [`perform`]; and when the store is full, or some item cannot be written within a minute of its turn.
pub fn load(
    engine: &mut Engine,
    task: Task,
    items: impl Iterator<Item = u64>,
    log: Option<&mut Log>,
    progress: &AtomicU64,
) -> Result<Seen> {
    let Arrival::Closed(clients) = task.arrival else { bail!("items are loaded in a closed loop") };
    let mut driver = Driver::new(engine, task, log);
    let mut items = items.fuse();
    let (mut again, mut done) = (Vec::new(), Vec::new());
    let mut failures = 0u64;
    let start_ns = driver.engine.now();
    loop {
        let now = driver.engine.now();
        while driver.in_flight() < clients {
            let Some(item) = again.pop().or_else(|| items.next()) else { break };
            if !driver.submit(Operation { item, write: true }, now, true)? {
                again.push(item);
                break;
            }
        }
        if driver.in_flight() == 0 {
            break;
        }
        driver.engine.poll(Duration::from_millis(50), &mut done).context("a client failed")?;
        for completion in done.drain(..) {
            let (operation, written) = driver.take(&completion)?;
            if written {
                progress.fetch_add(1, Ordering::Relaxed);
            } else {
                failures += 1;
                ensure!(
                    failures < 10_000,
                    "loading fails again and again, the last time with {:?}",
                    completion.outcome
                );
                again.push(operation.item);
            }
        }
        check_interrupt()?;
    }
    driver.seen.seconds = (driver.engine.now() - start_ns) as f64 / 1e9;
    Ok(driver.seen)
}

fn nanoseconds(length: Duration) -> u64 {
    length.as_nanos() as u64
}

impl<'a> Driver<'a> {
    fn new(engine: &'a mut Engine, task: Task, log: Option<&'a mut Log>) -> Self {
        Self {
            engine,
            task,
            log,
            pending: Vec::new(),
            free: Vec::new(),
            seen: Seen::default(),
            // Above the numbers of all other tasks, and below the sign bit.
            values: (task.stream + 1) << 40,
            key: Vec::new(),
            value: Vec::new(),
        }
    }

    fn in_flight(&self) -> usize {
        self.pending.len() - self.free.len()
    }

    /// False when no session is free.
    fn submit(&mut self, operation: Operation, intended_ns: u64, counted: bool) -> Result<bool> {
        let workload = &self.task.workload;
        crate::workload::key_into(operation.item, workload.key_size, &mut self.key);
        let request = if operation.write {
            value(self.values, workload.value_size, &mut self.value);
            let operand = Operand { ttl_ms: None, expected: 0, delta: 0, data: &self.value };
            Request::Write { kind: Kind::Put, key: &self.key, operand }
        } else {
            Request::Read { key: &self.key }
        };
        let slot = self.free.pop().unwrap_or_else(|| {
            self.pending.push(None);
            self.pending.len() - 1
        });
        let deadline_ns = self.engine.now() + nanoseconds(self.task.deadline);
        match self.engine.submit(request, slot as u64, deadline_ns) {
            Ok(()) => {
                self.pending[slot] = Some(Pending { operation, intended_ns, value: self.values, counted });
                self.values += u64::from(operation.write);
                Ok(true)
            }
            Err(Refused::Full) => {
                self.free.push(slot);
                Ok(false)
            }
            Err(Refused::Invalid(invalid)) => Err(invalid.into()),
        }
    }

    fn poll(&mut self, timeout: Duration, done: &mut Vec<Completion>) -> Result<u64> {
        self.engine.poll(timeout, done).context("a client failed")?;
        let count = done.len() as u64;
        for completion in done.drain(..) {
            self.take(&completion)?;
        }
        Ok(count)
    }

    /// Waits for what is under way.
    fn finish(&mut self, done: &mut Vec<Completion>, progress: &AtomicU64) -> Result<()> {
        while self.in_flight() > 0 {
            progress.fetch_add(self.poll(Duration::from_millis(50), done)?, Ordering::Relaxed);
            check_interrupt()?;
        }
        Ok(())
    }

    /// Books a completion; whether it is a write that was executed.
    fn take(&mut self, completion: &Completion) -> Result<(Operation, bool)> {
        let slot = completion.tag as usize;
        let pending = self.pending.get_mut(slot).and_then(Option::take).context("an answer to no request")?;
        self.free.push(slot);
        let Pending { operation, intended_ns, value, counted } = pending;
        let mut number = value;
        let (recorded, cas) = match &completion.outcome {
            Outcome::Read(Some(item)) => {
                number = value_number(&item.value)
                    .filter(|_| item.value.len() == self.task.workload.value_size)
                    .with_context(|| format!("item {} has a value that no client wrote: {item:?}", operation.item))?;
                (Recorded::Ok, item.cas)
            }
            Outcome::Read(None) => (Recorded::NotFound, 0),
            Outcome::Written { status: Status::Ok, seq, .. } => (Recorded::Ok, *seq),
            Outcome::Written { status, .. } => bail!("a PUT was answered with {status}"),
            Outcome::Failed(_) => (Recorded::Failed, 0),
            Outcome::Unknown(_) | Outcome::TimedOut { .. } => (Recorded::Unknown, 0),
        };
        if let Some(log) = &mut self.log {
            log.push(Record {
                client: self.task.stream as u32,
                write: operation.write,
                result: recorded,
                item: operation.item,
                value: number,
                call_ns: completion.submitted_ns,
                return_ns: completion.done_ns,
                cas,
            });
        }
        if counted {
            let seen = &mut self.seen;
            let latency_ns = completion.done_ns.saturating_sub(intended_ns).max(1);
            match recorded {
                Recorded::Failed => seen.failed += 1,
                Recorded::Unknown => seen.unanswered += 1,
                Recorded::Ok | Recorded::NotFound => {
                    seen.missing += u64::from(recorded == Recorded::NotFound);
                    let of_kind = if operation.write { &mut seen.writes } else { &mut seen.reads };
                    of_kind.saturating_record(latency_ns);
                }
            }
            seen.resent += u64::from(completion.sends.saturating_sub(1));
            seen.rejects += u64::from(completion.rejects);
        }
        Ok((operation, operation.write && recorded == Recorded::Ok))
    }
}
