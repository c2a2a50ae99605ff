//! The `socket` data path: the pure coordinator over batched UDP sockets.
//!
//! One thread for each CPU, pinned, with a socket of its own in one SO_REUSEPORT group. The tables are behind one mutex
//! that a thread takes once for each batch: parsing comes before, sending after. Nothing is allocated for a packet.

use std::{
    io,
    net::{SocketAddrV4, UdpSocket},
    ops::Range,
    os::fd::AsFd,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context, Result, anyhow, bail};
use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    unistd::Pid,
};
use socket2::{Domain, Protocol, Socket, Type};
use tracing::warn;
use underpass_abi::abi::{UP_COUNT_CLONE, UP_SHARD_SLOTS, up_config, up_session};
use underpass_protocol::{
    agent::{Settlement, Tables, TablesError},
    coordinator::{Action, CloseOutcome, Coordinator, Scan, Settings, scan, slot},
    wire::{Endpoint, HEADER_LEN, Header, MEMBERS_MAX, Packet, SessionId, WireError},
};

use crate::{
    batch::{BATCH, Batch},
    clock::now_ms,
    datapath::{ControlPort, ControlSender, DataPath},
};

/// Bytes of socket buffers: a few milliseconds of a full 10 Gbit/s link. Waiting for an unresolved neighbour takes
/// 200 KiB of the sending one, so that a dead replica does not stop the rest.
const BUFFER_BYTES: usize = 8 << 20;
/// How soon a thread without packets sees that it should stop.
const WAKE: Duration = Duration::from_millis(50);
/// Records looked at by a scan for each time it holds the tables.
const SCAN_CHUNK: usize = 512;

struct Shared {
    coordinator: Mutex<Coordinator>,
    stop: AtomicBool,
    clones: AtomicU64,
    unsent: AtomicU64,
    control_lost: AtomicU64,
}

impl Shared {
    fn tables(&self) -> MutexGuard<'_, Coordinator> {
        self.coordinator.lock().expect("a data thread panicked while it held the tables")
    }
}

/// The `socket` data path.
pub struct SocketPath {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    control: Option<ControlPort>,
    listen: Endpoint,
    session_count: u32,
}

impl SocketPath {
    /// Binds `listen` and starts a thread on each of `cpus`; if empty, on each that this thread may run on.
    ///
    /// # Errors
    /// The address is taken or not this host's; a CPU does not exist.
    pub fn start(listen: Endpoint, cpus: &[usize], settings: Settings) -> Result<Self> {
        let allowed = sched_getaffinity(Pid::from_raw(0)).context("asking for this process's CPUs")?;
        let is_allowed = |cpu: usize| cpu < CpuSet::count() && allowed.is_set(cpu).unwrap_or(false);
        let cpus =
            if cpus.is_empty() { (0..CpuSet::count()).filter(|&cpu| is_allowed(cpu)).collect() } else { cpus.to_vec() };
        if let Some(missing) = cpus.iter().find(|&&cpu| !is_allowed(cpu)) {
            bail!(
                "cpus: there is no CPU {missing}, or this process may not run on it (see `nproc` and `taskset -p $$`)"
            );
        }
        let (first, listen) = bind_first(listen)?;
        let mut sockets = vec![first];
        for _ in 1..cpus.len() {
            sockets.push(bind_next(listen)?);
        }
        let sockets: Vec<UdpSocket> = sockets.into_iter().map(UdpSocket::from).collect();
        let (sender, control) = ControlPort::shared(sockets[0].try_clone().context("cloning a socket")?)?;
        let mut path = Self {
            session_count: settings.sessions,
            shared: Arc::new(Shared {
                coordinator: Mutex::new(Coordinator::new(settings)),
                stop: AtomicBool::new(false),
                clones: AtomicU64::new(0),
                unsent: AtomicU64::new(0),
                control_lost: AtomicU64::new(0),
            }),
            threads: Vec::new(),
            control: Some(control),
            listen,
        };
        for (socket, cpu) in sockets.into_iter().zip(cpus) {
            let (shared, sender) = (path.shared.clone(), sender.clone());
            let thread = std::thread::Builder::new()
                .name(format!("coordinator-{cpu}"))
                .spawn(move || run(&shared, &socket, cpu, &sender))
                .context("starting a data thread")?;
            path.threads.push(thread);
        }
        Ok(path)
    }

    /// The first `count` session indices in pieces to look at under one lock.
    fn pieces(&self, count: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let count = count.min(self.session_count as usize);
        (0..count).step_by(SCAN_CHUNK).map(move |from| from..(from + SCAN_CHUNK).min(count))
    }

    fn join(&mut self) -> Result<()> {
        self.shared.stop.store(true, Relaxed);
        for thread in self.threads.drain(..) {
            thread.join().map_err(|_| anyhow!("a data thread panicked"))?;
        }
        Ok(())
    }
}

impl Drop for SocketPath {
    fn drop(&mut self) {
        let _ = self.join();
    }
}

/// The first socket of the group is bound without SO_REUSEPORT, so that a coordinator that is there already is noticed
/// instead of shared with.
fn bind_first(listen: Endpoint) -> Result<(Socket, Endpoint)> {
    let socket = make_socket()?;
    socket.bind(&SocketAddrV4::from(listen).into()).map_err(|e| explain_bind(e, listen))?;
    socket.set_reuse_port(true)?;
    let bound = socket.local_addr()?.as_socket_ipv4().context("an IPv4 socket has an IPv4 address")?;
    Ok((socket, bound.into()))
}

fn bind_next(listen: Endpoint) -> Result<Socket> {
    let socket = make_socket()?;
    socket.set_reuse_port(true)?;
    socket.bind(&SocketAddrV4::from(listen).into()).map_err(|e| explain_bind(e, listen))?;
    Ok(socket)
}

/// What it means that a coordinator cannot bind its address.
pub fn explain_bind(error: io::Error, listen: Endpoint) -> anyhow::Error {
    match error.raw_os_error() {
        Some(libc::EADDRINUSE) => anyhow!(
            "{listen} is in use: another coordinator or replica listens there (`ss -ulpn 'sport = :{}'` shows it). Stop it, \
             or listen elsewhere",
            listen.port
        ),
        Some(libc::EADDRNOTAVAIL) => {
            anyhow!("{} is not an address of this host (`ip addr` shows them): listen on one that is", listen.addr)
        }
        Some(libc::EACCES) => anyhow!("{listen}: ports below 1024 need root or CAP_NET_BIND_SERVICE"),
        _ => anyhow::Error::new(error).context(format!("binding {listen}")),
    }
}

fn make_socket() -> Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP)).context("making a UDP socket")?;
    force_buffers(&socket)?;
    socket.set_read_timeout(Some(WAKE))?;
    // A driver that is stuck loses packets, not the thread.
    socket.set_write_timeout(Some(Duration::from_secs(1)))?;
    Ok(socket)
}

/// Large buffers: past the system's limit with CAP_NET_ADMIN, up to it without.
fn force_buffers(socket: &Socket) -> Result<()> {
    use nix::sys::socket::{setsockopt, sockopt};
    if setsockopt(socket, sockopt::RcvBufForce, &BUFFER_BYTES).is_err() {
        socket.set_recv_buffer_size(BUFFER_BYTES)?;
    }
    if setsockopt(socket, sockopt::SndBufForce, &BUFFER_BYTES).is_err() {
        socket.set_send_buffer_size(BUFFER_BYTES)?;
    }
    Ok(())
}

/// Where the writes of a shard go: the same for a whole batch.
struct Targets {
    shard: u32,
    count: usize,
    members: [(u8, Endpoint); MEMBERS_MAX],
}

/// A data thread.
fn run(shared: &Shared, socket: &UdpSocket, cpu: usize, control: &ControlSender) {
    let mut set = CpuSet::new();
    if let Err(e) = set.set(cpu).and_then(|()| sched_setaffinity(Pid::from_raw(0), &set)) {
        warn!("a data thread runs unpinned: CPU {cpu} cannot be had: {e}");
    }
    let mut batch = Batch::new();
    let mut scratch = Scratch {
        parsed: Vec::with_capacity(BATCH),
        actions: Vec::with_capacity(BATCH),
        targets: Vec::with_capacity(UP_SHARD_SLOTS as usize),
    };
    while !shared.stop.load(Relaxed) {
        let count = match batch.receive(socket.as_fd()) {
            Ok(count) => count,
            // The time-out, a signal, or an error that an ICMP message left behind: none concerns the next datagram.
            Err(_) => continue,
        };
        decide(shared, &batch, count, &mut scratch);
        let Scratch { actions, targets, .. } = &mut scratch;
        let mut clones = 0;
        for (i, from, action) in actions.drain(..) {
            match action {
                Action::Drop(_) => {}
                Action::Control => {
                    if !control.send(from, batch.get(i).datagram) {
                        shared.control_lost.fetch_add(1, Relaxed);
                    }
                }
                Action::ToMember { to, header, .. } | Action::ToClient { to, header } => {
                    header.emit(batch.bytes(i));
                    batch.push(i, to);
                }
                Action::ToSender { header, result } => {
                    let bytes = batch.bytes(i);
                    header.emit(bytes);
                    if let Some(result) = result {
                        let value = HEADER_LEN + usize::from(header.key_len);
                        bytes[value..value + 8].copy_from_slice(&result.to_be_bytes());
                    }
                    batch.push(i, from);
                }
                Action::ToMembers { header } => {
                    header.emit(batch.bytes(i));
                    let targets =
                        targets.iter().find(|targets| targets.shard == header.shard).expect("noted by decide");
                    for &(index, to) in &targets.members[..targets.count] {
                        // Its `cnt` is the one field in which a clone differs (wire.h).
                        batch.push_clone(i, to)[CNT] = index;
                    }
                    clones += targets.count as u64;
                }
            }
        }
        let unsent = batch.send(socket.as_fd());
        shared.clones.fetch_add(clones, Relaxed);
        if unsent > 0 {
            shared.unsent.fetch_add(unsent, Relaxed);
        }
    }
}

/// Offset of `cnt` in a header.
const CNT: usize = std::mem::offset_of!(underpass_abi::wire::up_header, cnt);

/// A datagram of a batch after parsing: its sender and header.
type Parsed = Result<(Endpoint, Header), WireError>;

/// What a data thread fills anew for each batch.
struct Scratch {
    parsed: Vec<Parsed>,
    actions: Vec<(usize, Endpoint, Action)>,
    targets: Vec<Targets>,
}

/// Parses a batch, then decides about all of it under the lock, once.
fn decide(shared: &Shared, batch: &Batch, count: usize, scratch: &mut Scratch) {
    let Scratch { parsed, actions, targets } = scratch;
    parsed.clear();
    parsed.extend((0..count).map(|i| {
        let received = batch.get(i);
        // An IPv4 socket receives from IPv4 addresses alone.
        let from = received.from.filter(|_| !received.cut).ok_or(WireError::Truncated)?;
        Packet::parse(received.datagram).map(|packet| (from, packet.header))
    }));
    targets.clear();
    let mut tables = shared.tables();
    let now_ms = now_ms();
    for (i, parsed) in parsed.iter().enumerate() {
        let (from, header) = match *parsed {
            Ok(parsed) => parsed,
            Err(error) => {
                tables.refuse(error);
                continue;
            }
        };
        let (key, value) = batch.get(i).datagram[HEADER_LEN..].split_at(usize::from(header.key_len));
        let action = tables.step(now_ms, from, &Packet { header, key, value });
        if let Action::ToMembers { header } = &action
            && targets.iter().all(|targets| targets.shard != header.shard)
        {
            let mut of_shard = Targets { shard: header.shard, count: 0, members: [(0, from); MEMBERS_MAX] };
            for member in tables.must_ack(header.shard) {
                of_shard.members[of_shard.count] = member;
                of_shard.count += 1;
            }
            targets.push(of_shard);
        }
        actions.push((i, from, action));
    }
}

/// As those of the tables, under their lock. What looks at every record takes it for a piece of them at a time, so that no
/// packet waits for the whole table.
impl Tables for SocketPath {
    fn session_count(&self) -> u32 {
        self.session_count
    }

    fn configure(&mut self, config: &up_config) -> Result<(), TablesError> {
        self.shared.tables().configure(config);
        Ok(())
    }

    fn clear(&mut self, shard: u32) -> Result<(), TablesError> {
        self.shared.tables().clear(shard)
    }

    fn config(&self, shard: u32) -> Option<up_config> {
        self.shared.tables().config(shard).copied()
    }

    fn extend_lease(&mut self, shard: u32, until_ms: u64) -> Result<(), TablesError> {
        self.shared.tables().extend_lease(shard, until_ms)
    }

    fn scan(&mut self, shard: u32, sessions: usize) -> Result<Scan, TablesError> {
        // The clock first: a write that starts after its record was passed by gets a higher seq.
        let clock = self.shared.tables().shards()[slot(shard)].clock;
        let mut total = Scan { stable: clock, unresolved: 0 };
        for piece in self.pieces(sessions) {
            let piece = scan(clock, shard, &self.shared.tables().sessions()[piece]);
            total.stable = total.stable.min(piece.stable);
            total.unresolved += piece.unresolved;
        }
        Ok(total)
    }

    fn records(&mut self, count: usize, visit: &mut dyn FnMut(u16, &up_session)) -> Result<(), TablesError> {
        for piece in self.pieces(count) {
            let tables = self.shared.tables();
            piece.for_each(|index| visit(index as u16, &tables.sessions()[index]));
        }
        Ok(())
    }

    fn record(&mut self, index: u16) -> Result<up_session, TablesError> {
        self.shared.tables().record(index)
    }

    fn load(&mut self, index: u16, record: &up_session) -> Result<bool, TablesError> {
        self.shared.tables().load(index, record)
    }

    fn close(&mut self, session: SessionId, used_before_ms: Option<u64>) -> Result<CloseOutcome, TablesError> {
        self.shared.tables().close(session, used_before_ms)
    }

    fn forget_acks(&mut self, shard: u32, index: u8) -> Result<(), TablesError> {
        self.shared.tables().forget_acks(shard, index)
    }

    fn settle(
        &mut self,
        session: SessionId,
        request: u64,
        seq: u64,
        settlement: Settlement,
    ) -> Result<bool, TablesError> {
        self.shared.tables().settle(session, request, seq, settlement)
    }
}

impl DataPath for SocketPath {
    fn name(&self) -> &'static str {
        "socket"
    }

    fn mode(&self) -> String {
        match self.threads.len() {
            1 => "1 thread".to_owned(),
            n => format!("{n} threads"),
        }
    }

    fn listen(&self) -> Endpoint {
        self.listen
    }

    fn counters(&mut self) -> Result<Vec<u64>> {
        let mut counters = self.shared.tables().counters().to_vec();
        counters[UP_COUNT_CLONE as usize] += self.shared.clones.load(Relaxed);
        Ok(counters)
    }

    fn extra_counters(&mut self) -> Vec<(&'static str, u64)> {
        vec![
            ("socket_unsent", self.shared.unsent.load(Relaxed)),
            ("socket_control_lost", self.shared.control_lost.load(Relaxed)),
        ]
    }

    fn take_control(&mut self) -> ControlPort {
        self.control.take().expect("called once")
    }

    fn stop(mut self: Box<Self>) -> Result<()> {
        self.join()
    }
}
