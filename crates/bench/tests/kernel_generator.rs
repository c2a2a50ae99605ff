//! The load generator and its sinks against the bare reflector: what is sent comes back, whole, and is counted.

use std::time::Duration;

use underpass_bench::{
    bed::{Bed, Reflector},
    workload::{Popularity, Workload},
};

#[test]
fn every_request_comes_back_from_the_reflector_intact() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return;
    }
    let bed = Bed::new(3).unwrap();
    let mut run = bed.run(&Reflector).unwrap();
    for workload in [
        Workload { write_percent: 0.0, ..Workload::default() },
        Workload { popularity: Popularity::Zipf(0.99), ..Workload::default() },
        Workload { write_percent: 100.0, key_size: 31, value_size: 1001, ..Workload::default() },
    ] {
        let counts = run.verify(&workload, Duration::from_millis(300)).unwrap();
        println!("{}: {counts:?}", workload.label());
        let sent = counts.reads_sent + counts.writes_sent;
        assert!(sent > 1000, "hardly anything was sent: {counts:?}");
        let share = counts.writes_sent as f64 / sent as f64 * 100.0;
        assert!((share - workload.write_percent).abs() < 1.0, "{share} % writes: {counts:?}");
        assert_eq!(counts.commits, 0);
        assert_eq!(counts.reads.iter().sum::<u64>(), 0);
    }
    let sample = run.measure(&Workload { write_percent: 0.0, ..Workload::default() }, Duration::from_secs(1)).unwrap();
    println!(
        "{:.0}/s, {:.0} % of the core, {:.0} per core-second, {:?}",
        sample.rate(),
        sample.utilisation() * 100.0,
        sample.per_core_second(),
        sample.counts
    );
    run.stop().unwrap();
}
