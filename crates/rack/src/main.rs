//! The binary `underpass-rack`: the rack's commands alone, for machines that only host racks, and for tests.

use clap::Parser;
use underpass_rack::cli;

/// A virtual rack: hosts in network namespaces behind an XDP switch with faults
#[derive(Parser)]
#[command(name = "underpass-rack", version)]
struct Arguments {
    #[command(subcommand)]
    action: cli::Action,
}

fn main() -> std::process::ExitCode {
    match cli::run_in(Arguments::parse().action, &[]) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            std::process::ExitCode::FAILURE
        }
    }
}
