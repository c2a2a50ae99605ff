//! Requests and answers over a UDP socket, many in each system call, so many under way at any time.

use std::{
    net::UdpSocket,
    os::fd::AsRawFd,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use underpass_protocol::wire::DATAGRAM_MAX;

use crate::{
    peer::{Protocol, slot_of, tag},
    process,
    workload::value_number,
};

/// Many datagrams in one system call, on a connected socket.
struct Mass {
    buffers: Vec<Vec<u8>>,
    vectors: Vec<libc::iovec>,
    headers: Vec<libc::mmsghdr>,
}

impl Mass {
    const SIZE: usize = 64;

    fn new() -> Self {
        let buffers = vec![vec![0; DATAGRAM_MAX + 64]; Self::SIZE];
        // SAFETY: plain data for which all zeros is valid; `point` sets the pointers before each use.
        let (vectors, headers) =
            unsafe { (vec![std::mem::zeroed(); Self::SIZE], vec![std::mem::zeroed(); Self::SIZE]) };
        Self { buffers, vectors, headers }
    }

    fn point(&mut self, count: usize) {
        for at in 0..count {
            let buffer = &mut self.buffers[at];
            self.vectors[at] = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
            self.headers[at].msg_hdr.msg_iov = &raw mut self.vectors[at];
            self.headers[at].msg_hdr.msg_iovlen = 1;
        }
    }

    /// Sends the first `count` buffers.
    fn send(&mut self, socket: &UdpSocket, count: usize) -> Result<()> {
        self.point(count);
        let mut sent = 0;
        while sent < count {
            // SAFETY: `point` made the first `count` headers name one buffer each, which all live in `self`.
            let result = unsafe {
                libc::sendmmsg(socket.as_raw_fd(), self.headers[sent..].as_mut_ptr(), (count - sent) as u32, 0)
            };
            match nix::errno::Errno::result(result) {
                Ok(number) => sent += number as usize,
                Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EINTR | nix::errno::Errno::ENOBUFS) => {}
                Err(error) => return Err(error).context("sending to the server"),
            }
        }
        Ok(())
    }

    /// Receives what is there; how many.
    fn receive(&mut self, socket: &UdpSocket) -> Result<usize> {
        for buffer in &mut self.buffers {
            buffer.resize(DATAGRAM_MAX + 64, 0);
        }
        self.point(Self::SIZE);
        // SAFETY: as in `send`; each buffer is as long as its vector says.
        let result = unsafe {
            libc::recvmmsg(
                socket.as_raw_fd(),
                self.headers.as_mut_ptr(),
                Self::SIZE as u32,
                libc::MSG_DONTWAIT,
                std::ptr::null_mut(),
            )
        };
        match nix::errno::Errno::result(result) {
            Ok(number) => Ok(number as usize),
            Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EINTR) => Ok(0),
            Err(error) => Err(error).context("receiving from the server: is it still there?"),
        }
    }

    fn datagram(&self, at: usize) -> &[u8] {
        &self.buffers[at][..self.headers[at].msg_len as usize]
    }
}

/// Requests and answers, so many under way at any time.
pub struct Exchange<'a> {
    socket: &'a UdpSocket,
    out: Mass,
    into: Mass,
    /// The item that each slot waits for.
    slots: Vec<Option<u64>>,
    /// How often each slot was used.
    turns: Vec<u16>,
    free: Vec<usize>,
    /// Answers received.
    pub answered: u64,
    /// Requests given up.
    pub lost: u64,
    heard: Instant,
}

impl<'a> Exchange<'a> {
    /// With this many requests under way.
    pub fn new(socket: &'a UdpSocket, outstanding: usize) -> Self {
        Self {
            socket,
            out: Mass::new(),
            into: Mass::new(),
            slots: vec![None; outstanding],
            turns: vec![0; outstanding],
            free: (0..outstanding).collect(),
            answered: 0,
            lost: 0,
            heard: Instant::now(),
        }
    }

    /// Sends requests while there are any, and takes answers until all have come or are given up.
    ///
    /// # Errors
    /// The socket's; an answer that is none, or has another value than was stored.
    pub fn run(
        &mut self,
        protocol: &mut dyn Protocol,
        store: bool,
        mut next: impl FnMut() -> Option<u64>,
        mut lost: impl FnMut(u64),
    ) -> Result<()> {
        self.heard = Instant::now();
        let mut over = false;
        loop {
            let mut count = 0;
            while !over && count < Mass::SIZE && !self.free.is_empty() {
                let Some(item) = next() else {
                    over = true;
                    break;
                };
                let slot = self.free.pop().expect("just looked");
                self.slots[slot] = Some(item);
                self.turns[slot] = self.turns[slot].wrapping_add(1);
                let tag = tag(slot, self.turns[slot]);
                let buffer = &mut self.out.buffers[count];
                if store {
                    protocol.store(tag, item, buffer)
                } else {
                    protocol.get(tag, item, buffer)
                }
                count += 1;
            }
            self.out.send(self.socket, count)?;
            if over && self.free.len() == self.slots.len() {
                return Ok(());
            }
            self.take(protocol, store)?;
            // Answers come within a millisecond, unless the machine is busy with other things; these are lost.
            if self.heard.elapsed() > Duration::from_millis(500) {
                for slot in 0..self.slots.len() {
                    if let Some(item) = self.slots[slot].take() {
                        self.free.push(slot);
                        self.lost += 1;
                        lost(item);
                    }
                }
                self.heard = Instant::now();
                process::check_interrupt()?;
            }
        }
    }

    fn take(&mut self, protocol: &dyn Protocol, store: bool) -> Result<()> {
        let count = self.into.receive(self.socket)?;
        for at in 0..count {
            let datagram = self.into.datagram(at);
            let Some((answered, data)) = protocol.answer(datagram) else {
                bail!("the server refuses, or answers what was not asked: {:?}", String::from_utf8_lossy(datagram));
            };
            // An answer that was given up comes late.
            let slot = slot_of(answered);
            if self.turns.get(slot).is_none_or(|turn| tag(slot, *turn) != answered) {
                continue;
            }
            let Some(item) = self.slots[slot].take() else { continue };
            ensure!(store || value_number(data) == Some(item), "item {item} came back with another value: {data:?}");
            self.free.push(slot);
            self.answered += 1;
        }
        if count > 0 {
            self.heard = Instant::now();
        }
        Ok(())
    }
}
