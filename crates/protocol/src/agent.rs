//! The agent: decides, beside a data path that acts. Who is in a shard, under which epoch and lease; who has a session; what
//! is repaired. `docs/protocol.md`, sections 5 and 7.
//!
//! [`Agent::step`] takes what happened and the tables of its data path, and says what to do. It does no I/O: datagrams,
//! compare-and-swaps and answers to the operator are values, and time is passed in, in milliseconds of one monotonic
//! clock.

mod change;
mod command;
mod member;
mod members;
mod record;
mod repair;
mod sessions;
mod shard;
mod status;
mod tables;
mod takeover;

use std::collections::BTreeMap;

use self::{
    sessions::{COUNTER_MAX, NoSession, Sessions},
    shard::{Context, Part, Shard},
};

pub use self::{
    record::{LEASE_MS, RECORD_VERSION, Record, Wanted},
    sessions::Open,
    status::{CandidateStatus, MemberStatus, ShardStatus},
    tables::{Settlement, Tables, TablesError},
};
use crate::{
    control::{self, Answer, Closed, ClusterKey, HeartbeatAck, Installed, OPEN_PADDING, Opened},
    coordinator::CloseOutcome,
    transfer::{Collected, Fetched},
    wire::{Endpoint, Header, Op, Packet, Reason, SessionId},
};

/// What an agent is given at its start.
pub struct Settings {
    /// The coordinator's own address: what it is known by.
    pub listen: Endpoint,
    /// Seals messages between agents and replicas.
    pub cluster_key: ClusterKey,
    /// Time between heartbeats.
    pub heartbeat_ms: u64,
    /// A member silent for this long gets no reads.
    pub suspect_ms: u64,
    /// A member silent for this long is removed.
    pub lost_ms: u64,
    /// How long a take-over waits for members that do not answer.
    pub reach_ms: u64,
    /// A write that is pending for this long is asked about.
    pub stuck_ms: u64,
    /// Sessions not used for this long are closed.
    pub idle_ms: u64,
    /// From the monotonic clock to this host's wall clock.
    pub wall_offset_ms: i64,
    /// Draws secrets.
    pub random: Box<dyn FnMut() -> u64 + Send>,
}

/// What the operator asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// A replica shall take part.
    Add(Wanted),
    /// A replica shall no longer take part. The last active one only with `lose_data`.
    Remove {
        /// Its number.
        id: u32,
        /// Even if nobody else holds what it holds.
        lose_data: bool,
    },
    /// Make a learner active as soon as it has copied everything: what happens anyway; tells why if it cannot be now.
    Promote {
        /// Its number.
        id: u32,
    },
    /// Another replica in place of one: added, copied and promoted, then the old one removed.
    Replace {
        /// Number of the old one.
        id: u32,
        /// The new one.
        by: Wanted,
    },
    /// Hand the shard over to another coordinator.
    Transfer {
        /// Its address.
        to: Endpoint,
    },
    /// Every member has lost its data: begin empty.
    BeginEmpty,
}

/// What happens to an agent.
#[derive(Clone, Debug)]
pub enum Event<'a> {
    /// [`Agent::due`] has come. Harmless at any other time.
    Tick,
    /// A control datagram came in.
    Datagram {
        /// Its source.
        from: Endpoint,
        /// Its bytes.
        bytes: &'a [u8],
    },
    /// What is on record of a shard, after a load or a change by anybody.
    Record {
        /// Shard.
        shard: u32,
        /// Number of the record's version at the authority; 0: there is none.
        revision: u64,
        /// The record.
        record: Option<Record>,
    },
    /// What became of an [`Action::Store`].
    Stored {
        /// Shard.
        shard: u32,
        /// Its number.
        id: u64,
        /// What became of it.
        outcome: StoreOutcome,
    },
    /// The role of coordinator of a shard was gained or lost.
    Role {
        /// Shard.
        shard: u32,
        /// Held now.
        held: bool,
    },
    /// This host was suspended: its monotonic clock stood still while those of others went on.
    Suspended,
    /// The process is to end, and its tables with it: what it serves is left to others. See [`Agent::has_stopped`].
    Stop,
    /// The operator asks for something; answered by [`Action::Reply`].
    Command {
        /// Shard.
        shard: u32,
        /// Number of the question.
        id: u64,
        /// What is asked for.
        command: Command,
    },
}

/// What became of a compare-and-swap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreOutcome {
    /// The record is stored under this revision.
    Stored(u64),
    /// Somebody else changed the record: it was not stored. An [`Event::Record`] follows.
    Conflict,
    /// Not known; why. An [`Event::Record`] follows when the authority answers again.
    Unknown(String),
}

/// What an agent wants done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send a datagram from the coordinator's address.
    Send {
        /// Destination.
        to: Endpoint,
        /// Its bytes.
        bytes: Vec<u8>,
    },
    /// Store a record if its revision is still this one; at most one for each shard is under way.
    Store {
        /// Shard.
        shard: u32,
        /// Number for [`Event::Stored`].
        id: u64,
        /// Revision to replace; 0: there must be none.
        expected: u64,
        /// The new record.
        record: Record,
    },
    /// Ask for the record again: an [`Event::Record`] answers.
    Load {
        /// Shard.
        shard: u32,
    },
    /// Give up the role, and leave it to `to` for a while.
    Resign {
        /// Shard.
        shard: u32,
    },
    /// Answer the operator.
    Reply {
        /// Number of the question.
        id: u64,
        /// What was done, or why not and what to do.
        result: Result<String, String>,
    },
    /// Tell the log.
    Log {
        /// How bad it is.
        level: Level,
        /// What happened.
        what: String,
    },
}

/// How bad a log line is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// As it should be.
    Info,
    /// Worth a look.
    Warn,
    /// Somebody should act.
    Error,
}

/// What breaks a rule each, one switch each; for tests that show that simulation notices.
#[cfg(feature = "published")]
#[derive(Clone, Copy, Debug, Default)]
pub struct Mutants {
    /// A lease runs as long as active members grant it: learners about to be promoted are not asked.
    pub lease_of_active: bool,
    /// Hole 15: a member index is used again with its acknowledgements.
    pub keep_bits: bool,
    /// A member is out of `must_ack` before every CPU uses the epoch without it.
    pub one_step_removal: bool,
    /// A take-over that all members confirmed does not wait although the record was not settled.
    pub skip_settled: bool,
    /// Hole 10: a take-over waits for nobody's lease.
    pub no_wait: bool,
    /// Hole 14: a write is aborted when one member has recorded that.
    pub abort_early: bool,
    /// Hole 14: a write is aborted although a lower one of its key is pending.
    pub abort_despite_lower: bool,
    /// Hole 9: a take-over serves what its members happen to hold.
    pub no_converge: bool,
    /// Hole 17: a take-over believes learners.
    pub believe_learners: bool,
    /// Hole 24: a take-over reads sessions from a member that confirmed when others had agreed without it.
    pub believe_latecomers: bool,
    /// Hole 17: a learner is promoted before it has copied everything.
    pub promote_early: bool,
    /// A replica's stamp is echoed as soon as it comes: a fresh lease from a coordinator whose clock stood still.
    pub echo_at_once: bool,
    /// Hole 8: writes that nobody sends again stay pending.
    pub no_repair: bool,
}

/// Time between looks for idle sessions.
const SWEEP_MS: u64 = 1000;
/// Time between steps of a shard that waits for answers.
const BUSY_MS: u64 = 2;

/// The agent of one coordinator process.
pub struct Agent {
    settings: Settings,
    sessions: Sessions,
    shards: BTreeMap<u32, Shard>,
    tick_ms: u64,
    sweep_ms: u64,
    stopping: bool,
    /// Rules broken on purpose.
    #[cfg(feature = "published")]
    pub mutants: Mutants,
}

impl Agent {
    /// An agent of these shards, which knows nothing yet. `session_count` is its tables'.
    ///
    /// # Panics
    /// If there is no shard.
    pub fn new(mut settings: Settings, shards: &[u32], session_count: u32, now_ms: u64) -> Self {
        // Tokens are made from secrets of their own: `random` stays with the settings' owner from here on.
        let random = std::mem::replace(&mut settings.random, Box::new(|| 0));
        Self {
            sessions: Sessions::new(now_ms, session_count, shards, random),
            shards: shards.iter().map(|&id| (id, Shard::new(id, now_ms))).collect(),
            tick_ms: now_ms,
            sweep_ms: now_ms + SWEEP_MS,
            stopping: false,
            #[cfg(feature = "published")]
            mutants: Mutants::default(),
            settings,
        }
    }

    /// When [`Event::Tick`] is due next.
    pub fn due(&self) -> u64 {
        self.tick_ms
    }

    /// Whether a shard is served by this agent.
    pub fn serves(&self, shard: u32) -> bool {
        self.shards.get(&shard).is_some_and(Shard::serves)
    }

    /// Takes what happened; says what to do.
    ///
    /// # Errors
    /// The tables could not be reached: the process has to end. What it leaves is what a crash leaves.
    pub fn step(&mut self, now_ms: u64, event: Event<'_>, tables: &mut dyn Tables) -> Result<Vec<Action>, TablesError> {
        let mut out = Vec::new();
        let mut cx = Context {
            now_ms,
            settings: &self.settings,
            tables,
            sessions: &mut self.sessions,
            out: &mut out,
            stopping: self.stopping,
            #[cfg(feature = "published")]
            mutant: self.mutants,
        };
        match event {
            Event::Tick => {
                for shard in self.shards.values_mut() {
                    shard.tick(&mut cx)?;
                }
                if now_ms >= self.sweep_ms {
                    self.sweep_ms = now_ms + SWEEP_MS;
                    cx.sessions.rotate(now_ms);
                    sweep(&mut cx)?;
                }
                let busy = self.shards.values().any(Shard::is_busy);
                let step_ms = if busy { BUSY_MS.min(self.settings.heartbeat_ms) } else { self.settings.heartbeat_ms };
                self.tick_ms = now_ms + step_ms.max(1);
            }
            Event::Datagram { from, bytes } => {
                if let Ok(packet) = Packet::parse(bytes) {
                    datagram(&mut self.shards, &mut cx, from, bytes, &packet)?;
                }
            }
            Event::Record { shard, revision, record } => {
                if let Some(shard) = self.shards.get_mut(&shard) {
                    shard.loaded(&mut cx, revision, record)?;
                }
            }
            Event::Stored { shard, id, outcome } => {
                if let Some(shard) = self.shards.get_mut(&shard) {
                    shard.stored(&mut cx, id, outcome)?;
                }
            }
            Event::Role { shard, held } => {
                if let Some(shard) = self.shards.get_mut(&shard) {
                    shard.role(&mut cx, held)?;
                }
            }
            Event::Command { shard, id, command } => match self.shards.get_mut(&shard) {
                Some(shard) => shard.command(&mut cx, id, command)?,
                None => {
                    let result = Err(format!("this coordinator does not know shard {shard}"));
                    out.push(Action::Reply { id, result });
                }
            },
            Event::Suspended => {
                for shard in self.shards.values_mut() {
                    shard.suspended(&mut cx)?;
                }
            }
            Event::Stop => {
                (self.stopping, cx.stopping) = (true, true);
                for shard in self.shards.values_mut() {
                    shard.stop(&mut cx)?;
                }
            }
        }
        if self.shards.values().any(Shard::is_busy) {
            self.tick_ms = self.tick_ms.min(now_ms + BUSY_MS);
        }
        Ok(out)
    }

    /// After [`Event::Stop`]: no shard is served, and the record says so. Waiting for it is only a kindness to whoever takes
    /// over: it need not wait for leases.
    pub fn has_stopped(&self) -> bool {
        self.stopping && self.shards.values().all(Shard::has_left)
    }

    /// Sessions open, and how many there can be.
    pub fn sessions(&self) -> (usize, usize) {
        (self.sessions.in_use(), self.sessions.limit())
    }

    /// What is to be said of each shard.
    pub fn status(&self, now_ms: u64) -> Vec<ShardStatus> {
        self.shards.values().map(|shard| shard.status(now_ms)).collect()
    }
}

/// Handles one control packet.
fn datagram(
    shards: &mut BTreeMap<u32, Shard>,
    cx: &mut Context<'_>,
    from: Endpoint,
    bytes: &[u8],
    packet: &Packet<'_>,
) -> Result<(), TablesError> {
    let header = packet.header;
    let Some(shard) = shards.get_mut(&header.shard) else {
        if matches!(header.op, Op::Open | Op::Close | Op::Locate) {
            reject(None, cx, header, Reason::Shard, from);
        }
        return Ok(());
    };
    match header.op {
        Op::Open => return open(shard, cx, from, packet, bytes.len()),
        Op::Close => return close(shard, cx, from, packet),
        Op::Locate => {
            let whole = packet.value.len() >= OPEN_PADDING;
            let take_over = control::parse::<control::Locate>(packet).map_or(0, |locate| locate.take_over);
            if take_over != 0 && control::is_sealed(bytes, cx.settings.cluster_key) {
                shard.invited(cx, from, take_over)?;
            }
            match shard.locate(cx).filter(|_| whole) {
                Some(located) => {
                    let bytes = control::emit(Header { op: Op::Located, key_len: 0, ..header }, &located);
                    cx.out.push(Action::Send { to: from, bytes });
                }
                None => reject(Some(shard), cx, header, if whole { Reason::Shard } else { Reason::Malformed }, from),
            }
            return Ok(());
        }
        _ => {}
    }
    // The rest comes from replicas.
    if !control::is_sealed(bytes, cx.settings.cluster_key) {
        return Ok(());
    }
    match header.op {
        Op::Installed => match control::parse::<Installed>(packet) {
            Some(answer) => shard.installed(cx, from, &header, &answer),
            None => Ok(()),
        },
        Op::HeartbeatAck => match control::parse::<HeartbeatAck>(packet) {
            Some(ack) => shard.heartbeat_ack(cx, from, &header, &ack),
            None => Ok(()),
        },
        Op::ControlReject => {
            shard.rejected(cx, from, &header);
            Ok(())
        }
        Op::Collected => match Collected::parse(packet.value) {
            Some(collected) => shard.collected(cx, from, &header, collected),
            None => Ok(()),
        },
        Op::Fetched => match Fetched::parse(packet.value) {
            Some(fetched) => shard.fetched(cx, from, fetched),
            None => Ok(()),
        },
        Op::Answer => match control::parse::<Answer>(packet) {
            Some(answer) => shard.answered(cx, from, packet, &answer),
            None => Ok(()),
        },
        _ => Ok(()),
    }
}

fn reject(shard: Option<&Shard>, cx: &mut Context<'_>, mut header: Header, reason: Reason, to: Endpoint) {
    header.op = Op::ControlReject;
    header.status = reason.to_wire();
    header.epoch = shard.and_then(|shard| shard.record.as_ref()).map_or(0, |record| record.epoch);
    cx.out.push(Action::Send { to, bytes: header.datagram(&[], &[]) });
}

/// Closes sessions that were not used for long.
fn sweep(cx: &mut Context<'_>) -> Result<(), TablesError> {
    // A record tells its last use to within a second.
    let Some(used_before_ms) = cx.now_ms.checked_sub(cx.settings.idle_ms + 1000) else { return Ok(()) };
    let mut idle = Vec::new();
    cx.tables.records(cx.sessions.bound(), &mut |_, record| {
        if record.session != 0 && record.used_ms < used_before_ms {
            idle.push(SessionId(record.session));
        }
    })?;
    for session in idle {
        if cx.sessions.get(session).is_none() {
            continue;
        }
        match cx.tables.close(session, Some(used_before_ms))? {
            CloseOutcome::Closed { request, state } => cx.sessions.close(session, request, state),
            // Used meanwhile; or its write may still take effect, and its record is how it will be known.
            CloseOutcome::NotYours | CloseOutcome::Unresolved => {}
        }
    }
    Ok(())
}

/// Opens a session in the table and in the data path.
fn open_session(
    shard: &Shard,
    cx: &mut Context<'_>,
    client: Endpoint,
    request: Option<u64>,
) -> Result<Result<Open, Reason>, TablesError> {
    // The counter is reserved on record ahead of need; while the authority is down for long, it may not be.
    if !shard.may_open(cx) {
        return Ok(Err(Reason::NoSession));
    }
    let Part::Serving(serving) = &shard.part else { return Ok(Err(Reason::NoMember)) };
    let open = match cx.sessions.open(serving.epoch, shard.id, client, request) {
        Ok(open) => open,
        Err(reason) => {
            if reason == NoSession::Generations {
                let what = format!("all {COUNTER_MAX} sessions of this tenure were issued: hand the shard over");
                cx.log(Level::Error, what);
            }
            return Ok(Err(Reason::NoSession));
        }
    };
    let record = underpass_abi::abi::up_session {
        session: open.session.0,
        token: open.token,
        reply_addr: client.addr.to_ipv6_mapped().octets(),
        reply_port: client.port.to_be(),
        used_ms: cx.now_ms,
        shard: shard.id,
        ..Default::default()
    };
    if !cx.tables.load(open.session.index(), &record)? {
        return Err(TablesError(format!("session index {} is taken in the data path alone", open.session.index())));
    }
    Ok(Ok(open))
}

/// OPEN (section 5): first a challenge, then a session for who answers it.
fn open(
    shard: &Shard,
    cx: &mut Context<'_>,
    from: Endpoint,
    packet: &Packet<'_>,
    len: usize,
) -> Result<(), TablesError> {
    let mut header = packet.header;
    let client = header.reply_to().filter(is_a_hosts);
    let whole = packet.key.is_empty() && packet.value.len() >= OPEN_PADDING;
    let (Some(client), true, Some(control::Open { .. })) = (client, whole, control::parse(packet)) else {
        reject(Some(shard), cx, header, Reason::Malformed, from);
        return Ok(());
    };
    if !shard.serves() || cx.stopping {
        reject(Some(shard), cx, header, Reason::NotCoordinator, from);
        return Ok(());
    }
    header.op = Op::Opened;
    header.epoch = shard.record().epoch;
    let mut opened = Opened { idle_ms: cx.settings.idle_ms, configuration: None };
    if header.token == 0 {
        header.session = SessionId(0);
        header.token = cx.sessions.challenge(client);
        cx.out.push(Action::Send { to: client, bytes: control::emit(header, &opened) });
        return Ok(());
    }
    if !cx.sessions.is_challenge(client, header.token) {
        reject(Some(shard), cx, header, Reason::Token, from);
        return Ok(());
    }
    let open = match repeated(cx, client, header.shard, header.request)? {
        Some(open) => open,
        None => match open_session(shard, cx, client, Some(header.request))? {
            Ok(open) => open,
            Err(reason) => {
                reject(Some(shard), cx, header, reason, from);
                return Ok(());
            }
        },
    };
    opened.configuration = Some(shard.record().configuration());
    (header.session, header.token) = (open.session, open.token);
    let answer = control::emit(header, &opened);
    if answer.len() > len {
        // An answer longer than its question would make an amplifier: the padding is missing.
        reject(Some(shard), cx, header, Reason::Malformed, from);
        return Ok(());
    }
    cx.out.push(Action::Send { to: client, bytes: answer });
    Ok(())
}

/// The session of an OPEN that arrives again. One that wrote already is another client's, at the same address: its OPEN
/// was answered, and its numbers are used up.
fn repeated(cx: &mut Context<'_>, client: Endpoint, shard: u32, request: u64) -> Result<Option<Open>, TablesError> {
    let Some(open) = cx.sessions.opened_by(client, shard, request) else { return Ok(None) };
    if cx.tables.record(open.session.index())?.request == 0 {
        return Ok(Some(open));
    }
    cx.sessions.forget_open(open.session);
    Ok(None)
}

/// CLOSE (section 5), for the session's owner alone.
fn close(shard: &Shard, cx: &mut Context<'_>, from: Endpoint, packet: &Packet<'_>) -> Result<(), TablesError> {
    let mut header = packet.header;
    let session = header.session;
    let (client, closed) = if let Some(open) = cx.sessions.get(session) {
        if open.token != header.token || open.shard != header.shard {
            reject(Some(shard), cx, header, Reason::Token, from);
            return Ok(());
        }
        match cx.tables.close(session, None)? {
            CloseOutcome::Closed { request, state } => {
                cx.sessions.close(session, request, state);
                (open.client, Closed { closed: true, request, state })
            }
            CloseOutcome::Unresolved => {
                let record = cx.tables.record(session.index())?;
                (open.client, Closed { closed: false, request: record.request, state: record.state.into() })
            }
            CloseOutcome::NotYours => {
                reject(Some(shard), cx, header, Reason::Session, from);
                return Ok(());
            }
        }
    } else if let (Some(ended), Some(client)) =
        (cx.sessions.ended(session, header.token), header.reply_to().filter(is_a_hosts))
    {
        // Its answer was lost.
        (client, Closed { closed: true, request: ended.request, state: ended.state })
    } else {
        reject(Some(shard), cx, header, Reason::Session, from);
        return Ok(());
    };
    header.op = Op::Closed;
    header.epoch = shard.record.as_ref().map_or(0, |record| record.epoch);
    (header.key_len, header.value_len) = (0, 0);
    cx.out.push(Action::Send { to: client, bytes: control::emit(header, &closed) });
    Ok(())
}

/// Whether one host can have this address and port, so that an answer may go there.
fn is_a_hosts(endpoint: &Endpoint) -> bool {
    let addr = endpoint.addr;
    endpoint.port != 0 && !addr.is_unspecified() && !addr.is_multicast() && !addr.is_broadcast()
}
