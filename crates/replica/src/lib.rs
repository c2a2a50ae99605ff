//! The replica: a versioned store behind batched UDP sockets.
//!
//! The store and all decisions are [`underpass_protocol::replica`]; here are the threads and sockets that feed it, a control
//! socket that tells its counters, and the command line.

pub mod batch;
pub mod cli;
mod cluster_key;
mod control;
mod socket;
mod stats;

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    io,
    net::{Ipv4Addr, SocketAddrV4},
    os::fd::AsFd,
    path::PathBuf,
    process,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use nix::{
    sched,
    time::{ClockId, clock_gettime},
    unistd::Pid,
};
use socket2::Socket;
use underpass_protocol::{
    control::ClusterKey,
    replica::{self as core, Action, Count, Note, Settings, Verdict},
    wire::Endpoint,
};

use self::{batch::Batch, control::Control, stats::Counters};
pub use self::{cluster_key::cluster_key, stats::Stats};

/// Independently locked parts of the store: enough that threads seldom meet.
const KEY_SHARDS: usize = 256;

/// How often what was asked of other replicas is looked after, while there is something and while there is not.
const TICK: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(20)];

/// Items copied a second by default: clients are to notice it little where replicas have little else to run on.
pub const COPY_RATE: u32 = 20_000;

/// The replica's clock, in milliseconds. It goes on while the host is suspended, so that no lease outlives that.
fn now_ms() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_BOOTTIME).expect("Linux has this clock");
    now.tv_sec() as u64 * 1000 + now.tv_nsec() as u64 / 1_000_000
}

/// How to run a replica.
#[derive(Clone, Debug)]
pub struct Options {
    /// Address to serve at; port 0: any free one.
    pub listen: SocketAddrV4,
    /// Memory for items, in MiB.
    pub memory_mib: u64,
    /// Items copied a second at most when this replica is filled from another; 0: as fast as it goes.
    pub copy_rate: u32,
    /// Threads, each with a socket of its own.
    pub threads: usize,
    /// CPUs that the threads are pinned to, in turn; none: not pinned.
    pub cpus: Vec<usize>,
    /// Microseconds to poll the device's queue before sleeping; 0: not at all.
    pub busy_poll_us: u32,
    /// Path of the control socket; `None`: none.
    pub control: Option<PathBuf>,
    /// Seals messages between agents and replicas; `None`: their network is trusted.
    pub cluster_key: Option<ClusterKey>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            listen: SocketAddrV4::new(Ipv4Addr::LOCALHOST, underpass_abi::wire::UP_PORT_DEFAULT as u16),
            memory_mib: 1024,
            copy_rate: COPY_RATE,
            threads: 1,
            cpus: Vec::new(),
            busy_poll_us: 0,
            control: None,
            cluster_key: None,
        }
    }
}

/// Why a replica does not start or run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No address.
    #[error(
        "cannot listen at {listen}: replies must come from the one address that the configuration names; \
         give it with --listen ADDR:PORT"
    )]
    Unspecified {
        /// Address given.
        listen: SocketAddrV4,
    },
    /// The address is taken.
    #[error("cannot listen at {listen}: another process does; stop it or choose another port with --listen")]
    AddressInUse {
        /// Address given.
        listen: SocketAddrV4,
    },
    /// The address is another host's.
    #[error("cannot listen at {listen}: no interface of this host has that address; `ip address` shows those it has")]
    AddressNotHere {
        /// Address given.
        listen: SocketAddrV4,
    },
    /// A port below 1024 as an ordinary user.
    #[error("no permission to listen at {listen}: choose a port above 1023, or grant CAP_NET_BIND_SERVICE")]
    Permission {
        /// Address given.
        listen: SocketAddrV4,
    },
    /// Anything else about a socket.
    #[error("cannot listen at {listen}")]
    Socket {
        /// Address given.
        listen: SocketAddrV4,
        /// What the kernel says.
        source: io::Error,
    },
    /// Busy polling refused.
    #[error("cannot busy-poll for {busy_poll_us} us: this needs CAP_NET_ADMIN; leave out --busy-poll")]
    BusyPoll {
        /// Microseconds asked for.
        busy_poll_us: u32,
        /// What the kernel says.
        source: io::Error,
    },
    /// No memory to store anything.
    #[error("a memory budget of 0 MiB stores nothing; give --memory at least 1")]
    BudgetZero,
    /// More than there is.
    #[error("a memory budget of {budget_mib} MiB is more than this host's {ram_mib} MiB; lower --memory")]
    BudgetLarge {
        /// Budget given.
        budget_mib: u64,
        /// Memory of the host.
        ram_mib: u64,
    },
    /// No threads, or too many.
    #[error("{threads} threads: give --threads 1 to 256")]
    Threads {
        /// Threads given.
        threads: usize,
    },
    /// A CPU that this process may not use.
    #[error("CPU {cpu} is not there or not allowed for this process; --cpus can be of: {allowed}")]
    Cpu {
        /// CPU given.
        cpu: usize,
        /// Those that are.
        allowed: String,
    },
    /// The control socket.
    #[error("cannot create the control socket {}: {why}; choose another path with --control", path.display())]
    Control {
        /// Its path.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// A running replica can receive no more.
    #[error("cannot receive at {listen}")]
    Receive {
        /// Address.
        listen: SocketAddrV4,
        /// What the kernel says.
        source: io::Error,
    },
    /// A cluster key that cannot be used.
    #[error("cannot use the cluster key in {}: {why}; give --cluster-key-file a file with 32 hexadecimal digits, or 16 bytes", path.display())]
    ClusterKey {
        /// Its file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// The system refuses a thread.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
}

/// What the threads share.
struct Shared {
    core: core::Replica,
    counters: Vec<Counters>,
    listen: SocketAddrV4,
    stop: AtomicBool,
    failure: Mutex<Option<Error>>,
    /// The refusal logged last: an agent asks again and again.
    refusal: Mutex<String>,
}

/// A running replica. Dropping it stops it.
pub struct Replica {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    control: Option<Control>,
}

impl Replica {
    /// Binds, and starts the threads.
    ///
    /// # Errors
    /// Whatever is wrong with the options, before anything runs.
    pub fn start(options: Options) -> Result<Self, Error> {
        check(&options)?;
        if options.cluster_key.is_none() && !options.listen.ip().is_loopback() {
            tracing::warn!(
                "no --cluster-key-file: whoever reaches {} can pass for the coordinator's agent; its network must be trusted",
                options.listen
            );
        }
        let (sockets, listen) = socket::bind(options.listen, options.threads, options.busy_poll_us)?;
        let random = RandomState::new();
        let nanoseconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        let mut hash_key = [0; 16];
        for (number, half) in hash_key.chunks_mut(8).enumerate() {
            let mut hasher = random.build_hasher();
            hasher.write_usize(number);
            half.copy_from_slice(&hasher.finish().to_le_bytes());
        }
        let settings = Settings {
            // Mixed with randomness: two replicas that start in one nanosecond on two hosts still differ.
            incarnation: random.hash_one((nanoseconds, process::id(), listen)).max(1),
            budget_bytes: options.memory_mib << 20,
            copy_rate: options.copy_rate,
            key_shards: KEY_SHARDS,
            hash_key,
            cluster_key: options.cluster_key.unwrap_or_default(),
        };
        let shared = Arc::new(Shared {
            core: core::Replica::new(settings),
            counters: (0..options.threads).map(|_| Counters::new()).collect(),
            listen,
            stop: AtomicBool::new(false),
            failure: Mutex::new(None),
            refusal: Mutex::new(String::new()),
        });
        let ticking = sockets[0].try_clone().map_err(|source| Error::Socket { listen, source })?;
        let control = match &options.control {
            Some(path) => Some(Control::start(path, Arc::clone(&shared))?),
            None => None,
        };
        let mut replica = Self { shared, threads: Vec::new(), control };
        for (number, socket) in sockets.into_iter().enumerate() {
            let shared = Arc::clone(&replica.shared);
            let cpu = (!options.cpus.is_empty()).then(|| options.cpus[number % options.cpus.len()]);
            let thread = thread::Builder::new()
                .name(format!("replica-{number}"))
                .spawn(move || serve(&shared, number, &socket, cpu))
                .map_err(Error::Thread)?;
            replica.threads.push(thread);
        }
        let shared = Arc::clone(&replica.shared);
        let thread = thread::Builder::new()
            .name("replica-tick".into())
            .spawn(move || tick(&shared, &ticking))
            .map_err(Error::Thread)?;
        replica.threads.push(thread);
        Ok(replica)
    }

    /// The address that it serves at.
    pub fn local_addr(&self) -> SocketAddrV4 {
        self.shared.listen
    }

    /// Counters and contents at this moment.
    pub fn stats(&self) -> Stats {
        self.shared.stats()
    }

    /// The state machine inside, for tests that look at what it holds.
    pub fn core(&self) -> &core::Replica {
        &self.shared.core
    }

    /// How many threads have had any work.
    pub fn busy_threads(&self) -> usize {
        self.shared.counters.iter().filter(|counters| counters.batches() > 0).count()
    }

    /// Whether a thread gave up; [`Replica::stop`] says why.
    pub fn failed(&self) -> bool {
        self.shared.stop.load(Relaxed)
    }

    /// Stops the threads and removes the control socket.
    ///
    /// # Errors
    /// What made a thread give up before.
    pub fn stop(mut self) -> Result<(), Error> {
        self.halt();
        let failure = self.shared.failure.lock().expect("nothing panics with the failure locked").take();
        failure.map_or(Ok(()), Err)
    }

    fn halt(&mut self) {
        self.shared.stop.store(true, Relaxed);
        drop(self.control.take());
        for thread in self.threads.drain(..) {
            thread.join().expect("a thread that panics aborts the process");
        }
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.halt();
    }
}

fn check(options: &Options) -> Result<(), Error> {
    if options.memory_mib == 0 {
        return Err(Error::BudgetZero);
    }
    if let Some(ram_mib) = ram_mib().filter(|&ram_mib| options.memory_mib > ram_mib) {
        return Err(Error::BudgetLarge { budget_mib: options.memory_mib, ram_mib });
    }
    if options.threads == 0 || options.threads > 256 {
        return Err(Error::Threads { threads: options.threads });
    }
    let allowed = allowed_cpus();
    if let Some(&cpu) = options.cpus.iter().find(|cpu| !allowed.contains(cpu)) {
        let allowed: Vec<_> = allowed.iter().map(usize::to_string).collect();
        return Err(Error::Cpu { cpu, allowed: allowed.join(",") });
    }
    Ok(())
}

/// The host's memory; `None` where /proc does not say.
fn ram_mib() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("MemTotal:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib >> 10)
}

fn allowed_cpus() -> Vec<usize> {
    match sched::sched_getaffinity(Pid::from_raw(0)) {
        Ok(set) => (0..sched::CpuSet::count()).filter(|&cpu| set.is_set(cpu).unwrap_or(false)).collect(),
        Err(_) => Vec::new(),
    }
}

/// Aborts when it is dropped by a panic: a replica with a thread missing, or a lock poisoned, must not limp on.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if thread::panicking() {
            process::abort();
        }
    }
}

/// One thread: receive a batch, handle it, send the answers.
fn serve(shared: &Shared, number: usize, socket: &Socket, cpu: Option<usize>) {
    let _abort = AbortOnPanic;
    if let Some(cpu) = cpu {
        let mut set = sched::CpuSet::new();
        let pinned = set.set(cpu).and_then(|()| sched::sched_setaffinity(Pid::from_raw(0), &set));
        if let Err(error) = pinned {
            tracing::warn!("thread {number} is not pinned to CPU {cpu}: {error}");
        }
    }
    let counters = &shared.counters[number];
    let mut batch = Batch::new();
    while !shared.stop.load(Relaxed) {
        let count = match batch.receive(socket.as_fd()) {
            Ok(count) => count,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => continue,
            Err(source) => {
                let mut failure = shared.failure.lock().expect("nothing panics with the failure locked");
                failure.get_or_insert(Error::Receive { listen: shared.listen, source });
                shared.stop.store(true, Relaxed);
                return;
            }
        };
        let now_ms = now_ms();
        for datagram in 0..count {
            let received = batch.datagram(datagram);
            if received.cut {
                counters.count(Count::Drop(core::Drop::TooLong));
                continue;
            }
            let (from, len) = (received.from, received.len);
            if !received.rest.is_empty() {
                let whole = [&received.buffer[..len], received.rest].concat();
                let actions = shared.core.step(now_ms, core::Event::Datagram { from, bytes: &whole });
                shared.act(actions, socket, counters);
                continue;
            }
            match shared.core.handle(now_ms, from, received.buffer, len) {
                Verdict::Dropped(reason) => counters.count(Count::Drop(reason)),
                Verdict::Answer { to, len, count } => {
                    counters.count(count);
                    batch.answer(datagram, to, len);
                }
                Verdict::Parked => {
                    counters.count(Count::Parked);
                    shared.act(shared.core.tick(now_ms), socket, counters);
                }
                Verdict::Control => {
                    let actions = shared.core.control(now_ms, from, &received.buffer[..len]);
                    shared.act(actions, socket, counters);
                }
            }
        }
        let refused = batch.flush(socket.as_fd());
        counters.batch(refused);
    }
}

/// Asks again for what other replicas did not answer.
fn tick(shared: &Shared, socket: &Socket) {
    let _abort = AbortOnPanic;
    while !shared.stop.load(Relaxed) {
        let due_ms = shared.core.due_ms();
        thread::sleep(TICK[usize::from(due_ms.is_none())]);
        for action in shared.core.tick(now_ms()) {
            // Lost, if the kernel refuses it: it is asked again.
            if let Action::Send { to, bytes } = action {
                let _ = shared.send(socket, to, &bytes);
            }
        }
    }
}

impl Shared {
    /// Does what the state machine wants done, other than answers in their request's buffer.
    fn act(&self, actions: Vec<Action>, socket: &Socket, counters: &Counters) {
        for action in actions {
            match action {
                Action::Count(count) => counters.count(count),
                Action::Note(note) => self.log(&note),
                Action::Send { to, bytes } => {
                    if self.send(socket, to, &bytes).is_err() {
                        counters.refused();
                    }
                }
            }
        }
    }

    fn send(&self, socket: &Socket, to: Endpoint, bytes: &[u8]) -> io::Result<usize> {
        socket.send_to(bytes, &SocketAddrV4::from(to).into())
    }

    fn log(&self, note: &Note) {
        let mut last = self.refusal.lock().expect("nothing panics with the refusal locked");
        match note {
            Note::Installed { .. } => {
                last.clear();
                tracing::info!("{note}");
            }
            Note::Refused { refusal, .. } if *refusal != *last => {
                last.clone_from(refusal);
                tracing::warn!("{note}");
            }
            Note::Refused { .. } => {}
            Note::Reset { .. } => tracing::warn!("{note}"),
            Note::Copying { .. } | Note::Copied { .. } => tracing::info!("{note}"),
        }
    }

    fn stats(&self) -> Stats {
        Stats::of(&self.core, now_ms(), self.listen, &self.counters)
    }
}

/// Runs a replica until SIGINT or SIGTERM.
///
/// # Errors
/// Whatever keeps it from starting or from going on.
pub fn run(options: Options) -> anyhow::Result<()> {
    cli::until_signal(options)
}
