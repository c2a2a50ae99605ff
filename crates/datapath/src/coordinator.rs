//! The coordinator's kernel programs: loading, their tables, attaching, and running them without a network.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs, io,
    mem::size_of,
    net::Ipv4Addr,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    path::{Path, PathBuf},
    ptr,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering, fence},
    },
};

use libbpf_rs::{MapCore, MapFlags, Object, ObjectBuilder, OpenObject, ProgramInput, ProgramMut};
use underpass_abi::abi::{
    UP_ABI_VERSION, UP_BUCKET_DIRTY, UP_COUNT_END, UP_SESSION_OP_CLEAR, UP_SESSION_OP_FORGET, UP_SHARD_SLOTS,
    UP_WRITE_PATH_BROADCAST, UP_WRITE_PATH_PUBLISHED, up_bucket, up_config, up_counters, up_member, up_session,
    up_session_command, up_settings, up_shard,
};

use crate::{
    attach::{AttachError, Link, Mode, attach_xdp},
    clock,
    plain::{Plain, bytes_of, from_bytes},
    tc::{TcAttachment, TcDirection},
};

static XDP_OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/coordinator.bpf.o"));
static TC_OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/coordinator_tc.bpf.o"));

/// Maps that hold state and are pinned beside the attachment.
const KEPT_MAPS: [&str; 6] = ["shards", "sessions", "buckets", "words", "counters", "clone_state"];

/// Table sizes, secrets and addresses of a coordinator in the kernel.
#[derive(Clone, Copy, Debug)]
pub struct TableSizes {
    /// Buckets of each shard slot: a power of two.
    pub buckets: u32,
    /// Sessions: a power of two up to 65536.
    pub sessions: u32,
}

/// Why the kernel programs could not be loaded or taken over.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// libbpf or the kernel refused.
    #[error("{what}: {source}{}", hint(.source))]
    Kernel {
        /// What was tried.
        what: String,
        /// What came back.
        source: libbpf_rs::Error,
    },
    /// A system call failed.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// What came back.
        source: io::Error,
    },
    /// Pinned tables of another version or of other settings.
    #[error(
        "{path} holds the tables of a coordinator with {difference}: stop that one in order with its own version, or give \
         its tables up with `underpass coordinator detach --device ...` (replicas then refuse the next epoch, unless they start empty)"
    )]
    OtherTables {
        /// The pin directory.
        path: PathBuf,
        /// How they differ.
        difference: String,
    },
}

fn hint(source: &libbpf_rs::Error) -> &'static str {
    match source.kind() {
        libbpf_rs::ErrorKind::PermissionDenied => {
            " (needs root, or the capabilities CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON)"
        }
        _ => "",
    }
}

fn kernel(what: impl Into<String>) -> impl FnOnce(libbpf_rs::Error) -> LoadError {
    let what = what.into();
    move |source| LoadError::Kernel { what, source }
}

fn os(what: impl Into<String>) -> LoadError {
    LoadError::Io { what: what.into(), source: io::Error::last_os_error() }
}

/// A whole array map in this process's memory.
struct MappedArray<T> {
    at: *mut T,
    len: usize,
    bytes: usize,
}

// SAFETY: the mapping is shared memory that lives as long as this value; all access goes through volatile or atomic
// operations, or through values that one agent thread alone writes.
unsafe impl<T> Send for MappedArray<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for MappedArray<T> {}

impl<T: Plain> MappedArray<T> {
    fn new(fd: BorrowedFd<'_>, len: usize, what: &str) -> Result<Self, LoadError> {
        let page = 4096;
        let bytes = (len * size_of::<T>()).next_multiple_of(page);
        // SAFETY: a fresh shared mapping of a map file descriptor, of the length that the kernel gave the array.
        let at = unsafe {
            libc::mmap(ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, fd.as_raw_fd(), 0)
        };
        if at == libc::MAP_FAILED {
            return Err(os(format!("mapping the table of {what}")));
        }
        Ok(Self { at: at.cast(), len, bytes })
    }

    fn get(&self, index: usize) -> *mut T {
        assert!(index < self.len);
        // SAFETY: inside the mapping.
        unsafe { self.at.add(index) }
    }

    fn read(&self, index: usize) -> T {
        // SAFETY: inside the mapping, aligned by the map's layout; T is plain data, any bytes are a value.
        unsafe { self.get(index).read_volatile() }
    }
}

impl<T> Drop for MappedArray<T> {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length; nothing borrows from it any more.
        unsafe { libc::munmap(self.at.cast(), self.bytes) };
    }
}

/// The verdict and bytes of a program run on one frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// `XDP_*`.
    pub verdict: u32,
    /// The frame afterwards.
    pub frame: Vec<u8>,
}

/// The coordinator's programs and tables, loaded.
pub struct CoordinatorKernel {
    settings: up_settings,
    sizes: TableSizes,
    object: Object,
    tc: Option<Object>,
    /// What configurations are filled with.
    pub(crate) next_hops: BTreeMap<Ipv4Addr, [u8; 6]>,
    /// Room for a copy of the session table.
    pub(crate) records: Vec<up_session>,
    shards: Arc<MappedArray<up_shard>>,
    words: MappedArray<u64>,
    link: Option<Link>,
    tc_attachment: Option<TcAttachment>,
    pins: Option<PathBuf>,
    taken_over: bool,
}

// SAFETY: libbpf objects may be used from any thread as long as one at a time does, which `&mut self` and the kernel's own
// locking of maps ensure; the raw pointers inside are owned.
unsafe impl Send for CoordinatorKernel {}
// SAFETY: methods taking `&self` only make system calls on file descriptors or volatile reads.
unsafe impl Sync for CoordinatorKernel {}

impl CoordinatorKernel {
    /// Loads the programs with fresh tables, or, if `pins` holds the tables of a coordinator with the same settings, with
    /// those, if its attachment is still on `ifindex`; what is left of one whose device is gone is removed.
    /// `settings.abi_version`, masks and clock are filled in here; when tables are taken over so are their secrets.
    pub fn load(mut settings: up_settings, sizes: TableSizes, pins: Option<(PathBuf, u32)>) -> Result<Self, LoadError> {
        assert!(sizes.buckets.is_power_of_two() && sizes.sessions.is_power_of_two() && sizes.sessions <= 1 << 16);
        let ticks = clock::ticks()?;
        (settings.tick_origin, settings.tick_origin_ms, settings.tick_length) =
            (ticks.count, ticks.at_ms, ticks.length);
        settings.abi_version = UP_ABI_VERSION;
        settings.bucket_mask = sizes.buckets - 1;
        settings.session_mask = sizes.sessions - 1;
        libbpf_rs::set_print(None);
        let pins = pins.map(|(pins, ifindex)| {
            if !Link::is_pinned_on(&pins.join("link"), ifindex) {
                // Tables that no program serves from any more: what they say may be long past.
                unpin(&pins);
            }
            pins
        });
        let kept = pins.as_deref().map(kept_settings).transpose()?.flatten();
        if let (Some(kept), Some(path)) = (&kept, &pins) {
            same_tables(kept, &settings, path)?;
            settings.fingerprint_key = kept.fingerprint_key;
            settings.bucket_key = kept.bucket_key;
            // Packets' time goes on where it is: read anew, the origin might differ by a tick.
            settings.tick_origin = kept.tick_origin;
            settings.tick_origin_ms = kept.tick_origin_ms;
        }
        let reuse = pins.as_deref().filter(|_| kept.is_some());
        let object = load_xdp(&settings, sizes, reuse)?;
        let tc = match settings.write_path {
            UP_WRITE_PATH_BROADCAST => None,
            _ => Some(load_tc(&settings, &object)?),
        };
        let map = |name: &str| object.maps().find(|map| map.name() == OsStr::new(name)).expect("in the object");
        let shards = Arc::new(MappedArray::new(map("shards").as_fd(), UP_SHARD_SLOTS as usize, "shards")?);
        let words = MappedArray::new(map("words").as_fd(), (sizes.buckets * UP_SHARD_SLOTS) as usize, "buckets")?;
        let taken_over = kept.is_some();
        let mut kernel = Self {
            settings,
            sizes,
            next_hops: BTreeMap::new(),
            records: Vec::new(),
            shards,
            words,
            object,
            tc,
            link: None,
            tc_attachment: None,
            pins,
            taken_over,
        };
        kernel.next_hops = kernel.configurations().flat_map(|config| config.members).filter_map(known_hop).collect();
        Ok(kernel)
    }

    /// Whether the tables are those that an earlier agent left.
    pub fn taken_over(&self) -> bool {
        self.taken_over
    }

    /// The settings in force.
    pub fn settings(&self) -> &up_settings {
        &self.settings
    }

    /// Table sizes.
    pub fn sizes(&self) -> TableSizes {
        self.sizes
    }

    /// Attaches the program again if somebody else has detached it; whether it had to be. The tables have stood still meanwhile:
    /// for everybody, some packets were lost.
    pub fn stay_attached(&mut self, ifindex: u32, mode: Mode) -> Result<bool, AttachError> {
        let asking = |source| AttachError::new("asking whether the program is attached", source);
        match &self.link {
            Some(link) if link.ifindex().map_err(asking)? != ifindex => {}
            _ => return Ok(false),
        }
        let link = attach_xdp(self.program("coordinator").as_fd(), ifindex, mode)?;
        if let Some(pins) = &self.pins {
            let path = pins.join("link");
            let _ = fs::remove_file(&path);
            link.pin(&path)?;
        }
        self.link = Some(link);
        Ok(true)
    }

    /// Attaches to an interface, pinning link and tables if a pin directory was given. An attachment that an earlier agent
    /// left in that directory is updated in place: no packet goes unhandled.
    pub fn attach(&mut self, ifindex: u32, mode: Mode) -> Result<(), AttachError> {
        self.fill_fanout(ifindex).map_err(|source| AttachError::new("filling the clone maps", source))?;
        let program = self.program("coordinator");
        let pinned = self.pins.as_ref().map(|pins| pins.join("link"));
        let link = match &pinned {
            Some(path) if path.exists() => Link::take_over(path, program.as_fd(), ifindex)?,
            _ => attach_xdp(program.as_fd(), ifindex, mode)?,
        };
        if let Some(pins) = &self.pins {
            let mut pin = || -> Result<(), AttachError> {
                fs::create_dir_all(pins).map_err(|e| AttachError::new(format!("creating {}", pins.display()), e))?;
                for mut map in self.object.maps_mut() {
                    let name = map.name().to_string_lossy().into_owned();
                    let kept = KEPT_MAPS.contains(&name.as_str());
                    let path = pins.join(if kept { name.as_str() } else { "settings" });
                    if (kept || name.ends_with(".rodata")) && !path.exists() {
                        map.pin(&path)
                            .map_err(|e| AttachError::new(format!("pinning {}", path.display()), io_error(e)))?;
                    }
                }
                link.pin(&pins.join("link"))
            };
            if let Err(error) = pin() {
                unpin(pins);
                return Err(error);
            }
        }
        self.link = Some(link);
        let side = match self.settings.write_path {
            UP_WRITE_PATH_BROADCAST => None,
            UP_WRITE_PATH_PUBLISHED => Some(TcDirection::Egress),
            _ => Some(TcDirection::Ingress),
        };
        if self.pins.is_some() {
            // What an agent with another write path left would clone the clones.
            TcAttachment::remove_left(ifindex, side);
        }
        if let (Some(tc), Some(direction)) = (&self.tc, side) {
            let name = match direction {
                TcDirection::Egress => "coordinator_forwarded",
                TcDirection::Ingress => "coordinator_ingress",
            };
            let program = tc.progs().find(|p| p.name() == OsStr::new(name)).expect("in the object");
            let mut attachment = TcAttachment::new(program.as_fd(), ifindex, direction)?;
            if self.pins.is_some() {
                // What the pinned program orders is to be cloned for as long as it orders.
                attachment.stay();
            }
            self.tc_attachment = Some(attachment);
        }
        Ok(())
    }

    /// Detaches and removes the pins. Dropping without this leaves a pinned attachment in place.
    pub fn detach(&mut self) {
        if let Some(attachment) = self.tc_attachment.take() {
            attachment.detach();
        }
        if let Some(pins) = &self.pins {
            unpin(pins);
        }
        if let Some(link) = self.link.take() {
            link.detach();
        }
    }

    /// Makes a configuration the active one of its shard, next hops included, raising the clock to its epoch. Returns the
    /// floor that it was given: the clock then if the shard was not served, else the one before. (A floor that rose while
    /// the shard is served could cover a write that has its seq, but that its bucket's word does not tell of yet.)
    pub fn activate(&self, config: &up_config) -> u64 {
        let slot = (config.shard % UP_SHARD_SLOTS) as usize;
        // SAFETY: inside the mapping; the clock is only changed by atomic operations on both sides.
        let clock = unsafe { AtomicU64::from_ptr(&raw mut (*self.shards.get(slot)).clock) };
        clock.fetch_max(u64::from(config.epoch) << underpass_abi::wire::UP_EPOCH_SHIFT, Ordering::SeqCst);
        let floor = self.active(config.shard).map_or_else(|| clock.load(Ordering::SeqCst), |before| before.floor);
        self.switch(slot, up_config { floor, ..*config });
        floor
    }

    /// Only the agent writes configurations, so filling the inactive half races with nobody: when this returns, no CPU
    /// reads the half that was active before.
    fn switch(&self, slot: usize, config: up_config) {
        let shard = self.shards.get(slot);
        // SAFETY: inside the mapping, 4-aligned by the structure's layout.
        let active = unsafe { AtomicU32::from_ptr(&raw mut (*shard).active) };
        let next = 1 - (active.load(Ordering::Acquire) & 1);
        // SAFETY: the inactive half, see above.
        unsafe { (&raw mut (*shard).config[next as usize]).write_volatile(config) };
        fence(Ordering::SeqCst);
        active.store(next, Ordering::Release);
        wait_for_programs();
    }

    /// The active configuration of a shard, if it has one.
    pub fn active(&self, shard: u32) -> Option<up_config> {
        active_config(&self.shards, shard)
    }

    /// The active configurations.
    pub fn configurations(&self) -> impl Iterator<Item = up_config> {
        (0..UP_SHARD_SLOTS as usize).map(|slot| active_half(&self.shards, slot)).filter(|config| config.epoch != 0)
    }

    /// Puts the end of a lease off, in place.
    pub fn extend_lease(&self, shard: u32, until_ms: u64) {
        if self.active(shard).is_some() {
            let slot = self.shards.get((shard % UP_SHARD_SLOTS) as usize);
            // SAFETY: inside the mapping; only the agent, which is here, switches halves.
            let active = unsafe { (&raw const (*slot).active).read_volatile() } & 1;
            // SAFETY: inside the mapping, 8-aligned by the structure's layout; the kernel reads it in one load.
            let lease = unsafe { AtomicU64::from_ptr(&raw mut (*slot).config[active as usize].lease_until_ms) };
            lease.fetch_max(until_ms, Ordering::Release);
        }
    }

    /// Stops serving a shard and empties its tables. Sessions come after the configuration and the dirty set last, so that
    /// one who takes over tables of which half was cleared can clear the rest.
    pub fn clear(&self, shard: u32) -> io::Result<()> {
        let slot = (shard % UP_SHARD_SLOTS) as usize;
        let active = active_half(&self.shards, slot);
        let of_another = active.epoch != 0 && active.shard != shard;
        if active.epoch != 0 && !of_another {
            self.switch(slot, up_config::default());
        }
        let mut records = Vec::new();
        self.read_sessions(self.sizes.sessions, &mut records)?;
        for record in records.iter().filter(|record| record.session != 0 && record.shard == shard) {
            self.command(UP_SESSION_OP_CLEAR, record.session, up_session_command::default())?;
        }
        if of_another {
            return Ok(());
        }
        let buckets = self.sizes.buckets as usize;
        for index in slot * buckets..(slot + 1) * buckets {
            if self.words.read(index) & u64::from(UP_BUCKET_DIRTY) != 0 {
                let key = (index as u32).to_ne_bytes();
                let empty = up_bucket::default();
                self.map("buckets").update(&key, bytes_of(&empty), MapFlags::ANY).map_err(io_error)?;
            }
            // SAFETY: inside the mapping; no CPU orders writes of this slot any more.
            unsafe { self.words.get(index).write_volatile(0) };
        }
        Ok(())
    }

    /// Clears a member's acknowledgement in every record of a shard; no CPU sets it meanwhile.
    pub fn forget_acks(&self, shard: u32, index: u8) -> io::Result<()> {
        let mut records = Vec::new();
        self.read_sessions(self.sizes.sessions, &mut records)?;
        let acks = 1 << index;
        for record in records.iter().filter(|record| record.shard == shard && record.acks & acks != 0) {
            self.command(UP_SESSION_OP_FORGET, record.session, up_session_command { acks, ..Default::default() })?;
        }
        Ok(())
    }

    /// A shard slot as it is now.
    pub fn shard(&self, slot: usize) -> up_shard {
        self.shards.read(slot)
    }

    /// The clock of a shard slot, in one load: CPUs count it up meanwhile, and a torn one could be ahead of them.
    pub fn clock(&self, slot: usize) -> u64 {
        // SAFETY: inside the mapping, 8-aligned by the structure's layout; changed by atomic operations alone.
        unsafe { AtomicU64::from_ptr(&raw mut (*self.shards.get(slot)).clock) }.load(Ordering::SeqCst)
    }

    /// A function that tells a shard's first member that must acknowledge, for a thread of its own.
    pub fn first_member(&self) -> impl Fn(u32) -> Option<(Ipv4Addr, u16)> + Send + 'static {
        let shards = self.shards.clone();
        move |shard| {
            let config = active_config(&shards, shard).filter(|config| config.must_ack_count > 0)?;
            let member = config.members.get(usize::from(config.must_ack_list[0]))?;
            Some((u32::from_be(member.addr).into(), u16::from_be(member.port)))
        }
    }

    /// Copies the records of the first `sessions` sessions to the front of `out`, each under its lock. (Maps with locks
    /// cannot be mapped into memory.)
    pub fn read_sessions(&self, sessions: u32, out: &mut Vec<up_session>) -> io::Result<()> {
        let sessions = sessions.min(self.sizes.sessions);
        out.clear();
        if sessions == 0 {
            return Ok(());
        }
        out.resize(sessions as usize, up_session::default());
        let mut keys = vec![0u32; sessions as usize];
        let (mut count, mut next) = (sessions, 0u32);
        // SAFETY: all-zero is a valid value of this C structure of integers.
        let mut options: sys::bpf_map_batch_opts = unsafe { std::mem::zeroed() };
        options.sz = size_of::<sys::bpf_map_batch_opts>() as _;
        options.elem_flags = u64::from(sys::BPF_F_LOCK);
        // SAFETY: both buffers hold `count` elements of the map's key and value size; up_session is plain data.
        let got = unsafe {
            sys::bpf_map_lookup_batch(
                self.map("sessions").as_fd().as_raw_fd(),
                ptr::null_mut(),
                (&raw mut next).cast(),
                keys.as_mut_ptr().cast(),
                out.as_mut_ptr().cast(),
                &mut count,
                &raw const options,
            )
        };
        // ENOENT: the end of the map was reached.
        if got < 0 && got != -libc::ENOENT {
            return Err(io::Error::from_raw_os_error(-got));
        }
        if count != sessions {
            return Err(io::Error::other(format!("read {count} session records of {sessions}")));
        }
        Ok(())
    }

    /// The record of one session, under its lock.
    pub fn read_session(&self, index: u16) -> io::Result<up_session> {
        let value = self.map("sessions").lookup(&u32::from(index).to_ne_bytes(), MapFlags::LOCK).map_err(io_error)?;
        Ok(from_bytes(&value.ok_or(io::ErrorKind::NotFound)?))
    }

    /// A bucket's word.
    pub fn word(&self, index: usize) -> u64 {
        self.words.read(index)
    }

    /// A bucket.
    pub fn bucket(&self, index: u32) -> io::Result<up_bucket> {
        let value = self.map("buckets").lookup(&index.to_ne_bytes(), MapFlags::ANY).map_err(io_error)?;
        Ok(from_bytes(&value.ok_or(io::ErrorKind::NotFound)?))
    }

    /// Counters, summed over CPUs.
    pub fn counters(&self) -> io::Result<[u64; UP_COUNT_END as usize]> {
        let per_cpu = self.map("counters").lookup_percpu(&0u32.to_ne_bytes(), MapFlags::ANY).map_err(io_error)?;
        let mut sum = [0; UP_COUNT_END as usize];
        for cpu in per_cpu.unwrap_or_default() {
            let counters: up_counters = from_bytes(&cpu[..size_of::<up_counters>()]);
            sum.iter_mut().zip(counters.count).for_each(|(sum, count)| *sum += count);
        }
        Ok(sum)
    }

    /// Runs a command on a session's record, under its lock; the answer's `result` tells.
    pub fn command(&self, op: u32, session: u64, command: up_session_command) -> io::Result<up_session_command> {
        let run = self.run_program("coordinator_session", bytes_of(&up_session_command { op, session, ..command }))?;
        if run.frame.len() != size_of::<up_session_command>() {
            return Err(io::Error::other(format!("the session program answered {} bytes", run.frame.len())));
        }
        Ok(from_bytes(&run.frame))
    }

    /// Runs the coordinator on one frame, as if it had been received.
    pub fn run(&self, frame: &[u8]) -> io::Result<Run> {
        self.run_program("coordinator", frame)
    }

    /// Runs the egress program on one clone.
    pub fn run_egress(&self, frame: &[u8]) -> io::Result<Run> {
        self.run_program("coordinator_egress_run", frame)
    }

    /// Bytes of kernel memory that the maps take, by the kernel's own account.
    pub fn map_bytes(&self) -> io::Result<u64> {
        let mut total = 0;
        for map in self.object.maps().chain(self.tc.iter().flat_map(|tc| tc.maps())) {
            let path = format!("/proc/self/fdinfo/{}", map.as_fd().as_raw_fd());
            let info = fs::read_to_string(path)?;
            let bytes = info.lines().find_map(|line| line.strip_prefix("memlock:")?.trim().parse::<u64>().ok());
            total += bytes.unwrap_or(0);
        }
        Ok(total)
    }

    fn run_program(&self, name: &str, frame: &[u8]) -> io::Result<Run> {
        let mut out = vec![0; frame.len() + 256];
        let input = ProgramInput { data_in: Some(frame), data_out: Some(&mut out), ..ProgramInput::default() };
        let output = self.program(name).test_run(input).map_err(io_error)?;
        Ok(Run { verdict: output.return_value, frame: output.data.map(|data| data.to_vec()).unwrap_or_default() })
    }

    fn program(&self, name: &str) -> ProgramMut<'_> {
        self.object.progs_mut().find(|program| program.name() == OsStr::new(name)).expect("in the object")
    }

    fn map(&self, name: &str) -> libbpf_rs::Map<'_> {
        self.object.maps().find(|map| map.name() == OsStr::new(name)).expect("in the object")
    }

    fn fill_fanout(&self, ifindex: u32) -> io::Result<()> {
        let egress = self.program("coordinator_egress").as_fd().as_raw_fd();
        for members in 1..=8u32 {
            let map = self.map(&format!("fanout_{members}"));
            for entry in 0..members {
                let mut value = [0; 8];
                value[..4].copy_from_slice(&ifindex.to_ne_bytes());
                value[4..].copy_from_slice(&egress.to_ne_bytes());
                map.update(&entry.to_ne_bytes(), &value, MapFlags::ANY).map_err(io_error)?;
            }
        }
        Ok(())
    }
}

fn active_half(shards: &MappedArray<up_shard>, slot: usize) -> up_config {
    let shard = shards.get(slot);
    // SAFETY: inside the mapping. Another thread than the agent's may see the half change under it if two configurations
    // follow one another meanwhile; any bytes are a value.
    unsafe {
        let active = (&raw const (*shard).active).read_volatile() & 1;
        (&raw const (*shard).config[active as usize]).read_volatile()
    }
}

fn active_config(shards: &MappedArray<up_shard>, shard: u32) -> Option<up_config> {
    let config = active_half(shards, (shard % UP_SHARD_SLOTS) as usize);
    (config.epoch != 0 && config.shard == shard).then_some(config)
}

fn known_hop(member: up_member) -> Option<(Ipv4Addr, [u8; 6])> {
    (member.next_hop != [0; 6]).then(|| (u32::from_be(member.addr).into(), member.next_hop))
}

fn set_rodata(open: &mut OpenObject, settings: &up_settings) {
    let mut map = open
        .maps_mut()
        .find(|map| map.name().to_string_lossy().ends_with(".rodata"))
        .expect("the settings are in .rodata");
    let value = map.initial_value_mut().expect(".rodata has an initial value");
    value[..size_of::<up_settings>()].copy_from_slice(bytes_of(settings));
}

fn load_xdp(settings: &up_settings, sizes: TableSizes, reuse: Option<&Path>) -> Result<Object, LoadError> {
    let mut open =
        ObjectBuilder::default().open_memory(XDP_OBJECT).map_err(kernel("opening the coordinator program"))?;
    set_rodata(&mut open, settings);
    for mut map in open.maps_mut() {
        let name = map.name().to_string_lossy().into_owned();
        let entries = match name.as_str() {
            "sessions" => Some(sizes.sessions),
            "buckets" | "words" => Some(sizes.buckets * UP_SHARD_SLOTS),
            _ => None,
        };
        if let Some(entries) = entries {
            map.set_max_entries(entries).map_err(kernel(format!("sizing the map {name}")))?;
        }
        if let Some(path) = reuse.filter(|_| KEPT_MAPS.contains(&name.as_str())) {
            map.reuse_pinned_map(path.join(&name)).map_err(kernel(format!("taking over the map {name}")))?;
        }
    }
    open.load().map_err(kernel("loading the coordinator program"))
}

fn load_tc(settings: &up_settings, xdp: &Object) -> Result<Object, LoadError> {
    let mut open = ObjectBuilder::default().open_memory(TC_OBJECT).map_err(kernel("opening the TC program"))?;
    set_rodata(&mut open, settings);
    for mut map in open.maps_mut() {
        let name = map.name().to_owned();
        if let Some(shared) = xdp.maps().find(|shared| shared.name() == name && KEPT_MAPS.iter().any(|k| name == *k)) {
            map.reuse_fd(shared.as_fd()).map_err(kernel(format!("sharing the map {}", name.display())))?;
        }
    }
    open.load().map_err(kernel("loading the TC program"))
}

/// The settings of the tables pinned in `pins`, if there are any.
pub fn kept_settings(pins: &Path) -> Result<Option<up_settings>, LoadError> {
    let path = pins.join("settings");
    if !path.exists() {
        return Ok(None);
    }
    let map = libbpf_rs::MapHandle::from_pinned_path(&path).map_err(kernel(format!("opening {}", path.display())))?;
    let value =
        map.lookup(&0u32.to_ne_bytes(), MapFlags::ANY).map_err(kernel(format!("reading {}", path.display())))?;
    let value = value.unwrap_or_default();
    if value.len() < size_of::<up_settings>() {
        return Err(LoadError::OtherTables { path: pins.into(), difference: "settings of another shape".into() });
    }
    Ok(Some(from_bytes(&value[..size_of::<up_settings>()])))
}

fn same_tables(kept: &up_settings, new: &up_settings, path: &Path) -> Result<(), LoadError> {
    let differs = |what: &str, kept: String, new: String| (kept != new).then(|| format!("{what} {kept}, not {new}"));
    let addr = |s: &up_settings| std::net::Ipv4Addr::from(u32::from_be(s.addr)).to_string();
    let difference = differs("table version", kept.abi_version.to_string(), new.abi_version.to_string())
        .or_else(|| differs("address", addr(kept), addr(new)))
        .or_else(|| differs("port", u16::from_be(kept.port).to_string(), u16::from_be(new.port).to_string()))
        .or_else(|| differs("bucket mask", kept.bucket_mask.to_string(), new.bucket_mask.to_string()))
        .or_else(|| differs("session mask", kept.session_mask.to_string(), new.session_mask.to_string()));
    match difference {
        Some(difference) => Err(LoadError::OtherTables { path: path.into(), difference }),
        None => Ok(()),
    }
}

/// Removes every pin of a coordinator; an attachment that nobody else holds is gone with them.
pub fn unpin(pins: &Path) {
    for name in KEPT_MAPS.iter().chain(&["settings", "link"]) {
        let _ = fs::remove_file(pins.join(name));
    }
    let _ = fs::remove_dir(pins);
}

/// Removes what a coordinator of ours left on an interface: attachment, TC filter, pinned tables. False: nothing was there.
pub fn detach_left(ifindex: u32) -> Result<bool, AttachError> {
    let pins = pin_directory(ifindex).map_err(|e| AttachError::new("asking for this network namespace", e))?;
    if !pins.exists() {
        return Ok(false);
    }
    Link::detach_pinned(&pins.join("link"));
    TcAttachment::remove_left(ifindex, None);
    unpin(&pins);
    Ok(true)
}

/// Waits until every program run that began before has ended. XDP and TC programs run inside RCU read-side critical
/// sections, and the kernel implements this command by waiting for all of them.
fn wait_for_programs() {
    const MEMBARRIER_CMD_GLOBAL: libc::c_int = 1;
    // SAFETY: takes no pointers.
    let waited = unsafe { libc::syscall(libc::SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0) };
    if waited != 0 {
        // Kernels with CPUs in full dynticks mode refuse it. A program runs for microseconds.
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

/// Where a coordinator on this interface of the caller's network namespace keeps its pins.
pub fn pin_directory(ifindex: u32) -> io::Result<PathBuf> {
    use std::os::unix::fs::MetadataExt;
    let namespace = fs::metadata("/proc/thread-self/ns/net")?.ino();
    Ok(PathBuf::from(format!("/sys/fs/bpf/underpass/coordinator-{namespace}-{ifindex}")))
}

/// Mounts the BPF file system if nobody has.
pub fn ensure_bpffs() -> io::Result<()> {
    let at = Path::new("/sys/fs/bpf");
    let mounted = nix::sys::statfs::statfs(at).is_ok_and(|s| s.filesystem_type() == nix::sys::statfs::BPF_FS_MAGIC);
    if mounted {
        return Ok(());
    }
    nix::mount::mount(Some("bpf"), at, Some("bpf"), nix::mount::MsFlags::empty(), None::<&str>).map_err(|e| {
        io::Error::new(io::Error::from(e).kind(), format!("mounting the BPF file system on {}: {e}", at.display()))
    })
}

pub(crate) fn owned(fd: i32) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::from_raw_os_error(-fd));
    }
    // SAFETY: the kernel has just given this descriptor to us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// libbpf's errors as the operating system's, with their text.
pub(crate) fn io_error(error: libbpf_rs::Error) -> io::Error {
    io::Error::other(format!("{error:#}"))
}

pub(crate) use libbpf_rs::libbpf_sys as sys;
