//! Next hops against a real kernel: a network namespace of its own with a router beside it. Needs root.

use std::{
    net::Ipv4Addr,
    process::Command,
    time::{Duration, Instant},
};

use nix::sched::{CloneFlags, unshare};
use underpass_datapath::next_hop::{NextHopError, NextHops};

const DIRECT: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 254);
const BEHIND: Ipv4Addr = Ipv4Addr::new(10, 2, 0, 2);

fn ip(args: &str) -> String {
    let output = Command::new("ip").args(args.split_whitespace()).output().expect("iproute2 is installed");
    assert!(output.status.success(), "ip {args}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The calling thread in a new namespace with `c0` (10.1.0.1/24) to a router's `r0` (10.1.0.254), and `c1` (10.3.0.1/24).
struct Net {
    router: String,
    ifindex: u32,
}

impl Net {
    /// `None`, said aloud, without the privilege to make namespaces.
    fn new(name: &str) -> Option<Self> {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("not run: network namespaces need root");
            return None;
        }
        let router = format!("upnh-{}-{name}", std::process::id());
        ip(&format!("netns add {router}"));
        unshare(CloneFlags::CLONE_NEWNET).expect("root may unshare the network namespace");
        ip("link set lo up");
        ip(&format!("link add c0 type veth peer name r0 netns {router}"));
        ip(&format!("link add c1 type veth peer name r1 netns {router}"));
        for (device, address) in [("c0", "10.1.0.1/24"), ("c1", "10.3.0.1/24")] {
            ip(&format!("addr add {address} dev {device}"));
            ip(&format!("link set {device} up"));
        }
        for (device, address) in [("r0", "10.1.0.254/24"), ("r1", "10.3.0.254/24")] {
            ip(&format!("-n {router} addr add {address} dev {device}"));
            ip(&format!("-n {router} link set {device} up"));
        }
        let ifindex = nix::net::if_::if_nametoindex("c0").unwrap();
        Some(Self { router, ifindex })
    }

    fn router_mac(&self) -> [u8; 6] {
        let shown = ip(&format!("-n {} -br link show r0", self.router));
        let mac = shown.split_whitespace().find(|word| word.matches(':').count() == 5).unwrap();
        mac.split(':').map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect::<Vec<_>>().try_into().unwrap()
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.router]).status();
    }
}

/// Waits until a change is told after which `addr` resolves to `wanted`; never asks unless told of a change.
fn follow(hops: &mut NextHops, addr: Ipv4Addr, wanted: [u8; 6]) {
    let deadline = Instant::now() + Duration::from_secs(5);
    while Instant::now() < deadline {
        if hops.poll_changes() && hops.resolve(addr).unwrap() == Some(wanted) {
            return;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    panic!("no change led to {wanted:x?} for {addr}");
}

#[test]
fn direct_and_behind_a_router() {
    let Some(net) = Net::new("a") else { return };
    let mut hops = NextHops::new(net.ifindex).unwrap();
    assert_eq!(hops.resolve(DIRECT).unwrap(), None, "nothing was ever sent there");
    hops.probe(DIRECT).unwrap();
    follow(&mut hops, DIRECT, net.router_mac());

    let error = hops.resolve(BEHIND).unwrap_err();
    assert!(matches!(error, NextHopError::NoRoute { .. }), "{error}");
    assert!(error.to_string().contains("ip route add"), "{error}");
    hops.poll_changes();
    ip("route add 10.2.0.0/24 via 10.1.0.254");
    follow(&mut hops, BEHIND, net.router_mac());
    assert!(!hops.poll_changes(), "nothing happened since");

    // A replaced router: the neighbour entry changes under the route.
    let other = [2, 0, 0, 0, 0, 9];
    ip("neigh replace 10.1.0.254 lladdr 02:00:00:00:00:09 dev c0 nud permanent");
    follow(&mut hops, BEHIND, other);
    ip("neigh del 10.1.0.254 dev c0");
    assert!(hops.poll_changes());
    assert_eq!(hops.resolve(BEHIND).unwrap(), None);
    hops.probe(BEHIND).unwrap();
    follow(&mut hops, BEHIND, net.router_mac());
}

#[test]
fn a_veth_transmits_what_its_peer_can_receive() {
    use underpass_datapath::features::transmits_redirected;
    let Some(net) = Net::new("d") else { return };
    if transmits_redirected(net.ifindex).is_none() {
        eprintln!("not run: this kernel does not tell what devices can do");
        return;
    }
    assert_eq!(transmits_redirected(net.ifindex), Some(false));
    let gro = |state| {
        let args = ["netns", "exec", &net.router, "ethtool", "-K", "r0", "gro", state];
        assert!(Command::new("ip").args(args).status().unwrap().success());
    };
    gro("on");
    assert_eq!(transmits_redirected(net.ifindex), Some(true));
    gro("off");
    assert_eq!(transmits_redirected(net.ifindex), Some(false));
}

#[test]
fn explains_what_cannot_be_reached() {
    let Some(net) = Net::new("b") else { return };
    let mut hops = NextHops::new(net.ifindex).unwrap();
    ip("neigh replace 10.1.0.254 lladdr 02:00:00:00:00:09 dev c0 nud permanent");
    assert_eq!(hops.resolve(DIRECT).unwrap(), Some([2, 0, 0, 0, 0, 9]));

    let error = hops.resolve(Ipv4Addr::new(10, 3, 0, 254)).unwrap_err();
    assert!(matches!(error, NextHopError::OtherDevice { .. }), "{error}");
    assert!(error.to_string().contains("through c1") && error.to_string().contains("attached to c0"), "{error}");

    let error = hops.resolve(Ipv4Addr::new(10, 1, 0, 1)).unwrap_err();
    assert!(matches!(error, NextHopError::NotUnicast { .. }), "{error}");

    ip("route add unreachable 10.9.0.0/24");
    let error = hops.resolve(Ipv4Addr::new(10, 9, 0, 1)).unwrap_err();
    assert!(matches!(error, NextHopError::NoRoute { .. }), "{error}");

    ip("route add 10.8.0.0/24 via inet6 fe80::1 dev c0");
    let error = hops.resolve(Ipv4Addr::new(10, 8, 0, 1)).unwrap_err();
    assert!(matches!(error, NextHopError::Gateway { .. }), "{error}");

    // The device goes down and takes its routes with it.
    while hops.poll_changes() {}
    ip("link set c0 down");
    assert!(hops.poll_changes());
    assert!(hops.resolve(DIRECT).is_err());
    ip("link set c0 up");
    assert!(hops.poll_changes());

    // Gone altogether.
    ip("link del c0");
    assert!(hops.poll_changes());
    assert!(hops.resolve(DIRECT).is_err());
}

#[test]
fn a_silent_neighbour_stays_unresolved() {
    let Some(net) = Net::new("c") else { return };
    let mut hops = NextHops::new(net.ifindex).unwrap();
    let nobody = Ipv4Addr::new(10, 1, 0, 77);
    hops.probe(nobody).unwrap();
    assert_eq!(hops.resolve(nobody).unwrap(), None);
    // It fails after three solicitations; the entry says so and probing starts anew.
    let deadline = Instant::now() + Duration::from_secs(8);
    while !ip("neigh show dev c0").contains("FAILED") {
        assert!(Instant::now() < deadline, "the kernel never gave up: {}", ip("neigh show dev c0"));
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(hops.resolve(nobody).unwrap(), None);
    ip(&format!("-n {} addr add 10.1.0.77/24 dev r0", net.router));
    hops.probe(nobody).unwrap();
    follow(&mut hops, nobody, net.router_mac());
}
