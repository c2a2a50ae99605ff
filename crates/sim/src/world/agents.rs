//! Coordinators: agents, what they ask of the authority, and their data paths.

use std::collections::{BTreeMap, VecDeque};

use underpass_protocol::{
    agent::{self, Agent, Event as Told, Settlement, StoreOutcome},
    control::ClusterKey,
    coordinator::{Action, Coordinator, Settings},
    wire::{Endpoint, Kind, Op, Packet, Reason, Status},
};

use super::{Event, Step, World};
use crate::{
    authority::{self, Answer, Question},
    coordinator::{DataPath, Done, Input, Process, Standing, Watched},
    host::{Host, MS},
    plan::{DataPath as Way, Moment},
    random::Random,
    watch::Routed,
};

/// Sessions of a coordinator's tables.
const SESSIONS: u32 = 32;
/// Buckets of a shard: few, so that keys meet in one.
const BUCKETS: u32 = 2;
/// How long an agent's process waits for the authority's answer, in milliseconds.
const ANSWER_MS: u64 = 100;

impl World<'_> {
    fn host_ms(&self, i: usize) -> u64 {
        self.coordinators[i].clock.ms(self.now)
    }

    fn id(&self, i: usize) -> authority::Process {
        authority::Process { coordinator: i as u8, life: self.coordinators[i].life }
    }

    /// Starts an agent; its data path, too, unless it is there.
    pub(super) fn start_agent(&mut self, i: usize) {
        let (shape, plan) = (self.coordinators[i].shape, self.plan);
        let now_ms = self.host_ms(i);
        self.coordinators[i].life += 1;
        let life = self.coordinators[i].life;
        let mut secrets = Random::new(plan.seed, 1000 * (i as u64 + 1) + u64::from(life));
        if self.coordinators[i].data_path.is_none() {
            let words: [u32; 64] = std::array::from_fn(|_| secrets.number() as u32);
            let mut tables = Coordinator::new(Settings {
                buckets: BUCKETS,
                sessions: SESSIONS,
                bucket_key: words,
                fingerprint_key: [secrets.number(), secrets.number()],
            });
            if let Some(mutant) = &plan.mutant {
                mutant.infect_tables(&mut tables);
            }
            self.coordinators[i].data_path = Some(DataPath { tables, tenure: BTreeMap::new(), inbox: VecDeque::new() });
        }
        let timing = &plan.shape.timing;
        let settings = agent::Settings {
            listen: Host::Coordinator(i as u8).endpoint(),
            cluster_key: ClusterKey([0; 2]),
            heartbeat_ms: timing.heartbeat,
            suspect_ms: timing.suspect,
            lost_ms: timing.lost,
            reach_ms: timing.reach,
            stuck_ms: timing.stuck,
            idle_ms: timing.idle,
            wall_offset_ms: shape.wall_offset_ms,
            random: Box::new(move || secrets.number()),
        };
        let shards: Vec<u32> = self.shard_count().collect();
        let mut agent = Agent::new(settings, &shards, SESSIONS, now_ms);
        if let Some(mutant) = &plan.mutant {
            mutant.infect_agent(&mut agent);
        }
        self.coordinators[i].process = Some(Process {
            agent,
            standing: vec![Standing { load: true, ..Standing::default() }; shards.len()],
            asked: BTreeMap::new(),
            campaign_ms: now_ms,
            inbox: VecDeque::new(),
            wake: 0,
        });
        self.say(Host::Coordinator(i as u8), || format!("agent {life} starts ({:?})", shape.data_path));
        self.wake_agent_at(i, self.now);
    }

    /// An agent dies; the tables with it if they are its own, or all of the machine does.
    pub(super) fn stop_agent(&mut self, i: usize, machine: bool) {
        let host = &mut self.coordinators[i];
        host.process = None;
        if machine || host.shape.data_path == Way::Socket {
            host.data_path = None;
        }
        let left = if host.data_path.is_some() { "; its tables serve on" } else { "" };
        self.say(Host::Coordinator(i as u8), || format!("agent dies{left}"));
    }

    fn wake_agent_at(&mut self, i: usize, at: u64) {
        let at = at.max(self.now);
        if let Some(process) = &mut self.coordinators[i].process
            && (process.wake <= self.now || at < process.wake)
        {
            process.wake = at;
            self.at(at, Event::Wake(Host::Coordinator(i as u8)));
        }
    }

    pub(super) fn wake_agent(&mut self, i: usize) -> Step {
        let now_ms = self.host_ms(i);
        let host = &mut self.coordinators[i];
        let Some(process) = &mut host.process else { return Ok(()) };
        if process.wake != self.now || host.paused > 0 {
            return Ok(());
        }
        process.wake = 0;
        if now_ms >= process.agent.due() {
            self.tell(i, Told::Tick)?;
        }
        self.drive(i)
    }

    /// What the agent's process does of itself: keeps the role, loads records.
    fn drive(&mut self, i: usize) -> Step {
        let (now_ms, role_ms) = (self.host_ms(i), self.plan.shape.timing.role);
        let Some(process) = &mut self.coordinators[i].process else { return Ok(()) };
        if now_ms >= process.campaign_ms {
            process.campaign_ms = now_ms + role_ms / 3;
            self.put_question(i, Question::Campaign);
        }
        for shard in self.shard_count() {
            let Some(process) = &mut self.coordinators[i].process else { return Ok(()) };
            let standing = &mut process.standing[shard as usize - 1];
            if standing.role && now_ms >= standing.role_until_ms {
                standing.role = false;
                self.tell(i, Told::Role { shard, held: false })?;
            }
            self.load_if_due(i, shard);
        }
        let clock = self.coordinators[i].clock;
        if let Some(process) = &self.coordinators[i].process {
            let roles = process.standing.iter().filter(|standing| standing.role).map(|standing| standing.role_until_ms);
            let due = roles.fold(process.agent.due().min(process.campaign_ms), u64::min);
            self.wake_agent_at(i, clock.when(due.max(now_ms + 1)));
        }
        Ok(())
    }

    fn load_if_due(&mut self, i: usize, shard: u32) {
        let Some(process) = &mut self.coordinators[i].process else { return };
        let loads = |question: &Question| matches!(question, Question::Load { shard: other } if *other == shard);
        if process.standing[shard as usize - 1].load && !process.asked.values().any(loads) {
            process.standing[shard as usize - 1].load = false;
            self.put_question(i, Question::Load { shard });
        }
    }

    /// One event for an agent, and what it wants done about it.
    fn tell(&mut self, i: usize, told: Told<'_>) -> Step {
        let now_ms = self.host_ms(i);
        let host = &mut self.coordinators[i];
        let (Some(process), Some(data_path)) = (&mut host.process, &mut host.data_path) else { return Ok(()) };
        let mut watched = Watched { data_path, done: Vec::new() };
        let actions = match process.agent.step(now_ms, told, &mut watched) {
            Ok(actions) => actions,
            Err(error) => return self.fail("panic", format!("coordinator {i}'s agent gives up: {error}")),
        };
        for done in watched.done {
            self.table_change(i, done)?;
        }
        for action in actions {
            self.act(i, action)?;
        }
        Ok(())
    }

    fn act(&mut self, i: usize, action: agent::Action) -> Step {
        let host = Host::Coordinator(i as u8);
        match action {
            agent::Action::Send { to, bytes } => {
                if Self::is_reset(&bytes) {
                    self.say(host, || format!("tells {to} to begin empty"));
                }
                if bytes.get(3) == Some(&Op::Pull.to_wire()) {
                    self.counts.pulls += 1;
                }
                if let Some(packet) = Packet::parse(&bytes).ok().filter(|packet| packet.header.op == Op::Abort) {
                    self.moment(packet.header.shard, Moment::Abort)?;
                }
                self.send(host, to, &bytes, None)
            }
            agent::Action::Store { id, expected, record, .. } => {
                self.say(host, || format!("stores {}", brief(&record)));
                self.put_question(i, Question::Store { expected, record: Box::new(record), id });
                Ok(())
            }
            agent::Action::Load { shard } => {
                if let Some(process) = &mut self.coordinators[i].process {
                    let standing = &mut process.standing[shard as usize - 1];
                    (standing.load, standing.owed) = (true, true);
                }
                self.load_if_due(i, shard);
                Ok(())
            }
            agent::Action::Resign { shard } => {
                self.counts.handovers += 1;
                self.say(host, || format!("gives up the role in shard {shard}"));
                self.put_question(i, Question::Resign { shard });
                if let Some(process) = &mut self.coordinators[i].process {
                    process.standing[shard as usize - 1].role = false;
                }
                self.tell(i, Told::Role { shard, held: false })
            }
            agent::Action::Reply { id, result } => {
                self.replied(id, result);
                Ok(())
            }
            agent::Action::Log { level, what } => {
                self.counts.adoptions += u64::from(what.contains("goes on with the tables"));
                self.say(host, || format!("{level:?}: {what}"));
                Ok(())
            }
        }
    }

    /// An agent has changed its tables.
    fn table_change(&mut self, i: usize, done: Done) -> Step {
        let host = Host::Coordinator(i as u8);
        match done {
            Done::Configured(config) => {
                self.say(host, || {
                    format!(
                        "tables of shard {}: epoch {}, must_ack {:b}, serving {:b}, lease until {}",
                        config.shard, config.epoch, config.must_ack, config.serving, config.lease_until_ms
                    )
                });
                Ok(())
            }
            Done::Cleared(shard) => {
                self.say(host, || format!("tables of shard {shard} are emptied"));
                Ok(())
            }
            Done::Settled(session, request, seq, settlement) => {
                self.say(host, || {
                    let name = crate::trace::session(session);
                    format!("settles {name}/{request} seq {}: {settlement:?}", crate::trace::seq(seq))
                });
                let shard = self.coordinators[i]
                    .data_path
                    .as_ref()
                    .map_or(0, |path| path.tables.sessions()[usize::from(session.index())].shard);
                match settlement {
                    Settlement::Committed { .. } => {
                        self.counts.repaired += 1;
                        self.commit(shard, seq)
                    }
                    Settlement::Aborted => {
                        self.counts.aborts += 1;
                        self.watch(shard).aborts(session, request, seq)
                    }
                }
            }
        }
    }

    fn commit(&mut self, shard: u32, seq: u64) -> Step {
        self.counts.commits += 1;
        let committed = self.watch(shard).commits(seq)?;
        self.seen(shard, |watch, all, active| {
            for &at in active {
                watch.remember(&all[at])?;
                watch.after_commit(&committed, std::slice::from_ref(&all[at]))?;
            }
            Ok(())
        })
    }

    // The authority.

    fn put_question(&mut self, i: usize, question: Question) {
        self.questions += 1;
        let (number, from, host) = (self.questions, self.id(i), Host::Coordinator(i as u8));
        let clock = self.coordinators[i].clock;
        let timeout = clock.when(self.host_ms(i) + ANSWER_MS);
        if let Some(process) = &mut self.coordinators[i].process {
            process.asked.insert(number, question.clone());
        }
        self.at(timeout, Event::Input { to: from, input: Input::Timeout(number) });
        if self.healed_at.is_none() && (self.authority_down > 0 || self.network.is_cut(host, Host::Authority)) {
            return;
        }
        let late = self.healed_at.is_none() && self.random.chance(self.plan.shape.authority.requests_late);
        let delay = if late { ANSWER_MS * MS + self.random.below(500 * MS) } else { self.authority_delay() };
        self.at(self.now + delay, Event::Question { from, number, question });
    }

    fn authority_delay(&mut self) -> u64 {
        let slow_ms = self.authority_slow.values().copied().max().unwrap_or(0);
        1000 + self.random.below((self.plan.shape.authority.delay_us * 1000).max(slow_ms * MS))
    }

    pub(super) fn question(&mut self, from: authority::Process, number: u64, question: Question) -> Step {
        let host = Host::Coordinator(from.coordinator);
        let healed = self.healed_at.is_some();
        if !healed && self.authority_down > 0 {
            return Ok(());
        }
        let before = match &question {
            Question::Store { record, .. } => Some(self.authority.record(record.shard).0.clone()),
            _ => None,
        };
        let (answer, changed) = self.authority.answer(self.now, from, &question);
        if changed {
            if let (Question::Store { record, .. }, Some(before)) = (&question, before) {
                let record = record.clone();
                self.say(Host::Authority, || format!("has from {host}: {}", brief(&record)));
                self.counts.epochs += 1;
                self.watch_record(&before, &record)?;
            }
            self.note_losses();
        }
        if changed || matches!(question, Question::Resign { .. }) {
            for i in 0..self.coordinators.len() {
                if i != usize::from(from.coordinator) || self.random.chance(200) {
                    self.news(i);
                }
            }
        }
        let lost = self.random.chance(self.plan.shape.authority.answers_lost);
        if !healed && (lost || self.network.is_cut(Host::Authority, host)) {
            return Ok(());
        }
        let delay = self.authority_delay();
        self.at(self.now + delay, Event::Input { to: from, input: Input::Answer(number, answer) });
        Ok(())
    }

    /// Counts what a new record means; faults may have waited for it.
    fn watch_record(&mut self, before: &agent::Record, record: &agent::Record) -> Step {
        if record.epoch == record.tenure && !record.settled {
            self.counts.tenures += 1;
        }
        if record.members.iter().any(|member| !member.active) && !record.settled {
            self.counts.learners += 1;
        } else if record.epoch > record.tenure && !record.settled {
            self.counts.promotions += 1;
        }
        if before.epoch == record.epoch {
            return Ok(());
        }
        let was =
            |id: u32, active: bool| before.members.iter().any(|member| member.id == id && member.active >= active);
        let is = |id: u32| record.members.iter().any(|member| member.id == id);
        let moment = if record.epoch == record.tenure {
            Moment::Claim
        } else if before.members.iter().any(|member| !is(member.id)) {
            Moment::Removal
        } else if record.members.iter().any(|member| member.active && !was(member.id, true)) {
            Moment::Promotion
        } else {
            Moment::Learner
        };
        self.moment(record.shard, moment)
    }

    /// A coordinator hears that something has changed at the authority.
    pub(super) fn news(&mut self, i: usize) {
        let host = Host::Coordinator(i as u8);
        if self.healed_at.is_none() && self.network.is_cut(Host::Authority, host) {
            return;
        }
        let (delay, to) = (self.authority_delay(), self.id(i));
        self.at(self.now + delay, Event::Input { to, input: Input::News });
    }

    /// Something arrives for an agent's process, if it is the one meant.
    pub(super) fn input(&mut self, to: authority::Process, input: Input) -> Step {
        let i = usize::from(to.coordinator);
        let host = &mut self.coordinators[i];
        let Some(process) = host.process.as_mut().filter(|_| host.life == to.life) else { return Ok(()) };
        if host.paused > 0 {
            process.inbox.push_back(input);
            return Ok(());
        }
        self.take(i, input)?;
        self.drive(i)
    }

    fn take(&mut self, i: usize, input: Input) -> Step {
        let now_ms = self.host_ms(i);
        let Some(process) = &mut self.coordinators[i].process else { return Ok(()) };
        match input {
            Input::Datagram(from, bytes) => self.tell(i, Told::Datagram { from, bytes: &bytes }),
            Input::Command { shard, id, command } => self.tell(i, Told::Command { shard, id, command }),
            Input::Suspended => self.tell(i, Told::Suspended),
            Input::News => {
                process.campaign_ms = now_ms;
                process.standing.iter_mut().for_each(|standing| standing.load = true);
                Ok(())
            }
            Input::Timeout(number) => match process.asked.remove(&number) {
                Some(Question::Store { record, id, .. }) => {
                    self.counts.unknown_stores += 1;
                    let shard = record.shard;
                    let standing = &mut process.standing[shard as usize - 1];
                    (standing.load, standing.owed) = (true, true);
                    let outcome = StoreOutcome::Unknown("no answer in time".to_owned());
                    self.tell(i, Told::Stored { shard, id, outcome })
                }
                Some(Question::Load { shard }) => {
                    process.standing[shard as usize - 1].load = true;
                    Ok(())
                }
                Some(Question::Resign { shard }) => {
                    self.put_question(i, Question::Resign { shard });
                    Ok(())
                }
                _ => Ok(()),
            },
            Input::Answer(number, answer) => {
                let Some(question) = process.asked.remove(&number) else { return Ok(()) };
                self.answered(i, question, answer)
            }
        }
    }

    fn answered(&mut self, i: usize, question: Question, answer: Answer) -> Step {
        let (now_ms, role_ms) = (self.host_ms(i), self.plan.shape.timing.role);
        let Some(process) = &mut self.coordinators[i].process else { return Ok(()) };
        match (question, answer) {
            (Question::Store { record, id, .. }, Answer::Stored(stored)) => {
                let shard = record.shard;
                let standing = &mut process.standing[shard as usize - 1];
                let outcome = match stored {
                    Some(revision) => {
                        standing.told = standing.told.max(revision);
                        StoreOutcome::Stored(revision)
                    }
                    None => {
                        (standing.load, standing.owed) = (true, true);
                        self.counts.conflicts += 1;
                        StoreOutcome::Conflict
                    }
                };
                self.tell(i, Told::Stored { shard, id, outcome })
            }
            (Question::Load { shard }, Answer::Loaded(revision, record)) => {
                let standing = &mut process.standing[shard as usize - 1];
                if revision < standing.told || revision == standing.told && !standing.owed {
                    // Told later than something newer, or nothing new.
                    return Ok(());
                }
                (standing.told, standing.owed) = (revision, false);
                self.tell(i, Told::Record { shard, revision, record: Some(*record) })
            }
            (Question::Campaign, Answer::Roles(roles)) => {
                for (shard, (held, revision)) in self.shard_count().zip(roles) {
                    let Some(process) = &mut self.coordinators[i].process else { return Ok(()) };
                    let standing = &mut process.standing[shard as usize - 1];
                    standing.load |= revision > standing.told;
                    // Counted from the answer, the holder's belief may outlive the role a little; nothing rests on it.
                    standing.role_until_ms = if held { now_ms + role_ms } else { 0 };
                    if standing.role != held {
                        standing.role = held;
                        self.tell(i, Told::Role { shard, held })?;
                    }
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// An agent's process goes on.
    pub(super) fn resume_agent(&mut self, i: usize) -> Step {
        while self.coordinators[i].paused == 0
            && let Some((from, bytes)) = self.coordinators[i].data_path.as_mut().and_then(|path| path.inbox.pop_front())
        {
            self.at_data_path(i, from, bytes)?;
        }
        while self.coordinators[i].paused == 0
            && let Some(input) = self.coordinators[i].process.as_mut().and_then(|process| process.inbox.pop_front())
        {
            self.take(i, input)?;
        }
        if let Some(process) = &mut self.coordinators[i].process {
            process.wake = 0;
        }
        self.wake_agent_at(i, self.now);
        Ok(())
    }

    pub(super) fn stop_politely(&mut self, i: usize) -> Step {
        self.tell(i, Told::Stop)?;
        self.drive(i)
    }

    // The data path.

    pub(super) fn at_data_path(&mut self, i: usize, from: Endpoint, bytes: Vec<u8>) -> Step {
        let (now, now_ms, host) = (self.now, self.host_ms(i), Host::Coordinator(i as u8));
        let here = &mut self.coordinators[i];
        let Some(path) = &mut here.data_path else { return Ok(()) };
        if here.paused > 0 && (here.shape.data_path == Way::Socket || here.clock.stands()) {
            path.inbox.push_back((from, bytes));
            return Ok(());
        }
        let Ok(packet) = Packet::parse(&bytes) else {
            return self.fail("bounded", format!("coordinator {i} receives what is no packet"));
        };
        let shard = packet.header.shard;
        let action = path.tables.step(now_ms, from, &packet);
        let tenure = path.tenure.get(&shard).copied().unwrap_or(0);
        match action {
            Action::Drop(_) => Ok(()),
            Action::Control => {
                let Some(process) = &mut here.process else { return Ok(()) };
                if here.paused > 0 {
                    process.inbox.push_back(Input::Datagram(from, bytes));
                    return Ok(());
                }
                self.tell(i, Told::Datagram { from, bytes: &bytes })?;
                self.drive(i)
            }
            Action::ToMember { to, header, .. } => {
                self.first_act(shard, tenure)?;
                self.watch(shard).routes(tenure, now);
                let routed = Routed { tenure, at: now, bound: header.seq };
                self.send(host, to, &header.datagram(packet.key, packet.value), Some(routed))
            }
            Action::ToMembers { header } => {
                let members: Vec<_> = path.tables.must_ack(shard).collect();
                self.first_act(shard, tenure)?;
                if self.watch(shard).orders(&header, packet.key, tenure, now) {
                    self.counts.writes_ordered += 1;
                    self.bind_strand(&header, from)?;
                }
                for (index, to) in members {
                    let clone = underpass_protocol::wire::Header { cnt: index, ..header };
                    self.send(host, to, &clone.datagram(packet.key, packet.value), None)?;
                }
                Ok(())
            }
            Action::ToClient { to, header } => {
                self.commit(shard, header.seq)?;
                self.send(host, to, &header.datagram(packet.key, packet.value), None)
            }
            Action::ToSender { header, result } => {
                if header.op == Op::WReject && header.status == Reason::Aborted.to_wire() {
                    self.watch(shard).tells_aborted(header.session, header.request)?;
                }
                let mut value = packet.value.to_vec();
                if let Some(result) = result {
                    value[..8].copy_from_slice(&result.to_be_bytes());
                }
                debug_assert!(
                    header.op != Op::WReply
                        || header.kind != Kind::Incr.to_wire()
                        || header.status != Status::Ok.to_wire()
                        || value.len() >= 8
                );
                self.send(host, from, &header.datagram(packet.key, &value), None)
            }
        }
    }

    /// A tenure does something for a client for the first time: what its members hold is the state that it goes on from.
    fn first_act(&mut self, shard: u32, tenure: u32) -> Step {
        if !self.watch(shard).begins(tenure) {
            return Ok(());
        }
        self.moment(shard, Moment::Serve)?;
        self.seen(shard, |watch, all, active| {
            let active: Vec<_> =
                active.iter().map(|&at| crate::watch::Seen { dump: all[at].dump, ..all[at] }).collect();
            watch.begun(tenure, &active)
        })
    }
}

fn brief(record: &agent::Record) -> String {
    let members = record.members.iter().map(|member| {
        let what = if member.active { "" } else { " learns" };
        format!("{}: replica {} {:08x}{what}", member.index, member.id, member.incarnation >> 32)
    });
    let wanted: Vec<_> = record.wanted.iter().map(|wanted| wanted.id.to_string()).collect();
    let at = record.coordinator().and_then(Host::at).map_or_else(|| "nobody".to_owned(), |host| host.to_string());
    format!(
        "shard {} epoch {} tenure {} {at}{} [{}] wants {}",
        record.shard,
        record.epoch,
        record.tenure,
        if record.settled { ", settled," } else { "" },
        members.collect::<Vec<_>>().join(", "),
        wanted.join(" ")
    )
}
