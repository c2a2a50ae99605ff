//! The cache's kernel programs: loading, their tables, attaching, and running them without a network.

use std::{
    ffi::OsStr,
    io,
    mem::size_of,
    net::SocketAddrV4,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    ptr, slice,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

use anyhow::{Context, Result, bail};
use libbpf_rs::{Link, MapCore, MapFlags, Object, ObjectBuilder, OpenObject, ProgramInput, ProgramMut};
use underpass_abi::cache::{
    self as abi, UC_COUNT_END, UC_PAGE, UC_SOURCES, uc_control, uc_counters, uc_set, uc_settings, uc_slot,
};
use underpass_datapath::{
    attach::{self, Mode, attach_xdp},
    clock,
};

static XDP_OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/cache.bpf.o"));
static SOCKETS_OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/cache_sockets.bpf.o"));

/// Maps that the two objects share.
const SHARED: [&str; 4] = ["control", "sets", "pages", "counters"];

/// Table sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Sets of the directory: a power of two.
    pub sets: u32,
    /// Pages of slots, the unused first one included.
    pub pages: u32,
}

impl Sizes {
    /// What a budget of memory gives: one way for each 256 bytes of items, whatever the ways of a set.
    pub fn of_budget(mib: u32, ways: u32) -> Self {
        let bytes = u64::from(mib) << 20;
        let sets = (bytes / 256 / u64::from(ways)).max(1).next_power_of_two();
        // Rounded down where rounding up would take much of the budget.
        let sets = if sets * size_of::<uc_set>() as u64 > bytes / 4 { sets / 2 } else { sets };
        let pages = (bytes - sets * size_of::<uc_set>() as u64) / u64::from(UC_PAGE);
        Self { sets: sets as u32, pages: pages.max(2) as u32 }
    }
}

/// A whole array map in this process's memory.
struct Mapped {
    at: *mut u8,
    bytes: usize,
}

// SAFETY: shared memory that lives as long as this value; accessed atomically, or where one thread alone writes.
unsafe impl Send for Mapped {}

impl Mapped {
    fn new(fd: BorrowedFd<'_>, bytes: usize) -> Result<Self> {
        let bytes = bytes.next_multiple_of(4096);
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a fresh shared mapping of a map's descriptor, of the length that the kernel gave the array.
        let at = unsafe { libc::mmap(ptr::null_mut(), bytes, protection, libc::MAP_SHARED, fd.as_raw_fd(), 0) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error()).context("mapping a table");
        }
        Ok(Self { at: at.cast(), bytes })
    }

    fn get<T>(&self, at: usize) -> *mut T {
        assert!(at + size_of::<T>() <= self.bytes);
        // SAFETY: inside the mapping.
        unsafe { self.at.add(at) }.cast()
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length; nothing borrows from it any more.
        unsafe { libc::munmap(self.at.cast(), self.bytes) };
    }
}

/// The programs and tables, loaded.
pub struct Kernel {
    settings: uc_settings,
    sizes: Sizes,
    xdp: Object,
    sockets: Object,
    control: Mapped,
    sets: Mapped,
    pages: Mapped,
    xdp_link: Option<attach::Link>,
    links: Vec<Link>,
}

// SAFETY: libbpf objects may be used from any thread as long as one at a time does, which `&mut self` and the kernel's own
// locking of maps ensure; the raw pointers inside are owned.
unsafe impl Send for Kernel {}

impl Drop for Kernel {
    fn drop(&mut self) {
        self.detach();
    }
}

impl Kernel {
    /// Loads the programs with empty tables. Masks and clock of the settings are filled in here.
    pub fn load(mut settings: uc_settings, sizes: Sizes) -> Result<Self> {
        assert!(sizes.sets.is_power_of_two());
        let ticks = clock::ticks()?;
        const { assert!(abi::UC_TICK_SHIFT == underpass_abi::abi::UP_TICK_SHIFT) };
        (settings.tick_origin, settings.tick_origin_ms, settings.tick_length) =
            (ticks.count, ticks.at_ms, ticks.length);
        settings.set_mask = sizes.sets - 1;
        if std::env::var_os("UNDERPASS_BPF_LOG").is_none() {
            libbpf_rs::set_print(None);
        }
        let mut open = ObjectBuilder::default().open_memory(XDP_OBJECT).context("opening the cache's program")?;
        set_rodata(&mut open, &settings);
        for mut map in open.maps_mut() {
            let entries = match map.name().to_str() {
                Some("sets") => sizes.sets,
                Some("pages") => sizes.pages,
                Some("sources") if settings.limit > 0 => UC_SOURCES,
                _ => continue,
            };
            map.set_max_entries(entries).context("sizing a table")?;
        }
        let xdp = open.load().context("loading the cache's program")?;
        let mut open = ObjectBuilder::default().open_memory(SOCKETS_OBJECT).context("opening the socket programs")?;
        set_rodata(&mut open, &settings);
        for mut map in open.maps_mut() {
            let name = map.name().to_owned();
            if SHARED.iter().any(|shared| name == *shared) {
                map.reuse_fd(self::map(&xdp, name.to_str().expect("our own names")).as_fd())
                    .context("sharing a table")?;
            }
        }
        let sockets = open.load().context(
            "loading the socket programs (they need Linux 6.3 or newer, with the tracepoints sock_recv_length and sock_send_length)",
        )?;
        Ok(Self {
            settings,
            sizes,
            control: Mapped::new(map(&xdp, "control").as_fd(), size_of::<uc_control>())?,
            sets: Mapped::new(map(&xdp, "sets").as_fd(), sizes.sets as usize * size_of::<uc_set>())?,
            pages: Mapped::new(map(&xdp, "pages").as_fd(), sizes.pages as usize * UC_PAGE as usize)?,
            xdp,
            sockets,
            xdp_link: None,
            links: Vec::new(),
        })
    }

    /// The settings in force.
    pub fn settings(&self) -> &uc_settings {
        &self.settings
    }

    /// Table sizes.
    pub fn sizes(&self) -> Sizes {
        self.sizes
    }

    /// Attaches to the sockets' tracepoints, and begins to follow the process. Nothing is served yet.
    pub fn follow(&mut self, tgid: u32) -> Result<()> {
        let programs: Vec<_> = self.sockets.progs_mut().collect();
        for program in programs {
            let name = program.name().to_string_lossy().into_owned();
            let link = program.attach_trace().with_context(|| format!("attaching {name}"))?;
            self.links.push(link);
        }
        self.field(|c| &raw mut c.tgid, tgid);
        Ok(())
    }

    /// Attaches to the interface.
    pub fn attach(&mut self, ifindex: u32, mode: Mode) -> Result<()> {
        self.xdp_link = Some(attach_xdp(program(&self.xdp, "cache").as_fd(), ifindex, mode)?);
        Ok(())
    }

    /// Takes the programs off: first the one that answers.
    pub fn detach(&mut self) {
        if let Some(link) = self.xdp_link.take() {
            link.detach();
            // A run that has not looked at its word yet could miss a command that comes from here on.
            let _ = wait_for_programs();
        }
        self.links.clear();
    }

    fn field<T>(&self, which: impl FnOnce(&mut uc_control) -> *mut T, value: T) {
        // SAFETY: inside the mapping, aligned by the structure's layout; only this process writes these.
        unsafe { which(&mut *self.control.get::<uc_control>(0)).write_volatile(value) };
    }

    /// The global word.
    pub fn global(&self) -> &AtomicU64 {
        // SAFETY: inside the mapping, which lives as long as `self`; changed by atomic operations on both sides.
        unsafe { AtomicU64::from_ptr(&raw mut (*self.control.get::<uc_control>(0)).global) }
    }

    /// A word of a set.
    pub fn word(&self, set: usize, which: usize) -> &AtomicU64 {
        let at = set * size_of::<uc_set>();
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(&raw mut (*self.sets.get::<uc_set>(at)).word[which]) }
    }

    /// A way of a set.
    pub fn way(&self, set: usize, way: usize) -> &AtomicU64 {
        let at = set * size_of::<uc_set>();
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(&raw mut (*self.sets.get::<uc_set>(at)).way[way]) }
    }

    fn slot_at(place: u32) -> usize {
        place as usize * abi::UC_UNIT as usize
    }

    /// A slot's head.
    pub fn slot(&self, place: u32) -> uc_slot {
        // SAFETY: inside the mapping; any bytes are a value. The kernel writes only `used`.
        unsafe { self.pages.get::<uc_slot>(Self::slot_at(place)).read_volatile() }
    }

    /// A slot's mark of use.
    pub fn used(&self, place: u32) -> &AtomicU32 {
        // SAFETY: as `word`.
        unsafe { AtomicU32::from_ptr(&raw mut (*self.pages.get::<uc_slot>(Self::slot_at(place))).used) }
    }

    /// Writes a slot that no way shows.
    pub fn write_slot(&mut self, place: u32, head: &uc_slot, bytes: &[u8]) {
        assert!(bytes.len() + abi::UC_SLOT_HEAD as usize <= abi::UC_SLOT_MAX as usize);
        let at = Self::slot_at(place);
        // SAFETY: inside the mapping, as asserted by `get`; no program looks at it, for no way shows it.
        unsafe {
            self.pages.get::<uc_slot>(at).write_volatile(*head);
            let to = self.pages.get::<u8>(at + size_of::<uc_slot>() + bytes.len()).sub(bytes.len());
            ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
    }

    /// The first bytes behind a slot's head.
    pub fn slot_bytes(&self, place: u32, len: usize) -> Vec<u8> {
        let at = Self::slot_at(place) + size_of::<uc_slot>();
        // SAFETY: inside the mapping; nobody changes a slot that a way shows.
        unsafe { slice::from_raw_parts(self.pages.get::<u8>(at + len).sub(len), len) }.to_vec()
    }

    /// Until when anything is served, by CLOCK_MONOTONIC.
    pub fn serve_until(&self, ms: u64) {
        self.field(|c| &raw mut c.serve_until_ms, ms);
    }

    /// The agent's own connection to memcached, from and to.
    pub fn set_agent(&self, from: SocketAddrV4, to: SocketAddrV4) {
        self.field(|c| &raw mut c.agent_addr, u32::from(*from.ip()).to_be());
        self.field(|c| &raw mut c.memcached_addr, u32::from(*to.ip()).to_be());
        self.field(|c| &raw mut c.memcached_port, to.port());
        self.field(|c| &raw mut c.agent_port, from.port().to_be());
    }

    /// How often a connection let go of the global word.
    pub fn let_go(&self) -> u32 {
        // SAFETY: inside the mapping; a number that the kernel counts.
        unsafe { (&raw const (*self.control.get::<uc_control>(0)).let_go).read_volatile() }
    }

    /// Up to where in that count flushes that are to come are known.
    pub fn looked(&self, let_go: u32) {
        self.field(|c| &raw mut c.looked, let_go);
    }

    /// Whether a client marks items stale.
    pub fn stale(&self) -> bool {
        // SAFETY: inside the mapping; a plain number that the kernel sets.
        unsafe { (&raw const (*self.control.get::<uc_control>(0)).stale).read_volatile() != 0 }
    }

    /// Counters, one array a CPU.
    pub fn counters(&self) -> Result<Vec<[u64; UC_COUNT_END as usize]>> {
        let per_cpu = map(&self.xdp, "counters").lookup_percpu(&0u32.to_ne_bytes(), MapFlags::ANY)?;
        Ok(per_cpu
            .unwrap_or_default()
            .iter()
            .map(|bytes| {
                assert!(bytes.len() >= size_of::<uc_counters>());
                // SAFETY: as many bytes as the structure has; any bytes are a value.
                unsafe { bytes.as_ptr().cast::<uc_counters>().read_unaligned() }.count
            })
            .collect())
    }

    /// A source's bucket.
    pub fn source(&self, index: u32) -> Result<u64> {
        let bytes = map(&self.xdp, "sources").lookup(&index.to_ne_bytes(), MapFlags::ANY)?.context("no such bucket")?;
        Ok(u64::from_ne_bytes(bytes.try_into().ok().context("a bucket is a number")?))
    }

    /// Sets a source's bucket.
    pub fn set_source(&self, index: u32, level: u64) -> Result<()> {
        Ok(map(&self.xdp, "sources").update(&index.to_ne_bytes(), &level.to_ne_bytes(), MapFlags::ANY)?)
    }

    /// The ring of misses, and the ring of notices.
    pub fn reports(&self) -> [libbpf_rs::Map<'_>; 2] {
        [map(&self.xdp, "misses"), map(&self.sockets, "notices")]
    }

    /// The ring of what sets store.
    pub fn stored(&self) -> libbpf_rs::Map<'_> {
        map(&self.sockets, "stored")
    }

    /// Bytes of kernel memory that the maps take, by the kernel's own account.
    pub fn map_bytes(&self) -> Result<u64> {
        let mut total = 0;
        let shared = |name: &OsStr| SHARED.iter().any(|shared| name == *shared);
        for map in self.xdp.maps().chain(self.sockets.maps().filter(|map| !shared(map.name()))) {
            let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", map.as_fd().as_raw_fd()))?;
            let bytes = info.lines().find_map(|line| line.strip_prefix("memlock:")?.trim().parse::<u64>().ok());
            total += bytes.unwrap_or(0);
        }
        Ok(total)
    }

    /// Runs the XDP program on one frame: the verdict, and the frame afterwards.
    pub fn run(&self, frame: &[u8]) -> Result<(u32, Vec<u8>)> {
        let mut out = vec![0; 4096];
        let input = ProgramInput { data_in: Some(frame), data_out: Some(&mut out), ..ProgramInput::default() };
        let output = program(&self.xdp, "cache").test_run(input)?;
        Ok((output.return_value, output.data.as_deref().map(<[u8]>::to_vec).unwrap_or_default()))
    }
}

fn map<'o>(object: &'o Object, name: &str) -> libbpf_rs::Map<'o> {
    object.maps().find(|map| map.name() == OsStr::new(name)).expect("in the object")
}

fn program<'o>(object: &'o Object, name: &str) -> ProgramMut<'o> {
    object.progs_mut().find(|program| program.name() == OsStr::new(name)).expect("in the object")
}

fn set_rodata(open: &mut OpenObject, settings: &uc_settings) {
    let mut map = open
        .maps_mut()
        .find(|map| map.name().to_string_lossy().ends_with(".rodata"))
        .expect("the settings are in .rodata");
    let value = map.initial_value_mut().expect(".rodata has an initial value");
    // SAFETY: plain data without padding, read as bytes.
    let bytes = unsafe { slice::from_raw_parts((&raw const *settings).cast::<u8>(), size_of::<uc_settings>()) };
    value[..bytes.len()].copy_from_slice(bytes);
}

/// Waits until every program run that began before has ended: XDP programs run inside RCU read-side critical sections, and
/// the kernel implements this command by waiting for all of them.
pub fn wait_for_programs() -> Result<()> {
    const MEMBARRIER_CMD_GLOBAL: libc::c_int = 1;
    // SAFETY: takes no pointers.
    if unsafe { libc::syscall(libc::SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0) } != 0 {
        bail!("this kernel does not wait for its programs (membarrier: {})", io::Error::last_os_error());
    }
    Ok(())
}

/// CLOCK_MONOTONIC in milliseconds.
pub fn now_ms() -> u64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).expect("Linux has this clock");
    now.tv_sec() as u64 * 1000 + now.tv_nsec() as u64 / 1_000_000
}

/// Publishes a word or a way.
pub const PUBLISH: Ordering = Ordering::SeqCst;
