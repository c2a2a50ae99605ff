//! The simulation itself: it finds nothing in the protocol, the same thing twice, and every mutant.

use std::time::Duration;

use underpass_sim::{mutants::Mutant, runner, shrink::shrink, trace::Detail};

/// Seeds of the test, and those within which a mutant has to be caught here. (`./dev sim --mutants` looks further.)
const SEEDS: u64 = 200;
const MUTANT_SEEDS: u64 = 400;

#[test]
fn nothing_is_wrong_and_everything_happens() {
    let summary = runner::sweep(0..SEEDS, 2, None, 1, |_, _| {});
    let failures: Vec<_> = summary.failures.iter().map(|(seed, failure)| format!("seed {seed} {failure}")).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    let counts = summary.counts;
    for (what, count) in [
        ("operations", counts.answered),
        ("unknown outcomes", counts.unknown),
        ("take-overs", counts.tenures.saturating_sub(counts.runs)),
        ("learners", counts.learners),
        ("replicas that were emptied", counts.resets),
        ("hand-overs", counts.handovers),
        ("repairs", counts.repaired),
        ("shards that lost everything, or crashes spared", counts.shards_lost + counts.crashes_spared),
        ("conflicts", counts.conflicts),
        ("stores of unknown outcome", counts.unknown_stores),
    ] {
        assert!(count > SEEDS / 50, "only {count} {what} in {SEEDS} runs:\n{counts}");
    }
    assert!(counts.aborts > 0, "no write was aborted in {SEEDS} runs:\n{counts}");
    assert!(counts.answered * 2 > counts.operations, "most operations are answered:\n{counts}");
    assert!(counts.shards_lost * 20 < counts.runs, "few runs lose everything:\n{counts}");
}

#[test]
fn one_seed_is_one_run() {
    for seed in 0..20 {
        let plan = runner::plan(seed, None);
        let (first, second) = (runner::run(&plan, Detail::None), runner::run(&plan, Detail::All));
        assert_eq!(first.hash, second.hash, "seed {seed}");
        assert_eq!(first.counts, second.counts, "seed {seed}");
    }
    let hash = |seed| runner::run(&runner::plan(seed, None), Detail::None).hash;
    assert_ne!(hash(1), hash(2));
}

/// The first seed that catches a mutant, and by which invariant.
fn caught(name: &str) -> (u64, &'static str) {
    let mutant = Mutant::named(name).unwrap();
    let summary = runner::sweep(0..MUTANT_SEEDS, 2, Some(mutant), 1, |_, _| {});
    let (seed, failure) = summary.failures.first().unwrap_or_else(|| panic!("{name} is not caught"));
    assert_ne!(failure.violation.invariant, "panic", "{name}: {failure}");
    (*seed, failure.violation.invariant)
}

/// Rules that hardly anything but a story puts to the test.
#[test]
fn stories_test_what_they_are_made_for() {
    for (name, invariant) in [
        ("keep_bits", "committed-everywhere"),
        ("any_epoch_ack", "committed-everywhere"),
        ("no_freeze", "one-effect"),
        ("forget_sessions", "one-effect"),
        ("ignore_lease", "one-coordinator"),
    ] {
        let (seed, by) = caught(name);
        assert_eq!(by, invariant, "{name}, seed {seed}");
    }
}

#[test]
fn a_failing_run_is_made_smaller_and_fails_alike() {
    let (seed, invariant) = caught("ignore_bound");
    let plan = runner::plan(seed, Mutant::named("ignore_bound").ok());
    let shrunk = shrink(&plan, invariant, Duration::from_secs(20)).plan;
    assert!(shrunk.operations() * 2 < plan.operations() && shrunk.faults.len() <= plan.faults.len());
    let failure = runner::run(&shrunk, Detail::None).failure.expect("it fails still");
    assert_eq!(failure.violation.invariant, invariant);
}
