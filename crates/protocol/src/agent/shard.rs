//! One shard: its record, its members, its tenure. `docs/protocol.md`, section 7.
//!
//! While it serves, everything is reconciled: the record at the authority says who shall take part, the data path's tables
//! say who does, and [`Shard::reconcile`] makes the second the first, step by step, whoever changed the record.

use std::collections::{BTreeMap, BTreeSet};

use underpass_abi::{
    abi::{up_config, up_member},
    wire::UP_EPOCH_SHIFT,
};

use super::{
    Action, Command, Level, Record, Settings, StoreOutcome, TablesError, Wanted,
    member::{Member, RETRY_MAX_MS},
    repair::Repairs,
    sessions::{COUNTER_MAX, Sessions},
    tables::Tables,
    takeover::{Stage, TakeOver},
};
use crate::{
    control::{self, Answer, Heartbeat, HeartbeatAck, Install, Installed, Located, MemberInfo},
    transfer::{Collected, Fetched},
    wire::{Endpoint, Header, MEMBERS_MAX, Op, Packet, Reason},
};

/// Session counters reserved in the record at a time.
const GENERATION_BLOCK: u32 = 1 << 16;
/// Time between questions to those that shall take part and do not.
const HELLO_MS: u64 = 200;
/// Longer than this between two looks for silence, and the agent was held up.
const HELD_UP_MS: u64 = 30;
/// Sessions scanned for each millisecond between scans: a scan of a large table takes a while.
const SCAN_PER_MS: usize = 1024;
/// How long a compare-and-swap may be under way before it is asked about.
const STORE_MS: u64 = 3000;
/// How long a hand-over waits for the successor to say that it is there.
const TRANSFER_MS: u64 = 500;

/// What is at hand while one event is handled.
pub(super) struct Context<'a> {
    pub now_ms: u64,
    pub settings: &'a Settings,
    pub tables: &'a mut dyn Tables,
    pub sessions: &'a mut Sessions,
    pub out: &'a mut Vec<Action>,
    #[cfg(feature = "published")]
    pub mutant: super::Mutants,
}

impl Context<'_> {
    pub fn log(&mut self, level: Level, what: String) {
        self.out.push(Action::Log { level, what });
    }

    pub fn send(&mut self, to: Endpoint, datagram: Vec<u8>) {
        self.out.push(Action::Send { to, bytes: control::seal(datagram, self.settings.cluster_key) });
    }
}

/// A compare-and-swap under way.
struct Storing {
    id: u64,
    record: Record,
    since_ms: u64,
    /// Commands to answer when it is stored.
    replies: Vec<(u64, String)>,
}

/// The present coordinator's part.
pub(super) enum Part {
    /// Another one coordinates, or nobody does.
    Standby,
    /// The shard was never served, or was given up: those that shall take part are asked who they are.
    Forming,
    /// Taking over from whoever coordinated before.
    TakingOver(Box<TakeOver>),
    /// Its tables serve.
    Serving(Box<Serving>),
    /// Its tables refuse everything; the record is about to say so, and to name the successor.
    Leaving { to: Option<Endpoint>, reply: Option<u64> },
}

pub(super) struct Serving {
    /// Epoch in the tables.
    pub epoch: u32,
    /// Members in the tables, which must acknowledge; with their incarnations.
    pub must_ack: BTreeMap<u8, u64>,
    pub stable: u64,
    pub unresolved: u32,
    pub lease_until_ms: u64,
    pub time_offset_ms: i64,
    pub store_full: bool,
    pub scan_ms: u64,
    pub repairs: Repairs,
    /// What `serving` and the rest in the tables was made from, so that they are written only when they change.
    pub written: Option<up_config>,
    /// A hand-over that waits for its successor's answer: whom, until when, the command's number.
    pub transfer: Option<(Endpoint, u64, u64)>,
}

/// One that shall take part and does not.
#[derive(Clone, Debug, Default)]
pub(super) struct Candidate {
    pub incarnation: u64,
    pub heard_ms: Option<u64>,
    /// It holds nothing and takes part in nothing.
    pub is_empty: bool,
    pub trouble: String,
}

pub(super) struct Shard {
    pub id: u32,
    pub revision: u64,
    pub record: Option<Record>,
    /// An [`super::Event::Record`] has come.
    loaded: bool,
    pub role: bool,
    storing: Option<Storing>,
    next_store: u64,
    pub part: Part,
    pub members: BTreeMap<u8, Member>,
    pub candidates: BTreeMap<Endpoint, Candidate>,
    hello_ms: u64,
    heartbeat_ms: u64,
    checked_ms: u64,
    /// The last thing wrong with the shard as a whole.
    pub trouble: String,
}

impl Shard {
    pub fn new(id: u32, now_ms: u64) -> Self {
        Self {
            id,
            revision: 0,
            record: None,
            loaded: false,
            role: false,
            storing: None,
            next_store: 1,
            part: Part::Standby,
            members: BTreeMap::new(),
            candidates: BTreeMap::new(),
            hello_ms: now_ms,
            heartbeat_ms: now_ms,
            checked_ms: now_ms,
            trouble: String::new(),
        }
    }

    pub fn record(&self) -> &Record {
        self.record.as_ref().expect("looked at only where there is one")
    }

    pub fn serves(&self) -> bool {
        matches!(self.part, Part::Serving(_))
    }

    /// Whether something waits for answers that come within a round trip.
    pub fn is_busy(&self) -> bool {
        match &self.part {
            Part::Standby => false,
            Part::Forming | Part::TakingOver(_) | Part::Leaving { .. } => true,
            Part::Serving(serving) => {
                serving.epoch < self.record().epoch || !serving.repairs.is_empty() || serving.transfer.is_some()
            }
        }
    }

    pub fn header(&self, cx: &Context<'_>, op: Op, epoch: u32) -> Header {
        let mut header = Header::new(op);
        (header.epoch, header.shard, header.request) = (epoch, self.id, cx.now_ms);
        header.set_reply_to(cx.settings.listen);
        header
    }

    fn set_trouble(&mut self, cx: &mut Context<'_>, level: Level, trouble: String) {
        if self.trouble != trouble {
            if !trouble.is_empty() {
                cx.log(level, format!("shard {}: {trouble}", self.id));
            }
            self.trouble = trouble;
        }
    }

    // The authority.

    /// Stores a record that differs from the present one. At most one is under way.
    pub fn store(&mut self, cx: &mut Context<'_>, record: Record, replies: Vec<(u64, String)>) {
        assert!(self.storing.is_none(), "one compare-and-swap at a time");
        if let Err(why) = record.validate() {
            let result = Err(format!("that would make a record which contradicts itself: {why}"));
            replies.into_iter().for_each(|(id, _)| cx.out.push(Action::Reply { id, result: result.clone() }));
            cx.log(Level::Error, format!("shard {}: not stored: {why}", self.id));
            return;
        }
        let id = self.next_store;
        self.next_store += 1;
        cx.out.push(Action::Store { shard: self.id, id, expected: self.revision, record: record.clone() });
        self.storing = Some(Storing { id, record, since_ms: cx.now_ms, replies });
    }

    pub fn is_storing(&self) -> bool {
        self.storing.is_some()
    }

    pub fn stored(&mut self, cx: &mut Context<'_>, id: u64, outcome: StoreOutcome) -> Result<(), TablesError> {
        let Some(storing) = self.storing.take_if(|storing| storing.id == id) else { return Ok(()) };
        match outcome {
            StoreOutcome::Stored(revision) => {
                for (id, text) in storing.replies {
                    cx.out.push(Action::Reply { id, result: Ok(text) });
                }
                if revision <= self.revision {
                    // The watch told first, and maybe of a later change.
                    return Ok(());
                }
                self.revision = revision;
                self.record = Some(storing.record);
                self.record_changed(cx)
            }
            StoreOutcome::Conflict => {
                for (id, _) in storing.replies {
                    let result =
                        Err("the record was changed by somebody else meanwhile: look, and ask again".to_owned());
                    cx.out.push(Action::Reply { id, result });
                }
                cx.out.push(Action::Load { shard: self.id });
                Ok(())
            }
            StoreOutcome::Unknown(why) => {
                cx.log(Level::Warn, format!("shard {}: whether the record was stored is not known ({why})", self.id));
                self.storing = Some(storing);
                cx.out.push(Action::Load { shard: self.id });
                Ok(())
            }
        }
    }

    /// The record as the authority has it now.
    pub fn loaded(&mut self, cx: &mut Context<'_>, revision: u64, record: Option<Record>) -> Result<(), TablesError> {
        self.loaded = true;
        if revision < self.revision {
            return Ok(());
        }
        if let Some(record) = &record
            && let Err(why) = record.validate()
        {
            self.set_trouble(cx, Level::Error, format!("its record cannot be used, and is left as it is: {why}"));
            return Ok(());
        }
        if let Some(storing) = self.storing.take() {
            let stored = record.as_ref() == Some(&storing.record);
            if !stored && revision == self.revision && cx.now_ms < storing.since_ms + STORE_MS {
                // Not yet, perhaps.
                self.storing = Some(storing);
                return Ok(());
            }
            for (id, text) in storing.replies {
                let result =
                    if stored { Ok(text) } else { Err("the authority did not store it: ask again".to_owned()) };
                cx.out.push(Action::Reply { id, result });
            }
        }
        if revision == self.revision {
            // Nothing new. What was given up may be tried again.
            return self.reconcile(cx);
        }
        (self.revision, self.record) = (revision, record);
        self.record_changed(cx)
    }

    /// A new record: goes on, or steps down.
    fn record_changed(&mut self, cx: &mut Context<'_>) -> Result<(), TablesError> {
        let me = Some(cx.settings.listen);
        let Some(record) = self.record.clone() else {
            return self.step_down(cx, "its record was removed");
        };
        match &mut self.part {
            Part::Serving(_) | Part::Leaving { .. } if record.coordinator() != me => {
                if let Part::Leaving { to, reply } = &self.part {
                    let (to, reply) = (*to, *reply);
                    if to == record.coordinator()
                        && let Some(id) = reply
                    {
                        let text = format!("shard {} is handed over to {}", self.id, to.expect("just compared"));
                        cx.out.push(Action::Reply { id, result: Ok(text) });
                    }
                    cx.out.push(Action::Resign { shard: self.id });
                }
                self.step_down(cx, "another coordinator is on record")
            }
            Part::Serving(_) => {
                self.take_members(cx);
                self.reconcile(cx)
            }
            Part::TakingOver(over) => {
                if record.coordinator() == me && record.tenure == over.tenure {
                    self.take_members(cx);
                    self.take_over_step(cx)
                } else if over.stage == Stage::Claiming && record.coordinator() != me {
                    // Somebody was faster, or changed something: begin again from what is on record now.
                    self.part = Part::Standby;
                    self.reconcile(cx)
                } else {
                    self.step_down(cx, "another coordinator is on record")
                }
            }
            Part::Forming | Part::Standby | Part::Leaving { .. } => self.reconcile(cx),
        }
    }

    /// Takes the members of the record, keeping what is known of those that stay.
    pub fn take_members(&mut self, cx: &mut Context<'_>) {
        let record = self.record().clone();
        self.members.retain(|index, member| {
            record.members.iter().any(|info| info.index == *index && info.incarnation == member.info.incarnation)
        });
        for info in &record.members {
            let now_ms = cx.now_ms;
            let member = self.members.entry(info.index).or_insert_with(|| Member::new(info.clone(), now_ms));
            member.info = info.clone();
            if member.installed < record.epoch {
                member.due_now(now_ms);
            }
        }
        let members = &self.members;
        self.candidates.retain(|at, _| {
            record.wanted.iter().any(|wanted| wanted.endpoint() == *at)
                && !members.values().any(|member| member.endpoint() == *at)
        });
    }

    /// Stops coordinating: the tables refuse, and forget.
    pub fn step_down(&mut self, cx: &mut Context<'_>, why: &str) -> Result<(), TablesError> {
        if !matches!(self.part, Part::Standby) {
            cx.log(Level::Warn, format!("shard {}: no longer coordinates: {why}", self.id));
        }
        cx.tables.clear(self.id)?;
        cx.sessions.forget_shard(self.id);
        self.part = Part::Standby;
        self.members.clear();
        self.candidates.clear();
        self.trouble.clear();
        Ok(())
    }

    pub fn role(&mut self, cx: &mut Context<'_>, held: bool) -> Result<(), TablesError> {
        if self.role != held {
            self.role = held;
            let what = if held { "holds the role of coordinator" } else { "lost the role of coordinator" };
            cx.log(Level::Info, format!("shard {}: {what}", self.id));
        }
        self.reconcile(cx)
    }

    // What is to be done.

    /// Whatever is next. Harmless when there is nothing.
    pub fn reconcile(&mut self, cx: &mut Context<'_>) -> Result<(), TablesError> {
        match self.part {
            Part::Standby => self.begin(cx),
            Part::Forming => {
                self.form(cx);
                Ok(())
            }
            Part::TakingOver(_) => self.take_over_step(cx),
            Part::Serving(_) => self.reconcile_serving(cx),
            Part::Leaving { .. } => {
                if !self.is_storing() {
                    self.store_leaving(cx);
                }
                Ok(())
            }
        }
    }

    /// A standby that holds the role begins.
    fn begin(&mut self, cx: &mut Context<'_>) -> Result<(), TablesError> {
        if !self.loaded || self.is_storing() {
            return Ok(());
        }
        let Some(record) = self.record.clone() else {
            let says = "has no record: create it with `underpass shard create`".to_owned();
            self.set_trouble(cx, Level::Warn, says);
            return Ok(());
        };
        let me = record.coordinator() == Some(cx.settings.listen);
        let left = cx.tables.config(self.id);
        if let Some(left) = left {
            // Live tables of an agent before this one. No role is needed to go on with them: they serve anyway.
            if me && (record.tenure..=record.epoch).contains(&left.epoch) {
                return self.adopt(cx, &left);
            }
            cx.tables.clear(self.id)?;
        }
        if !self.role {
            return Ok(());
        }
        if record.epoch == 0 || record.given_up >= record.epoch {
            self.part = Part::Forming;
            self.hello_ms = cx.now_ms;
            self.form(cx);
            return Ok(());
        }
        self.claim(cx, record);
        Ok(())
    }

    /// Goes on with tables that an agent before this one left.
    fn adopt(&mut self, cx: &mut Context<'_>, left: &up_config) -> Result<(), TablesError> {
        let record = self.record().clone();
        cx.log(Level::Info, format!("shard {}: goes on with the tables of epoch {}", self.id, left.epoch));
        self.take_members(cx);
        let count = usize::from(left.must_ack_count);
        let must_ack = left.must_ack_list[..count].iter().map(|&index| {
            // One that the record no longer names is not to be mistaken for whoever has its index next.
            (index, record.configuration().member(index).map_or(0, |member| member.incarnation))
        });
        let must_ack = must_ack.collect();
        for member in self.members.values_mut() {
            // Those in the tables confirmed some epoch of this tenure; the next heartbeat tells that they live.
            member.installed = if left.must_ack & (1 << member.info.index) != 0 { left.epoch } else { 0 };
        }
        let mut adopted = 0;
        let (sessions, shard) = (&mut *cx.sessions, self.id);
        cx.tables.records(cx.tables.session_count() as usize, &mut |index, session| {
            if session.session != 0 && session.shard == shard {
                adopted += usize::from(sessions.adopt(index, session));
            }
        })?;
        cx.sessions.count_from(record.generations);
        self.part = Part::Serving(Box::new(Serving {
            epoch: left.epoch,
            must_ack,
            stable: 0,
            unresolved: 0,
            lease_until_ms: left.lease_until_ms,
            time_offset_ms: left.time_offset_ms,
            store_full: left.store_full != 0,
            scan_ms: cx.now_ms,
            repairs: Repairs::default(),
            written: Some(*left),
            transfer: None,
        }));
        self.heartbeat_ms = cx.now_ms;
        self.reserve(cx, true);
        self.reconcile(cx)
    }

    /// Reserves session counters when few are left, or when `now` after an adoption.
    fn reserve(&mut self, cx: &mut Context<'_>, now: bool) -> bool {
        let record = self.record();
        let (counter, reserved) = (cx.sessions.counter(), record.generations);
        let few = counter + GENERATION_BLOCK / 4 >= reserved;
        if self.is_storing() || reserved >= COUNTER_MAX || !(few || now) {
            return false;
        }
        let generations = (counter.max(if now { reserved } else { 0 }) + GENERATION_BLOCK).min(COUNTER_MAX);
        if generations <= reserved {
            return false;
        }
        self.store(cx, Record { generations, ..record.clone() }, Vec::new());
        true
    }

    /// Whether a session may be opened now: its counter is reserved.
    pub fn may_open(&self, cx: &Context<'_>) -> bool {
        self.serves() && cx.sessions.counter() < self.record().generations
    }

    // First start.

    /// Asks those that shall take part who they are; when all have answered and are empty, they are the first members.
    fn form(&mut self, cx: &mut Context<'_>) {
        if self.is_storing() {
            return;
        }
        let record = self.record().clone();
        if record.wanted.is_empty() {
            let says = "no replica is wanted in it: add some with `underpass members add`".to_owned();
            return self.set_trouble(cx, Level::Error, says);
        }
        let ready = |wanted: &Wanted| {
            self.candidates
                .get(&wanted.endpoint())
                .is_some_and(|candidate| candidate.is_empty && candidate.incarnation != 0)
        };
        if !record.wanted.iter().all(ready) {
            let waits: Vec<_> = record.wanted.iter().filter(|wanted| !ready(wanted)).collect();
            let says = waits.iter().map(|wanted| {
                let trouble =
                    self.candidates.get(&wanted.endpoint()).map_or("", |candidate| candidate.trouble.as_str());
                let trouble = if trouble.is_empty() { "has not answered yet" } else { trouble };
                format!("replica {} ({}) {trouble}", wanted.id, wanted.endpoint())
            });
            let says = format!("waits for all its replicas: {}", says.collect::<Vec<_>>().join("; "));
            return self.set_trouble(cx, Level::Warn, says);
        }
        let members = record.wanted.iter().enumerate().map(|(index, wanted)| MemberInfo {
            index: index as u8,
            id: wanted.id,
            incarnation: self.candidates[&wanted.endpoint()].incarnation,
            addr: wanted.addr,
            port: wanted.port,
            active: true,
        });
        let formed = Record { members: members.collect(), settled: record.epoch == 0, ..record };
        self.set_trouble(cx, Level::Info, String::new());
        self.claim(cx, formed);
    }

    // Members.

    /// Questions and orders that are due.
    pub fn tick(&mut self, cx: &mut Context<'_>) -> Result<(), TablesError> {
        if let Some(storing) = &self.storing
            && cx.now_ms >= storing.since_ms + STORE_MS
            && cx.now_ms >= self.hello_ms
        {
            cx.out.push(Action::Load { shard: self.id });
        }
        match &self.part {
            Part::Standby => {
                self.hello_ms = self.hello_ms.max(cx.now_ms);
                return self.begin(cx);
            }
            Part::Leaving { .. } => return self.reconcile(cx),
            Part::Forming => self.greet(cx),
            Part::TakingOver(_) => {
                self.send_installs(cx);
                self.send_heartbeats(cx);
                self.take_over_step(cx)?;
            }
            Part::Serving(_) => {
                self.check_silence(cx)?;
                self.send_installs(cx);
                self.send_heartbeats(cx);
                self.greet(cx);
                self.repair(cx)?;
                self.check_transfer(cx)?;
                self.reconcile(cx)?;
            }
        }
        Ok(())
    }

    /// Asks those that shall take part and do not who they are.
    fn greet(&mut self, cx: &mut Context<'_>) {
        if cx.now_ms < self.hello_ms {
            return;
        }
        self.hello_ms = cx.now_ms + HELLO_MS;
        let record = self.record().clone();
        for wanted in &record.wanted {
            let at = wanted.endpoint();
            if self.members.values().any(|member| member.endpoint() == at) {
                continue;
            }
            self.candidates.entry(at).or_default();
            let install = self.hello(cx, &record, 0, false);
            cx.send(at, control::emit(self.header(cx, Op::Install, record.epoch), &install));
        }
    }

    /// INSTALL for one that is no member: a question, or an order to give up what it holds.
    fn hello(&self, cx: &Context<'_>, record: &Record, incarnation: u64, reset: bool) -> Install {
        let configuration = record.configuration();
        Install { incarnation, index: u8::MAX, reset, configuration, sessions: cx.tables.session_count() }
    }

    /// INSTALL for members that have not confirmed the record's epoch.
    fn send_installs(&mut self, cx: &mut Context<'_>) {
        if let Part::TakingOver(over) = &self.part
            && over.stage == Stage::Claiming
        {
            return;
        }
        let record = self.record().clone();
        let sessions = cx.tables.session_count();
        let header = self.header(cx, Op::Install, record.epoch);
        for member in self.members.values_mut() {
            if member.installed >= record.epoch || member.lost || !member.is_due(cx.now_ms) {
                continue;
            }
            let install = Install {
                incarnation: member.info.incarnation,
                index: member.info.index,
                reset: false,
                configuration: record.configuration(),
                sessions,
            };
            cx.send(member.endpoint(), control::emit(header, &install));
        }
    }

    /// An answer to INSTALL.
    pub fn installed(
        &mut self,
        cx: &mut Context<'_>,
        from: Endpoint,
        header: &Header,
        answer: &Installed,
    ) -> Result<(), TablesError> {
        if self.record.is_none() || matches!(self.part, Part::Standby) || header.request > cx.now_ms {
            return Ok(());
        }
        if let Some(member) = self.members.values_mut().find(|member| member.info.endpoint() == from) {
            if answer.incarnation != member.info.incarnation {
                // An answer to a question of long ago may come from the life before. Only a member's own silence and a
                // fresh answer count.
                if header.request + RETRY_MAX_MS >= cx.now_ms {
                    return self.lost(cx, from, answer.incarnation);
                }
                return Ok(());
            }
            member.heard_ms = Some(cx.now_ms);
            if !answer.refusal.is_empty() {
                if member.trouble != answer.refusal {
                    let (index, shard) = (member.info.index, self.id);
                    cx.log(Level::Error, format!("shard {shard}: member {index} ({from}) refuses: {}", answer.refusal));
                    member.trouble.clone_from(&answer.refusal);
                }
                return Ok(());
            }
            let record = self.record.as_ref().expect("checked above");
            if answer.shard == self.id && (record.tenure..=record.epoch).contains(&answer.epoch) && answer.epoch > 0 {
                member.installed = member.installed.max(answer.epoch);
                member.granted_ms = member.granted_ms.max(Some(header.request));
                member.items = answer.items;
                member.time = member.time.max(answer.time);
                member.trouble.clear();
                if let Part::TakingOver(over) = &mut self.part {
                    over.confirmed(cx.now_ms, &member.info);
                }
                self.send_heartbeat_to(cx, from);
                return self.reconcile(cx);
            }
            return Ok(());
        }
        self.greeted(cx, from, answer)
    }

    /// An answer of one that is no member.
    fn greeted(&mut self, cx: &mut Context<'_>, from: Endpoint, answer: &Installed) -> Result<(), TablesError> {
        let record = self.record().clone();
        let Some(wanted) = record.wanted.iter().find(|wanted| wanted.endpoint() == from) else { return Ok(()) };
        let mut candidate = self.candidates.get(&from).cloned().unwrap_or_default();
        candidate.heard_ms = Some(cx.now_ms);
        candidate.incarnation = answer.incarnation;
        candidate.is_empty = answer.epoch == 0 && answer.items == 0;
        let mut reset = false;
        let trouble = if !answer.refusal.is_empty() {
            answer.refusal.clone()
        } else if candidate.is_empty {
            String::new()
        } else if answer.epoch != 0 && answer.shard != self.id {
            format!(
                "serves shard {}, not {}: name another replica, or restart it to give its data up",
                answer.shard, self.id
            )
        } else if answer.epoch > record.epoch {
            format!("is in epoch {}, and the record says {}: is this the right authority?", answer.epoch, record.epoch)
        } else if self.serves() {
            // What it holds is older than this epoch, which others have whole.
            reset = self.record().epoch > answer.epoch;
            "holds what it had before it was removed; it is told to begin empty".to_owned()
        } else if record.given_up >= answer.epoch && record.given_up > 0 {
            reset = true;
            "holds data that were given up; it is told to begin empty".to_owned()
        } else {
            format!(
                "holds {} items of epoch {}, which this shard's record does not know: restart it to give them up",
                answer.items, answer.epoch
            )
        };
        if candidate.trouble != trouble {
            if !trouble.is_empty() {
                cx.log(Level::Warn, format!("shard {}: replica {} ({from}) {trouble}", self.id, wanted.id));
            }
            candidate.trouble = trouble;
        }
        if reset {
            let mut above = record.clone();
            if !self.serves() {
                // Nobody serves; the epoch about to be taken is above what was given up.
                above.epoch += 1;
            }
            let install = self.hello(cx, &above, answer.incarnation, true);
            cx.send(from, control::emit(self.header(cx, Op::Install, above.epoch), &install));
        }
        self.candidates.insert(from, candidate);
        self.reconcile(cx)
    }

    /// A member answered as another incarnation: what it held is gone.
    fn lost(&mut self, cx: &mut Context<'_>, at: Endpoint, incarnation: u64) -> Result<(), TablesError> {
        let shard = self.id;
        let Some(member) = self.members.values_mut().find(|member| member.info.endpoint() == at) else {
            return Ok(());
        };
        // A reset adds one; a member is never reset while it is one.
        if member.lost || incarnation == member.info.incarnation {
            return Ok(());
        }
        (member.lost, member.lost_ms) = (true, cx.now_ms);
        member.trouble = "was restarted and lost its data".to_owned();
        let level = if member.info.active { Level::Error } else { Level::Warn };
        cx.log(level, format!("shard {shard}: member {} ({at}) was restarted and lost its data", member.info.index));
        self.write(cx)?;
        self.reconcile(cx)
    }

    // Leases and heartbeats.

    pub fn send_heartbeats(&mut self, cx: &mut Context<'_>) {
        if cx.now_ms < self.heartbeat_ms {
            return;
        }
        self.heartbeat_ms = cx.now_ms + cx.settings.heartbeat_ms;
        let all: Vec<_> = self.members.values().filter(|member| member.installed > 0).map(Member::endpoint).collect();
        all.into_iter().for_each(|to| self.send_heartbeat_to(cx, to));
    }

    /// Another round at once: something waits for it.
    pub fn hurry(&mut self, now_ms: u64) {
        self.heartbeat_ms = now_ms;
    }

    fn send_heartbeat_to(&mut self, cx: &mut Context<'_>, to: Endpoint) {
        let Some(member) = self.members.values().find(|member| member.endpoint() == to) else { return };
        let (stable, time, settled, grants) = match &self.part {
            Part::Serving(serving) => (
                serving.stable,
                cx.now_ms.saturating_add_signed(serving.time_offset_ms),
                serving.epoch == self.record().epoch && self.record().settled,
                cx.now_ms < serving.lease_until_ms,
            ),
            // Nothing is told of stability before everything is merged; the time is what the member itself has seen.
            Part::TakingOver(_) => (0, member.time, false, true),
            _ => return,
        };
        let donor = if !member.info.active && settled { self.donor() } else { None };
        let echo = member.stamp.filter(|_| grants);
        let header = Header { time, ..self.header(cx, Op::Heartbeat, member.installed.max(self.record().tenure)) };
        cx.send(to, control::emit(header, &Heartbeat { stable, time, echo, donor }));
    }

    /// Whom a learner copies from: the last active member, and always the same while it is one.
    fn donor(&self) -> Option<(std::net::Ipv4Addr, u16)> {
        let donors = || self.members.values().filter(|member| member.info.active && !member.lost);
        let copying = self.members.values().find_map(|member| member.copying.as_ref()?.donor);
        let begun = copying.filter(|&(addr, port)| donors().any(|member| member.endpoint() == Endpoint { addr, port }));
        // A copy that was begun from one that is gone is not gone on with from another.
        if copying.is_some() {
            return begun;
        }
        donors().rfind(|member| !member.suspect).map(|member| (member.info.addr, member.info.port))
    }

    /// An answer to a heartbeat.
    pub fn heartbeat_ack(
        &mut self,
        cx: &mut Context<'_>,
        from: Endpoint,
        header: &Header,
        ack: &HeartbeatAck,
    ) -> Result<(), TablesError> {
        let Some(record) = &self.record else { return Ok(()) };
        if matches!(self.part, Part::Standby | Part::Forming | Part::Leaving { .. })
            || !(record.tenure..=record.epoch).contains(&header.epoch)
            || header.request > cx.now_ms
        {
            return Ok(());
        }
        let Some(member) = self.members.values_mut().find(|member| member.endpoint() == from) else { return Ok(()) };
        if ack.incarnation != member.info.incarnation {
            return self.lost(cx, from, ack.incarnation);
        }
        if member.lost && header.request <= member.lost_ms {
            return Ok(());
        }
        let was_lost = std::mem::take(&mut member.lost);
        if was_lost {
            member.trouble.clear();
        }
        let first = member.stamp.is_none();
        member.heard_ms = Some(cx.now_ms);
        member.granted_ms = member.granted_ms.max(Some(header.request));
        member.stamp = member.stamp.max(Some(ack.stamp));
        (member.used_bytes, member.budget_bytes, member.items) = (ack.used_bytes, ack.budget_bytes, ack.items);
        let was_suspect = std::mem::take(&mut member.suspect);
        let had_trouble = member.copying.as_ref().map(|copying| copying.trouble.clone()).unwrap_or_default();
        member.copying = if member.info.active { None } else { ack.copying.clone() };
        let trouble = member.copying.as_ref().map(|copying| copying.trouble.clone()).unwrap_or_default();
        let done = member.copying.as_ref().is_some_and(|copying| copying.done);
        if trouble != had_trouble && !trouble.is_empty() {
            let (shard, index) = (self.id, member.info.index);
            cx.log(Level::Error, format!("shard {shard}: learner {index} ({from}) cannot copy: {trouble}"));
        }
        if first {
            // It may not answer reads before the next one.
            self.send_heartbeat_to(cx, from);
        }
        let full_changed = self.check_full(cx);
        self.extend(cx)?;
        if was_suspect || was_lost || full_changed {
            if was_suspect || was_lost {
                cx.log(Level::Info, format!("shard {}: {from} answers again", self.id));
            }
            self.write(cx)?;
        }
        if done || matches!(self.part, Part::TakingOver(_)) {
            return self.reconcile(cx);
        }
        Ok(())
    }

    /// The lease that the members of `must_ack` grant.
    pub fn lease_of(&self, record: &Record, must_ack: &BTreeMap<u8, u64>, active_only: bool) -> u64 {
        let grants = must_ack.iter().filter_map(|(index, incarnation)| {
            let member = self.members.get(index).filter(|member| member.info.incarnation == *incarnation)?;
            (!active_only || member.info.active).then(|| member.granted_ms.unwrap_or(0))
        });
        grants.min().map_or(0, |granted| if granted == 0 { 0 } else { granted + record.lease_ms })
    }

    fn extend(&mut self, cx: &mut Context<'_>) -> Result<(), TablesError> {
        let (Part::Serving(serving), Some(record)) = (&self.part, &self.record) else { return Ok(()) };
        #[cfg(feature = "published")]
        let active_only = cx.mutant.lease_of_active;
        #[cfg(not(feature = "published"))]
        let active_only = false;
        let until = self.lease_of(record, &serving.must_ack, active_only);
        let Part::Serving(serving) = &mut self.part else { unreachable!() };
        if until > serving.lease_until_ms {
            serving.lease_until_ms = until;
            if let Some(written) = &mut serving.written {
                written.lease_until_ms = until;
            }
            cx.tables.extend_lease(self.id, until)?;
        }
        Ok(())
    }

    /// Full above 15/16 of a budget, no more below 14/16. True if that changed.
    fn check_full(&mut self, cx: &mut Context<'_>) -> bool {
        let Part::Serving(serving) = &mut self.part else { return false };
        let limit = if serving.store_full { 14 } else { 15 };
        let above = |member: &Member| u128::from(member.used_bytes) * 16 > u128::from(member.budget_bytes) * limit;
        let full = self.members.values().any(above);
        if full == serving.store_full {
            return false;
        }
        serving.store_full = full;
        let (level, what) = match full {
            true => (Level::Warn, "a replica is near its memory budget; writes that may grow the store are refused"),
            false => (Level::Info, "replicas have room again"),
        };
        cx.log(level, format!("shard {}: {what}", self.id));
        true
    }

    /// Takes reads away from members that are silent.
    fn check_silence(&mut self, cx: &mut Context<'_>) -> Result<(), TablesError> {
        // While this agent was held up itself nobody was asked anything.
        let held_up_ms =
            cx.now_ms.saturating_sub(self.checked_ms).saturating_sub(HELD_UP_MS.max(cx.settings.heartbeat_ms));
        self.checked_ms = cx.now_ms;
        let mut changed = Vec::new();
        for member in self.members.values_mut() {
            member.heard_ms = member.heard_ms.map(|heard_ms| heard_ms.saturating_add(held_up_ms).min(cx.now_ms));
            if !member.suspect && member.silent_ms(cx.now_ms) > cx.settings.suspect_ms {
                member.suspect = true;
                changed.push(member.endpoint());
            }
        }
        if changed.is_empty() {
            return Ok(());
        }
        for at in changed {
            cx.log(Level::Warn, format!("shard {}: {at} is silent: it gets no reads", self.id));
        }
        self.write(cx)
    }

    /// CONTROL_REJECT of a member.
    pub fn rejected(&mut self, cx: &mut Context<'_>, from: Endpoint, header: &Header) {
        let Some(record) = &self.record else { return };
        let is_member = self.members.values().any(|member| member.endpoint() == from);
        if is_member && Reason::from_wire(header.status) == Some(Reason::Epoch) {
            if header.epoch > record.epoch {
                // Somebody took over. The lease runs out by itself; the record will tell.
                cx.out.push(Action::Load { shard: self.id });
            } else if let Some(member) = self.members.values_mut().find(|member| member.endpoint() == from) {
                // It missed something, or was restarted: it is asked.
                if header.request + RETRY_MAX_MS >= cx.now_ms && member.installed > header.epoch {
                    member.installed = header.epoch.min(member.installed - 1);
                    member.due_now(cx.now_ms);
                }
            }
        }
    }

    // The tables.

    /// The data path's configuration with these members.
    pub fn config(&self, serving: &Serving, epoch: u32, must_ack: &BTreeMap<u8, u64>, refuse: bool) -> up_config {
        let mut config = up_config {
            shard: self.id,
            epoch,
            lease_until_ms: serving.lease_until_ms,
            time_offset_ms: serving.time_offset_ms,
            store_full: serving.store_full.into(),
            ..up_config::default()
        };
        let readers = |strict: bool| {
            self.members.values().filter(move |member| {
                member.info.active
                    && !member.lost
                    && (!strict || !member.suspect)
                    && must_ack.get(&member.info.index) == Some(&member.info.incarnation)
            })
        };
        let strict = readers(true).next().is_some();
        for member in readers(strict) {
            config.serving |= 1 << member.info.index;
            config.serving_list[usize::from(config.serving_count)] = member.info.index;
            config.serving_count += 1;
        }
        for (&index, &incarnation) in must_ack {
            config.must_ack |= 1 << index;
            config.must_ack_list[usize::from(config.must_ack_count)] = index;
            config.must_ack_count += 1;
            let known = self.members.get(&index).filter(|member| member.info.incarnation == incarnation);
            config.members[usize::from(index)] = match (known, &serving.written) {
                (Some(member), _) => up_member {
                    addr: u32::from(member.info.addr).to_be(),
                    port: member.info.port.to_be(),
                    ..up_member::default()
                },
                (None, Some(written)) => written.members[usize::from(index)],
                (None, None) => up_member::default(),
            };
            if known.is_some_and(|member| member.lost) {
                // Its acknowledgement never comes: better no new write than one that waits.
                config.refuse_writes = Reason::NoMember.to_wire();
            }
        }
        if refuse {
            config.lease_until_ms = 0;
        }
        config
    }

    /// Tells the tables who gets reads, and what is refused, if that changed.
    fn write(&mut self, cx: &mut Context<'_>) -> Result<(), TablesError> {
        let Part::Serving(serving) = &self.part else { return Ok(()) };
        let config = self.config(serving, serving.epoch, &serving.must_ack, false);
        self.write_config(cx, config)
    }

    fn write_config(&mut self, cx: &mut Context<'_>, config: up_config) -> Result<(), TablesError> {
        let Part::Serving(serving) = &mut self.part else { return Ok(()) };
        if serving.written.is_none_or(|written| !same(&written, &config)) {
            cx.tables.configure(&config)?;
            serving.written = Some(config);
        }
        Ok(())
    }

    // Changes of members.

    fn reconcile_serving(&mut self, cx: &mut Context<'_>) -> Result<(), TablesError> {
        if self.is_storing() {
            return Ok(());
        }
        let record = self.record().clone();
        // Lost members go first, also out of a change that is not complete.
        if self.remove_lost(cx, &record) {
            return Ok(());
        }
        let Part::Serving(serving) = &self.part else { return Ok(()) };
        if serving.epoch < record.epoch {
            if self.members.values().all(|member| member.installed >= record.epoch) {
                self.apply(cx, &record)?;
                return self.reconcile_serving(cx);
            }
            return Ok(());
        }
        if !record.settled {
            self.store(cx, Record { settled: true, ..record }, Vec::new());
            return Ok(());
        }
        if serving.transfer.is_some() || self.reserve(cx, false) {
            return Ok(());
        }
        self.change(cx, record);
        Ok(())
    }

    /// The tables take the record's members: first the union, then, when every CPU uses the new epoch, the new ones alone.
    fn apply(&mut self, cx: &mut Context<'_>, record: &Record) -> Result<(), TablesError> {
        let Part::Serving(serving) = &self.part else { return Ok(()) };
        let old = serving.must_ack.clone();
        let new: BTreeMap<u8, u64> = record.members.iter().map(|member| (member.index, member.incarnation)).collect();
        for index in new.keys().filter(|index| !old.contains_key(index)) {
            #[cfg(feature = "published")]
            if cx.mutant.keep_bits {
                continue;
            }
            cx.tables.forget_acks(self.id, *index)?;
        }
        let mut union = old.clone();
        union.extend(new.iter().map(|(&index, &incarnation)| (index, incarnation)));
        let lease = self.lease_of(record, &new, false);
        let Part::Serving(serving) = &mut self.part else { return Ok(()) };
        serving.lease_until_ms = serving.lease_until_ms.max(lease);
        serving.repairs.forget();
        let Part::Serving(serving) = &self.part else { return Ok(()) };
        let first = self.config(serving, record.epoch, &union, false);
        let last = self.config(serving, record.epoch, &new, false);
        #[cfg(feature = "published")]
        let in_one_step = cx.mutant.one_step_removal;
        #[cfg(not(feature = "published"))]
        let in_one_step = false;
        if !in_one_step {
            self.write_config(
                cx,
                up_config {
                    serving: last.serving,
                    serving_count: last.serving_count,
                    serving_list: last.serving_list,
                    ..first
                },
            )?;
        }
        self.write_config(cx, last)?;
        let Part::Serving(serving) = &mut self.part else { return Ok(()) };
        (serving.epoch, serving.must_ack) = (record.epoch, new);
        let names: Vec<_> = record
            .members
            .iter()
            .map(|member| {
                format!("{} ({}{})", member.id, member.endpoint(), if member.active { "" } else { ", learner" })
            })
            .collect();
        cx.log(Level::Info, format!("shard {}: epoch {} with replicas {}", self.id, record.epoch, names.join(", ")));
        self.hurry(cx.now_ms);
        Ok(())
    }

    /// Removes members that are lost or silent for long. True if a change was begun.
    fn remove_lost(&mut self, cx: &mut Context<'_>, record: &Record) -> bool {
        let now_ms = cx.now_ms;
        let alive = |member: &Member| !member.lost && member.silent_ms(now_ms) <= cx.settings.suspect_ms;
        // Whoever hears nobody is the one that is cut off.
        if !self.members.values().any(|member| member.info.active && alive(member)) {
            let lost = self.members.values().filter(|member| member.info.active).all(|member| member.lost);
            let trouble = match lost {
                true => "every replica has lost its data; if none can be brought back: `underpass shard begin-empty`",
                false => "no active replica answers",
            };
            self.set_trouble(cx, Level::Error, trouble.to_owned());
            return false;
        }
        self.set_trouble(cx, Level::Info, String::new());
        let gone = |member: &Member| member.lost || member.silent_ms(now_ms) > cx.settings.lost_ms;
        let mut remove: BTreeSet<u8> =
            self.members.values().filter(|member| gone(member)).map(|member| member.info.index).collect();
        // A learner whose donor is gone, or that cannot go on, begins again.
        for member in self.members.values() {
            let Some(copying) = &member.copying else { continue };
            let donor = copying.donor.and_then(|(addr, port)| {
                self.members.values().find(|donor| donor.endpoint() == Endpoint { addr, port } && donor.info.active)
            });
            let donor_gone = copying.donor.is_some() && donor.is_none_or(|donor| remove.contains(&donor.info.index));
            if !copying.done && donor_gone {
                remove.insert(member.info.index);
            }
        }
        if remove.is_empty() {
            return false;
        }
        for index in &remove {
            let member = &self.members[index];
            let why = if member.lost {
                "it lost its data".to_owned()
            } else if gone(member) {
                format!("silent for {} ms", member.silent_ms(now_ms))
            } else {
                "its donor is gone".to_owned()
            };
            cx.log(
                Level::Error,
                format!("shard {}: removes replica {} ({}): {why}", self.id, member.info.id, member.endpoint()),
            );
        }
        let members = record.members.iter().filter(|member| !remove.contains(&member.index)).cloned().collect();
        self.store(cx, Record { epoch: record.epoch + 1, members, settled: false, ..record.clone() }, Vec::new());
        true
    }

    /// The next change that the record and the replicas call for, if any. Everything before is complete.
    fn change(&mut self, cx: &mut Context<'_>, record: Record) {
        let wanted = |member: &MemberInfo| {
            record.wanted.iter().any(|wanted| wanted.endpoint() == member.endpoint() && wanted.id == member.id)
        };
        let others_active = |index: u8| record.members.iter().any(|other| other.active && other.index != index);
        // No longer wanted.
        if let Some(member) = record.members.iter().find(|member| !wanted(member) && others_active(member.index)) {
            let members = record.members.iter().filter(|other| other.index != member.index).cloned().collect();
            return self.store(cx, Record { epoch: record.epoch + 1, members, settled: false, ..record }, Vec::new());
        }
        // A replacement is active: the old one goes.
        let replaced = record.wanted.iter().find_map(|by| {
            let old = by.replaces?;
            record.members.iter().any(|member| member.id == by.id && member.active).then_some((by.id, old))
        });
        if let Some((by, old)) = replaced {
            let mut next = record.clone();
            next.wanted.retain(|wanted| wanted.id != old);
            next.wanted.iter_mut().filter(|wanted| wanted.id == by).for_each(|wanted| wanted.replaces = None);
            return self.store(cx, next, Vec::new());
        }
        // A learner that has everything.
        let donor = self.donor();
        #[cfg(feature = "published")]
        let early = cx.mutant.promote_early;
        #[cfg(not(feature = "published"))]
        let early = false;
        let ready = self.members.values().find(|member| {
            let has_all = |copying: &control::Copying| (copying.done || early) && copying.donor == donor;
            !member.info.active && !member.lost && !member.suspect && member.copying.as_ref().is_some_and(has_all)
        });
        if let Some(index) = ready.map(|member| member.info.index) {
            let mut next = Record { epoch: record.epoch + 1, settled: false, ..record };
            next.members.iter_mut().filter(|member| member.index == index).for_each(|member| member.active = true);
            return self.store(cx, next, Vec::new());
        }
        // A newcomer, one at a time.
        if record.members.iter().any(|member| !member.active) {
            return;
        }
        let newcomer = record.wanted.iter().find_map(|wanted| {
            let candidate = self.candidates.get(&wanted.endpoint())?;
            let fresh = candidate.heard_ms.is_some_and(|heard_ms| heard_ms + 2 * HELLO_MS >= cx.now_ms);
            (candidate.is_empty && fresh).then_some((wanted, candidate.incarnation))
        });
        let free = (0..MEMBERS_MAX as u8).find(|index| !self.members.contains_key(index));
        if let (Some((wanted, incarnation)), Some(index)) = (newcomer, free) {
            cx.log(
                Level::Info,
                format!("shard {}: replica {} ({}) joins as a learner", self.id, wanted.id, wanted.endpoint()),
            );
            let mut next = Record { epoch: record.epoch + 1, settled: false, ..record.clone() };
            next.members.push(MemberInfo {
                index,
                id: wanted.id,
                incarnation,
                addr: wanted.addr,
                port: wanted.port,
                active: false,
            });
            next.members.sort_by_key(|member| member.index);
            self.store(cx, next, Vec::new());
        }
    }

    /// What is stable now, and writes that are stuck.
    fn repair(&mut self, cx: &mut Context<'_>) -> Result<(), TablesError> {
        let Part::Serving(serving) = &mut self.part else { return Ok(()) };
        if cx.now_ms < serving.scan_ms {
            return Ok(());
        }
        let bound = cx.sessions.bound();
        serving.scan_ms = cx.now_ms + cx.settings.heartbeat_ms.max((bound / SCAN_PER_MS) as u64);
        let scan = cx.tables.scan(self.id, bound)?;
        serving.stable = serving.stable.max(scan.stable);
        serving.unresolved = scan.unresolved;
        // Within one epoch, and not while it changes.
        let quiet = self.record.as_ref().is_some_and(|record| record.epoch == serving.epoch) && self.storing.is_none();
        if scan.unresolved == 0 || !quiet {
            serving.repairs.forget();
            return Ok(());
        }
        let mut repairs = std::mem::take(&mut serving.repairs);
        let must_ack = serving.must_ack.clone();
        let epoch = serving.epoch;
        let result = repairs.step(self, cx, epoch, &must_ack);
        if let Part::Serving(serving) = &mut self.part {
            serving.repairs = repairs;
        }
        result
    }

    /// ANSWER of a member.
    pub fn answered(
        &mut self,
        cx: &mut Context<'_>,
        from: Endpoint,
        packet: &Packet<'_>,
        answer: &Answer,
    ) -> Result<(), TablesError> {
        let Some(member) = self.members.values().find(|member| member.endpoint() == from) else { return Ok(()) };
        if answer.incarnation != member.info.incarnation {
            return Ok(());
        }
        let (index, header) = (member.info.index, packet.header);
        match &mut self.part {
            Part::TakingOver(over) if header.epoch == self.record.as_ref().map_or(0, |record| record.epoch) => {
                over.answered(index, &header, answer);
                self.take_over_step(cx)
            }
            Part::Serving(serving) if header.epoch == serving.epoch => {
                let mut repairs = std::mem::take(&mut serving.repairs);
                let (must_ack, epoch) = (serving.must_ack.clone(), serving.epoch);
                repairs.answered(index, packet, answer);
                let result = repairs.act(self, cx, epoch, &must_ack);
                if let Part::Serving(serving) = &mut self.part {
                    serving.repairs = repairs;
                }
                result
            }
            _ => Ok(()),
        }
    }

    pub fn collected(
        &mut self,
        cx: &mut Context<'_>,
        from: Endpoint,
        header: &Header,
        collected: Collected,
    ) -> Result<(), TablesError> {
        let Some(member) = self.members.values_mut().find(|member| member.endpoint() == from) else { return Ok(()) };
        let current = self.record.as_ref().is_some_and(|record| record.epoch == header.epoch);
        if !current || collected.incarnation != member.info.incarnation {
            return Ok(());
        }
        member.heard_ms = Some(cx.now_ms);
        member.time = member.time.max(collected.time);
        let index = member.info.index;
        if let Part::TakingOver(over) = &mut self.part {
            over.collected(index, header, collected);
            return self.take_over_step(cx);
        }
        Ok(())
    }

    pub fn fetched(&mut self, cx: &mut Context<'_>, from: Endpoint, fetched: Fetched) -> Result<(), TablesError> {
        if let (Part::TakingOver(over), Fetched::Sessions { from: at, end, records }) = (&mut self.part, fetched) {
            over.fetched(from, at, end, records);
            return self.take_over_step(cx);
        }
        Ok(())
    }

    // Hand-over and stop.

    /// LOCATED of the successor: it is there.
    pub fn located(&mut self, cx: &mut Context<'_>, from: Endpoint, request: u64) -> Result<(), TablesError> {
        let Part::Serving(serving) = &mut self.part else { return Ok(()) };
        let Some((to, until_ms, id)) = serving.transfer else { return Ok(()) };
        let sent = until_ms - TRANSFER_MS;
        if to != from || request < sent || self.is_storing() {
            return Ok(());
        }
        self.leave(cx, Some(to), Some(id))
    }

    fn check_transfer(&mut self, cx: &mut Context<'_>) -> Result<(), TablesError> {
        let Part::Serving(serving) = &mut self.part else { return Ok(()) };
        let Some((to, until_ms, id)) = serving.transfer else { return Ok(()) };
        if cx.now_ms >= until_ms {
            serving.transfer = None;
            let result = Err(format!("{to} does not answer: start a coordinator there, with the same authority"));
            cx.out.push(Action::Reply { id, result });
            return Ok(());
        }
        self.ask_successor(cx, to);
        Ok(())
    }

    fn ask_successor(&self, cx: &mut Context<'_>, to: Endpoint) {
        let padding = " ".repeat(control::OPEN_PADDING);
        let header = self.header(cx, Op::Locate, self.record().epoch);
        cx.out.push(Action::Send { to, bytes: control::emit(header, &control::Locate { padding }) });
    }

    /// Refuses everything from now on, then says so on record.
    pub fn leave(&mut self, cx: &mut Context<'_>, to: Option<Endpoint>, reply: Option<u64>) -> Result<(), TablesError> {
        let Part::Serving(serving) = &self.part else { return Ok(()) };
        let config = self.config(serving, serving.epoch, &serving.must_ack, true);
        cx.tables.configure(&config)?;
        self.part = Part::Leaving { to, reply };
        if !self.is_storing() {
            self.store_leaving(cx);
        }
        Ok(())
    }

    /// No table of ours is of use any more: the record is settled, whatever it was.
    fn store_leaving(&mut self, cx: &mut Context<'_>) {
        let Part::Leaving { to, .. } = &self.part else { return };
        let record = self.record().clone();
        let coordinator = to.map_or(record.coordinator, |to| Some((to.addr, to.port)));
        let next = Record { coordinator, settled: true, ..record.clone() };
        if next != record {
            self.store(cx, next, Vec::new());
        }
    }

    /// It left, and that is on record.
    pub fn has_left(&self) -> bool {
        match &self.part {
            Part::Leaving { to: None, .. } => {
                self.record.as_ref().is_none_or(|record| record.settled) && !self.is_storing()
            }
            Part::Leaving { .. } => false,
            Part::Serving(_) => false,
            _ => true,
        }
    }

    // The operator.

    pub fn command(&mut self, cx: &mut Context<'_>, id: u64, command: Command) -> Result<(), TablesError> {
        let refuse = |cx: &mut Context<'_>, why: String| {
            cx.out.push(Action::Reply { id, result: Err(why) });
            Ok(())
        };
        let Some(record) = self.record.clone() else {
            return refuse(cx, format!("shard {} has no record: create it with `underpass shard create`", self.id));
        };
        let me = record.coordinator() == Some(cx.settings.listen);
        let begins_empty = matches!(command, Command::BeginEmpty);
        let coordinates = self.serves() && me;
        if record.epoch > 0 && !begins_empty && !coordinates {
            let at = record.coordinator().map_or("nobody".to_owned(), |at| at.to_string());
            return refuse(cx, format!("this agent does not coordinate shard {}; {at} does: ask there", self.id));
        }
        if self.is_storing() {
            return refuse(cx, "a change is under way, and the authority has not answered yet: try again".to_owned());
        }
        let mut next = record.clone();
        let text;
        match command {
            Command::Add(wanted) => {
                if record.wanted.contains(&wanted) {
                    let text = format!("replica {} ({}) is wanted already", wanted.id, wanted.endpoint());
                    cx.out.push(Action::Reply { id, result: Ok(text) });
                    return Ok(());
                }
                if let Some(other) =
                    record.wanted.iter().find(|other| other.id == wanted.id || other.endpoint() == wanted.endpoint())
                {
                    return refuse(
                        cx,
                        format!("replica {} is at {}: ids and addresses are unique", other.id, other.endpoint()),
                    );
                }
                text = format!(
                    "replica {} ({}) will be filled from the others, then take part",
                    wanted.id,
                    wanted.endpoint()
                );
                next.wanted.push(wanted);
            }
            Command::Remove { id: replica, lose_data } => {
                let Some(wanted) = record.wanted.iter().find(|wanted| wanted.id == replica).cloned() else {
                    return refuse(cx, format!("there is no replica {replica} in shard {}", self.id));
                };
                let active = |other: &&MemberInfo| other.active;
                let is_last = record.members.iter().filter(active).all(|member| member.id == replica);
                if is_last && record.epoch > 0 && record.members.iter().any(|member| member.id == replica) {
                    let flag = if lose_data {
                        "`underpass shard begin-empty` gives data up; removing it cannot"
                    } else {
                        "add and fill another first"
                    };
                    return refuse(
                        cx,
                        format!("replica {replica} ({}) is the last that holds the data: {flag}", wanted.endpoint()),
                    );
                }
                next.wanted.retain(|wanted| wanted.id != replica);
                if next.wanted.is_empty() {
                    return refuse(cx, "it is the last replica of the shard".to_owned());
                }
                let left = record.members.iter().filter(active).filter(|member| member.id != replica).count();
                if left == 1 && record.members.iter().any(|member| member.id == replica && member.active) && !lose_data
                {
                    return refuse(
                        cx,
                        "one replica alone would hold the data, and its loss would be theirs: say so with \
                         `--to-a-single-copy`, or add another first"
                            .to_owned(),
                    );
                }
                text = format!("replica {replica} ({}) is removed", wanted.endpoint());
            }
            Command::Promote { id: replica } => {
                let member = self.members.values().find(|member| member.info.id == replica);
                let result = match member {
                    None => Err(format!("replica {replica} is no member; `underpass members list` says why")),
                    Some(member) if member.info.active => Ok(format!("replica {replica} is active")),
                    Some(member) => match &member.copying {
                        Some(copying) if copying.trouble.is_empty() => Err(format!(
                            "replica {replica} has copied {} of about {} items: it becomes active by itself when it has \
                             them all, and not before",
                            copying.items, copying.of
                        )),
                        Some(copying) => Err(format!("replica {replica} cannot copy: {}", copying.trouble)),
                        None => Err(format!("replica {replica} is about to begin copying")),
                    },
                };
                cx.out.push(Action::Reply { id, result });
                return Ok(());
            }
            Command::Replace { id: replica, by } => {
                if !record.wanted.iter().any(|wanted| wanted.id == replica) {
                    return refuse(cx, format!("there is no replica {replica} in shard {}", self.id));
                }
                if record.wanted.iter().any(|other| other.id == by.id || other.endpoint() == by.endpoint()) {
                    return refuse(
                        cx,
                        format!("replica {} or its address {} is in the shard already", by.id, by.endpoint()),
                    );
                }
                text =
                    format!("replica {} ({}) will be filled, and then replica {replica} removed", by.id, by.endpoint());
                next.wanted.push(Wanted { replaces: Some(replica), ..by });
            }
            Command::Transfer { to } => {
                if to == cx.settings.listen {
                    return refuse(cx, format!("{to} is this coordinator"));
                }
                let Part::Serving(serving) = &mut self.part else {
                    return refuse(cx, format!("shard {} is not served yet", self.id));
                };
                if serving.epoch < record.epoch || !record.settled {
                    return refuse(cx, "a change of members is under way: try again when it is complete".to_owned());
                }
                serving.transfer = Some((to, cx.now_ms + TRANSFER_MS, id));
                self.ask_successor(cx, to);
                return Ok(());
            }
            Command::BeginEmpty => {
                let down = match &self.part {
                    Part::TakingOver(over) => !over.has_source(),
                    Part::Serving(_) => self.members.values().filter(|m| m.info.active).all(|m| m.lost),
                    _ => false,
                };
                if !down {
                    return refuse(
                        cx,
                        format!(
                            "shard {} is served, or may be once a replica that holds its data answers, or this agent does not \
                             hold the role: nothing is given up",
                            self.id
                        ),
                    );
                }
                next.given_up = record.epoch;
                text = format!("shard {}: what epoch {} held is given up; it begins empty", self.id, record.epoch);
                cx.log(Level::Error, text.clone());
                self.step_down(cx, "its data are given up")?;
            }
        }
        if next == record {
            cx.out.push(Action::Reply { id, result: Ok(text) });
            return Ok(());
        }
        self.store(cx, next, vec![(id, text)]);
        Ok(())
    }

    /// LOCATE: whom to ask.
    pub fn locate(&self, cx: &Context<'_>) -> Option<Located> {
        let record = self.record.as_ref().filter(|record| record.epoch > 0)?;
        let serves = match &self.part {
            Part::Serving(serving) => cx.now_ms < serving.lease_until_ms,
            _ => false,
        };
        Some(Located { configuration: record.configuration(), serves })
    }

    /// Makes the tables serve what was rebuilt: the end of a take-over.
    pub fn serve(&mut self, cx: &mut Context<'_>, over: &TakeOver) -> Result<(), TablesError> {
        let record = self.record().clone();
        cx.tables.clear(self.id)?;
        cx.sessions.forget_shard(self.id);
        let mut kept = 0;
        for session in over.sessions(self.id, cx.now_ms) {
            let index = (session.session & 0xffff) as u16;
            // An index that another shard's session has meanwhile: its client opens another.
            if usize::from(index) < cx.tables.session_count() as usize
                && cx.sessions.adopt(index, &session)
                && cx.tables.load(index, &session)?
            {
                kept += 1;
            }
        }
        let seen = self.members.values().map(|member| member.time).max().unwrap_or(0);
        let least = if seen == 0 { 0 } else { seen + record.lease_ms };
        let now_ms = cx.now_ms;
        let time_offset_ms = cx.settings.wall_offset_ms.max(least as i64 - now_ms as i64);
        let must_ack: BTreeMap<u8, u64> =
            record.members.iter().map(|member| (member.index, member.incarnation)).collect();
        let lease_until_ms = self.lease_of(&record, &must_ack, false);
        let mut serving = Serving {
            epoch: record.epoch,
            must_ack,
            stable: u64::from(record.epoch) << UP_EPOCH_SHIFT,
            unresolved: 0,
            lease_until_ms,
            time_offset_ms,
            store_full: false,
            scan_ms: now_ms,
            repairs: Repairs::default(),
            written: None,
            transfer: None,
        };
        let config = self.config(&serving, record.epoch, &serving.must_ack, false);
        cx.tables.configure(&config)?;
        serving.written = Some(config);
        self.part = Part::Serving(Box::new(serving));
        self.trouble.clear();
        cx.log(Level::Info, format!("shard {}: serves in epoch {}, with {kept} sessions", self.id, record.epoch));
        self.hurry(now_ms);
        self.send_heartbeats(cx);
        self.reconcile(cx)
    }

    /// Begins a take-over from what `before` says.
    fn claim(&mut self, cx: &mut Context<'_>, before: Record) {
        #[cfg(feature = "published")]
        let believed = cx.mutant.believe_learners;
        #[cfg(not(feature = "published"))]
        let believed = false;
        let sources = before.members.iter().filter(|member| member.active || believed);
        let mut members: Vec<MemberInfo> =
            sources.map(|member| MemberInfo { active: true, ..member.clone() }).collect();
        members.sort_by_key(|member| member.index);
        let epoch = before.epoch + 1;
        let generations = (cx.sessions.counter() + GENERATION_BLOCK).min(COUNTER_MAX);
        let me = cx.settings.listen;
        let next = Record {
            epoch,
            tenure: epoch,
            coordinator: Some((me.addr, me.port)),
            members,
            settled: false,
            generations,
            ..before.clone()
        };
        cx.log(Level::Info, format!("shard {}: takes over in epoch {epoch}", self.id));
        self.part = Part::TakingOver(Box::new(TakeOver::new(before, epoch)));
        self.members.clear();
        self.store(cx, next, Vec::new());
    }
}

/// Equal but for what the tables fill in or is raised in place.
fn same(a: &up_config, b: &up_config) -> bool {
    let bare = |config: &up_config| {
        let mut config = up_config { floor: 0, lease_until_ms: u64::from(config.lease_until_ms == 0), ..*config };
        config.members.iter_mut().for_each(|member| member.next_hop = [0; 6]);
        config
    };
    bare(a) == bare(b)
}
