//! Taking over: fence every member, have them agree, rebuild the sessions, serve. `docs/protocol.md`, section 7, "Coordinator
//! lost".

use std::collections::{BTreeMap, BTreeSet};

use underpass_abi::{
    abi::{UP_STATE_ABORTED, UP_STATE_COMMITTED, up_session},
    wire::UP_EPOCH_SHIFT,
};

use super::{
    Level, Record, TablesError,
    repair::Repairs,
    sessions::COUNTER_MAX,
    shard::{Context, GENERATION_BLOCK, Part, Serving, Shard},
};
use crate::{
    control::{Answer, Fate, MemberInfo, Pull},
    replica::SessionRecord,
    transfer::{self, Collected, Fetch, Held, SESSIONS_PAGE},
    wire::{Endpoint, Header, Op, SessionId, Status},
};

/// Time after which a question is asked again.
const ASK_MS: u64 = 20;
/// Pulls ordered in one round.
const PULLS_MAX: usize = 1024;
/// Pages of session records asked for at once.
const PAGES_MAX: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The record is to name this coordinator.
    Claiming,
    /// Members are told; from then on the coordinator before gets nothing from them.
    Fencing,
    /// Members are made to hold the same.
    Converging,
    /// Session records are read.
    Fetching,
    /// The record is to name those alone that take part.
    LeavingOut,
    /// Leases of the tenure before run out.
    Waiting,
}

/// By member and key: the member that has what the first lacks.
type Pulls = BTreeMap<(u8, Vec<u8>), u8>;

/// What one member says that it holds.
#[derive(Debug, Default)]
struct Collecting {
    cursor: u64,
    asked_ms: Option<u64>,
    done: bool,
    all: Collected,
}

/// Reading the session records of one member.
#[derive(Debug, Default)]
struct Fetching {
    from: Option<Endpoint>,
    end: Option<u32>,
    asked: BTreeMap<u16, u64>,
    pages: BTreeMap<u16, Vec<SessionRecord>>,
}

#[derive(Debug)]
pub(super) struct TakeOver {
    pub stage: Stage,
    /// The record before this tenure.
    before: Record,
    pub tenure: u32,
    /// The record with which the tenure begins: no other one does, whomever it names.
    claimed: Record,
    fencing_ms: u64,
    first_confirmed_ms: Option<u64>,
    /// Members that have confirmed this tenure, whatever came of them after.
    confirmed: BTreeSet<(u8, u64)>,
    round: u64,
    round_ms: u64,
    collecting: BTreeMap<u8, Collecting>,
    /// Writes that a member cannot record as aborted because it knows of later ones: resolved.
    gone: BTreeSet<(u8, SessionId, u64)>,
    /// Records to be aborted at a member once it says that it has not processed them.
    aborts: BTreeMap<(u8, SessionId, u64), SessionRecord>,
    frozen: Vec<(u8, SessionRecord)>,
    fetching: Fetching,
}

impl TakeOver {
    pub fn new(before: Record, claimed: Record) -> Self {
        Self {
            stage: Stage::Claiming,
            before,
            tenure: claimed.tenure,
            claimed,
            fencing_ms: 0,
            first_confirmed_ms: None,
            confirmed: BTreeSet::new(),
            round: 0,
            round_ms: 0,
            collecting: BTreeMap::new(),
            gone: BTreeSet::new(),
            aborts: BTreeMap::new(),
            frozen: Vec::new(),
            fetching: Fetching::default(),
        }
    }

    /// Whether a record is of this tenure: the one that begins it, or a later one of the same coordinator.
    pub fn is_of(&self, record: &Record) -> bool {
        match self.stage {
            Stage::Claiming => *record == self.claimed,
            _ => record.tenure == self.tenure && record.coordinator == self.claimed.coordinator,
        }
    }

    /// Whether some member that may be believed has answered.
    pub fn has_source(&self) -> bool {
        !self.confirmed.is_empty()
    }

    pub fn confirmed(&mut self, now_ms: u64, member: &MemberInfo) {
        self.first_confirmed_ms.get_or_insert(now_ms);
        self.confirmed.insert((member.index, member.incarnation));
    }

    pub fn collected(&mut self, index: u8, header: &Header, page: Collected) {
        let round = self.round;
        let Some(collecting) = self.collecting.get_mut(&index) else { return };
        if collecting.done || header.request != round || header.seq != collecting.cursor {
            return;
        }
        (collecting.all.stable, collecting.all.time) = (page.stable, page.time);
        collecting.all.held.extend(page.held);
        (collecting.cursor, collecting.done, collecting.asked_ms) = (page.next, page.next == 0, None);
    }

    pub fn fetched(&mut self, from: Endpoint, at: u16, end: u32, records: Vec<SessionRecord>) {
        if self.stage == Stage::Fetching && self.fetching.from == Some(from) && self.fetching.asked.contains_key(&at) {
            self.fetching.end = Some(end);
            self.fetching.pages.insert(at, records);
        }
    }

    pub fn answered(&mut self, index: u8, header: &Header, answer: &Answer) {
        let key = (index, header.session, header.request);
        let Some(record) = self.aborts.get(&key) else { return };
        match answer.fate {
            Fate::Frozen => self.frozen.push((index, *record)),
            Fate::Gone => {
                self.gone.insert(key);
            }
            // The next round shows it.
            Fate::Processed | Fate::Aborted => {}
        }
    }

    /// The sessions' records for the tables: everything counts as committed, or aborted.
    pub fn sessions(&self, shard: u32, now_ms: u64) -> Vec<up_session> {
        let records = self.fetching.pages.values().flatten();
        records
            .filter(|record| record.session.generation() != 0)
            .map(|record| {
                let aborted = record.status == Status::Aborted.to_wire();
                up_session {
                    session: record.session.0,
                    token: record.token,
                    reply_addr: record.client.addr.to_ipv6_mapped().octets(),
                    reply_port: record.client.port.to_be(),
                    used_ms: now_ms,
                    request: record.request,
                    seq: record.seq,
                    result: record.result,
                    shard,
                    state: if aborted { UP_STATE_ABORTED } else { UP_STATE_COMMITTED } as u8,
                    kind: record.kind,
                    status: record.status,
                    sealed: 1,
                    ..up_session::default()
                }
            })
            .collect()
    }

    /// What the members of this round lack: keys to pull, by member, from whom; and records to abort.
    fn compare(&self) -> (Pulls, Vec<(u8, SessionRecord)>) {
        let mut holders: BTreeMap<u64, (u8, &[u8])> = BTreeMap::new();
        let mut processed = BTreeSet::new();
        let mut aborted: BTreeMap<(SessionId, u64), SessionRecord> = BTreeMap::new();
        for (&index, collecting) in &self.collecting {
            for held in &collecting.all.held {
                match held {
                    Held::Version { key, seq, writer } => {
                        holders.entry(*seq).or_insert((index, key));
                        processed.extend(*writer);
                    }
                    Held::Aborted(record) => {
                        aborted.insert((record.session, record.request), *record);
                    }
                }
            }
        }
        let (mut pulls, mut aborts) = (BTreeMap::new(), Vec::new());
        for (&index, collecting) in &self.collecting {
            let mut seqs = BTreeSet::new();
            let mut has_aborted = BTreeSet::new();
            for held in &collecting.all.held {
                match held {
                    Held::Version { seq, .. } => drop(seqs.insert(*seq)),
                    Held::Aborted(record) => drop(has_aborted.insert((record.session, record.request))),
                }
            }
            for (seq, (holder, key)) in holders.range(collecting.all.stable + 1..) {
                if !seqs.contains(seq) {
                    pulls.insert((index, key.to_vec()), *holder);
                }
            }
            for (write, record) in &aborted {
                let agreed = has_aborted.contains(write) || self.gone.contains(&(index, write.0, write.1));
                if !processed.contains(write) && !agreed {
                    aborts.push((index, *record));
                }
            }
        }
        (pulls, aborts)
    }
}

impl Shard {
    fn over(&mut self) -> &mut TakeOver {
        let Part::TakingOver(over) = &mut self.part else { panic!("called while taking over") };
        over
    }

    /// Goes on with a take-over as far as it can.
    pub(super) fn take_over_step(&mut self, cx: &mut Context<'_>) -> Result<(), TablesError> {
        loop {
            let Part::TakingOver(over) = &self.part else { return Ok(()) };
            let before = over.stage;
            match before {
                Stage::Claiming => self.claim_step(cx),
                Stage::Fencing => self.fence_step(cx),
                Stage::Converging => self.converge_step(cx),
                Stage::Fetching => self.fetch_step(cx),
                Stage::LeavingOut => self.leave_out_step(cx),
                Stage::Waiting => {
                    if self.may_serve(cx) {
                        let Part::TakingOver(over) = std::mem::replace(&mut self.part, Part::Standby) else {
                            unreachable!("matched above")
                        };
                        return self.serve(cx, &over);
                    }
                }
            }
            let Part::TakingOver(over) = &self.part else { return Ok(()) };
            if over.stage == before {
                return Ok(());
            }
        }
    }

    fn claim_step(&mut self, cx: &mut Context<'_>) {
        let mine = self.record.as_ref() == Some(&self.over_ref().claimed);
        if mine {
            let over = self.over();
            (over.stage, over.fencing_ms) = (Stage::Fencing, cx.now_ms);
            self.hurry(cx.now_ms);
            self.take_members(cx);
        } else if !self.is_storing() {
            // It was not stored: begin again from what is on record by then.
            self.part = Part::Standby;
        }
    }

    /// Members that take part so far: confirmed, not lost, heard of lately.
    fn present(&self, cx: &Context<'_>) -> BTreeSet<u8> {
        let record = self.record();
        let present = self.members.values().filter(|member| {
            member.installed >= record.tenure && !member.lost && member.silent_ms(cx.now_ms) <= cx.settings.lost_ms
        });
        present.map(|member| member.info.index).collect()
    }

    fn fence_step(&mut self, cx: &mut Context<'_>) {
        let present = self.present(cx);
        let waits: Vec<_> =
            self.members.values().filter(|member| !present.contains(&member.info.index) && !member.lost).collect();
        let in_time = cx.now_ms < self.over_ref().fencing_ms + cx.settings.reach_ms;
        if present.is_empty() {
            if !in_time && self.trouble.is_empty() {
                let says: Vec<_> = self
                    .members
                    .values()
                    .map(|member| {
                        let trouble = match (&member.lost, member.trouble.as_str()) {
                            (true, _) => "was restarted and lost its data",
                            (false, "") => "does not answer",
                            (false, trouble) => trouble,
                        };
                        format!("replica {} ({}) {trouble}", member.info.id, member.endpoint())
                    })
                    .collect();
                self.trouble = format!(
                    "no replica that holds its data answers: {}. Bring one back as it was; if none can be, give the data up \
                     with `underpass shard begin-empty`",
                    says.join("; ")
                );
                let what = format!("shard {}: {}", self.id, self.trouble);
                cx.log(Level::Error, what);
            }
            return;
        }
        if waits.is_empty() || !in_time {
            self.trouble.clear();
            self.begin_round(cx, Stage::Converging);
        }
    }

    fn over_ref(&self) -> &TakeOver {
        let Part::TakingOver(over) = &self.part else { panic!("called while taking over") };
        over
    }

    fn begin_round(&mut self, cx: &Context<'_>, stage: Stage) {
        let present = self.present(cx);
        let over = self.over();
        over.stage = stage;
        over.round += 1;
        over.round_ms = cx.now_ms;
        over.aborts.clear();
        over.frozen.clear();
        over.collecting = present.into_iter().map(|index| (index, Collecting::default())).collect();
    }

    /// Whether those that agree in this round are those that are present. One that has confirmed late holds neither what they
    /// agree on nor its records (hole 24); it need not be left out either: there is another round, with it.
    fn is_round_of(&self, cx: &Context<'_>, present: &BTreeSet<u8>) -> bool {
        let agreeing = || self.over_ref().collecting.keys();
        #[cfg(feature = "published")]
        if cx.mutant.believe_latecomers {
            return agreeing().all(|index| present.contains(index));
        }
        let _ = cx;
        agreeing().eq(present)
    }

    fn converge_step(&mut self, cx: &mut Context<'_>) {
        let present = self.present(cx);
        if present.is_empty() {
            // Nobody is left to believe; they may answer again.
            let over = self.over();
            (over.stage, over.fencing_ms) = (Stage::Fencing, cx.now_ms);
            return;
        }
        if !self.is_round_of(cx, &present) {
            return self.begin_round(cx, Stage::Converging);
        }
        self.send_aborts(cx);
        if cx.now_ms < self.over_ref().round_ms {
            return;
        }
        let epoch = self.record().epoch;
        let mut ask = Vec::new();
        let over = self.over();
        for (&index, collecting) in &mut over.collecting {
            if !collecting.done && collecting.asked_ms.is_none_or(|asked_ms| cx.now_ms >= asked_ms + ASK_MS) {
                collecting.asked_ms = Some(cx.now_ms);
                ask.push((index, collecting.cursor));
            }
        }
        let (round, done) = (over.round, over.collecting.values().all(|collecting| collecting.done));
        for (index, cursor) in ask {
            let header = Header { seq: cursor, request: round, ..self.header(cx, Op::Collect, epoch) };
            let to = self.members[&index].endpoint();
            cx.send(to, header.datagram(&[], &[]));
        }
        if !done {
            return;
        }
        let (pulls, aborts) = self.over_ref().compare();
        #[cfg(feature = "published")]
        let (pulls, aborts) = if cx.mutant.no_converge { Default::default() } else { (pulls, aborts) };
        if pulls.is_empty() && aborts.is_empty() {
            let from = self.members[present.first().expect("not empty")].endpoint();
            let over = self.over();
            over.stage = Stage::Fetching;
            over.fetching = Fetching { from: Some(from), ..Fetching::default() };
            return;
        }
        for ((index, key), holder) in pulls.iter().take(PULLS_MAX) {
            let from = self.members[holder].endpoint();
            let document = serde_json::to_vec(&Pull { from: (from.addr, from.port) }).expect("always serialises");
            let datagram = self.header(cx, Op::Pull, epoch).datagram(key, &document);
            let to = self.members[index].endpoint();
            cx.send(to, datagram);
        }
        for (index, record) in &aborts {
            let header = Header {
                session: record.session,
                request: record.request,
                seq: record.seq,
                ..self.header(cx, Op::Query, epoch)
            };
            let to = self.members[index].endpoint();
            cx.send(to, header.datagram(&[], &[]));
        }
        let wait_ms = 4 + (pulls.len().min(PULLS_MAX) / 64) as u64;
        self.begin_round(cx, Stage::Converging);
        let over = self.over();
        over.round_ms = cx.now_ms + wait_ms;
        over.aborts =
            aborts.into_iter().map(|(index, record)| ((index, record.session, record.request), record)).collect();
    }

    fn send_aborts(&mut self, cx: &mut Context<'_>) {
        let epoch = self.record().epoch;
        for (index, record) in std::mem::take(&mut self.over().frozen) {
            let Some(member) = self.members.get(&index) else { continue };
            let header = Header {
                session: record.session,
                request: record.request,
                seq: record.seq,
                ..self.header(cx, Op::Abort, epoch)
            };
            cx.send(member.endpoint(), header.datagram(&[], &transfer::emit_abort(&record)));
        }
    }

    fn fetch_step(&mut self, cx: &mut Context<'_>) {
        let present = self.present(cx);
        let fetching = &self.over_ref().fetching;
        let from = fetching.from.expect("set with the stage");
        let is_there = |at: Endpoint| present.iter().any(|index| self.members[index].endpoint() == at);
        if !is_there(from) || !self.is_round_of(cx, &present) {
            return self.begin_round(cx, Stage::Converging);
        }
        let epoch = self.record().epoch;
        let header = self.header(cx, Op::Fetch, epoch);
        let fetching = &mut self.over().fetching;
        let end = fetching.end.map_or(1, |end| end.max(1));
        let wanted = (0..end).step_by(usize::from(SESSIONS_PAGE)).map(|from| from as u16);
        let missing: Vec<u16> = wanted.filter(|page| !fetching.pages.contains_key(page)).collect();
        if missing.is_empty() {
            self.over().stage = Stage::LeavingOut;
            return;
        }
        for page in missing.into_iter().take(PAGES_MAX) {
            let fetching = &mut self.over().fetching;
            if fetching.asked.get(&page).is_none_or(|&asked_ms| cx.now_ms >= asked_ms + ASK_MS) {
                fetching.asked.insert(page, cx.now_ms);
                cx.send(from, header.datagram(&[], &Fetch::Sessions(page).emit()));
            }
        }
    }

    fn leave_out_step(&mut self, cx: &mut Context<'_>) {
        if self.is_storing() {
            return;
        }
        let agreed: BTreeSet<u8> = self.over_ref().collecting.keys().copied().collect();
        let record = self.record().clone();
        if record.members.iter().all(|member| agreed.contains(&member.index)) {
            // Those that stay have confirmed this very record.
            if self.members.values().all(|member| member.installed >= record.epoch) {
                self.over().stage = Stage::Waiting;
            } else if !self.present(cx).is_superset(&agreed) {
                self.begin_round(cx, Stage::Converging);
            }
            return;
        }
        if !self.is_round_of(cx, &self.present(cx)) {
            return self.begin_round(cx, Stage::Converging);
        }
        let left: Vec<_> = record.members.iter().filter(|member| !agreed.contains(&member.index)).collect();
        for member in &left {
            let what = format!("shard {}: goes on without replica {} ({})", self.id, member.id, member.endpoint());
            cx.log(Level::Error, what);
        }
        let members = record.members.iter().filter(|member| agreed.contains(&member.index)).cloned().collect();
        self.store(cx, Record { epoch: record.epoch + 1, members, ..record }, Vec::new());
    }

    /// No read is answered and no write committed under the tenure before any more.
    fn may_serve(&self, cx: &Context<'_>) -> bool {
        #[cfg(feature = "published")]
        if cx.mutant.no_wait {
            return true;
        }
        let over = self.over_ref();
        #[cfg(feature = "published")]
        let settled = over.before.settled || cx.mutant.skip_settled;
        #[cfg(not(feature = "published"))]
        let settled = over.before.settled;
        // A member that was restarted is as good as one that confirmed: the life that answered is over.
        let confirmed = over.before.members.iter().filter(|member| member.active).all(|member| {
            over.confirmed.contains(&(member.index, member.incarnation))
                || self
                    .members
                    .get(&member.index)
                    .is_some_and(|now| now.lost && now.info.incarnation == member.incarnation)
        });
        let first = over.first_confirmed_ms.unwrap_or(cx.now_ms);
        (settled && confirmed) || cx.now_ms > first + over.before.lease_ms + over.before.lease_ms / 16
    }

    /// Where a take-over is, for the operator.
    pub(super) fn stage(&self) -> Option<&'static str> {
        let Part::TakingOver(over) = &self.part else { return None };
        Some(match over.stage {
            Stage::Claiming => "claiming",
            Stage::Fencing => "fencing",
            Stage::Converging => "converging",
            Stage::Fetching => "reading sessions",
            Stage::LeavingOut => "leaving out",
            Stage::Waiting => "waiting for leases",
        })
    }
}

impl Shard {
    /// Makes the tables serve what was rebuilt: the end of a take-over.
    pub(super) fn serve(&mut self, cx: &mut Context<'_>, over: &TakeOver) -> Result<(), TablesError> {
        let record = self.record().clone();
        self.clear(cx)?;
        self.is_clear = false;
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
            tenure: record.tenure,
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
    pub(super) fn claim(&mut self, cx: &mut Context<'_>, before: Record) {
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
        self.part = Part::TakingOver(Box::new(TakeOver::new(before, next.clone())));
        self.members.clear();
        self.store(cx, next, Vec::new());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(request: u64) -> SessionRecord {
        SessionRecord {
            session: SessionId::new(1, 0),
            request,
            status: Status::Aborted.to_wire(),
            ..SessionRecord::default()
        }
    }

    fn version(key: &str, seq: u64, request: u64) -> Held {
        Held::Version { key: key.into(), seq, writer: Some((SessionId::new(1, 0), request)) }
    }

    fn compared(members: Vec<(u64, Vec<Held>)>) -> (Vec<(u8, String, u8)>, Vec<u8>) {
        let mut over = TakeOver::new(Record::new(0, Vec::new()), Record::new(0, Vec::new()));
        for (index, (stable, held)) in members.into_iter().enumerate() {
            let all = Collected { stable, held, ..Collected::default() };
            over.collecting.insert(index as u8, Collecting { all, done: true, ..Collecting::default() });
        }
        let (pulls, aborts) = over.compare();
        let pulls = pulls.into_iter().map(|((index, key), holder)| (index, String::from_utf8(key).unwrap(), holder));
        (pulls.collect(), aborts.into_iter().map(|(index, _)| index).collect())
    }

    #[test]
    fn what_one_lacks_it_pulls_from_who_has_it() {
        let (pulls, aborts) = compared(vec![(10, vec![version("a", 11, 1)]), (10, vec![version("b", 12, 2)])]);
        assert_eq!(pulls, [(0, "b".to_owned(), 1), (1, "a".to_owned(), 0)]);
        assert!(aborts.is_empty());
        let (pulls, _) = compared(vec![(12, vec![]), (10, vec![version("a", 11, 1), version("a", 12, 2)])]);
        assert!(pulls.is_empty(), "what is stable is there");
    }

    #[test]
    fn processed_beats_aborted_and_aborted_becomes_everybodys() {
        let (pulls, aborts) = compared(vec![(10, vec![version("a", 11, 1)]), (10, vec![Held::Aborted(record(1))])]);
        assert_eq!((pulls, aborts), (vec![(1, "a".to_owned(), 0)], vec![]));
        let (pulls, aborts) = compared(vec![(10, vec![]), (10, vec![Held::Aborted(record(1))])]);
        assert_eq!((pulls, aborts), (vec![], vec![0]));
    }
}
