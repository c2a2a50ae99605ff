//! How long losses take to be over, with many items stored: without faults on links, so that nothing else counts.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use nix::sys::signal::Signal;
use underpass_bench::{
    driver::{Arrival, Task},
    process,
    report::{Machine, Table, count, median},
    system::{self, Size},
    workload::Workload,
};
use underpass_client::{Config, engine::Engine, engine::monotonic_ns};

use crate::{
    cluster::{CLIENT, COORDINATORS, Cluster, DataPath, REPLICAS, Role, SHARD, Settings, id},
    judge::{self, Pauses},
    load::{Clients, Keys},
};

/// How long anything may take that has to happen by itself, with a million items to copy.
const MAX: Duration = Duration::from_secs(180);
/// What runs before and after.
const QUIET: Duration = Duration::from_millis(500);
/// Requests under way while a copy is measured.
const CONCURRENCY: usize = 32;
/// Length of one look at the throughput.
const SLICE: Duration = Duration::from_millis(1000);
/// The lease of the role at the authority, which the time without a coordinator is compared with.
const TTL_MS: u64 = 2000;

/// What one round showed.
#[derive(Clone, Copy, Debug, Default)]
struct Round {
    replica_lost: Pauses,
    coordinator_lost: Pauses,
    handed_over: Pauses,
    upgraded: Option<Pauses>,
    /// Requests a second without and during a copy, items copied a second.
    without: f64,
    during: f64,
    copied: f64,
}

/// Measures, prints.
///
/// # Errors
/// What keeps it from being measured.
pub fn run(data_paths: &[DataPath], items: u64, rounds: usize) -> Result<()> {
    let workload = Workload { items, value_size: 64, ..Workload::default() };
    workload.validate()?;
    println!("{items} items of {} + {} bytes; {}", workload.key_size, workload.value_size, Machine::here());
    for &data_path in data_paths {
        let memory_mib = Size::memory_for(&workload) * 5 / 4 + 64;
        let cluster = &mut Cluster::up(Settings { data_path, faults: 0.0, memory_mib })?;
        let mut engines = vec![engine(cluster)?];
        eprintln!("{data_path}: loading ...");
        system::load(&mut engines, &task(&workload, 0, Duration::ZERO), None)?;
        let clients = Clients::connect(cluster)?;
        let mut seen = Vec::new();
        for round in 0..rounds {
            eprintln!("{data_path}: round {} of {rounds} ...", round + 1);
            seen.push(measure(cluster, &clients, &mut engines, &workload, round as u32)?);
        }
        print(data_path, &seen);
    }
    Ok(())
}

fn engine(cluster: &Cluster) -> Result<Engine> {
    let coordinators =
        (0..COORDINATORS).map(|index| cluster.address(Role::Coordinator(index))).collect::<Result<Vec<_>>>()?;
    let host = cluster.host(CLIENT)?;
    let config = Config { sessions: CONCURRENCY, bind: host.addr, ..Config::of_shard(SHARD, coordinators) };
    let mut engine = host.enter(|| Engine::new(&config))??;
    engine.open(Duration::from_secs(10))?;
    Ok(engine)
}

fn task(workload: &Workload, stream: u64, length: Duration) -> Task {
    Task {
        workload: *workload,
        arrival: Arrival::Closed(CONCURRENCY),
        length,
        warmup: Duration::ZERO,
        deadline: Duration::from_secs(10),
        stream,
    }
}

fn measure(
    cluster: &mut Cluster,
    clients: &Clients,
    engines: &mut [Engine],
    workload: &Workload,
    number: u32,
) -> Result<Round> {
    let mut round = Round::default();
    let leader = |cluster: &Cluster| cluster.leader().context("nobody serves");
    let replica = number as usize % REPLICAS;
    let mut stream = u64::from(number) * 256;
    let mut rate = |engines: &mut [Engine]| -> Result<f64> {
        stream += 1;
        Ok(system::perform("requests", engines, &task(workload, stream, SLICE), None)?.rate())
    };

    let mut without = vec![rate(engines)?, rate(engines)?, rate(engines)?];
    let member_is = |cluster: &Cluster, active: Option<bool>| {
        let status = cluster.leader().and_then(|leader| cluster.status(leader));
        status.is_some_and(|status| {
            status.members.iter().find(|member| member.id == id(replica)).map(|member| member.active) == active
        })
    };
    let (pauses, _) = window(clients, number * 8, || {
        cluster.crash(Role::Replica(replica))?;
        cluster.wait("the replica is not removed", MAX, || Ok(member_is(cluster, None)))
    })?;
    round.replica_lost = pauses;

    cluster.start(Role::Replica(replica))?;
    cluster.wait("the replica is not filled", MAX, || Ok(member_is(cluster, Some(false))))?;
    let began = Instant::now();
    let mut during = Vec::new();
    while !member_is(cluster, Some(true)) {
        during.push(rate(engines)?);
        process::check_interrupt()?;
    }
    round.copied = workload.items as f64 / began.elapsed().as_secs_f64();
    // The last look reaches beyond the end of the copy.
    if during.len() > 1 {
        during.pop();
    }
    round.during = median(during);
    cluster.await_health(MAX)?;
    // Before it and after it: what else this host does changes meanwhile.
    for _ in 0..3 {
        without.push(rate(engines)?);
    }
    round.without = median(without);

    let old = leader(cluster)?;
    let (pauses, ()) = window(clients, number * 8 + 1, || {
        cluster.crash(Role::Coordinator(old))?;
        cluster.await_leader(COORDINATORS - 1 - old, MAX)
    })?;
    round.coordinator_lost = pauses;
    cluster.start_all()?;
    cluster.await_health(MAX)?;

    let to = cluster.address(Role::Coordinator(old))?.to_string();
    let (pauses, ()) = window(clients, number * 8 + 2, || {
        cluster.operator(leader(cluster)?, &["coordinator", "transfer", "--to", &to])?;
        cluster.await_leader(old, MAX)
    })?;
    round.handed_over = pauses;
    cluster.await_health(MAX)?;

    if cluster.data_path() == DataPath::Xdp {
        let role = Role::Coordinator(old);
        let (pauses, ()) = window(clients, number * 8 + 3, || {
            cluster.signal(role, Signal::SIGHUP)?;
            cluster.await_end(role)?;
            cluster.start(role)?;
            cluster.await_leader(old, MAX)
        })?;
        round.upgraded = Some(pauses);
        cluster.await_health(MAX)?;
    }
    Ok(round)
}

/// What a light load sees while something is done.
fn window<T>(clients: &Clients, number: u32, act: impl FnOnce() -> Result<T>) -> Result<(Pauses, T)> {
    clients.take_history();
    let load = clients.start(&Keys::of(u32::MAX - number), u64::from(number));
    thread::sleep(QUIET);
    let start_ns = monotonic_ns();
    let done = act();
    let end_ns = monotonic_ns();
    thread::sleep(QUIET);
    load.stop();
    Ok((judge::pauses(&clients.take_history(), &(start_ns..end_ns)), done?))
}

fn print(data_path: DataPath, rounds: &[Round]) {
    let mut table = Table::new([data_path.to_string(), "median".into(), "worst".into(), "goal".into()]);
    let mut row = |what: &str, values: Vec<Duration>, goal: String| {
        let Some(worst) = values.iter().max() else { return };
        let typical = median(values.iter().map(Duration::as_secs_f64));
        table.row([
            what.to_owned(),
            format!("{:.1} ms", typical * 1000.0),
            format!("{:.1} ms", worst.as_secs_f64() * 1000.0),
            goal,
        ]);
    };
    let all = |of: fn(&Round) -> Duration| rounds.iter().map(of).collect::<Vec<_>>();
    row("replica lost, pause of reads", all(|round| round.replica_lost.reads), "50 ms".into());
    row("replica lost, pause of writes", all(|round| round.replica_lost.writes), "the lease, 1000 ms, + 100 ms".into());
    let goal = format!("the authority's lease, {TTL_MS} ms, + 300 ms");
    row("coordinator lost, pause of reads", all(|round| round.coordinator_lost.reads), goal.clone());
    row("coordinator lost, pause of writes", all(|round| round.coordinator_lost.writes), goal);
    row("handed over, pause of reads", all(|round| round.handed_over.reads), "20 ms".into());
    row("handed over, pause of writes", all(|round| round.handed_over.writes), "20 ms".into());
    let upgraded =
        |of: fn(&Pauses) -> Duration| rounds.iter().filter_map(|round| round.upgraded.as_ref()).map(of).collect();
    row("agent upgraded, pause of reads", upgraded(|pauses| pauses.reads), "a retransmission".into());
    row("agent upgraded, pause of writes", upgraded(|pauses| pauses.writes), "a retransmission".into());
    let ratios: Vec<f64> = rounds.iter().map(|round| round.during / round.without).collect();
    let worst = ratios.iter().copied().fold(f64::INFINITY, f64::min);
    table.row([
        "throughput during a copy / without".into(),
        format!("{:.2}", median(ratios)),
        format!("{worst:.2}"),
        "0.80".into(),
    ]);
    let of = |of: fn(&Round) -> f64| count(median(rounds.iter().map(of)));
    println!("{table}");
    println!(
        "{} requests/s without a copy, {} during it; {} items/s copied\n",
        of(|round| round.without),
        of(|round| round.during),
        of(|round| round.copied)
    );
}
