//! `underpass-sim`: runs seeds, explains one, finds mutants.

use std::{
    ops::Range,
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::Parser;

use crate::{
    mutants::{self, Mutant},
    plan::Plan,
    runner, shrink,
    trace::Detail,
};

/// Failing seeds that are listed.
const FAILURES_MAX: usize = 20;

/// Simulates whole clusters under faults: one seed is one run.
#[derive(Debug, Parser)]
#[command(version)]
pub struct Args {
    /// Seeds to run: FROM..TO, or how many from 0 on.
    #[arg(long, default_value = "1000", value_parser = seeds, conflicts_with = "seed")]
    seeds: Range<u64>,
    /// Runs this seed alone, and says what goes wrong in it.
    #[arg(long)]
    seed: Option<u64>,
    /// Prints what happens in the run of `--seed`.
    #[arg(long, requires = "seed")]
    trace: bool,
    /// Heartbeats are part of the trace.
    #[arg(long, requires = "trace")]
    heartbeats: bool,
    /// Runs at a time.
    #[arg(long, default_value_t = std::thread::available_parallelism().map_or(1, usize::from))]
    jobs: usize,
    /// Goes on until this many seeds have failed.
    #[arg(long, default_value_t = 1)]
    failures: usize,
    /// Breaks a rule of the protocol on purpose.
    #[arg(long, value_parser = Mutant::named, conflicts_with = "mutants")]
    mutant: Option<Mutant>,
    /// Looks for the first seed that catches each mutant.
    #[arg(long)]
    mutants: bool,
    /// Seconds spent on making the plan of a failing seed smaller; 0: its whole plan is told.
    #[arg(long, default_value_t = 20)]
    shrink: u64,
    /// Last lines of the trace that are told of a failing seed.
    #[arg(long, default_value_t = 60)]
    lines: usize,
}

fn seeds(text: &str) -> Result<Range<u64>, String> {
    let number = |text: &str| text.parse::<u64>().map_err(|error| format!("{text:?}: {error}"));
    match text.split_once("..") {
        Some((from, to)) => Ok(number(from)?..number(to)?),
        None => Ok(0..number(text)?),
    }
}

impl Args {
    /// Does what is asked for. The exit code is 1 if something was found, or a mutant was not.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let ok = match self.seed {
            _ if self.mutants => self.find_mutants(),
            Some(seed) => self.explain(seed),
            None => self.sweep(),
        };
        Ok(if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    fn sweep(&self) -> bool {
        let (begun, total) = (Instant::now(), self.seeds.end.saturating_sub(self.seeds.start));
        let each = (total / 20).max(1);
        let summary = runner::sweep(self.seeds.clone(), self.jobs, self.mutant, self.failures, |runs, failures| {
            if runs % each == 0 {
                eprintln!("{runs} of {total} runs, {failures} failed, {:.0} s", begun.elapsed().as_secs_f64());
            }
        });
        println!("{}", summary.counts);
        let (runs, seconds) = (summary.counts.runs, begun.elapsed().as_secs_f64());
        println!(
            "{runs} runs in {seconds:.1} s, {:.0} a second; {} failed",
            runs as f64 / seconds,
            summary.failures.len()
        );
        for (seed, failure) in summary.failures.iter().take(FAILURES_MAX) {
            println!("seed {seed} {}", first_line(&failure.to_string()));
        }
        if let Some((seed, _)) = summary.failures.first() {
            println!();
            self.explain(*seed);
        }
        summary.failures.is_empty()
    }

    fn explain(&self, seed: u64) -> bool {
        let plan = runner::plan(seed, self.mutant);
        let detail = match (self.trace, self.heartbeats) {
            (false, _) => Detail::None,
            (true, false) => Detail::Events,
            (true, true) => Detail::All,
        };
        let report = runner::run(&plan, detail);
        for line in &report.trace {
            println!("{line}");
        }
        let Some(failure) = report.failure else {
            println!("{}\nseed {seed}: nothing is wrong; hash {:016x}", report.counts, report.hash);
            return true;
        };
        println!("seed {seed} fails {failure}\n");
        let (mut plan, invariant) = (plan, failure.violation.invariant);
        if self.shrink > 0 {
            let shrunk = shrink::shrink(&plan, invariant, Duration::from_secs(self.shrink));
            println!("made smaller in {} runs:", shrunk.tried);
            plan = shrunk.plan;
        }
        print!("{}", describe(&plan));
        if !self.trace || self.shrink > 0 {
            let report = runner::run(&plan, Detail::Events);
            let skipped = report.trace.len().saturating_sub(self.lines);
            println!("... {skipped} lines before");
            for line in &report.trace[skipped..] {
                println!("{line}");
            }
            if let Some(failure) = report.failure {
                println!("{failure}");
            }
        }
        let mutant = self.mutant.map_or_else(String::new, |mutant| format!(" --mutant {}", mutant.name));
        println!("\nagain: underpass-sim --seed {seed}{mutant} --trace");
        false
    }

    fn find_mutants(&self) -> bool {
        println!("| mutant | breaks | caught by | seed |\n|---|---|---|---|");
        let mut all = true;
        for mutant in mutants::ALL {
            let summary = runner::sweep(self.seeds.clone(), self.jobs, Some(*mutant), 1, |_, _| {});
            let caught = match summary.failures.first() {
                Some((seed, failure)) => format!("**{}** | {seed} |", failure.violation.invariant),
                None => {
                    all = false;
                    format!("NOT within {} seeds | |", self.seeds.end)
                }
            };
            println!("| `{}` | {} | {caught}", mutant.name, mutant.breaks);
        }
        all
    }
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

/// A plan, in words.
fn describe(plan: &Plan) -> String {
    let shape = &plan.shape;
    let mut text = format!("{:?}\n{:?}\n{:?}\n", shape.timing, shape.weather, shape.authority);
    for (i, host) in shape.coordinators.iter().enumerate() {
        text += &format!("coordinator {i}: {:?}, clock {:+} ppm\n", host.data_path, host.clock.fast_ppm);
    }
    for (i, host) in shape.replicas.iter().enumerate() {
        let wanted = if host.wanted { "wanted" } else { "spare" };
        text += &format!("replica {i}: shard {}, {wanted}, clock {:+} ppm\n", host.shard, host.clock.fast_ppm);
    }
    let operations: Vec<_> = plan.clients.iter().map(|client| client.operations.len().to_string()).collect();
    text += &format!("operations of each client: {}\n", operations.join(", "));
    for fault in &plan.faults {
        text += &format!("{fault}\n");
    }
    text
}
