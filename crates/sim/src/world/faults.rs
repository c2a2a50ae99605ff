//! What the plan does to a run, and how it ends.

use underpass_protocol::agent::{Command, Wanted};

use super::{Event, Step, World};
use crate::{
    coordinator::Input,
    host::{Host, MS},
    plan::{Fault, Order, Planned},
};

/// How often an operator tries again what was refused or not answered.
const ORDER_TRIES: u32 = 8;
const ORDER_RETRY_MS: u64 = 150;

/// An operator's word that is not done yet.
pub struct PendingOrder {
    shard: u32,
    order: Order,
    tries: u32,
    done: bool,
}

impl World<'_> {
    fn hosts(&self) -> Vec<Host> {
        let coordinators = (0..self.coordinators.len()).map(|i| Host::Coordinator(i as u8));
        let replicas = (0..self.replicas.len()).map(|i| Host::Replica(i as u8));
        let clients = (0..self.users.len()).map(|i| Host::Client(i as u8));
        coordinators.chain(replicas).chain(clients).chain([Host::Authority]).collect()
    }

    pub(super) fn begin(&mut self, i: usize) -> Step {
        let plan = self.plan;
        let Planned { for_ms, fault, .. } = &plan.faults[i];
        if self.healed_at.is_some() {
            return Ok(());
        }
        self.say(Host::Authority, || format!("-- {}", plan.faults[i]));
        self.begun[i] = true;
        self.at(self.now + for_ms * MS, Event::End(i));
        match *fault {
            Fault::Cut { .. } | Fault::Isolate { .. } | Fault::Forsake { .. } => self.cut(fault, true),
            Fault::Storm(weather) => self.network.storm(weather, true),
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
            Fault::RoleLost(shard) => self.authority.forget_holder(shard, self.now),
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
        for i in 0..self.begun.len() {
            // Cuts and storms are gone already; the rest is undone one by one.
            if matches!(self.plan.faults[i].fault, Fault::Pause(_) | Fault::Crash { .. } | Fault::Restart(_)) {
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
