//! Two hosts of a benchmark: network namespaces without a name, so nothing of them outlives this process.

use std::{
    fs::{self, File},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::process::CommandExt,
    },
    process::Command,
    thread,
};

use anyhow::{Context, Result, bail, ensure};
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, setns, unshare},
};

/// A network namespace, held by a descriptor.
pub struct Netns {
    fd: OwnedFd,
}

impl Netns {
    /// Makes a new, empty one with its loopback up.
    ///
    /// # Errors
    /// Without the right to (CAP_SYS_ADMIN).
    pub fn new() -> Result<Self> {
        let fd = thread::scope(|scope| {
            scope
                .spawn(|| -> Result<OwnedFd> {
                    unshare(CloneFlags::CLONE_NEWNET)
                        .context("cannot make a network namespace: benchmarks of the network need root")?;
                    Ok(File::open("/proc/thread-self/ns/net")?.into())
                })
                .join()
                .expect("the thread does not panic")
        })?;
        let netns = Self { fd };
        netns.ip("link set lo up")?;
        Ok(netns)
    }

    /// Runs `f` on a thread of its own inside.
    ///
    /// # Errors
    /// Those of `f`, and when the namespace cannot be entered.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        thread::scope(|scope| {
            scope
                .spawn(|| {
                    self.enter()?;
                    f()
                })
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Moves the calling thread inside, for good.
    ///
    /// # Errors
    /// When the namespace cannot be entered.
    pub fn enter(&self) -> Result<()> {
        setns(self.fd.as_fd(), CloneFlags::CLONE_NEWNET).context("cannot enter a network namespace")
    }

    /// Makes a command run inside. The namespace must outlive the call that starts it.
    pub fn apply(&self, command: &mut Command) {
        let fd = self.fd.as_raw_fd();
        // SAFETY: setns is async-signal-safe, and the descriptor is open in the forked child as it was in the parent.
        unsafe {
            command.pre_exec(move || match libc::setns(fd, libc::CLONE_NEWNET) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            });
        }
    }

    /// Runs `ip` with these words inside.
    ///
    /// # Errors
    /// When it fails: with its words and its message.
    pub fn ip(&self, words: &str) -> Result<String> {
        let mut command = Command::new("ip");
        command.args(words.split_whitespace());
        self.apply(&mut command);
        let output = command.output().context("cannot run ip: install the package iproute2")?;
        if !output.status.success() {
            bail!("ip {words}: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// A path that names this namespace to a child process.
    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.fd.as_raw_fd())
    }

    /// Writes a file below `/sys/class/net/DEVICE`, which shows the devices of one namespace only.
    ///
    /// # Errors
    /// When the device or the file is not there.
    pub fn write_device(&self, device: &str, file: &str, value: &str) -> Result<()> {
        self.run(|| {
            unshare(CloneFlags::CLONE_NEWNS).context("cannot make a mount namespace")?;
            mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
                .context("cannot make mounts private")?;
            mount(Some("sysfs"), "/sys", Some("sysfs"), MsFlags::empty(), None::<&str>)
                .context("cannot mount sysfs")?;
            let path = format!("/sys/class/net/{device}/{file}");
            fs::write(&path, value).with_context(|| format!("cannot write {value} to {path}"))
        })
    }

    /// Number of a device.
    ///
    /// # Errors
    /// When there is none of this name.
    pub fn index(&self, device: &str) -> Result<u32> {
        self.run(|| nix::net::if_::if_nametoindex(device).with_context(|| format!("no device {device}")))
    }

    /// Link-layer address of a device.
    ///
    /// # Errors
    /// When there is none of this name.
    pub fn mac(&self, device: &str) -> Result<[u8; 6]> {
        let text = self.ip(&format!("-o link show dev {device}"))?;
        let word = text.split("link/ether ").nth(1).and_then(|rest| rest.split_whitespace().next());
        let bytes: Option<Vec<u8>> =
            word.map(|word| word.split(':').filter_map(|byte| u8::from_str_radix(byte, 16).ok()).collect());
        bytes.and_then(|bytes| bytes.try_into().ok()).with_context(|| format!("{device} has no link-layer address"))
    }

    /// Switches generic receive offload of a device on or off; on also gives a veth a NAPI without an XDP program.
    ///
    /// # Errors
    /// When the device refuses.
    pub fn set_gro(&self, device: &str, on: bool) -> Result<()> {
        const ETHTOOL_SGRO: u32 = 0x2c;
        self.set_offload(device, ETHTOOL_SGRO, on).with_context(|| format!("cannot switch GRO of {device}"))
    }

    /// Switches segmentation of TCP by a device on or off. Of a veth that segments, TCP is received on the core that sends,
    /// unless the other end has an XDP program.
    ///
    /// # Errors
    /// When the device refuses.
    pub fn set_tso(&self, device: &str, on: bool) -> Result<()> {
        const ETHTOOL_STSO: u32 = 0x1f;
        self.set_offload(device, ETHTOOL_STSO, on).with_context(|| format!("cannot switch TSO of {device}"))
    }

    fn set_offload(&self, device: &str, command: u32, on: bool) -> Result<()> {
        #[repr(C)]
        struct EthtoolValue {
            cmd: u32,
            data: u32,
        }
        ensure!(device.len() < libc::IFNAMSIZ, "{device}: name too long");
        self.run(|| {
            let socket = std::net::UdpSocket::bind("127.0.0.1:0")?;
            let mut value = EthtoolValue { cmd: command, data: on.into() };
            // SAFETY: ifreq is plain data for which all zeros is valid.
            let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
            for (to, from) in request.ifr_name.iter_mut().zip(device.bytes()) {
                *to = from as libc::c_char;
            }
            request.ifr_ifru.ifru_data = (&raw mut value).cast();
            // SAFETY: SIOCETHTOOL reads and writes the ifreq and the ethtool_value that it points to; both live here.
            let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL, &raw mut request) };
            nix::errno::Errno::result(result)?;
            Ok(())
        })
    }
}

/// A virtual cable: one device in each of two namespaces.
///
/// # Errors
/// When the devices cannot be made.
pub fn connect(a: &Netns, a_device: &str, b: &Netns, b_device: &str) -> Result<()> {
    // One queue each: all packets of a side then go through one NAPI, which is what gets pinned.
    a.ip(&format!(
        "link add {a_device} numrxqueues 1 numtxqueues 1 type veth peer name {b_device} numrxqueues 1 numtxqueues 1"
    ))?;
    a.ip(&format!("link set {b_device} netns {}", b.path()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_connected_and_vanish() {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return;
        }
        let (a, b) = (Netns::new().unwrap(), Netns::new().unwrap());
        connect(&a, "upbt0", &b, "upbt1").unwrap();
        for (netns, device, address) in [(&a, "upbt0", "10.9.0.1/24"), (&b, "upbt1", "10.9.0.2/24")] {
            netns.ip(&format!("addr add {address} dev {device}")).unwrap();
            netns.ip(&format!("link set {device} up")).unwrap();
            netns.set_gro(device, true).unwrap();
            netns.set_tso(device, false).unwrap();
            netns.write_device(device, "threaded", "1").unwrap();
            assert_ne!(netns.mac(device).unwrap(), [0; 6]);
        }
        let server = a.run(|| Ok(std::net::UdpSocket::bind("10.9.0.1:9")?)).unwrap();
        b.run(|| {
            std::net::UdpSocket::bind("0.0.0.0:0")?.send_to(b"x", "10.9.0.1:9")?;
            Ok(())
        })
        .unwrap();
        server.set_read_timeout(Some(std::time::Duration::from_secs(2))).unwrap();
        assert_eq!(server.recv(&mut [0; 8]).unwrap(), 1);
        assert!(a.index("upbt1").is_err());
        assert!(a.ip("link show nothing").unwrap_err().to_string().contains("nothing"));
    }
}
