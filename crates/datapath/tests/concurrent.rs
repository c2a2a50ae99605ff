//! The kernel program on two CPUs at once: two pinned threads play clients and replicas with packets of few keys and
//! sessions, and the agent between them, which changes members and epochs and settles writes; then every order, commit, read
//! and table is judged. docs/concurrency.md says what this cannot reach. `UNDERPASS_SEED` repeats the choices of a run (not its timing), `UNDERPASS_PACKETS` makes it longer.

mod common;

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    mem,
    sync::{
        Mutex, RwLock,
        atomic::{AtomicI64, AtomicU64, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};

use common::*;
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};
use rand::{Rng, rngs::StdRng, seq::IndexedRandom};
use underpass_abi::abi::{self, UP_BUCKET_DIRTY, UP_BUCKET_LAST_SHIFT, up_session_command};
use underpass_datapath::{
    coordinator::{CoordinatorKernel, TableSizes},
    frame,
};
use underpass_protocol::{
    coordinator::{hash, opened, scan, slot, unresolved},
    wire::{Header, Kind, Op, Operand, Packet, Reason, SessionId},
};

const SHARD: u32 = 3;
const EPOCH: u32 = 7;
/// Every member that there ever is; of the last two one takes part, or both during a change.
const MEMBERS: [u8; 4] = [0, 2, 5, 7];
const BASES: [u8; 2] = [0b0010_0101, 0b1000_0101];
const CLIENTS: u16 = 6;
const KEYS: usize = 6;
const SIZES: TableSizes = TableSizes { buckets: 2, sessions: 16 };

fn key(number: usize) -> Vec<u8> {
    format!("key number {number:05}").into_bytes()
}

/// What the threads tell each other.
enum Mail {
    /// A replica's acknowledgement is here.
    Ack { frame: Vec<u8>, seq: u64, member: u8, epoch: u32 },
    /// A client's packet is here.
    Request { frame: Vec<u8> },
    /// The client of this session has its answer.
    Reply { session: SessionId, request: u64 },
}

/// What happened, with the time before and after by a clock that both threads share.
enum Event {
    Ordered {
        session: SessionId,
        request: u64,
        seq: u64,
        key: Vec<u8>,
    },
    Acked {
        seq: u64,
        member: u8,
        epoch: u32,
    },
    Committed {
        seq: u64,
        /// By an acknowledgement, not by the agent.
        acknowledged: bool,
    },
    Aborted {
        seq: u64,
    },
    /// From a moment in here on, until a moment in the next one.
    Configured {
        epoch: u32,
        must_ack: u8,
    },
    /// An index was given away: acknowledgements of it from before count no more.
    Forgot {
        member: u8,
    },
    Answered {
        session: SessionId,
        request: u64,
        seq: u64,
    },
    Read {
        key: Vec<u8>,
        bound: u64,
    },
    /// The session was unknown.
    Refused {
        session: SessionId,
    },
    /// CLOSE told that of this session nothing above `request` was taken, or not even that one.
    Closed {
        session: SessionId,
        request: u64,
        state: u32,
    },
    Stable {
        seq: u64,
    },
}

struct Logged {
    before: u64,
    after: u64,
    event: Event,
}

struct Shared {
    kernel: CoordinatorKernel,
    steps_left: AtomicI64,
    clock: AtomicU64,
    mail: [Mutex<Vec<Mail>>; 2],
    /// Every session ever opened: its token and its client.
    sessions: RwLock<HashMap<SessionId, (u64, u8)>>,
    /// Writes whose acknowledgements are made, with the epochs for which they are.
    propagated: Mutex<HashSet<(u64, u32)>>,
    /// For each key the highest seq that a reply was seen for.
    committed: [AtomicU64; KEYS],
}

struct Client {
    index: u16,
    generation: u64,
    request: u64,
    /// The write without an answer.
    outstanding: Option<Vec<u8>>,
    /// It was rejected when it was last sent.
    rejected: bool,
}

impl Client {
    fn session(&self) -> SessionId {
        SessionId::new(self.generation, self.index)
    }
}

struct Thread<'a> {
    cpu: usize,
    rng: StdRng,
    shared: &'a Shared,
    clients: Vec<Client>,
    mail: Vec<Mail>,
    log: Vec<Logged>,
    /// The bound last seen of each key.
    bounds: [u64; KEYS],
    epoch: u32,
    read: u64,
}

fn open(shared: &Shared, session: SessionId, token: u64, client: u8) {
    shared.sessions.write().unwrap().insert(session, (token, client));
    let record = opened(0, session, SHARD, token, client_endpoint(client));
    let command = up_session_command { record, ..Default::default() };
    assert_eq!(
        shared.kernel.command(abi::UP_SESSION_OP_LOAD, session.0, command).unwrap().result,
        abi::UP_SESSION_DONE
    );
}

impl Drop for Thread<'_> {
    /// A thread that failed ends the others too.
    fn drop(&mut self) {
        self.shared.steps_left.store(0, SeqCst);
    }
}

impl Thread<'_> {
    fn run(mut self) -> Vec<Logged> {
        let mut cpus = CpuSet::new();
        cpus.set(self.cpu).unwrap();
        sched_setaffinity(Pid::from_raw(0), &cpus).expect("a CPU of its own for each thread");
        // Both go on until all steps are done, so that neither is left alone.
        while self.shared.steps_left.fetch_sub(1, SeqCst) > 0 {
            self.take_mail();
            match self.rng.random_range(0..100) {
                0..50 => self.acknowledge(),
                50..75 => self.write(),
                75..97 => self.read(),
                _ => self.close(),
            }
        }
        // What was left to be delivered is delivered by the main thread.
        self.shared.mail[self.cpu].lock().unwrap().append(&mut self.mail);
        println!("cpu {}: {} reads, {} events", self.cpu, self.read, self.log.len());
        mem::take(&mut self.log)
    }

    fn now(&self) -> u64 {
        self.shared.clock.fetch_add(1, SeqCst)
    }

    fn log(&mut self, before: u64, after: u64, event: Event) {
        self.log.push(Logged { before, after, event });
    }

    fn post(&mut self, mail: Mail) {
        let to = usize::from(self.rng.random::<bool>());
        self.shared.mail[to].lock().unwrap().push(mail);
    }

    fn take_mail(&mut self) {
        let new = mem::take(&mut *self.shared.mail[self.cpu].lock().unwrap());
        for mail in new {
            match mail {
                Mail::Reply { session, request } => self.reply(session, request),
                // Sent to both CPUs at this moment: the sooner the better the chance that they meet.
                Mail::Request { frame } => self.request(&frame),
                mail => self.mail.push(mail),
            }
        }
    }

    fn reply(&mut self, session: SessionId, request: u64) {
        let client = self.clients.iter_mut().find(|client| client.index == session.index()).expect("mine");
        // A late one is of a request that was answered before, or of a session that was closed.
        if client.session() == session && client.request == request {
            if let Some(frame) = client.outstanding.take()
                && self.rng.random_bool(0.1)
            {
                // A copy that comes late.
                self.request(&frame);
            }
        } else {
            assert!(client.session() != session || client.request > request, "a reply to what was never asked");
        }
    }

    /// Runs a client's write and looks at what became of it.
    fn request(&mut self, bytes: &[u8]) {
        let before = self.now();
        let run = self.shared.kernel.run(bytes).unwrap();
        let after = self.now();
        let (addresses, datagram) = frame::parse(&run.frame).unwrap();
        let packet = Packet::parse(datagram).unwrap();
        let Header { session, request, seq, epoch, .. } = packet.header;
        match run.verdict {
            XDP_REDIRECT => {
                let key = packet.key.to_vec();
                self.log(before, after, Event::Ordered { session, request, seq, key });
                if !self.shared.propagated.lock().unwrap().insert((seq, epoch)) {
                    return;
                }
                for member in MEMBERS {
                    let mut header = packet.header;
                    (header.op, header.cnt) = (Op::WReply, member);
                    let value = if header.kind == Kind::Incr.to_wire() { &[0; 8][..] } else { &[] };
                    let ack = header.datagram(packet.key, value);
                    let ack = frame(member_endpoint(SHARD, member), member_mac(SHARD, member), &ack);
                    for _ in 0..*[1, 1, 1, 2].choose(&mut self.rng).unwrap() {
                        self.post(Mail::Ack { frame: ack.clone(), seq, member, epoch });
                    }
                }
            }
            XDP_TX if packet.header.op == Op::WReply => {
                self.log(before, after, Event::Answered { session, request, seq });
                self.tell(session, request);
            }
            XDP_TX => {
                assert_eq!(packet.header.op, Op::WReject);
                let reason = Reason::from_wire(packet.header.status).unwrap();
                match reason {
                    Reason::KeyBusy | Reason::DirtyFull => {}
                    Reason::Aborted => self.tell(session, request),
                    // Its session was closed, before or at this moment: then the token may go first.
                    Reason::Session | Reason::Token => self.log(before, after, Event::Refused { session }),
                    other => panic!("rejected: {other}"),
                }
                // Only its owner can send it again; the other CPU's copy may have been ordered meanwhile.
                let mut clients = self.clients.iter_mut();
                if let Some(client) = clients.find(|client| client.session() == session && client.request == request) {
                    client.rejected = true;
                }
            }
            XDP_DROP => {}
            verdict => panic!("verdict {verdict} for {addresses:?}"),
        }
    }

    /// Tells the thread that plays this client.
    fn tell(&self, session: SessionId, request: u64) {
        let owner = usize::from(session.index() >= CLIENTS);
        self.shared.mail[owner].lock().unwrap().push(Mail::Reply { session, request });
    }

    fn acknowledge(&mut self) {
        if self.mail.is_empty() {
            // The other thread may not be running at all.
            let mut other = self.shared.mail[1 - self.cpu].lock().unwrap();
            self.mail.extend(other.extract_if(.., |mail| matches!(mail, Mail::Ack { .. })));
        }
        if self.mail.is_empty() {
            return;
        }
        let at = self.rng.random_range(0..self.mail.len());
        if let Mail::Ack { frame, seq, member, epoch } = self.mail.swap_remove(at) {
            let before = self.now();
            let committed = acknowledge(self.shared, &frame);
            let after = self.now();
            self.log(before, after, Event::Acked { seq, member, epoch });
            if let Some((session, request, key)) = committed {
                self.log(before, after, Event::Committed { seq, acknowledged: true });
                if let Some(number) = (0..KEYS).find(|number| self::key(*number) == key) {
                    self.shared.committed[number].fetch_max(seq, SeqCst);
                }
                self.tell(session, request);
            }
        }
    }

    fn write(&mut self) {
        let at = self.rng.random_range(0..self.clients.len());
        if let Some(frame) = self.clients[at].outstanding.clone() {
            // Sent again, sometimes on both CPUs.
            let rejected = mem::take(&mut self.clients[at].rejected);
            match self.rng.random_range(0..if rejected { 2 } else { 12 }) {
                0 => self.request(&frame),
                1 => {
                    let other = 1 - self.cpu;
                    self.shared.mail[other].lock().unwrap().push(Mail::Request { frame: frame.clone() });
                    self.request(&frame);
                }
                _ => {}
            }
            return;
        }
        let kind =
            *[Kind::Put, Kind::Put, Kind::Put, Kind::Put, Kind::Incr, Kind::Delete].choose(&mut self.rng).unwrap();
        let mut value = vec![];
        let operand = Operand { ttl_ms: None, expected: 0, delta: 1, data: b"value" };
        let flags = operand.emit(kind, &mut value);
        self.clients[at].request += 1;
        let request = self.clients[at].request;
        let header = Header { kind: kind.to_wire(), flags, request, ..self.header(at, Op::Write) };
        let key = key(self.rng.random_range(0..KEYS));
        let bytes = self.frame(at, &header.datagram(&key, &value));
        self.clients[at].outstanding = Some(bytes.clone());
        if self.rng.random_bool(0.2) {
            let other = 1 - self.cpu;
            self.shared.mail[other].lock().unwrap().push(Mail::Request { frame: bytes.clone() });
        }
        self.request(&bytes);
    }

    fn header(&self, at: usize, op: Op) -> Header {
        let session = self.clients[at].session();
        let (token, client) = self.shared.sessions.read().unwrap()[&session];
        let mut header = Header { shard: SHARD, session, token, ..Header::new(op) };
        header.set_reply_to(client_endpoint(client));
        header
    }

    fn frame(&self, at: usize, datagram: &[u8]) -> Vec<u8> {
        let client = self.shared.sessions.read().unwrap()[&self.clients[at].session()].1;
        frame(client_endpoint(client), client_mac(client), datagram)
    }

    fn read(&mut self) {
        let at = self.rng.random_range(0..self.clients.len());
        let number = self.rng.random_range(0..KEYS);
        self.read += 1;
        let header = Header { request: self.read, ..self.header(at, Op::Read) };
        let bytes = self.frame(at, &header.datagram(&key(number), &[]));
        let committed = self.shared.committed[number].load(SeqCst);
        let before = self.now();
        let run = self.shared.kernel.run(&bytes).unwrap();
        let after = self.now();
        assert_eq!(run.verdict, XDP_TX);
        let (_, datagram) = frame::parse(&run.frame).unwrap();
        let header = Packet::parse(datagram).unwrap().header;
        assert_eq!(header.op, Op::Read);
        assert!(header.epoch >= self.epoch, "a CPU went back to an earlier epoch");
        self.epoch = header.epoch;
        let bound = header.seq;
        assert!(bound >= committed, "a read called after a commit was told is bound to what was before it");
        assert!(bound >= self.bounds[number], "bounds of a key, seen by one thread, went back");
        self.bounds[number] = bound;
        self.log(before, after, Event::Read { key: key(number), bound });
    }

    /// The agent closes a session, whatever its write is doing, and gives its index to another client.
    fn close(&mut self) {
        let at = self.rng.random_range(0..self.clients.len());
        let session = self.clients[at].session();
        let command = up_session_command { used_before_ms: u64::MAX, ..Default::default() };
        let before = self.now();
        let told = self.shared.kernel.command(abi::UP_SESSION_OP_CLOSE, session.0, command).unwrap();
        let after = self.now();
        match told.result {
            abi::UP_SESSION_DONE => {
                let Client { index, generation, .. } = self.clients[at];
                self.log(before, after, Event::Closed { session, request: told.request, state: told.state });
                let next = Client { index, generation: generation + 1, request: 0, outstanding: None, rejected: false };
                let client = index as u8 + 100 * (generation % 2) as u8;
                open(self.shared, next.session(), self.rng.random(), client);
                self.clients[at] = next;
            }
            abi::UP_SESSION_UNRESOLVED => assert!(self.clients[at].outstanding.is_some(), "unresolved, yet answered"),
            other => panic!("closing an open session: {other}"),
        }
    }
}

/// The rest of what the agent does: looks for what is resolved, settles writes, and changes who takes part, in what epoch,
/// and which members reads go to.
struct Agent<'a> {
    shared: &'a Shared,
    rng: StdRng,
    epoch: u32,
    must_ack: u8,
    log: Vec<Logged>,
}

impl Agent<'_> {
    fn run(mut self) -> Vec<Logged> {
        let mut records = vec![];
        let mut scans = 0;
        for round in 0.. {
            if self.shared.steps_left.load(SeqCst) <= 0 {
                break;
            }
            // The clock first, then the records.
            let clock = self.shared.kernel.clock(slot(SHARD));
            let before = self.now();
            self.shared.kernel.read_sessions(SIZES.sessions, &mut records).unwrap();
            let stable = scan(clock, SHARD, &records).stable;
            self.log(before, Event::Stable { seq: stable });
            scans += 1;
            let pending: Vec<_> = records.iter().filter(|at| u32::from(at.state) == abi::UP_STATE_PENDING).collect();
            if let Some(record) = pending.choose(&mut self.rng)
                && self.rng.random_bool(0.2)
            {
                let aborts = self.rng.random_bool(0.3);
                self.settle(record, aborts);
            }
            match round % 32 {
                0 => {
                    self.change_members();
                    if self.rng.random() {
                        // The member that just went is back, while writes that it acknowledged are pending.
                        self.change_members();
                    }
                }
                8 | 24 => {
                    let serving = self.must_ack & !(1 << *MEMBERS.choose(&mut self.rng).unwrap());
                    self.configure(self.must_ack, serving);
                }
                _ => {}
            }
            thread::sleep(Duration::from_micros(200));
        }
        println!("agent: {scans} scans, {} epochs", self.epoch - EPOCH);
        self.log
    }

    fn now(&self) -> u64 {
        self.shared.clock.fetch_add(1, SeqCst)
    }

    fn log(&mut self, before: u64, event: Event) {
        let after = self.now();
        self.log.push(Logged { before, after, event });
    }

    fn configure(&mut self, must_ack: u8, serving: u8) {
        let before = self.now();
        let floor = self.shared.kernel.activate(&config_of(SHARD, self.epoch, must_ack, serving));
        assert_eq!(floor, u64::from(EPOCH) << 40, "the floor stays");
        self.must_ack = must_ack;
        self.log(before, Event::Configured { epoch: self.epoch, must_ack });
    }

    /// One member goes, another comes (protocol.md, section 7).
    fn change_members(&mut self) {
        let next = BASES[usize::from(self.must_ack == BASES[0])];
        let (new, both) = (next & !self.must_ack, next | self.must_ack);
        let before = self.now();
        self.shared.kernel.forget_acks(SHARD, new.trailing_zeros() as u8).unwrap();
        self.log(before, Event::Forgot { member: new.trailing_zeros() as u8 });
        self.epoch += 1;
        self.configure(both, next);
        self.configure(next, next);
    }

    fn settle(&mut self, record: &abi::up_session, aborts: bool) {
        let before = self.now();
        if settle(self.shared, record, aborts) {
            let seq = record.seq;
            self.log(
                before,
                if aborts { Event::Aborted { seq } } else { Event::Committed { seq, acknowledged: false } },
            );
        }
    }
}

/// Ends a pending write as the agent decides; false if it is not pending any more.
fn settle(shared: &Shared, record: &abi::up_session, aborts: bool) -> bool {
    let (request, seq) = (record.request, record.seq);
    let state = if aborts { abi::UP_STATE_ABORTED } else { abi::UP_STATE_COMMITTED };
    let command = up_session_command { request, seq, state, ..Default::default() };
    let told = shared.kernel.command(abi::UP_SESSION_OP_SETTLE, record.session, command).unwrap();
    told.result == abi::UP_SESSION_DONE
}

/// Runs an acknowledgement. If it decided, checks that the reply is for the session's own client, and tells of what.
fn acknowledge(shared: &Shared, bytes: &[u8]) -> Option<(SessionId, u64, Vec<u8>)> {
    let run = shared.kernel.run(bytes).unwrap();
    if run.verdict == XDP_DROP {
        return None;
    }
    assert_eq!(run.verdict, XDP_TX);
    assert!(frame::checksums_hold(&run.frame));
    let (addresses, datagram) = frame::parse(&run.frame).unwrap();
    let packet = Packet::parse(datagram).unwrap();
    let header = packet.header;
    let (token, client) = shared.sessions.read().unwrap()[&header.session];
    let to = client_endpoint(client);
    assert_eq!((header.op, header.token, header.reply_to()), (Op::WReply, token, Some(to)));
    assert_eq!((addresses.destination, addresses.destination_mac), ((to.addr, to.port), client_mac(client)));
    Some((header.session, header.request, packet.key.to_vec()))
}

/// What is known of one write.
struct Write {
    session: SessionId,
    request: u64,
    key: Vec<u8>,
    /// When it was committed, or aborted.
    resolved: Option<(u64, u64)>,
    aborted: bool,
    acknowledged: bool,
    /// Acknowledgements: member, epoch, when it began and ended.
    acked: Vec<(u8, u32, u64, u64)>,
}

#[test]
fn two_cpus_at_once() {
    let seed = std::env::var("UNDERPASS_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or_else(rand::random);
    let steps = std::env::var("UNDERPASS_PACKETS").ok().and_then(|s| s.parse().ok()).unwrap_or(300_000);
    println!("UNDERPASS_SEED={seed}");
    let mut twins = Twins::new(&mut rng(seed), SIZES);
    twins.configure(config_of(SHARD, EPOCH, BASES[0], BASES[0]));
    let bucket_key = twins.kernel.settings().bucket_key;
    let shared = Shared {
        kernel: twins.kernel,
        steps_left: AtomicI64::new(steps),
        clock: AtomicU64::new(1),
        mail: Default::default(),
        propagated: Mutex::default(),
        sessions: RwLock::default(),
        committed: Default::default(),
    };
    for index in 0..2 * CLIENTS {
        open(&shared, SessionId::new(1, index), u64::from(index), index as u8);
    }
    let mut log = vec![];
    thread::scope(|scope| {
        let threads: Vec<_> = (0..2)
            .map(|cpu| {
                let of = cpu as u16 * CLIENTS;
                let client = |index| Client { index, generation: 1, request: 0, outstanding: None, rejected: false };
                let thread = Thread {
                    cpu,
                    rng: rng(seed ^ (cpu as u64 + 1)),
                    shared: &shared,
                    clients: (of..of + CLIENTS).map(client).collect(),
                    mail: vec![],
                    log: vec![],
                    bounds: [0; KEYS],
                    epoch: 0,
                    read: 0,
                };
                scope.spawn(move || thread.run())
            })
            .collect();
        let configured = Event::Configured { epoch: EPOCH, must_ack: BASES[0] };
        log.push(Logged { before: 0, after: 0, event: configured });
        log.extend(Agent { shared: &shared, rng: rng(seed), epoch: EPOCH, must_ack: BASES[0], log: vec![] }.run());
        for thread in threads {
            log.extend(thread.join().unwrap());
        }
    });
    drain(&shared, &mut log);
    let writes = judge(&log);
    judge_tables(&shared, &writes, &bucket_key);
    judge_counters(&shared, &log, &writes);
}

/// Delivers what is left, and settles what that does not resolve: acknowledgements of earlier epochs do not count.
fn drain(shared: &Shared, log: &mut Vec<Logged>) {
    for mail in &shared.mail {
        for mail in mem::take(&mut *mail.lock().unwrap()) {
            let Mail::Ack { frame, seq, member, epoch } = mail else { continue };
            let before = shared.clock.fetch_add(1, SeqCst);
            let committed = acknowledge(shared, &frame).is_some();
            let after = shared.clock.fetch_add(1, SeqCst);
            log.push(Logged { before, after, event: Event::Acked { seq, member, epoch } });
            if committed {
                log.push(Logged { before, after, event: Event::Committed { seq, acknowledged: true } });
            }
        }
    }
    let mut records = vec![];
    shared.kernel.read_sessions(SIZES.sessions, &mut records).unwrap();
    for record in records.iter().filter(|record| u32::from(record.state) == abi::UP_STATE_PENDING) {
        let before = shared.clock.fetch_add(1, SeqCst);
        assert!(settle(shared, record, false));
        let after = shared.clock.fetch_add(1, SeqCst);
        log.push(Logged { before, after, event: Event::Committed { seq: record.seq, acknowledged: false } });
    }
}

/// Judges what was seen from outside.
fn judge(log: &[Logged]) -> BTreeMap<u64, Write> {
    let mut writes: BTreeMap<u64, Write> = BTreeMap::new();
    let mut seq_of = HashMap::new();
    for Logged { event, .. } in log {
        if let Event::Ordered { session, request, seq, key } = event {
            let first = *seq_of.entry((*session, *request)).or_insert(*seq);
            assert_eq!(first, *seq, "one request has two sequence numbers");
            let write = writes.entry(*seq).or_insert_with(|| Write {
                session: *session,
                request: *request,
                key: key.clone(),
                resolved: None,
                aborted: false,
                acknowledged: false,
                acked: vec![],
            });
            assert_eq!((write.session, write.request), (*session, *request), "two requests have one sequence number");
        }
    }
    // Within an epoch sequence numbers have no gaps.
    let mut before = 0;
    for seq in writes.keys() {
        let first = (seq >> 40 << 40) + 1;
        assert_eq!(*seq, if before < first { first } else { before + 1 }, "sequence numbers have gaps");
        before = *seq;
    }
    for Logged { before, after, event } in log {
        match event {
            Event::Acked { seq, member, epoch } => {
                writes.get_mut(seq).unwrap().acked.push((*member, *epoch, *before, *after));
            }
            Event::Committed { seq, .. } | Event::Aborted { seq } => {
                let write = writes.get_mut(seq).unwrap();
                assert!(write.resolved.replace((*before, *after)).is_none(), "seq {seq} was resolved twice");
                write.aborted = matches!(event, Event::Aborted { .. });
                write.acknowledged = matches!(event, Event::Committed { acknowledged: true, .. });
            }
            _ => {}
        }
    }
    for (seq, write) in &writes {
        assert!(write.resolved.is_some(), "seq {seq} was never resolved");
    }
    judge_acknowledgements(log, &writes);
    judge_reads(log, &writes);
    for Logged { before, after, event } in log {
        match event {
            Event::Answered { session, request, seq } => {
                assert_eq!(seq_of.get(&(*session, *request)), Some(seq), "answered with another write's seq");
                let committed = writes[seq].resolved.unwrap().0;
                assert!(!writes[seq].aborted, "seq {seq} was answered and aborted");
                assert!(committed < *after, "seq {seq} was answered from its record before it was decided");
            }
            Event::Closed { session, request, state } => {
                // What CLOSE did not tell of was never ordered, and never will be.
                let taken = |(of, number): &(SessionId, u64)| {
                    of == session && (number > request || (number == request && *state == abi::UP_STATE_IDLE))
                };
                assert!(!seq_of.keys().any(taken), "of {session:?} something was ordered that CLOSE did not tell of");
            }
            Event::Refused { session } => {
                let closed = log.iter().find_map(|logged| match logged.event {
                    Event::Closed { session: of, .. } if of == *session => Some(logged.before),
                    _ => None,
                });
                assert!(closed.is_some_and(|closed| closed < *after), "{session:?} was refused before it was closed");
            }
            Event::Stable { seq } => {
                let mut below = writes.range(..=*seq).rev().take(64);
                let late = below.find(|(_, write)| write.resolved.unwrap().0 > *after);
                assert!(late.is_none(), "stable {seq} at {before} covers the unresolved seq {}", late.unwrap().0);
            }
            _ => {}
        }
    }
    writes
}

/// A write that acknowledgements committed had those of every member of a configuration that was in force then; not ones
/// that an index had from before it was given to another member.
fn judge_acknowledgements(log: &[Logged], writes: &BTreeMap<u64, Write>) {
    struct Reign {
        epoch: u32,
        must_ack: u8,
        /// No CPU uses it before, or after.
        from: u64,
        to: u64,
        /// When each index was given to its member, at the earliest.
        given: [u64; 8],
    }
    let mut reigns: Vec<Reign> = vec![];
    let mut given = [0; 8];
    for Logged { before, after, event } in log {
        match event {
            Event::Forgot { member } => given[usize::from(*member)] = *before,
            Event::Configured { epoch, must_ack } => {
                if let Some(last) = reigns.last_mut() {
                    last.to = *after;
                }
                reigns.push(Reign { epoch: *epoch, must_ack: *must_ack, from: *before, to: u64::MAX, given });
            }
            _ => {}
        }
    }
    let epochs_then = |before, after| reigns.iter().filter(move |reign| reign.from <= after && before <= reign.to);
    for (seq, write) in writes.iter().filter(|(_, write)| write.acknowledged) {
        let (before, after) = write.resolved.unwrap();
        // A recorded acknowledgement was given in its epoch, and counts in later ones.
        let counts = |reign: &Reign, member: u8| {
            write.acked.iter().any(|&(of, epoch, began, ended)| {
                of == member
                    && began <= after
                    && ended >= reign.given[usize::from(member)]
                    && epochs_then(began, ended).any(|then| then.epoch == epoch && then.must_ack & (1 << of) != 0)
            })
        };
        let all = |reign: &Reign| (0..8).filter(|i| reign.must_ack & (1 << i) != 0).all(|i| counts(reign, i));
        assert!(epochs_then(before, after).any(all), "seq {seq} committed without every member's acknowledgement");
    }
}

/// read-committed and freshness of every bound.
fn judge_reads(log: &[Logged], writes: &BTreeMap<u64, Write>) {
    let keys: HashSet<_> = writes.values().map(|write| &write.key).collect();
    for key in keys {
        let of_key: BTreeMap<_, _> = writes.iter().filter(|(_, write)| write.key == *key).collect();
        // When a client was told of a write, by its reply or from its record: then it is over for every read.
        let committed = of_key.iter().filter(|(_, write)| !write.aborted);
        let mut told: Vec<_> = committed.map(|(seq, write)| (write.resolved.unwrap().1, **seq)).collect();
        told.extend(log.iter().filter_map(|logged| match logged.event {
            Event::Answered { seq, .. } if of_key.contains_key(&seq) => Some((logged.after, seq)),
            _ => None,
        }));
        told.sort_unstable();
        for at in 1..told.len() {
            told[at].1 = told[at].1.max(told[at - 1].1);
        }
        for Logged { before, after, event } in log {
            let Event::Read { key: read, bound } = event else { continue };
            if read != key {
                continue;
            }
            if let Some((seq, write)) = of_key.range(..=*bound).next_back() {
                let decided = write.resolved.unwrap().0;
                assert!(decided < *after, "a read with bound {bound} covers seq {seq} before it was decided");
            }
            let known = told.partition_point(|(at, _)| at < before);
            if let Some((_, seq)) = known.checked_sub(1).map(|at| told[at]) {
                assert!(*bound >= seq, "a read with bound {bound} misses seq {seq}, committed before it was called");
            }
        }
    }
}

/// clean-after, of the tables.
fn judge_tables(shared: &Shared, writes: &BTreeMap<u64, Write>, bucket_key: &[u32; 64]) {
    let mut records = vec![];
    shared.kernel.read_sessions(SIZES.sessions, &mut records).unwrap();
    assert!(!records.iter().any(|record| unresolved(record.state)), "a write is unresolved at the end");
    let mut last = HashMap::new();
    for (seq, write) in writes {
        let within = hash::bucket_hash(&write.key, bucket_key) & (SIZES.buckets - 1);
        last.insert(slot(SHARD) * SIZES.buckets as usize + within as usize, *seq);
    }
    for index in 0..(SIZES.buckets * abi::UP_SHARD_SLOTS) as usize {
        let bucket = shared.kernel.bucket(index as u32).unwrap();
        assert!(bucket.ways.iter().all(|way| way.last == 0), "bucket {index} is dirty at the end");
        let word = shared.kernel.word(index);
        assert_eq!(word & u64::from(UP_BUCKET_DIRTY), 0, "the word of bucket {index} says dirty");
        assert_eq!(word >> UP_BUCKET_LAST_SHIFT, last.get(&index).copied().unwrap_or(0), "last of bucket {index}");
    }
    let clock = shared.kernel.clock(slot(SHARD));
    let epoch = shared.kernel.active(SHARD).unwrap().epoch;
    assert_eq!(clock, (u64::from(epoch) << 40).max(*writes.keys().next_back().unwrap()));
}

fn judge_counters(shared: &Shared, log: &[Logged], writes: &BTreeMap<u64, Write>) {
    let counters = shared.kernel.counters().unwrap();
    let count = |counter: u32| counters[counter as usize];
    let events = |is: fn(&Event) -> bool| log.iter().filter(|logged| is(&logged.event)).count() as u64;
    let ordered = events(|event| matches!(event, Event::Ordered { .. }));
    let answered = events(|event| matches!(event, Event::Answered { .. }));
    assert_eq!(count(abi::UP_COUNT_WRITE), writes.len() as u64);
    let acknowledged = writes.values().filter(|write| write.acknowledged).count();
    let aborted = writes.values().filter(|write| write.aborted).count();
    assert_eq!(count(abi::UP_COUNT_COMMIT), acknowledged as u64);
    assert_eq!(count(abi::UP_COUNT_WRITE) + count(abi::UP_COUNT_WRITE_AGAIN), ordered);
    assert_eq!(count(abi::UP_COUNT_WRITE_ANSWERED), answered);
    assert_eq!(count(abi::UP_COUNT_READ), events(|event| matches!(event, Event::Read { .. })));
    let dropped = [abi::UP_COUNT_DROP_ACK_STALE, abi::UP_COUNT_DROP_ACK_EPOCH, abi::UP_COUNT_DROP_ACK_MEMBER];
    let acks = [abi::UP_COUNT_ACK, abi::UP_COUNT_COMMIT].iter().chain(&dropped).map(|at| count(*at)).sum::<u64>();
    assert_eq!(acks, events(|event| matches!(event, Event::Acked { .. })));
    let reject = |reason: Reason| count(abi::UP_COUNT_REJECT + u32::from(reason.to_wire()));
    println!(
        "{} writes, {} settled, of them {aborted} aborted; {} sent again, {} answered from the record, {} met a write in \
         other hands, {} key busy, {} dirty reads",
        writes.len(),
        writes.len() - acknowledged,
        count(abi::UP_COUNT_WRITE_AGAIN),
        answered,
        count(abi::UP_COUNT_DROP_STARTING),
        reject(Reason::KeyBusy),
        count(abi::UP_COUNT_READ_DIRTY),
    );
    // A run in which nothing met would show nothing.
    for counter in [
        abi::UP_COUNT_WRITE_AGAIN,
        abi::UP_COUNT_WRITE_ANSWERED,
        abi::UP_COUNT_DROP_ACK_STALE,
        abi::UP_COUNT_DROP_ACK_EPOCH,
        abi::UP_COUNT_DROP_ACK_MEMBER,
        abi::UP_COUNT_READ_DIRTY,
        abi::UP_COUNT_REJECT + u32::from(Reason::KeyBusy.to_wire()),
        abi::UP_COUNT_REJECT + u32::from(Reason::Aborted.to_wire()),
    ] {
        assert!(count(counter) > 0, "counter {counter} was never reached");
    }
}
