//! Racks for real: needs root.

use std::{
    collections::HashMap,
    fs,
    net::{SocketAddr, UdpSocket},
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use underpass_rack::{Config, Fault, Host, Links, Probability, Rack, down};

/// Every test has a rack of its own name: they run side by side, and with racks of others.
fn name(test: &str) -> String {
    format!("t{}-{test}", std::process::id())
}

fn up(test: &str, hosts: &[&str]) -> Rack {
    Rack::up(&Config::of_hosts(&name(test), hosts)).unwrap()
}

fn assert_nothing_left(rack: &str) {
    let namespaces: Vec<_> = fs::read_dir("/run/netns")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|namespace| {
            *namespace == format!("underpass.{rack}") || namespace.starts_with(&format!("underpass.{rack}."))
        })
        .collect();
    assert_eq!(namespaces, Vec::<String>::new());
    assert!(!Path::new("/sys/fs/bpf/underpass-rack").join(rack).exists());
    for suffix in ["json", "json.new", "log"] {
        assert!(!Path::new("/run/underpass/racks").join(format!("{rack}.{suffix}")).exists());
    }
    assert!(!Rack::list().iter().any(|name| name == rack));
}

fn ping(from: &Host, to: &Host, count: u32) -> bool {
    let mut ping = from.command("ping").unwrap();
    ping.args(["-q", "-i", "0.01", "-W", "1", "-c", &count.to_string(), &to.addr.to_string()]);
    ping.stdout(Stdio::null()).status().unwrap().success()
}

fn socket(host: &Host, port: u16) -> UdpSocket {
    let socket = host.enter(|| UdpSocket::bind((host.addr, port))).unwrap().unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    socket
}

/// Sends `count` numbered datagrams; returns the numbers that arrived, in their order.
fn send_numbers(from: &UdpSocket, to: &UdpSocket, count: u32) -> Vec<u32> {
    let address: SocketAddr = to.local_addr().unwrap();
    let receiver = to.try_clone().unwrap();
    let received = thread::spawn(move || {
        let mut numbers = Vec::new();
        let mut buffer = [0; 2048];
        while let Ok((length, _)) = receiver.recv_from(&mut buffer) {
            numbers.push(u32::from_ne_bytes(buffer[..length].try_into().unwrap()));
        }
        numbers
    });
    for number in 0..count {
        from.send_to(&number.to_ne_bytes(), address).unwrap();
        // The receiver's buffer is finite, and a frame lost there would count as one lost by the switch.
        if number % 64 == 63 {
            thread::sleep(Duration::from_millis(1));
        }
    }
    received.join().unwrap()
}

/// Lets the hosts resolve each other's address, so that only data is left to be counted.
fn acquaint(from: &UdpSocket, to: &UdpSocket) {
    assert_eq!(send_numbers(from, to, 1), [0]);
}

#[test]
fn hosts_reach_each_other_and_nothing_is_left_afterwards() {
    let rack = up("ping", &["a", "b", "c"]);
    let hosts = rack.hosts();
    for from in &hosts {
        for to in &hosts {
            assert!(ping(from, to, 3), "{} to {}", from.name, to.name);
        }
    }
    let name = rack.name().to_string();
    let status = rack.status().unwrap();
    assert!(status.hosts.iter().all(|host| host.ports[0].up && host.ports[0].counts.tx_frames > 0));
    assert!(status.delay_line.running);
    rack.down().unwrap();
    assert_nothing_left(&name);
}
