//! The whole system in a rack: the real binary, every data path, faults on every link, and the linearizability checker.

mod common;

use std::time::Duration;

use common::{History, System, Variant};
use underpass_client::engine::monotonic_ns;
use underpass_rack::{Fault, Links, Probability};

const FAULTS: f64 = 0.01;

fn faulty() -> Fault {
    let one_percent = Probability::new(FAULTS).unwrap();
    Fault { loss: one_percent, duplicate: one_percent, reorder: one_percent, ..Fault::default() }
}

/// Runs the mixed workload under loss, duplication and reordering, and stops everything in order.
fn is_linearizable(variant: Variant) {
    let system = System::start(variant);
    system.rack.set_fault(Links::ALL, &faulty()).unwrap();
    let history = system.load(Duration::from_secs(3), |_| {});
    system.rack.clear_faults().unwrap();
    assert!(history.len() > 200, "only {} operations: {variant:?}", history.len());
    history.check();
    system.replicas_agree();
    system.stop();
}

#[test]
fn xdp_broadcast_native() {
    is_linearizable(Variant::XDP);
}

#[test]
fn xdp_broadcast_generic() {
    is_linearizable(Variant { name: "gen", mode: "generic", ..Variant::XDP });
}

#[test]
fn xdp_tc() {
    is_linearizable(Variant { name: "tc", write_path: "tc", ..Variant::XDP });
}

#[test]
fn xdp_published() {
    is_linearizable(Variant { name: "pub", write_path: "published", ..Variant::XDP });
}

#[test]
fn socket() {
    is_linearizable(Variant { name: "sock", datapath: "socket", ..Variant::XDP });
}

#[test]
fn two_shards_on_one_coordinator() {
    is_linearizable(Variant { name: "two", shards: 2, ..Variant::XDP });
}

#[test]
fn replicas_behind_a_router() {
    is_linearizable(Variant { name: "routed", routed: true, ..Variant::XDP });
}

#[test]
fn the_shard_outlives_its_agent() {
    let mut system = System::start(Variant { name: "agent", ..Variant::XDP });
    let mut agent = system.take_agent();
    let mut alone = 0..0;
    let history = system.load(Duration::from_secs(3), |system| {
        std::thread::sleep(Duration::from_millis(700));
        agent.kill().unwrap();
        agent.wait().unwrap();
        // Nobody but the kernel serves now.
        alone.start = monotonic_ns();
        std::thread::sleep(Duration::from_millis(700));
        alone.end = monotonic_ns();
        agent = system.start_agent();
    });
    system.put_agent(agent);
    history.check();
    let (reads, writes) = history.called_and_answered_in(alone);
    assert!(reads > 0 && writes > 0, "{reads} reads and {writes} writes were answered while there was no agent");
    system.replicas_agree();
    system.stop();
}

#[test]
fn a_clean_end_keeps_the_data() {
    let mut system = System::start(Variant { name: "clean", ..Variant::XDP });
    let before = system.load(Duration::from_secs(1), |_| {});
    system.stop_agent();
    let agent = system.start_agent();
    system.put_agent(agent);
    let after = system.load(Duration::from_secs(1), |_| {});
    History::joined(before, after).check();
    system.stop();
}

#[test]
fn a_lost_replica_is_left_out_and_taken_in_again() {
    let mut system = System::start(Variant { name: "lost", ..Variant::XDP });
    let mut without = 0..u64::MAX;
    let history = system.load(Duration::from_secs(4), |system| {
        std::thread::sleep(Duration::from_millis(1000));
        system.kill_replica(1);
        // Long enough to be noticed.
        std::thread::sleep(Duration::from_millis(1500));
        without.start = monotonic_ns();
    });
    history.check();
    let (reads, writes) = history.called_and_answered_in(without);
    assert!(reads > 0 && writes > 0, "{reads} reads and {writes} writes were answered without the lost replica");
    system.start_replica(1);
    system.replicas_agree();
    system.stop();
}

#[test]
fn an_agent_is_replaced_without_a_pause() {
    let mut system = System::start(Variant { name: "hup", ..Variant::XDP });
    let mut agent = system.take_agent();
    let mut alone = 0..0;
    let history = system.load(Duration::from_secs(2), |system| {
        std::thread::sleep(Duration::from_millis(700));
        alone.start = monotonic_ns();
        system.hang_up(&mut agent);
        agent = system.start_agent();
        alone.end = monotonic_ns();
    });
    system.put_agent(agent);
    history.check();
    let (reads, writes) = history.called_and_answered_in(alone);
    assert!(reads > 0 && writes > 0, "{reads} reads and {writes} writes were answered meanwhile");
    system.replicas_agree();
    system.stop();
}
