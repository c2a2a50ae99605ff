//! Frames in and out of a device, as they are.

use std::{
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    time::Instant,
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// A device's frames.
pub struct Port(OwnedFd);

impl Port {
    /// Of the calling thread's network namespace.
    pub fn open(device: &str) -> Self {
        let every = (libc::ETH_P_ALL as u16).to_be();
        // SAFETY: takes no pointers.
        let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, every.into()) };
        assert!(fd >= 0, "a packet socket: {}", io::Error::last_os_error());
        // SAFETY: this function's own descriptor, just made.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: all-zero is a valid address.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = every;
        address.sll_ifindex = nix::net::if_::if_nametoindex(device).unwrap() as i32;
        // SAFETY: the address is of this size and outlives the call.
        let bound = unsafe { libc::bind(fd, (&raw const address).cast(), size_of_val(&address) as u32) };
        assert_eq!(bound, 0, "binding to {device}: {}", io::Error::last_os_error());
        Self(socket)
    }

    /// Sends a frame out of the device.
    pub fn send(&self, frame: &[u8]) {
        // SAFETY: the buffer is of this length and outlives the call.
        let sent = unsafe { libc::send(self.0.as_raw_fd(), frame.as_ptr().cast(), frame.len(), 0) };
        assert_eq!(sent, frame.len() as isize, "{}", io::Error::last_os_error());
    }

    /// The next frame that the device receives or sends, if there is one before this moment.
    pub fn receive(&self, until: Instant) -> Option<Vec<u8>> {
        let timeout = until.saturating_duration_since(Instant::now()).as_millis() as u16;
        let mut fds = [PollFd::new(std::os::fd::AsFd::as_fd(&self.0), PollFlags::POLLIN)];
        if poll(&mut fds, PollTimeout::from(timeout)).unwrap() == 0 {
            return None;
        }
        let mut frame = vec![0; 4096];
        // SAFETY: the buffer is of this length and outlives the call.
        let len = unsafe { libc::recv(self.0.as_raw_fd(), frame.as_mut_ptr().cast(), frame.len(), 0) };
        assert!(len > 0, "{}", io::Error::last_os_error());
        frame.truncate(len as usize);
        Some(frame)
    }
}
