//! Generated streams of commands, for the pure parser and the kernel's.

#![allow(dead_code, reason = "each test uses some of it")]

use rand::{Rng, rngs::StdRng, seq::IndexedRandom};

/// `UNDERPASS_SEED` repeats a run.
pub fn seed() -> u64 {
    let seed = std::env::var("UNDERPASS_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or_else(rand::random);
    println!("UNDERPASS_SEED={seed}");
    seed
}

/// `UNDERPASS_COUNT` makes it longer.
pub fn count(default: usize) -> usize {
    std::env::var("UNDERPASS_COUNT").ok().and_then(|s| s.parse().ok()).unwrap_or(default)
}

/// A binary request.
pub fn request(opcode: u8, extras: &[u8], key: &[u8], value: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0x80, opcode];
    bytes.extend((key.len() as u16).to_be_bytes());
    bytes.extend([extras.len() as u8, 0, 0, 0]);
    bytes.extend(((extras.len() + key.len() + value.len()) as u32).to_be_bytes());
    bytes.extend([9; 12]);
    [&bytes, extras, key, value].concat()
}

/// A stream of commands, whole, broken and binary garbage.
pub fn commands(rng: &mut StdRng) -> Vec<u8> {
    const LINES: &[&[u8]] = &[
        b"get a\r\n",
        b"gets a bb ccc\r\n",
        b"set k 0 0 5\r\nvalue\r\n",
        b"set k 0 0 10\r\nset x 0 0\r\n\r\n",
        b"cas key 1 2 3 4 noreply\r\nabc\r\n",
        b"delete k noreply\r\n",
        b"mg k v t\r\n",
        b"ms key 3 T9 I\r\nabc\r\n",
        b"ms key 3 b\r\nabc\r\n",
        b"flush_all 10\r\n",
        b"gat 10 a b\r\n",
        b"set k 0 0 99999999999\r\n",
        b"set k 0 x 3\r\n",
        b"set k 0 0 4294967297\r\nx\r\n",
        b"incr\r\n",
        b"\r\n",
        b"get a\0b\r\r\n",
        b"add k 0 0 1\r\nx\r\n",
        b"replace k 0 0 1 noreply\r\nx\r\n",
        b"append k 0 0 1\r\nx\r\n",
        b"prepend k 0 0 1\r\nx\r\n",
        b"incr k 1\r\n",
        b"decr k 1 noreply\r\n",
        b"touch k 9\r\n",
        b"gats 10 a b\r\n",
        b"mg k v T30\r\n",
        b"mg k N30 v\r\n",
        b"mg Zm9v b v\r\n",
        b"md k q\r\n",
        b"ma k D3\r\n",
        b"me k\r\n",
        b"flush_all noreply\r\n",
        b"cache_memlimit 64\r\n",
        b"slabs reassign 1 2\r\n",
        b"version\r\n",
    ];
    let mut bytes = Vec::new();
    if rng.random_bool(0.3) {
        for _ in 0..rng.random_range(1..6) {
            const REQUESTS: &[(&[u8], usize)] = &[
                (&[0x00, 0x09, 0x0c, 0x0d], 0),
                (&[0x01, 0x02, 0x03, 0x11, 0x12, 0x13], 8),
                (&[0x04, 0x14], 0),
                (&[0x05, 0x06, 0x15, 0x16], 20),
                (&[0x08, 0x18], 4),
                (&[0x0a, 0x0b], 0),
                (&[0x0e, 0x0f, 0x19, 0x1a], 0),
                (&[0x1c, 0x1d, 0x1e, 0x23, 0x24], 4),
            ];
            let (opcodes, extras) = *REQUESTS.choose(rng).unwrap();
            let opcode = *opcodes.choose(rng).unwrap();
            let named = !matches!(opcode, 0x08 | 0x18 | 0x0a | 0x0b);
            let key = vec![b'k'; if named { rng.random_range(1..30) } else { 0 }];
            let stores = matches!(opcode, 1..4 | 0x11..0x14 | 0x0e | 0x0f | 0x19 | 0x1a);
            let value = vec![b'v'; if stores { rng.random_range(0..50) } else { 0 }];
            bytes.extend(request(opcode, &vec![0; extras], &key, &value));
        }
    } else {
        for _ in 0..rng.random_range(1..8) {
            bytes.extend_from_slice(LINES.choose(rng).unwrap());
        }
    }
    if rng.random_bool(0.3) {
        let at = rng.random_range(0..bytes.len());
        bytes[at] = *[b' ', b'\r', b'\n', 0, 0x80, b'9', b'-'].choose(rng).unwrap();
    }
    bytes
}

/// Attaches a program that passes every frame: a veth takes what its peer's XDP transmits only if it has one too.
pub fn pass_everything(device: &str) {
    use libbpf_rs::libbpf_sys::*;
    // r0 = XDP_PASS; exit
    let program = [0x2_0000_00b7_u64, 0x95];
    let ifindex = nix::net::if_::if_nametoindex(device).unwrap();
    // SAFETY: the two instructions of 8 bytes each outlive the call; name and licence are C strings.
    let fd = unsafe {
        bpf_prog_load(
            BPF_PROG_TYPE_XDP,
            c"pass".as_ptr(),
            c"Dual BSD/GPL".as_ptr(),
            program.as_ptr().cast(),
            program.len() as _,
            std::ptr::null_mut(),
        )
    };
    assert!(fd >= 0, "loading: {fd}");
    // SAFETY: takes no pointers but a null one for its options.
    let attached = unsafe { bpf_xdp_attach(ifindex as i32, fd, XDP_FLAGS_DRV_MODE, std::ptr::null()) };
    assert_eq!(attached, 0);
    // SAFETY: this function's own descriptor; the attachment keeps the program.
    unsafe { libc::close(fd) };
}
