//! `underpass bench` and `underpass demo`.

use anyhow::Result;
use clap::Subcommand;

use crate::coordinator::{self, CoordinatorArgs};
pub use crate::demo::{DemoArgs, run as run_demo};

/// Measures, always two sides in one run.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Compare data paths of the coordinator, with one core each, and the bare XDP_TX limit
    Coordinator(CoordinatorArgs),
}

/// Runs a benchmark and prints what it found.
///
/// # Errors
/// Whatever kept it from being measured.
pub fn run(command: Command) -> Result<()> {
    let text = match command {
        Command::Coordinator(args) => coordinator::run(&args)?.text(),
    };
    print!("{text}");
    Ok(())
}
