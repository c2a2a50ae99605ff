//! The binary `underpass`.

use std::{io::IsTerminal, process::ExitCode};

use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

/// A strongly consistent, replicated in-memory key-value store whose hot path runs under the network stack
#[derive(Debug, Parser)]
#[command(name = "underpass", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    #[command(flatten)]
    Client(underpass_client::cli::Command),
    /// Run a coordinator, or ask one how it is
    #[command(subcommand)]
    Coordinator(underpass_coordinator::cli::Command),
    /// Run a replica
    Replica(underpass_replica::cli::Args),
    /// Show counters and contents of a running replica
    ReplicaStats(underpass_replica::cli::StatsArgs),
    /// Run a virtual rack: hosts in network namespaces behind a switch with faults
    #[command(subcommand)]
    Rack(underpass_rack::cli::Action),
    /// Check recorded histories for linearizability
    Check(underpass_check::cli::Args),
    /// Measure
    #[command(subcommand)]
    Bench(underpass_bench::cli::Command),
    /// Show a replicated rack at work, measure it, check it, and leave nothing behind
    Demo(underpass_bench::cli::DemoArgs),
}

fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Client(command) => return underpass_client::cli::run(command),
        Command::Coordinator(command) => underpass_coordinator::cli::run(command)?,
        Command::Replica(args) => underpass_replica::cli::run(args)?,
        Command::ReplicaStats(args) => underpass_replica::cli::run_stats(args)?,
        Command::Rack(action) => underpass_rack::cli::run(action)?,
        Command::Check(args) => underpass_check::cli::run(&args)?,
        Command::Bench(command) => underpass_bench::cli::run(command)?,
        Command::Demo(args) => underpass_bench::cli::run_demo(&args)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            // Printed where it belongs: help to the output, mistakes to the error output.
            let _ = error.print();
            // clap's own code for mistakes, 2, tells users of a client command that a write failed without effect.
            return if error.use_stderr() { underpass_client::cli::EXIT_USAGE.into() } else { ExitCode::SUCCESS };
        }
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .init();
    match run(arguments.command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
