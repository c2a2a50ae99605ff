//! The replicas of one shard as its agent sees them: who takes part, who answers, who is nearly full.
//!
//! Pure: messages come in as values, datagrams to send go out. protocol.md, section 10.

use tracing::{error, info, warn};
use underpass_abi::abi::{up_config, up_member};
use underpass_protocol::{
    control::{self, Configuration, Heartbeat, HeartbeatAck, Install, Installed, MemberInfo},
    wire::{Endpoint, Header, Op, Reason},
};

use crate::{authority::Record, config::Shard};

/// First wait for an answer to INSTALL; doubled up to [`RETRY_MAX_MS`].
const RETRY_MIN_MS: u64 = 20;
/// Longest wait for an answer to INSTALL.
const RETRY_MAX_MS: u64 = 1000;
/// A member that does not answer heartbeats for this long gets no reads.
const SILENCE_MS: u64 = 1000;
/// Longer than this between two looks for silence, and the agent was held up.
const HELD_UP_MS: u64 = 100;
/// How often what the shard waits for is said again.
const SAY_MS: u64 = 3000;

/// What the shard is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Asking members who they are: which life of the process, and whether their data can be used.
    Asking,
    /// Having them take part, each under the incarnation that it told.
    Installing,
    /// Every member took part.
    Serving,
}

/// What an answer led to that the agent must act on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Nothing.
    None,
    /// Every member is known and can take part: put [`Members::configuration`] on record, then call [`Members::install`].
    Known,
    /// Every member took part: serve.
    TookPart,
    /// Who gets reads, or whether writes may grow the store, changed.
    Changed,
}

/// A replica.
#[derive(Clone, Debug)]
pub struct Member {
    /// Where it is.
    pub endpoint: Endpoint,
    /// Which life of the process takes part; 0: not known.
    pub incarnation: u64,
    /// It takes part in this epoch.
    pub installed: bool,
    /// It gets reads.
    pub serving: bool,
    /// When it was last heard of.
    pub heard_ms: Option<u64>,
    /// Bytes of its budget in use, by its latest heartbeat.
    pub used_bytes: u64,
    /// Its budget.
    pub budget_bytes: u64,
    /// Items it holds.
    pub items: u64,
    /// Why it does not take part or gets no reads; empty if all is well.
    pub trouble: String,
    /// It lost what it held; its acknowledgement never comes.
    lost: bool,
    /// It answered in this round of asking.
    answered: bool,
    /// The epoch whose data it holds, by its latest refusal.
    epoch: u32,
    /// The clean epoch that it was told last.
    told_clean: u32,
    send_ms: u64,
    retry_ms: u64,
}

/// The replicas of a shard.
pub struct Members {
    shard: u32,
    epoch: u32,
    /// Epochs whose data are the same.
    clean: std::ops::RangeInclusive<u32>,
    coordinator: Endpoint,
    sessions: u32,
    /// The configuration of the epoch before: it tells which lives of the replicas hold its data.
    before: Option<Configuration>,
    members: Vec<Member>,
    phase: Phase,
    store_full: bool,
    /// When silence was looked for last.
    checked_ms: u64,
    /// Numbers the questions.
    request: u64,
    say_ms: u64,
    /// What was last said to be wrong with the members together.
    said: String,
}

impl Members {
    /// The replicas of `shard` in the epoch that `record` names, about to be asked.
    pub fn new(shard: &Shard, coordinator: Endpoint, sessions: u32, record: &Record, now_ms: u64) -> Self {
        let member = |&endpoint: &Endpoint| Member {
            endpoint,
            incarnation: 0,
            installed: false,
            serving: false,
            heard_ms: None,
            used_bytes: 0,
            budget_bytes: 0,
            items: 0,
            trouble: "has not answered yet".to_owned(),
            lost: false,
            answered: false,
            epoch: 0,
            told_clean: 0,
            send_ms: now_ms,
            retry_ms: RETRY_MIN_MS,
        };
        Self {
            shard: shard.id,
            epoch: record.epoch,
            clean: record.clean_from..=record.clean_epoch,
            coordinator,
            sessions,
            before: record.configuration.clone(),
            members: shard.members.iter().map(member).collect(),
            phase: Phase::Asking,
            store_full: false,
            checked_ms: now_ms,
            // An answer to another epoch's question is none to this one's.
            request: u64::from(record.epoch) << 32,
            say_ms: now_ms + SAY_MS,
            said: String::new(),
        }
    }

    /// Takes it that every member takes part and is alive.
    pub fn assume_installed(&mut self) {
        for member in &mut self.members {
            (member.installed, member.serving, member.trouble) = (true, true, String::new());
        }
        self.phase = Phase::Serving;
    }

    /// Goes on with members that took part in this very epoch under an agent before this one: those that the record names.
    /// Each proves by its next heartbeat that it is still the same.
    pub fn take_over(&mut self, now_ms: u64) {
        for (index, member) in self.members.iter_mut().enumerate() {
            let known = self.before.as_ref().and_then(|before| before.members.get(index));
            member.incarnation = known.map_or(0, |known| known.incarnation);
            (member.installed, member.serving, member.trouble) = (true, true, String::new());
            member.heard_ms = Some(now_ms);
        }
        self.phase = Phase::Serving;
    }

    /// Shard.
    pub fn shard(&self) -> u32 {
        self.shard
    }

    /// Epoch.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// What it is about.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// The replicas by member index.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// Whether writes that may grow the store are refused.
    pub fn store_full(&self) -> bool {
        self.store_full
    }

    /// The configuration, with the incarnations known so far.
    pub fn configuration(&self) -> Configuration {
        let info = |(index, member): (usize, &Member)| MemberInfo {
            index: index as u8,
            id: index as u32,
            incarnation: member.incarnation,
            addr: member.endpoint.addr,
            port: member.endpoint.port,
            active: true,
        };
        Configuration {
            shard: self.shard,
            epoch: self.epoch,
            tenure: self.epoch,
            lease_ms: 1000,
            coordinator_addr: self.coordinator.addr,
            coordinator_port: self.coordinator.port,
            members: self.members.iter().enumerate().map(info).collect(),
        }
    }

    /// The data path's configuration.
    pub fn config(&self, floor: u64, lease_until_ms: u64, next_hops: &[Option<[u8; 6]>]) -> up_config {
        let mut config = up_config {
            shard: self.shard,
            epoch: self.epoch,
            floor,
            lease_until_ms,
            store_full: self.store_full.into(),
            refuse_writes: if self.members.iter().any(|member| member.lost) { Reason::NoMember.to_wire() } else { 0 },
            ..up_config::default()
        };
        for (index, member) in self.members.iter().enumerate() {
            config.must_ack |= 1 << index;
            config.must_ack_list[usize::from(config.must_ack_count)] = index as u8;
            config.must_ack_count += 1;
            if member.serving {
                config.serving |= 1 << index;
                config.serving_list[usize::from(config.serving_count)] = index as u8;
                config.serving_count += 1;
            }
            config.members[index] = up_member {
                addr: u32::from(member.endpoint.addr).to_be(),
                port: member.endpoint.port.to_be(),
                next_hop: next_hops.get(index).copied().flatten().unwrap_or_default(),
                reserved: 0,
            };
        }
        config
    }

    /// The configuration is on record: have the members take part. Tells if all do already.
    pub fn install(&mut self, now_ms: u64) -> Event {
        assert_eq!(self.phase, Phase::Asking, "members are asked before they are installed");
        self.phase = Phase::Installing;
        for member in &mut self.members {
            (member.send_ms, member.retry_ms) = (now_ms, RETRY_MIN_MS);
        }
        self.check_installed(now_ms)
    }

    fn check_installed(&mut self, now_ms: u64) -> Event {
        if !self.members.iter().all(|member| member.installed) {
            return Event::None;
        }
        for member in &mut self.members {
            (member.serving, member.heard_ms) = (true, Some(now_ms));
        }
        self.phase = Phase::Serving;
        Event::TookPart
    }

    /// INSTALL messages that are due; every few seconds says what is waited for.
    pub fn tick(&mut self, now_ms: u64) -> Vec<(Endpoint, Vec<u8>)> {
        let mut out = Vec::new();
        if self.phase == Phase::Serving {
            return out;
        }
        for index in 0..self.members.len() {
            let asking = self.phase == Phase::Asking;
            let member = &mut self.members[index];
            let waits = if asking { !member.answered } else { !member.installed };
            if !waits || now_ms < member.send_ms {
                continue;
            }
            member.send_ms = now_ms + member.retry_ms;
            member.retry_ms = (member.retry_ms * 2).min(RETRY_MAX_MS);
            self.request += 1;
            let mut configuration = self.configuration();
            if asking {
                configuration.members[index].incarnation = 0;
            }
            // Each is told that the epoch of its own data ended clean, if it did.
            let held = self.members[index].epoch;
            let clean_epoch = if held != 0 && self.clean.contains(&held) { held } else { *self.clean.end() };
            self.members[index].told_clean = clean_epoch;
            let incarnation = configuration.members[index].incarnation;
            let install =
                Install { incarnation, index: index as u8, reset: false, configuration, sessions: self.sessions };
            out.push((self.members[index].endpoint, control::emit(self.header(Op::Install), &install)));
        }
        if now_ms >= self.say_ms {
            self.say_ms = now_ms + SAY_MS;
            for (index, member) in self.members.iter().enumerate() {
                if !member.trouble.is_empty() {
                    warn!(
                        "shard {} does not serve yet: replica {index} ({}): {}",
                        self.shard, member.endpoint, member.trouble
                    );
                }
            }
            if !self.said.is_empty() {
                error!("shard {} does not serve: {}", self.shard, self.said);
            }
        }
        out
    }

    /// An answer to INSTALL.
    pub fn installed(&mut self, from: Endpoint, header: &Header, answer: &Installed, now_ms: u64) -> Event {
        let Some(index) = self.member_at(from) else { return Event::None };
        if header.request >> 32 != u64::from(self.epoch) || self.phase == Phase::Serving {
            return Event::None;
        }
        let (shard, epoch) = (self.shard, self.epoch);
        let member = &mut self.members[index];
        member.heard_ms = Some(now_ms);
        member.items = answer.items;
        if !answer.refusal.is_empty() {
            member.epoch = answer.epoch;
            if member.epoch != 0 && self.clean.contains(&member.epoch) && member.epoch != member.told_clean {
                // It holds what an epoch left that is as clean as the one it was told.
                member.send_ms = now_ms;
                return Event::None;
            }
            if member.trouble != answer.refusal {
                error!("shard {shard}: replica {index} ({from}) does not take part: {}", answer.refusal);
            }
            // Asked again at leisure: somebody may do what it says.
            (member.trouble, member.answered) = (answer.refusal.clone(), false);
            (member.send_ms, member.retry_ms) = (now_ms + RETRY_MAX_MS, RETRY_MAX_MS);
            self.phase = Phase::Asking;
            return Event::None;
        }
        let other_life = member.incarnation != 0 && member.incarnation != answer.incarnation;
        (member.incarnation, member.answered) = (answer.incarnation, true);
        // Only a life that a recorded configuration named takes part in this epoch.
        member.installed = answer.epoch == epoch;
        member.trouble = if member.installed { String::new() } else { "has not taken part yet".to_owned() };
        if other_life {
            warn!("shard {shard}: replica {index} ({from}) was restarted while the shard was starting");
            self.phase = Phase::Asking;
        }
        match self.phase {
            Phase::Asking if self.members.iter().all(|member| member.answered) => self.check(now_ms),
            Phase::Installing => self.check_installed(now_ms),
            _ => Event::None,
        }
    }

    /// Whether the members can be one shard together: all empty, or all with the data of the same clean epoch. Each vouches
    /// for its own data; an empty one among full ones would answer "not found" for what is there.
    fn check(&mut self, now_ms: u64) -> Event {
        let holder = self.members.iter().position(|member| member.items > 0);
        let newcomer = self.members.iter().enumerate().position(|(_, member)| {
            let known = self.before.iter().flat_map(|before| &before.members).any(|known| {
                (known.addr, known.port) == (member.endpoint.addr, member.endpoint.port)
                    && known.incarnation == member.incarnation
            });
            !known
        });
        if let (Some(holder), Some(newcomer)) = (holder, newcomer) {
            let (holds, new) = (&self.members[holder], &self.members[newcomer]);
            let says = format!(
                "replica {newcomer} ({}) was restarted or is new, and does not have what replica {holder} ({}) holds ({} \
                 items). A replica cannot be filled from the others yet: restart them all to begin empty",
                new.endpoint, holds.endpoint, holds.items
            );
            if self.said != says {
                error!("shard {} does not serve: {says}", self.shard);
            }
            self.said = says;
            for member in &mut self.members {
                member.answered = false;
                (member.send_ms, member.retry_ms) = (now_ms + RETRY_MAX_MS, RETRY_MAX_MS);
            }
            return Event::None;
        }
        self.said.clear();
        Event::Known
    }

    /// Heartbeats to every member.
    pub fn heartbeats(&mut self, stable: u64, time: u64) -> Vec<(Endpoint, Vec<u8>)> {
        self.request += 1;
        let mut header = self.header(Op::Heartbeat);
        header.time = time;
        let datagram = control::emit(header, &Heartbeat { stable, time, echo: None, donor: None });
        self.members.iter().map(|member| (member.endpoint, datagram.clone())).collect()
    }

    /// An answer to a heartbeat.
    pub fn heartbeat_ack(&mut self, from: Endpoint, header: &Header, ack: &HeartbeatAck, now_ms: u64) -> Event {
        let Some(index) = self.member_at(from) else { return Event::None };
        if header.epoch != self.epoch || self.phase != Phase::Serving {
            return Event::None;
        }
        if ack.incarnation != self.members[index].incarnation {
            return self.restarted(index);
        }
        if self.members[index].lost {
            return Event::None;
        }
        let shard = self.shard;
        let member = &mut self.members[index];
        member.heard_ms = Some(now_ms);
        (member.used_bytes, member.budget_bytes, member.items) = (ack.used_bytes, ack.budget_bytes, ack.items);
        let mut changed = false;
        if !member.serving {
            warn!("shard {shard}: replica {index} ({from}) answers again");
            (member.serving, changed) = (true, true);
            member.trouble.clear();
        }
        // Full above 15/16 of a budget, no more below 14/16.
        let limit = if self.store_full { 14 } else { 15 };
        let above = |member: &Member| u128::from(member.used_bytes) * 16 > u128::from(member.budget_bytes) * limit;
        let full = self.members.iter().any(above);
        if full != self.store_full {
            self.store_full = full;
            changed = true;
            if full {
                warn!("shard {shard}: a replica is near its memory budget; writes that may grow the store are refused");
            } else {
                info!("shard {shard}: replicas have room again");
            }
        }
        if changed { Event::Changed } else { Event::None }
    }

    /// A CONTROL_REJECT. A member that refuses a heartbeat because it is in no or another epoch is another life of itself.
    pub fn rejected(&mut self, from: Endpoint, header: &Header) -> Event {
        let Some(index) = self.member_at(from) else { return Event::None };
        let is_about_epoch = Reason::from_wire(header.status) == Some(Reason::Epoch) && header.epoch != self.epoch;
        if !is_about_epoch || header.request >> 32 != u64::from(self.epoch) || self.phase != Phase::Serving {
            return Event::None;
        }
        self.restarted(index)
    }

    /// A member lost what it held: no reads for it, for good.
    fn restarted(&mut self, index: usize) -> Event {
        let member = &mut self.members[index];
        let says = "was restarted and lost its data: it gets no reads, and new writes are refused. A replica \
                    cannot be filled from the others yet: stop the coordinator, restart every replica, begin empty";
        if member.trouble != says {
            error!("shard {}: replica {index} ({}) {says}", self.shard, member.endpoint);
            member.trouble = says.to_owned();
        }
        member.serving = false;
        if std::mem::replace(&mut member.lost, true) { Event::None } else { Event::Changed }
    }

    /// Takes reads away from members that are silent.
    pub fn check_silence(&mut self, now_ms: u64) -> Event {
        if self.phase != Phase::Serving {
            return Event::None;
        }
        // While this agent was held up itself, by a busy machine or a stopped one, nobody was asked anything.
        let held_up_ms = now_ms.saturating_sub(self.checked_ms).saturating_sub(HELD_UP_MS);
        self.checked_ms = now_ms;
        let mut event = Event::None;
        for (index, member) in self.members.iter_mut().enumerate() {
            member.heard_ms = member.heard_ms.map(|heard_ms| heard_ms.saturating_add(held_up_ms).min(now_ms));
            let silent_ms = now_ms.saturating_sub(member.heard_ms.unwrap_or(0));
            if member.serving && silent_ms > SILENCE_MS {
                member.serving = false;
                member.trouble = "is silent: it gets no reads, and writes wait for it".to_owned();
                error!("shard {}: replica {index} ({}) {}", self.shard, member.endpoint, member.trouble);
                event = Event::Changed;
            }
        }
        event
    }

    fn member_at(&self, from: Endpoint) -> Option<usize> {
        self.members.iter().position(|member| member.endpoint == from)
    }

    fn header(&self, op: Op) -> Header {
        let mut header = Header::new(op);
        header.epoch = self.epoch;
        header.shard = self.shard;
        header.request = self.request;
        header.set_reply_to(self.coordinator);
        header
    }
}

#[cfg(test)]
mod tests {
    use underpass_protocol::wire::Packet;

    use super::*;

    fn at(host: u8) -> Endpoint {
        Endpoint { addr: [10, 0, 0, host].into(), port: 5550 }
    }

    fn members(record: &Record) -> Members {
        let shard = Shard { id: 0, members: vec![at(2), at(3)] };
        Members::new(&shard, at(1), 64, record, 0)
    }

    fn first() -> Record {
        Record { epoch: 1, ..Record::new(0) }
    }

    /// A replica: answers INSTALL as protocol.md, section 10, says.
    #[derive(Clone)]
    struct Replica {
        incarnation: u64,
        items: u64,
        epoch: u32,
        refusal: &'static str,
    }

    impl Replica {
        fn new(incarnation: u64, items: u64) -> Self {
            Self { incarnation, items, epoch: 0, refusal: "" }
        }

        /// With what epoch 1 left.
        fn holding(incarnation: u64) -> Self {
            Self { epoch: 1, ..Self::new(incarnation, 1000) }
        }

        fn answer(&mut self, datagram: &[u8]) -> (Header, Installed) {
            let packet = Packet::parse(datagram).unwrap();
            let install: Install = control::parse(&packet).unwrap();
            install.configuration.validate().unwrap();
            let named = install.configuration.members[usize::from(install.index)].incarnation == self.incarnation;
            let mut refusal = self.refusal.to_owned();
            if named && refusal.is_empty() && self.epoch != install.configuration.epoch {
                if self.items > 0 && install.clean_epoch != self.epoch {
                    refusal = format!("holds data of epoch {}", self.epoch);
                } else {
                    self.epoch = install.configuration.epoch;
                }
            }
            let epoch = if named { self.epoch } else { 0 };
            (packet.header, Installed { incarnation: self.incarnation, epoch, refusal, items: self.items })
        }
    }

    /// Delivers what is due at `now_ms` and returns what came of it, without `None`s.
    fn round(members: &mut Members, replicas: &mut [Replica], now_ms: u64) -> Vec<Event> {
        let mut events = Vec::new();
        for (to, datagram) in members.tick(now_ms) {
            let index = members.member_at(to).unwrap();
            let (header, answer) = replicas[index].answer(&datagram);
            match members.installed(to, &header, &answer, now_ms) {
                Event::None => {}
                event => events.push(event),
            }
        }
        events
    }

    #[test]
    fn two_steps_to_serving() {
        let mut members = members(&first());
        let mut replicas = [Replica::new(11, 0), Replica::new(12, 0)];
        assert_eq!(round(&mut members, &mut replicas, 0), [Event::Known]);
        assert_eq!(
            (replicas[0].epoch, members.phase()),
            (0, Phase::Asking),
            "nobody takes part before the record is written"
        );
        members.install(1);
        assert_eq!(round(&mut members, &mut replicas, 1), [Event::TookPart]);
        assert_eq!(members.phase(), Phase::Serving);
        assert_eq!(replicas.map(|replica| replica.epoch), [1, 1]);
        assert!(members.tick(100_000).is_empty());
        let config = members.config(5, u64::MAX, &[Some([1; 6]), None]);
        assert_eq!((config.must_ack, config.serving, config.must_ack_list[1]), (3, 3, 1));
        assert_eq!((config.members[0].next_hop, config.members[1].next_hop), ([1; 6], [0; 6]));
    }

    #[test]
    fn asks_again_with_longer_waits() {
        let mut members = members(&first());
        let mut sent = Vec::new();
        for now_ms in 0..5000 {
            if !members.tick(now_ms).is_empty() {
                sent.push(now_ms);
            }
        }
        assert_eq!(sent[..7], [0, 20, 60, 140, 300, 620, 1260]);
        assert_eq!(sent[7..9], [2260, 3260]);
    }

    #[test]
    fn a_restart_in_between_starts_over() {
        let mut members = members(&first());
        let mut replicas = [Replica::new(11, 0), Replica::new(12, 0)];
        round(&mut members, &mut replicas, 0);
        members.install(1);
        replicas[1] = Replica::new(99, 0);
        assert_eq!(round(&mut members, &mut replicas, 1), [Event::Known]);
        assert_eq!(members.phase(), Phase::Asking, "the record must name the new life first");
        assert_eq!(members.configuration().members[1].incarnation, 99);
        members.install(2);
        assert_eq!(round(&mut members, &mut replicas, 2), [Event::TookPart]);
        assert_eq!(replicas[1].epoch, 1);
    }

    #[test]
    fn refusals_and_strangers_keep_the_shard_from_serving() {
        let mut members = members(&first());
        let mut replicas = [Replica::new(11, 0), Replica { refusal: "holds data of epoch 9", ..Replica::new(12, 5) }];
        assert!(round(&mut members, &mut replicas, 0).is_empty());
        assert_eq!(members.members()[1].trouble, "holds data of epoch 9");
        let header = members.header(Op::Installed);
        let answer = Installed { incarnation: 5, epoch: 0, refusal: String::new(), items: 0 };
        assert_eq!(members.installed(at(77), &header, &answer, 1), Event::None, "not a member's address");
        let mut old = header;
        old.request = 7 << 32;
        assert_eq!(members.installed(at(3), &old, &answer, 1), Event::None, "an answer to another epoch's question");
        assert_eq!(members.members()[1].incarnation, 0);
        // Its operator did what it said.
        replicas[1] = Replica::new(13, 0);
        assert!(round(&mut members, &mut replicas, 500).is_empty(), "asked again at leisure");
        assert_eq!(round(&mut members, &mut replicas, 1000), [Event::Known]);
    }

    fn clean() -> Record {
        let mut ended = members(&first());
        (ended.members[0].incarnation, ended.members[1].incarnation) = (11, 12);
        Record { configuration: Some(ended.configuration()), ..first().ended_clean(0) }.next_epoch().unwrap()
    }

    #[test]
    fn data_of_a_clean_epoch_is_kept_if_everybody_has_it() {
        let mut members = members(&clean());
        let mut replicas = [Replica::holding(11), Replica::holding(12)];
        assert_eq!(round(&mut members, &mut replicas, 0), [Event::Known]);
        members.install(1);
        assert_eq!(round(&mut members, &mut replicas, 1), [Event::TookPart]);
    }

    #[test]
    fn an_epoch_that_not_all_took_part_in_loses_nothing() {
        let mut members = members(&clean());
        let mut replicas = [Replica::holding(11), Replica::holding(12)];
        round(&mut members, &mut replicas, 0);
        let configuration = Some(members.configuration());
        members.install(1);
        // The first takes part in epoch 2, then the agent dies.
        let (_, datagram) = members.tick(1).swap_remove(0);
        replicas[0].answer(&datagram);
        assert_eq!([replicas[0].epoch, replicas[1].epoch], [2, 1]);
        let record = Record { configuration, ..clean() }.next_epoch().unwrap();
        assert_eq!((record.epoch, record.clean_from, record.clean_epoch), (3, 1, 2));
        let mut members = self::members(&record);
        assert_eq!(round(&mut members, &mut replicas, 0), [Event::Known]);
        members.install(1);
        assert_eq!(round(&mut members, &mut replicas, 1), [], "one holds what epoch 1 left, under that name");
        assert_eq!(round(&mut members, &mut replicas, 1), [Event::TookPart]);
    }

    #[test]
    fn a_late_answer_of_a_life_that_is_over_is_outlived() {
        let mut members = members(&first());
        let mut replicas = [Replica::new(11, 0), Replica::new(12, 0)];
        let late = Replica::new(9, 0).answer(&members.tick(0)[1].1);
        round(&mut members, &mut replicas, 100);
        members.install(100);
        let datagram = members.tick(100).swap_remove(1).1;
        let (header, answer) = replicas[1].answer(&datagram);
        members.installed(at(3), &header, &answer, 100);
        assert_eq!(members.installed(at(3), &late.0, &late.1, 101), Event::Known, "believed for the moment");
        members.install(101);
        for now_ms in (110..).step_by(10).take(20) {
            if round(&mut members, &mut replicas, now_ms).contains(&Event::Known) {
                members.install(now_ms);
            }
        }
        assert_eq!((members.phase(), members.members()[1].incarnation), (Phase::Serving, 12));
    }

    #[test]
    fn an_empty_replica_does_not_join_full_ones() {
        let mut one_restarted = members(&clean());
        let mut replicas = [Replica::holding(11), Replica::new(44, 0)];
        assert!(round(&mut one_restarted, &mut replicas, 0).is_empty());
        assert!(one_restarted.said.contains("replica 1 (10.0.0.3:5550) was restarted"), "{}", one_restarted.said);
        // The operator gives the data up.
        replicas[0] = Replica::new(45, 0);
        assert_eq!(round(&mut one_restarted, &mut replicas, 2000), [Event::Known]);
        assert!(one_restarted.said.is_empty());
    }

    fn serving() -> Members {
        let mut members = members(&first());
        let mut replicas = [Replica::new(11, 0), Replica::new(12, 0)];
        round(&mut members, &mut replicas, 0);
        members.install(0);
        round(&mut members, &mut replicas, 0);
        assert_eq!(members.phase(), Phase::Serving);
        members
    }

    fn ack(incarnation: u64, used_bytes: u64) -> HeartbeatAck {
        HeartbeatAck { incarnation, used_bytes, budget_bytes: 1600, items: 1 }
    }

    #[test]
    fn reads_avoid_the_silent_and_the_restarted() {
        let mut members = serving();
        let header = members.header(Op::HeartbeatAck);
        for now_ms in (0..=1000).step_by(50) {
            assert_eq!(members.heartbeat_ack(at(2), &header, &ack(11, 0), now_ms), Event::None);
            assert_eq!(members.check_silence(now_ms), Event::None);
        }
        assert_eq!(members.check_silence(1001), Event::Changed);
        let config = members.config(0, u64::MAX, &[]);
        assert_eq!((config.serving, config.serving_list[0], config.must_ack), (1, 0, 3), "must_ack never changes");
        assert_eq!(config.refuse_writes, 0, "it may come back");
        assert_eq!(members.heartbeat_ack(at(3), &header, &ack(12, 0), 1200), Event::Changed);
        assert_eq!(members.config(0, u64::MAX, &[]).serving, 3);
        assert_eq!(members.heartbeat_ack(at(3), &header, &ack(99, 0), 1300), Event::Changed, "at once");
        assert_eq!(members.config(0, u64::MAX, &[]).serving, 1);
        assert_eq!(members.config(0, u64::MAX, &[]).refuse_writes, Reason::NoMember.to_wire());
        // A late answer of its former life changes nothing.
        assert_eq!(members.heartbeat_ack(at(3), &header, &ack(12, 0), 1400), Event::None);
        assert_eq!(members.config(0, u64::MAX, &[]).serving, 1);
        // It may know of no epoch at all by now.
        let mut header = members.header(Op::ControlReject);
        (header.status, header.epoch) = (Reason::Epoch.to_wire(), 0);
        assert_eq!(members.rejected(at(9), &header), Event::None, "not a member");
        assert_eq!(members.rejected(at(2), &header), Event::Changed);
        assert_eq!(members.config(0, u64::MAX, &[]).serving, 0);
    }

    #[test]
    fn an_agent_that_was_held_up_blames_nobody() {
        let mut members = serving();
        assert_eq!(members.check_silence(50), Event::None);
        assert_eq!(members.check_silence(60_000), Event::None);
        let silent = (60_000..62_000).step_by(50).find(|&now_ms| members.check_silence(now_ms) == Event::Changed);
        assert!(silent.is_some_and(|now_ms| (60_800..=61_050).contains(&now_ms)), "{silent:?}");
    }

    #[test]
    fn nearly_full_has_two_thresholds() {
        let mut members = serving();
        let header = members.header(Op::HeartbeatAck);
        let mut used = |host, bytes| {
            members.heartbeat_ack(at(host), &header, &ack(if host == 2 { 11 } else { 12 }, bytes), 1);
            members.store_full()
        };
        assert!(!used(2, 1500), "15/16 exactly");
        assert!(used(2, 1501));
        assert!(used(3, 10), "the other one has room, it does not help");
        assert!(used(2, 1450), "not enough room again");
        assert!(!used(2, 1400));
    }
}
