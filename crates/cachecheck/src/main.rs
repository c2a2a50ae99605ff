//! `underpass-judge`.

use clap::Parser;

fn main() -> anyhow::Result<std::process::ExitCode> {
    underpass_cachecheck::judge::Args::parse().run()
}
