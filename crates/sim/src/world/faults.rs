//! What the plan does to a run, and how it ends.

use underpass_protocol::{
    agent::{Command, Wanted},
    wire::{Endpoint, Header, Op, Packet, SessionId},
};

use super::{Event, Step, World};
use crate::{
    coordinator::Input,
    host::{Host, MS},
    plan::{Fault, Moment, Order, Planned, Strand, Target},
};

/// How often an operator tries again what was refused or not answered.
const ORDER_TRIES: u32 = 8;
const ORDER_RETRY_MS: u64 = 150;
/// How much later than its moment a datagram arrives at most.
const HELD_MS: u64 = 10;

/// An operator's word that is not done yet.
pub struct PendingOrder {
    shard: u32,
    order: Order,
    tries: u32,
    done: bool,
}

/// A [`Strand`] and the write that it befalls, once there is one.
pub struct Stranded {
    strand: Strand,
    fault: usize,
    write: Option<(SessionId, u64)>,
    /// The client is heard again.
    again: bool,
    /// Datagrams that wait for their moment.
    held: Vec<(Host, Host, Vec<u8>)>,
}

impl World<'_> {
    fn hosts(&self) -> Vec<Host> {
        let coordinators = (0..self.coordinators.len()).map(|i| Host::Coordinator(i as u8));
        let replicas = (0..self.replicas.len()).map(|i| Host::Replica(i as u8));
        let clients = (0..self.users.len()).map(|i| Host::Client(i as u8));
        coordinators.chain(replicas).chain(clients).chain([Host::Authority]).collect()
    }

    pub(super) fn due(&mut self, i: usize) -> Step {
        if self.plan.faults[i].upon.is_some() {
            self.armed.push(i);
            return Ok(());
        }
        self.begin(i)
    }

    /// Faults may have waited for this.
    pub(super) fn moment(&mut self, shard: u32, moment: Moment) -> Step {
        // All that wait are about the first shard.
        if shard != 1 {
            return Ok(());
        }
        for (from, to, bytes) in self
            .stranded
            .iter_mut()
            .filter(|other| other.strand.late_until == Some(moment))
            .flat_map(|other| std::mem::take(&mut other.held))
            .collect::<Vec<_>>()
        {
            let at = self.now + self.random.below(HELD_MS * MS);
            self.at(at, Event::Datagram { to, from: from.endpoint(), bytes, routed: None });
        }
        for i in std::mem::take(&mut self.armed) {
            match self.plan.faults[i].upon {
                Some((other, 0)) if other == moment => self.begin(i)?,
                Some((other, after_us)) if other == moment => self.at(self.now + after_us * 1000, Event::Begin(i)),
                _ => self.armed.push(i),
            }
        }
        Ok(())
    }

    pub(super) fn begin(&mut self, i: usize) -> Step {
        let plan = self.plan;
        let Planned { for_ms, fault, .. } = &plan.faults[i];
        if self.healed_at.is_some() {
            return Ok(());
        }
        self.say(Host::Authority, || format!("-- {}", plan.faults[i]));
        self.begun[i] = true;
        if !matches!(fault, Fault::Strand(_)) {
            self.at(self.now + for_ms * MS, Event::End(i));
        }
        match *fault {
            Fault::Cut { .. } | Fault::Isolate { .. } | Fault::Forsake { .. } => self.cut(fault, true),
            Fault::Storm(weather) => self.network.storm(weather, true),
            Fault::Filter(filter) => self.network.filter(filter, true),
            Fault::Split { shard, replicas, clients } => {
                let mut side: Vec<_> = self.coordinator_of(shard).into_iter().collect();
                side.extend((0..self.replicas.len() as u8).filter(|r| replicas >> r & 1 != 0).map(Host::Replica));
                side.extend((0..self.users.len() as u8).filter(|c| clients >> c & 1 != 0).map(Host::Client));
                self.split(&side, true);
                self.splits.insert(i, side);
            }
            Fault::Strand(strand) => {
                self.stranded.push(Stranded { strand, fault: i, write: None, again: false, held: Vec::new() })
            }
            Fault::Suspend(target) => {
                let host = match target {
                    Target::Host(host) => Some(host),
                    Target::CoordinatorOf(shard) => self.coordinator_of(shard),
                };
                let of_replica = matches!(host, Some(Host::Replica(_)));
                if let Some(host) = host
                    && *self.suspends_replicas.get_or_insert(of_replica) == of_replica
                {
                    self.suspend(host);
                    self.suspended.insert(i, host);
                }
            }
            Fault::Pause(host) => self.pause(host),
            Fault::Crash { host: Host::Replica(r), .. } => return self.crash_replica(i, usize::from(r)),
            Fault::Crash { host: Host::Coordinator(c), machine } => {
                self.counts.agents_crashed += 1;
                self.coordinators[usize::from(c)].down += 1;
                self.stop_agent(usize::from(c), machine);
            }
            Fault::Restart(c) => {
                let host = &self.coordinators[usize::from(c)];
                if host.process.is_some() && host.paused == 0 {
                    self.say(Host::Coordinator(c), || "is asked to stop".into());
                    self.stop_politely(usize::from(c))?;
                }
            }
            Fault::Crash { .. } => {}
            Fault::Vanish(client) => self.replace_client(usize::from(client)),
            Fault::AuthorityDown => self.authority_down += 1,
            Fault::AuthoritySlow(ms) => drop(self.authority_slow.insert(i, ms)),
            Fault::RoleLost(shard) => {
                self.authority.forget_holder(shard, self.now);
                (0..self.coordinators.len()).for_each(|c| self.news(c));
            }
            Fault::Order(shard, order) => {
                self.orders.push(PendingOrder { shard, order, tries: 0, done: false });
                return self.order(self.orders.len() - 1);
            }
        }
        Ok(())
    }

    pub(super) fn end(&mut self, i: usize) -> Step {
        if !std::mem::take(&mut self.begun[i]) {
            return Ok(());
        }
        let plan = self.plan;
        let fault = &plan.faults[i].fault;
        if !matches!(fault, Fault::Order(..) | Fault::RoleLost(_) | Fault::Vanish(_)) {
            self.say(Host::Authority, || format!("-- no longer: {fault}"));
        }
        match *fault {
            Fault::Cut { .. } | Fault::Isolate { .. } => self.cut(fault, false),
            Fault::Forsake { client, .. } => {
                self.cut(fault, false);
                self.replace_client(usize::from(client));
            }
            Fault::Storm(weather) => self.network.storm(weather, false),
            Fault::Filter(filter) => self.network.filter(filter, false),
            Fault::Split { .. } => {
                let side = self.splits.remove(&i).unwrap_or_default();
                self.split(&side, false);
            }
            Fault::Strand(_) => {
                self.stranded
                    .iter_mut()
                    .filter(|stranded| stranded.fault == i)
                    .for_each(|stranded| stranded.again = true);
            }
            Fault::Suspend(_) => {
                if let Some(host) = self.suspended.remove(&i) {
                    return self.wake_up(host);
                }
            }
            Fault::Pause(host) => return self.resume(host),
            Fault::Crash { host: Host::Replica(r), .. } => {
                let member = &mut self.replicas[usize::from(r)];
                member.down -= 1;
                if member.down == 0 && member.replica.is_none() {
                    self.start_replica(usize::from(r));
                }
            }
            Fault::Crash { host: Host::Coordinator(c), .. } => {
                let host = &mut self.coordinators[usize::from(c)];
                host.down -= 1;
                if host.down == 0 && host.process.is_none() {
                    self.start_agent(usize::from(c));
                }
            }
            Fault::Restart(c) => {
                let c = usize::from(c);
                if self.coordinators[c].process.is_some() {
                    self.stop_agent(c, false);
                    if self.coordinators[c].down == 0 {
                        self.start_agent(c);
                    }
                }
            }
            Fault::AuthorityDown => self.authority_down -= 1,
            Fault::AuthoritySlow(_) => drop(self.authority_slow.remove(&i)),
            Fault::Crash { .. } | Fault::Vanish(_) | Fault::RoleLost(_) | Fault::Order(..) => {}
        }
        Ok(())
    }

    fn cut(&mut self, fault: &Fault, begins: bool) {
        match *fault {
            Fault::Cut { from, to, both } => {
                self.network.cut(from, to, begins);
                if both {
                    self.network.cut(to, from, begins);
                }
            }
            Fault::Isolate { host, both } => {
                for other in self.hosts().into_iter().filter(|other| *other != host) {
                    self.network.cut(other, host, begins);
                    if both {
                        self.network.cut(host, other, begins);
                    }
                }
            }
            Fault::Forsake { replicas, .. } => {
                for i in (0..self.replicas.len() as u8).filter(|i| replicas & 1 << i != 0) {
                    for c in 0..self.coordinators.len() as u8 {
                        self.network.cut(Host::Coordinator(c), Host::Replica(i), begins);
                    }
                }
            }
            _ => unreachable!("only cuts are cut"),
        }
    }

    fn coordinator_of(&self, shard: u32) -> Option<Host> {
        self.authority.record(shard).0.coordinator().and_then(Host::at)
    }

    fn split(&mut self, side: &[Host], begins: bool) {
        let others: Vec<_> = self.hosts().into_iter().filter(|host| !side.contains(host)).collect();
        for &here in side {
            for &there in &others {
                self.network.cut(here, there, begins);
                self.network.cut(there, here, begins);
            }
        }
    }

    fn suspend(&mut self, host: Host) {
        match host {
            Host::Coordinator(i) => self.coordinators[usize::from(i)].clock.stop(self.now),
            Host::Replica(i) => self.replicas[usize::from(i)].clock.stop(self.now),
            Host::Client(_) | Host::Authority => {}
        }
        self.pause(host);
    }

    fn wake_up(&mut self, host: Host) -> Step {
        match host {
            Host::Coordinator(i) => {
                let (i, now) = (usize::from(i), self.now);
                self.coordinators[i].clock.go(now);
                // Its process notices sooner or later, or not at all.
                if self.random.chance(500) {
                    let to = crate::authority::Process { coordinator: i as u8, life: self.coordinators[i].life };
                    let after = self.random.below(20 * MS);
                    self.at(now + after, Event::Input { to, input: Input::Suspended });
                }
            }
            Host::Replica(i) => self.replicas[usize::from(i)].clock.go(self.now),
            Host::Client(_) | Host::Authority => {}
        }
        self.resume(host)
    }

    // Writes that are left hanging.

    /// A write is ordered: it may be the one that a fault is meant for.
    pub(super) fn bind_strand(&mut self, header: &Header, client: Endpoint) -> Step {
        let meant = |other: &Stranded| {
            let Strand { shard, kind, .. } = other.strand;
            other.write.is_none() && shard == header.shard && kind.is_none_or(|kind| kind.to_wire() == header.kind)
        };
        let free = self.stranded.iter_mut().find(|other| meant(other));
        let Some(stranded) = free else { return Ok(()) };
        stranded.write = Some((header.session, header.request));
        let (fault, vanish) = (stranded.fault, stranded.strand.vanish);
        self.at(self.now + self.plan.faults[fault].for_ms * MS, Event::End(fault));
        if let Some(Host::Client(client)) = Host::at(client).filter(|_| vanish) {
            self.replace_client(usize::from(client));
        }
        self.moment(header.shard, Moment::Stranded)
    }

    /// How much later than others a datagram arrives; `None`: it does not.
    pub(super) fn strand(&mut self, from: Host, to: Host, bytes: &[u8]) -> Option<u64> {
        if self.stranded.is_empty() {
            return Some(0);
        }
        let header = Packet::parse(bytes).ok()?.header;
        let write = Some((header.session, header.request));
        let Some(Stranded { strand, again, held, .. }) = self.stranded.iter_mut().find(|other| other.write == write)
        else {
            return Some(0);
        };
        let has = |set: u16, replica: u8| set >> replica & 1 != 0;
        let late = match (header.op, from, to) {
            (Op::Write, Host::Client(_), _) if !*again => return None,
            (Op::Write, _, Host::Replica(i)) if !*again && has(strand.lost, i) => return None,
            (Op::Write, _, Host::Replica(i)) if *again && has(strand.lost_again, i) => return None,
            (Op::Write, _, Host::Replica(i)) => !*again && has(strand.late, i),
            (Op::WReply, Host::Replica(i), _) => has(strand.late_replies, i),
            _ => false,
        };
        if late && strand.late_until.is_some() {
            held.push((from, to, bytes.to_vec()));
            return None;
        }
        let late_ns = strand.late_ms * MS;
        Some(if late { late_ns + self.random.below(late_ns + 1) } else { 0 })
    }

    fn pause(&mut self, host: Host) {
        match host {
            Host::Coordinator(i) => self.coordinators[usize::from(i)].paused += 1,
            Host::Replica(i) => self.replicas[usize::from(i)].paused += 1,
            Host::Client(i) => {
                if let Some(user) = self.users.get_mut(usize::from(i)) {
                    user.paused += 1;
                }
            }
            Host::Authority => {}
        }
    }

    fn resume(&mut self, host: Host) -> Step {
        match host {
            Host::Coordinator(i) => {
                self.coordinators[usize::from(i)].paused -= 1;
                if self.coordinators[usize::from(i)].paused == 0 {
                    return self.resume_agent(usize::from(i));
                }
            }
            Host::Replica(i) => {
                self.replicas[usize::from(i)].paused -= 1;
                if self.replicas[usize::from(i)].paused == 0 {
                    return self.resume_replica(usize::from(i));
                }
            }
            Host::Client(i) => {
                let i = usize::from(i);
                if let Some(user) = self.users.get_mut(i) {
                    user.paused -= 1;
                    if user.paused == 0 {
                        return self.resume_client(i);
                    }
                }
            }
            Host::Authority => {}
        }
        Ok(())
    }

    /// A replica dies, unless it holds the last copy: few runs are for that.
    fn crash_replica(&mut self, fault: usize, i: usize) -> Step {
        let shard = self.replicas[i].shape.shard;
        let stores: Vec<_> = self.stores_under_way(shard);
        let (record, _) = self.authority.record(shard);
        let spared = !self.plan.shape.reckless
            && (!self.survives(record, Some(i)) || stores.iter().any(|record| !self.survives(record, Some(i))));
        if spared {
            self.counts.crashes_spared += 1;
            self.say(Host::Replica(i as u8), || "is spared: it may hold the last copy".into());
            self.begun[fault] = false;
            return Ok(());
        }
        self.counts.replicas_crashed += 1;
        self.replicas[i].down += 1;
        self.stop_replica(i);
        Ok(())
    }

    /// Records that agents try to store.
    fn stores_under_way(&self, shard: u32) -> Vec<underpass_protocol::agent::Record> {
        let processes = self.coordinators.iter().filter_map(|host| host.process.as_ref());
        let questions = processes.flat_map(|process| process.asked.values());
        questions
            .filter_map(|question| match question {
                crate::authority::Question::Store { record, .. } if record.shard == shard => Some((**record).clone()),
                _ => None,
            })
            .collect()
    }

    // The operator.

    pub(super) fn order(&mut self, at: usize) -> Step {
        let PendingOrder { shard, order, tries, done } = self.orders[at];
        if done || tries >= ORDER_TRIES {
            return Ok(());
        }
        self.orders[at].tries += 1;
        self.at(self.now + ORDER_RETRY_MS * MS, Event::Order(at));
        let wanted = |i: u8| {
            let at = Host::Replica(i).endpoint();
            Wanted { id: u32::from(i), addr: at.addr, port: at.port, replaces: None }
        };
        let command = match order {
            Order::Add(i) => Command::Add(wanted(i)),
            Order::Remove(i) => Command::Remove { id: u32::from(i), lose_data: false },
            Order::Replace(i, by) => Command::Replace { id: u32::from(i), by: wanted(by) },
            Order::Transfer(i) => Command::Transfer { to: Host::Coordinator(i).endpoint() },
        };
        // Operators ask whoever is on record.
        let Some(Host::Coordinator(i)) = self.authority.record(shard).0.coordinator().and_then(Host::at) else {
            return Ok(());
        };
        let to = crate::authority::Process { coordinator: i, life: self.coordinators[usize::from(i)].life };
        self.at(self.now + MS, Event::Input { to, input: Input::Command { shard, id: at as u64, command } });
        Ok(())
    }

    pub(super) fn replied(&mut self, id: u64, result: Result<String, String>) {
        match &result {
            Ok(_) => {
                self.orders[id as usize].done = true;
                self.counts.orders_done += 1;
            }
            Err(_) => self.counts.orders_refused += 1,
        }
        self.say(Host::Authority, || match result {
            Ok(text) => format!("the operator is told: {text}"),
            Err(text) => format!("the operator is told why not: {text}"),
        });
    }

    /// The faults are over.
    pub(super) fn heal(&mut self) -> Step {
        self.healed_at = Some(self.now);
        self.say(Host::Authority, || "-- everything heals".into());
        self.network.heal();
        self.authority_down = 0;
        self.authority_slow.clear();
        self.armed.clear();
        self.stranded.clear();
        for i in 0..self.begun.len() {
            // Cuts and storms are gone already; the rest is undone one by one.
            let undone = |fault: &Fault| {
                matches!(fault, Fault::Pause(_) | Fault::Suspend(_) | Fault::Crash { .. } | Fault::Restart(_))
            };
            if undone(&self.plan.faults[i].fault) {
                self.end(i)?;
            }
            self.begun[i] = false;
        }
        for order in &mut self.orders {
            order.done = true;
        }
        Ok(())
    }
}
