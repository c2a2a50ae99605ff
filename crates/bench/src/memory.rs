//! `underpass bench memory`: what a coordinator weighs, whether it grows, and whether anything of it stays.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use clap::Args;
use libbpf_rs::query::{LinkInfoIter, MapInfoIter, ProgInfoIter};
use serde::Serialize;

use crate::{
    bed::Bed,
    coordinator::{DataPath, Underpass, WritePath},
    process,
    report::{self, Machine, Table},
    workload::Workload,
};

/// Options of `underpass bench memory`.
#[derive(Clone, Debug, Args)]
pub struct MemoryArgs {
    /// Minutes under load
    #[arg(long, default_value_t = 10.0)]
    pub minutes: f64,
    /// Starts and ends
    #[arg(long, default_value_t = 100)]
    pub cycles: u32,
    /// How the coordinator propagates writes
    #[arg(long, default_value = "broadcast")]
    pub write_path: WritePath,
    /// Share of writes, in percent
    #[arg(long, default_value_t = 5.0)]
    pub write_ratio: f64,
    /// Write the results here, as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// What a process holds, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Weight {
    /// Its BPF maps, in the kernel.
    pub maps: u64,
    /// Its BPF programs, in the kernel.
    pub programs: u64,
    /// Its own memory that is resident, and nobody else's.
    pub process: u64,
}

impl Weight {
    /// Of this process.
    ///
    /// # Errors
    /// When it is gone, or another user's.
    pub fn of(process: u32) -> Result<Self> {
        let folder = format!("/proc/{process}/fdinfo");
        let mut objects = BTreeMap::new();
        for entry in fs::read_dir(&folder).with_context(|| format!("cannot read {folder}"))?.flatten() {
            let text = fs::read_to_string(entry.path()).unwrap_or_default();
            if let Some((object, bytes)) = bpf_object(&text) {
                // Several descriptors may be of one object.
                objects.insert(object, bytes);
            }
        }
        let of = |kind| objects.iter().filter(|((k, _), _)| *k == kind).map(|(_, bytes)| bytes).sum();
        let rollup = format!("/proc/{process}/smaps_rollup");
        let text = fs::read_to_string(&rollup).with_context(|| format!("cannot read {rollup}"))?;
        // Pages of maps that are mapped are the kernel's and counted there already: they are shared, not private.
        let process = kib(&text, "Private_Clean:") + kib(&text, "Private_Dirty:");
        Ok(Self { maps: of(Object::Map), programs: of(Object::Program), process: process * 1024 })
    }

    /// Sum.
    pub fn total(&self) -> u64 {
        self.maps + self.programs + self.process
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Object {
    Map,
    Program,
}

/// Number and size of the map or program that a descriptor is of.
fn bpf_object(fdinfo: &str) -> Option<((Object, u32), u64)> {
    let field = |name: &str| {
        fdinfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')?.trim().parse::<u64>().ok())
    };
    let (kind, id) = match (field("map_id"), field("prog_id"), field("link_id")) {
        (_, _, Some(_)) => return None,
        (Some(id), ..) => (Object::Map, id),
        (None, Some(id), _) => (Object::Program, id),
        _ => return None,
    };
    Some(((kind, id as u32), field("memlock")?))
}

fn kib(text: &str, name: &str) -> u64 {
    text.lines()
        .filter_map(|line| line.strip_prefix(name)?.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok())
        .sum()
}

/// Programs, maps and links of the whole machine, by their kind, name and number.
fn objects() -> BTreeSet<(&'static str, String, u32)> {
    let name = |name: &std::ffi::CStr| name.to_string_lossy().into_owned();
    let programs = ProgInfoIter::default().map(|program| ("program", name(&program.name), program.id));
    let maps = MapInfoIter::default().map(|map| ("map", name(&map.name), map.id));
    let links = LinkInfoIter::default().map(|link| ("link", String::new(), link.id));
    programs.chain(maps).chain(links).collect()
}

/// Everything that `underpass bench memory` found.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryReport {
    /// Where.
    pub machine: Machine,
    /// After the start.
    pub at_start: Weight,
    /// Under load: seconds since its begin, and weight.
    pub under_load: Vec<(f64, Weight)>,
    /// Requests completed under that load.
    pub completed: u64,
    /// Starts and ends.
    pub cycles: u32,
    /// BPF programs, maps and links that were there after them and not before, as `map up_sessions`.
    pub left: Vec<String>,
}

impl MemoryReport {
    /// What is printed at the end.
    pub fn text(&self) -> String {
        let mut table = Table::new(["coordinator", "maps", "programs", "process", "sum"]);
        let mut row = |name: String, weight: &Weight| {
            let sizes = [weight.maps, weight.programs, weight.process, weight.total()];
            table.row(std::iter::once(name).chain(sizes.map(|bytes| report::size(bytes as f64))));
        };
        row("after its start".into(), &self.at_start);
        let (first, last) = (self.under_load.first(), self.under_load.last());
        for (seconds, weight) in first.into_iter().chain(last) {
            row(format!("after {seconds:.0} s of load"), weight);
        }
        let mut text = format!("\nMemory of an xdp coordinator of default size ({})\n\n{table}\n", self.machine);
        text += &format!("largest: {}, goal: 64 MiB or less\n", report::size(self.largest() as f64));
        if let (Some((from, a)), Some((to, b))) = (first, last) {
            text += &format!(
                "growth from second {from:.0} to second {to:.0}, over {} requests: {} bytes, goal: none\n",
                report::count(self.completed as f64),
                b.total() as i64 - a.total() as i64
            );
        }
        let left = if self.left.is_empty() { "nothing".into() } else { self.left.join(", ") };
        text += &format!("left after {} starts and ends: {left}, goal: nothing\n", self.cycles);
        text
    }

    /// The most that it weighed.
    pub fn largest(&self) -> u64 {
        self.under_load.iter().map(|(_, weight)| weight).chain([&self.at_start]).map(Weight::total).max().unwrap_or(0)
    }
}

/// Runs the benchmark.
///
/// # Errors
/// Bad options, no root, a coordinator that fails.
pub fn run(args: &MemoryArgs) -> Result<MemoryReport> {
    ensure!(args.minutes >= 0.0, "--minutes must not be below 0");
    report::check_output(args.json.as_deref())?;
    let workload = Workload { write_percent: args.write_ratio, ..Workload::default() };
    workload.validate()?;
    process::catch_interrupts()?;
    let contender = Underpass {
        data_path: DataPath::Xdp,
        write_path: args.write_path,
        program: process::program()?,
        sessions: 256,
    };

    let bed = Bed::new(3)?;
    let mut run = bed.run(&contender)?;
    let process = run.processes()[0];
    let at_start = Weight::of(process)?;
    let length = Duration::from_secs_f64(args.minutes * 60.0);
    let step = (length / 20).clamp(Duration::from_secs(1), Duration::from_secs(30));
    let mut under_load = Vec::new();
    let mut completed = 0;
    if !length.is_zero() {
        let counts = run.observe(&workload, length, step, |elapsed| {
            let weight = Weight::of(process)?;
            eprintln!("{:.0} s under load: {}", elapsed.as_secs_f64(), report::size(weight.total() as f64));
            under_load.push((elapsed.as_secs_f64(), weight));
            Ok(())
        })?;
        completed = counts.completed();
    }
    run.stop()?;

    // The load's own objects must not be among those compared.
    drop(bed);
    let bed = Bed::new(3)?;
    settle();
    let before = objects();
    for cycle in 1..=args.cycles {
        process::check_interrupt()?;
        contender
            .launch(&bed)
            .with_context(|| format!("start {cycle}"))?
            .stop()
            .with_context(|| format!("end {cycle}"))?;
        if cycle % 10 == 0 {
            eprintln!("{cycle} starts and ends");
        }
    }
    // The kernel frees them a moment after their last user is gone.
    let until = Instant::now() + Duration::from_secs(5);
    let left = loop {
        let left: Vec<String> = objects()
            .difference(&before)
            .map(|(kind, name, _)| format!("{kind} {name}").trim_end().to_owned())
            .collect();
        if left.is_empty() || Instant::now() > until {
            break left;
        }
        settle();
    };
    let report = MemoryReport { machine: Machine::here(), at_start, under_load, completed, cycles: args.cycles, left };
    if let Some(path) = &args.json {
        report::write_json(path, &report)?;
    }
    Ok(report)
}

fn settle() {
    thread::sleep(Duration::from_millis(300));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_tell_their_object_and_its_size() {
        let map = "pos:\t0\nflags:\t02000002\nmap_type:\t2\nkey_size:\t4\nmemlock:\t8192\nmap_id:\t17\nfrozen:\t0\n";
        assert_eq!(bpf_object(map), Some(((Object::Map, 17), 8192)));
        let program = "prog_type:\t6\nprog_jited:\t1\nmemlock:\t4096\nprog_id:\t9\n";
        assert_eq!(bpf_object(program), Some(((Object::Program, 9), 4096)));
        assert_eq!(bpf_object("link_type:\txdp\nlink_id:\t3\nprog_id:\t9\n"), None, "its program counts elsewhere");
        assert_eq!(bpf_object("pos:\t0\n"), None);
    }

    #[test]
    fn this_process_weighs_something_and_grows() {
        let before = Weight::of(std::process::id()).unwrap();
        let mut ballast = vec![0u8; 32 << 20];
        ballast.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
        let after = Weight::of(std::process::id()).unwrap();
        assert!(after.process > before.process + (30 << 20), "{before:?} {after:?}");
        assert!(std::hint::black_box(ballast).len() > 1);
        assert!(Weight::of(u32::MAX).is_err());
    }

    #[test]
    fn reports_say_what_should_be() {
        let weight = |maps| Weight { maps, programs: 0, process: 1 << 20 };
        let report = MemoryReport {
            machine: Machine::here(),
            at_start: weight(10 << 20),
            under_load: vec![(30.0, weight(20 << 20)), (600.0, weight(21 << 20))],
            completed: 5_000_000,
            cycles: 100,
            left: vec!["map forgotten".into()],
        };
        let text = report.text();
        for part in ["11.0 MiB", "22.0 MiB", "1048576 bytes", "5.00 M requests", "map forgotten", "64 MiB or less"] {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
    }
}
