//! The load generator and its sinks, which run in the kernel (`bpf/load.bpf.c`): loading, settings, running, counting.

use std::{
    fmt::Write as _,
    mem::MaybeUninit,
    net::Ipv4Addr,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use libbpf_rs::{
    OpenObject,
    libbpf_sys::{self, bpf_test_run_opts},
    skel::{OpenSkel, SkelBuilder},
};
use rand::{SeedableRng, rngs::SmallRng};
use underpass_protocol::wire::{Endpoint, HEADER_LEN, Header, MEMBERS_MAX, Op, Reason, SessionId};

use crate::{
    cpu,
    netns::Netns,
    worker::Worker,
    workload::{Items, Workload},
};

#[allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks, unsafe_op_in_unsafe_fn)]
mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/load.skel.rs"));
}

use skeleton::{LoadSkel, LoadSkelBuilder, types};

const ETH_LEN: usize = 14;
const IP_LEN: usize = 20;
const UDP_LEN: usize = 8;
/// Bytes of a frame before the UDP payload.
const FRAMING: usize = ETH_LEN + IP_LEN + UDP_LEN;
/// Bytes of key that the generator fills in; longer keys end in padding.
const KEY_LEN: usize = 16;
/// Keys drawn before a run and then asked for in turn, over and over.
const KEYS: usize = 1 << 20;
const TURNS: usize = 4096;
/// Frames that may be under way: fewer than the 256 that a veth's queue holds, so that it never overflows.
const WINDOW: u32 = 192;
/// A write without an answer is sent again after this long. Nothing is lost as a rule, but a busy machine may not let the
/// coordinator run for a while.
const RETRY: Duration = Duration::from_millis(250);
/// Requests are taken for lost when no answer at all came for this long.
const WRITE_OFF: Duration = Duration::from_millis(500);

/// Names of the checks, in the order of `enum load_error`.
const ERRORS: [&str; 12] = [
    "lengths disagree",
    "bad IP checksum",
    "bad UDP checksum",
    "not from the coordinator, or to nobody here",
    "wrong operation for its receiver",
    "session, token, reply address or kind not as sent",
    "wrong epoch",
    "no bound, or a sequence number that went back or differs between clones",
    "no time stamp",
    "a clone's index is not that of its replica",
    "answer to a write that was not sent",
    "committed before every replica had it",
];

/// Where the parties of a benchmark of one coordinator are.
#[derive(Clone, Copy, Debug)]
pub struct Addresses {
    /// Coordinator.
    pub coordinator: Endpoint,
    /// The one client that all sessions belong to.
    pub client: Endpoint,
    /// Replica 0; the others have the addresses that follow, and the same port.
    pub replica: Endpoint,
    /// Number of replicas.
    pub replicas: u8,
}

impl Addresses {
    /// Address of the replica of this index.
    pub fn replica(&self, index: u8) -> Endpoint {
        let addr = Ipv4Addr::from(u32::from(self.replica.addr) + u32::from(index));
        Endpoint { addr, port: self.replica.port }
    }
}

/// An open session.
#[derive(Clone, Copy, Debug)]
pub struct Session {
    /// Its number.
    pub id: SessionId,
    /// Its token.
    pub token: u64,
}

/// Everything that was counted, since the load was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// READs sent.
    pub reads_sent: u64,
    /// WRITEs sent, without retransmissions.
    pub writes_sent: u64,
    /// WRITEs sent again.
    pub writes_again: u64,
    /// READs that reached a replica, by replica.
    pub reads: [u64; MEMBERS_MAX],
    /// WRITEs that reached a replica, by replica.
    pub clones: [u64; MEMBERS_MAX],
    /// Writes answered as committed.
    pub commits: u64,
    /// Requests that came back from the reflector.
    pub reflected: u64,
    /// Answers to what was answered before.
    pub stray: u64,
    /// Rejects, by reason.
    pub rejects: [u64; 32],
    /// Packets in error, by check.
    pub errors: [u64; 16],
    /// Times that the generator gave up waiting for answers.
    pub write_offs: u64,
    /// Frames that the generator could not make.
    pub broken: u64,
}

impl Counts {
    /// Requests whose work the coordinator finished: reads forwarded, writes committed, packets reflected.
    pub fn completed(&self) -> u64 {
        self.reads.iter().sum::<u64>() + self.commits + self.reflected
    }

    /// Requests rejected.
    pub fn rejected(&self) -> u64 {
        self.rejects.iter().sum()
    }

    /// What was counted since `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        fn minus<const N: usize>(a: &[u64; N], b: &[u64; N]) -> [u64; N] {
            std::array::from_fn(|i| a[i] - b[i])
        }
        Self {
            reads_sent: self.reads_sent - earlier.reads_sent,
            writes_sent: self.writes_sent - earlier.writes_sent,
            writes_again: self.writes_again - earlier.writes_again,
            reads: minus(&self.reads, &earlier.reads),
            clones: minus(&self.clones, &earlier.clones),
            commits: self.commits - earlier.commits,
            reflected: self.reflected - earlier.reflected,
            stray: self.stray - earlier.stray,
            rejects: minus(&self.rejects, &earlier.rejects),
            errors: minus(&self.errors, &earlier.errors),
            write_offs: self.write_offs - earlier.write_offs,
            broken: self.broken - earlier.broken,
        }
    }

    /// Rejects in words, as `3 unknown session`; empty when there are none.
    pub fn rejects_text(&self) -> String {
        let named = self.rejects.iter().enumerate().filter(|(_, count)| **count > 0).map(|(reason, count)| {
            let reason = Reason::from_wire(reason as u8).map_or_else(|| format!("reason {reason}"), |r| r.to_string());
            format!("{count} {reason}")
        });
        named.collect::<Vec<_>>().join(", ")
    }
}

/// The load on one coordinator: programs, sessions and counters. Dropping it detaches the programs.
pub struct Load {
    skeleton: LoadSkel<'static>,
    netns: Arc<Netns>,
    device_index: u32,
    addresses: Addresses,
    link: Option<OwnedFd>,
    sessions: Vec<u16>,
    workload: Option<Workload>,
}

impl Load {
    /// Loads the programs and attaches the sink to the tester's device. `macs` are those of the tester's and of the
    /// coordinator's device.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn attach(netns: Arc<Netns>, device: &str, addresses: Addresses) -> Result<Self> {
        // The skeleton borrows from this for its life; a few bytes that are never given back buy a struct without a
        // lifetime.
        let object: &'static mut MaybeUninit<OpenObject> = Box::leak(Box::new(MaybeUninit::uninit()));
        let skeleton = LoadSkelBuilder::default()
            .open(object)
            .and_then(OpenSkel::load)
            .context("cannot load the load generator: it needs root and a kernel of 6.1 or later")?;
        let device_index = netns.index(device)?;
        let link = attach_xdp(&netns, skeleton.progs.load_sink.as_fd(), device_index)
            .with_context(|| format!("cannot attach the sink to {device}"))?;
        Ok(Self { skeleton, netns, device_index, addresses, link: Some(link), sessions: Vec::new(), workload: None })
    }

    /// Attaches the reflector, the bare `XDP_TX` limit, to the coordinator's device; it stays as long as the descriptor
    /// that is returned.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn attach_reflector(&self, netns: &Netns, device: &str) -> Result<OwnedFd> {
        attach_xdp(netns, self.skeleton.progs.load_reflect.as_fd(), netns.index(device)?)
            .with_context(|| format!("cannot attach the reflector to {device}"))
    }

    fn shared(&self) -> *mut types::bss {
        let data = self.skeleton.maps.bss_data.as_deref().expect("the object has a .bss section");
        std::ptr::from_ref(data).cast_mut()
    }

    /// Names the sessions that the generator plays: it uses the largest power of two of them.
    ///
    /// # Errors
    /// When there are none, or two share an index.
    pub fn set_sessions(&mut self, epoch: u32, sessions: &[Session]) -> Result<()> {
        ensure!(!sessions.is_empty(), "no sessions to send from");
        let count = 1 << sessions.len().min(TURNS).ilog2();
        let shared = self.shared();
        self.sessions.clear();
        for (turn, session) in sessions[..count].iter().enumerate() {
            let index = session.id.index();
            ensure!(!self.sessions.contains(&index), "two sessions have index {index}");
            self.sessions.push(index);
            let (id, token) = (session.id.0.to_be(), session.token.to_be());
            // SAFETY: `shared` points to the mapped .bss of this skeleton, which is as large as the type says; the
            // index is 16 bits, the array 65536 long, and turns are fewer than TURNS. No program runs yet.
            unsafe {
                let mut entry: types::load_session = std::mem::zeroed();
                entry.session = id;
                entry.token = token;
                entry.sum = sum_words(&[id.to_ne_bytes(), token.to_ne_bytes()].concat());
                (&raw mut (*shared).load_sessions[usize::from(index)]).write_volatile(entry);
                (&raw mut (*shared).load_turns[turn]).write_volatile(index.into());
            }
        }
        self.update(|settings| {
            settings.turns = count as u32;
            settings.epoch = epoch;
        });
        Ok(())
    }

    fn update(&mut self, change: impl FnOnce(&mut types::load_settings)) {
        let shared = self.shared();
        // SAFETY: as in `set_sessions`; the settings are only read by the programs, word by word.
        unsafe {
            let at = &raw mut (*shared).load_settings;
            let mut settings = at.read_volatile();
            change(&mut settings);
            at.write_volatile(settings);
        }
    }

    /// Sets what is asked for. Not while the generator runs.
    ///
    /// # Errors
    /// When the workload cannot be run, or has keys that the generator cannot make.
    pub fn set_workload(&mut self, workload: &Workload, shard: u32, macs: &Macs) -> Result<()> {
        workload.validate()?;
        ensure!(
            workload.key_size >= KEY_LEN,
            "keys of {} bytes: the load generator in the kernel makes keys of {KEY_LEN} bytes or more",
            workload.key_size
        );
        let same_keys = self.workload.is_some_and(|old| {
            (old.items, old.popularity, old.seed) == (workload.items, workload.popularity, workload.seed)
        });
        let read = Template::new(Op::Read, workload, &self.addresses, shard, macs);
        let write = Template::new(Op::Write, workload, &self.addresses, shard, macs);
        let shared = self.shared();
        // SAFETY: `shared` points to the mapped .bss, and no program runs.
        unsafe {
            read.store(&raw mut (*shared).load_read);
            write.store(&raw mut (*shared).load_write);
            (&raw mut (*shared).load_sent.random).write_volatile(workload.seed);
        }
        if !same_keys {
            let items = Items::new(workload.items, workload.popularity);
            let mut random = SmallRng::seed_from_u64(workload.seed);
            for position in 0..KEYS {
                let key = crate::workload::key(items.draw(&mut random), KEY_LEN);
                let word = |at: usize| u64::from_ne_bytes(key[at..at + 8].try_into().expect("8 of 16 bytes"));
                // SAFETY: as above; the array holds KEYS entries.
                unsafe {
                    (&raw mut (*shared).load_keys[position].words).write_volatile([word(0), word(8)]);
                }
            }
        }
        let frame_len = if workload.write_percent > 50.0 { write.frame_len } else { read.frame_len };
        let addresses = self.addresses;
        let threshold = (workload.write_percent / 100.0 * 2f64.powi(32)) as u64;
        self.update(|settings| {
            settings.window = WINDOW;
            settings.write_cost = addresses.replicas.into();
            settings.write_threshold = threshold.min(u32::MAX.into()) as u32;
            settings.retry_us = RETRY.as_micros() as u32;
            settings.write_off_us = WRITE_OFF.as_micros() as u32;
            settings.coordinator = be(addresses.coordinator.addr);
            settings.client = be(addresses.client.addr);
            settings.replicas = be(addresses.replica.addr);
            settings.replica_count = addresses.replicas.into();
            settings.frame_len = frame_len;
        });
        self.workload = Some(*workload);
        Ok(())
    }

    /// Whether every packet that comes back is checked in full, and whether checksums are made anew in the replicas'
    /// answers, because the coordinator's network stack leaves them to a device. Not while the generator runs.
    pub fn set_checks(&mut self, verify: bool, repair: bool) {
        self.update(|settings| {
            settings.verify = verify.into();
            settings.repair = repair.into();
        });
    }

    /// What was counted so far.
    pub fn counts(&self) -> Counts {
        let shared = self.shared();
        // SAFETY: the programs only ever add to these words, each of which is read whole; a snapshot taken while they
        // run may be off by the packets of the moment.
        let (sent, received) = unsafe {
            ((&raw const (*shared).load_sent).read_volatile(), (&raw const (*shared).load_received).read_volatile())
        };
        Counts {
            reads_sent: sent.reads,
            writes_sent: sent.writes,
            writes_again: sent.again,
            reads: received.reads,
            clones: received.clones,
            commits: received.commits,
            reflected: received.reflected,
            stray: received.stray,
            rejects: received.rejects,
            errors: received.errors,
            write_offs: sent.write_offs,
            broken: sent.broken,
        }
    }

    /// Sessions whose write has no answer.
    pub fn unanswered(&self) -> usize {
        let shared = self.shared();
        let busy = |index: &&u16| {
            // SAFETY: the mapped .bss; words are read whole.
            let entry = unsafe { (&raw const (*shared).load_sessions[usize::from(**index)]).read_volatile() };
            entry.sent != entry.acked
        };
        self.sessions.iter().filter(busy).count()
    }

    /// Starts sending, from a thread on this core.
    ///
    /// # Errors
    /// When the generator cannot run.
    pub fn start(&mut self, core: usize) -> Result<Worker> {
        self.start_as(core, false)
    }

    fn start_as(&mut self, core: usize, drain: bool) -> Result<Worker> {
        ensure!(self.workload.is_some() && !self.sessions.is_empty(), "the load has no workload or no sessions");
        self.update(|settings| settings.drain = drain.into());
        // After a drain nothing is under way: what still seems so is lost, and must not narrow the window.
        let lost = self.under_way();
        let shared = self.shared();
        // SAFETY: the mapped .bss; no program runs.
        let frame_len = unsafe {
            if !drain {
                let forgiven = &raw mut (*shared).load_sent.forgiven;
                forgiven.write_volatile(forgiven.read_volatile() + lost);
            }
            (&raw mut (*shared).load_sent.due).write_volatile(0);
            (*shared).load_settings.frame_len
        };
        // About a tenth of a second in the kernel at a time.
        let runs = Runs { frame_len, count: 1 << 18 };
        keep_generating(self.skeleton.progs.load_generate.as_fd(), self.netns.clone(), self.device_index, core, runs)
    }

    /// Frames that may be under way still.
    fn under_way(&self) -> i64 {
        let shared = self.shared();
        // SAFETY: as in `counts`.
        let (sent, answered) = unsafe {
            (
                (&raw const (*shared).load_sent).read_volatile(),
                (&raw const (*shared).load_received.credits).read_volatile(),
            )
        };
        sent.credits as i64 - answered as i64 - sent.forgiven
    }

    /// Waits for the answers to all requests, sending writes again that were lost.
    ///
    /// # Errors
    /// When some write stays without an answer for five seconds.
    pub fn drain(&mut self, core: usize) -> Result<()> {
        let until = Instant::now() + WRITE_OFF;
        while self.under_way() > 0 && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
        if self.unanswered() == 0 {
            return Ok(());
        }
        let sending = self.start_as(core, true)?;
        let until = Instant::now() + Duration::from_secs(5);
        while self.unanswered() > 0 && Instant::now() < until {
            thread::sleep(Duration::from_millis(5));
        }
        sending.stop()?;
        match self.unanswered() {
            0 => Ok(()),
            left => bail!("{left} writes had no answer for five seconds"),
        }
    }

    /// Fails if anything came back that the coordinator may not send.
    ///
    /// # Errors
    /// Names what was wrong, how often, and shows the headers of the first packet.
    pub fn check_errors(&self, counts: &Counts) -> Result<()> {
        ensure!(counts.broken == 0, "the load generator failed to make {} frames", counts.broken);
        if counts.errors.iter().all(|count| *count == 0) {
            return Ok(());
        }
        let mut text = String::from("packets in error from the coordinator:");
        for (count, name) in counts.errors.iter().zip(ERRORS).filter(|(count, _)| **count > 0) {
            write!(text, " {count}: {name};").expect("writing to a string");
        }
        let shared = self.shared();
        // SAFETY: the mapped .bss.
        let received = unsafe { (&raw const (*shared).load_received).read_volatile() };
        if received.sampled != 0 {
            let name = ERRORS.get(received.sample_error as usize).unwrap_or(&"?");
            let hex: String =
                received.sample[..FRAMING + HEADER_LEN].iter().map(|byte| format!("{byte:02x}")).collect();
            write!(text, " the first ({name}) began {hex}").expect("writing to a string");
        }
        bail!(text)
    }

    /// Detaches the sink.
    pub fn detach(&mut self) {
        self.link = None;
    }
}

/// Link-layer addresses of the two ends.
#[derive(Clone, Copy, Debug)]
pub struct Macs {
    /// Of the tester's device.
    pub tester: [u8; 6],
    /// Of the coordinator's device.
    pub coordinator: [u8; 6],
}

fn be(addr: Ipv4Addr) -> u32 {
    u32::from(addr).to_be()
}

/// Sum of the 16-bit words, in memory order, that Internet checksums are made of.
pub(crate) fn sum_words(bytes: &[u8]) -> u64 {
    bytes.chunks(2).map(|pair| u64::from(u16::from_ne_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]))).sum()
}

pub(crate) fn checksum(sum: u64) -> u16 {
    let mut sum = sum;
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// One kind of request, complete but for the fields that the generator fills in.
struct Template {
    frame: Vec<u8>,
    sum: u64,
    frame_len: u32,
}

impl Template {
    fn new(op: Op, workload: &Workload, addresses: &Addresses, shard: u32, macs: &Macs) -> Self {
        let mut header = Header::new(op);
        header.shard = shard;
        header.set_reply_to(addresses.client);
        let mut key = crate::workload::key(0, workload.key_size);
        key[..KEY_LEN].fill(0);
        let value = if op == Op::Write { vec![b'v'; workload.value_size] } else { Vec::new() };
        let datagram = header.datagram(&key, &value);

        let (from, to) = (addresses.client, addresses.coordinator);
        let udp_len = (UDP_LEN + datagram.len()) as u16;
        let mut frame = Vec::with_capacity(FRAMING + datagram.len());
        frame.extend(macs.coordinator);
        frame.extend(macs.tester);
        frame.extend(0x0800u16.to_be_bytes());
        frame.extend([0x45, 0]);
        frame.extend((IP_LEN as u16 + udp_len).to_be_bytes());
        frame.extend([0, 0, 0x40, 0, 64, 17, 0, 0]);
        frame.extend(from.addr.octets());
        frame.extend(to.addr.octets());
        let ip_checksum = checksum(sum_words(&frame[ETH_LEN..ETH_LEN + IP_LEN]));
        frame[ETH_LEN + 10..ETH_LEN + 12].copy_from_slice(&ip_checksum.to_ne_bytes());
        for field in [from.port, to.port, udp_len, 0] {
            frame.extend(field.to_be_bytes());
        }
        frame.extend(&datagram);

        let pseudo = [&frame[ETH_LEN + 12..ETH_LEN + 20], &[0, 17], &udp_len.to_be_bytes()].concat();
        let sum = sum_words(&pseudo) + sum_words(&frame[ETH_LEN + IP_LEN..]);
        let frame_len = frame.len() as u32;
        Self { frame, sum, frame_len }
    }

    /// # Safety
    /// `to` must point to a template that nobody else uses.
    unsafe fn store(&self, to: *mut types::load_template) {
        // SAFETY: plain data for which all zeros is valid.
        let mut template: types::load_template = unsafe { std::mem::zeroed() };
        for (word, bytes) in template.words.iter_mut().zip(self.frame.chunks_exact(8)) {
            *word = u64::from_ne_bytes(bytes.try_into().expect("8 bytes"));
        }
        let rest = &self.frame[FRAMING + HEADER_LEN + KEY_LEN..];
        template.rest[..rest.len()].copy_from_slice(rest);
        template.sum = self.sum;
        template.frame_len = self.frame_len;
        template.rest_len = rest.len() as u32;
        // SAFETY: as the caller promises.
        unsafe { to.write_volatile(template) };
    }
}

/// Attaches a program to a device, in native mode, until the descriptor that is returned is closed.
pub(crate) fn attach_xdp(netns: &Netns, program: BorrowedFd<'_>, device: u32) -> Result<OwnedFd> {
    netns.run(|| {
        let options = libbpf_sys::bpf_link_create_opts {
            sz: size_of::<libbpf_sys::bpf_link_create_opts>() as u64,
            flags: libbpf_sys::XDP_FLAGS_DRV_MODE,
            ..Default::default()
        };
        // SAFETY: both numbers name what they should, and the options live here.
        let fd = unsafe {
            libbpf_sys::bpf_link_create(program.as_raw_fd(), device as i32, libbpf_sys::BPF_XDP, &raw const options)
        };
        if fd < 0 {
            return Err(std::io::Error::from_raw_os_error(-fd).into());
        }
        // SAFETY: a new descriptor that nobody else owns.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    })
}

/// Frames that the kernel makes at a time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Runs {
    /// Bytes of each.
    pub frame_len: u32,
    /// How many.
    pub count: u32,
}

/// Generates on this core, as if received by the device of this number in the namespace, until it is told to stop.
///
/// # Errors
/// When there can be no more threads or descriptors.
pub(crate) fn keep_generating(
    program: BorrowedFd<'_>,
    netns: Arc<Netns>,
    device: u32,
    core: usize,
    runs: Runs,
) -> Result<Worker> {
    let program = program.try_clone_to_owned()?;
    Worker::start("load", move |stop| {
        netns.enter()?;
        cpu::pin(0, core)?;
        while !stop.is_set() {
            generate(program.as_fd(), device, runs)?;
        }
        Ok(())
    })
}

/// Has the kernel make these frames and run the program on each, as if received by the device of this number in the
/// calling thread's namespace.
fn generate(program: BorrowedFd<'_>, device: u32, Runs { frame_len, count }: Runs) -> Result<()> {
    let frame = vec![0u8; frame_len as usize];
    let context = libbpf_sys::xdp_md { data_end: frame_len, ingress_ifindex: device, ..libbpf_sys::xdp_md::default() };
    let mut options = bpf_test_run_opts {
        sz: size_of::<bpf_test_run_opts>() as u64,
        data_in: frame.as_ptr().cast(),
        data_size_in: frame_len,
        ctx_in: (&raw const context).cast(),
        ctx_size_in: size_of::<libbpf_sys::xdp_md>() as u32,
        repeat: count as i32,
        flags: libbpf_sys::BPF_F_TEST_XDP_LIVE_FRAMES,
        ..Default::default()
    };
    // SAFETY: the options and what they point to live here, and the sizes are theirs.
    let result = unsafe { libbpf_sys::bpf_prog_test_run_opts(program.as_raw_fd(), &raw mut options) };
    match -result {
        0 => Ok(()),
        // A signal; the caller looks whether to stop.
        libc::EINTR => Ok(()),
        error => Err(std::io::Error::from_raw_os_error(error))
            .context("the kernel cannot run the load generator (BPF_F_TEST_XDP_LIVE_FRAMES, since 5.18)"),
    }
}

#[cfg(test)]
mod tests {
    use underpass_protocol::wire::Packet;

    use super::*;

    #[test]
    fn templates_are_whole_packets_with_right_checksums() {
        let at = |last| Endpoint { addr: Ipv4Addr::new(10, 1, 2, last), port: 5550 };
        let addresses = Addresses { coordinator: at(1), client: at(2), replica: at(16), replicas: 3 };
        let macs = Macs { tester: [2, 0, 0, 0, 0, 2], coordinator: [2, 0, 0, 0, 0, 1] };
        let workload = Workload { key_size: 21, value_size: 33, ..Workload::default() };
        for op in [Op::Read, Op::Write] {
            let template = Template::new(op, &workload, &addresses, 7, &macs);
            let packet = Packet::parse(&template.frame[FRAMING..]).unwrap();
            assert_eq!(packet.header.op, op);
            assert_eq!(packet.header.shard, 7);
            assert_eq!(packet.header.reply_to(), Some(addresses.client));
            assert_eq!(packet.key.len(), 21);
            assert_eq!(packet.value.len(), if op == Op::Write { 33 } else { 0 });
            assert_eq!(checksum(sum_words(&template.frame[ETH_LEN..ETH_LEN + IP_LEN])), 0);
        }
        assert_eq!(addresses.replica(2).addr, Ipv4Addr::new(10, 1, 2, 18));
    }

    #[test]
    fn checksums_are_those_of_rfc_1071() {
        let bytes = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
        assert_eq!(checksum(sum_words(&bytes)).to_ne_bytes(), [!0xdd, !0xf2]);
    }
}
