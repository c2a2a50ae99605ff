//! Many sessions on one socket, without waiting: for a load generator, a proxy, or the blocking [`Client`](crate::Client).
//!
//! An [`Engine`] belongs to one thread. Requests go in by [`Engine::submit`], which never waits; [`Engine::poll`] sends and
//! receives in batches and hands out what is over. One write can be outstanding in each session, so the number of sessions
//! bounds the writes in flight; reads share sessions.
//!
//! ```no_run
//! use std::time::Duration;
//! use underpass_client::{Config, engine::{Engine, Outcome, Request}};
//!
//! let mut config = Config::single(0, "10.0.0.1:5550".parse()?);
//! config.sessions = 64;
//! let mut engine = Engine::new(&config)?;
//! engine.open(Duration::from_secs(2))?;
//!
//! let deadline = engine.now() + 1_000_000_000;
//! for tag in 0..100 {
//!     engine.submit(Request::Read { key: b"key" }, tag, deadline)?;
//! }
//! let (mut answered, mut done) = (0, Vec::new());
//! while answered < 100 {
//!     engine.poll(Duration::from_millis(10), &mut done)?;
//!     for completion in done.drain(..) {
//!         if let Outcome::Read(Some(item)) = &completion.outcome {
//!             let latency_ns = completion.done_ns - completion.submitted_ns;
//!             println!("{}: {} bytes after {latency_ns} ns", completion.tag, item.value.len());
//!         }
//!         answered += 1;
//!     }
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::{
    collections::{HashMap, VecDeque},
    fmt, io,
    net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket},
    ops::Range,
    os::fd::AsFd,
    sync::Arc,
    time::Duration,
};

use nix::{
    poll::{PollFd, PollFlags},
    sys::{
        eventfd::{EfdFlags, EventFd},
        time::TimeSpec,
    },
    time::{ClockId, clock_gettime},
};
use rand::{RngCore, SeedableRng, rngs::StdRng};
use socket2::{Domain, Socket, Type};
use tracing::{debug, info};
use underpass_protocol::{
    client::{Client, Event, NEVER, Output, Settings},
    control::{self, Located},
    wire::{Endpoint, Header, Op, Packet, Reason, SessionId},
};
pub use underpass_protocol::{
    client::{Completion, Doubt, Failure, Invalid, Item, Outcome, Refused, Request},
    wire::{Kind, Operand, Status},
};

use crate::{
    batch::{self, BATCH, Received},
    config::Config,
    error::{Contact, Diagnosis, Error, Said},
    placement::place,
};

/// Bytes of socket buffer asked for; the kernel may grant less.
const SOCKET_BUFFER: usize = 8 << 20;
/// Batches received before completions are handed out, so that timers and the caller get their turn.
const BATCHES_AT_ONCE: usize = 4;
/// Sessions that [`Engine::open`] opens at a time.
const OPENS_AT_ONCE: usize = 64;
/// Most addresses of a shard whose latest answers are kept to tell of.
const CONTACTS_MAX: usize = 32;
/// How long an engine keeps trying to replace a session that no request waits for.
const REPLACE_NS: u64 = 1_000_000_000;

/// What an engine has sent and received since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Datagrams sent.
    pub sent: u64,
    /// Datagrams received.
    pub received: u64,
    /// Of these, ones that are not of this protocol.
    pub malformed: u64,
    /// Of these, ones for no session of ours: usually late copies of answers.
    pub unmatched: u64,
    /// Datagrams that the kernel refused to send.
    pub send_errors: u64,
}

/// Many sessions of all shards on one UDP socket. See the module's documentation.
pub struct Engine {
    socket: UdpSocket,
    waker: Waker,
    shard_ids: Vec<u32>,
    shards: Vec<Shard>,
    lanes: Vec<Lane>,
    /// When each lane needs a tick.
    due: Vec<u64>,
    /// Lanes by shard and session: coordinators of different shards may give the same session number.
    by_session: HashMap<(u32, u64), usize>,
    /// Lanes by the number of their latest OPEN.
    by_nonce: HashMap<u64, usize>,
    output: Output,
    /// The shard that each datagram of `output` is about.
    subjects: Vec<usize>,
    /// Datagrams of `output` already sent.
    flushed: usize,
    received: Received,
    random: StdRng,
    counters: Counters,
}

struct Shard {
    /// First of its lanes; there are as many as sessions.
    first: usize,
    count: usize,
    /// Lanes without an outstanding write; the one that waited longest comes first, so that none goes stale.
    writers: VecDeque<usize>,
    next_reader: usize,
    /// The lane that looks for the coordinator, or did so last, on behalf of all.
    looker: usize,
    looking: bool,
    /// Where requests go.
    current: SocketAddrV4,
    /// Everybody who was asked where the coordinator is, or turned a request away.
    contacts: Vec<Known>,
    /// Whether anything was ever heard of it.
    heard: bool,
    /// The network's latest error about `current`, if nothing was heard since.
    error: Option<io::ErrorKind>,
}

/// One address of a shard.
struct Known {
    address: SocketAddrV4,
    /// What it said last, and when.
    last: Option<(Said, u64)>,
}

/// A client of the protocol: one session at a time.
struct Lane {
    client: Client,
    shard: usize,
    writing: bool,
    /// Its entries in `by_session`.
    known: Vec<u64>,
    /// Its entry in `by_nonce`; 0: none.
    nonce: u64,
}

/// Makes an [`Engine::poll`] that waits return; from any thread.
#[derive(Clone)]
pub struct Waker(Arc<EventFd>);

impl Waker {
    /// Ends the current wait, or the next one.
    pub fn wake(&self) {
        // It can only fail when it is already as awake as can be.
        let _ = self.0.write(1);
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("shards", &self.shard_ids)
            .field("sessions", &self.lanes.len())
            .field("counters", &self.counters)
            .finish_non_exhaustive()
    }
}

/// Nanoseconds of the machine's monotonic clock: the same in every process and network namespace.
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("Linux has a monotonic clock");
    now.tv_sec() as u64 * 1_000_000_000 + now.tv_nsec() as u64
}

impl Engine {
    /// Binds a socket. Sessions are opened when they are needed, or by [`Engine::open`].
    ///
    /// # Errors
    /// A configuration that contradicts itself, an address that is not this host's, no route to a coordinator.
    pub fn new(config: &Config) -> Result<Self, Error> {
        config.validate()?;
        let socket = bind(config)?;
        let port = match socket.local_addr() {
            Ok(SocketAddr::V4(address)) => address.port(),
            other => {
                return Err(Error::io("local address", other.err().unwrap_or_else(|| io::Error::other("not IPv4"))));
            }
        };
        let mut shards = Vec::with_capacity(config.shards.len());
        let mut lanes = Vec::with_capacity(config.shards.len() * config.sessions);
        for (index, shard) in config.shards.iter().enumerate() {
            let addr = if config.bind.is_unspecified() { route_source(&shard.coordinators)? } else { config.bind };
            let coordinators: Vec<Endpoint> = shard.coordinators.iter().map(|&address| address.into()).collect();
            let reply_to = SocketAddrV4::new(addr, port).into();
            let settings = Settings { reads_max: config.reads_per_session, ..Settings::new(shard.id, reply_to) };
            let first = lanes.len();
            lanes.extend((0..config.sessions).map(|_| Lane {
                client: Client::new(settings, &coordinators),
                shard: index,
                writing: false,
                known: Vec::new(),
                nonce: 0,
            }));
            shards.push(Shard {
                first,
                count: config.sessions,
                writers: (first..lanes.len()).collect(),
                next_reader: 0,
                looker: first,
                looking: false,
                current: shard.coordinators[0],
                contacts: Vec::new(),
                heard: false,
                error: None,
            });
        }
        let waker = EventFd::from_value_and_flags(0, EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)
            .map_err(|error| Error::io("eventfd", error.into()))?;
        Ok(Self {
            socket,
            waker: Waker(Arc::new(waker)),
            shard_ids: config.shards.iter().map(|shard| shard.id).collect(),
            shards,
            due: vec![NEVER; lanes.len()],
            by_session: HashMap::with_capacity(lanes.len() * 2),
            by_nonce: HashMap::with_capacity(lanes.len()),
            lanes,
            output: Output::default(),
            subjects: Vec::new(),
            flushed: 0,
            received: Received::new(),
            random: StdRng::from_os_rng(),
            counters: Counters::default(),
        })
    }

    /// The clock of deadlines and completions: [`monotonic_ns`].
    pub fn now(&self) -> u64 {
        monotonic_ns()
    }

    /// Makes a waiting [`Engine::poll`] return.
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// What has been sent and received.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Sessions that are open now, of all shards.
    pub fn sessions_open(&self) -> usize {
        self.lanes.iter().filter(|lane| lane.client.session().is_some()).count()
    }

    /// Index of the shard that a key is in, by the order of the configuration.
    pub fn shard_of(&self, key: &[u8]) -> usize {
        place(key, &self.shard_ids)
    }

    /// What is known of why a shard does not answer. `shard` is an index in the order of the configuration.
    pub fn diagnosis(&self, shard: usize) -> Diagnosis {
        let (now, Shard { current, contacts, heard, error, .. }) = (self.now(), &self.shards[shard]);
        let contact = |known: &Known| Contact {
            address: known.address,
            last: known.last.map(|(said, at)| (said, Duration::from_nanos(now.saturating_sub(at)))),
        };
        Diagnosis {
            shard: self.shard_ids[shard],
            coordinator: *current,
            heard: *heard,
            error: *error,
            contacts: contacts.iter().map(contact).collect(),
        }
    }

    /// Opens all sessions ahead of need. Requests submitted before go on; their completions are handed out by the next
    /// [`Engine::poll`].
    ///
    /// # Errors
    /// [`Error::NoSession`] if some session is not open after `wait`; those that are stay open.
    pub fn open(&mut self, wait: Duration) -> Result<(), Error> {
        let until = self.now().saturating_add(nanoseconds(wait));
        // Only so many at once, lest the agent's socket overflow.
        let (mut next, mut opening) = (0, Vec::with_capacity(OPENS_AT_ONCE));
        loop {
            let now = self.now();
            self.advance(now)?;
            opening.retain(|&lane: &usize| self.lanes[lane].client.session().is_none());
            while opening.len() < OPENS_AT_ONCE && next < self.lanes.len() {
                self.step(next, now, Event::Open { until });
                opening.push(next);
                next += 1;
            }
            let Some(&missing) = opening.first() else { return Ok(()) };
            let stuck = opening.iter().find(|&&lane| self.lanes[lane].client.is_closed()).copied();
            if now >= until || stuck.is_some() {
                let missing = stuck.unwrap_or(missing);
                let (shard, reason) = (self.lanes[missing].shard, self.lanes[missing].client.open_reject());
                return Err(Error::NoSession { at: self.diagnosis(shard), reason });
            }
            self.flush();
            self.wait(now, until)?;
        }
    }

    /// Takes a request, to be over at `deadline_ns` of [`Engine::now`]. It leaves with the next poll or when a batch is
    /// full. `tag` comes back in its completion.
    ///
    /// # Errors
    /// [`Refused::Full`]: every session of the key's shard has a write outstanding, or as many reads as it may.
    /// [`Refused::Invalid`]: it can never be taken.
    pub fn submit(&mut self, request: Request<'_>, tag: u64, deadline_ns: u64) -> Result<(), Refused> {
        request.validate()?;
        let shard = self.shard_of(request.key());
        let lane = match request {
            Request::Write { .. } => {
                let lane = self.writer(shard).ok_or(Refused::Full)?;
                self.lanes[lane].writing = true;
                lane
            }
            Request::Read { .. } => self.reader(shard).ok_or(Refused::Full)?,
        };
        let (now, random) = (self.now(), self.random.next_u64());
        let client = &mut self.lanes[lane].client;
        client.submit(now, random, request, tag, deadline_ns, &mut self.output).expect("it was asked before");
        self.after(lane, now);
        if self.subjects.len() - self.flushed >= BATCH {
            self.flush();
        }
        Ok(())
    }

    /// A lane for a write: one whose session is open, if there is any.
    fn writer(&mut self, shard: usize) -> Option<usize> {
        let writers = &mut self.shards[shard].writers;
        let open = writers.iter().position(|&lane| self.lanes[lane].client.session().is_some());
        writers.remove(open.unwrap_or(0))
    }

    /// A lane for a read, in turn: one whose session is open, if there is any.
    fn reader(&mut self, shard: usize) -> Option<usize> {
        let shard = &mut self.shards[shard];
        let in_turn = (0..shard.count).map(|i| shard.first + (shard.next_reader + i) % shard.count);
        let can_read = |lane: &usize| self.lanes[*lane].client.can_read();
        let is_open = |lane: &usize| self.lanes[*lane].client.session().is_some();
        let lane =
            in_turn.clone().find(|lane| can_read(lane) && is_open(lane)).or_else(|| in_turn.clone().find(can_read));
        if let Some(lane) = lane {
            shard.next_reader = (lane - shard.first + 1) % shard.count;
        }
        lane
    }

    /// Sends, receives, and appends what is over to `done`. Returns as soon as something is, when woken, or after
    /// `timeout`; how many were appended.
    ///
    /// # Errors
    /// The socket's, other than those about one datagram.
    pub fn poll(&mut self, timeout: Duration, done: &mut Vec<Completion>) -> Result<usize, Error> {
        let mut now = self.now();
        let until = now.saturating_add(nanoseconds(timeout));
        loop {
            self.advance(now)?;
            let count = self.output.completions.len();
            if count > 0 {
                done.append(&mut self.output.completions);
                return Ok(count);
            }
            now = self.now();
            if now >= until {
                return Ok(0);
            }
            if self.wait(now, until)? {
                return Ok(0);
            }
            now = self.now();
        }
    }

    /// One round of sending, receiving and timers, without waiting.
    fn advance(&mut self, mut now: u64) -> Result<(), Error> {
        self.flush();
        for _ in 0..BATCHES_AT_ONCE {
            let count = match batch::receive(self.socket.as_fd(), &mut self.received) {
                Ok(count) => count,
                // About a datagram sent earlier: its retransmission is up to the session.
                Err(error) if is_about_a_datagram(&error) => {
                    self.take_errors();
                    continue;
                }
                Err(error) => return Err(Error::io("receive", error)),
            };
            if count == 0 {
                break;
            }
            now = self.now();
            for index in 0..count {
                self.receive(now, index);
            }
            if count < BATCH {
                break;
            }
        }
        for lane in 0..self.due.len() {
            if self.due[lane] <= now {
                self.step(lane, now, Event::Tick);
            }
        }
        self.flush();
        Ok(())
    }

    /// Waits for a datagram, a timer or the waker, but not beyond `until`. True: woken.
    fn wait(&mut self, now: u64, until: u64) -> Result<bool, Error> {
        let next = self.due.iter().copied().fold(until, u64::min);
        // A full send buffer empties by itself; there is no need to be exact.
        let next = if self.flushed < self.subjects.len() { next.min(now + 100_000) } else { next };
        let timeout = TimeSpec::from_duration(Duration::from_nanos(next.saturating_sub(now)));
        let mut fds =
            [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN), PollFd::new(self.waker.0.as_fd(), PollFlags::POLLIN)];
        match nix::poll::ppoll(&mut fds, Some(timeout), None) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(Error::io("poll", error.into())),
        }
        let [socket, woken] = fds.map(|fd| fd.revents().unwrap_or(PollFlags::empty()));
        if socket.contains(PollFlags::POLLERR) {
            self.take_errors();
        }
        if woken.contains(PollFlags::POLLIN) {
            let _ = self.waker.0.read();
            return Ok(true);
        }
        Ok(false)
    }

    fn receive(&mut self, now: u64, index: usize) {
        self.counters.received += 1;
        let Ok(packet) = Packet::parse(self.received.datagram(index)) else {
            self.counters.malformed += 1;
            return;
        };
        let header = &packet.header;
        let expected = |&lane: &usize| self.lanes[lane].client.expects(header.session, header.request);
        let lane = self.by_session.get(&(header.shard, header.session.0)).copied().filter(expected);
        // An answer to an OPEN is for no session that is known yet.
        let of_open = || self.by_nonce.get(&header.request).copied().filter(|_| header.op.is_control());
        let lane = lane.or_else(of_open).or_else(|| self.looker(header));
        let Some(lane) = lane else {
            self.counters.unmatched += 1;
            return;
        };
        let shard = self.lanes[lane].shard;
        (self.shards[shard].heard, self.shards[shard].error) = (true, None);
        if let Some(said) = told(&packet) {
            self.shards[shard].contact(self.received.source(index)).last = Some((said, now));
        }
        if header.op == Op::Located {
            if let Some(located) = control::parse::<Located>(&packet) {
                self.spread(lane, now, &located);
            }
            return;
        }
        let session_lost = matches!(header.op, Op::RReject | Op::WReject)
            && matches!(Reason::from_wire(header.status), Some(Reason::Session | Reason::Token));
        let before = self.lanes[lane].client.session();
        let random = self.random.next_u64();
        self.lanes[lane].client.step(now, random, Event::Packet(&packet), &mut self.output);
        let after = self.lanes[lane].client.session();
        if let Some(session) = after
            && before != after
        {
            self.register(lane, session.0);
        }
        self.after(lane, now);
        if session_lost && before.is_some() && after.is_none() {
            self.suspect(lane, now);
        }
    }

    /// The lane that has asked where its shard's coordinator is, if this answers it.
    fn looker(&self, header: &Header) -> Option<usize> {
        let of_locate = matches!(header.op, Op::Located | Op::ControlReject);
        let shard = self.shard_ids.iter().position(|&id| of_locate && id == header.shard)?;
        let lane = self.shards[shard].looker;
        let nonce = self.lanes[lane].client.locate_nonce();
        (nonce != 0 && nonce == header.request).then_some(lane)
    }

    /// One lane asked, all are told: the one that asked first.
    fn spread(&mut self, lane: usize, now: u64, located: &Located) {
        self.step(lane, now, Event::Located(located));
        for other in self.shards[self.lanes[lane].shard].lanes() {
            if other != lane {
                self.step(other, now, Event::Located(located));
            }
        }
    }

    /// Has one lane of a shard look for its coordinator, however many of them would.
    fn elect_looker(&mut self, lane: usize, now: u64) {
        let shard = self.lanes[lane].shard;
        let (looking, looker) = (self.shards[shard].looking, self.shards[shard].looker);
        match self.lanes[lane].client.is_looking() {
            true if !looking => {
                (self.shards[shard].looking, self.shards[shard].looker) = (true, lane);
                for other in self.shards[shard].lanes().filter(|&other| other != lane) {
                    self.step(other, now, Event::Spared(true));
                }
            }
            false if looking && looker == lane => {
                self.shards[shard].looking = false;
                for other in self.shards[shard].lanes().filter(|&other| other != lane) {
                    self.step(other, now, Event::Spared(false));
                    if self.shards[shard].looking {
                        // It goes on looking, and has spared the rest.
                        break;
                    }
                }
            }
            _ => {}
        }
    }

    fn register(&mut self, lane: usize, session: u64) {
        let Lane { client, known, shard, .. } = &mut self.lanes[lane];
        let shard = self.shard_ids[*shard];
        known.retain(|&old| {
            let keep = client.expects(SessionId(old), 0);
            if !keep {
                self.by_session.remove(&(shard, old));
            }
            keep
        });
        known.push(session);
        self.by_session.insert((shard, session), lane);
    }

    /// A session is gone, so others of its shard may be: a restarted coordinator knows none of them.
    fn suspect(&mut self, lane: usize, now: u64) {
        let shard = &self.shards[self.lanes[lane].shard];
        debug!(coordinator = %shard.current, "a session was lost");
        for other in shard.lanes() {
            if other != lane {
                self.step(other, now, Event::Suspect);
            }
        }
    }

    fn step(&mut self, lane: usize, now: u64, event: Event<'_>) {
        let random = self.random.next_u64();
        let before = self.lanes[lane].client.session();
        self.lanes[lane].client.step(now, random, event, &mut self.output);
        if before.is_some() && self.lanes[lane].client.session().is_none() && !matches!(event, Event::End) {
            // Left behind with a write of unknown outcome: have another one ready before it is needed.
            let random = self.random.next_u64();
            let until = now + REPLACE_NS;
            self.lanes[lane].client.step(now, random, Event::Open { until }, &mut self.output);
        }
        self.after(lane, now);
    }

    /// Book-keeping after each step of a lane.
    fn after(&mut self, lane: usize, now: u64) {
        let Lane { client, shard, writing, nonce, .. } = &mut self.lanes[lane];
        self.due[lane] = client.due();
        if *nonce != client.open_nonce() {
            self.by_nonce.remove(nonce);
            *nonce = client.open_nonce();
            self.by_nonce.insert(*nonce, lane);
        }
        let (sent, current) = (self.subjects.len()..self.output.datagram_count(), client.coordinator().into());
        self.subjects.resize(sent.end, *shard);
        let shard = &mut self.shards[*shard];
        if client.is_looking() {
            for (to, _) in sent.map(|index| self.output.datagram(index)) {
                shard.contact(to.into());
            }
        }
        if *writing && client.can_write() {
            *writing = false;
            shard.writers.push_back(lane);
        }
        if shard.current != current && lane == shard.looker {
            info!(from = %shard.current, to = %current, "the shard's coordinator is another one now");
            shard.current = current;
        }
        self.elect_looker(lane, now);
    }

    /// Sends what is gathered, as far as the socket takes it.
    fn flush(&mut self) {
        while self.flushed < self.subjects.len() {
            let Self { output, subjects, flushed, .. } = self;
            let datagrams = (*flushed..subjects.len()).map(|index| {
                let (to, datagram) = output.datagram(index);
                (to.into(), datagram)
            });
            match batch::send(self.socket.as_fd(), datagrams) {
                Ok(count) => {
                    self.counters.sent += count as u64;
                    self.flushed += count;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Of an earlier datagram: this one has not been tried yet.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => self.take_errors(),
                Err(error) => {
                    // As good as lost on its way. It is sent again if its request's deadline allows.
                    self.counters.send_errors += 1;
                    let (now, to) = (self.now(), self.output.datagram(self.flushed).0.into());
                    self.shards[self.subjects[self.flushed]].failed(to, error.kind(), now);
                    self.flushed += 1;
                }
            }
        }
        self.output.clear_datagrams();
        self.subjects.clear();
        self.flushed = 0;
    }

    fn take_errors(&mut self) {
        while let Some((to, error)) = batch::take_error(self.socket.as_fd()) {
            let now = monotonic_ns();
            for shard in &mut self.shards {
                if shard.current == to || shard.contacts.iter().any(|known| known.address == to) {
                    shard.failed(to, error.kind(), now);
                }
            }
        }
    }
}

impl Drop for Engine {
    /// Closes the sessions, without waiting for confirmation: the agent's ageing closes those whose CLOSE is lost.
    fn drop(&mut self) {
        let now = self.now();
        for lane in 0..self.lanes.len() {
            self.step(lane, now, Event::End);
        }
        self.flush();
    }
}

fn is_about_a_datagram(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, HostUnreachable, NetworkUnreachable};
    matches!(error.kind(), ConnectionRefused | HostUnreachable | NetworkUnreachable)
        || matches!(error.raw_os_error(), Some(libc::EPROTO | libc::ENOPROTOOPT | libc::EMSGSIZE | libc::EACCES))
}

fn bind(config: &Config) -> Result<UdpSocket, Error> {
    let address = SocketAddrV4::new(config.bind, config.port);
    let in_context = |error| Error::io(format!("bind to {address}"), error);
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, None).map_err(in_context)?;
    // As much as the system allows: a burst of answers must not be lost at the socket.
    let _ = socket.set_recv_buffer_size(SOCKET_BUFFER);
    let _ = socket.set_send_buffer_size(SOCKET_BUFFER);
    socket.set_nonblocking(true).map_err(in_context)?;
    socket.bind(&address.into()).map_err(in_context)?;
    let socket: UdpSocket = socket.into();
    batch::keep_errors(socket.as_fd()).map_err(in_context)?;
    Ok(socket)
}

/// What a datagram other than a reply says, for whoever must find out why there is none.
fn told(packet: &Packet<'_>) -> Option<Said> {
    let header = &packet.header;
    match header.op {
        Op::RReject | Op::WReject | Op::ControlReject => Some(Said::Reject(Reason::from_wire(header.status)?)),
        Op::Opened => Some(Said::Session),
        Op::Located => {
            let Located { configuration, serves } = control::parse(packet)?;
            let coordinator = configuration.coordinator().into();
            Some(Said::Located { epoch: configuration.epoch, coordinator, serves })
        }
        _ => None,
    }
}

impl Shard {
    fn lanes(&self) -> Range<usize> {
        self.first..self.first + self.count
    }

    /// The one at this address. Of too many the oldest is forgotten.
    fn contact(&mut self, address: SocketAddrV4) -> &mut Known {
        let at = self.contacts.iter().position(|known| known.address == address).unwrap_or_else(|| {
            if self.contacts.len() == CONTACTS_MAX {
                self.contacts.remove(0);
            }
            self.contacts.push(Known { address, last: None });
            self.contacts.len() - 1
        });
        &mut self.contacts[at]
    }

    /// A datagram to this address could not be delivered.
    fn failed(&mut self, to: SocketAddrV4, error: io::ErrorKind, now: u64) {
        self.contact(to).last = Some((Said::Error(error), now));
        if to == self.current {
            self.error = Some(error);
        }
    }
}

/// The local address that the routes to a shard's coordinators start from: connecting a UDP socket sends nothing. It must be
/// the same for all: a session keeps its address.
fn route_source(coordinators: &[SocketAddrV4]) -> Result<Ipv4Addr, Error> {
    let mut found: Option<(SocketAddrV4, Ipv4Addr)> = None;
    let mut failed = None;
    for &coordinator in coordinators {
        match (route_source_to(coordinator), found) {
            (Ok(source), None) => found = Some((coordinator, source)),
            (Ok(source), Some((first, other))) if source != other => {
                let what =
                    format!("use one local address: {first} is reached from {other}, {coordinator} from {source}");
                return Err(Error::io(what, io::Error::other("set `bind` to the one that both reach this host at")));
            }
            (Ok(_), Some(_)) => {}
            (Err(error), _) => failed = Some(error),
        }
    }
    found.map(|(_, source)| source).ok_or_else(|| failed.expect("a shard has coordinators"))
}

fn route_source_to(coordinator: SocketAddrV4) -> Result<Ipv4Addr, Error> {
    let local = || -> io::Result<SocketAddr> {
        let probe = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        probe.connect(coordinator)?;
        probe.local_addr()
    };
    match local() {
        Ok(SocketAddr::V4(address)) => Ok(*address.ip()),
        Ok(SocketAddr::V6(_)) => unreachable!("an IPv4 socket has an IPv4 address"),
        Err(error) => Err(Error::io(format!("find a route to the coordinator {coordinator}"), error)),
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX / 2)
}
