//! `underpass bench ycsb`: the whole system under a workload, one data path of the coordinator against another.

use std::{
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use clap::Args;
use hdrhistogram::Histogram;
use serde::Serialize;
use underpass_check::linearizability::Verdict;
use underpass_client::engine::Engine;
use underpass_rack::{Fault, Probability, parse_hold};

use crate::{
    coordinator::{DataPath, WritePath},
    driver::{Arrival, Seen, Task},
    history::{self, Log},
    plot::{self, Curve},
    process,
    report::{self, Machine, Ratio, Spread, Table},
    system::{self, Size, System},
    workload::{Popularity, Workload},
};

/// Options of `underpass bench ycsb`.
#[derive(Clone, Debug, Args)]
pub struct YcsbArgs {
    /// Data paths of the coordinator to compare
    #[arg(long, value_delimiter = ',', default_value = "xdp,socket")]
    pub datapath: Vec<DataPath>,
    /// How the xdp data path propagates writes
    #[arg(long, default_value = "broadcast")]
    pub write_path: WritePath,
    /// Popularities of items: uniform, or zipf and an exponent
    #[arg(long, value_delimiter = ',', default_value = "uniform,zipf0.99")]
    pub workload: Vec<Popularity>,
    /// Share of writes, in percent
    #[arg(long, default_value_t = 5.0)]
    pub write_ratio: f64,
    /// Requests under way at any time in the closed loop; 0: none of it
    #[arg(long, default_value_t = 128)]
    pub concurrency: usize,
    /// Requests a second in the open loop; 0: none of it [default: half of what the slowest did in the closed loop]
    #[arg(long)]
    pub rate: Option<f64>,
    /// Seconds of each measurement
    #[arg(long, default_value_t = 3.0)]
    pub seconds: f64,
    /// Rounds: in each, all data paths take their turn; medians over the rounds count
    #[arg(long, default_value_t = 3)]
    pub rounds: usize,
    /// Number of items
    #[arg(long, default_value_t = 100_000)]
    pub items: u64,
    /// Bytes of a key
    #[arg(long, default_value_t = 16)]
    pub key_size: usize,
    /// Bytes of a value
    #[arg(long, default_value_t = 128)]
    pub value_size: usize,
    /// Replicas
    #[arg(long, default_value_t = 3)]
    pub replicas: usize,
    /// Client hosts
    #[arg(long, default_value_t = 2)]
    pub clients: usize,
    /// Seed of everything random
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Faults of all links once the items are loaded, as loss=1%,duplicate=1%,reorder=1%,hold=1ms,delay=50us,jitter=10us
    #[arg(long, default_value = "")]
    pub faults: Faults,
    /// Write what all clients did here, as docs/history.md describes it
    #[arg(long, value_name = "FILE")]
    pub history: Option<PathBuf>,
    /// Do not record what clients do (64 bytes of memory for each request), nor check it for linearizability
    #[arg(long, conflicts_with = "history")]
    pub no_check: bool,
    /// Write the results here, as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write a plot of the latencies here, as SVG
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
}

/// Faults, as on the command line.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    text: String,
    fault: Fault,
}

impl FromStr for Faults {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut fault = Fault::default();
        for part in text.split(',').filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let probability = || value.parse::<Probability>().map_err(|error| format!("{part}: {error}"));
            let hold = || parse_hold(value).map_err(|error| format!("{part}: {error}"));
            match name {
                "loss" => fault.loss = probability()?,
                "duplicate" => fault.duplicate = probability()?,
                "reorder" => fault.reorder = probability()?,
                "hold" => fault.reorder_hold = hold()?,
                "delay" => fault.delay = hold()?,
                "jitter" => fault.jitter = hold()?,
                _ => return Err(format!("{name:?} is no fault: loss, duplicate, reorder, hold, delay, jitter")),
            }
        }
        Ok(Self { text: text.into(), fault })
    }
}

/// How requests came in one series of measurements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Load {
    /// One at a time.
    Alone,
    /// As many at a time as asked for.
    Closed,
    /// So many a second.
    Open,
}

/// Latencies of one kind of request, in nanoseconds, over the rounds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Latency {
    /// Median.
    pub p50_ns: Spread,
    /// 99th percentile.
    pub p99_ns: Spread,
    /// 99.9th percentile.
    pub p999_ns: Spread,
}

impl Latency {
    /// `None` if some round had none.
    fn of<'a>(rounds: impl Iterator<Item = &'a Histogram<u64>> + Clone) -> Option<Self> {
        if rounds.clone().any(Histogram::is_empty) {
            return None;
        }
        let at = |quantile| Spread::of(rounds.clone().map(|round| round.value_at_quantile(quantile) as f64));
        Some(Self { p50_ns: at(0.5), p99_ns: at(0.99), p999_ns: at(0.999) })
    }

    fn text(of: &Option<Self>) -> String {
        match of {
            Some(latency) => {
                [latency.p50_ns, latency.p99_ns, latency.p999_ns].map(|spread| report::time(spread.median)).join(" / ")
            }
            None => "-".into(),
        }
    }
}

/// One data path under one workload and one load.
#[derive(Clone, Debug, Serialize)]
pub struct Cell {
    /// Data path.
    pub data_path: DataPath,
    /// Workload.
    pub workload: Workload,
    /// How requests came.
    pub load: Load,
    /// Requests answered in a second.
    pub rate: Spread,
    /// Reads.
    pub reads: Option<Latency>,
    /// Writes.
    pub writes: Option<Latency>,
    /// Time that the coordinator used of its core for each request, in nanoseconds.
    pub coordinator_ns: Spread,
    /// Requests without an answer before their deadline, in all rounds.
    pub unanswered: u64,
    /// Requests refused for good, in all rounds.
    pub failed: u64,
    /// Datagrams sent again, in all rounds.
    pub resent: u64,
    /// Rejects, in all rounds.
    pub rejects: u64,
    #[serde(skip)]
    all_reads: Histogram<u64>,
}

/// What the checker found.
#[derive(Clone, Debug, Serialize)]
pub struct Checked {
    /// Operations.
    pub operations: usize,
    /// Keys.
    pub keys: usize,
    /// Operations without an answer.
    pub unknown: usize,
    /// Whether one order of operations explains every answer.
    pub linearizable: bool,
    /// In words.
    pub text: String,
}

/// Everything that `underpass bench ycsb` found.
#[derive(Clone, Debug, Serialize)]
pub struct YcsbReport {
    /// Where.
    pub machine: Machine,
    /// Replicas.
    pub replicas: usize,
    /// Client hosts.
    pub clients: usize,
    /// Requests under way in the closed loop.
    pub concurrency: usize,
    /// Requests a second in the open loop.
    pub open_rate: f64,
    /// Seconds of each measurement.
    pub seconds: f64,
    /// Rounds.
    pub rounds: usize,
    /// Faults of all links; empty: none.
    pub faults: String,
    /// Writes a second while loading.
    pub load_rate: f64,
    /// Results.
    pub cells: Vec<Cell>,
    /// What they come to.
    pub ratios: Vec<Ratio>,
    /// Linearizability; absent if it was not to be checked.
    pub checked: Option<Checked>,
}

impl YcsbReport {
    /// What is printed at the end.
    pub fn text(&self) -> String {
        let mut table = Table::new([
            "coordinator",
            "workload",
            "load",
            "answered/s",
            "CPU/request",
            "reads",
            "writes",
            "unanswered",
        ]);
        for cell in &self.cells {
            let load = match cell.load {
                Load::Alone => "one at a time".into(),
                Load::Closed => format!("{} at a time", self.concurrency),
                Load::Open => format!("{}/s", report::count(self.open_rate)),
            };
            table.row([
                cell.data_path.to_string(),
                cell.workload.label(),
                load,
                report::count(cell.rate.median),
                report::time(cell.coordinator_ns.median),
                Latency::text(&cell.reads),
                Latency::text(&cell.writes),
                (cell.unanswered + cell.failed).to_string(),
            ]);
        }
        let faults = if self.faults.is_empty() { "no faults" } else { &self.faults };
        let mut text = format!(
            "\nWhole system in a rack on {}: {} replicas, {} clients, {faults}; medians of {} rounds of {} s\n\n{table}\n\
             Latencies are 50 / 99 / 99.9 %, as the client sees them; at so many a second, from the moment at which each\n\
             request was due. CPU/request is what the coordinator used of its core. All hosts share the machine's cores.\n\n",
            self.machine, self.replicas, self.clients, self.rounds, self.seconds
        );
        text += &report::ratios_table(&self.ratios).to_string();
        if let Some(checked) = &self.checked {
            text += &format!("\n{}\n", checked.text);
        }
        text
    }
}

struct Measured {
    data_path: DataPath,
    workload: Workload,
    load: Load,
    rounds: Vec<(Seen, f64)>,
}

struct Run<'a> {
    args: &'a YcsbArgs,
    system: System,
    engines: Vec<Engine>,
    running: Option<DataPath>,
    logs: Option<Vec<Log>>,
    stream: u64,
    measured: Vec<Measured>,
}

impl Run<'_> {
    fn use_data_path(&mut self, data_path: DataPath) -> Result<()> {
        if self.running != Some(data_path) {
            // Sessions end with their coordinator; items stay where they are.
            self.engines.clear();
            self.system.start_coordinator(data_path, self.args.write_path)?;
            self.engines = self.system.clients()?;
            self.running = Some(data_path);
        }
        Ok(())
    }

    fn task(&self, workload: Workload, arrival: Arrival) -> Task {
        let length = Duration::from_secs_f64(self.args.seconds);
        Task { workload, arrival, length, warmup: length / 8, deadline: Duration::from_secs(10), stream: self.stream }
    }

    fn measure(&mut self, data_path: DataPath, workload: Workload, load: Load, arrival: Arrival) -> Result<()> {
        self.stream += 1;
        let task = self.task(workload, arrival);
        let what = format!("{data_path}, {}, {arrival:?}", workload.label());
        let meter = self.system.meter()?;
        let before = meter.read();
        let seen = system::perform(&what, &mut self.engines, &task, self.logs.as_deref_mut())?;
        let used = meter.read().saturating_sub(before);
        self.system.check()?;
        let share = task.length.as_secs_f64() / (task.length + task.warmup).as_secs_f64();
        let used_ns = used.as_secs_f64() * 1e9 * share;
        eprintln!("  {what}: {}/s", report::count(seen.rate()));
        let same = |m: &&mut Measured| (m.data_path, m.workload, m.load) == (data_path, workload, load);
        match self.measured.iter_mut().find(same) {
            Some(measured) => measured.rounds.push((seen, used_ns)),
            None => self.measured.push(Measured { data_path, workload, load, rounds: vec![(seen, used_ns)] }),
        }
        Ok(())
    }
}

/// Runs the benchmark.
///
/// # Errors
/// Bad options, no root, a process that fails; a history that is not linearizable.
pub fn run(args: &YcsbArgs) -> Result<YcsbReport> {
    ensure!(args.rounds > 0 && args.seconds > 0.0, "at least one round of more than 0 seconds is needed");
    ensure!(!args.datapath.is_empty() && !args.workload.is_empty(), "name a data path and a workload");
    for path in [&args.json, &args.plot, &args.history] {
        report::check_output(path.as_deref())?;
    }
    let base = Workload {
        items: args.items,
        popularity: Popularity::Uniform,
        write_percent: args.write_ratio,
        key_size: args.key_size,
        value_size: args.value_size,
        seed: args.seed,
    };
    base.validate()?;
    ensure!(args.value_size >= 16, "values of {} bytes: each write needs 16 to be told from others", args.value_size);
    process::catch_interrupts()?;
    let sessions = args.concurrency.max(64).div_ceil(args.clients.max(1));
    let size = Size { replicas: args.replicas, clients: args.clients, sessions, memory_mib: Size::memory_for(&base) };
    eprintln!("starting {} replicas and {} clients in a rack", size.replicas, size.clients);
    let system = System::up(&format!("ycsb-{}", std::process::id()), size)?;
    let new_logs = || (!args.no_check).then(|| vec![Log::new(); args.clients]);
    let mut run =
        Run { args, system, engines: Vec::new(), running: None, logs: new_logs(), stream: 0, measured: Vec::new() };
    match measure(&mut run, base, new_logs()) {
        Ok(report) => {
            run.engines.clear();
            run.system.down()?;
            finish(args, report)
        }
        Err(error) => {
            let said = run.system.said();
            Err(error).context(said)
        }
    }
}

fn finish(args: &YcsbArgs, report: YcsbReport) -> Result<YcsbReport> {
    if let Some(path) = &args.json {
        report::write_json(path, &report)?;
    }
    if let Some(path) = &args.plot {
        draw(path, &report)?;
    }
    if let Some(checked) = &report.checked {
        ensure!(checked.linearizable, "{}\n{}", report.text(), checked.text);
    }
    Ok(report)
}

fn measure(run: &mut Run<'_>, base: Workload, mut loads: Option<Vec<Log>>) -> Result<YcsbReport> {
    let args = run.args;
    run.use_data_path(args.datapath[0])?;
    let task = run.task(base, Arrival::Closed(args.concurrency.max(64)));
    let loaded = system::load(&mut run.engines, &task, loads.as_deref_mut())?;
    run.system.set_fault(&args.faults.fault)?;

    for round in 0..args.rounds {
        eprintln!("round {} of {}", round + 1, args.rounds);
        for data_path in &args.datapath {
            run.use_data_path(*data_path)?;
            for popularity in &args.workload {
                let workload = Workload { popularity: *popularity, ..base };
                run.measure(*data_path, workload, Load::Alone, Arrival::Closed(1))?;
                if args.concurrency > 0 {
                    run.measure(*data_path, workload, Load::Closed, Arrival::Closed(args.concurrency))?;
                }
            }
        }
    }
    let closed = run.measured.iter().filter(|measured| measured.load == Load::Closed);
    let slowest = closed
        .map(|measured| report::median(measured.rounds.iter().map(|(seen, _)| seen.rate())))
        .fold(f64::INFINITY, f64::min);
    let open_rate = args.rate.unwrap_or(if slowest.is_finite() { (slowest / 2.0).round() } else { 0.0 });
    if open_rate > 0.0 {
        for round in 0..args.rounds {
            eprintln!("round {} of {}, {} requests a second", round + 1, args.rounds, report::count(open_rate));
            for data_path in &args.datapath {
                run.use_data_path(*data_path)?;
                for popularity in &args.workload {
                    let workload = Workload { popularity: *popularity, ..base };
                    run.measure(*data_path, workload, Load::Open, Arrival::Open(open_rate))?;
                }
            }
        }
    }
    // The coordinator has to end its work over whole links: a loss at the end is not what is measured.
    run.system.set_fault(&Fault::default())?;

    let cells: Vec<Cell> = run.measured.iter().map(cell).collect();
    let missing: u64 = run.measured.iter().flat_map(|m| &m.rounds).map(|(seen, _)| seen.missing).sum();
    ensure!(missing == 0, "{missing} reads found nothing, although every item was loaded");
    let checked = match (&loads, &run.logs) {
        (Some(loads), Some(logs)) => {
            eprintln!("checking for linearizability");
            let found = history::check(loads, logs, base.key_size, args.history.as_deref())?;
            Some(Checked {
                operations: found.operations,
                keys: found.keys,
                unknown: found.unknown,
                linearizable: found.verdict() == Verdict::Linearizable,
                text: found.to_string(),
            })
        }
        _ => None,
    };
    Ok(YcsbReport {
        machine: Machine::here(),
        replicas: args.replicas,
        clients: args.clients,
        concurrency: args.concurrency,
        open_rate,
        seconds: args.seconds,
        rounds: args.rounds,
        faults: args.faults.text.clone(),
        load_rate: loaded.rate(),
        ratios: ratios(&cells),
        cells,
        checked,
    })
}

fn cell(measured: &Measured) -> Cell {
    let seen = || measured.rounds.iter().map(|(seen, _)| seen);
    let mut all = Seen::default();
    seen().for_each(|one| all.merge(one));
    Cell {
        data_path: measured.data_path,
        workload: measured.workload,
        load: measured.load,
        rate: Spread::of(seen().map(Seen::rate)),
        reads: Latency::of(seen().map(|seen| &seen.reads)),
        writes: Latency::of(seen().map(|seen| &seen.writes)),
        coordinator_ns: Spread::of(
            measured.rounds.iter().map(|(seen, used_ns)| used_ns / seen.answered().max(1) as f64),
        ),
        unanswered: all.unanswered,
        failed: all.failed,
        resent: all.resent,
        rejects: all.rejects,
        all_reads: all.reads,
    }
}

fn ratios(cells: &[Cell]) -> Vec<Ratio> {
    let mut ratios = Vec::new();
    for xdp in cells.iter().filter(|cell| cell.data_path == DataPath::Xdp) {
        let same =
            |cell: &&Cell| (cell.data_path, cell.workload, cell.load) == (DataPath::Socket, xdp.workload, xdp.load);
        let Some(socket) = cells.iter().find(same) else { continue };
        let what = |text: &str| format!("{text}, {}: xdp / socket", xdp.workload.label());
        match (xdp.load, &xdp.reads, &socket.reads) {
            (Load::Closed, ..) => {
                ratios.push(Ratio::new(what("answered/s"), xdp.rate.median, socket.rate.median, ""));
                let (a, b) = (xdp.coordinator_ns.median, socket.coordinator_ns.median);
                ratios.push(Ratio::new(what("coordinator CPU/request"), a, b, ""));
            }
            (Load::Alone, Some(a), Some(b)) => {
                let goal = "below 1";
                ratios.push(Ratio::new(what("unloaded read p50"), a.p50_ns.median, b.p50_ns.median, goal));
                ratios.push(Ratio::new(what("unloaded read p99"), a.p99_ns.median, b.p99_ns.median, goal));
            }
            (Load::Open, Some(a), Some(b)) => {
                ratios.push(Ratio::new(what("read p99 at load"), a.p99_ns.median, b.p99_ns.median, ""));
            }
            _ => {}
        }
    }
    ratios
}

fn draw(path: &Path, report: &YcsbReport) -> Result<()> {
    let wanted = if report.open_rate > 0.0 { Load::Open } else { Load::Alone };
    // Nines on the horizontal axis: 1 is 90 %, 2 is 99 %.
    let curves: Vec<Curve> = report
        .cells
        .iter()
        .filter(|cell| cell.load == wanted && !cell.all_reads.is_empty())
        .map(|cell| {
            let nines = (cell.all_reads.len() as f64).log10().min(4.0);
            let points = (0..=(nines * 50.0) as u32).map(|step| {
                let nines = f64::from(step) / 50.0;
                (nines, cell.all_reads.value_at_quantile(1.0 - 10f64.powf(-nines)).max(1) as f64)
            });
            Curve { name: format!("{}, {}", cell.data_path, cell.workload.popularity), points: points.collect() }
        })
        .collect();
    let load = match wanted {
        Load::Open => format!("{} requests a second", report::count(report.open_rate)),
        _ => "one request at a time".into(),
    };
    let title = format!("Latency of reads, {load}, {} replicas", report.replicas);
    let percent = |nines: &f64| format!("{} %", 100.0 - 100.0 * 10f64.powf(-nines));
    let percent = |nines: &f64| if (nines.fract()).abs() < 1e-6 { percent(nines) } else { String::new() };
    plot::curves(path, &title, ("share of reads", "latency"), &percent, &|ns| report::time(*ns), &curves)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(data_path: DataPath, load: Load, latency: u64) -> Measured {
        let round = |extra| {
            let mut seen = Seen { seconds: 2.0, ..Seen::default() };
            (1..=1000).for_each(|i| seen.reads.record(latency + extra + i).unwrap());
            (seen, 1e6)
        };
        Measured { data_path, workload: Workload::default(), load, rounds: vec![round(0), round(50), round(100)] }
    }

    #[test]
    fn faults_are_named() {
        let faults: Faults = "loss=1%,duplicate=0.02,reorder=3%,hold=2ms,delay=50us,jitter=1us".parse().unwrap();
        assert_eq!(faults.fault.loss.value(), 0.01);
        assert_eq!(faults.fault.duplicate.value(), 0.02);
        assert_eq!(faults.fault.delay, Duration::from_micros(50));
        assert!("".parse::<Faults>().unwrap().fault.is_none());
        for (wrong, part) in [("lost=1%", "loss, duplicate"), ("loss=2", "probability"), ("hold=x", "hold=x")] {
            let error = wrong.parse::<Faults>().unwrap_err();
            assert!(error.contains(part), "{wrong}: {error}");
        }
    }

    #[test]
    fn reports_compare_equal_loads_and_draw() {
        let cells: Vec<Cell> = [
            measured(DataPath::Xdp, Load::Alone, 20_000),
            measured(DataPath::Socket, Load::Alone, 40_000),
            measured(DataPath::Xdp, Load::Open, 30_000),
            measured(DataPath::Socket, Load::Open, 60_000),
            measured(DataPath::Xdp, Load::Closed, 90_000),
        ]
        .iter()
        .map(cell)
        .collect();
        assert_eq!(cells[0].rate.median, 500.0);
        assert_eq!(cells[0].coordinator_ns.median, 1000.0);
        let ratios = ratios(&cells);
        assert_eq!(ratios.len(), 3, "{ratios:?}");
        assert!((ratios[0].value - 0.5).abs() < 0.02, "{ratios:?}");
        let report = YcsbReport {
            machine: Machine::here(),
            replicas: 3,
            clients: 2,
            concurrency: 64,
            open_rate: 1000.0,
            seconds: 2.0,
            rounds: 3,
            faults: "loss=1%".into(),
            load_rate: 1.0,
            cells,
            ratios,
            checked: None,
        };
        let text = report.text();
        for part in ["one at a time", "64 at a time", "1.00 k/s", "loss=1%", "20.6 µs", "unloaded read p50"] {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
        let path = std::env::temp_dir().join(format!("underpass-ycsb-{}.svg", std::process::id()));
        draw(&path, &report).unwrap();
        let drawn = std::fs::read_to_string(&path).unwrap();
        for part in ["99 %", "99.9 %", "xdp, uniform", "1.00 k requests a second"] {
            assert!(drawn.contains(part), "{part} is missing");
        }
        std::fs::remove_file(&path).unwrap();
    }
}
