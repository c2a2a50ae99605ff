//! Replicas.

use std::collections::VecDeque;

use underpass_protocol::{
    control::{self, Install},
    replica::{Action, Event as Input, Replica, Settings},
    wire::{Endpoint, Op, Packet},
};

use super::{Event, Step, World};
use crate::{
    host::{Host, Timepiece},
    plan::ReplicaShape,
    watch::Routed,
};

/// Memory of a replica: more than a run can fill.
const BUDGET_BYTES: u64 = 4 << 20;

/// A replica's host.
pub struct Member {
    pub shape: ReplicaShape,
    pub replica: Option<Replica>,
    pub clock: Timepiece,
    /// It stands still, or is down, this many times over.
    pub paused: u32,
    pub down: u32,
    pub inbox: VecDeque<(Endpoint, Vec<u8>, Option<Routed>)>,
    wake: u64,
}

impl Member {
    pub fn new(shape: &ReplicaShape) -> Self {
        Self {
            shape: *shape,
            replica: None,
            clock: Timepiece::new(shape.clock),
            paused: 0,
            down: 0,
            inbox: VecDeque::new(),
            wake: 0,
        }
    }
}

impl World<'_> {
    /// Starts an empty replica.
    pub(super) fn start_replica(&mut self, i: usize) {
        let incarnation = self.random.number() | 1;
        let mut replica = Replica::new(Settings { key_shards: 1, ..Settings::simulated(incarnation, BUDGET_BYTES) });
        if let Some(mutant) = &self.plan.mutant {
            mutant.infect_replica(&mut replica);
        }
        self.replicas[i].replica = Some(replica);
        self.say(Host::Replica(i as u8), || format!("starts, empty, as {incarnation:016x}"));
        self.replicas[i].wake = 0;
    }

    pub(super) fn stop_replica(&mut self, i: usize) {
        self.replicas[i].replica = None;
        self.replicas[i].inbox.clear();
        self.say(Host::Replica(i as u8), || "dies".into());
        self.note_losses();
    }

    fn wake_replica_at(&mut self, i: usize, at: u64) {
        self.replicas[i].wake = at;
        self.at(at, Event::Wake(Host::Replica(i as u8)));
    }

    /// Has it ticked when it is due.
    fn plan_tick(&mut self, i: usize) {
        let member = &self.replicas[i];
        if let Some(due_ms) = member.replica.as_ref().and_then(Replica::due_ms) {
            let at = member.clock.when(due_ms).max(self.now + 1);
            if member.wake <= self.now || at < member.wake {
                self.wake_replica_at(i, at);
            }
        }
    }

    pub(super) fn wake_replica(&mut self, i: usize) -> Step {
        let member = &mut self.replicas[i];
        if member.wake != self.now || member.paused > 0 {
            return Ok(());
        }
        let now_ms = member.clock.ms(self.now);
        let actions = member.replica.as_ref().map(|replica| replica.tick(now_ms)).unwrap_or_default();
        self.do_for_replica(i, actions, None)?;
        self.plan_tick(i);
        Ok(())
    }

    pub(super) fn at_replica(&mut self, i: usize, from: Endpoint, bytes: Vec<u8>, routed: Option<Routed>) -> Step {
        let member = &mut self.replicas[i];
        let Some(replica) = &member.replica else { return Ok(()) };
        if member.paused > 0 {
            member.inbox.push_back((from, bytes, routed));
            return Ok(());
        }
        let before = replica.incarnation();
        let actions = replica.step(member.clock.ms(self.now), Input::Datagram { from, bytes: &bytes });
        let reset = replica.incarnation() != before;
        if reset {
            self.counts.resets += 1;
            self.say(Host::Replica(i as u8), || "is emptied".into());
            self.note_losses();
        }
        self.do_for_replica(i, actions, routed)?;
        self.plan_tick(i);
        Ok(())
    }

    fn do_for_replica(&mut self, i: usize, actions: Vec<Action>, routed: Option<Routed>) -> Step {
        let host = Host::Replica(i as u8);
        for action in actions {
            match action {
                Action::Send { to, bytes } => {
                    self.watch_replica(i, &bytes, routed)?;
                    self.send(host, to, &bytes, None)?;
                }
                Action::Note(note) => self.say(host, || format!("notes {note:?}")),
                Action::Count(count) => {
                    if let underpass_protocol::replica::Count::Drop(why) = count {
                        self.say(host, || format!("drops it: {why:?}"));
                    }
                }
            }
        }
        Ok(())
    }

    /// What a replica says to clients and coordinators.
    fn watch_replica(&mut self, i: usize, bytes: &[u8], routed: Option<Routed>) -> Step {
        let Ok(packet) = Packet::parse(bytes) else {
            return self.fail("bounded", format!("replica {i} sends what is no packet"));
        };
        let Member { shape, replica, .. } = &self.replicas[i];
        let (shard, incarnation) = (shape.shard, replica.as_ref().map_or(0, Replica::incarnation));
        match packet.header.op {
            Op::WReply => self.watch(shard).acknowledges(i as u8, incarnation, &packet),
            Op::RReply => {
                self.counts.reads_answered += 1;
                let stable = self.replicas[i].replica.as_ref().map_or(0, Replica::stable);
                if routed.is_some_and(|routed| routed.bound < stable) {
                    self.beyond.insert((packet.header.session, packet.header.request));
                }
                self.watch(shard).answers(i as u8, &packet, routed)
            }
            Op::RReject => {
                self.counts.reads_rejected += 1;
                Ok(())
            }
            Op::Installed => Ok(()),
            _ => Ok(()),
        }
    }

    /// For the trace: whether an INSTALL empties its receiver.
    pub(super) fn is_reset(bytes: &[u8]) -> bool {
        Packet::parse(bytes)
            .ok()
            .filter(|packet| packet.header.op == Op::Install)
            .and_then(|packet| control::parse::<Install>(&packet))
            .is_some_and(|install| install.reset)
    }

    pub(super) fn resume_replica(&mut self, i: usize) -> Step {
        while self.replicas[i].paused == 0
            && let Some((from, bytes, routed)) = self.replicas[i].inbox.pop_front()
        {
            self.at_replica(i, from, bytes, routed)?;
        }
        if self.replicas[i].replica.is_some() {
            self.wake_replica_at(i, self.now);
        }
        Ok(())
    }
}
