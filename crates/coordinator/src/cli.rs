//! `underpass coordinator`.

use std::{os::fd::AsFd, path::PathBuf, time::Duration};

use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{SigSet, Signal},
        signalfd::SignalFd,
    },
};
use tracing::{info, warn};
use underpass_datapath::attach::interface_index;

use crate::{
    admin,
    agent::Agent,
    config::{CONTROL_DEFAULT, Config, Options},
    stats,
};

/// Runs a coordinator, or asks one how it is.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a coordinator until SIGINT or SIGTERM. On SIGHUP it ends but leaves its kernel program at work, for the next one to
    /// go on with within a lease: an upgrade without a pause
    Run(RunArgs),
    /// Check a configuration without running it
    Check(RunArgs),
    /// Detach a coordinator that ended without doing so, and give up its tables
    Detach(DetachArgs),
    /// Show what a running coordinator counts, and how its replicas are
    Stats(StatsArgs),
}

/// Configuration: from a file, from options, or from both; options come first.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Configuration file (TOML)
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// What is set here.
    #[command(flatten)]
    pub options: Options,
}

/// Which attachment to remove.
#[derive(Debug, Args)]
pub struct DetachArgs {
    /// The interface, of the caller's network namespace
    #[arg(long, value_name = "DEV")]
    pub device: String,
}

/// Which coordinator to ask, and how to show the answer.
#[derive(Debug, Args)]
pub struct StatsArgs {
    /// The coordinator's control socket
    #[arg(long, value_name = "PATH", default_value = CONTROL_DEFAULT)]
    pub control: PathBuf,
    /// One JSON document on a line
    #[arg(long)]
    pub json: bool,
    /// Show it again and again after so long, with rates: 1s, 500ms
    #[arg(long, value_name = "INTERVAL", value_parser = parse_interval)]
    pub watch: Option<Duration>,
}

/// Runs a command.
pub fn run(command: Command) -> Result<()> {
    match command {
        Command::Run(args) => serve(args.into_config()?),
        Command::Check(args) => {
            let config = args.into_config()?;
            config.cluster_key()?;
            println!("all right: {} ({}), shards: {}", config.listen, config.datapath, config.shards.len());
            Ok(())
        }
        Command::Detach(args) => {
            let ifindex = interface_index(&args.device)?;
            if underpass_datapath::coordinator::detach_left(ifindex)? {
                println!("detached from {}; the tables are gone", args.device);
            } else {
                println!("no coordinator was left on {}", args.device);
            }
            Ok(())
        }
        Command::Stats(args) => show(&args),
    }
}

impl RunArgs {
    /// The configuration that file and options make together.
    pub fn into_config(self) -> Result<Config> {
        let file = self.config.as_deref().map(Options::read).transpose()?.unwrap_or_default();
        self.options.or(file).into_config()
    }
}

fn serve(config: Config) -> Result<()> {
    // Blocked before any thread starts: all inherit the mask, and the signals are read here.
    let signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]);
    signals.thread_block().context("blocking signals")?;
    let arrived = SignalFd::new(&signals).context("waiting for signals")?;
    let agent = Agent::start(config)?;
    let mut leaves = false;
    while !agent.is_finished() {
        let mut fds = [PollFd::new(arrived.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, PollTimeout::from(200u16)) {
            Ok(0) | Err(nix::errno::Errno::EINTR) => continue,
            Ok(_) => {}
            Err(error) => return Err(error).context("waiting for signals"),
        }
        if let Some(signal) = arrived.read_signal().context("reading a signal")? {
            leaves = signal.ssi_signo == Signal::SIGHUP as u32;
            info!("{}", Signal::try_from(signal.ssi_signo as i32).map_or("a signal", Signal::as_str));
            break;
        }
    }
    let report = if leaves { agent.leave()? } else { agent.stop()? };
    if !report.recorded && !leaves {
        warn!("the authority did not take in time that nothing is served here any more");
    }
    Ok(())
}

fn show(args: &StatsArgs) -> Result<()> {
    let mut before = None;
    loop {
        let now = admin::status(&args.control)?;
        if args.json {
            println!("{}", serde_json::to_string(&now)?);
        } else {
            let rates = before.as_ref().map(|before: &stats::Stats| {
                (before, now.uptime_ms.saturating_sub(before.uptime_ms).max(1) as f64 / 1000.0)
            });
            print!("{}", now.table(rates));
        }
        let Some(interval) = args.watch else { return Ok(()) };
        before = Some(now);
        std::thread::sleep(interval);
        if !args.json {
            println!();
        }
    }
}

/// `500ms`, `2s`, `1.5s` or a bare number of seconds.
fn parse_interval(text: &str) -> Result<Duration, String> {
    let (number, scale) = match (text.strip_suffix("ms"), text.strip_suffix('s')) {
        (Some(number), _) => (number, 0.001),
        (None, Some(number)) => (number, 1.0),
        (None, None) => (text, 1.0),
    };
    let seconds =
        number.parse::<f64>().map_err(|_| format!("`{text}` is not a time; write it like 1s or 500ms"))? * scale;
    if !(0.01..=3600.0).contains(&seconds) {
        return Err("it must be from 10ms to 3600s".to_owned());
    }
    Ok(Duration::from_secs_f64(seconds))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(subcommand)]
        command: Command,
    }

    fn config(line: &str) -> Result<Config> {
        match Cli::try_parse_from(line.split_whitespace())?.command {
            Command::Run(args) => args.into_config(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn one_shard_needs_no_file() {
        let config =
            config("coordinator run --member 127.0.0.1:5551 --member 127.0.0.1:5552 --cpus 0,1 --shard 3").unwrap();
        assert_eq!(config.shards[0].id, 3);
        assert_eq!(config.shards[0].members.len(), 2);
        assert_eq!(config.cpus, [0, 1]);
        assert!(super::tests::config("coordinator run --member 127.0.0.1").is_err());
        let config = super::tests::config("coordinator run --shard 3").unwrap();
        assert_eq!((config.shards[0].id, config.shards[0].members.len()), (3, 0), "its replicas are on record");
        assert!(super::tests::config("coordinator run").unwrap_err().to_string().contains("no shard"));
        let error = super::tests::config("coordinator run --config /no/such/file").unwrap_err();
        assert!(format!("{error:#}").contains("/no/such/file"));
    }

    #[test]
    fn intervals() {
        assert_eq!(parse_interval("1s"), Ok(Duration::from_secs(1)));
        assert_eq!(parse_interval("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(parse_interval("2"), Ok(Duration::from_secs(2)));
        for wrong in ["", "s", "1h", "0s", "-1s", "inf", "nan"] {
            assert!(parse_interval(wrong).is_err(), "{wrong}");
        }
    }
}
