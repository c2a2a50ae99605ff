//! Breadth-first search of every state within a scope. Level by level, so a counterexample is as short as there is one, and
//! the number of states does not depend on the machine.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hash, Hasher},
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use crate::{
    Model,
    invariants::{self, Invariant},
    state::{Goals, State},
    steps::Action,
};

/// What a search found.
pub struct Outcome {
    /// Different states.
    pub states: usize,
    /// Steps from one to another, among them those to known states.
    pub steps: usize,
    /// Longest of the shortest ways to a state; with a violation, the way to it.
    pub depth: usize,
    /// What happened in some run.
    pub goals: Goals,
    /// The invariant that does not hold, and the way there.
    pub violation: Option<(Invariant, Vec<Action>)>,
    /// Every state within the scope was seen.
    pub complete: bool,
    /// Time it took.
    pub elapsed: Duration,
}

/// From a state's fingerprint to the one before it and the action between.
type Seen = HashMap<u64, (u64, Action), BuildHasherDefault<Identity>>;

/// Fingerprints are hashes already.
#[derive(Default)]
struct Identity(u64);

impl Hasher for Identity {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("only fingerprints are hashed");
    }

    fn write_u64(&mut self, fingerprint: u64) {
        self.0 = fingerprint;
    }
}

const SHARDS: usize = 64;
const CHUNK: usize = 64;

fn fingerprint(state: &State) -> u64 {
    let mut hasher = Fold(0x243f_6a88_85a3_08d3);
    state.hash(&mut hasher);
    hasher.finish()
}

/// A state is hundreds of small numbers, each written on its own: folded multiplication takes them one by one, and collides for
/// one pair of states in 2^64.
struct Fold(u64);

impl Fold {
    fn fold(&mut self, word: u64) {
        let product = u128::from(self.0 ^ word ^ 0xa409_3822_299f_31d0) * 0x9e37_79b9_7f4a_7c15;
        self.0 = (product >> 64) as u64 ^ product as u64;
    }
}

impl Hasher for Fold {
    fn finish(&self) -> u64 {
        let mut last = Self(self.0);
        last.fold(0x1319_8a2e_0370_7344);
        last.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.fold(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, byte: u8) {
        self.fold(u64::from(byte));
    }

    fn write_usize(&mut self, word: usize) {
        self.fold(word as u64);
    }

    fn write_isize(&mut self, word: isize) {
        self.fold(word as u64);
    }
}

/// Explores all that `model` can do, or until a violation, or `limit` states.
pub fn explore(model: &Model, limit: usize) -> Outcome {
    let started = Instant::now();
    let seen: Vec<Mutex<Seen>> = (0..SHARDS).map(|_| Mutex::default()).collect();
    let shard = |fingerprint: u64| &seen[(fingerprint >> 32) as usize % SHARDS];
    let initial = model.initial();
    let root = fingerprint(&initial);
    shard(root).lock().unwrap().insert(root, (root, Action::Start));
    let violation: Mutex<Option<(Invariant, u64)>> =
        Mutex::new(invariants::check(&initial).map(|broken| (broken, root)));
    let (states, steps) = (AtomicUsize::new(1), AtomicUsize::new(0));
    let goals = Mutex::new(Goals::default());
    let stop = AtomicBool::new(violation.lock().unwrap().is_some());
    let (mut level, mut depth) = (vec![initial], 0);
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());

    while !level.is_empty() && !stop.load(Ordering::Relaxed) && states.load(Ordering::Relaxed) < limit {
        let next = AtomicUsize::new(0);
        let worker = || {
            let (mut found, mut reached, mut successors) = (Vec::new(), Goals::default(), Vec::new());
            loop {
                let from = next.fetch_add(CHUNK, Ordering::Relaxed);
                if from >= level.len() || stop.load(Ordering::Relaxed) {
                    break;
                }
                for state in &level[from..level.len().min(from + CHUNK)] {
                    let parent = fingerprint(state);
                    model.successors(state, &mut successors, &mut reached);
                    steps.fetch_add(successors.len(), Ordering::Relaxed);
                    for (action, successor) in successors.drain(..) {
                        let child = fingerprint(&successor);
                        let mut seen = shard(child).lock().unwrap();
                        if seen.contains_key(&child) {
                            continue;
                        }
                        seen.insert(child, (parent, action));
                        drop(seen);
                        states.fetch_add(1, Ordering::Relaxed);
                        if let Some(broken) = invariants::check(&successor) {
                            violation.lock().unwrap().get_or_insert((broken, child));
                            stop.store(true, Ordering::Relaxed);
                        }
                        found.push(successor);
                    }
                }
            }
            *goals.lock().unwrap() |= reached;
            found
        };
        level = std::thread::scope(|scope| {
            let workers: Vec<_> = (1..threads).map(|_| scope.spawn(worker)).collect();
            let mut found = worker();
            for worker in workers {
                found.extend(worker.join().expect("a worker does not panic"));
            }
            found
        });
        depth += usize::from(!level.is_empty());
    }

    let violation = violation.into_inner().unwrap().map(|(broken, mut at)| {
        let mut way = Vec::new();
        while at != root {
            let (before, action) = shard(at).lock().unwrap()[&at];
            way.push(action);
            at = before;
        }
        way.reverse();
        (broken, way)
    });
    Outcome {
        states: states.into_inner(),
        steps: steps.into_inner(),
        depth: violation.as_ref().map_or(depth, |(_, way)| way.len()),
        goals: goals.into_inner().unwrap(),
        complete: violation.is_none() && level.is_empty(),
        violation,
        elapsed: started.elapsed(),
    }
}
