//! The binary `underpass`.

mod admin;

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
    /// Run a coordinator, ask one how it is, or have it hand a shard over
    #[command(subcommand)]
    Coordinator(Coordinator),
    /// Run a replica
    Replica(underpass_replica::cli::Args),
    /// Show counters and contents of a running replica
    ReplicaStats(underpass_replica::cli::StatsArgs),
    /// Tell how a coordinator and its shards are: what is wrong, and what to do, first
    Status(admin::StatusArgs),
    /// Show or change which replicas take part in a shard
    #[command(subcommand)]
    Members(admin::Members),
    /// Put shards on record, show them, or give one's data up
    #[command(subcommand)]
    Shard(admin::Shard),
    /// Run a virtual rack: hosts in network namespaces behind a switch with faults
    #[command(subcommand)]
    Rack(underpass_rack::cli::Action),
    /// Put a coherent cache in the kernel in front of a stock memcached
    #[command(subcommand)]
    Cache(underpass_cache::cli::Command),
    /// Check recorded histories for linearizability
    Check(underpass_check::cli::Args),
    /// Measure
    #[command(subcommand)]
    Bench(underpass_bench::cli::Command),
    /// Show a replicated rack at work, measure it, check it, and leave nothing behind
    Demo(Demo),
    /// Break a replicated rack on purpose, under load, and check what clients saw
    Drill(underpass_drill::cli::DrillArgs),
}

#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
struct Demo {
    #[command(flatten)]
    rack: underpass_bench::cli::DemoArgs,
    #[command(subcommand)]
    other: Option<OtherDemo>,
}

#[derive(Debug, Subcommand)]
enum OtherDemo {
    /// Show a stock memcached with the cache in the kernel in front of it, check it, and leave nothing behind
    Cache(underpass_cachecheck::demo::CacheDemoArgs),
}

#[derive(Debug, Subcommand)]
enum Coordinator {
    #[command(flatten)]
    Agent(Box<underpass_coordinator::cli::Command>),
    /// Hand a shard over to another coordinator, without losing a request
    Transfer(admin::TransferArgs),
}

fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Client(command) => return underpass_client::cli::run(command),
        Command::Coordinator(Coordinator::Agent(command)) => underpass_coordinator::cli::run(*command)?,
        Command::Coordinator(Coordinator::Transfer(args)) => admin::transfer(&args)?,
        Command::Replica(args) => underpass_replica::cli::run(args)?,
        Command::ReplicaStats(args) => underpass_replica::cli::run_stats(args)?,
        Command::Rack(action) => underpass_rack::cli::run(action)?,
        Command::Cache(command) => underpass_cache::cli::run(command)?,
        Command::Check(args) => underpass_check::cli::run(&args)?,
        Command::Bench(command) => underpass_bench::cli::run(command)?,
        Command::Demo(Demo { other: Some(OtherDemo::Cache(args)), .. }) => underpass_cachecheck::demo::run(&args)?,
        Command::Demo(Demo { rack, other: None }) => underpass_bench::cli::run_demo(&rack)?,
        Command::Drill(args) => underpass_drill::cli::run(&args)?,
        Command::Status(args) => admin::show_status(&args)?,
        Command::Members(action) => admin::members(action)?,
        Command::Shard(action) => admin::shard(action)?,
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
