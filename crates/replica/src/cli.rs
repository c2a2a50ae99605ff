//! `underpass replica` and `underpass replica-stats`.

use std::{
    net::{Ipv4Addr, SocketAddrV4},
    os::fd::AsFd,
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{SigSet, Signal},
        signalfd::{SfdFlags, SignalFd},
    },
};
use underpass_abi::wire::UP_PORT_DEFAULT;

pub use crate::control::ask;
use crate::{Options, Replica, cluster_key};

const PORT: u16 = UP_PORT_DEFAULT as u16;

/// Runs a replica: it holds the items of one shard and answers reads. It waits for a coordinator to take it on.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Address and port to serve at: the ones that the coordinator's configuration names.
    #[arg(long, value_name = "ADDR:PORT", default_value_t = SocketAddrV4::new(Ipv4Addr::LOCALHOST, PORT))]
    listen: SocketAddrV4,
    /// Memory for items in MiB, versions and table included. When it is used up, writes that need more are refused;
    /// nothing is ever evicted.
    #[arg(long, value_name = "MIB", default_value_t = 1024)]
    memory: u64,
    /// Items to copy a second at most when this replica is filled from another, so that clients notice little; 0: as fast as
    /// it goes.
    #[arg(long, value_name = "N", default_value_t = crate::COPY_RATE)]
    copy_rate: u32,
    /// Threads, each with a socket of its own [default: one for each of --cpus, else 1].
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// CPUs to pin the threads to, as in 0,2-3 [default: not pinned].
    #[arg(long, value_name = "LIST", value_parser = cpu_list)]
    cpus: Option<CpuList>,
    /// Microseconds to poll the network device before sleeping: less latency, more CPU. Needs CAP_NET_ADMIN.
    #[arg(long, value_name = "US", default_value_t = 0)]
    busy_poll: u32,
    /// Control socket [default: /run/underpass/replica-PORT.sock].
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
    /// File with the cluster's key, the same for all agents and replicas: 32 hexadecimal digits, or 16 bytes. Without one
    /// the network between them must be trusted.
    #[arg(long, value_name = "FILE")]
    cluster_key_file: Option<PathBuf>,
}

/// Shows counters and contents of a running replica.
#[derive(Clone, Debug, clap::Args)]
pub struct StatsArgs {
    /// Control socket of the replica.
    #[arg(long, value_name = "PATH", default_value_os_t = control_path(PORT))]
    control: PathBuf,
    /// One line of JSON, every counter included.
    #[arg(long)]
    json: bool,
}

/// CPU numbers of a list such as `0,2-3`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuList(pub Vec<usize>);

fn cpu_list(text: &str) -> Result<CpuList, String> {
    let number = |text: &str| {
        text.trim().parse::<usize>().map_err(|_| format!("{text:?} is no CPU number; a list looks like 0,2-3"))
    };
    let mut cpus = Vec::new();
    for part in text.split(',') {
        let (first, last) = match part.split_once('-') {
            Some((first, last)) => (number(first)?, number(last)?),
            None => (number(part)?, number(part)?),
        };
        if first > last || last > 4095 {
            return Err(format!("{part:?} is no range of CPUs; a list looks like 0,2-3"));
        }
        cpus.extend(first..=last);
    }
    Ok(CpuList(cpus))
}

/// Where the control socket of a replica at this port is by default.
pub fn control_path(port: u16) -> PathBuf {
    Path::new("/run/underpass").join(format!("replica-{port}.sock"))
}

/// `underpass replica`: runs until SIGINT or SIGTERM.
///
/// # Errors
/// Whatever keeps the replica from starting or from going on.
pub fn run(args: Args) -> anyhow::Result<()> {
    let cpus = args.cpus.map_or(Vec::new(), |list| list.0);
    until_signal(Options {
        listen: args.listen,
        memory_mib: args.memory,
        copy_rate: args.copy_rate,
        threads: args.threads.unwrap_or(cpus.len().max(1)),
        cpus,
        busy_poll_us: args.busy_poll,
        control: Some(args.control.unwrap_or_else(|| control_path(args.listen.port()))),
        cluster_key: args.cluster_key_file.as_deref().map(cluster_key).transpose()?,
    })
}

pub(crate) fn until_signal(options: Options) -> anyhow::Result<()> {
    // Blocked before any thread starts, so that all inherit it and the signals arrive here.
    let signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM]);
    signals.thread_block().context("cannot block SIGINT and SIGTERM")?;
    let arrived = SignalFd::with_flags(&signals, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)
        .context("cannot wait for SIGINT and SIGTERM")?;

    let memory_mib = options.memory_mib;
    let replica = Replica::start(options)?;
    tracing::info!(
        "replica at {}, {memory_mib} MiB, incarnation {}: waiting for a coordinator",
        replica.local_addr(),
        replica.core().incarnation()
    );
    while !replica.failed() {
        let mut waiting = [PollFd::new(arrived.as_fd(), PollFlags::POLLIN)];
        match poll(&mut waiting, PollTimeout::from(200u8)) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(error).context("cannot wait for SIGINT and SIGTERM"),
        }
        if let Ok(Some(signal)) = arrived.read_signal() {
            let name = Signal::try_from(signal.ssi_signo as i32).map_or("a signal", Signal::as_str);
            tracing::info!("{name}: stopping");
            break;
        }
    }
    replica.stop()?;
    Ok(())
}

/// `underpass replica-stats`.
///
/// # Errors
/// When no replica answers at the control socket.
pub fn run_stats(args: StatsArgs) -> anyhow::Result<()> {
    let (line, stats) = match ask(&args.control) {
        Ok(answer) => answer,
        Err(error) => bail!(
            "no replica answers at {}: {error}; is it running, with this --control, and may you read the socket?",
            args.control.display()
        ),
    };
    if args.json {
        print!("{line}");
    } else {
        print!("{stats}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists() {
        assert_eq!(cpu_list("0,2-3"), Ok(CpuList(vec![0, 2, 3])));
        for wrong in ["", "a", "3-1", "1-", "-", "0-9999"] {
            assert!(cpu_list(wrong).is_err(), "{wrong}");
        }
    }
}
