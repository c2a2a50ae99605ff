//! The delay line: holds the frames that the switch hands over until they are due, then sends them.

use std::{
    cell::RefCell,
    cmp::Reverse,
    collections::BinaryHeap,
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    time::Duration,
};

use libbpf_rs::RingBufferBuilder;

use crate::{
    Error, Result,
    skeleton::types::rack_held_head,
    switch::{LineCounts, Maps},
};

/// The most frames held at a time; more are dropped and counted.
pub const HELD_MAX: usize = 65_536;
/// How often the delay line looks whether it shall end, and shows life.
const BEAT: Duration = Duration::from_millis(50);

/// Ordered by the time when it is due; among equals, as taken.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Held {
    due_ns: u64,
    number: u64,
    port: u32,
    copies: u16,
    frame: Vec<u8>,
}

#[derive(Default)]
struct Line {
    held: BinaryHeap<Reverse<Held>>,
    /// Buffers of frames already sent.
    free: Vec<Vec<u8>>,
    counts: LineCounts,
}

impl Line {
    fn take(&mut self, record: &[u8]) {
        let (head, frame) = record.split_at(size_of::<rack_held_head>());
        // SAFETY: `head` has the structure's length; it consists of integers, and the read may be unaligned.
        let head = unsafe { head.as_ptr().cast::<rack_held_head>().read_unaligned() };
        let number = self.counts.taken;
        self.counts.taken += 1;
        if self.held.len() == HELD_MAX {
            self.counts.overflow += 1;
            return;
        }
        let mut buffer = self.free.pop().unwrap_or_default();
        buffer.clear();
        buffer.extend_from_slice(&frame[..head.length.into()]);
        let (due_ns, port, copies) = (head.due_ns, head.port, head.copies);
        self.held.push(Reverse(Held { due_ns, number, port, copies, frame: buffer }));
    }

    /// Sends what is due; returns how long it is to the next, if any.
    fn send(&mut self, socket: &OwnedFd) -> Option<Duration> {
        while let Some(Reverse(first)) = self.held.peek() {
            let now_ns = monotonic_ns();
            if first.due_ns > now_ns {
                return Some(Duration::from_nanos(first.due_ns - now_ns));
            }
            let Some(Reverse(held)) = self.held.pop() else { break };
            for _ in 0..held.copies {
                if send(socket, held.port, &held.frame).is_ok() {
                    self.counts.sent += 1;
                } else {
                    self.counts.failed += 1;
                }
            }
            self.free.push(held.frame);
        }
        None
    }
}

/// The clock of `bpf_ktime_get_ns`.
pub(crate) fn monotonic_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one timespec; this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

fn send(socket: &OwnedFd, port: u32, frame: &[u8]) -> io::Result<()> {
    // SAFETY: a sockaddr_ll of zeros is a valid one.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_ifindex = port as i32;
    // SAFETY: both pointers are valid for the lengths given beside them.
    let result = unsafe {
        libc::sendto(
            socket.as_raw_fd(),
            frame.as_ptr().cast(),
            frame.len(),
            libc::MSG_DONTWAIT,
            std::ptr::from_ref(&address).cast(),
            size_of::<libc::sockaddr_ll>() as libc::socklen_t,
        )
    };
    nix::errno::Errno::result(result)?;
    Ok(())
}

/// Runs a rack's delay line until [`Maps::stop`]. The calling thread is in the switch's namespace.
pub(crate) fn run(maps: &Maps) -> Result<()> {
    // Protocol 0: it sends and never receives.
    // SAFETY: makes a descriptor and touches no memory of ours.
    let socket = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
    nix::errno::Errno::result(socket).map_err(Error::io("cannot open a packet socket"))?;
    // SAFETY: the kernel has just handed the descriptor out, to nobody else.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    // Wake-ups are the resolution of every delay; the default slack is 50 us.
    // SAFETY: the option takes a number and changes nothing but the calling thread's timers.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };

    let line = RefCell::new(Line::default());
    let mut builder = RingBufferBuilder::new();
    builder
        .add(&maps.line, |record| {
            line.borrow_mut().take(record);
            0
        })
        .map_err(Error::bpf("cannot map the switch's ring"))?;
    let ring = builder.build().map_err(Error::bpf("cannot map the switch's ring"))?;
    let mut poll = libc::pollfd { fd: ring.epoll_fd(), events: libc::POLLIN, revents: 0 };
    let mut beat_ns = 0;
    loop {
        ring.consume().map_err(Error::bpf("cannot read the switch's ring"))?;
        let mut line = line.borrow_mut();
        let wait = line.send(&socket).unwrap_or(BEAT).min(BEAT);
        let now_ns = monotonic_ns();
        if now_ns - beat_ns >= BEAT.as_nanos() as u64 {
            beat_ns = now_ns;
            line.counts.beat_ns = now_ns;
            line.counts.held = line.held.len() as u64;
            maps.set_line_counts(&line.counts)?;
            if maps.stopped()? {
                return Ok(());
            }
        }
        drop(line);
        let wait = libc::timespec { tv_sec: 0, tv_nsec: wait.as_nanos() as libc::c_long };
        // SAFETY: one pollfd and one timespec, valid for the call; no signal mask.
        let result = unsafe { libc::ppoll(&mut poll, 1, &wait, std::ptr::null()) };
        match nix::errno::Errno::result(result) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(Error::io("cannot wait for the switch's ring")(error)),
        }
    }
}
