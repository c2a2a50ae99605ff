//! The rack on each kernel that it must work on: `./dev test kernels` runs this under Debian's.

mod common;

use std::time::Duration;

use common::{NONE, acquainted, attach, constant_program, name, send_numbers};
use underpass_rack::{Config, Fault, Links, Probability, Rack};

#[test]
fn the_switch_forwards_floods_and_does_every_fault() {
    let mut config = Config::of_hosts(&name("kernel"), &["a", "b"]);
    config.host[1].threaded = true;
    let rack = Rack::up(&config).unwrap();
    // Address resolution floods, data is forwarded.
    let (a, b) = acquainted(&rack);
    assert_eq!(send_numbers(&a, &b, 64), Vec::from_iter(0..64));
    let link = Links::between("a", "b");
    let faulty = |fault: Fault, count: u32| {
        rack.set_fault(link, &fault).unwrap();
        send_numbers(&a, &b, count)
    };

    let half = Probability::new(0.5).unwrap();
    let loss = Fault { loss: half, ..Default::default() };
    let first = faulty(loss, 200);
    // Binomial: 100 expected, standard deviation 7; seven of them to either side.
    assert!((50..=150).contains(&first.len()), "{} of 200 arrived", first.len());
    assert_eq!(faulty(loss, 200), first);
    assert_eq!(faulty(Fault { cut: true, ..Default::default() }, 5), NONE);
    let mut twice = faulty(Fault { duplicate: Probability::ALWAYS, ..Default::default() }, 20);
    twice.sort();
    assert_eq!(twice, Vec::from_iter((0..20).flat_map(|number| [number, number])));
    let delay = Duration::from_millis(5);
    assert_eq!(faulty(Fault { delay, ..Default::default() }, 20), Vec::from_iter(0..20));
    let mut overtaken = faulty(Fault { reorder: half, reorder_hold: delay, ..Default::default() }, 100);
    assert!(!overtaken.is_sorted());
    overtaken.sort();
    assert_eq!(overtaken, Vec::from_iter(0..100));

    let counts = rack.fault_counters(link).unwrap();
    assert_eq!((counts.cut, counts.duplicated, counts.delayed), (5, 20, 20));
    assert_eq!(counts.lost, 2 * (200 - first.len() as u64));
    rack.clear_faults().unwrap();
    rack.down().unwrap();
}

#[test]
fn a_host_attaches_a_native_program_of_its_own() {
    const XDP_DROP: i32 = 1;
    const XDP_PASS: i32 = 2;
    const XDP_TX: i32 = 3;
    let rack = Rack::up(&Config::of_hosts(&name("xdp"), &["a", "b"])).unwrap();
    let (a, b) = acquainted(&rack);
    let host = rack.host("b").unwrap();
    for (verdict, arriving) in [(XDP_DROP, 0), (XDP_PASS, 5), (XDP_TX, 0)] {
        let program = constant_program(verdict);
        attach(&host, Some(&program));
        assert_eq!(send_numbers(&a, &b, 5).len(), arriving);
        attach(&host, None);
        // The port still takes redirected frames: it does not depend on the program.
        assert_eq!(send_numbers(&a, &b, 5).len(), 5);
    }
    // What the program sent back reached the switch, which knows nobody at that port with b's address but b.
    assert_eq!(rack.status().unwrap().hosts[1].ports[0].counts.rx_unknown, 5);
}
