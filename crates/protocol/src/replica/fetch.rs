//! What this replica lacks, and gets from others: a learner's copying, PULL, and conditional writes that wait for their key's
//! chain (protocol.md, section 7).

use std::{
    net::Ipv4Addr,
    sync::{MutexGuard, atomic::Ordering::Relaxed},
};

use super::{
    Action, Count, Drop, Note, Replica, Verdict, actions,
    install::{Role, dropped},
    store::Refused,
};
use crate::{
    control::{self, Copying, Pull},
    transfer::{Chain, Fetch, Fetched, SESSIONS_PAGE},
    wire::{DATAGRAM_MAX, Endpoint, Header, KEY_MAX, Op, Packet, Reason, SessionId},
};

/// A FETCH that is not answered for so long is sent again.
const RETRY_MS: u64 = 20;
/// Pages of chains under way at once: each lane copies its part of the places of keys.
const LANES: u64 = 4;
/// How far ahead of its rate copying may be.
const AHEAD_MS: u64 = 10;
/// Conditional writes that may wait for a chain.
pub(super) const PARKED_MAX: usize = 256;
/// PULLs under way at once; more are dropped, and asked again.
const PULLS_MAX: usize = 256;
/// Chains too long for a page that may wait for their turn, before the lanes wait for them.
const LONG_MAX: usize = 64;

/// What a FETCH is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Why {
    /// Copying: a page of session records.
    Sessions,
    /// Copying: a page of chains before this place; 0: to the end.
    Lane(u64),
    /// Copying: a chain that no page has room for.
    Long,
    /// Writes are parked on the key.
    Parked,
    /// The coordinator said so.
    Pull,
}

/// A FETCH under way.
struct Question {
    request: u64,
    to: Endpoint,
    /// The life of it that is meant; 0: whichever.
    incarnation: u64,
    why: Why,
    what: Fetch,
    key: Vec<u8>,
    /// Of a key: the versions below this seq; 0: all.
    below: u64,
    /// It is sent no sooner.
    after_ms: u64,
    /// When it was sent last.
    sent_ms: Option<u64>,
    /// Its answer is being stored.
    storing: bool,
}

impl Question {
    fn due_ms(&self) -> u64 {
        self.sent_ms.map_or(self.after_ms, |sent_ms| sent_ms + RETRY_MS)
    }
}

/// A conditional write that waits.
struct Parked {
    from: Endpoint,
    write: (SessionId, u64),
    key: Vec<u8>,
    datagram: Vec<u8>,
}

/// A learner's copying.
struct Copy {
    donor: Endpoint,
    incarnation: u64,
    progress: Copying,
    /// In microseconds: what was copied so far is paid for by then, at the rate that is allowed.
    paid_us: u64,
}

/// Everything asked for.
#[derive(Default)]
pub(super) struct Fetching {
    /// The last request number used: never used again, in no life.
    request: u64,
    questions: Vec<Question>,
    parked: Vec<Parked>,
    copy: Option<Copy>,
}

impl Fetching {
    pub fn copying(&self) -> Option<Copying> {
        self.copy.as_ref().map(|copy| copy.progress.clone())
    }

    /// Another tenure or life, or no longer a learner.
    pub fn forget(&mut self) {
        *self = Self { request: self.request, ..Self::default() };
    }

    /// Another epoch of the tenure: copying goes on, from the same donor; what was to be pulled is asked for anew.
    pub fn change(&mut self, role: &Role) {
        self.questions.retain(|question| question.why != Why::Pull);
        let Some(copy) = &mut self.copy else { return };
        let is_there = donor_incarnation(role, copy.donor) == Some(copy.incarnation);
        if !is_there && !copy.progress.done {
            copy.progress.trouble =
                format!("its donor {} is no active member any more: it must begin again with a new life", copy.donor);
            self.questions.clear();
            self.parked.clear();
        }
    }

    fn ask(&mut self, to: Endpoint, incarnation: u64, why: Why, what: Fetch, key: &[u8]) {
        self.request += 1;
        self.questions.push(Question {
            request: self.request,
            to,
            incarnation,
            why,
            what,
            key: key.to_vec(),
            below: 0,
            after_ms: 0,
            sent_ms: None,
            storing: false,
        });
    }

    /// Asks for the chain of a key that writes are parked on, once there is somebody to ask.
    fn ask_parked(&mut self, key: &[u8]) {
        let Some(copy) = &self.copy else { return };
        let asked = |question: &Question| question.why == Why::Parked && question.key == key && !question.storing;
        if copy.progress.trouble.is_empty() && !self.questions.iter().any(asked) {
            self.ask(copy.donor, copy.incarnation, Why::Parked, Fetch::Key, key);
        }
    }

    /// The question of this number goes on with another; `None`: it is answered.
    fn go_on(&mut self, now_ms: u64, request: u64, next: Option<(Fetch, u64)>) {
        self.request += 1;
        let again = self.request;
        let paid_ms = self.copy.as_ref().map_or(0, |copy| copy.paid_us / 1000);
        // So far ahead, all of it is paid off before there is more: a pause is worth waking up for.
        let ahead = paid_ms > now_ms + AHEAD_MS;
        self.questions.retain_mut(|question| {
            if question.request != request {
                return true;
            }
            if let Some((what, below)) = next {
                (question.request, question.what, question.below) = (again, what, below);
                (question.sent_ms, question.storing) = (None, false);
                question.after_ms = if ahead && matches!(question.why, Why::Lane(_)) { paid_ms } else { 0 };
            }
            next.is_some()
        });
    }

    /// Whether the question waits, though it may be sent: too many chains that no page has room for are under way.
    fn is_held_back(&self, question: &Question) -> bool {
        let longs = || self.questions.iter().filter(|question| question.why == Why::Long).count();
        matches!(question.why, Why::Lane(_)) && longs() >= LONG_MAX
    }

    fn is_asked(&self, why: impl Fn(Why) -> bool) -> bool {
        self.questions.iter().any(|question| why(question.why))
    }
}

/// The life of an active member.
fn donor_incarnation(role: &Role, donor: Endpoint) -> Option<u64> {
    let member = role.configuration.members.iter().find(|member| member.endpoint() == donor)?;
    member.active.then_some(member.incarnation)
}

impl Replica {
    pub(super) fn fetching(&self) -> MutexGuard<'_, Fetching> {
        self.fetching.lock().expect("a thread panicked with the questions locked")
    }

    /// Sends what is asked for and was not answered. Harmless at any time.
    pub fn tick(&self, now_ms: u64) -> Vec<Action> {
        let role = self.role.read().expect("a thread panicked while it installed an epoch");
        role.as_ref().map_or(Vec::new(), |role| self.send_questions(now_ms, role, &mut self.fetching()))
    }

    /// When [`Replica::tick`] has something to do next; `None`: not before something else happens.
    pub fn due_ms(&self) -> Option<u64> {
        let fetching = self.fetching();
        let waits = |question: &&Question| !question.storing && !fetching.is_held_back(question);
        let waiting = fetching.questions.iter().filter(waits);
        waiting.map(Question::due_ms).min()
    }

    fn send_questions(&self, now_ms: u64, role: &Role, fetching: &mut Fetching) -> Vec<Action> {
        let due =
            |question: &Question| now_ms >= question.due_ms() && !question.storing && !fetching.is_held_back(question);
        let due: Vec<_> = fetching.questions.iter().map(due).collect();
        let send = |question: &mut Question| {
            question.sent_ms = Some(now_ms);
            let time = if let Why::Lane(until) = question.why { until } else { question.below };
            let header = Header {
                shard: role.shard,
                epoch: role.epoch,
                // No answer to an earlier life is taken.
                session: SessionId(self.incarnation()),
                request: question.request,
                seq: question.incarnation,
                time,
                ..Header::new(Op::Fetch)
            };
            self.send(question.to, header, &question.key, &question.what.emit())
        };
        let questions = fetching.questions.iter_mut().zip(due);
        questions.filter(|&(_, due)| due).map(|(question, _)| send(question)).collect()
    }

    /// A heartbeat names the donor of a learner.
    pub(super) fn copy_from(
        &self,
        now_ms: u64,
        role: &Role,
        donor: (Ipv4Addr, u16),
        actions: &mut Vec<Action>,
    ) -> Copying {
        let mut fetching = self.fetching();
        let asked = Endpoint { addr: donor.0, port: donor.1 };
        if fetching.copy.is_some() {
            // A donor is kept for as long as it is an active member: whoever is named now was chosen before our choice was known.
            return fetching.copying().expect("it copies");
        }
        let Some(incarnation) = donor_incarnation(role, asked) else {
            // Not begun: the next heartbeat may name another one.
            let trouble = format!("{asked} is no active member in epoch {}", role.epoch);
            return Copying { donor: Some(donor), trouble, ..Copying::default() };
        };
        let progress = Copying { donor: Some(donor), ..Copying::default() };
        fetching.copy = Some(Copy { donor: asked, incarnation, progress: progress.clone(), paid_us: now_ms * 1000 });
        fetching.ask(asked, incarnation, Why::Sessions, Fetch::Sessions(0), &[]);
        for key in fetching.parked.iter().map(|parked| parked.key.clone()).collect::<Vec<_>>() {
            fetching.ask_parked(&key);
        }
        actions.push(Action::Note(Note::Copying { donor: asked }));
        actions.extend(self.send_questions(now_ms, role, &mut fetching));
        progress
    }

    /// PULL: the chain of the packet's key is to be had from a replica.
    pub(super) fn pull(&self, now_ms: u64, from: Endpoint, packet: &Packet<'_>) -> Vec<Action> {
        let guard = self.role.read().expect("a thread panicked while it installed an epoch");
        let reason = self.not_obeyed(guard.as_ref(), from, &packet.header, true);
        let (None, Some(role)) = (reason, &*guard) else {
            drop(guard);
            return self.control_reject(reason.unwrap_or(Reason::Epoch), from, packet);
        };
        let pull = control::parse::<Pull>(packet).filter(|_| (1..=KEY_MAX).contains(&packet.key.len()));
        let Some(Pull { from: (addr, port) }) = pull else {
            drop(guard);
            return self.control_reject(Reason::Malformed, from, packet);
        };
        let to = Endpoint { addr, port };
        let mut fetching = self.fetching();
        let asked = |question: &Question| (question.why, question.to) == (Why::Pull, to) && question.key == packet.key;
        let pulls = fetching.questions.iter().filter(|question| question.why == Why::Pull).count();
        if !fetching.questions.iter().any(asked) {
            if pulls >= PULLS_MAX {
                return dropped(Drop::NoRoom);
            }
            let member = role.configuration.members.iter().find(|member| member.endpoint() == to);
            let incarnation = member.map_or(0, |member| member.incarnation);
            fetching.ask(to, incarnation, Why::Pull, Fetch::Key, packet.key);
        }
        let mut actions = vec![Action::Count(Count::Pull)];
        actions.extend(self.send_questions(now_ms, role, &mut fetching));
        actions
    }

    /// Keeps a conditional write until its key's chain is here.
    pub(super) fn park(&self, from: Endpoint, header: &Header, buffer: &[u8]) -> Verdict {
        let datagram = buffer[..header.datagram_len()].to_vec();
        let key = Packet::parse(&datagram).expect("parsed before").key.to_vec();
        let write = (header.session, header.request);
        let mut fetching = self.fetching();
        if !fetching.parked.iter().any(|parked| parked.write == write) {
            if fetching.parked.len() >= PARKED_MAX {
                return Verdict::Dropped(Drop::Uncopied);
            }
            fetching.parked.push(Parked { from, write, key: key.clone(), datagram });
        }
        fetching.ask_parked(&key);
        Verdict::Parked
    }

    /// FETCHED.
    pub(super) fn fetched(&self, now_ms: u64, from: Endpoint, packet: &Packet<'_>) -> Vec<Action> {
        let Header { session, request, time: below, .. } = packet.header;
        let Some(fetched) = Fetched::parse(packet.value) else { return dropped(Drop::Unasked) };
        let guard = self.role.read().expect("a thread panicked while it installed an epoch");
        let Some(role) = guard.as_ref().filter(|role| role.shard == packet.header.shard) else {
            return dropped(Drop::Unasked);
        };
        let why = {
            let mut fetching = self.fetching();
            let fits = |question: &&mut Question| {
                let what = match &fetched {
                    Fetched::Key(chain) => question.what == Fetch::Key && question.key == chain.key,
                    Fetched::Page { cursor, .. } => question.what == Fetch::Page(*cursor),
                    Fetched::Sessions { from, .. } => question.what == Fetch::Sessions(*from),
                };
                what && (question.request, question.to) == (request, from) && !question.storing
            };
            let life = session == SessionId(self.incarnation());
            let Some(question) = fetching.questions.iter_mut().filter(|_| life).find(fits) else {
                return dropped(Drop::Unasked);
            };
            question.storing = true;
            question.why
        };

        let stored = self.store_fetched(role, why, &fetched, below == 0);

        let mut fetching = self.fetching();
        if !fetching.questions.iter().any(|question| question.request == request) {
            // Given up meanwhile. What was stored does no harm.
            return dropped(Drop::Unasked);
        }
        let mut actions = Vec::new();
        match stored {
            Ok(()) => {
                actions.push(Action::Count(Count::Fetched));
                if let Some(copy) = fetching.copy.as_mut().filter(|_| why != Why::Pull) {
                    copy.progress.trouble.clear();
                }
                let next = self.next_question(now_ms, &mut fetching, why, &fetched, below);
                fetching.go_on(now_ms, request, next);
                self.finish(role, &mut fetching, &mut actions);
            }
            Err(refused) => {
                actions.push(Action::Count(Count::Drop(Drop::NoRoom)));
                let usage = self.store.used_bytes();
                if let Some(copy) = fetching.copy.as_mut().filter(|_| why != Why::Pull) {
                    copy.progress.trouble = match refused {
                        Refused::Full => {
                            format!("its memory budget is used up ({usage} bytes): give it more with --memory")
                        }
                        _ => "its session table is smaller than the donor's".into(),
                    };
                }
                for question in fetching.questions.iter_mut().filter(|question| question.request == request) {
                    (question.storing, question.sent_ms) = (false, Some(now_ms));
                }
            }
        }
        let mut released = Vec::new();
        if let (Ok(()), Why::Parked, 0, Fetched::Key(chain)) = (stored, why, below, &fetched) {
            released = fetching.parked.extract_if(.., |parked| parked.key == chain.key).collect();
        }
        actions.extend(self.send_questions(now_ms, role, &mut fetching));
        drop(fetching);
        // The writes look at the role themselves.
        drop(guard);
        for parked in released {
            let header = Packet::parse(&parked.datagram).expect("parsed before").header;
            let mut buffer = [0; DATAGRAM_MAX];
            buffer[..parked.datagram.len()].copy_from_slice(&parked.datagram);
            let verdict = self.write(parked.from, header, &mut buffer);
            actions.extend(self::actions(verdict, &buffer));
        }
        actions
    }

    /// What follows the answer to a question; `None`: nothing.
    fn next_question(
        &self,
        now_ms: u64,
        fetching: &mut Fetching,
        why: Why,
        fetched: &Fetched,
        below: u64,
    ) -> Option<(Fetch, u64)> {
        match fetched {
            Fetched::Key(_) => (below != 0).then_some((Fetch::Key, below)),
            Fetched::Sessions { from, end, .. } => {
                let next = from.checked_add(SESSIONS_PAGE).filter(|&next| u32::from(next) < *end);
                let copy = fetching.copy.as_ref().filter(|_| next.is_none());
                if let Some((donor, incarnation)) = copy.map(|copy| (copy.donor, copy.incarnation)) {
                    // Records first, then the chains.
                    for lane in 0..LANES {
                        let (first, until) = (lane * (1 << 62), (lane + 1) % LANES * (1 << 62));
                        fetching.ask(donor, incarnation, Why::Lane(until), Fetch::Page(first), &[]);
                    }
                }
                next.map(|next| (Fetch::Sessions(next), 0))
            }
            Fetched::Page { next, items, chains, .. } => {
                let copy = fetching.copy.as_mut()?;
                let (donor, incarnation, progress) = (copy.donor, copy.incarnation, &mut copy.progress);
                copy.paid_us = copy.paid_us.max(now_ms * 1000) + self.copy_us(chains.len());
                progress.of = *items;
                progress.items += chains.iter().filter(|chain| is_item(chain)).count() as u64;
                progress.bytes += chains.iter().map(|chain| chain.key.len() as u64 + data_bytes(chain)).sum::<u64>();
                for chain in chains.iter().filter(|chain| chain.is_empty()) {
                    fetching.ask(donor, incarnation, Why::Long, Fetch::Key, &chain.key);
                }
                let until = if let Why::Lane(until) = why { until } else { 0 };
                let goes_on = *next != 0 && (until == 0 || *next < until);
                goes_on.then_some((Fetch::Page(*next), 0))
            }
        }
    }

    /// How long so many chains take at the rate that is allowed.
    fn copy_us(&self, chains: usize) -> u64 {
        (chains as u64 * 1_000_000).checked_div(self.copy_rate.into()).unwrap_or(0)
    }

    /// Notes it when everything is copied.
    fn finish(&self, role: &Role, fetching: &mut Fetching, actions: &mut Vec<Action>) {
        let copies = |why| matches!(why, Why::Sessions | Why::Lane(_) | Why::Long);
        if fetching.is_asked(copies) {
            return;
        }
        if let Some(copy) =
            fetching.copy.as_mut().filter(|copy| !copy.progress.done && copy.progress.trouble.is_empty())
        {
            copy.progress.done = true;
            role.copied.store(true, Relaxed);
            actions.push(Action::Note(Note::Copied { items: copy.progress.items }));
        }
    }

    /// Stores what came; `whole`: these are all versions of the chain.
    fn store_fetched(&self, role: &Role, why: Why, fetched: &Fetched, whole: bool) -> Result<(), Refused> {
        match fetched {
            Fetched::Key(chain) => {
                self.store_chain(role, chain, why != Why::Pull)?;
                // Whom the coordinator has it pull from may itself be a learner, and hold less than the chain.
                if whole && why != Why::Pull { self.store.mark_copied(&chain.key) } else { Ok(()) }
            }
            Fetched::Page { chains, .. } => {
                for chain in chains.iter().filter(|chain| !chain.is_empty()) {
                    self.store_chain(role, chain, true)?;
                    self.store.mark_copied(&chain.key)?;
                }
                Ok(())
            }
            Fetched::Sessions { records, .. } => {
                if self.copies_no_records() {
                    return Ok(());
                }
                for record in records {
                    role.sessions.lock(record.session.index()).ok_or(Refused::Session)?.merge(record);
                }
                Ok(())
            }
        }
    }

    fn copies_no_records(&self) -> bool {
        #[cfg(feature = "published")]
        return self.published.copy_no_records;
        #[cfg(not(feature = "published"))]
        false
    }

    /// Each version with its writer's record, in one step.
    fn store_chain(&self, role: &Role, chain: &Chain, copying: bool) -> Result<(), Refused> {
        let keep = self.keeps_tombstones(role);
        #[cfg(feature = "published")]
        let copying = copying || self.published.pull_ignores_stable;
        for (version, record) in &chain.versions {
            let Some(record) = record.as_ref().filter(|_| !self.copies_no_records()) else {
                self.store.put(&chain.key, version, None, copying, keep)?;
                continue;
            };
            let index = record.session.index();
            let mut slot = role.sessions.lock(index).ok_or(Refused::Session)?;
            self.store.put(&chain.key, version, Some(index), copying, keep)?;
            slot.merge(record);
        }
        Ok(())
    }
}

fn is_item(chain: &Chain) -> bool {
    chain.versions.first().is_none_or(|(version, _)| version.data.is_some())
}

fn data_bytes(chain: &Chain) -> u64 {
    chain.versions.iter().map(|(version, _)| version.data.as_ref().map_or(0, Vec::len) as u64).sum()
}
