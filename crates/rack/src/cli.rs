//! `underpass rack`.

use std::{env, os::unix::process::CommandExt, path::PathBuf, process, time::Duration};

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};

use crate::{Config, Fault, Links, Probability, Rack, Status, parse_hold};

/// What to do with a rack.
#[derive(Debug, Subcommand)]
pub enum Action {
    /// Start a rack
    Up {
        /// Its description; dist/examples/rack.toml shows all of it
        file: PathBuf,
    },
    /// End a rack, or remove what a crash left of it
    Down {
        /// The rack's name
        name: String,
    },
    /// Show a rack: hosts, addresses, processes, counters, faults
    Status {
        /// The rack's name; all racks if left out
        name: Option<String>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Run a command on a host
    Exec {
        /// The rack's name
        name: String,
        /// The host's name
        host: String,
        /// The command and its arguments
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    /// Change or show what the switch does to frames
    Fault {
        /// The rack's name
        name: String,
        /// What to do
        #[command(subcommand)]
        action: FaultAction,
    },
    /// Run the delay line of a rack's switch
    #[command(hide = true)]
    SwitchDaemon {
        /// The rack's name
        name: String,
    },
}

/// What to do about faults.
#[derive(Debug, Subcommand)]
pub enum FaultAction {
    /// Set the faults named; others stay as they are
    Set(FaultSet),
    /// Cut the links between groups of hosts: `partition a,b / c`
    Partition {
        /// Cut the way from the first group to the second only
        #[arg(long)]
        one_way: bool,
        /// Groups of hosts, separated by `/`; the hosts of a group by commas or spaces
        #[arg(required = true)]
        groups: Vec<String>,
    },
    /// End partitions; other faults stay
    Heal,
    /// End all faults
    Clear,
    /// Draw the random faults from this seed, from the start
    Seed {
        /// The seed
        seed: u64,
    },
    /// Show the faults of each link and what they did
    Show {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// Faults to set.
#[derive(Debug, Args)]
pub struct FaultSet {
    /// The sending host; any if left out
    #[arg(long, value_name = "HOST")]
    pub from: Option<String>,
    /// The receiving host; any if left out
    #[arg(long, value_name = "HOST")]
    pub to: Option<String>,
    /// How many frames are lost: 1% or 0.01
    #[arg(long, value_name = "SHARE")]
    pub loss: Option<Probability>,
    /// How many frames arrive twice
    #[arg(long, value_name = "SHARE")]
    pub duplicate: Option<Probability>,
    /// How many frames are overtaken by later ones
    #[arg(long, value_name = "SHARE")]
    pub reorder: Option<Probability>,
    /// How long those are held [default at first: 1ms]
    #[arg(long, value_name = "TIME", value_parser = parse_hold)]
    pub reorder_hold: Option<Duration>,
    /// How much later every frame arrives: 200us
    #[arg(long, value_name = "TIME", value_parser = parse_hold)]
    pub delay: Option<Duration>,
    /// The longest further delay, drawn for each frame
    #[arg(long, value_name = "TIME", value_parser = parse_hold)]
    pub jitter: Option<Duration>,
}

impl FaultSet {
    fn apply(&self, fault: &mut Fault) {
        fault.loss = self.loss.unwrap_or(fault.loss);
        fault.duplicate = self.duplicate.unwrap_or(fault.duplicate);
        fault.reorder = self.reorder.unwrap_or(fault.reorder);
        fault.reorder_hold = self.reorder_hold.unwrap_or(fault.reorder_hold);
        fault.delay = self.delay.unwrap_or(fault.delay);
        fault.jitter = self.jitter.unwrap_or(fault.jitter);
    }

    fn names_a_fault(&self) -> bool {
        self.loss.or(self.duplicate).or(self.reorder).is_some()
            || self.reorder_hold.or(self.delay).or(self.jitter).is_some()
    }
}

/// Does what the user asked for, in the binary `underpass`.
///
/// # Errors
/// What went wrong, and what to do.
pub fn run(action: Action) -> Result<()> {
    run_in(action, &["rack"])
}

/// As [`run`], in a binary where [`Action`] is found under other subcommands.
///
/// # Errors
/// As [`run`].
pub fn run_in(action: Action, prefix: &[&str]) -> Result<()> {
    match action {
        Action::Up { file } => up(&file, prefix),
        Action::Down { name } => {
            if crate::down(&name)? {
                println!("rack {name} is down");
            } else {
                println!("rack {name} was not up");
            }
            Ok(())
        }
        Action::Status { name, json } => status(name.as_deref(), json),
        Action::Exec { name, host, command } => {
            let (program, arguments) = command.split_first().context("there is no command")?;
            let error = Rack::open(&name)?.host(&host)?.command(program)?.args(arguments).exec();
            Err(error).with_context(|| format!("cannot run {program:?} on host {host:?}"))
        }
        Action::Fault { name, action } => fault(&Rack::open(&name)?, action),
        Action::SwitchDaemon { name } => Ok(crate::run_switch_daemon(&name)?),
    }
}

fn up(file: &std::path::Path, prefix: &[&str]) -> Result<()> {
    let config = Config::read(file)?;
    let mut daemon = process::Command::new(env::current_exe().context("cannot find this program's own file")?);
    daemon.args(prefix).args(["switch-daemon", &config.name]);
    let rack = Rack::up_detached(&config, daemon)?;
    for host in rack.hosts() {
        let addresses: Vec<_> = host.links.iter().map(|link| link.address.to_string()).collect();
        println!("{:<16} {}", host.name, addresses.join(" "));
    }
    println!("rack {} is up: underpass rack status {0}, underpass rack down {0}", rack.name());
    Ok(())
}

fn status(name: Option<&str>, json: bool) -> Result<()> {
    let names = name.map_or_else(Rack::list, |name| vec![name.into()]);
    let mut racks = Vec::new();
    for rack in &names {
        match Rack::open(rack).and_then(|rack| rack.status()) {
            Ok(status) => racks.push(status),
            // One that is damaged must not hide the others.
            Err(error) if name.is_none() => eprintln!("rack {rack}: {error}"),
            Err(error) => return Err(error.into()),
        }
    }
    if json {
        let text = if name.is_some() {
            serde_json::to_string_pretty(&racks[0])?
        } else {
            serde_json::to_string_pretty(&racks)?
        };
        println!("{text}");
        return Ok(());
    }
    if names.is_empty() {
        println!("no rack is up");
    }
    for (index, status) in racks.iter().enumerate() {
        if index > 0 {
            println!();
        }
        print_status(status);
    }
    Ok(())
}

/// Prints rows in columns as wide as their widest cell; numbers to the right.
fn print_table(head: &[&str], rows: &[Vec<String>]) {
    let width = |column: usize| {
        rows.iter().map(|row| row[column].chars().count()).chain([head[column].len()]).max().unwrap_or_default()
    };
    let widths: Vec<_> = (0..head.len()).map(width).collect();
    let print = |cells: &[String]| {
        let line: Vec<_> = cells
            .iter()
            .zip(&widths)
            .map(
                |(cell, &width)| {
                    if cell.parse::<u64>().is_ok() { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
                },
            )
            .collect();
        println!("  {}", line.join("  ").trim_end());
    };
    print(&head.iter().map(|cell| cell.to_string()).collect::<Vec<_>>());
    rows.iter().for_each(|row| print(row));
}

fn print_status(status: &Status) {
    println!("rack {} (seed {})", status.name, status.seed);
    let mut ports = Vec::new();
    let mut processes = Vec::new();
    for host in &status.hosts {
        for port in &host.ports {
            ports.push(vec![
                host.name.clone(),
                port.interface.clone(),
                format!("{}/{}", port.address, port.subnet.prefix_len()),
                port.mac.to_string(),
                if port.up { "up" } else { "down" }.into(),
                port.counts.rx_frames.to_string(),
                port.counts.tx_frames.to_string(),
                (port.counts.rx_unknown + port.counts.rx_malformed).to_string(),
                port.host_rx_dropped.to_string(),
                port.thread.as_ref().map_or("-".into(), |thread| thread.command.clone()),
            ]);
        }
        for process in &host.processes {
            processes.push(vec![host.name.clone(), process.pid.to_string(), process.command.clone()]);
        }
    }
    let head = [
        "host",
        "interface",
        "address",
        "mac",
        "state",
        "sent",
        "received",
        "undeliverable",
        "dropped",
        "receive thread",
    ];
    print_table(&head, &ports);
    if !processes.is_empty() {
        println!("processes");
        print_table(&["host", "pid", "command"], &processes);
    }
    let line = &status.delay_line;
    let process = line.process.as_ref().map_or("unknown".into(), |process| process.pid.to_string());
    let counts = &line.counts;
    println!(
        "delay line {} (process {process}): {} frames taken, {} held, {} sent, {} dropped",
        if line.running { "running" } else { "NOT RUNNING: faults other than loss and partitions do not work" },
        counts.taken,
        counts.held,
        counts.sent,
        counts.overflow + counts.failed
    );
    print_links(&status.links);
}

fn print_links(links: &[crate::LinkStatus]) {
    let rows: Vec<_> = links
        .iter()
        .filter(|link| !link.fault.is_none() || link.counts != Default::default())
        .map(|link| {
            let counts = &link.counts;
            let mut row = vec![format!("{} -> {}", link.from, link.to), link.fault.to_string()];
            let numbers = [
                counts.seen,
                counts.lost,
                counts.cut,
                counts.duplicated,
                counts.reordered,
                counts.delayed,
                counts.line_full,
            ];
            row.extend(numbers.map(|number| number.to_string()));
            row
        })
        .collect();
    if rows.is_empty() {
        println!("faults: none");
        return;
    }
    println!("faults");
    let head = ["link", "fault", "seen", "lost", "cut", "duplicated", "reordered", "delayed", "line full"];
    print_table(&head, &rows);
}

fn fault(rack: &Rack, action: FaultAction) -> Result<()> {
    match action {
        FaultAction::Set(set) => {
            if !set.names_a_fault() {
                bail!(
                    "there is no fault to set: name one or more of --loss, --duplicate, --reorder, --delay, --jitter"
                );
            }
            let links = Links { from: set.from.as_deref(), to: set.to.as_deref() };
            rack.change_fault(links, |fault| set.apply(fault))?;
        }
        FaultAction::Partition { one_way, groups } => {
            let groups = groups.join(" ");
            let groups: Vec<Vec<&str>> = groups
                .split('/')
                .map(|group| group.split([',', ' ']).filter(|name| !name.is_empty()).collect())
                .collect();
            let groups: Vec<&[&str]> = groups.iter().map(Vec::as_slice).collect();
            match groups.as_slice() {
                [from, to] if one_way => rack.partition_one_way(from, to)?,
                _ if one_way => bail!("--one-way needs two groups: partition --one-way a,b / c"),
                groups => rack.partition(groups)?,
            }
        }
        FaultAction::Heal => rack.heal()?,
        FaultAction::Clear => rack.clear_faults()?,
        FaultAction::Seed { seed } => rack.set_seed(seed)?,
        FaultAction::Show { json: true } => {
            println!("{}", serde_json::to_string_pretty(&rack.links()?)?);
            return Ok(());
        }
        FaultAction::Show { json: false } => {}
    }
    print_links(&rack.links()?);
    Ok(())
}
