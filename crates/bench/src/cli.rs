//! `underpass bench` and `underpass demo`.

use anyhow::Result;
use clap::Subcommand;

pub use crate::demo::{DemoArgs, run as run_demo};
use crate::{
    cache::{self, CacheArgs},
    coordinator::{self, CoordinatorArgs},
    memory::{self, MemoryArgs},
    replica::{self, ReplicaArgs},
    ycsb::{self, YcsbArgs},
};

/// Measures, always two sides in one run.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Compare data paths of the coordinator, with one core each, and the bare XDP_TX limit
    Coordinator(CoordinatorArgs),
    /// Drive the whole system in a virtual rack: throughput, latencies, linearizability
    Ycsb(YcsbArgs),
    /// Compare GETs from one core of a replica with memcached over UDP on the same core
    Replica(ReplicaArgs),
    /// Compare GETs from memcached alone with those from it behind the cache in the kernel
    Cache(CacheArgs),
    /// Weigh a coordinator: at rest, over a long run, and what 100 starts and ends leave behind
    Memory(MemoryArgs),
}

/// Runs a benchmark and prints what it found.
///
/// # Errors
/// Whatever kept it from being measured.
pub fn run(command: Command) -> Result<()> {
    let text = match command {
        Command::Coordinator(args) => coordinator::run(&args)?.text(),
        Command::Replica(args) => replica::run(&args)?.text(),
        Command::Cache(args) => cache::run(&args)?.text(),
        Command::Memory(args) => memory::run(&args)?.text(),
        Command::Ycsb(args) => ycsb::run(&args)?.text(),
    };
    print!("{text}");
    Ok(())
}
