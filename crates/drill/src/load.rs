//! Clients that do a little of everything all the time, and write down what they were told.

use std::{
    mem,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context, Result};
use rand::{Rng, SeedableRng, rngs::StdRng};
use underpass_check::history::{Operation, Outcome, Request as Op, Text};
use underpass_client::{Call, Client, Config, Error, Reply};
use underpass_protocol::{
    client::Request,
    wire::{Kind, Status},
};

use crate::cluster::{CLIENT, COORDINATORS, Cluster, Role, SHARD};

/// How long an operation may take before its outcome is unknown, for each client: some give up early, some wait for whatever
/// a drill does to the shard.
const DEADLINES: [Duration; 3] = [Duration::from_millis(700), Duration::from_secs(6), Duration::from_secs(6)];
/// Threads of each client: the even ones only read, so that no write keeps them waiting; the odd ones mostly write.
const THREADS: usize = 4;
/// Longest pause of a thread between two operations: so that a machine of two cores is not all load.
const GAP_US: u64 = 4000;
/// Keys of a drill on which everything happens.
const HOT: u32 = 10;
/// Keys of a drill that are touched now and then.
const MANY: u32 = 300;
/// Keys that live as long as the rack.
pub const LASTING: u32 = 32;
/// Times that each key is read at the end: replicas are chosen at random.
const LAST_READS: usize = 3;

type History = Arc<Mutex<Vec<Operation>>>;

/// Clients with their sessions, for as long as a rack lives.
pub struct Clients {
    clients: Vec<Client>,
    history: History,
}

/// Clients at work.
pub struct Load {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

/// Names of one drill's keys.
#[derive(Clone, Debug)]
pub struct Keys {
    drill: u32,
}

/// What a key of the whole rack's life begins with.
pub const LASTING_PREFIX: &str = "lasting-";

impl Keys {
    /// Of a drill by its number in the rack's life.
    pub fn of(drill: u32) -> Self {
        Self { drill }
    }

    fn hot(&self, index: u32) -> String {
        format!("{}-hot-{index}", self.drill)
    }

    fn counter(&self) -> String {
        format!("{}-counter", self.drill)
    }

    fn rare(&self, index: u32) -> String {
        format!("{}-rare-{index}", self.drill)
    }

    fn all(&self) -> Vec<String> {
        let own = (0..HOT).map(|i| self.hot(i)).chain((0..MANY).map(|i| self.rare(i))).chain([self.counter()]);
        own.chain((0..LASTING).map(lasting)).collect()
    }
}

fn lasting(index: u32) -> String {
    format!("{LASTING_PREFIX}{index}")
}

impl Clients {
    /// Opens sessions.
    ///
    /// # Errors
    /// When none can be opened.
    pub fn connect(cluster: &Cluster) -> Result<Self> {
        let coordinators =
            (0..COORDINATORS).map(|index| cluster.address(Role::Coordinator(index))).collect::<Result<Vec<_>>>()?;
        let host = cluster.host(CLIENT)?;
        let history = History::default();
        let clients = DEADLINES.iter().map(|deadline| {
            let config = Config {
                sessions: THREADS,
                deadline_ms: deadline.as_millis() as u64,
                bind: host.addr,
                ..Config::of_shard(SHARD, coordinators.clone())
            };
            let recorded = Arc::clone(&history);
            let recorder = move |call: &Call<'_>| {
                recorded.lock().unwrap_or_else(PoisonError::into_inner).push(operation(call));
            };
            host.enter(|| Client::connect_recorded(config, Box::new(recorder)))?.context("clients cannot connect")
        });
        Ok(Self { clients: clients.collect::<Result<_>>()?, history })
    }

    /// Starts all threads on the keys of one drill.
    pub fn start(&self, keys: &Keys, seed: u64) -> Load {
        let stop = Arc::new(AtomicBool::new(false));
        let mut threads = Vec::new();
        for (number, client) in self.clients.iter().enumerate() {
            for thread in 0..THREADS {
                let (client, keys, stop) = (client.clone(), keys.clone(), Arc::clone(&stop));
                let mut rng = StdRng::seed_from_u64(seed ^ ((number * THREADS + thread) as u64) << 32);
                threads.push(thread::spawn(move || {
                    while !stop.load(Relaxed) {
                        act(&client, &keys, &mut rng, thread % 2 == 0);
                        thread::sleep(Duration::from_micros(rng.random_range(0..GAP_US)));
                    }
                }));
            }
        }
        Load { stop, threads }
    }

    /// Reads all keys of a drill, and the lasting ones.
    pub fn read_all(&self, keys: &Keys) {
        let names = keys.all();
        thread::scope(|scope| {
            for part in names.chunks(names.len().div_ceil(8)) {
                // The one that waits long.
                let client = self.clients.last().expect("there are clients");
                scope.spawn(move || {
                    for name in part {
                        for _ in 0..LAST_READS {
                            drop(client.get(name.as_bytes()));
                        }
                    }
                });
            }
        });
    }

    /// Takes what has been recorded.
    pub fn take_history(&self) -> Vec<Operation> {
        mem::take(&mut *self.history.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Load {
    /// Stops all threads, each after its operation.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.stop.store(true, Relaxed);
        for thread in self.threads.drain(..) {
            if let Err(panic) = thread.join() {
                std::panic::resume_unwind(panic);
            }
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        if !thread::panicking() {
            self.end();
        }
    }
}

fn act(client: &Client, keys: &Keys, rng: &mut StdRng, only_reads: bool) {
    let value = format!("{:x}", rng.random::<u64>());
    let value = value.as_bytes();
    let kind = rng.random_range(if only_reads { 0..60 } else { 40..100 });
    let key = match rng.random_range(0..10) {
        0 => {
            let key = lasting(rng.random_range(0..LASTING));
            // Outcomes are in the history.
            return match kind < 60 {
                true => drop(client.get(key.as_bytes())),
                false => drop(client.put(key.as_bytes(), value)),
            };
        }
        1..=4 => keys.rare(rng.random_range(0..MANY)),
        _ => keys.hot(rng.random_range(0..HOT)),
    };
    let key = key.as_bytes();
    match kind {
        0..60 => drop(client.get(key)),
        60..80 => drop(client.put(key, value)),
        80..83 => drop(client.delete(key)),
        83..86 => drop(client.add(key, value)),
        86..89 => drop(client.replace(key, value)),
        89..94 => {
            if let Ok(Some(item)) = client.get(key) {
                drop(client.cas(key, value, item.cas));
            }
        }
        94..96 => drop(client.append(key, b"+")),
        96..97 => drop(client.prepend(key, b"-")),
        _ => drop(client.incr(keys.counter().as_bytes(), rng.random_range(1..10))),
    }
}

/// A call in the words of `docs/history.md`.
pub fn operation(call: &Call<'_>) -> Operation {
    let (op, key) = match call.request {
        Request::Read { key } => (Op::Get, key),
        Request::Write { kind, key, .. } => {
            let op = match kind {
                Kind::Put => Op::Put,
                Kind::Delete => Op::Delete,
                Kind::Add => Op::Add,
                Kind::Replace => Op::Replace,
                Kind::Cas => Op::Cas,
                Kind::Incr => Op::Incr,
                Kind::Append => Op::Append,
                Kind::Prepend => Op::Prepend,
                Kind::Touch => Op::Touch,
            };
            (op, key)
        }
    };
    let text = |bytes: &[u8]| Text(bytes.to_vec());
    let mut operation = Operation::call(0, op, text(key), call.call_ns);
    if let Request::Write { kind, operand, .. } = call.request {
        operation.ttl_ms = operand.ttl_ms;
        match kind {
            Kind::Delete | Kind::Touch => {}
            Kind::Incr => operation.delta = Some(operand.delta),
            _ => operation.value = Some(text(operand.data)),
        }
        operation.expected = (kind == Kind::Cas).then_some(operand.expected);
    }
    match call.result {
        Ok(Reply::Read(None)) => operation.finish(Outcome::NotFound, call.return_ns),
        Ok(Reply::Read(Some(item))) => {
            operation.value = Some(text(&item.value));
            operation.cas = Some(item.cas);
            operation.finish(Outcome::Ok, call.return_ns);
        }
        Ok(Reply::Written { status, seq, number }) => {
            operation.cas = Some(*seq);
            operation.number = *number;
            let outcome = match status {
                Status::Ok => Outcome::Ok,
                Status::NotFound => Outcome::NotFound,
                Status::Exists => Outcome::Exists,
                Status::NotStored => Outcome::NotStored,
                Status::NotANumber => Outcome::NotANumber,
                Status::Overflow => Outcome::Overflow,
                Status::TooLarge => Outcome::TooLarge,
                Status::Aborted => Outcome::Failed,
            };
            operation.finish(outcome, call.return_ns);
        }
        Err(Error::Unknown { .. } | Error::TimedOut { .. }) => {}
        Err(_) => operation.finish(Outcome::Failed, call.return_ns),
    }
    operation
}
