//! Faults that go together. Each story is made for a rule that single faults, drawn one by one, would hardly ever put to the test:
//! what it takes comes in the order that it takes, the rest is drawn.

use underpass_protocol::wire::{Kind, Op};

use super::{Fault, Moment, Order, Planned, Shape, Strand, Target};
use crate::{
    host::Host,
    network::{Filter, Weather},
    random::Random,
};

/// Seeds of a thousand that have a story.
const CHANCE: u64 = 300;
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
    match story.random.below(9) {
        0 => story.two_coordinators(),
        1 => story.another_life(),
        2 => story.former_life(),
        3 => story.half_aborted(),
        4 => story.aborted_above(),
        5 => story.latecomer(),
        6 => story.closed(),
        7 => story.beside_a_copy(),
        _ => story.two_take_overs(),
    }
}

struct Story<'a> {
    random: &'a mut Random,
    shape: &'a mut Shape,
    faults: &'a mut Vec<Planned>,
    begin_ms: u64,
}

/// One whose clones fare like all others, and whose client is not heard.
const SILENT: Strand = Strand {
    shard: SHARD,
    kind: None,
    lost: 0,
    late: 0,
    late_replies: 0,
    late_ms: 0,
    late_until: None,
    lost_again: 0,
    vanish: false,
};

impl Story<'_> {
    fn add(&mut self, upon: Option<(Moment, u64)>, for_ms: u64, fault: Fault) {
        self.faults.push(Planned { at_ms: self.begin_ms, upon, for_ms, fault });
    }

    /// After a moment: between these many microseconds.
    fn after(&mut self, moment: Moment, from_us: u64, to_us: u64) -> Option<(Moment, u64)> {
        Some((moment, self.random.between(from_us, to_us)))
    }

    /// A replica that is wanted.
    fn replica(&mut self) -> u8 {
        let is_wanted = |&i: &usize| self.shape.replicas[i].shard == SHARD && self.shape.replicas[i].wanted;
        let wanted: Vec<_> = (0..self.shape.replicas.len()).filter(is_wanted).map(|i| i as u8).collect();
        self.random.pick(&wanted)
    }

    /// Part of a lease, or several: from and to are percentages.
    fn leases(&mut self, from: u64, to: u64) -> u64 {
        let lease = self.shape.timing.lease;
        self.random.between(lease * from / 100, lease * to / 100)
    }

    /// Holes 10, 20 and 21: the coordinator goes on, or wakes up, with some replicas that its successor does not reach.
    fn two_coordinators(&mut self) {
        let one = self.replica();
        let alone = 1 << one;
        // When they part, and who stays with the coordinator.
        let (upon, replicas) = match self.random.below(4) {
            0 => {
                self.add(None, 0, Fault::Order(SHARD, Order::Remove(one)));
                (Some(Moment::Removal), alone)
            }
            1 => {
                self.add(None, 2, Fault::Crash { host: Host::Replica(one), machine: false });
                (Some(Moment::Promotion), !alone)
            }
            2 => (None, alone),
            _ => (None, self.random.number() as u16),
        };
        let upon = upon.map(|moment| (moment, 0));
        let clients = self.random.number() as u8;
        let for_ms = self.leases(100, 300);
        self.add(upon, for_ms, Fault::Split { shard: SHARD, replicas, clients });
        self.add(upon, 0, Fault::RoleLost(SHARD));
        let asleep_ms = self.leases(50, 200).min(for_ms);
        match self.random.below(4) {
            0 | 1 => self.add(upon, asleep_ms, Fault::Suspend(Target::CoordinatorOf(SHARD))),
            2 => self.add(upon, asleep_ms, Fault::Suspend(Target::Host(Host::Replica(one)))),
            _ => {}
        }
    }

    /// Hole 15: a write that a replica has acknowledged, or is yet to acknowledge, is pending while another life takes its place.
    fn another_life(&mut self) {
        let one = self.replica();
        let alone = 1 << one;
        let strand = Strand {
            lost: !alone,
            late_replies: self.random.pick(&[0, alone]),
            late_ms: self.leases(5, 100),
            late_until: self.random.pick(&[None, Some(Moment::Learner), Some(Moment::Promotion)]),
            lost_again: alone,
            ..SILENT
        };
        self.shape.timing.stuck = 3 * self.shape.timing.lease;
        let for_ms = self.leases(50, 200);
        self.add(None, for_ms, Fault::Strand(strand));
        let upon = self.after(Moment::Stranded, 500, 20_000);
        self.add(upon, 1, Fault::Crash { host: Host::Replica(one), machine: false });
    }

    /// A write that a replica is yet to get is resolved without it, and comes when another life has taken its place.
    fn former_life(&mut self) {
        let alone = 1 << self.replica();
        let vanish = self.random.chance(500);
        let strand = Strand {
            lost: if vanish { !alone } else { 0 },
            late: alone,
            late_until: Some(Moment::Learner),
            vanish,
            ..SILENT
        };
        self.shape.timing.stuck = self.shape.timing.lease / 4;
        self.shape.keys = self.random.between(1, 2) as u8;
        self.shape.taste.kinds = vec![Kind::Delete, Kind::Put];
        let for_ms = self.leases(5, 20);
        self.add(None, for_ms, Fault::Strand(strand));
        let (upon, for_ms) = (self.after(Moment::Stranded, 0, 500), self.leases(100, 200));
        self.add(upon, for_ms, Fault::Crash { host: Host::Replica(alone.trailing_zeros() as u8), machine: false });
    }

    /// A write that one replica alone has, and that others are slow to pull: what is ordered later is not stable.
    fn unresolved(&mut self, for_ms: u64) {
        let alone = 1 << self.replica();
        self.add(None, for_ms, Fault::Strand(Strand { lost: !alone, ..SILENT }));
        let (loss, late_ms) = self.random.pick(&[(900, 0), (0, self.shape.timing.lease)]);
        for i in (0..self.shape.replicas.len() as u8).filter(|i| alone >> i & 1 == 0) {
            let ops = 1 << Op::Fetched.to_wire();
            let filter = Filter { to: Host::Replica(i), ops, loss, late_ms, copies: false };
            self.add(None, 2 * for_ms, Fault::Filter(filter));
        }
    }

    /// Hole 14: some members record an abort, others do not hear of it; copies are late; then the epoch changes.
    fn half_aborted(&mut self) {
        self.shape.timing.stuck = self.shape.timing.lease / 4;
        let (some, for_ms) = (self.random.number() as u16, self.leases(50, 200));
        if self.random.chance(600) {
            self.unresolved(for_ms);
        }
        let strand = Strand {
            lost: self.random.pick(&[u16::MAX, 0, some]),
            late: u16::MAX,
            late_ms: self.leases(30, 100),
            vanish: self.random.chance(500),
            ..SILENT
        };
        self.add(None, for_ms, Fault::Strand(strand));
        let filter = Filter {
            to: Host::Replica(self.replica()),
            ops: 1 << Op::Abort.to_wire(),
            loss: self.random.pick(&[500, 1000]),
            late_ms: 0,
            copies: false,
        };
        let for_ms = self.leases(50, 200);
        self.add(None, for_ms, Fault::Filter(filter));
        let host = Host::Replica(self.replica());
        let change = match self.random.below(5) {
            0 | 1 => Fault::Crash { host, machine: false },
            2 => Fault::RoleLost(SHARD),
            3 => Fault::Order(SHARD, Order::Remove(self.replica())),
            _ => return,
        };
        let upon = self.after(Moment::Abort, 0, 30_000);
        self.add(upon, 1, change);
    }

    /// Hole 14: of two writes of a key that are pending, the upper one is aborted; the lower one is at some members, and is slow to
    /// come to the others, perhaps so slow that it is stable by then.
    fn aborted_above(&mut self) {
        self.shape.timing.stuck = self.shape.timing.lease / 4;
        self.shape.keys = 1;
        let taste = &mut self.shape.taste;
        (taste.puts, taste.reads, taste.most) = (500, 500, 120);
        taste.kinds = self.random.pick(&[&[Kind::Put][..], &[Kind::Delete]]).to_vec();
        let for_ms = self.leases(20, 200);
        self.unresolved(for_ms);
        let vanish = self.random.chance(500);
        if self.random.chance(700) {
            self.add(None, for_ms, Fault::Strand(Strand { lost: u16::MAX, vanish, ..SILENT }));
        }
    }

    /// Hole 24: a member lacks a write, and confirms a take-over when the others have been waited for.
    fn latecomer(&mut self) {
        let one = self.replica();
        let (for_ms, vanish) = (self.leases(100, 300), self.random.chance(200));
        self.add(None, for_ms, Fault::Strand(Strand { lost: 1 << one, vanish, ..SILENT }));
        let upon = self.after(Moment::Stranded, 2_000, 10_000);
        self.add(upon, 0, Fault::RoleLost(SHARD));
        let late_ms = self.shape.timing.reach + self.random.below(20);
        self.add(Some((Moment::Claim, 0)), late_ms, Fault::Isolate { host: Host::Replica(one), both: true });
        // The others take a while to agree.
        for c in 0..self.shape.coordinators.len() as u8 {
            let ops = 1 << Op::Collected.to_wire();
            let filter = Filter { to: Host::Coordinator(c), ops, loss: 800, late_ms: 0, copies: false };
            self.add(None, for_ms, Fault::Filter(filter));
        }
    }

    /// Hole 25: a learner is slow to copy, and slow to hear of a DELETE.
    fn beside_a_copy(&mut self) {
        let one = self.replica();
        self.shape.keys = self.random.between(1, 3) as u8;
        let taste = &mut self.shape.taste;
        (taste.kinds, taste.puts, taste.reads) = (vec![Kind::Delete], 500, 300);
        self.add(None, 1, Fault::Crash { host: Host::Replica(one), machine: false });
        let (upon, for_ms) = (self.after(Moment::Learner, 0, 50_000), self.leases(5, 40));
        let kind = Some(Kind::Delete);
        self.add(upon, for_ms, Fault::Strand(Strand { kind, lost: 1 << one, ..SILENT }));
        let ops = 1 << Op::Fetched.to_wire();
        let loss = self.random.between(500, 900);
        let filter = Filter { to: Host::Replica(one), ops, loss, late_ms: 0, copies: false };
        let for_ms = self.leases(50, 200);
        self.add(None, for_ms, Fault::Filter(filter));
    }

    /// Hole 23: writes that were refused are given up, and copies of them come when the coordinator has begun anew.
    fn closed(&mut self) {
        let lease = self.shape.timing.lease;
        self.shape.keys = 1;
        let taste = &mut self.shape.taste;
        (taste.puts, taste.reads, taste.ttls) = (100, 300, 0);
        (taste.patience_ms, taste.most) = (lease / 4, 120);
        // What the others are refused for.
        let (for_ms, lost) = (self.leases(50, 150), self.random.number() as u16);
        self.add(None, for_ms, Fault::Strand(Strand { lost, ..SILENT }));
        for c in 0..self.shape.coordinators.len() as u8 {
            let ops = 1 << Op::Write.to_wire();
            let filter = Filter { to: Host::Coordinator(c), ops, loss: 0, late_ms: 4 * lease, copies: true };
            self.add(None, for_ms, Fault::Filter(filter));
            let upon = self.after(Moment::Stranded, lease * 300, lease * 1500);
            self.add(upon, 1, Fault::Crash { host: Host::Coordinator(c), machine: true });
        }
    }

    /// Sessions live through two take-overs, the second soon after the first or in the middle of it.
    fn two_take_overs(&mut self) {
        let strand = super::strand(self.random, self.shape);
        let for_ms = self.leases(25, 100);
        self.add(None, for_ms, Fault::Strand(Strand { shard: SHARD, ..strand }));
        let upon = self.after(Moment::Stranded, 1_000, 30_000);
        self.add(upon, 0, Fault::RoleLost(SHARD));
        let moment = self.random.pick(&[Moment::Claim, Moment::Serve]);
        let upon = self.after(moment, 0, self.shape.timing.lease * 500);
        self.add(upon, 0, Fault::RoleLost(SHARD));
        if self.random.chance(500) {
            let (upon, host) = (self.after(moment, 0, 20_000), Host::Replica(self.replica()));
            self.add(upon, 1, Fault::Crash { host, machine: false });
        }
    }
}
