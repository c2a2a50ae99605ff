//! `underpass-sim`.

use clap::Parser;

fn main() -> anyhow::Result<std::process::ExitCode> {
    underpass_sim::cli::Args::parse().run()
}
