// Generated from bpf/include/underpass/cache.h by underpass-abi-generate. Do not edit: run `./dev fix`.

pub const UC_KEY_MAX: u32 = 250;
pub const UC_KEY_ROOM: u32 = 256;
pub const UC_FLIGHT_BITS: u32 = 24;
pub const UC_FLIGHT_MASK: u32 = 16777215;
pub const UC_GENERATION: u32 = 16777216;
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
pub type __u8 = ::core::ffi::c_uchar;
pub type __u16 = ::core::ffi::c_ushort;
pub type __u32 = ::core::ffi::c_uint;
pub type __u64 = ::core::ffi::c_ulonglong;
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
