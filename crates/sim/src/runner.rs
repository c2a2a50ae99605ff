//! Many runs, on several threads.

use std::{
    cell::Cell,
    panic::{self, AssertUnwindSafe},
    sync::{
        Mutex, Once, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use underpass_check::invariants::Violation;

use crate::{
    mutants::Mutant,
    plan::Plan,
    trace::Detail,
    world::{self, Counts, Failure, Report},
};

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Runs a plan. A panic is a failure like any other, by the name of `panic`.
pub fn run(plan: &Plan, detail: Detail) -> Report {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if QUIET.get() {
                let location = info.location().map(ToString::to_string).unwrap_or_default();
                LOCATION.set(location);
            } else {
                usual(info);
            }
        }));
    });
    QUIET.set(true);
    let result = panic::catch_unwind(AssertUnwindSafe(|| world::run(plan, detail)));
    QUIET.set(false);
    result.unwrap_or_else(|cause| {
        let text = cause.downcast_ref::<&str>().map(ToString::to_string);
        let text = text.or_else(|| cause.downcast_ref::<String>().cloned()).unwrap_or_default();
        let what = format!("{}: {text}", LOCATION.take());
        let violation = Violation { invariant: "panic", what };
        Report {
            failure: Some(Failure { at_ms: 0, violation }),
            counts: Counts { runs: 1, ..Counts::default() },
            hash: 0,
            trace: Vec::new(),
        }
    })
}

thread_local! {
    static LOCATION: Cell<String> = const { Cell::new(String::new()) };
}

/// The plan of a seed, with a mutant.
pub fn plan(seed: u64, mutant: Option<Mutant>) -> Plan {
    Plan { mutant, ..Plan::new(seed) }
}

/// What came of many runs.
#[derive(Debug, Default)]
pub struct Summary {
    /// Seeds that failed, in their order, and how.
    pub failures: Vec<(u64, Failure)>,
    /// Sums.
    pub counts: Counts,
}

/// Runs seeds. Stops early once `failures_max` have failed; then every seed below the highest failing one has been run.
pub fn sweep(
    seeds: std::ops::Range<u64>,
    jobs: usize,
    mutant: Option<Mutant>,
    failures_max: usize,
    progress: impl Fn(u64, usize) + Sync,
) -> Summary {
    let next = AtomicU64::new(seeds.start);
    let stop = AtomicBool::new(false);
    let summary = Mutex::new(Summary::default());
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        break;
                    }
                    let report = run(&plan(seed, mutant), Detail::None);
                    let mut summary = summary.lock().unwrap_or_else(PoisonError::into_inner);
                    summary.counts.add(report.counts);
                    if let Some(failure) = report.failure {
                        summary.failures.push((seed, failure));
                    }
                    progress(summary.counts.runs, summary.failures.len());
                    if summary.failures.len() >= failures_max {
                        stop.store(true, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    let mut summary = summary.into_inner().unwrap_or_else(PoisonError::into_inner);
    summary.failures.sort_by_key(|(seed, _)| *seed);
    summary
}
