//! One shard: its record, its members, its tenure. `docs/protocol.md`, section 7.
//!
//! While it serves, everything is reconciled: the record at the authority says who shall take part, the data path's tables
//! say who does, and [`Shard::reconcile`] makes the second the first, step by step, whoever changed the record.

use std::collections::{BTreeMap, BTreeSet};

use underpass_abi::abi::up_config;

use super::{
    Action, Level, Record, Settings, StoreOutcome, TablesError, Wanted,
    member::Member,
    repair::Repairs,
    sessions::{COUNTER_MAX, Sessions},
    tables::Tables,
    takeover::{Stage, TakeOver},
};
use crate::{
    control::{self, MemberInfo},
    wire::{Endpoint, Header, Op},
};

/// Session counters reserved in the record at a time.
pub(super) const GENERATION_BLOCK: u32 = 1 << 16;
/// How long a compare-and-swap may be under way before it is asked about.
pub(super) const STORE_MS: u64 = 3000;

/// What is at hand while one event is handled.
pub(super) struct Context<'a> {
    pub now_ms: u64,
    pub settings: &'a Settings,
    pub tables: &'a mut dyn Tables,
    pub sessions: &'a mut Sessions,
    pub out: &'a mut Vec<Action>,
    /// Nothing is begun any more.
    pub stopping: bool,
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
pub(super) struct Storing {
    id: u64,
    record: Record,
    pub since_ms: u64,
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
    /// Its tables refuse everything; the record is about to say so.
    Leaving { tenure: u32 },
}

pub(super) struct Serving {
    /// The tenure whose tables they are.
    pub tenure: u32,
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
    /// A hand-over that waits for its successor's claim: whom, until when, the command's number.
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
    pub loaded: bool,
    /// The authority had a record and has none: nothing is stored until it has one again.
    is_removed: bool,
    pub role: bool,
    /// The tables hold nothing of this shard.
    pub is_clear: bool,
    /// The coordinator of this epoch asked us to take over.
    pub invited: Option<u32>,
    pub storing: Option<Storing>,
    next_store: u64,
    pub part: Part,
    pub members: BTreeMap<u8, Member>,
    pub candidates: BTreeMap<Endpoint, Candidate>,
    /// Incarnations that were members since this agent knows the shard: none joins a second time.
    pub former: BTreeSet<u64>,
    pub hello_ms: u64,
    pub heartbeat_ms: u64,
    pub checked_ms: u64,
    /// What was sent up to here grants nothing: this host was suspended since.
    pub suspended_ms: u64,
    /// The last thing wrong with the shard as a whole.
    pub trouble: String,
}

impl Shard {
    pub(super) fn new(id: u32, now_ms: u64) -> Self {
        Self {
            id,
            revision: 0,
            record: None,
            loaded: false,
            is_removed: false,
            role: false,
            is_clear: false,
            invited: None,
            storing: None,
            next_store: 1,
            part: Part::Standby,
            members: BTreeMap::new(),
            candidates: BTreeMap::new(),
            former: BTreeSet::new(),
            hello_ms: now_ms,
            heartbeat_ms: now_ms,
            checked_ms: now_ms,
            suspended_ms: 0,
            trouble: String::new(),
        }
    }

    pub(super) fn record(&self) -> &Record {
        self.record.as_ref().expect("looked at only where there is one")
    }

    pub(super) fn serves(&self) -> bool {
        matches!(self.part, Part::Serving(_))
    }

    /// Whether something waits for answers that come within a round trip.
    pub(super) fn is_busy(&self) -> bool {
        match &self.part {
            Part::Standby => false,
            Part::Forming | Part::TakingOver(_) | Part::Leaving { .. } => true,
            Part::Serving(serving) => {
                let unread = |member: &Member| !member.echoed && !member.lost && !member.suspect;
                serving.epoch < self.record().epoch
                    || !serving.repairs.is_empty()
                    || serving.transfer.is_some()
                    || self.members.values().any(unread)
            }
        }
    }

    pub(super) fn header(&self, cx: &Context<'_>, op: Op, epoch: u32) -> Header {
        let mut header = Header::new(op);
        (header.epoch, header.shard, header.request) = (epoch, self.id, cx.now_ms);
        header.set_reply_to(cx.settings.listen);
        header
    }

    pub(super) fn set_trouble(&mut self, cx: &mut Context<'_>, level: Level, trouble: String) {
        if self.trouble != trouble {
            if !trouble.is_empty() {
                cx.log(level, format!("shard {}: {trouble}", self.id));
            }
            self.trouble = trouble;
        }
    }

    // The authority.

    /// Stores a record that differs from the present one. At most one is under way.
    pub(super) fn store(&mut self, cx: &mut Context<'_>, record: Record, replies: Vec<(u64, String)>) {
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

    pub(super) fn is_storing(&self) -> bool {
        self.storing.is_some() || self.is_removed
    }

    pub(super) fn stored(&mut self, cx: &mut Context<'_>, id: u64, outcome: StoreOutcome) -> Result<(), TablesError> {
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
    pub(super) fn loaded(
        &mut self,
        cx: &mut Context<'_>,
        revision: u64,
        record: Option<Record>,
    ) -> Result<(), TablesError> {
        self.loaded = true;
        self.is_removed = record.is_none() && self.record.is_some();
        if self.is_removed {
            let says = "its record was removed from the authority: it is served as before, but nothing can change. Put it back";
            self.set_trouble(cx, Level::Error, says.to_owned());
            return Ok(());
        }
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
    pub(super) fn record_changed(&mut self, cx: &mut Context<'_>) -> Result<(), TablesError> {
        let me = Some(cx.settings.listen);
        let Some(record) = self.record.clone() else { return Ok(()) };
        match &mut self.part {
            Part::Serving(_) | Part::Leaving { .. } if record.coordinator() != me => {
                if let Part::Serving(serving) = &self.part
                    && let Some((to, _, id)) = serving.transfer
                    && Some(to) == record.coordinator()
                {
                    let result = Ok(format!("shard {} is handed over to {to}", self.id));
                    cx.out.push(Action::Reply { id, result });
                    // The successor shall have the role too. That it is given up comes to be known later.
                    self.role = false;
                    cx.out.push(Action::Resign { shard: self.id });
                }
                self.step_down(cx, "another coordinator is on record")
            }
            Part::Serving(serving) if record.tenure != serving.tenure => {
                // Somebody took over, and handed the shard back: these tables are of the past.
                self.step_down(cx, "a later tenure is on record")?;
                self.begin(cx)
            }
            Part::Serving(_) => {
                self.take_members(cx);
                self.send_installs(cx);
                self.reconcile(cx)
            }
            Part::TakingOver(over) => {
                let claiming = over.stage == Stage::Claiming;
                if over.is_of(&record) {
                    self.take_members(cx);
                    self.take_over_step(cx)?;
                    self.send_installs(cx);
                    Ok(())
                } else if claiming {
                    // Somebody was faster, or changed something: begin again from what is on record now.
                    self.part = Part::Standby;
                    self.reconcile(cx)
                } else {
                    self.step_down(cx, "another coordinator is on record")
                }
            }
            Part::Forming if record.epoch > record.given_up => {
                // Another one formed it.
                self.part = Part::Standby;
                self.begin(cx)
            }
            Part::Leaving { tenure } if record.tenure != *tenure => {
                self.step_down(cx, "a later tenure is on record")?;
                self.begin(cx)
            }
            Part::Forming | Part::Standby | Part::Leaving { .. } => self.reconcile(cx),
        }
    }

    /// Takes the members of the record, keeping what is known of those that stay.
    pub(super) fn take_members(&mut self, cx: &mut Context<'_>) {
        let record = self.record().clone();
        self.members.retain(|index, member| {
            record.members.iter().any(|info| info.index == *index && info.incarnation == member.info.incarnation)
        });
        self.former.extend(record.members.iter().map(|info| info.incarnation));
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
    pub(super) fn step_down(&mut self, cx: &mut Context<'_>, why: &str) -> Result<(), TablesError> {
        if !matches!(self.part, Part::Standby) {
            cx.log(Level::Warn, format!("shard {}: no longer coordinates: {why}", self.id));
        }
        self.clear(cx)?;
        cx.sessions.forget_shard(self.id);
        self.part = Part::Standby;
        self.members.clear();
        self.candidates.clear();
        self.trouble.clear();
        Ok(())
    }

    /// Empties the tables, unless they are empty.
    pub(super) fn clear(&mut self, cx: &mut Context<'_>) -> Result<(), TablesError> {
        if !self.is_clear {
            cx.tables.clear(self.id)?;
            self.is_clear = true;
        }
        Ok(())
    }

    pub(super) fn role(&mut self, cx: &mut Context<'_>, held: bool) -> Result<(), TablesError> {
        if self.role != held {
            self.role = held;
            let what = if held { "holds the role of coordinator" } else { "lost the role of coordinator" };
            cx.log(Level::Info, format!("shard {}: {what}", self.id));
        }
        self.reconcile(cx)
    }

    // What is to be done.

    /// Whatever is next. Harmless when there is nothing.
    pub(super) fn reconcile(&mut self, cx: &mut Context<'_>) -> Result<(), TablesError> {
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
    pub(super) fn begin(&mut self, cx: &mut Context<'_>) -> Result<(), TablesError> {
        if !self.loaded || self.is_storing() || cx.stopping {
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
        }
        // Now, not when it takes over: that takes a while.
        self.clear(cx)?;
        let invited = self.invited.take() == Some(record.epoch) && !me;
        if !self.role && !invited {
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
    pub(super) fn adopt(&mut self, cx: &mut Context<'_>, left: &up_config) -> Result<(), TablesError> {
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
            tenure: record.tenure,
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
        self.write(cx)?;
        self.reserve(cx, true);
        self.reconcile(cx)
    }

    /// Reserves session counters when few are left, or when `now` after an adoption.
    pub(super) fn reserve(&mut self, cx: &mut Context<'_>, now: bool) -> bool {
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
    pub(super) fn may_open(&self, cx: &Context<'_>) -> bool {
        self.serves() && cx.sessions.counter() < self.record().generations
    }

    // First start.

    /// Asks those that shall take part who they are; when all have answered and are empty, they are the first members.
    pub(super) fn form(&mut self, cx: &mut Context<'_>) {
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
}
