// Generated from bpf/include/underpass/cache.h by underpass-abi-generate. Do not edit: run `./dev fix`.

pub const UC_KEY_MAX: u32 = 250;
pub const UC_KEY_ROOM: u32 = 256;
pub const UC_READ: u32 = 1;
pub const UC_WRITE: u32 = 65536;
pub const UC_GENERATION: u64 = 4294967296;
pub const UC_READS: u32 = 65535;
pub const UC_WRITES: u32 = 4294901760;
pub const UC_FLIGHT: u32 = 4294967295;
pub const UC_FLIGHT_MAX: u32 = 32767;
pub const UC_STREAM_IN_TOKEN: u32 = 1;
pub const UC_STREAM_CR: u32 = 2;
pub const UC_STREAM_NUL: u32 = 4;
pub const UC_STREAM_BAD: u32 = 8;
pub const UC_STREAM_WRITES: u32 = 16;
pub const UC_STREAM_BASE64: u32 = 32;
pub const UC_STREAM_STALE: u32 = 64;
pub const UC_STREAM_LONG: u32 = 128;
pub const UC_LINE_PLAIN: u32 = 2048;
pub const UC_BINARY_HEADER: u32 = 24;
pub const UC_SET_WORDS: u32 = 4;
pub const UC_WAYS: u32 = 4;
pub const UC_UNIT: u32 = 64;
pub const UC_UNIT_BITS: u32 = 10;
pub const UC_PAGE: u32 = 65536;
pub const UC_ANSWER_MAX: u32 = 1392;
pub const UC_SLOT_HEAD: u32 = 64;
pub const UC_HEAD_MAX: u32 = 288;
pub const UC_SLOT_MAX: u32 = 1744;
pub const UC_ADDRESSES: u32 = 16;
pub const UC_REQUEST_MAX: u32 = 512;
pub const UC_TICK_SHIFT: u32 = 24;
pub const UC_SOURCES_BITS: u32 = 16;
pub const UC_SOURCES: u32 = 65536;
pub const UC_BURST_MS: u32 = 100;
pub const UC_PENDING_MAX: u32 = 512;
pub const UC_SCRATCH: u32 = 512;
pub const UC_CONN_READ: u32 = 1;
pub const UC_CONN_GLOBAL: u32 = 2;
pub const UC_CONN_FULL: u32 = 4;
pub const UC_CONN_AGENT: u32 = 8;
pub const UC_CONN_KNOWN: u32 = 16;
pub const UC_CONN_LINE: u32 = 32;
pub const UC_CONN_ALONE: u32 = 64;
pub const UC_CONN_EARLY: u32 = 128;
pub const UC_CONN_HEEDED: u32 = 256;
pub const UC_CONN_STORING: u32 = 512;
pub type __u8 = ::core::ffi::c_uchar;
pub type __u16 = ::core::ffi::c_ushort;
pub type __u32 = ::core::ffi::c_uint;
pub type __u64 = ::core::ffi::c_ulonglong;
pub type __be16 = __u16;
pub type __be32 = __u32;
pub const UC_MODE_START: uc_mode = 0;
pub const UC_MODE_TEXT: uc_mode = 1;
pub const UC_MODE_BINARY: uc_mode = 2;
pub const UC_MODE_LOST: uc_mode = 3;
pub type uc_mode = ::core::ffi::c_uint;
pub const UC_EVENT_NONE: uc_event = 0;
pub const UC_EVENT_READ: uc_event = 1;
pub const UC_EVENT_WRITE: uc_event = 2;
pub const UC_EVENT_OTHER: uc_event = 3;
pub const UC_EVENT_FORGET: uc_event = 4;
pub const UC_EVENT_FLUSH: uc_event = 5;
pub const UC_EVENT_LOST: uc_event = 6;
pub const UC_EVENT_END: uc_event = 7;
pub type uc_event = ::core::ffi::c_uint;
pub const UC_PHASE_LEADING: uc_phase = 0;
pub const UC_PHASE_PLUS: uc_phase = 1;
pub const UC_PHASE_MINUS: uc_phase = 2;
pub const UC_PHASE_DIGITS: uc_phase = 3;
pub const UC_PHASE_NEGATIVE: uc_phase = 4;
pub const UC_PHASE_DONE: uc_phase = 5;
pub const UC_PHASE_DONE_NEGATIVE: uc_phase = 6;
pub type uc_phase = ::core::ffi::c_uint;
pub const UC_COMMAND_NONE: uc_command = 0;
pub const UC_COMMAND_GET: uc_command = 1;
pub const UC_COMMAND_GAT: uc_command = 2;
pub const UC_COMMAND_STORE: uc_command = 3;
pub const UC_COMMAND_CAS: uc_command = 4;
pub const UC_COMMAND_KEYED: uc_command = 5;
pub const UC_COMMAND_MG: uc_command = 6;
pub const UC_COMMAND_MS: uc_command = 7;
pub const UC_COMMAND_MD: uc_command = 8;
pub const UC_COMMAND_ME: uc_command = 9;
pub const UC_COMMAND_FLUSH: uc_command = 10;
pub const UC_COMMAND_QUIET: uc_command = 11;
pub const UC_COMMAND_GLOBAL: uc_command = 12;
pub const UC_COMMAND_UNKNOWN: uc_command = 13;
pub type uc_command = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone, PartialEq, Eq)]
pub struct uc_stream {
    pub skip: __u64,
    pub number: __u64,
    pub line: __u32,
    pub key_len: __u16,
    pub mode: __u8,
    pub command: __u8,
    pub tokens: __u8,
    pub flags: __u8,
    pub phase: __u8,
    pub word_len: __u8,
    pub opcode: __u8,
    pub extras_len: __u8,
    pub body_key_len: __u16,
    pub body_len: __u32,
    pub reserved: __u32,
    pub word: [__u8; 16usize],
    pub key: [__u8; 256usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of uc_stream"][::core::mem::size_of::<uc_stream>() - 312usize];
    ["Alignment of uc_stream"][::core::mem::align_of::<uc_stream>() - 8usize];
    [
        "Offset of field: uc_stream::skip",
    ][::core::mem::offset_of!(uc_stream, skip) - 0usize];
    [
        "Offset of field: uc_stream::number",
    ][::core::mem::offset_of!(uc_stream, number) - 8usize];
    [
        "Offset of field: uc_stream::line",
    ][::core::mem::offset_of!(uc_stream, line) - 16usize];
    [
        "Offset of field: uc_stream::key_len",
    ][::core::mem::offset_of!(uc_stream, key_len) - 20usize];
    [
        "Offset of field: uc_stream::mode",
    ][::core::mem::offset_of!(uc_stream, mode) - 22usize];
    [
        "Offset of field: uc_stream::command",
    ][::core::mem::offset_of!(uc_stream, command) - 23usize];
    [
        "Offset of field: uc_stream::tokens",
    ][::core::mem::offset_of!(uc_stream, tokens) - 24usize];
    [
        "Offset of field: uc_stream::flags",
    ][::core::mem::offset_of!(uc_stream, flags) - 25usize];
    [
        "Offset of field: uc_stream::phase",
    ][::core::mem::offset_of!(uc_stream, phase) - 26usize];
    [
        "Offset of field: uc_stream::word_len",
    ][::core::mem::offset_of!(uc_stream, word_len) - 27usize];
    [
        "Offset of field: uc_stream::opcode",
    ][::core::mem::offset_of!(uc_stream, opcode) - 28usize];
    [
        "Offset of field: uc_stream::extras_len",
    ][::core::mem::offset_of!(uc_stream, extras_len) - 29usize];
    [
        "Offset of field: uc_stream::body_key_len",
    ][::core::mem::offset_of!(uc_stream, body_key_len) - 30usize];
    [
        "Offset of field: uc_stream::body_len",
    ][::core::mem::offset_of!(uc_stream, body_len) - 32usize];
    [
        "Offset of field: uc_stream::reserved",
    ][::core::mem::offset_of!(uc_stream, reserved) - 36usize];
    [
        "Offset of field: uc_stream::word",
    ][::core::mem::offset_of!(uc_stream, word) - 40usize];
    [
        "Offset of field: uc_stream::key",
    ][::core::mem::offset_of!(uc_stream, key) - 56usize];
};
impl Default for uc_stream {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone, PartialEq, Eq)]
pub struct uc_set {
    pub word: [__u64; 4usize],
    pub way: [__u64; 4usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of uc_set"][::core::mem::size_of::<uc_set>() - 64usize];
    ["Alignment of uc_set"][::core::mem::align_of::<uc_set>() - 8usize];
    ["Offset of field: uc_set::word"][::core::mem::offset_of!(uc_set, word) - 0usize];
    ["Offset of field: uc_set::way"][::core::mem::offset_of!(uc_set, way) - 32usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone, PartialEq, Eq)]
pub struct uc_slot {
    pub word: __u64,
    pub global: __u64,
    pub deadline_ms: __u64,
    pub used: __u32,
    pub key_len: __u16,
    pub head_len: __u16,
    pub tail_len: __u16,
    pub head_sum: __u16,
    pub cas_sum: __u16,
    pub tail_sum: __u16,
    pub cas_len: __u8,
    pub cas: [__u8; 23usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of uc_slot"][::core::mem::size_of::<uc_slot>() - 64usize];
    ["Alignment of uc_slot"][::core::mem::align_of::<uc_slot>() - 8usize];
    ["Offset of field: uc_slot::word"][::core::mem::offset_of!(uc_slot, word) - 0usize];
    [
        "Offset of field: uc_slot::global",
    ][::core::mem::offset_of!(uc_slot, global) - 8usize];
    [
        "Offset of field: uc_slot::deadline_ms",
    ][::core::mem::offset_of!(uc_slot, deadline_ms) - 16usize];
    ["Offset of field: uc_slot::used"][::core::mem::offset_of!(uc_slot, used) - 24usize];
    [
        "Offset of field: uc_slot::key_len",
    ][::core::mem::offset_of!(uc_slot, key_len) - 28usize];
    [
        "Offset of field: uc_slot::head_len",
    ][::core::mem::offset_of!(uc_slot, head_len) - 30usize];
    [
        "Offset of field: uc_slot::tail_len",
    ][::core::mem::offset_of!(uc_slot, tail_len) - 32usize];
    [
        "Offset of field: uc_slot::head_sum",
    ][::core::mem::offset_of!(uc_slot, head_sum) - 34usize];
    [
        "Offset of field: uc_slot::cas_sum",
    ][::core::mem::offset_of!(uc_slot, cas_sum) - 36usize];
    [
        "Offset of field: uc_slot::tail_sum",
    ][::core::mem::offset_of!(uc_slot, tail_sum) - 38usize];
    [
        "Offset of field: uc_slot::cas_len",
    ][::core::mem::offset_of!(uc_slot, cas_len) - 40usize];
    ["Offset of field: uc_slot::cas"][::core::mem::offset_of!(uc_slot, cas) - 41usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone, PartialEq, Eq)]
pub struct uc_control {
    pub global: __u64,
    pub serve_until_ms: __u64,
    pub tgid: __u32,
    pub stale: __u32,
    pub agent_addr: __be32,
    pub memcached_addr: __be32,
    pub agent_port: __be16,
    pub memcached_port: __u16,
    pub late: __u32,
    pub let_go: __u32,
    pub looked: __u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of uc_control"][::core::mem::size_of::<uc_control>() - 48usize];
    ["Alignment of uc_control"][::core::mem::align_of::<uc_control>() - 8usize];
    [
        "Offset of field: uc_control::global",
    ][::core::mem::offset_of!(uc_control, global) - 0usize];
    [
        "Offset of field: uc_control::serve_until_ms",
    ][::core::mem::offset_of!(uc_control, serve_until_ms) - 8usize];
    [
        "Offset of field: uc_control::tgid",
    ][::core::mem::offset_of!(uc_control, tgid) - 16usize];
    [
        "Offset of field: uc_control::stale",
    ][::core::mem::offset_of!(uc_control, stale) - 20usize];
    [
        "Offset of field: uc_control::agent_addr",
    ][::core::mem::offset_of!(uc_control, agent_addr) - 24usize];
    [
        "Offset of field: uc_control::memcached_addr",
    ][::core::mem::offset_of!(uc_control, memcached_addr) - 28usize];
    [
        "Offset of field: uc_control::agent_port",
    ][::core::mem::offset_of!(uc_control, agent_port) - 32usize];
    [
        "Offset of field: uc_control::memcached_port",
    ][::core::mem::offset_of!(uc_control, memcached_port) - 34usize];
    [
        "Offset of field: uc_control::late",
    ][::core::mem::offset_of!(uc_control, late) - 36usize];
    [
        "Offset of field: uc_control::let_go",
    ][::core::mem::offset_of!(uc_control, let_go) - 40usize];
    [
        "Offset of field: uc_control::looked",
    ][::core::mem::offset_of!(uc_control, looked) - 44usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone, PartialEq, Eq)]
pub struct uc_prefix {
    pub addr: __be32,
    pub mask: __be32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of uc_prefix"][::core::mem::size_of::<uc_prefix>() - 8usize];
    ["Alignment of uc_prefix"][::core::mem::align_of::<uc_prefix>() - 4usize];
    [
        "Offset of field: uc_prefix::addr",
    ][::core::mem::offset_of!(uc_prefix, addr) - 0usize];
    [
        "Offset of field: uc_prefix::mask",
    ][::core::mem::offset_of!(uc_prefix, mask) - 4usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone, PartialEq, Eq)]
pub struct uc_settings {
    pub set_mask: __u32,
    pub address_count: __u32,
    pub prefix_count: __u32,
    pub port: __be16,
    pub reserved: __u16,
    pub secret: [__u64; 2usize],
    pub tick_origin: __u64,
    pub tick_origin_ms: __u64,
    pub tick_length: __u64,
    pub limit: __u64,
    pub addresses: [__be32; 16usize],
    pub prefixes: [uc_prefix; 16usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of uc_settings"][::core::mem::size_of::<uc_settings>() - 256usize];
    ["Alignment of uc_settings"][::core::mem::align_of::<uc_settings>() - 8usize];
    [
        "Offset of field: uc_settings::set_mask",
    ][::core::mem::offset_of!(uc_settings, set_mask) - 0usize];
    [
        "Offset of field: uc_settings::address_count",
    ][::core::mem::offset_of!(uc_settings, address_count) - 4usize];
    [
        "Offset of field: uc_settings::prefix_count",
    ][::core::mem::offset_of!(uc_settings, prefix_count) - 8usize];
    [
        "Offset of field: uc_settings::port",
    ][::core::mem::offset_of!(uc_settings, port) - 12usize];
    [
        "Offset of field: uc_settings::reserved",
    ][::core::mem::offset_of!(uc_settings, reserved) - 14usize];
    [
        "Offset of field: uc_settings::secret",
    ][::core::mem::offset_of!(uc_settings, secret) - 16usize];
    [
        "Offset of field: uc_settings::tick_origin",
    ][::core::mem::offset_of!(uc_settings, tick_origin) - 32usize];
    [
        "Offset of field: uc_settings::tick_origin_ms",
    ][::core::mem::offset_of!(uc_settings, tick_origin_ms) - 40usize];
    [
        "Offset of field: uc_settings::tick_length",
    ][::core::mem::offset_of!(uc_settings, tick_length) - 48usize];
    [
        "Offset of field: uc_settings::limit",
    ][::core::mem::offset_of!(uc_settings, limit) - 56usize];
    [
        "Offset of field: uc_settings::addresses",
    ][::core::mem::offset_of!(uc_settings, addresses) - 64usize];
    [
        "Offset of field: uc_settings::prefixes",
    ][::core::mem::offset_of!(uc_settings, prefixes) - 128usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone, PartialEq, Eq)]
pub struct uc_conn {
    pub stream: uc_stream,
    pub copied: __u32,
    pub pending: __u16,
    pub complete: __u16,
    pub commands: __u16,
    pub flags: __u16,
    pub reserved: __u32,
    pub words: [__u32; 512usize],
    pub scratch: [__u8; 512usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of uc_conn"][::core::mem::size_of::<uc_conn>() - 2888usize];
    ["Alignment of uc_conn"][::core::mem::align_of::<uc_conn>() - 8usize];
    [
        "Offset of field: uc_conn::stream",
    ][::core::mem::offset_of!(uc_conn, stream) - 0usize];
    [
        "Offset of field: uc_conn::copied",
    ][::core::mem::offset_of!(uc_conn, copied) - 312usize];
    [
        "Offset of field: uc_conn::pending",
    ][::core::mem::offset_of!(uc_conn, pending) - 316usize];
    [
        "Offset of field: uc_conn::complete",
    ][::core::mem::offset_of!(uc_conn, complete) - 318usize];
    [
        "Offset of field: uc_conn::commands",
    ][::core::mem::offset_of!(uc_conn, commands) - 320usize];
    [
        "Offset of field: uc_conn::flags",
    ][::core::mem::offset_of!(uc_conn, flags) - 322usize];
    [
        "Offset of field: uc_conn::reserved",
    ][::core::mem::offset_of!(uc_conn, reserved) - 324usize];
    [
        "Offset of field: uc_conn::words",
    ][::core::mem::offset_of!(uc_conn, words) - 328usize];
    [
        "Offset of field: uc_conn::scratch",
    ][::core::mem::offset_of!(uc_conn, scratch) - 2376usize];
};
impl Default for uc_conn {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone, PartialEq, Eq)]
pub struct uc_datagrams {
    pub thread: __u32,
    pub fd: __u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of uc_datagrams"][::core::mem::size_of::<uc_datagrams>() - 8usize];
    ["Alignment of uc_datagrams"][::core::mem::align_of::<uc_datagrams>() - 4usize];
    [
        "Offset of field: uc_datagrams::thread",
    ][::core::mem::offset_of!(uc_datagrams, thread) - 0usize];
    [
        "Offset of field: uc_datagrams::fd",
    ][::core::mem::offset_of!(uc_datagrams, fd) - 4usize];
};
pub const UC_NOTICE_MISS: uc_notice = 0;
pub const UC_NOTICE_FLUSH: uc_notice = 1;
pub const UC_NOTICE_LET_GO: uc_notice = 2;
pub type uc_notice = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone, PartialEq, Eq)]
pub struct uc_report {
    pub hash: __u64,
    pub number: __u64,
    pub notice: __u32,
    pub key_len: __u32,
    pub key: [__u8; 256usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of uc_report"][::core::mem::size_of::<uc_report>() - 280usize];
    ["Alignment of uc_report"][::core::mem::align_of::<uc_report>() - 8usize];
    [
        "Offset of field: uc_report::hash",
    ][::core::mem::offset_of!(uc_report, hash) - 0usize];
    [
        "Offset of field: uc_report::number",
    ][::core::mem::offset_of!(uc_report, number) - 8usize];
    [
        "Offset of field: uc_report::notice",
    ][::core::mem::offset_of!(uc_report, notice) - 16usize];
    [
        "Offset of field: uc_report::key_len",
    ][::core::mem::offset_of!(uc_report, key_len) - 20usize];
    [
        "Offset of field: uc_report::key",
    ][::core::mem::offset_of!(uc_report, key) - 24usize];
};
impl Default for uc_report {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
#[derive(Debug, Copy, Clone, PartialEq, Eq)]
pub struct uc_stored {
    pub word: __u64,
    pub global: __u64,
    pub at_ms: __u64,
    pub flags: __u32,
    pub seconds: __u32,
    pub key_len: __u32,
    pub len: __u32,
    pub key: [__u8; 256usize],
    pub value: [__u8; 1392usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of uc_stored"][::core::mem::size_of::<uc_stored>() - 1688usize];
    ["Alignment of uc_stored"][::core::mem::align_of::<uc_stored>() - 8usize];
    [
        "Offset of field: uc_stored::word",
    ][::core::mem::offset_of!(uc_stored, word) - 0usize];
    [
        "Offset of field: uc_stored::global",
    ][::core::mem::offset_of!(uc_stored, global) - 8usize];
    [
        "Offset of field: uc_stored::at_ms",
    ][::core::mem::offset_of!(uc_stored, at_ms) - 16usize];
    [
        "Offset of field: uc_stored::flags",
    ][::core::mem::offset_of!(uc_stored, flags) - 24usize];
    [
        "Offset of field: uc_stored::seconds",
    ][::core::mem::offset_of!(uc_stored, seconds) - 28usize];
    [
        "Offset of field: uc_stored::key_len",
    ][::core::mem::offset_of!(uc_stored, key_len) - 32usize];
    [
        "Offset of field: uc_stored::len",
    ][::core::mem::offset_of!(uc_stored, len) - 36usize];
    [
        "Offset of field: uc_stored::key",
    ][::core::mem::offset_of!(uc_stored, key) - 40usize];
    [
        "Offset of field: uc_stored::value",
    ][::core::mem::offset_of!(uc_stored, value) - 296usize];
};
impl Default for uc_stored {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
pub const UC_COUNT_HIT: uc_count = 0;
pub const UC_COUNT_MISS: uc_count = 1;
pub const UC_COUNT_MISS_ABSENT: uc_count = 2;
pub const UC_COUNT_MISS_CHANGED: uc_count = 3;
pub const UC_COUNT_MISS_FLIGHT: uc_count = 4;
pub const UC_COUNT_MISS_EXPIRED: uc_count = 5;
pub const UC_COUNT_PASS_REQUEST: uc_count = 6;
pub const UC_COUNT_PASS_UNTRUSTED: uc_count = 7;
pub const UC_COUNT_PASS_ROOM: uc_count = 8;
pub const UC_COUNT_PASS_BLIND: uc_count = 9;
pub const UC_COUNT_REPORT: uc_count = 10;
pub const UC_COUNT_REPORT_LOST: uc_count = 11;
pub const UC_COUNT_READ: uc_count = 12;
pub const UC_COUNT_WRITE: uc_count = 13;
pub const UC_COUNT_OTHER: uc_count = 14;
pub const UC_COUNT_FORGET: uc_count = 15;
pub const UC_COUNT_FLUSH: uc_count = 16;
pub const UC_COUNT_LOST: uc_count = 17;
pub const UC_COUNT_READ_HIT: uc_count = 18;
pub const UC_COUNT_READ_MISSED: uc_count = 19;
pub const UC_COUNT_OVERFLOW: uc_count = 20;
pub const UC_COUNT_GAP: uc_count = 21;
pub const UC_COUNT_UNREADABLE: uc_count = 22;
pub const UC_COUNT_NOT_FOLLOWED: uc_count = 23;
pub const UC_COUNT_FOLLOWED: uc_count = 24;
pub const UC_COUNT_BYTES: uc_count = 25;
pub const UC_COUNT_PASS_LIMIT: uc_count = 26;
pub const UC_COUNT_LATE: uc_count = 27;
pub const UC_COUNT_END: uc_count = 28;
pub type uc_count = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Default, Copy, Clone, PartialEq, Eq)]
pub struct uc_counters {
    pub count: [__u64; 28usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of uc_counters"][::core::mem::size_of::<uc_counters>() - 224usize];
    ["Alignment of uc_counters"][::core::mem::align_of::<uc_counters>() - 8usize];
    [
        "Offset of field: uc_counters::count",
    ][::core::mem::offset_of!(uc_counters, count) - 0usize];
};
