//! What will befall a run: drawn from its seed, and written down, so that parts of it can be left out.

mod stories;

use std::fmt;

use underpass_protocol::wire::{Kind, Op};

use crate::{
    host::{COORDINATORS_MAX, Clock, Host},
    mutants::Mutant,
    network::{Filter, Weather},
    random::Random,
};

/// Which data path a coordinator has: what a crash of its agent takes with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataPath {
    /// The agent's own process: the tables die and stand still with it.
    Socket,
    /// The kernel's: its tables serve on without the agent, and the next one may find them.
    Xdp,
}

/// A coordinator's host.
#[derive(Clone, Copy, Debug)]
pub struct CoordinatorShape {
    /// Its data path.
    pub data_path: DataPath,
    /// Its clock.
    pub clock: Clock,
    /// From that to its wall clock.
    pub wall_offset_ms: i64,
}

/// A replica's host.
#[derive(Clone, Copy, Debug)]
pub struct ReplicaShape {
    /// The shard that it is meant for.
    pub shard: u32,
    /// Wanted from the beginning.
    pub wanted: bool,
    /// Its clock.
    pub clock: Clock,
}

/// Times by which agents and leases go, in milliseconds.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Every lease.
    pub lease: u64,
    /// Between heartbeats.
    pub heartbeat: u64,
    /// See `agent::Settings`.
    pub suspect: u64,
    /// See `agent::Settings`.
    pub lost: u64,
    /// See `agent::Settings`.
    pub reach: u64,
    /// See `agent::Settings`.
    pub stuck: u64,
    /// See `agent::Settings`.
    pub idle: u64,
    /// How long the role of coordinator outlives its holder's last word.
    pub role: u64,
}

/// How the authority behaves.
#[derive(Clone, Copy, Debug)]
pub struct AuthorityShape {
    /// Longest way to it or back, in microseconds.
    pub delay_us: u64,
    /// Answers that never come, in a thousand.
    pub answers_lost: u64,
    /// Requests that arrive long after they were given up, in a thousand.
    pub requests_late: u64,
}

/// What clients like to do. Chances are in a thousand.
#[derive(Clone, Debug)]
pub struct Taste {
    /// Kinds of writes.
    pub kinds: Vec<Kind>,
    /// Operations that are reads.
    pub reads: u64,
    /// Writes that are PUTs for sure.
    pub puts: u64,
    /// Items that expire.
    pub ttls: u64,
    /// How long an answer is waited for, in milliseconds.
    pub patience_ms: u64,
    /// Operations of a client.
    pub most: u64,
}

/// What stays as it is during a run.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Shards, numbered from 1.
    pub shards: u32,
    /// Coordinators, each for all shards.
    pub coordinators: Vec<CoordinatorShape>,
    /// Replicas, of all shards.
    pub replicas: Vec<ReplicaShape>,
    /// Times.
    pub timing: Timing,
    /// The usual weather.
    pub weather: Weather,
    /// The authority.
    pub authority: AuthorityShape,
    /// Length of the phase with faults, in milliseconds.
    pub chaos_ms: u64,
    /// Keys of each shard.
    pub keys: u8,
    /// Reads that a client may have outstanding.
    pub reads_max: usize,
    /// What clients do.
    pub taste: Taste,
    /// Crashes of replicas may take the last copy.
    pub reckless: bool,
}

/// What an operator asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Add a replica.
    Add(u8),
    /// Remove a replica.
    Remove(u8),
    /// Another replica (the second) in place of the first.
    Replace(u8, u8),
    /// Hand the shard over to this coordinator.
    Transfer(u8),
}

/// A host, or whoever has a part when it comes to that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// This one.
    Host(Host),
    /// The coordinator that the record of this shard names.
    CoordinatorOf(u32),
}

/// What becomes of one write of a shard, the next that is ordered: more than bad luck, but a network may do it. Sets of replicas
/// are bits of their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strand {
    /// The shard.
    pub shard: u32,
    /// The next of this kind, if one is named.
    pub kind: Option<Kind>,
    /// Its first clones to these are lost.
    pub lost: u16,
    /// Those to these are late.
    pub late: u16,
    /// Acknowledgements of these are late.
    pub late_replies: u16,
    /// How late at least; at most twice that. In milliseconds.
    pub late_ms: u64,
    /// They are late until this moment, and a few milliseconds more, if it comes.
    pub late_until: Option<Moment>,
    /// Clones to these are lost when its client is heard again.
    pub lost_again: u16,
    /// Its client dies, instead of not being heard with this write.
    pub vanish: bool,
}

/// Something that goes wrong, or is done, for a while.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Datagrams from one host to another are lost; with `both`, also back.
    Cut {
        /// Sender.
        from: Host,
        /// Receiver.
        to: Host,
        /// Both ways.
        both: bool,
    },
    /// A host is cut off from all others.
    Isolate {
        /// Which.
        host: Host,
        /// It hears nothing; it may still be heard unless `both`.
        both: bool,
    },
    /// Worse weather.
    Storm(Weather),
    /// Worse weather for some.
    Filter(Filter),
    /// The shard's coordinator, some replicas and some clients (bits of their numbers) are cut off from all others.
    Split {
        /// Whose coordinator.
        shard: u32,
        /// Replicas on its side.
        replicas: u16,
        /// Clients on its side.
        clients: u8,
    },
    /// A write is left hanging; from when it is ordered.
    Strand(Strand),
    /// A machine stands still with its clock; what is sent to it waits.
    Suspend(Target),
    /// A process stands still; what is sent to it waits. The tables of an `xdp` data path go on.
    Pause(Host),
    /// A process dies, and starts anew afterwards. A coordinator's machine, with `machine`: its `xdp` tables die, too.
    Crash {
        /// Which.
        host: Host,
        /// The whole machine.
        machine: bool,
    },
    /// A coordinator's process is asked to stop, and starts anew.
    Restart(u8),
    /// A client dies with all that it has outstanding; another one begins in its place.
    Vanish(u8),
    /// Coordinators do not reach some replicas, or any; when they do again, a client vanishes: its write may be left behind.
    Forsake {
        /// The client.
        client: u8,
        /// Replicas not reached: bits of their numbers.
        replicas: u16,
    },
    /// Nobody reaches the authority.
    AuthorityDown,
    /// The authority takes this long, in milliseconds.
    AuthoritySlow(u64),
    /// The authority believes the holder of the role dead.
    RoleLost(u32),
    /// An operator's word.
    Order(u32, Order),
}

/// Something that a fault may wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// A tenure begins: it is on record.
    Claim,
    /// A tenure does something for a client for the first time.
    Serve,
    /// The record names a learner.
    Learner,
    /// The record makes a learner active.
    Promotion,
    /// The record lacks one whom it named before.
    Removal,
    /// A write is left hanging.
    Stranded,
    /// A member is told to abort a write.
    Abort,
}

/// A fault and its time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    /// When it begins, in milliseconds.
    pub at_ms: u64,
    /// Not before this comes, and so many microseconds pass.
    pub upon: Option<(Moment, u64)>,
    /// How long it lasts, in milliseconds.
    pub for_ms: u64,
    /// What it is.
    pub fault: Fault,
}

/// What a client asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// READ.
    Get,
    /// A write of this kind.
    Write(underpass_protocol::wire::Kind),
}

/// One request of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// Not before, in microseconds.
    pub at_us: u64,
    /// What.
    pub ask: Ask,
    /// Which key.
    pub key: u8,
    /// Lifetime, in milliseconds.
    pub ttl_ms: Option<u64>,
    /// The client waits so long for the answer, in milliseconds.
    pub patience_ms: u64,
    /// Makes the values of operations different, whichever of them are left out.
    pub number: u32,
}

/// A client and what it does.
#[derive(Clone, Debug)]
pub struct ClientPlan {
    /// The shard that it uses.
    pub shard: u32,
    /// In the order of their times.
    pub operations: Vec<Operation>,
}

/// A run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What all else came from.
    pub seed: u64,
    /// What stays.
    pub shape: Shape,
    /// What goes wrong, by time.
    pub faults: Vec<Planned>,
    /// Who uses the cluster.
    pub clients: Vec<ClientPlan>,
    /// What is wrong with the protocol, on purpose.
    pub mutant: Option<Mutant>,
}

/// What wall clocks show when a run begins, in milliseconds since 1970.
const WALL_MS: u64 = 1_700_000_000_000;
/// Kinds of faults that a seed may turn on.
const KINDS: u64 = 18;

impl Plan {
    /// The run of a seed. Every seed has its own selection of faults and rates: what is left out gives room to what is not.
    pub fn new(seed: u64) -> Self {
        let random = &mut Random::new(seed, 0);
        let mut shape = shape(random);
        let mut faults = faults(random, &shape);
        stories::tell(&mut Random::new(seed, 2), &mut shape, &mut faults);
        faults.sort_by_key(|planned| planned.at_ms);
        let clients = clients(random, &shape);
        Self { seed, shape, faults, clients, mutant: None }
    }

    /// Operations planned.
    pub fn operations(&self) -> usize {
        self.clients.iter().map(|client| client.operations.len()).sum()
    }
}

fn shape(random: &mut Random) -> Shape {
    let drift = random.pick(&[0, 1_000, 30_000]);
    let clock = |random: &mut Random| Clock {
        offset_ms: random.between(1_000, 1 << 30),
        fast_ppm: random.between(0, 2 * drift) as i64 - drift as i64,
    };
    let shards = if random.chance(150) { 2 } else { 1 };
    let data_paths = random.pick(&[
        &[DataPath::Socket][..],
        &[DataPath::Xdp],
        &[DataPath::Xdp, DataPath::Socket],
        &[DataPath::Xdp, DataPath::Socket],
    ]);
    let wall_apart_ms = random.pick(&[1, 50, 500]);
    let coordinators = (0..random.between(2, COORDINATORS_MAX as u64))
        .map(|_| {
            let (data_path, clock) = (random.pick(data_paths), clock(random));
            let wall_ms = WALL_MS + random.below(wall_apart_ms);
            CoordinatorShape { data_path, clock, wall_offset_ms: (wall_ms - clock.offset_ms) as i64 }
        })
        .collect();
    let mut replicas = Vec::new();
    for shard in 1..=shards {
        let wanted = random.pick(&[2, 3, 3, 3, 4]);
        let all = (wanted + random.below(3)).clamp(3, 5);
        replicas.extend((0..all).map(|i| ReplicaShape { shard, wanted: i < wanted, clock: clock(random) }));
    }
    let lease = random.pick(&[200, 300, 500, 1000]);
    let timing = Timing {
        lease,
        heartbeat: 10,
        suspect: random.pick(&[30, 40, lease / 4]),
        lost: lease * random.between(40, 80) / 100,
        reach: lease * random.between(20, 60) / 100,
        stuck: random.pick(&[lease / 2, lease, 2 * lease]),
        idle: random.pick(&[2 * lease, 10 * lease, 60_000]),
        role: lease * random.between(80, 200) / 100,
    };
    let weather = match random.below(4) {
        0 => Weather { delay_us: 100, ..Weather::default() },
        _ => Weather {
            loss: random.pick(&[0, 0, 10, 50, 150]),
            duplicate: random.pick(&[0, 0, 20, 200]),
            slow: random.pick(&[0, 0, 5, 50]),
            delay_us: random.pick(&[100, 300, 1_000, 8_000]),
            slow_ms: random.pick(&[20, 100, lease, 3 * lease]),
        },
    };
    let authority = AuthorityShape {
        delay_us: random.pick(&[300, 1_000, 5_000]),
        answers_lost: random.pick(&[0, 0, 20, 200]),
        requests_late: random.pick(&[0, 0, 0, 50]),
    };
    Shape {
        shards,
        coordinators,
        replicas,
        timing,
        weather,
        authority,
        chaos_ms: lease * random.between(3, 8),
        keys: random.between(1, 5) as u8,
        reads_max: random.pick(&[1, 2, 8]),
        taste: taste(random, lease),
        reckless: random.chance(10),
    }
}

fn taste(random: &mut Random, lease: u64) -> Taste {
    let kinds: Vec<Kind> = Kind::ALL.iter().copied().filter(|_| random.chance(700)).collect();
    Taste {
        kinds: if kinds.is_empty() { vec![Kind::Put] } else { kinds },
        reads: random.pick(&[200, 500, 800]),
        puts: random.pick(&[200, 500]),
        ttls: random.pick(&[0, 0, 100, 400]),
        patience_ms: random.pick(&[lease / 4, lease, 4 * lease]),
        most: random.pick(&[20, 60, 120]),
    }
}

fn faults(random: &mut Random, shape: &Shape) -> Vec<Planned> {
    let lease = shape.timing.lease;
    let replicas = |random: &mut Random| Host::Replica(random.below(shape.replicas.len() as u64) as u8);
    let coordinators = |random: &mut Random| Host::Coordinator(random.below(shape.coordinators.len() as u64) as u8);
    let any = |random: &mut Random| match random.below(4) {
        0 | 1 => coordinators(random),
        2 => replicas(random),
        _ => Host::Client(random.below(3) as u8),
    };
    let server = |random: &mut Random| if random.chance(500) { coordinators(random) } else { replicas(random) };
    // Blinks, and what leases and take-overs notice.
    let length = |random: &mut Random| match random.below(3) {
        0 => random.between(1, lease / 4),
        1 => random.between(lease / 4, lease),
        _ => random.between(lease, 3 * lease),
    };
    // No faults at all now and then; otherwise some kinds of them.
    let enabled =
        if random.chance(30) { 0 } else { random.number() & random.number() | random.number() & random.number() };
    // Rarer, so that they leave something to the others.
    let enabled = enabled & (random.number() | ((1 << 14) - 1));
    let mut planned = Vec::new();
    for kind in (0..KINDS).filter(|kind| enabled & 1 << kind != 0) {
        for _ in 0..random.pick(&[1, 1, 2, 3, 5]) {
            let fault = match kind {
                0 => Fault::Cut { from: server(random), to: server(random), both: random.chance(500) },
                1 => Fault::Isolate { host: any(random), both: random.chance(600) },
                2 => Fault::Storm(Weather {
                    loss: random.pick(&[0, 100, 400, 1000]),
                    duplicate: random.pick(&[0, 300]),
                    slow: random.pick(&[0, 100, 500]),
                    delay_us: random.pick(&[1_000, 20_000]),
                    slow_ms: random.pick(&[lease / 4, 2 * lease]),
                }),
                3 => Fault::Pause(any(random)),
                4 => Fault::Crash { host: replicas(random), machine: false },
                5 => Fault::Crash { host: coordinators(random), machine: random.chance(400) },
                6 => Fault::Vanish(random.below(3) as u8),
                7 => Fault::AuthorityDown,
                8 => Fault::AuthoritySlow(random.between(5, lease)),
                9 => Fault::RoleLost(1 + random.below(u64::from(shape.shards)) as u32),
                10 => Fault::Cut { from: coordinators(random), to: Host::Authority, both: random.chance(500) },
                12 => {
                    let replicas = if random.chance(500) { u16::MAX } else { random.number() as u16 };
                    Fault::Forsake { client: random.below(3) as u8, replicas }
                }
                11 => Fault::Restart(random.below(shape.coordinators.len() as u64) as u8),
                14 => Fault::Filter(Filter {
                    to: server(random),
                    ops: 1 << random.pick(Op::ALL).to_wire() | 1 << random.pick(Op::ALL).to_wire(),
                    loss: random.pick(&[0, 300, 900]),
                    late_ms: random.pick(&[0, 10, lease]),
                    copies: random.chance(300),
                }),
                15 => Fault::Split {
                    shard: 1 + random.below(u64::from(shape.shards)) as u32,
                    replicas: random.number() as u16,
                    clients: random.number() as u8,
                },
                16 => Fault::Strand(strand(random, shape)),
                17 => Fault::Suspend(Target::Host(server(random))),
                _ => {
                    let shard = 1 + random.below(u64::from(shape.shards)) as u32;
                    Fault::Order(shard, order(random, shape, shard))
                }
            };
            let at_ms = lease + random.below(shape.chaos_ms - lease);
            let for_ms = match fault {
                Fault::Forsake { .. } => random.between(2, lease / 10),
                _ => length(random),
            };
            planned.push(Planned { at_ms, upon: None, for_ms, fault });
        }
    }
    planned.retain(|planned| !matches!(&planned.fault, Fault::Cut { from, to, .. } if from == to));
    planned
}

fn strand(random: &mut Random, shape: &Shape) -> Strand {
    // Often all fare alike.
    let some = |random: &mut Random| match random.below(4) {
        0 => u16::MAX,
        1 => 0,
        _ => random.number() as u16,
    };
    Strand {
        shard: 1 + random.below(u64::from(shape.shards)) as u32,
        kind: None,
        lost: some(random),
        late: some(random),
        late_replies: some(random) & some(random),
        late_ms: random.between(1, 2 * shape.timing.lease),
        late_until: None,
        lost_again: some(random) & some(random),
        vanish: random.chance(500),
    }
}

fn order(random: &mut Random, shape: &Shape, shard: u32) -> Order {
    let (wanted, all) = {
        let of_shard = |i: &usize| shape.replicas[*i].shard == shard;
        let all: Vec<u8> = (0..shape.replicas.len()).filter(of_shard).map(|i| i as u8).collect();
        let wanted: Vec<u8> = all.iter().copied().filter(|&i| shape.replicas[usize::from(i)].wanted).collect();
        (wanted, all)
    };
    match random.below(6) {
        0 | 1 => Order::Transfer(random.below(shape.coordinators.len() as u64) as u8),
        2 => Order::Remove(random.pick(&wanted)),
        3 | 4 => Order::Add(random.pick(&all)),
        _ => {
            let (old, new) = (random.pick(&wanted), random.pick(&all));
            if old == new { Order::Add(new) } else { Order::Replace(old, new) }
        }
    }
}

fn clients(random: &mut Random, shape: &Shape) -> Vec<ClientPlan> {
    let &Taste { ref kinds, reads, puts, ttls, patience_ms, most } = &shape.taste;
    let count = (1 + u64::from(shape.shards)).max(random.between(2, 4));
    (0..count)
        .map(|client| {
            let shard = 1 + (client % u64::from(shape.shards)) as u32;
            let gap_us = (shape.chaos_ms * 1000 / most).max(1);
            let mut at_us = random.below(gap_us);
            let mut operations = Vec::new();
            for number in 0..most as u32 {
                let ask = if random.chance(reads) {
                    Ask::Get
                } else if random.chance(puts) {
                    Ask::Write(Kind::Put)
                } else {
                    Ask::Write(random.pick(kinds))
                };
                let may_expire = !matches!(ask, Ask::Get | Ask::Write(Kind::Delete));
                let ttl = may_expire && (random.chance(ttls) || ask == Ask::Write(Kind::Touch));
                operations.push(Operation {
                    at_us,
                    ask,
                    key: random.below(u64::from(shape.keys)) as u8,
                    ttl_ms: ttl.then(|| if ttls > 0 { random.pick(&[1, 20, 100, 1000]) } else { 3_600_000 }),
                    patience_ms,
                    number,
                });
                // Bursts and pauses.
                at_us += if random.chance(600) { random.below(gap_us / 4 + 1) } else { random.below(2 * gap_us) };
            }
            ClientPlan { shard, operations }
        })
        .collect()
}

impl fmt::Display for Planned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { at_ms, upon, for_ms, fault } = self;
        match upon {
            None => write!(f, "at {at_ms} ms: {fault}")?,
            Some((moment, after_us)) => {
                write!(f, "{after_us} us after the first {moment:?} from {at_ms} ms on: {fault}")?
            }
        }
        match fault {
            Fault::Vanish(_) | Fault::RoleLost(_) | Fault::Order(..) => Ok(()),
            _ => write!(f, " for {for_ms} ms"),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cut { from, to, both: true } => write!(f, "{from} and {to} are cut off from each other"),
            Self::Cut { from, to, both: false } => write!(f, "nothing comes from {from} to {to}"),
            Self::Isolate { host, both: true } => write!(f, "{host} is cut off"),
            Self::Isolate { host, both: false } => write!(f, "{host} hears nothing"),
            Self::Storm(Weather { loss, duplicate, slow, delay_us, slow_ms }) => write!(
                f,
                "of a thousand datagrams, {loss} are lost, {duplicate} doubled, {slow} up to {slow_ms} ms late, others up to \
                 {delay_us} us,"
            ),
            Self::Filter(Filter { to, ops, loss, late_ms, copies }) => {
                let ops: Vec<_> =
                    Op::ALL.iter().filter(|op| ops >> op.to_wire() & 1 != 0).map(ToString::to_string).collect();
                let ops = ops.join(" ");
                let late = if *copies { "come again" } else { "are" };
                write!(f, "of a thousand {ops} to {to}, {loss} are lost, others {late} up to {late_ms} ms later,")
            }
            Self::Split { shard, replicas, clients } => write!(
                f,
                "the coordinator of shard {shard} with replicas {replicas:b} and clients {clients:b} is cut off from all others"
            ),
            Self::Strand(Strand { shard, kind, lost, late, late_replies, late_ms, late_until, lost_again, vanish }) => {
                write!(
                    f,
                    "the next {} of shard {shard} is lost to {lost:b}, late to {late:b} and from {late_replies:b} ({late_ms} ms{}), \
                 its client {}; then lost to {lost_again:b};",
                    kind.map_or_else(|| "write".to_owned(), |kind| kind.to_string()),
                    late_until.map_or_else(String::new, |moment| format!(", or until the next {moment:?}")),
                    if *vanish { "vanishes" } else { "is not heard" }
                )
            }
            Self::Suspend(Target::Host(host)) => write!(f, "{host} is suspended"),
            Self::Suspend(Target::CoordinatorOf(shard)) => write!(f, "the coordinator of shard {shard} is suspended"),
            Self::Pause(host) => write!(f, "{host} stands still"),
            Self::Crash { host, machine: false } => write!(f, "{host} is dead"),
            Self::Crash { host, machine: true } => write!(f, "{host} is dead with its machine"),
            Self::Restart(i) => write!(f, "coordinator {i} is asked to stop"),
            Self::Vanish(client) => write!(f, "client {client} vanishes, another one begins"),
            Self::Forsake { client, replicas } => {
                write!(f, "replicas {replicas:016b} hear no coordinator, then client {client} vanishes,")
            }
            Self::AuthorityDown => write!(f, "the authority is down"),
            Self::AuthoritySlow(ms) => write!(f, "the authority takes up to {ms} ms"),
            Self::RoleLost(shard) => write!(f, "the authority gives up on the coordinator of shard {shard}"),
            Self::Order(shard, Order::Add(i)) => write!(f, "the operator adds replica {i} to shard {shard}"),
            Self::Order(shard, Order::Remove(i)) => write!(f, "the operator removes replica {i} from shard {shard}"),
            Self::Order(shard, Order::Replace(i, j)) => {
                write!(f, "the operator replaces replica {i} of shard {shard} by {j}")
            }
            Self::Order(shard, Order::Transfer(i)) => {
                write!(f, "the operator hands shard {shard} over to coordinator {i}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_a_plan_and_plans_differ() {
        let text = |seed| format!("{:?}", Plan::new(seed));
        assert_eq!(text(7), text(7));
        assert_ne!(text(7), text(8));
    }

    #[test]
    fn every_kind_of_fault_is_planned_by_some_seed() {
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..200 {
            for planned in Plan::new(seed).faults {
                seen.insert(format!("{:?}", planned.fault).split(['(', ' ']).next().unwrap_or_default().to_owned());
            }
        }
        assert_eq!(seen.len(), 16, "{seen:?}");
    }
}
