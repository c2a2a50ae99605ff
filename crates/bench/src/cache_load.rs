//! GETs for memcached over UDP, made and swallowed in the kernel (`bpf/cache_load.bpf.c`): loading, settings, counting.

use std::{
    mem::MaybeUninit,
    net::SocketAddrV4,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use anyhow::{Context, Result, ensure};
use libbpf_rs::{
    OpenObject,
    skel::{OpenSkel, SkelBuilder},
};
use rand::{SeedableRng, rngs::SmallRng};

use crate::{
    load::{Macs, Runs, attach_xdp, checksum, keep_generating, sum_words},
    netns::Netns,
    worker::Worker,
    workload::Items,
};

#[allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks, unsafe_op_in_unsafe_fn)]
mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/cache_load.skel.rs"));
}

use skeleton::{CacheLoadSkel, CacheLoadSkelBuilder, types};

/// Most items that can be asked for.
pub const ITEMS_MAX: u64 = 1 << 17;
const TURNS: usize = 1 << 22;
/// Bytes of a frame that the generator writes: its headers and the longest request.
const FRAME_MAX: usize = 15 * 8;
/// Bytes of a frame around the key: headers, memcached's own, `get `, CR and LF.
const AROUND_KEY: usize = 14 + 20 + 8 + 8 + 4 + 2;
/// Requests under way at most: fewer than the 256 that a veth's queue holds, so that it never overflows.
const WINDOW: u32 = 240;
/// Requests are taken for lost when no answer at all came for this long.
const WRITE_OFF_US: u32 = 100_000;
/// One request in 64 is timed.
const SAMPLE_MASK: u32 = 63;

/// What was counted since the load was made.
#[derive(Clone, Debug)]
pub struct Counts {
    /// Requests sent.
    pub requests: u64,
    /// Datagrams that came back.
    pub answers: u64,
    /// Of these, with a value.
    pub found: u64,
    /// Of these, with none.
    pub missing: u64,
    /// Of these, with something else.
    pub other: u64,
    /// Requests that were not sent when they were due, as too many were under way.
    pub late: u64,
    /// Times that everything under way was taken for lost.
    pub write_offs: u64,
    /// Frames that could not be made.
    pub broken: u64,
    latency: Vec<u64>,
}

impl Counts {
    /// What was counted since `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            requests: self.requests - earlier.requests,
            answers: self.answers - earlier.answers,
            found: self.found - earlier.found,
            missing: self.missing - earlier.missing,
            other: self.other - earlier.other,
            late: self.late - earlier.late,
            write_offs: self.write_offs - earlier.write_offs,
            broken: self.broken - earlier.broken,
            latency: self.latency.iter().zip(&earlier.latency).map(|(now, then)| now - then).collect(),
        }
    }

    /// The latency in nanoseconds that this share of the timed requests did not exceed, to an eighth; `None` if none was timed.
    pub fn latency_ns(&self, share: f64) -> Option<f64> {
        let total: u64 = self.latency.iter().sum();
        let mut left = (total as f64 * share).ceil() as u64;
        let bucket = self.latency.iter().position(|&count| {
            left = left.saturating_sub(count);
            left == 0
        })?;
        (total > 0).then(|| bucket_end(bucket))
    }
}

/// The upper end of a bucket: 8 of them for each power of two.
fn bucket_end(bucket: usize) -> f64 {
    if bucket < 8 {
        return bucket as f64;
    }
    let (power, eighth) = (bucket / 8, bucket % 8);
    (1u64 << power) as f64 * (1.0 + (eighth as f64 + 1.0) / 8.0)
}

fn load() -> Result<CacheLoadSkel<'static>> {
    // The skeleton borrows from this for its life; a few bytes that are never given back buy a struct without a lifetime.
    let object: &'static mut MaybeUninit<OpenObject> = Box::leak(Box::new(MaybeUninit::uninit()));
    CacheLoadSkelBuilder::default()
        .open(object)
        .and_then(OpenSkel::load)
        .context("cannot load the load generator: it needs root and a kernel of 6.1 or later")
}

/// Attaches a program that passes everything on to a server's device; it stays as long as the descriptor that is returned.
///
/// # Errors
/// When the kernel refuses.
pub fn attach_pass(netns: &Netns, device: &str) -> Result<OwnedFd> {
    attach_xdp(netns, load()?.progs.cache_load_pass.as_fd(), netns.index(device)?)
        .with_context(|| format!("cannot attach a program to {device}"))
}

/// The load on one server. Dropping it detaches the sink.
pub struct CacheLoad {
    skeleton: CacheLoadSkel<'static>,
    netns: Arc<Netns>,
    device_index: u32,
    link: Option<OwnedFd>,
}

impl CacheLoad {
    /// Loads the programs and attaches the sink to the tester's device. `key` is the key of an item; items are asked for as
    /// `items` draws them.
    ///
    /// # Errors
    /// When the kernel refuses, or there are more than [`ITEMS_MAX`] items.
    pub fn attach(
        netns: Arc<Netns>,
        device: &str,
        (client, server): (SocketAddrV4, SocketAddrV4),
        macs: &Macs,
        (count, items, seed): (u64, &Items, u64),
        key: impl Fn(u64) -> Vec<u8>,
    ) -> Result<Self> {
        ensure!((1..=ITEMS_MAX).contains(&count), "{count} items: the load generator has room for 1 to {ITEMS_MAX}");
        let skeleton = load()?;
        let device_index = netns.index(device)?;
        let load = Self { skeleton, netns, device_index, link: None };
        let shared = load.shared();
        for item in 0..count {
            let frame = frame(client, server, macs, &key(item));
            ensure!(frame.len() <= FRAME_MAX, "a key of {} bytes is too long", frame.len() - AROUND_KEY);
            // SAFETY: `shared` points to the mapped .bss of this skeleton, which is as large as the type says; the
            // index is below the array's length. No program runs yet.
            unsafe {
                let mut entry: types::cache_load_frame = std::mem::zeroed();
                entry.len = frame.len() as u32;
                let mut bytes = frame;
                bytes.resize(FRAME_MAX, 0);
                for (word, bytes) in entry.words.iter_mut().zip(bytes.chunks_exact(8)) {
                    *word = u64::from_ne_bytes(bytes.try_into().expect("8 bytes"));
                }
                (&raw mut (*shared).cache_load_frames[item as usize]).write_volatile(entry);
            }
        }
        let mut random = SmallRng::seed_from_u64(seed);
        for turn in 0..TURNS {
            // SAFETY: as above; the array holds TURNS entries.
            unsafe {
                (&raw mut (*shared).cache_load_turns[turn]).write_volatile(items.draw(&mut random) as u32);
            }
        }
        // SAFETY: as above.
        unsafe {
            let settings = &raw mut (*shared).cache_load_settings;
            let mut new: types::cache_load_settings = std::mem::zeroed();
            new.window = WINDOW;
            new.write_off_us = WRITE_OFF_US;
            new.sample_mask = SAMPLE_MASK;
            new.server = u32::from(*server.ip()).to_be();
            new.port = server.port().to_be();
            settings.write_volatile(new);
        }
        let link = attach_xdp(&load.netns, load.skeleton.progs.cache_load_sink.as_fd(), device_index)
            .with_context(|| format!("cannot attach the sink to {device}"))?;
        Ok(Self { link: Some(link), ..load })
    }

    fn shared(&self) -> *mut types::bss {
        let data = self.skeleton.maps.bss_data.as_deref().expect("the object has a .bss section");
        std::ptr::from_ref(data).cast_mut()
    }

    /// What was counted so far.
    pub fn counts(&self) -> Counts {
        let shared = self.shared();
        // SAFETY: the programs only ever add to these words, each of which is read whole; a snapshot taken while they
        // run may be off by the packets of the moment.
        let (sent, received) = unsafe {
            (
                (&raw const (*shared).cache_load_sent).read_volatile(),
                (&raw const (*shared).cache_load_received).read_volatile(),
            )
        };
        Counts {
            requests: sent.requests,
            answers: received.answers,
            found: received.found,
            missing: received.missing,
            other: received.other,
            late: sent.late,
            write_offs: sent.write_offs,
            broken: sent.broken,
            latency: received.latency.to_vec(),
        }
    }

    /// Starts sending, from a thread on this core: so many requests a second, or, without a number, as many as are answered.
    ///
    /// # Errors
    /// When the generator cannot run.
    pub fn start(&mut self, core: usize, rate: Option<f64>) -> Result<Worker> {
        let shared = self.shared();
        // SAFETY: the mapped .bss; no program runs.
        unsafe {
            let interval = rate.map_or(0, |rate| (1e9 / rate) as u64);
            (&raw mut (*shared).cache_load_settings.interval_ns).write_volatile(interval);
            (&raw mut (*shared).cache_load_sent.due_ns).write_volatile(0);
        }
        // About a tenth of a second in the kernel at a time; less would go by in waiting for what ends a run of the kernel's.
        let runs = Runs { frame_len: FRAME_MAX as u32, count: 1 << 20 };
        let program = self.skeleton.progs.cache_load_generate.as_fd();
        keep_generating(program, self.netns.clone(), self.device_index, core, runs)
    }

    /// Detaches the sink.
    pub fn detach(&mut self) {
        self.link = None;
    }
}

/// A GET as it leaves the client, request number 0.
fn frame(client: SocketAddrV4, server: SocketAddrV4, macs: &Macs, key: &[u8]) -> Vec<u8> {
    let text = [b"\0\0\0\0\0\x01\0\0get ", key, b"\r\n"].concat();
    let udp_len = (8 + text.len()) as u16;
    let mut frame = Vec::with_capacity(FRAME_MAX);
    frame.extend(macs.coordinator);
    frame.extend(macs.tester);
    frame.extend([0x08, 0x00, 0x45, 0]);
    frame.extend((20 + udp_len).to_be_bytes());
    frame.extend([0, 0, 0x40, 0, 64, 17, 0, 0]);
    frame.extend(client.ip().octets());
    frame.extend(server.ip().octets());
    let ip_checksum = checksum(sum_words(&frame[14..34]));
    frame[24..26].copy_from_slice(&ip_checksum.to_ne_bytes());
    for field in [client.port(), server.port(), udp_len, 0] {
        frame.extend(field.to_be_bytes());
    }
    frame.extend(text);
    let pseudo = [&frame[26..34], &[0, 17], &udp_len.to_be_bytes()].concat();
    let udp_checksum = checksum(sum_words(&pseudo) + sum_words(&frame[34..]));
    let udp_checksum = if udp_checksum == 0 { 0xffff } else { udp_checksum };
    frame[40..42].copy_from_slice(&udp_checksum.to_ne_bytes());
    frame
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_have_right_checksums_and_fit() {
        let macs = Macs { tester: [2, 0, 0, 0, 0, 2], coordinator: [2, 0, 0, 0, 0, 1] };
        let at = |last: u8, port| SocketAddrV4::new([10, 1, 2, last].into(), port);
        for length in 16..=64 {
            let frame = frame(at(2, 40_000), at(1, 11211), &macs, &vec![b'k'; length]);
            assert_eq!(frame.len(), AROUND_KEY + length);
            assert!(frame.len() <= FRAME_MAX);
            assert_eq!(checksum(sum_words(&frame[14..34])), 0);
            let pseudo = [&frame[26..34], &[0, 17], &frame[38..40]].concat();
            assert_eq!(checksum(sum_words(&pseudo) + sum_words(&frame[34..])), 0);
        }
    }

    #[test]
    fn latencies_are_read_off_their_buckets() {
        let mut latency = vec![0; 512];
        // 1024 to 1151 ns, and 2048 to 2303.
        (latency[80], latency[88]) = (98, 2);
        let counts = Counts {
            requests: 0,
            answers: 0,
            found: 0,
            missing: 0,
            other: 0,
            late: 0,
            write_offs: 0,
            broken: 0,
            latency,
        };
        assert_eq!(counts.latency_ns(0.5), Some(1152.0));
        assert_eq!(counts.latency_ns(0.99), Some(2304.0));
    }
}
