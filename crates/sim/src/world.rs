//! One run: its hosts, its events in the order of their times, and its end.

mod agents;
mod clients;
mod end;
mod faults;
mod replicas;

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, BinaryHeap},
    fmt,
};

use underpass_check::invariants::Violation;
use underpass_protocol::{
    agent::Record,
    agent::Wanted,
    wire::{Endpoint, SessionId},
};

use self::{
    clients::User,
    faults::{PendingOrder, Stranded},
    replicas::Member,
};
use crate::{
    authority::{Authority, Process, Question},
    coordinator::{self, Input},
    host::{Host, MS, Timepiece},
    network::Network,
    plan::Plan,
    random::Random,
    trace::{Detail, Trace},
    watch::{Routed, Seen, Watch},
};

/// Between two looks at everything that is held, in nanoseconds.
const LOOK_NS: u64 = 25 * MS;
/// Events of a run at most: beyond it something goes round in circles.
const EVENTS_MAX: u64 = 5_000_000;

/// What happened in runs, to see that things really happen. Each is a count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are what is printed")]
pub struct Counts {
    pub runs: u64,
    pub operations: u64,
    pub answered: u64,
    pub failed: u64,
    pub unknown: u64,
    pub datagrams: u64,
    pub lost: u64,
    pub writes_ordered: u64,
    pub commits: u64,
    pub reads_answered: u64,
    pub reads_rejected: u64,
    pub tenures: u64,
    pub adoptions: u64,
    pub epochs: u64,
    pub learners: u64,
    pub promotions: u64,
    pub resets: u64,
    pub repaired: u64,
    pub aborts: u64,
    pub pulls: u64,
    pub handovers: u64,
    pub orders_done: u64,
    pub orders_refused: u64,
    pub conflicts: u64,
    pub unknown_stores: u64,
    pub replicas_crashed: u64,
    pub agents_crashed: u64,
    pub crashes_spared: u64,
    pub shards_lost: u64,
    pub undecided: u64,
    pub simulated_ms: u64,
    pub recovery_ms: u64,
}

impl Counts {
    fn each(&mut self) -> [(&'static str, &mut u64); 32] {
        macro_rules! each {
            ($($name:ident)+) => { [$((stringify!($name), &mut self.$name)),+] };
        }
        each!(runs operations answered failed unknown datagrams lost writes_ordered commits reads_answered reads_rejected
            tenures adoptions epochs learners promotions resets repaired aborts pulls handovers orders_done orders_refused
            conflicts unknown_stores replicas_crashed agents_crashed crashes_spared shards_lost undecided simulated_ms
            recovery_ms)
    }

    /// Adds those of another run.
    pub fn add(&mut self, mut other: Self) {
        for ((_, sum), (_, more)) in self.each().into_iter().zip(other.each()) {
            *sum += *more;
        }
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (name, count)) in self.clone().each().into_iter().enumerate() {
            let end = if i % 4 == 3 { "\n" } else { "" };
            write!(f, "{name:>17} {count:<11}{end}")?;
        }
        Ok(())
    }
}

/// What is wrong with a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// When, in milliseconds.
    pub at_ms: u64,
    /// What.
    pub violation: Violation,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at {} ms: {}", self.at_ms, self.violation)
    }
}

/// What came of a run.
#[derive(Debug)]
pub struct Report {
    /// What is wrong with it, if anything.
    pub failure: Option<Failure>,
    /// What happened.
    pub counts: Counts,
    /// Of its events.
    pub hash: u64,
    /// Its lines, if they were kept.
    pub trace: Vec<String>,
}

type Step<T = ()> = Result<T, Violation>;

/// Something that happens.
enum Event {
    /// A datagram arrives.
    Datagram { to: Host, from: Endpoint, bytes: Vec<u8>, routed: Option<Routed> },
    /// A process wanted to be woken.
    Wake(Host),
    /// A question arrives at the authority.
    Question { from: Process, number: u64, question: Question },
    /// Something for an agent's process arrives.
    Input { to: Process, input: Input },
    /// The time of a fault of the plan has come.
    Due(usize),
    /// A fault begins.
    Begin(usize),
    /// It ends.
    End(usize),
    /// A client's next request.
    Ask(u8),
    /// An operator tries again.
    Order(usize),
    /// Time for a look at everything.
    Look,
    /// The faults are over.
    Heal,
}

struct Queued {
    at: u64,
    order: u64,
    event: Event,
}

impl PartialEq for Queued {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}
impl Eq for Queued {}
impl PartialOrd for Queued {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Queued {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

/// A run under way.
pub struct World<'a> {
    plan: &'a Plan,
    now: u64,
    queue: BinaryHeap<Reverse<Queued>>,
    queued: u64,
    random: Random,
    network: Network,
    authority: Authority,
    authority_down: u32,
    authority_slow: BTreeMap<usize, u64>,
    questions: u64,
    coordinators: Vec<coordinator::Host>,
    replicas: Vec<Member>,
    users: Vec<User>,
    orders: Vec<PendingOrder>,
    watches: Vec<Watch>,
    /// Reads that may have been answered above their bound, since more is stable now.
    beyond: BTreeSet<(SessionId, u64)>,
    /// Items expire in this run.
    expiring: bool,
    /// Faults of the plan that are under way.
    begun: Vec<bool>,
    /// Those that wait for their moment.
    armed: Vec<usize>,
    /// Who is on one side, by fault.
    splits: BTreeMap<usize, Vec<Host>>,
    /// Who is suspended, by fault.
    suspended: BTreeMap<usize, Host>,
    /// Which kind of machines stood still in this run: both would be more than protocol.md, section 7, assumes of clocks.
    suspends_replicas: Option<bool>,
    stranded: Vec<Stranded>,
    healed_at: Option<u64>,
    probing: bool,
    over: bool,
    trace: Trace,
    counts: Counts,
}

/// Runs a plan to its end.
pub fn run(plan: &Plan, detail: Detail) -> Report {
    let mut world = World::new(plan, detail);
    let result = world.run();
    world.counts.runs = 1;
    world.counts.simulated_ms = world.now / MS;
    let failure = result.err().map(|violation| Failure { at_ms: world.now / MS, violation });
    Report { failure, counts: world.counts, hash: world.trace.hash(), trace: world.trace.lines }
}

impl<'a> World<'a> {
    fn new(plan: &'a Plan, detail: Detail) -> Self {
        let shape = &plan.shape;
        let record = |shard| {
            let wanted = |(i, replica): (usize, &crate::plan::ReplicaShape)| {
                let Endpoint { addr, port } = Host::Replica(i as u8).endpoint();
                (replica.shard == shard && replica.wanted).then_some(Wanted {
                    id: i as u32,
                    addr,
                    port,
                    replaces: None,
                })
            };
            let wanted = shape.replicas.iter().enumerate().filter_map(wanted).collect();
            Record { lease_ms: shape.timing.lease, ..Record::new(shard, wanted) }
        };
        let mut world = Self {
            plan,
            now: 0,
            queue: BinaryHeap::new(),
            queued: 0,
            random: Random::new(plan.seed, 1),
            network: Network::new(plan.seed, shape.weather),
            authority: Authority::new((1..=shape.shards).map(record), shape.timing.role * MS),
            authority_down: 0,
            authority_slow: BTreeMap::new(),
            questions: 0,
            coordinators: shape
                .coordinators
                .iter()
                .map(|shape| coordinator::Host {
                    shape: *shape,
                    life: 0,
                    process: None,
                    data_path: None,
                    clock: Timepiece::new(shape.clock),
                    paused: 0,
                    down: 0,
                })
                .collect(),
            replicas: shape.replicas.iter().map(Member::new).collect(),
            users: Vec::new(),
            orders: Vec::new(),
            watches: (0..shape.shards).map(|_| Watch::default()).collect(),
            beyond: BTreeSet::new(),
            expiring: plan.clients.iter().flat_map(|client| &client.operations).any(|op| op.ttl_ms.is_some()),
            begun: vec![false; plan.faults.len()],
            armed: Vec::new(),
            splits: BTreeMap::new(),
            suspended: BTreeMap::new(),
            suspends_replicas: None,
            stranded: Vec::new(),
            healed_at: None,
            probing: false,
            over: false,
            trace: Trace::new(detail),
            counts: Counts::default(),
        };
        for i in 0..shape.replicas.len() {
            world.start_replica(i);
        }
        for i in 0..shape.coordinators.len() {
            world.start_agent(i);
        }
        for (i, client) in plan.clients.iter().enumerate() {
            let user = User::new(plan, client, i as u8);
            world.users.push(user);
            world.plan_next(i);
        }
        for (i, planned) in plan.faults.iter().enumerate() {
            world.at(planned.at_ms * MS, Event::Due(i));
        }
        world.at(LOOK_NS, Event::Look);
        world.at(shape.chaos_ms * MS, Event::Heal);
        world
    }

    fn run(&mut self) -> Step {
        let mut events = 0;
        while let Some(Reverse(Queued { at, event, .. })) = self.queue.pop() {
            debug_assert!(at >= self.now);
            self.now = at;
            self.handle(event)?;
            if self.over {
                return self.judge();
            }
            events += 1;
            if events > EVENTS_MAX {
                return self.fail("bounded", format!("more than {EVENTS_MAX} events"));
            }
        }
        self.fail("liveness", "nothing happens any more".into())
    }

    fn handle(&mut self, event: Event) -> Step {
        match event {
            Event::Datagram { to, from, bytes, routed } => self.datagram(to, from, bytes, routed),
            Event::Wake(host) => self.wake(host),
            Event::Question { from, number, question } => self.question(from, number, question),
            Event::Input { to, input } => self.input(to, input),
            Event::Due(i) => self.due(i),
            Event::Begin(i) => self.begin(i),
            Event::End(i) => self.end(i),
            Event::Ask(i) => self.ask(usize::from(i)),
            Event::Order(i) => self.order(i),
            Event::Look => self.look(),
            Event::Heal => self.heal(),
        }
    }

    fn fail<T>(&self, invariant: &'static str, what: String) -> Step<T> {
        Err(Violation { invariant, what })
    }

    fn at(&mut self, at: u64, event: Event) {
        self.queued += 1;
        self.queue.push(Reverse(Queued { at: at.max(self.now), order: self.queued, event }));
    }

    fn say(&mut self, host: Host, what: impl FnOnce() -> String) {
        self.trace.say(self.now, host, what);
    }

    /// Sends a datagram.
    fn send(&mut self, from: Host, to: Endpoint, bytes: &[u8], routed: Option<Routed>) -> Step {
        let most = underpass_protocol::transfer::FETCHED_MAX + underpass_protocol::wire::HEADER_LEN;
        if bytes.len() > most {
            return self.fail("bounded", format!("{from} sends a datagram of {} bytes", bytes.len()));
        }
        let Some(host) = Host::at(to) else {
            return self.fail("bounded", format!("{from} sends to {to}, which is nobody"));
        };
        self.counts.datagrams += 1;
        let mut copies = 0;
        let Some(late) = self.strand(from, host, bytes) else {
            self.counts.lost += 1;
            return Ok(());
        };
        for at in self.network.send(self.now, from, host, bytes[3]) {
            copies += 1;
            let at = at + late;
            let event = Event::Datagram { to: host, from: from.endpoint(), bytes: bytes.to_vec(), routed };
            self.at(at, event);
        }
        self.counts.lost += u64::from(copies == 0);
        Ok(())
    }

    fn datagram(&mut self, to: Host, from: Endpoint, bytes: Vec<u8>, routed: Option<Routed>) -> Step {
        let sender = Host::at(from).unwrap_or(Host::Authority);
        self.trace.arrives(self.now, to, sender, &bytes);
        match to {
            Host::Coordinator(i) => self.at_data_path(usize::from(i), from, bytes),
            Host::Replica(i) => self.at_replica(usize::from(i), from, bytes, routed),
            Host::Client(i) => self.at_client(usize::from(i), bytes),
            Host::Authority => Ok(()),
        }
    }

    fn wake(&mut self, host: Host) -> Step {
        match host {
            Host::Coordinator(i) => self.wake_agent(usize::from(i)),
            Host::Replica(i) => self.wake_replica(usize::from(i)),
            Host::Client(i) => self.wake_client(usize::from(i)),
            Host::Authority => Ok(()),
        }
    }

    fn shard_count(&self) -> std::ops::RangeInclusive<u32> {
        1..=self.plan.shape.shards
    }

    fn watch(&mut self, shard: u32) -> &mut Watch {
        &mut self.watches[shard as usize - 1]
    }

    /// What replicas of a shard hold, and which of them are active under the latest record.
    fn seen<T>(&mut self, shard: u32, then: impl FnOnce(&mut Watch, &[Seen<'_>], &[usize]) -> Step<T>) -> Step<T> {
        let dumps: Vec<_> = self
            .replicas
            .iter()
            .enumerate()
            .filter(|(_, member)| member.shape.shard == shard)
            .filter_map(|(i, member)| Some((i as u8, member.replica.as_ref()?)))
            .map(|(i, replica)| (i, replica.incarnation(), replica.dump()))
            .collect();
        let all: Vec<_> = dumps
            .iter()
            .map(|(replica, incarnation, dump)| Seen { replica: *replica, incarnation: *incarnation, dump })
            .collect();
        let (record, _) = self.authority.record(shard);
        let is_active = |seen: &Seen<'_>| {
            let member = record.members.iter().find(|member| member.id == u32::from(seen.replica));
            member.is_some_and(|member| member.active && member.incarnation == seen.incarnation)
        };
        let active: Vec<_> = (0..all.len()).filter(|&at| is_active(&all[at])).collect();
        then(&mut self.watches[shard as usize - 1], &all, &active)
    }

    fn look(&mut self) -> Step {
        for shard in self.shard_count() {
            self.seen(shard, |watch, all, active| watch.look(all, active))?;
        }
        self.at(self.now + LOOK_NS, Event::Look);
        if self.healed_at.is_some() { self.may_be_over() } else { Ok(()) }
    }

    /// Whether some active member of a record still holds what it held.
    fn survives(&self, record: &Record, without: Option<usize>) -> bool {
        let alive = |id: u32, incarnation: u64| {
            let replica = self.replicas.get(id as usize).filter(|_| without != Some(id as usize));
            replica
                .and_then(|member| member.replica.as_ref())
                .is_some_and(|replica| replica.incarnation() == incarnation)
        };
        record.epoch == 0 || record.members.iter().any(|member| member.active && alive(member.id, member.incarnation))
    }

    /// Notes when a shard has lost its last copy; a learner may turn out to have had another, if its coordinator lives.
    fn note_losses(&mut self) {
        for shard in self.shard_count() {
            let lost = !self.survives(self.authority.record(shard).0, None);
            if !lost && self.watch(shard).lost_at.take().is_some() {
                self.say(Host::Authority, || format!("a learner has what shard {shard} held"));
            }
            if lost && self.watch(shard).lost_at.is_none() {
                self.watch(shard).lost_at = Some(self.now);
                self.counts.shards_lost += 1;
                self.say(Host::Authority, || format!("nobody holds what shard {shard} held"));
            }
        }
    }
}
