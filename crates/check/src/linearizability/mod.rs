//! Linearizability of recorded histories, key by key.
//!
//! An item is an atomic object with versions: each write that changes its content gives it a new cas, and these grow in
//! the order in which the writes take effect. A history is linearizable if every operation can be given a moment between
//! its call and its return (any moment after the call, or none, if its outcome is unknown) such that, done one at a time
//! in that order, each has the outcome it was told, including values, cas and sequence numbers. Keys are independent, so
//! each is decided by itself; `search` says how.

mod explain;
mod model;
mod search;

use std::{
    fmt,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

pub use explain::Excerpt;
pub use model::Store;
use model::{Interner, Op, State};
use search::{Search, Stuck, Verdict as Found, bind};

use crate::history::{Operation, Outcome, Request, Text};

/// Violations that are explained; further ones are only counted.
const EXPLAINED_MAX: usize = 10;

/// How to check.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Steps that may be tried for one key before its verdict is undecided. A million take about a second.
    pub budget: u64,
    /// Keys checked at a time.
    pub threads: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { budget: 10_000_000, threads: std::thread::available_parallelism().map_or(1, usize::from) }
    }
}

/// Whether a history is linearizable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// There is an order that explains every key.
    Linearizable,
    /// There is none for some key.
    Violation,
    /// The budget ended before every key was decided, and no violation was found.
    Undecided,
}

/// A key whose search did not end within its budget.
#[derive(Clone, Debug)]
pub struct Undecided {
    /// The key.
    pub key: Text,
    /// Operations on it.
    pub operations: usize,
    /// Those before this one, in the order of calls, are explained.
    pub reached: usize,
}

/// What a check found.
#[derive(Debug)]
pub struct Report {
    /// Operations in the history.
    pub operations: usize,
    /// Keys they touch.
    pub keys: usize,
    /// Operations without an answer.
    pub unknown: usize,
    /// Operations that definitely had no effect.
    pub failed: usize,
    /// Keys that are not linearizable.
    pub violating_keys: usize,
    /// Why, for the first of these.
    pub violations: Vec<Excerpt>,
    /// Keys that were not decided.
    pub undecided: Vec<Undecided>,
    /// How long the check took.
    pub elapsed: Duration,
}

impl Report {
    /// The verdict on the whole history.
    pub fn verdict(&self) -> Verdict {
        if self.violating_keys > 0 {
            Verdict::Violation
        } else if self.undecided.is_empty() {
            Verdict::Linearizable
        } else {
            Verdict::Undecided
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for violation in &self.violations {
            writeln!(f, "{violation}")?;
        }
        if self.violating_keys > self.violations.len() {
            writeln!(
                f,
                "... and {} more keys that are not linearizable\n",
                self.violating_keys - self.violations.len()
            )?;
        }
        for Undecided { key, operations, reached } in self.undecided.iter().take(EXPLAINED_MAX) {
            writeln!(
                f,
                "UNDECIDED: key {}: after {reached} of {operations} operations there were too many possible orders to \
                 try (raise --budget)\n",
                key.excerpt()
            )?;
        }
        let undecided = self.undecided.len();
        writeln!(
            f,
            "{} operations on {} keys ({} without an answer, {} failed) checked in {:.2} s",
            self.operations,
            self.keys,
            self.unknown,
            self.failed,
            self.elapsed.as_secs_f64()
        )?;
        match self.verdict() {
            Verdict::Linearizable => write!(f, "linearizable: one order of operations explains every answer"),
            Verdict::Violation => {
                write!(f, "NOT LINEARIZABLE: no order explains the answers on {} keys", self.violating_keys)
            }
            Verdict::Undecided => write!(f, "UNDECIDED: no violation found, but {undecided} keys could not be decided"),
        }
    }
}

/// Collects a history, in memory, and checks it.
///
/// ```
/// use underpass_check::{
///     history::{Operation, Outcome, Request},
///     linearizability::{Checker, Options, Verdict},
/// };
///
/// let mut checker = Checker::new();
/// let mut put = Operation::call(1, Request::Put, "k", 0);
/// put.value = Some("a".into());
/// put.finish(Outcome::Ok, 10);
/// checker.add(&put);
/// let mut get = Operation::call(2, Request::Get, "k", 20);
/// get.finish(Outcome::NotFound, 30);
/// checker.add(&get);
/// let report = checker.check(&Options::default());
/// assert_eq!(report.verdict(), Verdict::Violation);
/// println!("{report}");
/// ```
#[derive(Debug)]
pub struct Checker {
    store: Store,
    keys: Interner,
    values: Interner,
    ops: Vec<Op>,
}

impl Default for Checker {
    fn default() -> Self {
        Self::new()
    }
}

impl Checker {
    /// An empty history, of a store that keeps what it has.
    pub fn new() -> Self {
        Self::of(Store::default())
    }

    /// An empty history of a store of this kind.
    pub fn of(store: Store) -> Self {
        Self { store, keys: Interner::new(), values: Interner::new(), ops: Vec::new() }
    }

    /// Adds an operation; the order of adding does not matter. It must satisfy [`Operation::validate`], as all that come
    /// out of [`crate::history::read`] do.
    ///
    /// # Panics
    /// If it does not.
    pub fn add(&mut self, operation: &Operation) {
        if let Err(error) = operation.validate() {
            panic!("{operation:?}: {error}");
        }
        self.ops.push(Op::new(operation, &mut self.keys, &mut self.values));
    }

    /// Decides.
    pub fn check(&self, options: &Options) -> Report {
        let start = Instant::now();
        let by_key = self.by_key();
        // Long keys first: a thread that takes one last would keep the others waiting.
        let mut order: Vec<usize> = (0..self.keys.len()).collect();
        order.sort_by_key(|&key| std::cmp::Reverse(by_key.range(key).len()));
        let next = AtomicUsize::new(0);
        let outcome = Mutex::new((Vec::new(), Vec::new()));
        std::thread::scope(|scope| {
            for _ in 0..options.threads.max(1) {
                scope.spawn(|| {
                    let mut ops = Vec::new();
                    while let Some(&key) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
                        ops.clear();
                        ops.extend(by_key.order[by_key.range(key)].iter().map(|&i| self.ops[i as usize]));
                        ops.sort_by_key(|op| (op.call, op.ret));
                        let mut matter: Vec<Op> = ops.iter().filter(|op| matters(op)).copied().collect();
                        bind(&mut matter, &self.values);
                        let found = Search::new(&matter, &self.values, self.store, options.budget).run(State::EMPTY);
                        let lock = || outcome.lock().unwrap_or_else(PoisonError::into_inner);
                        match found {
                            Found::Linearizable => {}
                            Found::Undecided(reached) => lock().1.push(Undecided {
                                key: Text(self.keys.bytes(key as u32).to_vec()),
                                operations: ops.len(),
                                reached,
                            }),
                            Found::Violation(stuck) => lock().0.push((key, stuck)),
                        }
                    }
                });
            }
        });
        let (mut violations, mut undecided) = outcome.into_inner().unwrap_or_else(PoisonError::into_inner);
        // The shortest history is the easiest to understand.
        violations.sort_by_key(|(key, stuck): &(usize, Stuck)| (stuck.at, *key));
        undecided.sort_by(|a, b| a.key.cmp(&b.key));
        let explained = violations.iter().take(EXPLAINED_MAX).map(|(key, stuck)| {
            let mut ops: Vec<Op> = by_key.order[by_key.range(*key)].iter().map(|&i| self.ops[i as usize]).collect();
            ops.sort_by_key(|op| (op.call, op.ret));
            explain::explain(&ops, stuck, self.store, &self.keys, &self.values)
        });
        Report {
            operations: self.ops.len(),
            keys: self.keys.len(),
            unknown: self.ops.iter().filter(|op| op.outcome == Outcome::Unknown).count(),
            failed: self.ops.iter().filter(|op| op.outcome == Outcome::Failed).count(),
            violating_keys: violations.len(),
            violations: explained.collect(),
            undecided,
            elapsed: start.elapsed(),
        }
    }

    fn by_key(&self) -> ByKey {
        let mut starts = vec![0; self.keys.len() + 1];
        for op in &self.ops {
            starts[op.key as usize + 1] += 1;
        }
        for key in 0..self.keys.len() {
            starts[key + 1] += starts[key];
        }
        let mut next = starts.clone();
        let mut order = vec![0; self.ops.len()];
        for (i, op) in self.ops.iter().enumerate() {
            order[next[op.key as usize]] = i as u32;
            next[op.key as usize] += 1;
        }
        ByKey { starts, order }
    }
}

/// Indices of operations, grouped by key.
struct ByKey {
    starts: Vec<usize>,
    order: Vec<u32>,
}

impl ByKey {
    fn range(&self, key: usize) -> std::ops::Range<usize> {
        self.starts[key]..self.starts[key + 1]
    }
}

/// Whether an operation can say anything about the order: not if it had no effect and saw nothing.
fn matters(op: &Op) -> bool {
    op.outcome != Outcome::Failed && !(op.request == Request::Get && op.is_unknown())
}
