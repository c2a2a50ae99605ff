//! One client of one shard: a session at a time, retransmission, deadlines, and what a silence or a reject proves.
//!
//! A [`Client`] has at most one write outstanding and up to [`Settings::reads_max`] reads. It opens a session when it
//! needs one, opens another when that one is lost, and closes what it leaves behind. `docs/protocol.md`, sections 3 and
//! 5, is the specification. A program that wants more writes at once runs more of these.
//!
//! What an outcome promises:
//!
//! - [`Outcome::Written`] and [`Outcome::Read`]: the operation took place between its submission and now.
//! - [`Outcome::Failed`]: it had no effect and never will have one.
//! - [`Outcome::Unknown`] (writes alone): it may have had its effect, may have it later, or never.
//! - [`Outcome::TimedOut`] (reads alone): no answer; a read has no effect.
//!
//! A reject alone seldom proves anything about a write: another copy of the same packet may have been ordered before, or
//! may be on its way. Proof is a reject that depends on nothing but the packet's own bytes, `aborted`, or the agent's word
//! on closing the session that it never took the request and now never will.
//!
//! A client follows its shard to whichever coordinator serves it ([`locate`]). What is outstanding goes along, in the same
//! session: which copy of a request comes first makes no difference, also across a change of coordinator.
//!
//! Times are nanoseconds of any clock that does not go back.

mod locate;
mod output;
mod request;
mod retry;
#[cfg(test)]
mod tests;

use underpass_abi::abi::{UP_STATE_ABORTED, UP_STATE_COMMITTING, UP_STATE_IDLE, UP_STATE_PENDING, UP_STATE_STARTING};

use self::{
    locate::{Guide, Route, UNANSWERED_MAX, is_elsewhere},
    retry::{Dice, RoundTrip, doubled},
};
pub use self::{
    output::Output,
    request::{Completion, Doubt, Failure, Invalid, Item, Outcome, Refused, Request, Settings},
};
use crate::{
    control::{self, Close, Closed, Located, OPEN_PADDING, Open, Opened},
    wire::{Endpoint, HEADER_LEN, Header, Kind, Op, Packet, Reason, SessionId, Status},
};

/// A second, in the unit of this module's times.
pub const SECOND_NS: u64 = 1_000_000_000;
/// One that never comes.
pub const NEVER: u64 = u64::MAX;

/// Sessions left behind that a client remembers to close; the agent's ageing closes what is beyond that.
const RETIRED_MAX: usize = 32;
/// How often a client asks, without an answer, for a session left behind to be closed.
const CLOSE_TRIES_MAX: u32 = 12;
/// Tries counted when the agent answers that the write is pending: it is worth asking again, at a slow pace,
/// for as long as it takes.
const CLOSE_TRIES_PENDING: u32 = 5;
const CLOSE_FIRST_NS: u64 = 20_000_000;
const CLOSE_MAX_NS: u64 = 2 * SECOND_NS;
/// CLOSEs of a session left behind without an answer at which the coordinator is looked for.
const CLOSE_TRIES_LOST: u32 = 3;
/// Challenges answered at once before an agent that keeps challenging is asked more slowly.
const CHALLENGES_AT_ONCE: u32 = 3;

/// What happens to a client, other than a new request.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// A datagram came.
    Packet(&'a Packet<'a>),
    /// [`Client::due`] has come. Harmless at any other time.
    Tick,
    /// Open a session ahead of need, and keep trying until this time.
    Open {
        /// When to stop trying.
        until: u64,
    },
    /// Another session of the same coordinator is gone, perhaps this one too: open a new one before the next write.
    Suspect,
    /// Another client of the same shard looks for the coordinator: it will tell, by [`Event::Located`] (true). Or it no longer
    /// does (false). For a driver of many clients, that would otherwise all ask at once.
    Spared(bool),
    /// What another client of the same shard was told, in answer to its own LOCATE.
    Located(&'a Located),
    /// End every request now, and the session.
    End,
}

/// A request outstanding and the packet that asks for it: every copy is the same bytes.
#[derive(Debug)]
struct Operation {
    tag: u64,
    header: Header,
    packet: Vec<u8>,
    deadline: u64,
    submitted: u64,
    /// 0: no copy was sent in the session of `header`.
    sent_first: u64,
    sent_ever: Option<u64>,
    /// When the latest copy was sent, and the tenure of whom it was sent to.
    sent_last: u64,
    tenure: u32,
    /// In the session of `header`.
    sends: u32,
    sends_total: u32,
    /// Copies sent since the last answer of any kind.
    unanswered: u32,
    /// The latest answer was that somebody else may take it.
    elsewhere: bool,
    rejects: u32,
    last_reject: Option<Reason>,
    /// When to send again; [`NEVER`] while it waits for a session.
    due: u64,
}

impl Operation {
    fn in_session(&self) -> bool {
        self.header.session.0 != 0
    }

    fn answers(&self, reply: &Header) -> bool {
        self.in_session()
            && self.header.session == reply.session
            && self.header.request == reply.request
            && self.header.token == reply.token
            && self.header.shard == reply.shard
    }

    fn bind(&mut self, session: SessionId, token: u64, request: u64) {
        self.header.session = session;
        self.header.token = token;
        self.header.request = request;
        self.header.emit(&mut self.packet);
        (self.sends, self.unanswered, self.elsewhere) = (0, 0, false);
    }

    /// Takes it out of a session that is gone. For reads, and for writes of which no copy was sent.
    fn unbind(&mut self) {
        self.header.session = SessionId(0);
        self.due = NEVER;
    }

    /// Whether it is unlikely that the latest copy will be answered.
    fn turned_away(&self) -> bool {
        self.elsewhere || self.unanswered >= UNANSWERED_MAX
    }

    fn send(
        &mut self,
        now: u64,
        route: Route,
        trip: &RoundTrip,
        settings: &Settings,
        dice: &mut Dice,
        out: &mut Output,
    ) {
        out.send(route.to, &self.packet);
        (self.sent_last, self.tenure) = (now, route.tenure);
        if self.sends == 0 {
            self.sent_first = now;
        }
        self.sent_ever.get_or_insert(now);
        self.sends += 1;
        self.sends_total += 1;
        self.unanswered += 1;
        let wait = trip.timeout(settings, self.unanswered);
        self.due = now + wait + dice.number() % (wait / 4 + 1);
    }

    fn back_off(&mut self, now: u64, reason: Option<Reason>, settings: &Settings, dice: &mut Dice) {
        self.rejects += 1;
        self.last_reject = reason;
        (self.unanswered, self.elsewhere) = (0, is_elsewhere(reason));
        self.due = now + dice.around(doubled(settings.reject_min_ns, self.rejects - 1, settings.reject_max_ns));
    }

    fn wake(&self) -> u64 {
        self.due.min(self.deadline)
    }

    fn complete(self, now: u64, time_ms: Option<u64>, outcome: Outcome, out: &mut Output) {
        out.completions.push(Completion {
            tag: self.tag,
            outcome,
            time_ms,
            submitted_ns: self.submitted,
            sent_ns: self.sent_ever,
            done_ns: now,
            sends: self.sends_total,
            rejects: self.rejects,
        });
    }
}

#[derive(Debug)]
enum Phase {
    /// Sent and sent again until an answer or its deadline.
    Trying,
    /// Past its deadline, with rejects alone to show: the session is being closed, to learn whether it was taken.
    Proving { nonce: u64, due: u64, until: u64, tries: u32 },
}

#[derive(Debug)]
struct Write {
    operation: Operation,
    kind: Kind,
    phase: Phase,
}

#[derive(Debug)]
enum Link {
    Closed,
    Opening(Opening),
    Open(Session),
}

#[derive(Debug)]
struct Opening {
    /// The request number of the OPEN: random, so that only who saw it can answer it.
    nonce: u64,
    /// 0 until the agent has given one.
    token: u64,
    due: u64,
    sent: u64,
    tries: u32,
    /// Copies sent since the last answer of any kind.
    unanswered: u32,
    challenges: u32,
    /// Kept up until then even if no request waits.
    until: u64,
}

impl Opening {
    fn new(now: u64, until: u64) -> Self {
        Self { nonce: 0, token: 0, due: now, sent: now, tries: 0, unanswered: 0, challenges: 0, until }
    }
}

#[derive(Debug)]
struct Session {
    id: SessionId,
    token: u64,
    idle_ns: u64,
    /// The coordinator has seen a request of this session at or after this time.
    used: u64,
    suspect: bool,
    /// Of the coordinator that gave it.
    tenure: u32,
}

/// A session left behind, to be closed once its write is resolved.
#[derive(Debug)]
struct Retired {
    id: SessionId,
    token: u64,
    nonce: u64,
    due: u64,
    tries: u32,
    /// The write of unknown outcome: sent again when the agent says that it is pending, so that its key does not stay
    /// dirty for want of a lost clone.
    write: Option<(u64, Vec<u8>)>,
}

/// One client of one shard. See the module's documentation.
#[derive(Debug)]
pub struct Client {
    settings: Settings,
    guide: Guide,
    link: Link,
    write: Option<Write>,
    /// A read's request number modulo the length is its place.
    reads: Vec<Option<Operation>>,
    reads_outstanding: usize,
    next_read: u64,
    /// In the session of `link`.
    next_write: u64,
    retired: Vec<Retired>,
    read_trip: RoundTrip,
    write_trip: RoundTrip,
    /// Sessions lost in a row without a reply in between.
    losses: u32,
    /// Nonce of the OPEN that gave the latest session.
    opened_by: u64,
    open_reject: Option<Reason>,
    due: u64,
}

impl Client {
    /// A client without a session, of a shard that one of these coordinates, or knows who does. The first is asked first.
    ///
    /// # Panics
    /// If [`Settings::reads_max`] is 0, or no coordinator is given.
    pub fn new(settings: Settings, coordinators: &[Endpoint]) -> Self {
        assert!(settings.reads_max > 0, "a client must be allowed at least one read");
        Self {
            settings,
            guide: Guide::new(coordinators),
            link: Link::Closed,
            write: None,
            reads: (0..settings.reads_max).map(|_| None).collect(),
            reads_outstanding: 0,
            next_read: 1,
            next_write: 1,
            retired: Vec::with_capacity(RETIRED_MAX),
            read_trip: RoundTrip::default(),
            write_trip: RoundTrip::default(),
            losses: 0,
            opened_by: 0,
            open_reject: None,
            due: NEVER,
        }
    }

    /// When it next needs an [`Event::Tick`]; [`NEVER`] if not before something else happens.
    pub fn due(&self) -> u64 {
        self.due
    }

    /// Whether a write would be accepted.
    pub fn can_write(&self) -> bool {
        self.write.is_none()
    }

    /// Whether a read would be accepted.
    pub fn can_read(&self) -> bool {
        self.reads_outstanding < self.reads.len()
    }

    /// Whether nothing is outstanding, apart from sessions left behind.
    pub fn is_idle(&self) -> bool {
        self.write.is_none() && self.reads_outstanding == 0
    }

    /// The open session.
    pub fn session(&self) -> Option<SessionId> {
        match &self.link {
            Link::Open(session) => Some(session.id),
            _ => None,
        }
    }

    /// Whether it is trying to open a session.
    pub fn is_opening(&self) -> bool {
        matches!(self.link, Link::Opening(_))
    }

    /// Whether it has no session and does not try to open one.
    pub fn is_closed(&self) -> bool {
        matches!(self.link, Link::Closed)
    }

    /// The latest reject of an OPEN since a session was opened.
    pub fn open_reject(&self) -> Option<Reason> {
        self.open_reject
    }

    /// Request number of the latest OPEN, which its answers carry; 0: none was sent. For a driver that shares a socket
    /// among clients.
    pub fn open_nonce(&self) -> u64 {
        match &self.link {
            Link::Opening(opening) if opening.nonce != 0 => opening.nonce,
            _ => self.opened_by,
        }
    }

    /// Whether a packet of this session, or an answer to an OPEN or LOCATE with this nonce, is for this client. For a driver that
    /// shares a socket among clients.
    pub fn expects(&self, session: SessionId, request: u64) -> bool {
        let opening = match &self.link {
            Link::Opening(opening) => opening.nonce == request,
            Link::Open(open) => open.id == session,
            Link::Closed => false,
        };
        let operations = || self.write.iter().map(|write| &write.operation).chain(self.reads.iter().flatten());
        opening
            || (session.0 != 0
                && (self.retired.iter().any(|retired| retired.id == session)
                    || operations().any(|operation| operation.header.session == session)))
            || (self.opened_by != 0 && self.opened_by == request)
            || (self.locate_nonce() != 0 && self.locate_nonce() == request)
    }

    /// Accepts a request to be over by `deadline`, a time of the same clock as `now`; a rejected write may take
    /// [`Settings::grace_ns`] longer. `random` must not be predictable by others than the caller.
    pub fn submit(
        &mut self,
        now: u64,
        random: u64,
        request: Request<'_>,
        tag: u64,
        deadline: u64,
        out: &mut Output,
    ) -> Result<(), Refused> {
        request.validate()?;
        let mut header = Header::new(match request {
            Request::Read { .. } => Op::Read,
            Request::Write { .. } => Op::Write,
        });
        header.shard = self.settings.shard;
        header.set_reply_to(self.settings.reply_to);
        let key = request.key();
        header.key_len = key.len() as u16;
        let mut packet = Vec::with_capacity(256);
        packet.resize(HEADER_LEN, 0);
        packet.extend_from_slice(key);
        let write = match request {
            Request::Read { .. } => {
                if !self.can_read() {
                    return Err(Refused::Full);
                }
                None
            }
            Request::Write { kind, operand, .. } => {
                if !self.can_write() {
                    return Err(Refused::Full);
                }
                header.kind = kind.to_wire();
                header.flags = operand.emit(kind, &mut packet);
                Some(kind)
            }
        };
        header.value_len = (packet.len() - HEADER_LEN - key.len()) as u32;
        let mut operation = Operation {
            tag,
            header,
            packet,
            deadline,
            submitted: now,
            sent_first: 0,
            sent_ever: None,
            sent_last: 0,
            tenure: 0,
            sends: 0,
            sends_total: 0,
            unanswered: 0,
            elsewhere: false,
            rejects: 0,
            last_reject: None,
            due: NEVER,
        };
        let dice = &mut Dice::new(random);
        match write {
            Some(kind) => {
                self.write = Some(Write { operation, kind, phase: Phase::Trying });
                self.start_write(now, dice, out);
            }
            None => {
                let (slot, number) = self.free_read();
                operation.header.request = number;
                self.reads[slot] = Some(operation);
                self.reads_outstanding += 1;
                self.start_read(slot, now, dice, out);
            }
        }
        self.due = self.due.min(deadline);
        Ok(())
    }

    /// Takes in an event. `random` as for [`Client::submit`].
    pub fn step(&mut self, now: u64, random: u64, event: Event<'_>, out: &mut Output) {
        let dice = &mut Dice::new(random);
        match event {
            Event::Packet(packet) => self.receive(now, packet, dice, out),
            Event::Tick => self.tick(now, dice, out),
            Event::Open { until } => {
                if matches!(self.link, Link::Closed) {
                    self.open(now, until, dice, out);
                } else if let Link::Opening(opening) = &mut self.link {
                    opening.until = opening.until.max(until);
                }
            }
            Event::Suspect => {
                if let Link::Open(session) = &mut self.link {
                    session.suspect = true;
                }
            }
            Event::Spared(spared) => self.spare(spared),
            Event::Located(located) => self.take_word(now, located, dice, out),
            Event::End => self.end(now, dice, out),
        }
    }

    /// Place and number of the next read. Numbers whose place is taken by a slow read are left out.
    fn free_read(&mut self) -> (usize, u64) {
        let length = self.reads.len() as u64;
        while self.reads[(self.next_read % length) as usize].is_some() {
            self.next_read += 1;
        }
        let number = self.next_read;
        self.next_read += 1;
        ((number % length) as usize, number)
    }

    fn start_read(&mut self, slot: usize, now: u64, dice: &mut Dice, out: &mut Output) {
        let route = self.guide.route();
        let Some(read) = &mut self.reads[slot] else { return };
        match &self.link {
            Link::Open(session) => {
                // A read moved from a lost session keeps its number: with another session it is another request.
                let number = read.header.request;
                read.bind(session.id, session.token, number);
                read.send(now, route, &self.read_trip, &self.settings, dice, out);
                self.due = self.due.min(read.wake());
            }
            Link::Opening(_) => {}
            Link::Closed => self.open(now, 0, dice, out),
        }
    }

    fn start_write(&mut self, now: u64, dice: &mut Dice, out: &mut Output) {
        if let Link::Open(session) = &self.link
            && (session.suspect
                || now.saturating_sub(session.used) > session.idle_ns / 2
                || session.tenure < self.guide.route().tenure)
        {
            // A write that meets a session closed for idleness would be of unknown outcome. Rather not try. Nor in one of a
            // former tenure: what a take-over rebuilds tells what became of its last write, and takes no other.
            let (id, token) = (session.id, session.token);
            self.retire(now, id, token, None, dice);
        }
        match &self.link {
            Link::Open(_) => self.bind_write(now, dice, out),
            Link::Opening(_) => {}
            Link::Closed => self.open(now, 0, dice, out),
        }
    }

    fn bind_write(&mut self, now: u64, dice: &mut Dice, out: &mut Output) {
        let (Link::Open(session), Some(write)) = (&self.link, &mut self.write) else { return };
        write.operation.bind(session.id, session.token, self.next_write);
        self.next_write += 1;
        write.operation.send(now, self.guide.route(), &self.write_trip, &self.settings, dice, out);
        self.due = self.due.min(write.operation.wake());
    }

    /// Sends what waited for a session.
    fn start_waiting(&mut self, now: u64, dice: &mut Dice, out: &mut Output) {
        if self.write.as_ref().is_some_and(|write| !write.operation.in_session()) {
            self.bind_write(now, dice, out);
        }
        for slot in 0..self.reads.len() {
            if self.reads[slot].as_ref().is_some_and(|read| !read.in_session()) {
                self.start_read(slot, now, dice, out);
            }
        }
    }

    fn has_waiting(&self) -> bool {
        self.write.as_ref().is_some_and(|write| !write.operation.in_session())
            || self.reads.iter().flatten().any(|read| !read.in_session())
    }

    // Opening and closing sessions.

    fn open(&mut self, now: u64, until: u64, dice: &mut Dice, out: &mut Output) {
        let mut opening = Opening::new(now, until);
        if self.losses > 1 {
            // Sessions that are lost as soon as they are opened must not be opened in a tight loop.
            let wait = doubled(self.settings.reject_min_ns, self.losses, self.settings.reject_max_ns);
            opening.due = now + dice.around(wait);
        } else {
            self.send_open(&mut opening, now, dice, out);
        }
        self.due = self.due.min(opening.due);
        self.link = Link::Opening(opening);
    }

    fn send_open(&self, opening: &mut Opening, now: u64, dice: &mut Dice, out: &mut Output) {
        if opening.nonce == 0 {
            opening.nonce = dice.number().max(1);
        }
        let mut header = Header::new(Op::Open);
        header.shard = self.settings.shard;
        header.set_reply_to(self.settings.reply_to);
        header.request = opening.nonce;
        header.token = opening.token;
        out.send(self.coordinator(), &control::emit(header, &Open { padding: " ".repeat(OPEN_PADDING) }));
        opening.tries += 1;
        opening.unanswered += 1;
        opening.sent = now;
        let wait = doubled(self.settings.resend_first_ns, opening.tries - 1, self.settings.resend_max_ns);
        opening.due = now + wait + dice.number() % (wait / 4 + 1);
    }

    fn send_close(&self, id: SessionId, token: u64, nonce: u64, out: &mut Output) {
        let mut header = Header::new(Op::Close);
        header.shard = self.settings.shard;
        header.set_reply_to(self.settings.reply_to);
        header.session = id;
        header.token = token;
        header.request = nonce;
        out.send(self.coordinator(), &control::emit(header, &Close {}));
    }

    /// The session is no longer known to the coordinator.
    fn lose(&mut self, id: SessionId) {
        if self.session() == Some(id) {
            self.link = Link::Closed;
            self.losses = self.losses.saturating_add(1);
        }
    }

    /// Leaves a session behind, to be closed when its write, if it is given, is resolved.
    fn retire(&mut self, now: u64, id: SessionId, token: u64, write: Option<(u64, Vec<u8>)>, dice: &mut Dice) {
        if self.session() == Some(id) {
            self.link = Link::Closed;
        }
        if self.retired.len() == RETIRED_MAX {
            // Rather one that the agent's ageing will close in any case.
            let at = self.retired.iter().position(|retired| retired.write.is_none()).unwrap_or(0);
            self.retired.remove(at);
        }
        let nonce = dice.number();
        self.retired.push(Retired { id, token, nonce, due: now, tries: 0, write });
        self.due = self.due.min(now);
    }

    // Packets.

    fn receive(&mut self, now: u64, packet: &Packet<'_>, dice: &mut Dice, out: &mut Output) {
        let header = &packet.header;
        match header.op {
            Op::RReply => self.read_reply(now, packet, dice, out),
            Op::RReject => self.read_reject(now, header, dice, out),
            Op::WReply => self.write_reply(now, packet, dice, out),
            Op::WReject => self.write_reject(now, header, out, dice),
            Op::Opened => self.opened(now, packet, dice, out),
            Op::Closed => self.closed(now, packet, dice, out),
            Op::Located => self.located(now, packet, dice, out),
            Op::ControlReject => self.control_reject(now, header, dice, out),
            // A request, or talk between agent and replica: not for a client.
            _ => {}
        }
    }

    fn read_slot(&self, header: &Header) -> Option<usize> {
        let slot = (header.request % self.reads.len() as u64) as usize;
        self.reads[slot].as_ref().is_some_and(|read| read.answers(header)).then_some(slot)
    }

    fn finish_read(&mut self, slot: usize, now: u64, outcome: Outcome, out: &mut Output) {
        self.answer_read(slot, now, None, outcome, out);
    }

    fn answer_read(&mut self, slot: usize, now: u64, time_ms: Option<u64>, outcome: Outcome, out: &mut Output) {
        let read = self.reads[slot].take().expect("the caller found it");
        self.reads_outstanding -= 1;
        read.complete(now, time_ms, outcome, out);
    }

    fn read_reply(&mut self, now: u64, packet: &Packet<'_>, dice: &mut Dice, out: &mut Output) {
        let header = &packet.header;
        let Some(slot) = self.read_slot(header) else { return };
        let item = match Status::from_wire(header.status) {
            Some(Status::Ok) => Some(Item { value: packet.value.to_vec(), cas: header.seq }),
            Some(Status::NotFound) => None,
            _ => return,
        };
        let read = self.reads[slot].as_ref().expect("found");
        let (sent, sends) = (read.sent_first, read.sends);
        if sends == 1 {
            self.read_trip.measure(now.saturating_sub(sent));
        }
        self.was_used(header.session, sent);
        self.was_answered(now, sent, header.epoch, dice, out);
        self.answer_read(slot, now, Some(header.time), Outcome::Read(item), out);
    }

    fn was_used(&mut self, id: SessionId, sent: u64) {
        if let Link::Open(session) = &mut self.link
            && session.id == id
        {
            session.used = session.used.max(sent);
            self.losses = 0;
        }
    }

    fn read_reject(&mut self, now: u64, header: &Header, dice: &mut Dice, out: &mut Output) {
        let Some(slot) = self.read_slot(header) else { return };
        let reason = Reason::from_wire(header.status);
        let former = self.guide.is_former(header.epoch);
        match reason {
            Some(reason @ (Reason::Session | Reason::Token)) if !former => {
                self.lose(header.session);
                let read = self.reads[slot].as_mut().expect("found");
                read.unbind();
                read.rejects += 1;
                read.last_reject = Some(reason);
                self.start_read(slot, now, dice, out);
            }
            Some(reason @ (Reason::KeyLength | Reason::ValueLength | Reason::Kind | Reason::Malformed)) => {
                self.finish_read(slot, now, Outcome::Failed(Failure::Rejected(reason)), out);
            }
            Some(Reason::Shard) if self.guide.is_alone() => {
                self.finish_read(slot, now, Outcome::Failed(Failure::Rejected(Reason::Shard)), out);
            }
            _ => {
                let read = self.reads[slot].as_mut().expect("found");
                read.back_off(now, reason, &self.settings, dice);
                self.due = self.due.min(read.wake());
                if is_elsewhere(reason) && !former {
                    self.look(now, dice, out);
                }
            }
        }
    }

    fn answered_write(&mut self, header: &Header) -> Option<&mut Write> {
        self.write.as_mut().filter(|write| write.operation.answers(header))
    }

    /// Ends the outstanding write, leaving behind a session that was being closed to prove its fate.
    fn finish_write(&mut self, now: u64, outcome: Outcome, dice: &mut Dice, out: &mut Output) {
        self.answer_write(now, None, outcome, dice, out);
    }

    fn answer_write(&mut self, now: u64, time_ms: Option<u64>, outcome: Outcome, dice: &mut Dice, out: &mut Output) {
        let write = self.write.take().expect("the caller found it");
        let Header { session, token, request, .. } = write.operation.header;
        let unknown = matches!(outcome, Outcome::Unknown(Doubt::Deadline(_) | Doubt::Ended));
        if unknown {
            self.retire(now, session, token, Some((request, write.operation.packet.clone())), dice);
        } else if matches!(write.phase, Phase::Proving { .. }) {
            self.retire(now, session, token, None, dice);
        }
        write.operation.complete(now, time_ms, outcome, out);
    }

    fn write_reply(&mut self, now: u64, packet: &Packet<'_>, dice: &mut Dice, out: &mut Output) {
        let header = &packet.header;
        let Some(write) = self.answered_write(header) else { return };
        // A member's ABORTED is not yet the coordinator's: that comes as a reject.
        let Some(status) = Status::from_wire(header.status).filter(|status| *status != Status::Aborted) else { return };
        let number = if write.kind == Kind::Incr && status == Status::Ok {
            let Some(number) = packet.value.first_chunk::<8>() else { return };
            Some(i64::from_be_bytes(*number))
        } else {
            None
        };
        let (sent, sends) = (write.operation.sent_first, write.operation.sends);
        if sends == 1 {
            self.write_trip.measure(now.saturating_sub(sent));
        }
        self.was_used(header.session, sent);
        self.was_answered(now, sent, header.epoch, dice, out);
        let outcome = Outcome::Written { status, seq: header.seq, number };
        // From a session that a take-over rebuilt it comes without.
        let time_ms = (header.time != 0).then_some(header.time);
        self.answer_write(now, time_ms, outcome, dice, out);
    }

    fn write_reject(&mut self, now: u64, header: &Header, out: &mut Output, dice: &mut Dice) {
        let settings = self.settings;
        let former = self.guide.is_former(header.epoch);
        let Some(write) = self.answered_write(header) else { return };
        let proving = matches!(write.phase, Phase::Proving { .. });
        match Reason::from_wire(header.status) {
            // These depend on nothing but the packet's bytes: no copy of it is ever taken.
            Some(reason @ (Reason::KeyLength | Reason::ValueLength | Reason::Kind)) => {
                self.finish_write(now, Outcome::Failed(Failure::Rejected(reason)), dice, out);
            }
            // A promise, for ever: under this number it has no effect. Under another, in another session, it may.
            Some(reason @ Reason::Aborted) if proving || now >= write.operation.deadline => {
                self.finish_write(now, Outcome::Failed(Failure::Rejected(reason)), dice, out);
            }
            Some(reason @ Reason::Aborted) => {
                write.operation.unbind();
                write.operation.rejects += 1;
                write.operation.last_reject = Some(reason);
                self.lose(header.session);
                self.start_write(now, dice, out);
            }
            // What a CLOSE of ours leads to, when it is on its way: no news.
            Some(Reason::Session | Reason::Token) if proving => {}
            Some(reason @ (Reason::Session | Reason::Token)) if !former => {
                // Another copy may have been taken while the session lived. Nor does it prove anything that this coordinator
                // took over after the write was sent to another one, tempting as it is: a take-over fences every
                // member and removes those that it cannot, and its sessions are those of the members' records, so a
                // write of a session that it did not know *when it took over* was processed by no member that is left, never
                // will be (no member listens to the former tenure), and was not committed (that takes all members, one
                // of which was fenced). But the reject says that the session is not known *now*. It may have been known,
                // with this very write committed, and closed since: by age, which is the coordinator's own setting, with
                // this reject or the copy that it answers long under way. Or its index was beyond the table of a
                // coordinator that has fewer sessions; or all members have lost their data and the operator began anew. The
                // client can exclude none of these, so it does not know.
                self.lose(header.session);
                self.finish_write(now, Outcome::Unknown(Doubt::SessionLost(reason)), dice, out);
            }
            reason => {
                write.operation.back_off(now, reason, &settings, dice);
                let wake = if proving { NEVER } else { write.operation.wake() };
                self.due = self.due.min(wake);
                if is_elsewhere(reason) && !former {
                    self.look(now, dice, out);
                }
            }
        }
    }

    fn opened(&mut self, now: u64, packet: &Packet<'_>, dice: &mut Dice, out: &mut Output) {
        let header = &packet.header;
        if header.shard != self.settings.shard {
            return;
        }
        if !matches!(&self.link, Link::Opening(opening) if opening.nonce == header.request) {
            // A copy of our OPEN was given a session of its own, or one that we no longer wanted.
            let surplus = header.session.0 != 0 && header.request == self.opened_by;
            if surplus && !self.holds(header.session) {
                self.send_close(header.session, header.token, dice.number(), out);
            }
            return;
        }
        let Some(opened) = control::parse::<Opened>(packet) else { return };
        if let Some(configuration) = &opened.configuration {
            self.learn_from_opened(now, configuration, dice);
        }
        let Link::Opening(opening) = &self.link else { return };
        if header.session.0 != 0 {
            self.begin_session(now, header, &opened, dice, out);
            return;
        }
        let challenges = opening.challenges + 1;
        let mut opening = Opening { nonce: 0, token: header.token, challenges, tries: 0, unanswered: 0, ..*opening };
        if challenges <= CHALLENGES_AT_ONCE {
            self.send_open(&mut opening, now, dice, out);
        } else {
            opening.due = now + dice.around(self.settings.reject_max_ns);
        }
        self.due = self.due.min(opening.due);
        self.link = Link::Opening(opening);
    }

    fn holds(&self, id: SessionId) -> bool {
        self.session() == Some(id)
            || self.retired.iter().any(|retired| retired.id == id)
            || self.write.as_ref().is_some_and(|write| write.operation.header.session == id)
    }

    fn begin_session(&mut self, now: u64, header: &Header, opened: &Opened, dice: &mut Dice, out: &mut Output) {
        let Link::Opening(opening) = &self.link else { return };
        let sent = opening.sent;
        self.opened_by = opening.nonce;
        self.open_reject = None;
        self.next_write = 1;
        self.link = Link::Open(Session {
            id: header.session,
            token: header.token,
            idle_ns: opened.idle_ms.saturating_mul(1_000_000),
            used: opening.sent,
            suspect: false,
            tenure: self.guide.route().tenure,
        });
        self.was_answered(now, sent, 0, dice, out);
        self.start_waiting(now, dice, out);
        self.send_again(now, dice, out);
    }

    fn control_reject(&mut self, now: u64, header: &Header, dice: &mut Dice, out: &mut Output) {
        let reason = Reason::from_wire(header.status);
        let settings = self.settings;
        if let Link::Opening(opening) = &mut self.link
            && opening.nonce == header.request
        {
            self.open_reject = reason;
            opening.unanswered = 0;
            match reason {
                Some(reason @ (Reason::Shard | Reason::Malformed))
                    if reason == Reason::Malformed || self.guide.is_alone() =>
                {
                    self.link = Link::Closed;
                    self.fail_waiting(now, reason, dice, out);
                }
                _ if is_elsewhere(reason) => {
                    let wait = doubled(settings.reject_min_ns, opening.tries, settings.reject_max_ns);
                    opening.due = now + dice.around(wait);
                    self.due = self.due.min(opening.due);
                    self.look(now, dice, out);
                }
                _ => {
                    if reason == Some(Reason::Token) {
                        // The secret behind it is gone: ask for another.
                        (opening.token, opening.nonce) = (0, 0);
                    }
                    let wait = doubled(settings.reject_min_ns * 4, opening.tries, settings.reject_max_ns * 4);
                    opening.due = now + dice.around(wait);
                    self.due = self.due.min(opening.due);
                }
            }
            return;
        }
        if is_elsewhere(reason) && self.closes(header.request) {
            self.look(now, dice, out);
        }
        // The agent does not know a session that we want closed. That proves nothing about a write; a copy of our CLOSE may
        // have been first.
        self.retired.retain(|retired| {
            !(retired.nonce == header.request && matches!(reason, Some(Reason::Session | Reason::Token)))
        });
    }

    /// Whether this is the number of a CLOSE that waits for an answer.
    fn closes(&self, request: u64) -> bool {
        let proving = self.write.as_ref().is_some_and(|write| match write.phase {
            Phase::Proving { nonce, .. } => nonce == request,
            Phase::Trying => false,
        });
        proving || self.retired.iter().any(|retired| retired.nonce == request)
    }

    /// Ends the requests that wait for a session that there will not be.
    fn fail_waiting(&mut self, now: u64, reason: Reason, dice: &mut Dice, out: &mut Output) {
        let failed = || Outcome::Failed(Failure::Rejected(reason));
        if self.write.as_ref().is_some_and(|write| !write.operation.in_session()) {
            self.finish_write(now, failed(), dice, out);
        }
        for slot in 0..self.reads.len() {
            if self.reads[slot].as_ref().is_some_and(|read| !read.in_session()) {
                self.finish_read(slot, now, failed(), out);
            }
        }
    }

    fn closed(&mut self, now: u64, packet: &Packet<'_>, dice: &mut Dice, out: &mut Output) {
        let header = &packet.header;
        let Some(closed) = control::parse::<Closed>(packet) else { return };
        let unresolved = matches!(closed.state, UP_STATE_STARTING | UP_STATE_PENDING | UP_STATE_COMMITTING);
        if let Some(write) = &self.write
            && let Phase::Proving { nonce, .. } = write.phase
            && (write.operation.header.session, write.operation.header.token, nonce)
                == (header.session, header.token, header.request)
        {
            let (request, last_reject) = (write.operation.header.request, write.operation.last_reject);
            let never_taken = closed.request < request || (closed.request == request && closed.state == UP_STATE_IDLE);
            let outcome = if closed.closed && never_taken {
                Outcome::Failed(last_reject.map_or(Failure::NeverSent(None), Failure::Rejected))
            } else if closed.closed && closed.request == request && closed.state == UP_STATE_ABORTED {
                Outcome::Failed(Failure::Rejected(Reason::Aborted))
            } else if closed.closed || unresolved {
                Outcome::Unknown(Doubt::Deadline(last_reject))
            } else {
                // The agent does not know the session: perhaps it closed it for an earlier copy of our CLOSE, whose
                // answer is still on its way.
                return;
            };
            let session = header.session;
            self.finish_write(now, outcome, dice, out);
            if closed.closed {
                self.retired.retain(|retired| retired.id != session);
            }
            return;
        }
        let Some(at) = self.retired.iter().position(|retired| {
            (retired.id, retired.token, retired.nonce) == (header.session, header.token, header.request)
        }) else {
            return;
        };
        if closed.closed || !unresolved {
            self.retired.swap_remove(at);
        } else if let Retired { write: Some((request, packet)), tries, .. } = &mut self.retired[at]
            && closed.request == *request
        {
            *tries = CLOSE_TRIES_PENDING.min(*tries);
            out.send(self.guide.route().to, packet);
        }
    }

    // Time.

    fn tick(&mut self, now: u64, dice: &mut Dice, out: &mut Output) {
        self.tick_write(now, dice, out);
        self.tick_reads(now, dice, out);
        self.tick_link(now, dice, out);
        self.tick_retired(now, dice, out);
        self.tick_look(now, dice, out);
        self.due = self.next_due();
    }

    fn tick_write(&mut self, now: u64, dice: &mut Dice, out: &mut Output) {
        let (settings, route) = (self.settings, self.guide.route());
        let Some(write) = &mut self.write else { return };
        let operation = &mut write.operation;
        match &mut write.phase {
            Phase::Trying if now >= operation.deadline => {
                let last = operation.last_reject;
                if !operation.in_session() {
                    let reason = self.open_reject();
                    self.finish_write(now, Outcome::Failed(Failure::NeverSent(reason)), dice, out);
                } else if operation.rejects == 0 {
                    self.finish_write(now, Outcome::Unknown(Doubt::Deadline(last)), dice, out);
                } else {
                    self.prove(now, dice, out);
                }
            }
            Phase::Trying => {
                if now >= operation.due {
                    operation.send(now, route, &self.write_trip, &settings, dice, out);
                    if operation.turned_away() {
                        self.look(now, dice, out);
                    }
                }
            }
            Phase::Proving { nonce, due, until, tries } => {
                if now >= *until {
                    let last = operation.last_reject;
                    self.finish_write(now, Outcome::Unknown(Doubt::Deadline(last)), dice, out);
                } else if now >= *due {
                    *tries += 1;
                    *due = now + doubled(settings.grace_ns / 8, *tries, settings.grace_ns);
                    let (nonce, Header { session, token, .. }) = (*nonce, operation.header);
                    self.send_close(session, token, nonce, out);
                }
            }
        }
    }

    /// Closes the session of the outstanding write, to learn whether it was ever taken.
    fn prove(&mut self, now: u64, dice: &mut Dice, out: &mut Output) {
        let grace = self.settings.grace_ns;
        let Some(write) = &mut self.write else { return };
        let nonce = dice.number();
        write.phase = Phase::Proving { nonce, due: now + grace / 8, until: now + grace, tries: 0 };
        let Header { session, token, .. } = write.operation.header;
        if self.session() == Some(session) {
            self.link = Link::Closed;
        }
        self.send_close(session, token, nonce, out);
    }

    fn tick_reads(&mut self, now: u64, dice: &mut Dice, out: &mut Output) {
        let route = self.guide.route();
        for slot in 0..self.reads.len() {
            let Some(read) = &mut self.reads[slot] else { continue };
            if now >= read.deadline {
                let sent = read.sent_ever.is_some();
                let last = read.last_reject.or_else(|| self.open_reject());
                self.finish_read(slot, now, Outcome::TimedOut { last, sent }, out);
            } else if now >= read.due {
                read.send(now, route, &self.read_trip, &self.settings, dice, out);
                if read.turned_away() {
                    self.look(now, dice, out);
                }
            }
        }
    }

    fn tick_link(&mut self, now: u64, dice: &mut Dice, out: &mut Output) {
        let waiting = self.has_waiting();
        match &mut self.link {
            Link::Opening(opening) if !waiting && now >= opening.until => {
                // Should it be answered after all, the session is closed at once.
                self.opened_by = opening.nonce;
                self.link = Link::Closed;
            }
            Link::Opening(opening) if now >= opening.due => {
                let mut opening = Opening { ..*opening };
                self.send_open(&mut opening, now, dice, out);
                // Also when the first copy came too late for its answer: whoever is asked next may be elsewhere.
                let unanswered = opening.unanswered > 1;
                self.link = Link::Opening(opening);
                if unanswered {
                    self.look(now, dice, out);
                }
            }
            Link::Closed if waiting => self.open(now, 0, dice, out),
            _ => {}
        }
    }

    fn tick_retired(&mut self, now: u64, dice: &mut Dice, out: &mut Output) {
        let mut at = 0;
        while at < self.retired.len() {
            let retired = &mut self.retired[at];
            if now < retired.due {
                at += 1;
                continue;
            }
            if retired.tries == CLOSE_TRIES_MAX {
                self.retired.swap_remove(at);
                continue;
            }
            let wait = doubled(CLOSE_FIRST_NS, retired.tries, CLOSE_MAX_NS);
            retired.tries += 1;
            retired.due = now + dice.around(wait);
            let (id, token, nonce) = (retired.id, retired.token, retired.nonce);
            let lost = retired.tries == CLOSE_TRIES_LOST;
            self.send_close(id, token, nonce, out);
            if lost {
                self.look(now, dice, out);
            }
            at += 1;
        }
    }

    fn next_due(&self) -> u64 {
        let write = self.write.as_ref().map_or(NEVER, |write| match write.phase {
            Phase::Trying => write.operation.wake(),
            Phase::Proving { due, until, .. } => due.min(until),
        });
        let reads = self.reads.iter().flatten().map(Operation::wake);
        let link = match &self.link {
            Link::Opening(opening) if opening.until > 0 && !self.has_waiting() => opening.due.min(opening.until),
            Link::Opening(opening) => opening.due,
            _ => NEVER,
        };
        let retired = self.retired.iter().map(|retired| retired.due);
        reads.chain(retired).fold(write.min(link).min(self.guide.wake()), u64::min)
    }

    fn end(&mut self, now: u64, dice: &mut Dice, out: &mut Output) {
        if let Some(write) = &self.write {
            let outcome = if write.operation.in_session() {
                Outcome::Unknown(Doubt::Ended)
            } else {
                Outcome::Failed(Failure::NeverSent(self.open_reject()))
            };
            self.finish_write(now, outcome, dice, out);
        }
        for slot in 0..self.reads.len() {
            if let Some(read) = &self.reads[slot] {
                let (last, sent) = (read.last_reject, read.sent_ever.is_some());
                self.finish_read(slot, now, Outcome::TimedOut { last, sent }, out);
            }
        }
        if let Link::Open(Session { id, token, .. }) = self.link {
            self.retire(now, id, token, None, dice);
        }
        self.link = Link::Closed;
        self.tick_retired(now, dice, out);
        self.due = self.next_due();
    }
}
