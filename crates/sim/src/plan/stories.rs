//! Faults that go together. Each story is made for a rule that single faults, drawn one by one, would hardly ever put to the test:
//! what it takes comes in the order that it takes, the rest is drawn.

use underpass_protocol::wire::Op;

use super::{Fault, Moment, Order, Planned, Shape, Strand, Target};
use crate::{
    host::Host,
    network::{Filter, Weather},
    random::Random,
};

/// Seeds of a thousand that have a story.
const CHANCE: u64 = 250;
/// The shard that it is about.
const SHARD: u32 = 1;

/// Adds a story to some plans.
pub fn tell(random: &mut Random, shape: &mut Shape, faults: &mut Vec<Planned>) {
    if !random.chance(CHANCE) {
        return;
    }
    // Mostly it is left alone, so that nothing else spoils it.
    if random.chance(800) {
        faults.clear();
    }
    if random.chance(600) {
        shape.weather = Weather { delay_us: 300, ..Weather::default() };
    }
    shape.chaos_ms = shape.chaos_ms.max(6 * shape.timing.lease);
    let begin_ms = shape.timing.lease + random.below(shape.timing.lease);
    let mut story = Story { random, shape, faults, begin_ms };
    match story.random.below(5) {
        0 => story.two_coordinators(),
        1 => story.another_life(),
        2 => story.half_aborted(),
        3 => story.latecomer(),
        _ => story.two_take_overs(),
    }
}

struct Story<'a> {
    random: &'a mut Random,
    shape: &'a mut Shape,
    faults: &'a mut Vec<Planned>,
    begin_ms: u64,
}

impl Story<'_> {
    fn add(&mut self, upon: Option<(Moment, u64)>, for_ms: u64, fault: Fault) {
        self.faults.push(Planned { at_ms: self.begin_ms, upon, for_ms, fault });
    }

    /// A replica that is wanted.
    fn replica(&mut self) -> u8 {
        let wanted: Vec<_> = (0..self.shape.replicas.len()).filter(|&i| self.is_wanted(i)).map(|i| i as u8).collect();
        self.random.pick(&wanted)
    }

    fn is_wanted(&self, i: usize) -> bool {
        self.shape.replicas[i].shard == SHARD && self.shape.replicas[i].wanted
    }

    /// Holes 10, 20 and 21: the coordinator goes on, or wakes up, with some replicas that its successor does not reach.
    fn two_coordinators(&mut self) {
        let lease = self.shape.timing.lease;
        let one = self.replica();
        let alone = 1 << one;
        // When they part, and who stays with the coordinator.
        let (upon, replicas) = match self.random.below(4) {
            0 => {
                self.add(None, lease, Fault::Order(SHARD, Order::Remove(one)));
                (Some(Moment::Removal), alone)
            }
            1 => {
                self.add(None, 2, Fault::Crash { host: Host::Replica(one), machine: false });
                (Some(Moment::Promotion), !alone)
            }
            _ => (None, if self.random.chance(500) { alone } else { self.random.number() as u16 }),
        };
        let upon = upon.map(|moment| (moment, 0));
        let clients = self.random.number() as u8;
        let for_ms = self.random.between(lease, 3 * lease);
        self.add(upon, for_ms, Fault::Split { shard: SHARD, replicas, clients });
        self.add(upon, 0, Fault::RoleLost(SHARD));
        let asleep_ms = self.random.between(lease / 2, for_ms);
        match self.random.below(4) {
            0 | 1 => self.add(upon, asleep_ms, Fault::Suspend(Target::CoordinatorOf(SHARD))),
            2 => self.add(upon, asleep_ms, Fault::Suspend(Target::Host(Host::Replica(one)))),
            _ => {}
        }
    }

    /// Hole 15: a write that a replica has acknowledged, or is yet to get, is pending while another life takes that one's place.
    fn another_life(&mut self) {
        let lease = self.shape.timing.lease;
        let one = self.replica();
        let alone = 1 << one;
        let late = self.random.chance(500);
        let strand = Strand {
            shard: SHARD,
            lost: if self.random.chance(800) { !alone } else { 0 },
            late: if late { alone } else { 0 },
            late_replies: if late { 0 } else { self.random.pick(&[0, alone]) },
            late_ms: self.random.between(20, lease),
            lost_again: self.random.pick(&[alone, alone, 0]),
            vanish: self.random.chance(200),
        };
        self.shape.timing.stuck = 3 * lease;
        let for_ms = self.random.between(lease / 2, 2 * lease);
        self.add(None, for_ms, Fault::Strand(strand));
        let after_us = self.random.between(500, 20_000);
        let crash = Fault::Crash { host: Host::Replica(one), machine: false };
        self.add(Some((Moment::Stranded, after_us)), 1, crash);
    }

    /// Hole 14: some members record an abort, others do not hear of it; copies are late; then the epoch changes.
    fn half_aborted(&mut self) {
        let lease = self.shape.timing.lease;
        self.shape.timing.stuck = lease / 4;
        self.shape.keys = self.random.between(1, 2) as u8;
        let for_ms = self.random.between(lease / 2, 2 * lease);
        for _ in 0..self.random.between(1, 2) {
            let all = self.random.chance(600);
            let strand = Strand {
                shard: SHARD,
                lost: if all { u16::MAX } else { self.random.number() as u16 },
                late: self.random.pick(&[0, u16::MAX, self.random.clone().number() as u16]),
                late_replies: 0,
                late_ms: self.random.between(lease / 4, 2 * lease),
                lost_again: 0,
                vanish: self.random.chance(400),
            };
            self.add(None, for_ms, Fault::Strand(strand));
        }
        let filtered = if self.random.chance(700) {
            1 << Op::Abort.to_wire()
        } else {
            1 << Op::Pull.to_wire() | 1 << Op::Fetched.to_wire()
        };
        let to = Host::Replica(self.replica());
        let filter = Filter { to, ops: filtered, loss: self.random.pick(&[500, 1000]), late_ms: 0 };
        let filter_ms = self.random.between(lease / 2, 3 * lease);
        self.add(None, filter_ms, Fault::Filter(filter));
        let after_us = self.random.between(0, 30_000);
        let change = match self.random.below(5) {
            0 | 1 => Fault::Crash { host: Host::Replica(self.replica()), machine: false },
            2 => Fault::RoleLost(SHARD),
            3 => Fault::Order(SHARD, Order::Remove(self.replica())),
            _ => return,
        };
        self.add(Some((Moment::Abort, after_us)), 1, change);
    }

    /// Hole 24: a member lacks a write, and confirms a take-over when the others have been waited for.
    fn latecomer(&mut self) {
        let reach = self.shape.timing.reach;
        let one = self.replica();
        let strand = Strand {
            shard: SHARD,
            lost: 1 << one,
            late: 0,
            late_replies: 0,
            late_ms: 0,
            lost_again: 0,
            vanish: self.random.chance(200),
        };
        let for_ms = 2 * self.shape.timing.lease;
        self.add(None, for_ms, Fault::Strand(strand));
        let after_us = self.random.between(2_000, 10_000);
        self.add(Some((Moment::Stranded, after_us)), 0, Fault::RoleLost(SHARD));
        let late_ms = reach + self.random.below(20);
        self.add(Some((Moment::Claim, 0)), late_ms, Fault::Isolate { host: Host::Replica(one), both: true });
    }

    /// Sessions live through two take-overs, the second soon after the first or in the middle of it.
    fn two_take_overs(&mut self) {
        let lease = self.shape.timing.lease;
        let strand = super::strand(self.random, self.shape);
        let for_ms = self.random.between(lease / 4, lease);
        self.add(None, for_ms, Fault::Strand(Strand { shard: SHARD, ..strand }));
        let after_us = self.random.between(1_000, 30_000);
        self.add(Some((Moment::Stranded, after_us)), 0, Fault::RoleLost(SHARD));
        let moment = self.random.pick(&[Moment::Claim, Moment::Serve]);
        let after_us = self.random.between(0, lease * 1000 / 2);
        self.add(Some((moment, after_us)), 0, Fault::RoleLost(SHARD));
        if self.random.chance(500) {
            let host = Host::Replica(self.replica());
            let after_us = self.random.between(0, 20_000);
            self.add(Some((moment, after_us)), 1, Fault::Crash { host, machine: false });
        }
    }
}
