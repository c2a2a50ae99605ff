//! Racks for real: needs root.

mod common;

use std::{
    fs,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use common::{NONE, acquainted, attach, constant_program, name, send_numbers};
use underpass_rack::{Config, Error, Fault, FaultCounts, Host, HostConfig, HostStatus, Links, Probability, Rack, down};

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

/// After failed address resolution: the kernel asks again only after a second.
fn ping_soon(from: &Host, to: &Host) -> bool {
    (0..5).any(|_| ping(from, to, 1))
}

fn a_to_b(rack: &Rack) -> FaultCounts {
    rack.fault_counters(Links::between("a", "b")).unwrap()
}

fn share(value: f64) -> Probability {
    Probability::new(value).unwrap()
}

/// The commands as a user gives them.
fn underpass(arguments: &[&str]) -> (bool, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_underpass-rack")).args(arguments).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap();
    (output.status.success(), text)
}

/// Starts a rack of the hosts a and b as a user does.
fn underpass_up(name: &str) {
    let file = std::env::temp_dir().join(format!("{name}.toml"));
    let text =
        format!("name = \"{name}\"\nsubnet = \"10.77.0.0/24\"\nhost = [{{ name = \"a\" }}, {{ name = \"b\" }}]\n");
    fs::write(&file, text).unwrap();
    let (success, text) = underpass(&["up", file.to_str().unwrap()]);
    fs::remove_file(&file).unwrap();
    assert!(success, "{text}");
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
    let works = |host: &HostStatus| host.ports[0].up && host.ports[0].counts.tx_frames > 0;
    assert!(status.hosts.iter().all(works), "{status:#?}");
    assert!(status.delay_line.running);
    assert_eq!(rack.fault_counters(Links::ALL).unwrap(), FaultCounts::default());
    rack.down().unwrap();
    assert_nothing_left(&name);
}

#[test]
fn a_dropped_rack_is_down() {
    let rack = up("drop", &["a"]);
    let name = rack.name().to_string();
    drop(rack);
    assert_nothing_left(&name);
}

/// Where nobody has mounted the BPF file system, a rack does, so that everybody sees what it pins.
#[test]
fn the_first_rack_of_a_machine_works() {
    use nix::{
        mount::{MntFlags, MsFlags, mount, umount2},
        sched::{CloneFlags, unshare},
        sys::statfs,
    };
    let bpffs = || statfs::statfs("/sys/fs/bpf").is_ok_and(|fs| fs.filesystem_type() == statfs::BPF_FS_MAGIC);
    let first = move || {
        // A machine of its own, as far as mounts go.
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();
        while bpffs() {
            umount2("/sys/fs/bpf", MntFlags::MNT_DETACH).unwrap();
        }
        let rack = up("first", &["a", "b"]);
        assert!(bpffs());
        acquainted(&rack);
        rack.down().unwrap();
    };
    thread::spawn(first).join().unwrap();
}

#[test]
fn two_racks_of_the_same_subnet_do_not_meet() {
    let (one, two) = (up("side1", &["a", "b"]), up("side2", &["a", "b"]));
    let (one_a, one_b) = acquainted(&one);
    let (two_a, two_b) = acquainted(&two);
    one.set_fault(Links::ALL, &Fault { loss: Probability::ALWAYS, ..Default::default() }).unwrap();
    assert_eq!(send_numbers(&one_a, &one_b, 10), NONE);
    assert_eq!(send_numbers(&two_a, &two_b, 10), Vec::from_iter(0..10));
    one.down().unwrap();
    assert_eq!(send_numbers(&two_a, &two_b, 10), Vec::from_iter(0..10));
    let name = two.name().to_string();
    two.down().unwrap();
    assert_nothing_left(&name);
}

#[test]
fn a_name_is_taken_once() {
    let rack = up("twice", &["a"]);
    let again = Rack::up(&Config::of_hosts(rack.name(), &["b"]));
    assert!(matches!(again, Err(Error::Exists { .. })), "{again:?}");
    // The refusal has left the first one alone.
    assert!(rack.host("a").unwrap().enter(|| ()).is_ok());
}

#[test]
fn loss_is_of_the_share_asked_for_and_repeats_with_the_seed() {
    let rack = up("loss", &["a", "b"]);
    let (a, b) = acquainted(&rack);
    let lossy = Fault { loss: share(0.1), ..Default::default() };
    let count = 3000;
    let run = |seed| {
        rack.set_seed(seed).unwrap();
        rack.set_fault(Links::between("a", "b"), &lossy).unwrap();
        send_numbers(&a, &b, count)
    };
    let before = a_to_b(&rack);
    let first = run(1);
    let lost = count as usize - first.len();
    // Binomial: 300 expected, standard deviation 16.4; six of them to either side.
    assert!((200..=400).contains(&lost), "{lost} of {count} lost");
    assert_eq!(a_to_b(&rack).lost - before.lost, lost as u64);
    assert_eq!(run(1), first);
    assert_ne!(run(2), first);
    // The other direction has lost nothing.
    assert_eq!(send_numbers(&b, &a, 100).len(), 100);
    rack.clear_faults().unwrap();
    assert_eq!(send_numbers(&a, &b, 100).len(), 100);
}

#[test]
fn a_description_can_have_faults_from_the_start() {
    let mut config = Config::of_hosts(&name("initial"), &["a", "b"]);
    config.fault.loss = Probability::ALWAYS;
    let rack = Rack::up(&config).unwrap();
    let (a, b) = (rack.host("a").unwrap(), rack.host("b").unwrap());
    assert!(!ping(&a, &b, 1));
    assert_ne!(a_to_b(&rack).lost, 0);
    rack.clear_faults().unwrap();
    assert!(ping_soon(&a, &b));
}

#[test]
fn every_frame_can_arrive_twice() {
    let rack = up("duplicate", &["a", "b"]);
    let (a, b) = acquainted(&rack);
    let count = 200;
    // With and without a delay are two paths: the switch forwards the first copy, or the delay line both.
    for delay in [Duration::ZERO, Duration::from_millis(1)] {
        let fault = Fault { duplicate: Probability::ALWAYS, delay, ..Default::default() };
        rack.set_fault(Links::between("a", "b"), &fault).unwrap();
        let before = a_to_b(&rack);
        let mut numbers = send_numbers(&a, &b, count);
        numbers.sort();
        assert_eq!(numbers, Vec::from_iter((0..count).flat_map(|number| [number, number])));
        assert_eq!(a_to_b(&rack).duplicated - before.duplicated, u64::from(count));
    }
}

#[test]
fn frames_overtake_each_other_and_none_is_lost() {
    let rack = up("reorder", &["a", "b"]);
    let (a, b) = acquainted(&rack);
    let fault = Fault { reorder: share(0.2), reorder_hold: Duration::from_millis(5), ..Default::default() };
    rack.set_fault(Links::between("a", "b"), &fault).unwrap();
    let count = 1000;
    let mut numbers = send_numbers(&a, &b, count);
    let descents = numbers.windows(2).filter(|pair| pair[0] > pair[1]).count();
    assert!(descents > 10, "{descents} numbers came before a lower one");
    numbers.sort();
    assert_eq!(numbers, Vec::from_iter(0..count));
    let reordered = a_to_b(&rack).reordered;
    assert!((100..=300).contains(&reordered), "{reordered}");
}

#[test]
fn frames_arrive_later_and_in_order() {
    let rack = up("delay", &["a", "b"]);
    let (a, b) = acquainted(&rack);
    rack.set_fault(
        Links::between("a", "b"),
        &Fault { delay: Duration::from_millis(30), jitter: Duration::ZERO, ..Default::default() },
    )
    .unwrap();
    let start = Instant::now();
    a.send_to(b"late", b.local_addr().unwrap()).unwrap();
    b.recv_from(&mut [0; 16]).unwrap();
    assert!(start.elapsed() >= Duration::from_millis(30));
    assert_eq!(send_numbers(&b, &a, 10).len(), 10);
    assert_eq!(rack.fault_counters(Links::between("b", "a")).unwrap().delayed, 0);
    assert_eq!(send_numbers(&a, &b, 500), Vec::from_iter(0..500));
    thread::sleep(Duration::from_millis(120));
    let counts = rack.line_counters().unwrap();
    assert_eq!((counts.taken, counts.sent, counts.held), (501, 501, 0));
    // Large frames take the other kind of record.
    a.send_to(&[7; 1400], b.local_addr().unwrap()).unwrap();
    let mut buffer = [0; 2048];
    assert_eq!(b.recv_from(&mut buffer).unwrap().0, 1400);
    assert!(buffer[..1400].iter().all(|&byte| byte == 7));
}

#[test]
fn a_partition_can_be_one_way_and_heals() {
    let rack = up("cut", &["a", "b", "c"]);
    let (a, b) = acquainted(&rack);
    rack.partition_one_way(&["a"], &["b"]).unwrap();
    assert_eq!(send_numbers(&a, &b, 5), NONE);
    assert_eq!(send_numbers(&b, &a, 5).len(), 5);
    assert_eq!(a_to_b(&rack).cut, 5);
    rack.heal().unwrap();
    assert_eq!(send_numbers(&a, &b, 5).len(), 5);

    rack.partition(&[&["a", "c"], &["b"]]).unwrap();
    assert_eq!((send_numbers(&a, &b, 5), send_numbers(&b, &a, 5)), (NONE.to_vec(), NONE.to_vec()));
    let (host_a, host_b, host_c) = (rack.host("a").unwrap(), rack.host("b").unwrap(), rack.host("c").unwrap());
    assert!(ping(&host_a, &host_c, 2), "both are on one side");
    // Address resolution is broadcast, and does not cross either: c and b have not met before.
    assert!(!ping(&host_c, &host_b, 1));
    rack.heal().unwrap();
    assert!(ping_soon(&host_c, &host_b));
}

#[test]
fn an_impossible_fault_is_refused() {
    let rack = up("refuse", &["a", "b"]);
    let message = |result: Result<(), Error>| result.unwrap_err().to_string();
    assert!(message(rack.set_fault(Links::from("x"), &Fault::default())).contains("has: a, b"));
    assert!(message(rack.set_fault(Links::between("a", "a"), &Fault::default())).contains("itself"));
    assert!(message(rack.partition(&[&["a"], &["a"]])).contains("twice"));
    assert!(message(rack.partition(&[&["a", "b"]])).contains("two groups"));
    assert!(message(rack.partition(&[&["a"], &[]])).contains("two groups"));
    assert!(Probability::new(f64::NAN).is_err());
}

#[test]
fn replicas_can_be_behind_a_router() {
    let text = format!(
        r#"
        name = "{}"
        [[subnet]]
        name = "front"
        range = "10.77.0.0/24"
        [[subnet]]
        name = "back"
        range = "10.77.1.0/24"
        [[host]]
        name = "a"
        subnet = "front"
        [[host]]
        name = "b"
        subnet = "back"
        [[router]]
        name = "r"
        link = [{{ subnet = "front" }}, {{ subnet = "back" }}]
        "#,
        name("router")
    );
    let rack = Rack::up(&text.parse().unwrap()).unwrap();
    let (a, b) = acquainted(&rack);
    // Across subnets the switch forwards nothing: it is the router that does.
    let message = rack.partition(&[&["a"], &["b"]]).unwrap_err().to_string();
    assert!(message.contains("router"), "{message}");
    rack.partition(&[&["a"], &["r"]]).unwrap();
    assert_eq!(send_numbers(&a, &b, 3), NONE);
    rack.heal().unwrap();
    assert_eq!(send_numbers(&a, &b, 3).len(), 3);
    // A broadcast stays in its subnet.
    let before = rack.status().unwrap().hosts[1].ports[0].counts.tx_frames;
    a.set_broadcast(true).unwrap();
    a.send_to(b"all", "10.77.0.255:9").unwrap();
    assert_eq!(rack.status().unwrap().hosts[1].ports[0].counts.tx_frames, before);
    assert!(rack.status().unwrap().hosts[2].ports[0].counts.tx_frames > 0);
}

#[test]
fn datagrams_carry_complete_checksums() {
    let rack = up("checksum", &["a", "b"]);
    let (a, b) = acquainted(&rack);
    // SAFETY: makes a descriptor and touches no memory of ours.
    let make = || unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW, 0x0800_u16.to_be().into()) };
    let tap = rack.host("b").unwrap().enter(make).unwrap();
    assert!(tap >= 0);
    // SAFETY: the kernel has just handed the descriptor out, to nobody else.
    let tap = unsafe { OwnedFd::from_raw_fd(tap) };
    a.send_to(b"summed", b.local_addr().unwrap()).unwrap();
    let mut frame = [0; 2048];
    // SAFETY: the buffer is valid for its length.
    let length = unsafe { libc::recv(tap.as_raw_fd(), frame.as_mut_ptr().cast(), frame.len(), 0) } as usize;
    assert_eq!(length, 14 + 20 + 8 + 6);
    let udp = &frame[34..length];
    assert_ne!(udp[6..8], [0, 0], "a checksum of 0 is none");
    // Pseudo header: both addresses, protocol 17, length.
    let sum = |bytes: &[u8]| -> u32 { bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum() };
    let total = sum(&frame[26..34]) + 17 + udp.len() as u32 + sum(udp);
    assert_eq!((total & 0xffff) + (total >> 16), 0xffff);
}

#[test]
fn a_host_receives_in_a_pinned_thread() {
    let mut config = Config::of_hosts(&name("thread1"), &["a", "b"]);
    config.host[1] = HostConfig { name: "b".into(), threaded: true, cpu: Some(0), ..Default::default() };
    let rack = Rack::up(&config).unwrap();
    config.name = name("thread2");
    let other = Rack::up(&config).unwrap();
    let thread_of = |rack: &Rack| rack.status().unwrap().hosts[1].ports[0].thread.clone().unwrap();
    let thread = thread_of(&rack);
    assert_ne!(thread.pid, thread_of(&other).pid, "both are called napi/b-*");
    let cpus = |pid: i32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:\t")).unwrap().to_string()
    };
    assert_eq!(cpus(thread.pid), "0");
    if thread::available_parallelism().unwrap().get() > 1 {
        assert_eq!(rack.threaded_napi("b", Some(1)).unwrap().pid, thread.pid);
        assert_eq!(cpus(thread.pid), "1");
    }
    let error = rack.threaded_napi("b", Some(1000)).unwrap_err().to_string();
    assert!(error.contains("processor 1000"), "{error}");
    let switches = |pid: i32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:\t")).unwrap().parse::<u64>().unwrap()
    };
    let (a, b) = acquainted(&rack);
    let host = rack.host("b").unwrap();
    let pass = constant_program(2);
    let receive_in_thread = || {
        let before = switches(thread.pid);
        assert_eq!(send_numbers(&a, &b, 100).len(), 100);
        assert!(switches(thread.pid) > before, "the thread has not run");
    };
    receive_in_thread();
    // It stays the same, and where it is, when the host's own program comes and goes.
    let place = cpus(thread.pid);
    attach(&host, Some(&pass));
    receive_in_thread();
    attach(&host, None);
    receive_in_thread();
    assert_eq!(cpus(thread.pid), place);
}

#[test]
fn a_command_sees_its_hosts_interfaces_and_the_machines_maps() {
    let rack = up("sysfs", &["a", "b"]);
    let host = rack.host("a").unwrap();
    let output = |program: &str, arguments: &[&str]| {
        let output = host.command(program).unwrap().args(arguments).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(output("ls", &["/sys/class/net"]), "a\nlo\n");
    assert_eq!(output("cat", &["/sys/class/net/a/address"]).trim(), host.mac.to_string());
    assert!(output("ls", &["/sys/fs/bpf/underpass-rack"]).contains(rack.name()));
    assert!(!Path::new("/sys/class/net/a").exists(), "the machine's own /sys has not changed");
    let panic = std::panic::catch_unwind(|| host.enter(|| panic!("passed on")));
    assert_eq!(panic.unwrap_err().downcast_ref(), Some(&"passed on"));
}

#[test]
fn processes_end_with_their_rack() {
    let rack = up("process", &["a", "b"]);
    let host = rack.host("a").unwrap();
    let mut polite = host.command("sleep").unwrap().arg("1000").spawn().unwrap();
    // Ignores the request to end, and starts another process as soon as its present one has ended.
    let mut stubborn =
        host.command("sh").unwrap().args(["-c", "trap : TERM; while :; do sleep 4321.25; done"]).spawn().unwrap();
    // A thread of this process that is on a host must not cost the process its life.
    let (stay, stays) = std::sync::mpsc::channel::<()>();
    thread::spawn(move || host.enter(move || stays.recv()));
    thread::sleep(Duration::from_millis(100));
    let processes = &rack.status().unwrap().hosts[0].processes;
    assert!(processes.iter().any(|process| process.command == "sleep 1000"), "{processes:?}");
    let name = rack.name().to_string();
    rack.down().unwrap();
    assert!(!polite.wait().unwrap().success());
    assert!(!stubborn.wait().unwrap().success());
    drop(stay);
    let lines = fs::read_dir("/proc").unwrap().filter_map(|entry| fs::read(entry.ok()?.path().join("cmdline")).ok());
    assert_eq!(lines.filter(|line| line == b"sleep\x004321.25\0").count(), 0);
    assert_nothing_left(&name);
}

#[test]
fn down_works_twice_and_on_nothing() {
    let rack = up("down", &["a"]);
    let name = rack.name().to_string();
    assert!(down(&name).unwrap());
    assert!(!down(&name).unwrap());
    assert_nothing_left(&name);
    // Its owner only finds that there is nothing left to do.
    rack.down().unwrap();
    assert!(matches!(Rack::open(&name), Err(Error::NoRack { .. })));
    assert!(matches!(down("../etc"), Err(Error::Config(_))));
}

#[test]
fn down_removes_what_a_crash_left() {
    let name = name("crash");
    let refused = || matches!(Rack::up(&Config::of_hosts(&name, &["a"])), Err(Error::Exists { .. }));
    let ip = |arguments: &str| assert!(Command::new("ip").args(arguments.split(' ')).status().unwrap().success());
    // In the middle of making namespaces, and one file that is not mounted yet.
    let namespaces = || {
        ip(&format!("netns add underpass.{name}"));
        ip(&format!("netns add underpass.{name}.a"));
        fs::write(format!("/run/netns/underpass.{name}.b"), "").unwrap();
    };
    // In the middle of making links.
    let links = || {
        namespaces();
        ip(&format!("-n underpass.{name} link add name a index 2 type veth peer name a netns underpass.{name}.a"));
    };
    // A state file cut short.
    let state = || fs::write(format!("/run/underpass/racks/{name}.json"), "{ \"topo").unwrap();
    // Only maps.
    let pins = || fs::create_dir_all(format!("/sys/fs/bpf/underpass-rack/{name}")).unwrap();
    let crashes: [&dyn Fn(); 4] = [&namespaces, &links, &state, &pins];
    for crash in crashes {
        crash();
        assert!(refused());
        assert!(Rack::list().contains(&name));
        assert!(down(&name).unwrap());
        assert_nothing_left(&name);
    }
}

/// Not a test: the process that `down_ends_the_rack_of_a_killed_process` kills.
#[test]
#[ignore = "run by another test"]
fn hold_a_rack_until_killed() {
    let name = std::env::var("RACK_TO_HOLD").expect("the test that runs this names a rack");
    let _rack = Rack::up(&Config::of_hosts(&name, &["a", "b"])).unwrap();
    thread::sleep(Duration::from_secs(60));
}

#[test]
fn down_ends_the_rack_of_a_killed_process() {
    let name = name("killed");
    let mut process = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "hold_a_rack_until_killed", "--ignored"])
        .env("RACK_TO_HOLD", &name)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let start = Instant::now();
    while !Rack::open(&name).and_then(|rack| rack.status()).is_ok_and(|status| status.delay_line.running) {
        assert!(start.elapsed() < Duration::from_secs(10), "the rack does not start");
        thread::sleep(Duration::from_millis(20));
    }
    // Set from another process than the one with the delay line.
    let rack = Rack::open(&name).unwrap();
    rack.set_fault(Links::ALL, &Fault { duplicate: Probability::ALWAYS, ..Default::default() }).unwrap();
    process.kill().unwrap();
    process.wait().unwrap();
    thread::sleep(Duration::from_millis(2100));
    // What needs no delay line still works, also while a fault that does is set.
    let (a, b) = acquainted(&rack);
    assert_eq!(send_numbers(&a, &b, 5).len(), 5);
    let delay = Fault { delay: Duration::from_millis(1), ..Default::default() };
    assert!(rack.set_fault(Links::ALL, &delay).unwrap_err().to_string().contains("does not run"));
    assert!(down(&name).unwrap());
    assert_nothing_left(&name);
}

#[test]
fn a_rack_that_does_not_start_leaves_nothing() {
    let name = name("fail");
    // Late: everything but the delay line is there.
    let error = Rack::up_detached(&Config::of_hosts(&name, &["a", "b"]), Command::new("false")).unwrap_err();
    assert!(error.to_string().contains("delay line"), "{error}");
    assert_nothing_left(&name);
    let mut shell = Command::new("sh");
    shell.args(["-c", "echo no such thing >&2"]);
    let error = Rack::up_detached(&Config::of_hosts(&name, &["a", "b"]), shell).unwrap_err();
    assert!(error.to_string().contains("no such thing"), "{error}");
    assert_nothing_left(&name);
    // Last: a processor that does not exist.
    let mut config = Config::of_hosts(&name, &["a"]);
    config.host[0].threaded = true;
    config.host[0].cpu = Some(1000);
    let error = Rack::up(&config).unwrap_err();
    assert!(error.to_string().contains("processor 1000"), "{error}");
    assert_nothing_left(&name);
}

#[test]
fn a_rack_started_by_command_outlives_it_and_its_daemon_can_die() {
    let name = name("command");
    underpass_up(&name);
    let rack = Rack::open(&name).unwrap();
    let (a, b) = acquainted(&rack);
    // Dropping one that was opened ends nothing.
    drop(rack);

    let (success, text) = underpass(&["exec", &name, "a", "--", "sh", "-c", "ls /sys/class/net; exit 3"]);
    assert!(!success && text == "a\nlo\n", "{text}");
    let (success, text) = underpass(&["exec", &name, "x", "--", "true"]);
    assert!(!success && text.contains("it has: a, b"), "{text}");

    let set = ["fault", &name, "set", "--from", "a", "--to", "b"];
    let (success, text) = underpass(&[&set[..], &["--loss", "100%", "--delay", "200us"]].concat());
    assert!(success && text.contains("a -> b  loss 100%, delay 200us") && !text.contains("b -> a"), "{text}");
    assert_eq!(send_numbers(&a, &b, 5), NONE);
    // What is not named stays.
    let (success, text) = underpass(&[&set[..], &["--loss", "0", "--duplicate", "1"]].concat());
    assert!(success && text.contains("a -> b  duplicate 100%, delay 200us"), "{text}");
    assert_eq!(send_numbers(&a, &b, 5).len(), 10);
    assert!(underpass(&["fault", &name, "clear"]).0);
    assert!(underpass(&["fault", &name, "partition", "a", "/", "b"]).0);
    assert_eq!(send_numbers(&a, &b, 5), NONE);
    assert!(underpass(&["fault", &name, "heal"]).0);
    let (success, text) = underpass(&["fault", &name, "set"]);
    assert!(!success && text.contains("--loss"), "{text}");
    let (success, text) = underpass(&["fault", &name, "set", "--loss", "2"]);
    assert!(!success && text.contains("is not a probability"), "{text}");
    let (success, text) = underpass(&["fault", &name, "show"]);
    assert!(success && text.contains("a -> b  none"), "{text}");

    let status: serde_json::Value = serde_json::from_str(&underpass(&["status", &name, "--json"]).1).unwrap();
    let daemon = status["delay_line"]["process"]["pid"].as_i64().unwrap();
    assert_eq!(status["hosts"][0]["ports"][0]["address"], "10.77.0.1");
    assert!(Command::new("kill").args(["-9", &daemon.to_string()]).status().unwrap().success());
    thread::sleep(Duration::from_millis(2100));
    let (success, text) = underpass(&["status", &name]);
    assert!(success && text.contains("NOT RUNNING"), "{text}");
    let (success, text) = underpass(&["fault", &name, "set", "--delay", "1ms"]);
    assert!(!success && text.contains("delay line"), "{text}");
    assert!(underpass(&["fault", &name, "set", "--loss", "50%"]).0);

    let (success, text) = underpass(&["down", &name]);
    assert!(success && text.contains("is down"), "{text}");
    assert_nothing_left(&name);
    let (success, text) = underpass(&["down", &name]);
    assert!(success && text.contains("was not up"), "{text}");
    let (success, text) = underpass(&["status", &name]);
    assert!(!success && text.contains("there is no rack"), "{text}");
}
