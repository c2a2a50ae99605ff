// Generated from bpf/include/underpass/wire.h by underpass-abi-generate. Do not edit: run `./dev fix`.

pub const UP_MAGIC: u32 = 21840;
pub const UP_VERSION: u32 = 1;
pub const UP_PORT_DEFAULT: u32 = 5550;
pub const UP_HEADER_LEN: u32 = 80;
pub const UP_KEY_MAX: u32 = 250;
pub const UP_PAYLOAD_MAX: u32 = 1392;
pub const UP_MEMBERS_MAX: u32 = 8;
pub const UP_SESSION_INDEX_BITS: u32 = 16;
pub const UP_EPOCH_SHIFT: u32 = 40;
pub const UP_EPOCH_MAX: u32 = 8388607;
pub const UP_FLAG_TTL: u32 = 1;
pub type __u8 = ::core::ffi::c_uchar;
pub type __u16 = ::core::ffi::c_ushort;
pub type __u32 = ::core::ffi::c_uint;
pub type __u64 = ::core::ffi::c_ulonglong;
pub type __be16 = __u16;
pub type __be32 = __u32;
pub type __be64 = __u64;
pub const UP_OP_READ: up_op = 0;
pub const UP_OP_R_REPLY: up_op = 1;
pub const UP_OP_WRITE: up_op = 2;
pub const UP_OP_W_REPLY: up_op = 3;
pub const UP_OP_R_REJECT: up_op = 4;
pub const UP_OP_W_REJECT: up_op = 5;
pub const UP_OP_CONTROL: up_op = 16;
pub const UP_OP_OPEN: up_op = 16;
pub const UP_OP_OPENED: up_op = 17;
pub const UP_OP_CLOSE: up_op = 18;
pub const UP_OP_CLOSED: up_op = 19;
pub const UP_OP_INSTALL: up_op = 20;
pub const UP_OP_INSTALLED: up_op = 21;
pub const UP_OP_HEARTBEAT: up_op = 22;
pub const UP_OP_HEARTBEAT_ACK: up_op = 23;
pub const UP_OP_CONTROL_REJECT: up_op = 24;
pub const UP_OP_COLLECT: up_op = 25;
pub const UP_OP_COLLECTED: up_op = 26;
pub const UP_OP_PULL: up_op = 27;
pub const UP_OP_FETCH: up_op = 28;
pub const UP_OP_FETCHED: up_op = 29;
pub const UP_OP_QUERY: up_op = 30;
pub const UP_OP_ANSWER: up_op = 31;
pub const UP_OP_ABORT: up_op = 32;
pub const UP_OP_LOCATE: up_op = 33;
pub const UP_OP_LOCATED: up_op = 34;
pub const UP_OP_END: up_op = 35;
pub type up_op = ::core::ffi::c_uint;
pub const UP_KIND_PUT: up_kind = 0;
pub const UP_KIND_DELETE: up_kind = 1;
pub const UP_KIND_ADD: up_kind = 2;
pub const UP_KIND_REPLACE: up_kind = 3;
pub const UP_KIND_CAS: up_kind = 4;
pub const UP_KIND_INCR: up_kind = 5;
pub const UP_KIND_APPEND: up_kind = 6;
pub const UP_KIND_PREPEND: up_kind = 7;
pub const UP_KIND_TOUCH: up_kind = 8;
pub const UP_KIND_END: up_kind = 9;
pub type up_kind = ::core::ffi::c_uint;
pub const UP_STATUS_OK: up_status = 0;
pub const UP_STATUS_NOT_FOUND: up_status = 1;
pub const UP_STATUS_EXISTS: up_status = 2;
pub const UP_STATUS_NOT_STORED: up_status = 3;
pub const UP_STATUS_NOT_A_NUMBER: up_status = 4;
pub const UP_STATUS_OVERFLOW: up_status = 5;
pub const UP_STATUS_TOO_LARGE: up_status = 6;
pub const UP_STATUS_ABORTED: up_status = 7;
pub type up_status = ::core::ffi::c_uint;
pub const UP_REASON_NONE: up_reason = 0;
pub const UP_REASON_EPOCH: up_reason = 1;
pub const UP_REASON_LEASE: up_reason = 2;
pub const UP_REASON_SESSION: up_reason = 3;
pub const UP_REASON_TOKEN: up_reason = 4;
pub const UP_REASON_SHARD: up_reason = 5;
pub const UP_REASON_SESSION_BUSY: up_reason = 6;
pub const UP_REASON_KEY_BUSY: up_reason = 7;
pub const UP_REASON_DIRTY_FULL: up_reason = 8;
pub const UP_REASON_ABORTED: up_reason = 9;
pub const UP_REASON_KEY_LENGTH: up_reason = 10;
pub const UP_REASON_VALUE_LENGTH: up_reason = 11;
pub const UP_REASON_KIND: up_reason = 12;
pub const UP_REASON_STORE_FULL: up_reason = 13;
pub const UP_REASON_VERSION_GONE: up_reason = 14;
pub const UP_REASON_NO_SESSION: up_reason = 15;
pub const UP_REASON_NO_MEMBER: up_reason = 16;
pub const UP_REASON_MALFORMED: up_reason = 17;
pub const UP_REASON_NOT_COORDINATOR: up_reason = 18;
pub const UP_REASON_END: up_reason = 19;
pub type up_reason = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Default, Copy, Clone, PartialEq, Eq)]
pub struct up_header {
    pub magic: __be16,
    pub version: __u8,
    pub op: __u8,
    pub kind: __u8,
    pub status: __u8,
    pub cnt: __u8,
    pub flags: __u8,
    pub epoch: __be32,
    pub shard: __be32,
    pub seq: __be64,
    pub time: __be64,
    pub session: __be64,
    pub request: __be64,
    pub reply_addr: [__u8; 16usize],
    pub reply_port: __be16,
    pub key_len: __be16,
    pub value_len: __be32,
    pub token: __be64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of up_header"][::core::mem::size_of::<up_header>() - 80usize];
    ["Alignment of up_header"][::core::mem::align_of::<up_header>() - 8usize];
    [
        "Offset of field: up_header::magic",
    ][::core::mem::offset_of!(up_header, magic) - 0usize];
    [
        "Offset of field: up_header::version",
    ][::core::mem::offset_of!(up_header, version) - 2usize];
    ["Offset of field: up_header::op"][::core::mem::offset_of!(up_header, op) - 3usize];
    [
        "Offset of field: up_header::kind",
    ][::core::mem::offset_of!(up_header, kind) - 4usize];
    [
        "Offset of field: up_header::status",
    ][::core::mem::offset_of!(up_header, status) - 5usize];
    [
        "Offset of field: up_header::cnt",
    ][::core::mem::offset_of!(up_header, cnt) - 6usize];
    [
        "Offset of field: up_header::flags",
    ][::core::mem::offset_of!(up_header, flags) - 7usize];
    [
        "Offset of field: up_header::epoch",
    ][::core::mem::offset_of!(up_header, epoch) - 8usize];
    [
        "Offset of field: up_header::shard",
    ][::core::mem::offset_of!(up_header, shard) - 12usize];
    [
        "Offset of field: up_header::seq",
    ][::core::mem::offset_of!(up_header, seq) - 16usize];
    [
        "Offset of field: up_header::time",
    ][::core::mem::offset_of!(up_header, time) - 24usize];
    [
        "Offset of field: up_header::session",
    ][::core::mem::offset_of!(up_header, session) - 32usize];
    [
        "Offset of field: up_header::request",
    ][::core::mem::offset_of!(up_header, request) - 40usize];
    [
        "Offset of field: up_header::reply_addr",
    ][::core::mem::offset_of!(up_header, reply_addr) - 48usize];
    [
        "Offset of field: up_header::reply_port",
    ][::core::mem::offset_of!(up_header, reply_port) - 64usize];
    [
        "Offset of field: up_header::key_len",
    ][::core::mem::offset_of!(up_header, key_len) - 66usize];
    [
        "Offset of field: up_header::value_len",
    ][::core::mem::offset_of!(up_header, value_len) - 68usize];
    [
        "Offset of field: up_header::token",
    ][::core::mem::offset_of!(up_header, token) - 72usize];
};
