//! `underpass bench` and `underpass demo`.

use anyhow::Result;
use clap::Subcommand;

pub use crate::demo::{DemoArgs, run as run_demo};
use crate::{
    coordinator::{self, CoordinatorArgs},
    ycsb::{self, YcsbArgs},
};

/// Measures, always two sides in one run.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Compare data paths of the coordinator, with one core each, and the bare XDP_TX limit
    Coordinator(CoordinatorArgs),
    /// Drive the whole system in a virtual rack: throughput, latencies, linearizability
    Ycsb(YcsbArgs),
}

/// Runs a benchmark and prints what it found.
///
/// # Errors
/// Whatever kept it from being measured.
pub fn run(command: Command) -> Result<()> {
    let text = match command {
        Command::Coordinator(args) => coordinator::run(&args)?.text(),
        Command::Ycsb(args) => ycsb::run(&args)?.text(),
    };
    print!("{text}");
    Ok(())
}
