//! `underpass demo cache`: a stock memcached, alone and with the cache in the kernel; then everything that its clients do at once,
//! and whether what they are told is in order.

use std::net::{Ipv4Addr, SocketAddrV4};

use anyhow::{Context, Result, ensure};
use clap::Args;
use underpass_bench::{
    cache::{self, CacheArgs},
    process::{self, Directory},
    workload::Popularity,
};

use crate::{
    mixed::{self, Mix, Place},
    server::{self, Options, PORT, Server},
};

/// Operations of one client in a round of the demonstration.
const OPERATIONS: usize = 2000;

/// Options of `underpass demo cache`.
#[derive(Clone, Debug, Args)]
pub struct CacheDemoArgs {
    /// Seconds of each measurement; there are three
    #[arg(long, default_value_t = 3.0)]
    pub seconds: f64,
    /// Size of the cache, in MiB
    #[arg(long, default_value_t = 64)]
    pub memory: u32,
    /// Rounds of mixed commands by twelve clients, each checked for linearizability
    #[arg(long, default_value_t = 10)]
    pub rounds: usize,
}

/// Runs the demonstration; prints as it goes.
///
/// # Errors
/// Whatever does not work; also a history that is not linearizable.
pub fn run(args: &CacheDemoArgs) -> Result<()> {
    ensure!(args.seconds > 0.0 && args.rounds > 0, "--seconds and --rounds must be more than 0");
    process::catch_interrupts()?;
    eprintln!(
        "memcached on one core, its clients on the other: without the cache, with one and two threads, and with it ..."
    );
    let measured = cache::run(&CacheArgs {
        seconds: args.seconds,
        warmup: args.seconds,
        rounds: 1,
        items: 100_000,
        workload: Popularity::Zipf(0.99),
        gets_per_set: vec![30],
        memory: vec![args.memory],
        coalesce: cache::COALESCE_US,
        ways: vec![4],
        part: cache::Part::Gets,
        seed: 1,
        memcached: "memcached".into(),
        json: None,
    })?;
    println!("{}", measured.text());

    let mix = Mix { udp: 6, local: 2, tcp: [2, 1, 1], rounds: args.rounds, operations: OPERATIONS, ..Mix::default() };
    eprintln!(
        "A rack of three hosts. Twelve clients of every kind at once, in all three protocols, two of them local ..."
    );
    let rack = server::rack("cachedemo")?;
    let logs = Directory::new()?;
    let host = rack.host("fast")?;
    let mut server = Server::start(&host, &Options { threads: 4, ..Options::default() }, &logs)?;
    server.attach(&["--memory", &args.memory.to_string()])?;
    let place = Place {
        client: rack.host("client")?,
        front: server.address(),
        server: (host, SocketAddrV4::new(Ipv4Addr::LOCALHOST, PORT)),
    };
    let judged = mixed::run(&mix, &place)?;
    let stats = server.stats()?;
    let hits = stats["kernel"]["hits"].as_u64().context("the cache counts no hits")?;
    println!(
        "{} operations of get, set, add, replace, append, prepend, cas, incr, decr and delete; {} reads found their item, {hits} \
         of them in the kernel.",
        judged.operations, judged.found
    );
    if let Some(report) = judged.bad.first() {
        println!("{report}");
    }
    ensure!(judged.bad.is_empty(), "the history is not proved linearizable");
    println!("linearizable: one order of operations explains every answer");
    server.detach()?;
    let alone = mixed::run(&Mix { rounds: 1, seed: 2, ..mix }, &place)?;
    ensure!(alone.bad.is_empty() && alone.found > 0, "memcached does not work as before");
    println!("Detached: memcached goes on alone, with all that it has.");
    server.end()?;
    rack.down()?;
    eprintln!("Nothing is left of it.");
    Ok(())
}
