//! Clients, and the history of what they were told.

use underpass_check::history;
use underpass_protocol::{
    client::{self, Client, Doubt, Event as Input, NEVER, Outcome, Output, Request},
    wire::{Endpoint, Kind, Op, Operand, Packet, Status},
};

use super::{Event, Step, World, replicas::Member};
use crate::{
    host::{Host, MS},
    plan::{Ask, ClientPlan, Operation, Plan},
    random::Random,
    trace,
};

/// How long a client waits for answers once all is well again.
const PROBE_PATIENCE_MS: u64 = 3000;

/// A client and what it has seen.
pub struct User {
    pub client: Client,
    out: Output,
    pub shard: u32,
    coordinators: Vec<Endpoint>,
    random: Random,
    /// Place of the next operation in the plan.
    next: usize,
    /// Operations by tag.
    pub history: Vec<history::Operation>,
    /// Of each: its deadline; [`NEVER`] once it is over.
    pub deadlines: Vec<u64>,
    /// The cas that it saw last of each key; 0, which no version has, before it saw one.
    seen: Vec<u64>,
    /// Asked once all is well again, and not asked yet.
    pub probes: Vec<Operation>,
    wake: u64,
    pub paused: u32,
    inbox: Vec<Vec<u8>>,
}

impl User {
    pub fn new(plan: &Plan, of: &ClientPlan, i: u8) -> Self {
        let mut random = Random::new(plan.seed, 100 + u64::from(i));
        let mut coordinators: Vec<_> =
            (0..plan.shape.coordinators.len()).map(|i| Host::Coordinator(i as u8).endpoint()).collect();
        let first = random.below(coordinators.len() as u64) as usize;
        coordinators.rotate_left(first);
        Self {
            client: new_client(plan, of.shard, i, &coordinators),
            out: Output::default(),
            shard: of.shard,
            coordinators,
            random,
            next: 0,
            history: Vec::new(),
            deadlines: Vec::new(),
            seen: vec![0; usize::from(plan.shape.keys)],
            probes: Vec::new(),
            wake: NEVER,
            paused: 0,
            inbox: Vec::new(),
        }
    }
}

fn new_client(plan: &Plan, shard: u32, i: u8, coordinators: &[Endpoint]) -> Client {
    let settings = client::Settings {
        reads_max: plan.shape.reads_max,
        ..client::Settings::new(shard, Host::Client(i).endpoint())
    };
    Client::new(settings, coordinators)
}

/// Different in each shard, so that a history of several is one of different keys.
fn key_name(shard: u32, key: u8) -> String {
    format!("{}{key}", char::from(b'a' + shard as u8 - 1))
}

impl World<'_> {
    /// Queues the client's next operation.
    pub(super) fn plan_next(&mut self, i: usize) {
        let next = self.users[i].next;
        if let Some(operation) = self.plan.clients[i].operations.get(next) {
            self.at(operation.at_us * 1000, Event::Ask(i as u8));
        }
    }

    /// The time of the client's next operation has come.
    pub(super) fn ask(&mut self, i: usize) -> Step {
        let user = &mut self.users[i];
        if self.healed_at.is_some() {
            return Ok(());
        }
        let operation = self.plan.clients[i].operations[user.next];
        user.next += 1;
        self.plan_next(i);
        if self.users[i].paused > 0 {
            return Ok(());
        }
        self.submit(i, operation);
        self.after_client(i)
    }

    fn submit(&mut self, i: usize, operation: Operation) -> bool {
        let user = &mut self.users[i];
        let Operation { ask, key, ttl_ms, patience_ms, number, .. } = operation;
        let name = key_name(user.shard, key);
        // Values are numbers, each written once. (An INCR or APPEND may well make one of them again.)
        let text = format!("{}", (u64::from(number) + 1) * 10 + i as u64);
        let operand = |data| Operand { ttl_ms, expected: 0, delta: 0, data };
        let mut entry = history::Operation::call(i as u64, history_request(ask), name.as_str(), self.now);
        entry.ttl_ms = ttl_ms;
        let (request, data) = match ask {
            Ask::Get => (Request::Read { key: name.as_bytes() }, false),
            Ask::Write(kind) => {
                let (operand, data) = match kind {
                    Kind::Delete | Kind::Touch => (operand(b""), false),
                    Kind::Incr => (Operand { delta: i64::from(number) + 1, ..operand(b"") }, false),
                    Kind::Cas => (Operand { expected: user.seen[usize::from(key)], ..operand(text.as_bytes()) }, true),
                    _ => (operand(text.as_bytes()), true),
                };
                entry.delta = (kind == Kind::Incr).then_some(operand.delta);
                entry.expected = (kind == Kind::Cas).then_some(operand.expected);
                (Request::Write { kind, key: name.as_bytes(), operand }, data)
            }
        };
        entry.value = data.then(|| text.as_str().into());
        let (random, tag) = (user.random.number(), user.history.len() as u64);
        let deadline = self.now + patience_ms * MS;
        if user.client.submit(self.now, random, request, tag, deadline, &mut user.out).is_err() {
            return false;
        }
        let asked = entry.to_string();
        user.history.push(entry);
        user.deadlines.push(deadline);
        self.counts.operations += 1;
        self.say(Host::Client(i as u8), || {
            let asked = asked.strip_suffix(" -> no answer").unwrap_or(&asked);
            format!("asks {tag}: {asked} ({name})")
        });
        true
    }

    pub(super) fn at_client(&mut self, i: usize, bytes: Vec<u8>) -> Step {
        let Some(user) = self.users.get_mut(i) else { return Ok(()) };
        if user.paused > 0 {
            user.inbox.push(bytes);
            return Ok(());
        }
        let Ok(packet) = Packet::parse(&bytes) else {
            return self.fail("bounded", format!("client {i} receives what is no packet"));
        };
        let random = user.random.number();
        user.client.step(self.now, random, Input::Packet(&packet), &mut user.out);
        // A stamp tells when expiry was judged, but not of a read that saw what became stable later, nor of a reply from a
        // record that a take-over rebuilt: of these the history tells nothing.
        let beyond =
            packet.header.op == Op::RReply && self.beyond.contains(&(packet.header.session, packet.header.request));
        let vague = self.expiring && (beyond || packet.header.op == Op::WReply && packet.header.time == 0);
        self.take_completions(i, vague)?;
        self.after_client(i)
    }

    pub(super) fn wake_client(&mut self, i: usize) -> Step {
        let user = &mut self.users[i];
        if user.wake != self.now || user.paused > 0 {
            return Ok(());
        }
        user.wake = NEVER;
        let random = user.random.number();
        user.client.step(self.now, random, Input::Tick, &mut user.out);
        self.after_client(i)
    }

    pub(super) fn resume_client(&mut self, i: usize) -> Step {
        for bytes in std::mem::take(&mut self.users[i].inbox) {
            self.at_client(i, bytes)?;
        }
        self.users[i].wake = self.now;
        self.wake_client(i)
    }

    /// Another client begins in the place of this one.
    pub(super) fn replace_client(&mut self, i: usize) {
        let Some(user) = self.users.get_mut(i) else { return };
        user.client = new_client(self.plan, user.shard, i as u8, &user.coordinators);
        user.out = Output::default();
        user.inbox.clear();
        // What it had outstanding stays unknown.
        user.deadlines.fill(NEVER);
        user.wake = NEVER;
        self.say(Host::Client(i as u8), || "vanishes; another one begins".into());
    }

    fn after_client(&mut self, i: usize) -> Step {
        // Sends what it wants sent, and takes what is over; that may let it ask what it has waited to ask.
        loop {
            self.take_completions(i, false)?;
            let Some(probe) = self.users[i].probes.last().copied() else { break };
            if !self.submit(i, probe) {
                break;
            }
            self.users[i].probes.pop();
        }
        let datagrams: Vec<_> = self.users[i].out.datagrams().map(|(to, bytes)| (to, bytes.to_vec())).collect();
        self.users[i].out.clear_datagrams();
        for (to, bytes) in datagrams {
            self.send(Host::Client(i as u8), to, &bytes, None)?;
        }
        let due = self.users[i].client.due();
        if due != NEVER && due != self.users[i].wake {
            let at = due.max(self.now + 1);
            self.users[i].wake = at;
            self.at(at, Event::Wake(Host::Client(i as u8)));
        }
        Ok(())
    }

    fn take_completions(&mut self, i: usize, vague: bool) -> Step {
        for done in std::mem::take(&mut self.users[i].out.completions) {
            let user = &mut self.users[i];
            let tag = done.tag as usize;
            let deadline = std::mem::replace(&mut user.deadlines[tag], NEVER);
            let entry = &mut user.history[tag];
            let is_read = entry.op == history::Request::Get;
            let session_lost = matches!(done.outcome, Outcome::Unknown(Doubt::SessionLost(_)));
            let outcome = match done.outcome {
                Outcome::Read(Some(item)) => {
                    entry.value = Some(history::Text(item.value));
                    entry.cas = Some(item.cas);
                    Some(history::Outcome::Ok)
                }
                Outcome::Read(None) => Some(history::Outcome::NotFound),
                Outcome::Written { status, seq, number } => {
                    entry.cas = Some(seq);
                    entry.number = number;
                    Some(match status {
                        Status::Ok => history::Outcome::Ok,
                        Status::NotFound => history::Outcome::NotFound,
                        Status::Exists => history::Outcome::Exists,
                        Status::NotStored => history::Outcome::NotStored,
                        Status::NotANumber => history::Outcome::NotANumber,
                        Status::Overflow => history::Outcome::Overflow,
                        Status::TooLarge => history::Outcome::TooLarge,
                        Status::Aborted => history::Outcome::Failed,
                    })
                }
                Outcome::Failed(_) => Some(history::Outcome::Failed),
                Outcome::Unknown(_) | Outcome::TimedOut { .. } => None,
            };
            match outcome {
                Some(history::Outcome::Failed) => {
                    self.counts.failed += 1;
                    entry.cas = None;
                    entry.finish(history::Outcome::Failed, done.done_ns);
                }
                Some(_) if vague => {
                    self.counts.answered += 1;
                    (entry.cas, entry.number) = (None, None);
                    if is_read {
                        entry.value = None;
                    }
                }
                Some(outcome) => {
                    self.counts.answered += 1;
                    entry.time_ms = done.time_ms.filter(|time_ms| *time_ms != 0);
                    entry.finish(outcome, done.done_ns);
                    if let Some(cas) = entry.cas
                        && let Some(key) = entry.key.0.get(1).map(|digit| digit - b'0')
                    {
                        user.seen[usize::from(key)] = cas;
                    }
                    let (called, shard) = (entry.call_ns, user.shard);
                    // One that was removed may be read for as long as the tables have it.
                    let is_active = |member: &Member| {
                        let part = member.replica.as_ref().and_then(|replica| replica.membership());
                        member.shape.shard == shard && part.is_some_and(|part| part.active)
                    };
                    let none_left = !self.replicas.iter().any(is_active);
                    if none_left && self.watch(shard).lost_at.is_some_and(|lost| lost < called) {
                        let entry = &self.users[i].history[tag];
                        return self.fail("linearizable", format!("answered after all was lost: {entry}"));
                    }
                }
                None => {
                    self.counts.unknown += 1;
                    // A session that did not survive a take-over costs one write its answer; asked again, there is one.
                    if self.probing && !session_lost {
                        let entry = &self.users[i].history[tag];
                        return self.fail("liveness", format!("all was well, and client {i} got no answer: {entry}"));
                    }
                    // A session that is lost makes a write unknown before its deadline.
                    if is_read && self.now < deadline {
                        return self.fail("liveness", format!("client {i} gives up a read before its deadline"));
                    }
                }
            }
            let entry = &self.users[i].history[tag];
            self.trace.say(self.now, Host::Client(i as u8), || {
                let cas = entry.cas.map_or_else(String::new, |cas| format!(" ({})", trace::seq(cas)));
                format!("has {tag}: {entry}{cas}")
            });
        }
        Ok(())
    }

    /// All is well again: every client has to be served.
    pub(super) fn probe(&mut self) -> Step {
        self.probing = true;
        for i in 0..self.users.len() {
            let shard = self.users[i].shard;
            if self.watch(shard).lost_at.is_some() {
                continue;
            }
            let keys = 0..self.plan.shape.keys;
            let ask = |ask, key, number| Operation {
                at_us: 0,
                ask,
                key,
                ttl_ms: None,
                patience_ms: PROBE_PATIENCE_MS,
                number,
            };
            let mut probes: Vec<_> = keys.clone().map(|key| ask(Ask::Get, key, 0)).collect();
            probes.extend(keys.map(|key| ask(Ask::Write(Kind::Put), key, 1_000_000 + u32::from(key))));
            self.users[i].probes = probes;
            self.after_client(i)?;
        }
        Ok(())
    }
}

fn history_request(ask: Ask) -> history::Request {
    match ask {
        Ask::Get => history::Request::Get,
        Ask::Write(kind) => match kind {
            Kind::Put => history::Request::Put,
            Kind::Delete => history::Request::Delete,
            Kind::Add => history::Request::Add,
            Kind::Replace => history::Request::Replace,
            Kind::Cas => history::Request::Cas,
            Kind::Incr => history::Request::Incr,
            Kind::Append => history::Request::Append,
            Kind::Prepend => history::Request::Prepend,
            Kind::Touch => history::Request::Touch,
        },
    }
}
