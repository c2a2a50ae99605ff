//! The switch program: loading, attaching, its maps.

use std::{
    fs, io,
    mem::MaybeUninit,
    os::fd::{AsFd, AsRawFd},
    path::{Path, PathBuf},
};

use libbpf_rs::{
    MapCore, MapFlags, MapHandle, Xdp, XdpFlags,
    skel::{OpenSkel, SkelBuilder},
};
use nix::{mount::MsFlags, sys::statfs};
use serde::Serialize;

use crate::{
    Error, Result,
    config::{LinkPlan, Topology},
    fault::{Fault, FaultCounts, Probability},
    skeleton::{
        RackSkelBuilder,
        types::{rack_control, rack_line_counts, rack_link, rack_link_counts, rack_port_counts, rack_station},
    },
};

const BPFFS: &str = "/sys/fs/bpf";
const PINS: &str = "/sys/fs/bpf/underpass-rack";
/// `RACK_PORTS` of `bpf/rack.bpf.c`; [`load`] compares it with the map's size.
const PORTS: u32 = 128;
const CONNECTED: u64 = 1;
const CUT: u64 = 2;
const RANDOM: u64 = 4;

/// A structure of `bpf/rack.bpf.c`.
///
/// # Safety
/// Only for types made of integers, without padding, for which every bit pattern is a value.
unsafe trait Plain: Default + Copy {}
// SAFETY: 10 integers of 64 bits.
unsafe impl Plain for rack_link {}
// SAFETY: 8 integers of 64 bits.
unsafe impl Plain for rack_link_counts {}
// SAFETY: 6 integers of 64 bits.
unsafe impl Plain for rack_port_counts {}
// SAFETY: 2 integers of 64 bits.
unsafe impl Plain for rack_control {}
// SAFETY: 6 integers of 64 bits.
unsafe impl Plain for rack_line_counts {}
// SAFETY: 6 bytes and an integer of 16 bits.
unsafe impl Plain for rack_station {}

fn bytes<T: Plain>(value: &T) -> &[u8] {
    // SAFETY: `T` has no padding, so that all its bytes are initialised; they live as long as `value`.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), size_of::<T>()) }
}

fn from_bytes<T: Plain>(bytes: &[u8]) -> T {
    assert_eq!(bytes.len(), size_of::<T>(), "the kernel's map and this program differ in a value's size");
    // SAFETY: the length is that of `T`, which every bit pattern is a value of; the read may be unaligned.
    unsafe { bytes.as_ptr().cast::<T>().read_unaligned() }
}

/// Where a rack's maps are pinned.
pub(crate) fn pins(rack: &str) -> PathBuf {
    Path::new(PINS).join(rack)
}

/// The names of all racks that have pinned maps.
pub(crate) fn racks() -> Vec<String> {
    let Ok(entries) = fs::read_dir(PINS) else { return Vec::new() };
    entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect()
}

/// Mounts the BPF file system where every distribution has it, unless it is there: in the caller's own mount namespace, for
/// a host's would keep it to itself. The caller holds the racks' lock, so that two racks that start do not mount it over each
/// other.
pub(crate) fn mount_bpffs() -> Result<()> {
    let mounted = || statfs::statfs(BPFFS).is_ok_and(|fs| fs.filesystem_type() == statfs::BPF_FS_MAGIC);
    if mounted() {
        return Ok(());
    }
    nix::mount::mount(Some("bpf"), BPFFS, Some("bpf"), MsFlags::empty(), None::<&str>)
        .map_err(Error::io(format!("cannot mount the BPF file system on {BPFFS}")))
}

/// Loads the switch, connects every port and pins the maps. Called inside the switch's namespace, because the kernel
/// takes numbers of interfaces to be those of the caller's namespace.
pub(crate) fn load(topology: &Topology) -> Result<()> {
    let mut storage = MaybeUninit::uninit();
    let skeleton = RackSkelBuilder::default()
        .open(&mut storage)
        .and_then(OpenSkel::load)
        .map_err(Error::bpf("the kernel does not load the rack's switch (it needs Linux 6.1 or later, and CAP_BPF)"))?;
    let maps = &skeleton.maps;
    assert_eq!(maps.ports.max_entries(), PORTS, "RACK_PORTS differs between kernel and user space");

    let all: Vec<&LinkPlan> = topology.hosts.iter().flat_map(|host| &host.links).collect();
    let control = rack_control { seed: topology.seed, stop: 0 };
    put(&maps.control, 0, bytes(&control))?;
    for from in &all {
        for to in all.iter().filter(|to| to.port != from.port && to.subnet == from.subnet) {
            let link = link_of(&topology.fault, control.seed, from.port, to.port, [0; 2]);
            put(&maps.links, index(from.port, to.port), bytes(&link))?;
        }
    }
    let flood = skeleton.progs.rack_flood.as_fd().as_raw_fd();
    for link in &all {
        let station = rack_station { mac: link.mac.0, reserved: 0 };
        maps.stations
            .update(bytes(&station), &link.port.to_ne_bytes(), MapFlags::ANY)
            .map_err(Error::bpf("cannot tell the switch a host's address"))?;
        put(&maps.ports, link.port, &link.port.to_ne_bytes())?;
        // struct bpf_devmap_val: the interface, and the program that runs on what goes out of it.
        put(&maps.flood, link.port, &[link.port.to_ne_bytes(), flood.to_ne_bytes()].concat())?;
    }
    let switch = Xdp::new(skeleton.progs.rack_switch.as_fd());
    for link in &all {
        switch
            .attach(link.port as i32, XdpFlags::DRV_MODE | XdpFlags::UPDATE_IF_NOEXIST)
            .map_err(Error::bpf(format!("cannot attach the switch to the port of {}", link.ifname)))?;
    }

    let directory = pins(&topology.name);
    fs::create_dir_all(&directory).map_err(Error::io(format!("cannot make {}", directory.display())))?;
    let pinned = [
        ("links", MapHandle::try_from(&maps.links)),
        ("link_counts", MapHandle::try_from(&maps.link_counts)),
        ("port_counts", MapHandle::try_from(&maps.port_counts)),
        ("control", MapHandle::try_from(&maps.control)),
        ("line_counts", MapHandle::try_from(&maps.line_counts)),
        ("line", MapHandle::try_from(&maps.line)),
    ];
    for (name, map) in pinned {
        let path = directory.join(name);
        map.and_then(|mut map| map.pin(&path)).map_err(Error::bpf(format!("cannot pin {}", path.display())))?;
    }
    Ok(())
}

/// Unpins a rack's maps, and takes away the directory above once it is empty.
pub(crate) fn unpin(rack: &str) -> Result<()> {
    let directory = pins(rack);
    match fs::remove_dir_all(&directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(Error::io(format!("cannot remove {}", directory.display()))(error));
        }
        _ => {}
    }
    // Fails as long as other racks are up.
    let _ = fs::remove_dir(PINS);
    Ok(())
}

fn index(from: u32, to: u32) -> u32 {
    from * PORTS + to
}

fn put(map: &impl MapCore, key: u32, value: &[u8]) -> Result<()> {
    map.update(&key.to_ne_bytes(), value, MapFlags::ANY)
        .map_err(Error::bpf(format!("cannot write the switch's map {:?}", map.name())))
}

fn get<T: Plain>(map: &impl MapCore, key: u32) -> Result<T> {
    let what = || format!("cannot read the switch's map {:?}", map.name());
    match map.lookup(&key.to_ne_bytes(), MapFlags::ANY).map_err(Error::bpf(what()))? {
        Some(value) => Ok(from_bytes(&value)),
        None => Err(Error::io(what())(io::Error::from(io::ErrorKind::NotFound))),
    }
}

/// A seed for each link, from the rack's: SplitMix64's output function, as in the kernel.
fn link_seed(seed: u64, from: u32, to: u32) -> u64 {
    let mut z = seed ^ u64::from(index(from, to)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn link_of(fault: &Fault, seed: u64, from: u32, to: u32, origin: [u64; 2]) -> rack_link {
    let flag = |set, flag| if set { flag } else { 0 };
    rack_link {
        flags: CONNECTED | flag(fault.cut, CUT) | flag(fault.is_random(), RANDOM),
        loss: fault.loss.threshold(),
        duplicate: fault.duplicate.threshold(),
        reorder: fault.reorder.threshold(),
        reorder_hold_ns: fault.reorder_hold.as_nanos() as u64,
        delay_ns: fault.delay.as_nanos() as u64,
        jitter_ns: fault.jitter.as_nanos() as u64,
        seed: link_seed(seed, from, to),
        origin,
    }
}

/// What went through a port of the switch, seen from the switch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PortCounts {
    /// Frames from the host.
    pub rx_frames: u64,
    /// Bytes from the host.
    pub rx_bytes: u64,
    /// Frames to the host.
    pub tx_frames: u64,
    /// Bytes to the host.
    pub tx_bytes: u64,
    /// Frames from the host that were shorter than an Ethernet header.
    pub rx_malformed: u64,
    /// Frames from the host to an address that nobody in its subnet has.
    pub rx_unknown: u64,
}

/// What the delay line did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LineCounts {
    /// Frames taken from the switch.
    pub taken: u64,
    /// Frames sent.
    pub sent: u64,
    /// Frames dropped because it held as many as it can.
    pub overflow: u64,
    /// Frames that a port refused.
    pub failed: u64,
    /// Frames that it holds.
    pub held: u64,
    /// When it last showed life: nanoseconds of `CLOCK_MONOTONIC`; 0 before it has started.
    pub beat_ns: u64,
}

/// The pinned maps of a rack that is up.
#[derive(Debug)]
pub(crate) struct Maps {
    links: MapHandle,
    link_counts: MapHandle,
    port_counts: MapHandle,
    control: MapHandle,
    line_counts: MapHandle,
    pub(crate) line: MapHandle,
}

impl Maps {
    pub(crate) fn open(rack: &str) -> Result<Self> {
        let directory = pins(rack);
        let open = |name: &str| {
            let path = directory.join(name);
            MapHandle::from_pinned_path(&path).map_err(Error::bpf(format!(
                "cannot open the switch's map {} (`underpass rack down {rack}` removes what is left of the rack)",
                path.display()
            )))
        };
        Ok(Self {
            links: open("links")?,
            link_counts: open("link_counts")?,
            port_counts: open("port_counts")?,
            control: open("control")?,
            line_counts: open("line_counts")?,
            line: open("line")?,
        })
    }

    pub(crate) fn seed(&self) -> Result<u64> {
        Ok(get::<rack_control>(&self.control, 0)?.seed)
    }

    pub(crate) fn set_seed(&self, seed: u64) -> Result<()> {
        put(&self.control, 0, bytes(&rack_control { seed, ..get(&self.control, 0)? }))
    }

    pub(crate) fn stopped(&self) -> Result<bool> {
        Ok(get::<rack_control>(&self.control, 0)?.stop != 0)
    }

    /// Asks the delay line to end.
    pub(crate) fn stop(&self) -> Result<()> {
        put(&self.control, 0, bytes(&rack_control { stop: 1, ..get(&self.control, 0)? }))
    }

    pub(crate) fn fault(&self, from: u32, to: u32) -> Result<Fault> {
        let link: rack_link = get(&self.links, index(from, to))?;
        Ok(Fault {
            loss: Probability::from_threshold(link.loss),
            duplicate: Probability::from_threshold(link.duplicate),
            reorder: Probability::from_threshold(link.reorder),
            reorder_hold: std::time::Duration::from_nanos(link.reorder_hold_ns),
            delay: std::time::Duration::from_nanos(link.delay_ns),
            jitter: std::time::Duration::from_nanos(link.jitter_ns),
            cut: link.flags & CUT != 0,
        })
    }

    /// Sets a connected link's faults; its random numbers start over.
    pub(crate) fn set_fault(&self, from: u32, to: u32, fault: &Fault) -> Result<()> {
        let origin = get::<rack_link_counts>(&self.link_counts, index(from, to))?.sequence;
        put(&self.links, index(from, to), bytes(&link_of(fault, self.seed()?, from, to, origin)))
    }

    pub(crate) fn fault_counts(&self, from: u32, to: u32) -> Result<FaultCounts> {
        let counts: rack_link_counts = get(&self.link_counts, index(from, to))?;
        Ok(FaultCounts {
            seen: counts.sequence.iter().sum(),
            cut: counts.cut,
            lost: counts.lost,
            duplicated: counts.duplicated,
            reordered: counts.reordered,
            delayed: counts.delayed,
            line_full: counts.line_full,
        })
    }

    pub(crate) fn port_counts(&self, port: u32) -> Result<PortCounts> {
        let what = "cannot read the switch's counters";
        let values = self
            .port_counts
            .lookup_percpu(&port.to_ne_bytes(), MapFlags::ANY)
            .map_err(Error::bpf(what))?
            .unwrap_or_default();
        Ok(values.iter().map(|value| from_bytes(value)).fold(PortCounts::default(), |sum, one: rack_port_counts| {
            PortCounts {
                rx_frames: sum.rx_frames + one.rx_frames,
                rx_bytes: sum.rx_bytes + one.rx_bytes,
                tx_frames: sum.tx_frames + one.tx_frames,
                tx_bytes: sum.tx_bytes + one.tx_bytes,
                rx_malformed: sum.rx_malformed + one.rx_malformed,
                rx_unknown: sum.rx_unknown + one.rx_unknown,
            }
        }))
    }

    pub(crate) fn line_counts(&self) -> Result<LineCounts> {
        let counts: rack_line_counts = get(&self.line_counts, 0)?;
        Ok(LineCounts {
            taken: counts.taken,
            sent: counts.sent,
            overflow: counts.overflow,
            failed: counts.failed,
            held: counts.held,
            beat_ns: counts.beat_ns,
        })
    }

    pub(crate) fn set_line_counts(&self, counts: &LineCounts) -> Result<()> {
        let LineCounts { taken, sent, overflow, failed, held, beat_ns } = *counts;
        put(&self.line_counts, 0, bytes(&rack_line_counts { taken, sent, overflow, failed, held, beat_ns }))
    }
}
