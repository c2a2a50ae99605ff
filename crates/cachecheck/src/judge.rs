//! `underpass-judge`: mixed histories of memcached's clients with the cache in front, as many as asked for, judged.

use std::{
    net::{Ipv4Addr, SocketAddrV4},
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use clap::Parser;
use underpass_bench::process::Directory;

use crate::{
    mixed::{self, Judged, Mix, Place},
    server::{self, Options, PORT, Server},
};

/// memcached's worker threads.
const THREADS: usize = 4;
/// memcached's memory for items, in MiB; the least that it takes where it is to evict.
const MEMORY_MIB: usize = 64;
const MEMORY_MIB_PRESSED: usize = 2;

/// Runs mixed histories of all commands against memcached with the cache in front of it, and checks that each is linearizable.
#[derive(Debug, Parser)]
#[command(version)]
pub struct Args {
    /// Operations to check, over all mixes.
    #[arg(long, default_value_t = 1_000_000)]
    operations: u64,
    /// No round begins after this many seconds, over all mixes.
    #[arg(long, default_value_t = u64::MAX)]
    seconds: u64,
    /// Connections of each protocol, and clients on the server's host; three times as many clients send datagrams. Numbers of keys
    /// grow with it.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=16))]
    clients: u16,
    /// What random choices come from.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only these mixes; several times for several.
    #[arg(long = "mix", value_parser = MIXES.map(|(name, _)| name))]
    mixes: Vec<String>,
}

/// What a mix has that others have not.
type Change = fn(Mix) -> Mix;

/// What is judged, by name.
const MIXES: [(&str, Change); 5] = [
    ("mixed", |all| all),
    ("rough", |all| Mix { lossy: true, operations: 1000, ..all }),
    ("lives", |all| Mix { lifetimes: true, operations: 8000, ..all }),
    ("evicts", |all| Mix { pressure: 2, ..all }),
    ("flushes", |all| Mix { flushes: true, ..all }),
];

/// One mix, judged.
#[derive(Debug)]
pub struct Verdict {
    /// What clients were told.
    pub judged: Judged,
    /// Requests that the kernel answered.
    pub hits: u64,
    /// Everything that the cache counted.
    pub stats: serde_json::Value,
}

/// Puts up a rack with memcached and the cache in front of it, and has clients talk to it until it is enough.
///
/// # Errors
/// When something does not come up, or says what no memcached says.
pub fn judge(name: &str, mix: &Mix, enough: impl Fn(usize, u64) -> bool) -> Result<Verdict> {
    let rack = server::rack(name)?;
    if mix.lossy {
        server::make_rough(&rack)?;
    }
    let logs = Directory::new()?;
    let memory_mib = if mix.pressure > 0 { MEMORY_MIB_PRESSED } else { MEMORY_MIB };
    let host = rack.host("fast")?;
    let mut server = Server::start(&host, &Options { threads: THREADS, memory_mib, still: false }, &logs)?;
    server.attach(&[])?;
    let place = Place {
        client: rack.host("client")?,
        front: server.address(),
        server: (host, SocketAddrV4::new(Ipv4Addr::LOCALHOST, PORT)),
    };
    let judged = mixed::run_until(mix, &place, enough)?;
    let stats = server.stats()?;
    let hits = stats["kernel"]["hits"].as_u64().context("the cache counts no hits")?;
    server.end()?;
    rack.down()?;
    Ok(Verdict { judged, hits, stats })
}

impl Args {
    /// Does it. Failure: something was not linearizable, or nothing was judged.
    ///
    /// # Errors
    /// As [`judge`].
    pub fn run(&self) -> Result<ExitCode> {
        let mixes: Vec<_> = MIXES
            .iter()
            .filter(|(name, _)| self.mixes.is_empty() || self.mixes.iter().any(|only| only == name))
            .collect();
        let (share, seconds) = (self.operations / mixes.len() as u64, self.seconds / mixes.len() as u64);
        let (mut total, mut checking, mut good) = ([0; 6], Duration::ZERO, true);
        println!(
            "{:<8} {:>10} {:>8} {:>9} {:>9} {:>13} {:>10} {:>7} {:>8} {:>8}",
            "mix",
            "operations",
            "found",
            "not there",
            "no answer",
            "by the kernel",
            "violations",
            "seconds",
            "checking",
            "rate/s"
        );
        let line = |name: &str, counts: &[u64; 6], took: Duration, checking: Duration| {
            let [operations, found, missed, unknown, hits, bad] = counts;
            let (seconds, checking) = (took.as_secs_f64(), checking.as_secs_f64());
            let rate = *operations as f64 / seconds;
            println!(
                "{name:<8} {operations:>10} {found:>8} {missed:>9} {unknown:>9} {hits:>13} {bad:>10} {seconds:>7.1} {checking:>8.1} {rate:>8.0}",
            );
        };
        let started = Instant::now();
        for (name, mix) in mixes {
            let n = usize::from(self.clients);
            let all = Mix { seed: self.seed, udp: 3 * n, tcp: [n; 3], local: n, keys: 64 * n, ..Mix::default() };
            let begun = Instant::now();
            let verdict = judge(&format!("judge-{name}"), &mix(all), |_, operations| {
                operations >= share || begun.elapsed().as_secs() >= seconds
            })?;
            let judged = &verdict.judged;
            let bad = judged.bad.len() as u64;
            let counts = [judged.operations, judged.found, judged.missed, judged.unknown, verdict.hits, bad];
            line(name, &counts, begun.elapsed(), judged.checking);
            checking += judged.checking;
            total.iter_mut().zip(counts).for_each(|(total, count)| *total += count);
            for report in &judged.bad {
                println!(
                    "{report}\nThe history is {}\n{:#}",
                    judged.keep(&format!("judge-{name}"))?.display(),
                    verdict.stats
                );
            }
            good &= bad == 0 && judged.found > 0 && verdict.hits > 0;
        }
        line("all", &total, started.elapsed(), checking);
        Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}
