//! What tests of real racks share.

use std::{
    fs,
    net::{SocketAddr, UdpSocket},
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    thread,
    time::Duration,
};

use underpass_rack::{Host, Rack};

/// Every test has a rack of its own name: they run side by side, and with racks of others.
pub fn name(test: &str) -> String {
    format!("t{}-{test}", std::process::id())
}

pub fn socket(host: &Host, port: u16) -> UdpSocket {
    let socket = host.enter(|| UdpSocket::bind((host.addr, port))).unwrap().unwrap();
    // A frame that finds no room in a receiver that waits for a processor would count as lost by the switch.
    nix::sys::socket::setsockopt(&socket, nix::sys::socket::sockopt::RcvBufForce, &(64 << 20)).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    socket
}

pub const NONE: [u32; 0] = [];

/// Sends `count` numbered datagrams; returns the numbers that arrived, in their order.
pub fn send_numbers(from: &UdpSocket, to: &UdpSocket, count: u32) -> Vec<u32> {
    let address: SocketAddr = to.local_addr().unwrap();
    let receiver = to.try_clone().unwrap();
    let received = thread::spawn(move || {
        let mut numbers = Vec::new();
        let mut buffer = [0; 2048];
        while let Ok((length, _)) = receiver.recv_from(&mut buffer) {
            numbers.push(u32::from_ne_bytes(buffer[..length].try_into().unwrap()));
        }
        numbers
    });
    for number in 0..count {
        from.send_to(&number.to_ne_bytes(), address).unwrap();
        // A receive thread may have to wait for a processor too, and its queue is 256 frames long.
        if number % 16 == 15 {
            thread::sleep(Duration::from_millis(1));
        }
    }
    received.join().unwrap()
}

/// Two sockets whose hosts have resolved each other's address, so that only data is left to be counted.
pub fn acquainted(rack: &Rack) -> (UdpSocket, UdpSocket) {
    let (a, b) = (socket(&rack.host("a").unwrap(), 7000), socket(&rack.host("b").unwrap(), 7000));
    assert_eq!(send_numbers(&a, &b, 1), [0]);
    assert_eq!(send_numbers(&b, &a, 1), [0]);
    (a, b)
}

/// A program that returns a verdict and does nothing else.
pub fn constant_program(verdict: i32) -> OwnedFd {
    const LOAD_R0: u8 = 0xb7;
    const EXIT: u8 = 0x95;
    let instruction = |code, imm| libbpf_sys::bpf_insn { code, imm, ..Default::default() };
    let program = [instruction(LOAD_R0, verdict), instruction(EXIT, 0)];
    // SAFETY: the strings end with a zero, the instructions are two, and there are no options.
    let program = unsafe {
        libbpf_sys::bpf_prog_load(
            libbpf_sys::BPF_PROG_TYPE_XDP,
            c"constant".as_ptr(),
            c"GPL".as_ptr(),
            program.as_ptr(),
            2,
            std::ptr::null_mut(),
        )
    };
    assert!(program >= 0);
    // SAFETY: the kernel has just handed the descriptor out, to nobody else.
    unsafe { OwnedFd::from_raw_fd(program) }
}

/// Attaches a native program to a host's interface, or detaches the one that is there.
pub fn attach(host: &Host, program: Option<&OwnedFd>) {
    let flags = match program {
        Some(_) => libbpf_sys::XDP_FLAGS_DRV_MODE | libbpf_sys::XDP_FLAGS_UPDATE_IF_NOEXIST,
        None => libbpf_sys::XDP_FLAGS_DRV_MODE,
    };
    let program = program.map_or(-1, |program| program.as_raw_fd());
    let attach = || {
        let index = fs::read_to_string(format!("/sys/class/net/{}/ifindex", host.ifname)).unwrap();
        // SAFETY: takes numbers only; no options.
        unsafe { libbpf_sys::bpf_xdp_attach(index.trim().parse().unwrap(), program, flags, std::ptr::null()) }
    };
    assert_eq!(host.enter(attach).unwrap(), 0);
}
