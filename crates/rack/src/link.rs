//! Namespaces, interfaces, addresses and routes of a rack.
//!
//! Made with the `ip` command rather than over netlink: one process for a batch of commands is as fast, a failing one
//! can be repeated by hand, and rtnetlink would bring an asynchronous runtime along.

use std::{
    fmt::Write as _,
    fs,
    io::Write as _,
    os::fd::AsRawFd,
    path::Path,
    process::{Command, Stdio},
};

use crate::{
    Error, Result,
    config::{HostPlan, LinkPlan, Topology},
    namespace,
};

/// Runs `ip` commands, one a line, in a namespace, or in the caller's.
fn ip(namespace: Option<&str>, commands: &str) -> Result<()> {
    let mut ip = Command::new("ip");
    if let Some(namespace) = namespace {
        ip.args(["-n", namespace]);
    }
    let display = |ip: &Command| format!("{ip:?}").replace('"', "");
    let failed = |ip: &Command, message: String| Error::Ip { command: display(ip), message };
    ip.args(["-batch", "-"]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = ip
        .spawn()
        .map_err(|error| failed(&ip, format!("{error}: install the package iproute2, and have /usr/sbin in PATH")))?;
    let mut stdin = child.stdin.take().expect("it was asked for");
    // If it ends early, its status and its message say why.
    let _ = stdin.write_all(commands.as_bytes());
    drop(stdin);
    let output = child.wait_with_output().map_err(|error| failed(&ip, error.to_string()))?;
    if output.status.success() {
        return Ok(());
    }
    let message = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
    // `Command failed -:3` names the line of the batch.
    let line = message.rsplit_once("failed -:").and_then(|(_, line)| line.trim().parse::<usize>().ok());
    let line = line.and_then(|line| commands.lines().nth(line - 1)).unwrap_or_default();
    Err(failed(&ip, format!("{message} (at `{line}`)")))
}

/// Makes all namespaces and connects them, without switching anything yet.
pub(crate) fn make(topology: &Topology) -> Result<()> {
    let rack = &topology.name;
    let switch = namespace::switch_name(rack);
    let mut commands = format!("netns add {switch}\n");
    for host in &topology.hosts {
        writeln!(commands, "netns add {}", namespace::host_name(rack, &host.name)).expect("a string takes all");
    }
    ip(None, &commands)?;

    // Before there is an interface: it would announce itself.
    namespace::run(&namespace::path(&switch), || quiet(false))??;
    for host in &topology.hosts {
        namespace::run(&namespace::path(&namespace::host_name(rack, &host.name)), || quiet(host.router))??;
    }

    let mut commands = String::from("link set lo up\n");
    for host in &topology.hosts {
        let namespace = namespace::host_name(rack, &host.name);
        for LinkPlan { port, ifname, mac, .. } in &host.links {
            writeln!(
                commands,
                "link add name {ifname} index {port} type veth \
                 peer name {ifname} address {mac} netns {namespace}\n\
                 link set dev {ifname} up"
            )
            .expect("a string takes all");
        }
    }
    ip(Some(&switch), &commands)
}

/// Addresses and starts a host. Called once the switch works.
pub(crate) fn start(rack: &str, host: &HostPlan) -> Result<()> {
    let namespace = namespace::host_name(rack, &host.name);
    let mut commands = String::from("link set lo up\n");
    for link in &host.links {
        let length = link.range.prefix_len();
        for address in std::iter::once(&link.address).chain(&link.extra_addresses) {
            writeln!(commands, "address add {address}/{length} broadcast + dev {}", link.ifname)
                .expect("a string takes all");
        }
        writeln!(commands, "link set dev {} up", link.ifname).expect("a string takes all");
    }
    ip(Some(&namespace), &commands)?;
    // Only a veth that is up tells its peer, the switch's port, that it takes redirected frames now.
    namespace::run(&namespace::path(&namespace), || host.links.iter().try_for_each(|link| offloads(&link.ifname)))??;
    let mut commands = String::new();
    for route in &host.routes {
        writeln!(commands, "route add {} via {}", route.to, route.via).expect("a string takes all");
    }
    ip(Some(&namespace), &commands)
}

/// Removes the switch's interfaces, and so the hosts' ends, even if a socket somewhere keeps a namespace alive.
pub(crate) fn remove(switch: &str) -> Result<()> {
    let interfaces = namespace::run(&namespace::path(switch), || {
        let entries = fs::read_dir("/sys/class/net").into_iter().flatten();
        entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect::<Vec<_>>()
    });
    // A file without a mounted namespace cannot be entered, and has no interfaces.
    let Ok(interfaces) = interfaces else { return Ok(()) };
    let commands: Vec<_> =
        interfaces.iter().filter(|name| *name != "lo").map(|name| format!("link delete dev {name}\n")).collect();
    if commands.is_empty() { Ok(()) } else { ip(Some(switch), &commands.concat()) }
}

/// Keeps the calling thread's namespace from sending anything of its own accord.
fn quiet(router: bool) -> Result<()> {
    let write = |name: &str, value: &str| {
        let path = Path::new("/proc/sys/net").join(name);
        match fs::write(&path, value) {
            // A kernel without the protocol has no such noise either.
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::io(format!("cannot write {}", path.display()))(error))
            }
            _ => Ok(()),
        }
    };
    for scope in ["all", "default"] {
        write(&format!("ipv6/conf/{scope}/disable_ipv6"), "1")?;
        // A coordinator forwards with the client's address as the source; the machine's own setting may be strict.
        write(&format!("ipv4/conf/{scope}/rp_filter"), "0")?;
        write(&format!("ipv4/conf/{scope}/send_redirects"), "0")?;
        write(&format!("ipv4/conf/{scope}/accept_redirects"), "0")?;
    }
    write("ipv4/ip_forward", if router { "1" } else { "0" })
}

/// Sets what a host's end of a veth pair offloads.
///
/// Checksums and segmentation are done in software before a frame leaves, so that every frame in the rack is complete:
/// the coordinator updates checksums incrementally. Receive offload makes the veth receive through NAPI, without which
/// it takes no frames that the switch redirects; unlike an XDP program of our own it leaves the hook free for the host.
fn offloads(ifname: &str) -> Result<()> {
    const SIOCETHTOOL: libc::Ioctl = 0x8946;
    const SET_TX_CHECKSUM: u32 = 0x17;
    const SET_GSO: u32 = 0x24;
    const SET_GRO: u32 = 0x2c;
    /// struct ethtool_value
    #[repr(C)]
    struct Value {
        command: u32,
        data: u32,
    }
    let what = |setting: &str| format!("cannot set {setting} of interface {ifname}");
    let socket = std::net::UdpSocket::bind("0.0.0.0:0").map_err(Error::io(what("offloads")))?;
    let settings = [
        // Takes segmentation offload, which needs it, along.
        (SET_TX_CHECKSUM, 0, "checksum offload"),
        (SET_GSO, 0, "generic segmentation offload"),
        (SET_GRO, 1, "generic receive offload"),
    ];
    for (command, data, name) in settings {
        let mut value = Value { command, data };
        // SAFETY: an ifreq of zeros is a valid one.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        for (to, &from) in request.ifr_name[..libc::IFNAMSIZ - 1].iter_mut().zip(ifname.as_bytes()) {
            *to = from as libc::c_char;
        }
        request.ifr_ifru.ifru_data = std::ptr::from_mut(&mut value).cast();
        // SAFETY: for these commands the kernel reads an ifreq whose data points to a struct ethtool_value.
        let result = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL, &raw mut request) };
        nix::errno::Errno::result(result).map_err(Error::io(what(name)))?;
    }
    Ok(())
}
