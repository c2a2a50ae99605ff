//! `underpass demo`: everything once, in a few minutes, on one machine, and nothing of it is left.

use std::{io::Write, time::Duration};

use anyhow::{Context, Result, ensure};
use clap::Args;
use hdrhistogram::Histogram;
use underpass_check::linearizability::Verdict;
use underpass_client::engine::Engine;

use crate::{
    coordinator::{DataPath, WritePath},
    driver::{Arrival, Seen, Task},
    history::{self, Log},
    process,
    report::{self, Machine, Table},
    system::{self, Size, System},
    workload::{Popularity, Workload},
};

/// Options of `underpass demo`.
#[derive(Clone, Debug, Args)]
pub struct DemoArgs {
    /// Items to load
    #[arg(long, default_value_t = 1_000_000)]
    pub items: u64,
    /// Seconds of each measurement; there are twelve
    #[arg(long, default_value_t = 4.0)]
    pub seconds: f64,
    /// Replicas
    #[arg(long, default_value_t = 3)]
    pub replicas: usize,
    /// Client hosts
    #[arg(long, default_value_t = 2)]
    pub clients: usize,
    /// Requests under way at once, when it is about throughput
    #[arg(long, default_value_t = 128)]
    pub concurrency: usize,
}

/// What one coordinator did with one workload.
struct Row {
    data_path: DataPath,
    popularity: Popularity,
    busy: Seen,
    core_seconds: f64,
    alone: Seen,
    steady: Option<Seen>,
}

/// Runs the demonstration; prints as it goes.
///
/// # Errors
/// Whatever does not work; also a history that is not linearizable.
pub fn run(args: &DemoArgs) -> Result<()> {
    ensure!(args.seconds > 0.0 && args.concurrency > 0, "--seconds and --concurrency must be more than 0");
    let workload = Workload { items: args.items, ..Workload::default() };
    workload.validate()?;
    process::catch_interrupts()?;
    let size = Size {
        replicas: args.replicas,
        clients: args.clients,
        sessions: args.concurrency.div_ceil(args.clients.max(1)).max(1),
        memory_mib: Size::memory_for(&workload),
    };
    check_memory(&workload, &size)?;

    say(&format!(
        "A rack of {} hosts behind a switch: a coordinator, {} replicas, {} clients ...",
        1 + size.replicas + size.clients,
        size.replicas,
        size.clients
    ));
    let mut system = System::up(&format!("demo-{}", std::process::id()), size)?;
    let result = show(args, &workload, &mut system);
    let result = match result {
        Ok(()) => {
            say("Taking everything down ...");
            system.down()
        }
        Err(error) => {
            let said = system.said();
            // Dropping it takes everything down.
            drop(system);
            Err(error).context(said)
        }
    };
    result?;
    say("Nothing is left of it.");
    Ok(())
}

fn say(text: &str) {
    eprintln!("{text}");
}

fn check_memory(workload: &Workload, size: &Size) -> Result<()> {
    let needed_mib = size.memory_mib * size.replicas as u64 + ((workload.items * 100) >> 20) + 256;
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let available_mib = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok())
        .map(|kib| kib / 1024);
    if let Some(available_mib) = available_mib {
        ensure!(
            needed_mib <= available_mib,
            "{} items on {} replicas need about {needed_mib} MiB of memory, and {available_mib} MiB are free: \
             give a smaller --items",
            workload.items,
            size.replicas
        );
    }
    Ok(())
}

fn show(args: &DemoArgs, workload: &Workload, system: &mut System) -> Result<()> {
    let length = Duration::from_secs_f64(args.seconds);
    let task = |workload: &Workload, arrival, stream| Task {
        workload: *workload,
        arrival,
        length,
        warmup: length / 8,
        deadline: Duration::from_secs(5),
        stream,
    };
    let new_logs = || vec![Log::new(); args.clients];
    let (mut loads, mut logs) = (new_logs(), new_logs());
    let mut stream = 1;

    system.start_coordinator(DataPath::Xdp, WritePath::Broadcast)?;
    let mut engines = system.clients()?;
    say(&format!(
        "Loading {} items of {} + {} bytes through the xdp coordinator ...",
        workload.items, workload.key_size, workload.value_size
    ));
    let loaded = system::load(&mut engines, &task(workload, Arrival::Closed(args.concurrency), 0), Some(&mut loads))?;
    say(&format!("  {} writes a second, each on all {} replicas", report::count(loaded.rate()), args.replicas));

    let mut rows: Vec<Row> = Vec::new();
    let mut running = DataPath::Xdp;
    for data_path in [DataPath::Xdp, DataPath::Socket] {
        switch(system, &mut engines, &mut running, data_path)?;
        for popularity in [Popularity::Uniform, Popularity::Zipf(0.99)] {
            let workload = Workload { popularity, ..*workload };
            let what = format!("{data_path}, {}", workload.label());
            say(&format!("{what}, {} requests at a time, then one at a time ...", args.concurrency));
            let meter = system.meter()?;
            let before = meter.read();
            let arrival = Arrival::Closed(args.concurrency);
            stream += 1;
            let busy = system::perform(&what, &mut engines, &task(&workload, arrival, stream), Some(&mut logs))?;
            // The warm-up counts in the core's time; so it does in the requests.
            let share = length.as_secs_f64() / (length + length / 8).as_secs_f64();
            let core_seconds = meter.read().saturating_sub(before).as_secs_f64() * share;
            stream += 1;
            let arrival = Arrival::Closed(1);
            let alone = system::perform(&what, &mut engines, &task(&workload, arrival, stream), Some(&mut logs))?;
            rows.push(Row { data_path, popularity, busy, core_seconds, alone, steady: None });
            system.check()?;
        }
    }

    // The same load for both, which the slower one can bear: half of what it can do.
    let slowest = rows.iter().map(|row| row.busy.rate()).fold(f64::INFINITY, f64::min);
    let rate = slowest / 2.0;
    for data_path in [DataPath::Socket, DataPath::Xdp] {
        switch(system, &mut engines, &mut running, data_path)?;
        for row in rows.iter_mut().filter(|row| row.data_path == data_path) {
            let workload = Workload { popularity: row.popularity, ..*workload };
            let what = format!("{data_path}, {}, {} requests a second", workload.label(), report::count(rate));
            say(&format!("{what} ..."));
            stream += 1;
            let task = task(&workload, Arrival::Open(rate), stream);
            row.steady = Some(system::perform(&what, &mut engines, &task, Some(&mut logs))?);
        }
    }
    drop(engines);

    say("Checking what all clients were told, from the first write to the last, for linearizability ...");
    let checked = history::check(&loads, &logs, workload.key_size, None)?;
    let text = table(args, &rows, rate);
    println!("\n{text}");
    println!("{checked}");
    std::io::stdout().flush()?;
    ensure!(checked.verdict() == Verdict::Linearizable, "the history is not proved linearizable");
    let lost: u64 = rows.iter().map(|row| row.busy.missing + row.alone.missing).sum();
    ensure!(lost == 0, "{lost} reads found nothing, although every item was loaded");
    Ok(())
}

fn switch(system: &mut System, engines: &mut Vec<Engine>, running: &mut DataPath, to: DataPath) -> Result<()> {
    if *running != to {
        // Sessions end with their coordinator; the items stay where they are.
        engines.clear();
        system.start_coordinator(to, WritePath::Broadcast)?;
        *engines = system.clients()?;
        *running = to;
    }
    Ok(())
}

fn quantiles(histogram: &Histogram<u64>) -> String {
    if histogram.is_empty() {
        return "-".into();
    }
    let at = |quantile| report::time(histogram.value_at_quantile(quantile) as f64);
    format!("{} / {}", at(0.5), at(0.99))
}

fn table(args: &DemoArgs, rows: &[Row], rate: f64) -> String {
    let mut table = Table::new([
        "coordinator",
        "keys",
        "requests/s",
        "coordinator CPU/request",
        "read alone",
        "write alone",
        "read at load",
        "write at load",
    ]);
    for row in rows {
        let steady =
            |of: fn(&Seen) -> &Histogram<u64>| row.steady.as_ref().map_or("-".into(), |seen| quantiles(of(seen)));
        table.row([
            row.data_path.to_string(),
            row.popularity.to_string(),
            report::count(row.busy.rate()),
            report::time(row.core_seconds * 1e9 / row.busy.answered() as f64),
            quantiles(&row.alone.reads),
            quantiles(&row.alone.writes),
            steady(|seen| &seen.reads),
            steady(|seen| &seen.writes),
        ]);
    }
    format!(
        "{} items on {} replicas; 95 % reads, 5 % writes; everything on {}.\n\n{table}\n\
         requests/s: {} requests under way at any time. coordinator CPU/request: what of its core the coordinator used\n\
         for one of them. alone: one request at a time. at load: {} requests a second at random moments, timed from\n\
         the moment each was due. Latencies are median / 99th percentile, as the client sees them.\n\
         The whole rack shares this machine's cores: replicas and clients take most of them, so requests/s says little\n\
         about a coordinator by itself. `underpass bench coordinator` gives each one a core and compares them alone.\n",
        args.items,
        args.replicas,
        Machine::here(),
        args.concurrency,
        report::count(rate),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_explains_itself() {
        let mut seen = Seen { seconds: 1.0, ..Seen::default() };
        for latency in 1..=100u64 {
            seen.reads.record(latency * 1000).unwrap();
        }
        let row = Row {
            data_path: DataPath::Xdp,
            popularity: Popularity::Zipf(0.99),
            busy: seen.clone(),
            core_seconds: 0.00005,
            alone: seen.clone(),
            steady: None,
        };
        let args = DemoArgs { items: 7, seconds: 1.0, replicas: 3, clients: 2, concurrency: 64 };
        let text = table(&args, &[row], 1234.0);
        for part in ["xdp", "zipf0.99", "500 ns", "50.0 µs / 99.0 µs", "7 items on 3 replicas", "1.23 k requests"] {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
    }

    #[test]
    fn a_machine_too_small_is_told_before_anything_starts() {
        let workload = Workload { items: u64::MAX >> 40, ..Workload::default() };
        let size = Size { replicas: 3, clients: 1, sessions: 1, memory_mib: u64::MAX >> 24 };
        assert!(check_memory(&workload, &size).unwrap_err().to_string().contains("smaller --items"));
    }
}
