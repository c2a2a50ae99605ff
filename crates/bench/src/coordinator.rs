//! `underpass bench coordinator`: data paths of the coordinator against each other, and against the bare `XDP_TX` limit,
//! each with one core to itself.

use std::{
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::Serialize;

use crate::{
    bed::{self, Bed, COORDINATOR_CORE, Contender, Reflector, SHARD, Sample, Started},
    load::{Load, Session},
    plot::{self, Group},
    process::{self, Daemon, Directory, STOP},
    report::{self, Machine, Ratio, Spread, Table},
    workload::{Popularity, Workload},
};

/// Options of `underpass bench coordinator`.
#[derive(Clone, Debug, Args)]
pub struct CoordinatorArgs {
    /// Data paths to compare
    #[arg(long, value_delimiter = ',', default_value = "xdp,socket")]
    pub datapath: Vec<DataPath>,
    /// Write paths of the xdp data path to compare
    #[arg(long, value_delimiter = ',', default_value = "broadcast,tc,published")]
    pub write_path: Vec<WritePath>,
    /// Shares of writes, in percent
    #[arg(long, value_delimiter = ',', default_value = "0,5,100")]
    pub write_ratio: Vec<f64>,
    /// Popularities of items: uniform, or zipf and an exponent
    #[arg(long, value_delimiter = ',', default_value = "uniform,zipf0.99")]
    pub workload: Vec<Popularity>,
    /// Seconds measured for each workload, data path and round
    #[arg(long, default_value_t = 3.0)]
    pub seconds: f64,
    /// Rounds: in each, all data paths take their turn; the median over the rounds counts
    #[arg(long, default_value_t = 3)]
    pub rounds: usize,
    /// Replicas that every write goes to, 1 to 8
    #[arg(long, default_value_t = 3)]
    pub replicas: u8,
    /// Number of items
    #[arg(long, default_value_t = 1_000_000)]
    pub items: u64,
    /// Bytes of a key
    #[arg(long, default_value_t = 16)]
    pub key_size: usize,
    /// Bytes of a value
    #[arg(long, default_value_t = 128)]
    pub value_size: usize,
    /// Seed of everything random
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Leave out the bare XDP_TX limit
    #[arg(long)]
    pub no_bare: bool,
    /// Write the results here, as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write a plot here, as SVG
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
}

macro_rules! named {
    ($(#[$meta:meta])* $name:ident: $($variant:ident = $text:literal, $doc:literal;)+) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
        #[serde(rename_all = "lowercase")]
        pub enum $name {
            $(#[doc = $doc] $variant,)+
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $(Self::$variant => $text,)+ })
            }
        }

        impl FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                match text {
                    $($text => Ok(Self::$variant),)+
                    _ => Err(format!("{text:?} is none of: {}", [$($text),+].join(", "))),
                }
            }
        }
    };
}

named! {
    /// A data path of the coordinator.
    DataPath:
    Xdp = "xdp", "In the kernel.";
    Socket = "socket", "Batched UDP sockets.";
}

named! {
    /// How the xdp data path propagates writes.
    WritePath:
    Broadcast = "broadcast", "Cloned inside XDP.";
    Tc = "tc", "Cloned at TC ingress.";
    Published = "published", "Forwarded by user space, cloned at TC egress.";
}

/// A coordinator of this project, in a process of its own.
#[derive(Clone, Debug)]
pub struct Underpass {
    /// Data path.
    pub data_path: DataPath,
    /// Write path, of xdp.
    pub write_path: WritePath,
    /// The program `underpass`.
    pub program: PathBuf,
    /// Sessions to open.
    pub sessions: usize,
}

impl Contender for Underpass {
    fn name(&self) -> String {
        match (self.data_path, self.write_path) {
            (DataPath::Socket, _) => "socket".into(),
            (DataPath::Xdp, WritePath::Broadcast) => "xdp".into(),
            (DataPath::Xdp, write_path) => format!("xdp ({write_path})"),
        }
    }

    fn start(&self, bed: &Bed, _: &Load) -> Result<Box<dyn Started>> {
        self.launch(bed)
    }
}

impl Underpass {
    /// Starts it and waits until its agent answers.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn launch(&self, bed: &Bed) -> Result<Box<dyn Started>> {
        if self.data_path == DataPath::Socket {
            // Without an XDP program, a veth takes frames from another's XDP only if GRO gives it a NAPI.
            bed.coordinator.set_gro(&bed.coordinator_device, true)?;
        }
        let mut started = self.spawn(bed)?;
        let socket = started.directory.path.join("control.sock");
        started.daemon.wait_for(&socket, Duration::from_secs(20))?;
        Ok(Box::new(started))
    }

    fn spawn(&self, bed: &Bed) -> Result<StartedUnderpass> {
        let directory = Directory::new()?;
        let mut command = bed::command(&bed.coordinator, &self.program, COORDINATOR_CORE)?;
        command.args(["coordinator", "run", "--listen", &bed.addresses.coordinator.to_string()]);
        command.args(["--datapath", &self.data_path.to_string()]);
        match self.data_path {
            DataPath::Xdp => command.args(["--write-path", &self.write_path.to_string()]),
            DataPath::Socket => command.args(["--cpus", &COORDINATOR_CORE.to_string()]),
        };
        command.args(["--shard", &SHARD.to_string()]);
        for index in 0..bed.addresses.replicas {
            command.args(["--member", &bed.addresses.replica(index).to_string()]);
        }
        // A long run leaves sessions without a request of their own for a while.
        command.args(["--idle-ms", "600000"]);
        // The sinks' agents share a core with a generator that never rests: they are late, not lost.
        command.args(["--suspect-ms", "10000", "--lost-ms", "30000", "--lease-ms", "50000"]);
        command.arg("--state").arg(directory.path.join("state"));
        command.arg("--control").arg(directory.path.join("control.sock"));
        let daemon = Daemon::start(format!("the coordinator ({})", self.name()), command, directory.path.join("log"))?;
        Ok(StartedUnderpass {
            daemon,
            directory,
            sessions: self.sessions,
            stack: self.data_path == DataPath::Socket || self.write_path != WritePath::Broadcast,
        })
    }
}

struct StartedUnderpass {
    daemon: Daemon,
    directory: Directory,
    sessions: usize,
    stack: bool,
}

impl Started for StartedUnderpass {
    fn processes(&self) -> Vec<u32> {
        vec![self.daemon.id()]
    }

    fn offloads_checksums(&self) -> bool {
        self.stack
    }

    fn sessions(&self, bed: &Bed) -> Result<(u32, Vec<Session>)> {
        bed.open_sessions(self.sessions).with_context(|| format!("it said:\n{}", self.daemon.said()))
    }

    fn stop(mut self: Box<Self>) -> Result<()> {
        self.daemon.stop(STOP)
    }
}

/// Results of one contender on one workload.
#[derive(Clone, Debug, Serialize)]
pub struct Cell {
    /// The contender's name.
    pub contender: String,
    /// The workload.
    pub workload: Workload,
    /// Requests completed in a second.
    pub rate: Spread,
    /// Share of its core that the coordinator's side used, 0 to 1.
    pub utilisation: Spread,
    /// Requests completed in a second of the core that was used: what one core can do.
    pub per_core_second: Spread,
    /// Requests rejected, in all rounds.
    pub rejected: u64,
    /// Writes sent again for want of an answer, in all rounds.
    pub sent_again: u64,
}

/// Everything that `underpass bench coordinator` found.
#[derive(Clone, Debug, Serialize)]
pub struct CoordinatorReport {
    /// Where.
    pub machine: Machine,
    /// Seconds for each cell and round.
    pub seconds: f64,
    /// Rounds.
    pub rounds: usize,
    /// Replicas.
    pub replicas: u8,
    /// Results.
    pub cells: Vec<Cell>,
    /// What they come to.
    pub ratios: Vec<Ratio>,
}

impl CoordinatorReport {
    /// What is printed at the end.
    pub fn text(&self) -> String {
        let mut table =
            Table::new(["coordinator", "workload", "requests/s", "core busy", "per core-second", "lowest", "highest"]);
        for cell in &self.cells {
            table.row([
                cell.contender.clone(),
                cell.workload.label(),
                report::count(cell.rate.median),
                format!("{:.0} %", cell.utilisation.median * 100.0),
                report::count(cell.per_core_second.median),
                report::count(cell.per_core_second.min),
                report::count(cell.per_core_second.max),
            ]);
        }
        let mut text = format!(
            "\nCoordinators on one core each ({}; {} replicas; medians of {} rounds of {} s)\n\n{table}\n",
            self.machine, self.replicas, self.rounds, self.seconds
        );
        text += "A request is completed when a read has left for a replica, or a write was acknowledged by every replica\n\
                 and answered. \"Core busy\" is the share of its core that the coordinator used: interrupt work of its\n\
                 device and all threads of its process. Below 100 % the load generator, on the other core, was the limit;\n\
                 \"per core-second\" is what one full core would complete, and what is compared:\n\n";
        text += &report::ratios_table(&self.ratios).to_string();
        text
    }
}

fn ratios(cells: &[Cell]) -> Vec<Ratio> {
    let value = |contender: &str, write_percent: f64, popularity: Popularity| {
        cells
            .iter()
            .find(|cell| {
                cell.contender == contender
                    && cell.workload.write_percent == write_percent
                    && cell.workload.popularity == popularity
            })
            .map(|cell| cell.per_core_second.median)
    };
    let (uniform, zipf) = (Popularity::Uniform, Popularity::Zipf(0.99));
    let wanted = [
        ("reads: xdp / bare XDP_TX", ("xdp", 0.0, uniform), (Reflector::NAME, 0.0, uniform), "0.90 or more"),
        ("5 % writes: xdp / socket", ("xdp", 5.0, uniform), ("socket", 5.0, uniform), "10 or more (Dalio: 2.05)"),
        ("5 % writes, xdp: zipf0.99 / uniform", ("xdp", 5.0, zipf), ("xdp", 5.0, uniform), "0.90 to 1.10"),
        (
            "all writes: broadcast / published",
            ("xdp", 100.0, uniform),
            ("xdp (published)", 100.0, uniform),
            "3 or more",
        ),
        ("all writes: broadcast / tc", ("xdp", 100.0, uniform), ("xdp (tc)", 100.0, uniform), ""),
        ("all writes: broadcast / socket", ("xdp", 100.0, uniform), ("socket", 100.0, uniform), "5 or more"),
    ];
    wanted
        .into_iter()
        .filter_map(|(what, a, b, goal)| Some(Ratio::new(what, value(a.0, a.1, a.2)?, value(b.0, b.1, b.2)?, goal)))
        .collect()
}

/// Runs the comparison.
///
/// # Errors
/// Bad options, no root, a contender that fails or sends what it may not.
pub fn run(args: &CoordinatorArgs) -> Result<CoordinatorReport> {
    ensure!(args.rounds > 0 && args.seconds > 0.0, "at least one round of more than 0 seconds is needed");
    ensure!((1..=8).contains(&args.replicas), "{} replicas: a shard has 1 to 8", args.replicas);
    report::check_output(args.json.as_deref())?;
    report::check_output(args.plot.as_deref())?;
    let workloads: Vec<Workload> = args
        .write_ratio
        .iter()
        .flat_map(|write_percent| args.workload.iter().map(move |popularity| (*write_percent, *popularity)))
        .map(|(write_percent, popularity)| Workload {
            items: args.items,
            popularity,
            write_percent,
            key_size: args.key_size,
            value_size: args.value_size,
            seed: args.seed,
        })
        .collect();
    workloads.iter().try_for_each(Workload::validate)?;
    let contenders = contenders(args)?;
    process::catch_interrupts()?;
    let length = Duration::from_secs_f64(args.seconds);

    let mut samples: Vec<(String, Workload, Vec<Sample>)> = Vec::new();
    for round in 0..args.rounds {
        for contender in &contenders {
            let name = contender.name();
            let bed = Bed::new(args.replicas)?;
            let mut run = bed.run(contender.as_ref()).with_context(|| format!("starting {name}"))?;
            for workload in workloads.iter().filter(|workload| takes(&name, workload)) {
                process::check_interrupt()?;
                let what = || format!("{name}, {}", workload.label());
                if round == 0 {
                    run.verify(workload, Duration::from_millis(300)).with_context(|| format!("checking {}", what()))?;
                }
                let sample = run.measure(workload, length).with_context(what)?;
                eprintln!(
                    "round {} of {}: {}: {}/s, core {:.0} % busy",
                    round + 1,
                    args.rounds,
                    what(),
                    report::count(sample.rate()),
                    sample.utilisation() * 100.0
                );
                match samples.iter_mut().find(|(n, w, _)| *n == name && w == workload) {
                    Some((_, _, list)) => list.push(sample),
                    None => samples.push((name.clone(), *workload, vec![sample])),
                }
            }
            run.stop().with_context(|| format!("stopping {name}"))?;
        }
    }

    let cells: Vec<Cell> = samples
        .into_iter()
        .map(|(contender, workload, samples)| Cell {
            contender,
            workload,
            rate: Spread::of(samples.iter().map(Sample::rate)),
            utilisation: Spread::of(samples.iter().map(Sample::utilisation)),
            per_core_second: Spread::of(samples.iter().map(Sample::per_core_second)),
            rejected: samples.iter().map(|sample| sample.counts.rejected()).sum(),
            sent_again: samples.iter().map(|sample| sample.counts.writes_again).sum(),
        })
        .collect();
    let ratios = ratios(&cells);
    let report = CoordinatorReport {
        machine: Machine::here(),
        seconds: args.seconds,
        rounds: args.rounds,
        replicas: args.replicas,
        cells,
        ratios,
    };
    if let Some(path) = &args.json {
        report::write_json(path, &report)?;
    }
    if let Some(path) = &args.plot {
        draw(path, &report)?;
    }
    Ok(report)
}

/// The bare limit is one of reads: it does not multiply writes. How writes travel does not matter without any.
fn takes(contender: &str, workload: &Workload) -> bool {
    let reads_only = workload.write_percent == 0.0;
    if contender == Reflector::NAME { reads_only } else { !reads_only || !contender.contains('(') }
}

fn contenders(args: &CoordinatorArgs) -> Result<Vec<Box<dyn Contender>>> {
    let mut contenders: Vec<Box<dyn Contender>> = Vec::new();
    if !args.no_bare && args.write_ratio.contains(&0.0) {
        contenders.push(Box::new(Reflector));
    }
    for data_path in &args.datapath {
        let write_paths = match data_path {
            DataPath::Xdp => args.write_path.clone(),
            DataPath::Socket => vec![WritePath::Broadcast],
        };
        for write_path in write_paths {
            contenders.push(Box::new(Underpass {
                data_path: *data_path,
                write_path,
                program: process::program()?,
                sessions: 256,
            }));
        }
    }
    ensure!(!contenders.is_empty(), "nothing to measure: name a data path");
    Ok(contenders)
}

fn draw(path: &Path, report: &CoordinatorReport) -> Result<()> {
    let mut groups: Vec<Group> = Vec::new();
    for cell in &report.cells {
        let name = cell.workload.label();
        let bar = (cell.contender.clone(), cell.per_core_second.median);
        match groups.iter_mut().find(|group| group.name == name) {
            Some(group) => group.bars.push(bar),
            None => groups.push(Group { name, bars: vec![bar] }),
        }
    }
    let title = format!("Coordinators, {} replicas: requests per second of one core", report.replicas);
    plot::bars(path, &title, "requests per core-second", &groups)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(contender: &str, write_percent: f64, popularity: Popularity, per_core: f64) -> Cell {
        let spread = |value| Spread { min: value, median: value, max: value };
        Cell {
            contender: contender.into(),
            workload: Workload { write_percent, popularity, ..Workload::default() },
            rate: spread(per_core / 2.0),
            utilisation: spread(0.5),
            per_core_second: spread(per_core),
            rejected: 0,
            sent_again: 0,
        }
    }

    #[test]
    fn reports_compare_what_was_measured_and_only_that() {
        let uniform = Popularity::Uniform;
        let cells = vec![
            cell(Reflector::NAME, 0.0, uniform, 5e6),
            cell("xdp", 0.0, uniform, 4.6e6),
            cell("xdp", 5.0, uniform, 4e6),
            cell("socket", 5.0, uniform, 2.5e5),
        ];
        let found = ratios(&cells);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!((found[0].value - 0.92).abs() < 1e-9);
        assert!((found[1].value - 16.0).abs() < 1e-9);
        let report =
            CoordinatorReport { machine: Machine::here(), seconds: 3.0, rounds: 3, replicas: 3, cells, ratios: found };
        let text = report.text();
        for part in ["bare XDP_TX", "uniform, 5 % writes", "4.60 M", "50 %", "0.92", "16.00", "per core-second"] {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
    }

    #[test]
    fn the_bare_limit_is_held_against_reads_alone() {
        let reads = Workload { write_percent: 0.0, ..Workload::default() };
        let mix = Workload::default();
        assert!(takes(Reflector::NAME, &reads) && !takes(Reflector::NAME, &mix));
        assert!(takes("xdp", &reads) && takes("xdp", &mix));
        assert!(!takes("xdp (published)", &reads) && takes("xdp (published)", &mix));
    }
}
