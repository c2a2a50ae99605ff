// Generated from bpf/include/underpass/abi.h by underpass-abi-generate. Do not edit: run `./dev fix`.

pub const UP_ABI_VERSION: u32 = 2;
pub const UP_SHARD_SLOTS: u32 = 8;
pub const UP_WAYS: u32 = 4;
pub const UP_BUCKET_KEY_WORDS: u32 = 64;
pub const UP_TICK_SHIFT: u32 = 24;
pub const UP_BUCKET_DIRTY: u32 = 1;
pub const UP_BUCKET_LAST_SHIFT: u32 = 1;
pub type __u8 = ::core::ffi::c_uchar;
pub type __u16 = ::core::ffi::c_ushort;
pub type __u32 = ::core::ffi::c_uint;
pub type __s64 = ::core::ffi::c_longlong;
pub type __u64 = ::core::ffi::c_ulonglong;
pub type __be16 = __u16;
pub type __be32 = __u32;
#[repr(C)]
#[derive(Debug, Default, Copy, Clone, PartialEq, Eq)]
pub struct up_member {
    pub addr: __be32,
    pub port: __be16,
    pub next_hop: [__u8; 6usize],
    pub reserved: __u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of up_member"][::core::mem::size_of::<up_member>() - 16usize];
    ["Alignment of up_member"][::core::mem::align_of::<up_member>() - 4usize];
    [
        "Offset of field: up_member::addr",
    ][::core::mem::offset_of!(up_member, addr) - 0usize];
    [
        "Offset of field: up_member::port",
    ][::core::mem::offset_of!(up_member, port) - 4usize];
    [
        "Offset of field: up_member::next_hop",
    ][::core::mem::offset_of!(up_member, next_hop) - 6usize];
    [
        "Offset of field: up_member::reserved",
    ][::core::mem::offset_of!(up_member, reserved) - 12usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone, PartialEq, Eq)]
pub struct up_config {
    pub shard: __u32,
    pub epoch: __u32,
    pub floor: __u64,
    pub lease_until_ms: __u64,
    pub time_offset_ms: __s64,
    pub must_ack: __u8,
    pub serving: __u8,
    pub must_ack_count: __u8,
    pub serving_count: __u8,
    pub store_full: __u8,
    pub refuse_writes: __u8,
    pub reserved: [__u8; 2usize],
    pub must_ack_list: [__u8; 8usize],
    pub serving_list: [__u8; 8usize],
    pub members: [up_member; 8usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of up_config"][::core::mem::size_of::<up_config>() - 184usize];
    ["Alignment of up_config"][::core::mem::align_of::<up_config>() - 8usize];
    [
        "Offset of field: up_config::shard",
    ][::core::mem::offset_of!(up_config, shard) - 0usize];
    [
        "Offset of field: up_config::epoch",
    ][::core::mem::offset_of!(up_config, epoch) - 4usize];
    [
        "Offset of field: up_config::floor",
    ][::core::mem::offset_of!(up_config, floor) - 8usize];
    [
        "Offset of field: up_config::lease_until_ms",
    ][::core::mem::offset_of!(up_config, lease_until_ms) - 16usize];
    [
        "Offset of field: up_config::time_offset_ms",
    ][::core::mem::offset_of!(up_config, time_offset_ms) - 24usize];
    [
        "Offset of field: up_config::must_ack",
    ][::core::mem::offset_of!(up_config, must_ack) - 32usize];
    [
        "Offset of field: up_config::serving",
    ][::core::mem::offset_of!(up_config, serving) - 33usize];
    [
        "Offset of field: up_config::must_ack_count",
    ][::core::mem::offset_of!(up_config, must_ack_count) - 34usize];
    [
        "Offset of field: up_config::serving_count",
    ][::core::mem::offset_of!(up_config, serving_count) - 35usize];
    [
        "Offset of field: up_config::store_full",
    ][::core::mem::offset_of!(up_config, store_full) - 36usize];
    [
        "Offset of field: up_config::refuse_writes",
    ][::core::mem::offset_of!(up_config, refuse_writes) - 37usize];
    [
        "Offset of field: up_config::reserved",
    ][::core::mem::offset_of!(up_config, reserved) - 38usize];
    [
        "Offset of field: up_config::must_ack_list",
    ][::core::mem::offset_of!(up_config, must_ack_list) - 40usize];
    [
        "Offset of field: up_config::serving_list",
    ][::core::mem::offset_of!(up_config, serving_list) - 48usize];
    [
        "Offset of field: up_config::members",
    ][::core::mem::offset_of!(up_config, members) - 56usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone, PartialEq, Eq)]
pub struct up_shard {
    pub clock: __u64,
    pub reserved: [__u64; 7usize],
    pub active: __u32,
    pub reserved2: __u32,
    pub config: [up_config; 2usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of up_shard"][::core::mem::size_of::<up_shard>() - 440usize];
    ["Alignment of up_shard"][::core::mem::align_of::<up_shard>() - 8usize];
    [
        "Offset of field: up_shard::clock",
    ][::core::mem::offset_of!(up_shard, clock) - 0usize];
    [
        "Offset of field: up_shard::reserved",
    ][::core::mem::offset_of!(up_shard, reserved) - 8usize];
    [
        "Offset of field: up_shard::active",
    ][::core::mem::offset_of!(up_shard, active) - 64usize];
    [
        "Offset of field: up_shard::reserved2",
    ][::core::mem::offset_of!(up_shard, reserved2) - 68usize];
    [
        "Offset of field: up_shard::config",
    ][::core::mem::offset_of!(up_shard, config) - 72usize];
};
pub const UP_STATE_IDLE: up_state = 0;
pub const UP_STATE_STARTING: up_state = 1;
pub const UP_STATE_PENDING: up_state = 2;
pub const UP_STATE_COMMITTING: up_state = 3;
pub const UP_STATE_COMMITTED: up_state = 4;
pub const UP_STATE_ABORTED: up_state = 5;
pub type up_state = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Default, Copy, Clone, PartialEq, Eq)]
pub struct up_session {
    pub lock: __u32,
    pub state: __u8,
    pub kind: __u8,
    pub status: __u8,
    pub acks: __u8,
    pub session: __u64,
    pub token: __u64,
    pub reply_addr: [__u8; 16usize],
    pub reply_port: __be16,
    pub reply_mac: [__u8; 6usize],
    pub used_ms: __u64,
    pub request: __u64,
    pub seq: __u64,
    pub time: __u64,
    pub result: __u64,
    pub fingerprint: [__u64; 2usize],
    pub shard: __u32,
    pub bucket: __u32,
    pub sealed: __u64,
    pub reserved: __u64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of up_session"][::core::mem::size_of::<up_session>() - 128usize];
    ["Alignment of up_session"][::core::mem::align_of::<up_session>() - 8usize];
    [
        "Offset of field: up_session::lock",
    ][::core::mem::offset_of!(up_session, lock) - 0usize];
    [
        "Offset of field: up_session::state",
    ][::core::mem::offset_of!(up_session, state) - 4usize];
    [
        "Offset of field: up_session::kind",
    ][::core::mem::offset_of!(up_session, kind) - 5usize];
    [
        "Offset of field: up_session::status",
    ][::core::mem::offset_of!(up_session, status) - 6usize];
    [
        "Offset of field: up_session::acks",
    ][::core::mem::offset_of!(up_session, acks) - 7usize];
    [
        "Offset of field: up_session::session",
    ][::core::mem::offset_of!(up_session, session) - 8usize];
    [
        "Offset of field: up_session::token",
    ][::core::mem::offset_of!(up_session, token) - 16usize];
    [
        "Offset of field: up_session::reply_addr",
    ][::core::mem::offset_of!(up_session, reply_addr) - 24usize];
    [
        "Offset of field: up_session::reply_port",
    ][::core::mem::offset_of!(up_session, reply_port) - 40usize];
    [
        "Offset of field: up_session::reply_mac",
    ][::core::mem::offset_of!(up_session, reply_mac) - 42usize];
    [
        "Offset of field: up_session::used_ms",
    ][::core::mem::offset_of!(up_session, used_ms) - 48usize];
    [
        "Offset of field: up_session::request",
    ][::core::mem::offset_of!(up_session, request) - 56usize];
    [
        "Offset of field: up_session::seq",
    ][::core::mem::offset_of!(up_session, seq) - 64usize];
    [
        "Offset of field: up_session::time",
    ][::core::mem::offset_of!(up_session, time) - 72usize];
    [
        "Offset of field: up_session::result",
    ][::core::mem::offset_of!(up_session, result) - 80usize];
    [
        "Offset of field: up_session::fingerprint",
    ][::core::mem::offset_of!(up_session, fingerprint) - 88usize];
    [
        "Offset of field: up_session::shard",
    ][::core::mem::offset_of!(up_session, shard) - 104usize];
    [
        "Offset of field: up_session::bucket",
    ][::core::mem::offset_of!(up_session, bucket) - 108usize];
    [
        "Offset of field: up_session::sealed",
    ][::core::mem::offset_of!(up_session, sealed) - 112usize];
    [
        "Offset of field: up_session::reserved",
    ][::core::mem::offset_of!(up_session, reserved) - 120usize];
};
pub const UP_EXCLUSIVE_NOT: up_exclusive = 0;
pub const UP_EXCLUSIVE_OPEN: up_exclusive = 1;
pub const UP_EXCLUSIVE_FIXED: up_exclusive = 2;
pub type up_exclusive = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Default, Copy, Clone, PartialEq, Eq)]
pub struct up_way {
    pub fingerprint: [__u64; 2usize],
    pub first: __u64,
    pub last: __u64,
    pub committed: __u64,
    pub exclusive: __u32,
    pub time_low: __u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of up_way"][::core::mem::size_of::<up_way>() - 48usize];
    ["Alignment of up_way"][::core::mem::align_of::<up_way>() - 8usize];
    [
        "Offset of field: up_way::fingerprint",
    ][::core::mem::offset_of!(up_way, fingerprint) - 0usize];
    ["Offset of field: up_way::first"][::core::mem::offset_of!(up_way, first) - 16usize];
    ["Offset of field: up_way::last"][::core::mem::offset_of!(up_way, last) - 24usize];
    [
        "Offset of field: up_way::committed",
    ][::core::mem::offset_of!(up_way, committed) - 32usize];
    [
        "Offset of field: up_way::exclusive",
    ][::core::mem::offset_of!(up_way, exclusive) - 40usize];
    [
        "Offset of field: up_way::time_low",
    ][::core::mem::offset_of!(up_way, time_low) - 44usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone, PartialEq, Eq)]
pub struct up_bucket {
    pub lock: __u32,
    pub reserved: __u32,
    pub ways: [up_way; 4usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of up_bucket"][::core::mem::size_of::<up_bucket>() - 200usize];
    ["Alignment of up_bucket"][::core::mem::align_of::<up_bucket>() - 8usize];
    [
        "Offset of field: up_bucket::lock",
    ][::core::mem::offset_of!(up_bucket, lock) - 0usize];
    [
        "Offset of field: up_bucket::reserved",
    ][::core::mem::offset_of!(up_bucket, reserved) - 4usize];
    [
        "Offset of field: up_bucket::ways",
    ][::core::mem::offset_of!(up_bucket, ways) - 8usize];
};
pub const UP_WRITE_PATH_BROADCAST: up_write_path = 0;
pub const UP_WRITE_PATH_TC: up_write_path = 1;
pub const UP_WRITE_PATH_PUBLISHED: up_write_path = 2;
pub type up_write_path = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone, PartialEq, Eq)]
pub struct up_settings {
    pub abi_version: __u32,
    pub write_path: __u32,
    pub addr: __be32,
    pub port: __be16,
    pub reserved: __u16,
    pub bucket_mask: __u32,
    pub session_mask: __u32,
    pub tick_origin: __u64,
    pub tick_origin_ms: __u64,
    pub tick_length: __u64,
    pub fingerprint_key: [__u64; 2usize],
    pub bucket_key: [__u32; 64usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of up_settings"][::core::mem::size_of::<up_settings>() - 320usize];
    ["Alignment of up_settings"][::core::mem::align_of::<up_settings>() - 8usize];
    [
        "Offset of field: up_settings::abi_version",
    ][::core::mem::offset_of!(up_settings, abi_version) - 0usize];
    [
        "Offset of field: up_settings::write_path",
    ][::core::mem::offset_of!(up_settings, write_path) - 4usize];
    [
        "Offset of field: up_settings::addr",
    ][::core::mem::offset_of!(up_settings, addr) - 8usize];
    [
        "Offset of field: up_settings::port",
    ][::core::mem::offset_of!(up_settings, port) - 12usize];
    [
        "Offset of field: up_settings::reserved",
    ][::core::mem::offset_of!(up_settings, reserved) - 14usize];
    [
        "Offset of field: up_settings::bucket_mask",
    ][::core::mem::offset_of!(up_settings, bucket_mask) - 16usize];
    [
        "Offset of field: up_settings::session_mask",
    ][::core::mem::offset_of!(up_settings, session_mask) - 20usize];
    [
        "Offset of field: up_settings::tick_origin",
    ][::core::mem::offset_of!(up_settings, tick_origin) - 24usize];
    [
        "Offset of field: up_settings::tick_origin_ms",
    ][::core::mem::offset_of!(up_settings, tick_origin_ms) - 32usize];
    [
        "Offset of field: up_settings::tick_length",
    ][::core::mem::offset_of!(up_settings, tick_length) - 40usize];
    [
        "Offset of field: up_settings::fingerprint_key",
    ][::core::mem::offset_of!(up_settings, fingerprint_key) - 48usize];
    [
        "Offset of field: up_settings::bucket_key",
    ][::core::mem::offset_of!(up_settings, bucket_key) - 64usize];
};
impl Default for up_settings {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
pub const UP_COUNT_READ: up_count = 0;
pub const UP_COUNT_READ_DIRTY: up_count = 1;
pub const UP_COUNT_WRITE: up_count = 2;
pub const UP_COUNT_WRITE_AGAIN: up_count = 3;
pub const UP_COUNT_WRITE_ANSWERED: up_count = 4;
pub const UP_COUNT_CLONE: up_count = 5;
pub const UP_COUNT_ACK: up_count = 6;
pub const UP_COUNT_COMMIT: up_count = 7;
pub const UP_COUNT_PASS_FOREIGN: up_count = 8;
pub const UP_COUNT_PASS_CONTROL: up_count = 9;
pub const UP_COUNT_DROP_TRUNCATED: up_count = 10;
pub const UP_COUNT_DROP_FRAGMENT: up_count = 11;
pub const UP_COUNT_DROP_MAGIC: up_count = 12;
pub const UP_COUNT_DROP_VERSION: up_count = 13;
pub const UP_COUNT_DROP_OP: up_count = 14;
pub const UP_COUNT_DROP_OLD: up_count = 15;
pub const UP_COUNT_DROP_STARTING: up_count = 16;
pub const UP_COUNT_DROP_ACK_MEMBER: up_count = 17;
pub const UP_COUNT_DROP_ACK_EPOCH: up_count = 18;
pub const UP_COUNT_DROP_ACK_STALE: up_count = 19;
pub const UP_COUNT_DROP_ACK_ABORTED: up_count = 20;
pub const UP_COUNT_DROP_NEXT_HOP: up_count = 21;
pub const UP_COUNT_DROP_CLONE: up_count = 22;
pub const UP_COUNT_DROP_INTERNAL: up_count = 23;
pub const UP_COUNT_REJECT: up_count = 24;
pub const UP_COUNT_END: up_count = 43;
pub type up_count = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone, PartialEq, Eq)]
pub struct up_counters {
    pub count: [__u64; 43usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of up_counters"][::core::mem::size_of::<up_counters>() - 344usize];
    ["Alignment of up_counters"][::core::mem::align_of::<up_counters>() - 8usize];
    [
        "Offset of field: up_counters::count",
    ][::core::mem::offset_of!(up_counters, count) - 0usize];
};
impl Default for up_counters {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
pub const UP_SESSION_OP_LOAD: up_session_op = 1;
pub const UP_SESSION_OP_CLOSE: up_session_op = 2;
pub const UP_SESSION_OP_CLEAR: up_session_op = 3;
pub const UP_SESSION_OP_FORGET: up_session_op = 4;
pub const UP_SESSION_OP_SETTLE: up_session_op = 5;
pub type up_session_op = ::core::ffi::c_uint;
pub const UP_SESSION_DONE: up_session_result = 0;
pub const UP_SESSION_BAD_INDEX: up_session_result = 1;
pub const UP_SESSION_NOT_YOURS: up_session_result = 2;
pub const UP_SESSION_UNRESOLVED: up_session_result = 3;
pub type up_session_result = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Default, Copy, Clone, PartialEq, Eq)]
pub struct up_session_command {
    pub op: __u32,
    pub result: __u32,
    pub session: __u64,
    pub used_before_ms: __u64,
    pub request: __u64,
    pub seq: __u64,
    pub number: __u64,
    pub state: __u32,
    pub status: __u8,
    pub acks: __u8,
    pub reserved: [__u8; 2usize],
    pub record: up_session,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of up_session_command",
    ][::core::mem::size_of::<up_session_command>() - 184usize];
    [
        "Alignment of up_session_command",
    ][::core::mem::align_of::<up_session_command>() - 8usize];
    [
        "Offset of field: up_session_command::op",
    ][::core::mem::offset_of!(up_session_command, op) - 0usize];
    [
        "Offset of field: up_session_command::result",
    ][::core::mem::offset_of!(up_session_command, result) - 4usize];
    [
        "Offset of field: up_session_command::session",
    ][::core::mem::offset_of!(up_session_command, session) - 8usize];
    [
        "Offset of field: up_session_command::used_before_ms",
    ][::core::mem::offset_of!(up_session_command, used_before_ms) - 16usize];
    [
        "Offset of field: up_session_command::request",
    ][::core::mem::offset_of!(up_session_command, request) - 24usize];
    [
        "Offset of field: up_session_command::seq",
    ][::core::mem::offset_of!(up_session_command, seq) - 32usize];
    [
        "Offset of field: up_session_command::number",
    ][::core::mem::offset_of!(up_session_command, number) - 40usize];
    [
        "Offset of field: up_session_command::state",
    ][::core::mem::offset_of!(up_session_command, state) - 48usize];
    [
        "Offset of field: up_session_command::status",
    ][::core::mem::offset_of!(up_session_command, status) - 52usize];
    [
        "Offset of field: up_session_command::acks",
    ][::core::mem::offset_of!(up_session_command, acks) - 53usize];
    [
        "Offset of field: up_session_command::reserved",
    ][::core::mem::offset_of!(up_session_command, reserved) - 54usize];
    [
        "Offset of field: up_session_command::record",
    ][::core::mem::offset_of!(up_session_command, record) - 56usize];
};
