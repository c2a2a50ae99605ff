//! What a network device can do for XDP, as its driver tells.

use libbpf_rs::libbpf_sys as sys;

/// `NETDEV_XDP_ACT_NDO_XMIT` of linux/netdev.h.
const NDO_XMIT: u64 = 4;

/// Whether the device transmits frames that XDP redirects to it: what a broadcast needs. It may change while the device is
/// up: a veth does once its peer has an XDP program or GRO. `None`: kernels before 6.3 do not tell.
pub fn transmits_redirected(ifindex: u32) -> Option<bool> {
    // SAFETY: all-zero is a valid value of this C structure of integers.
    let mut query: sys::bpf_xdp_query_opts = unsafe { std::mem::zeroed() };
    query.sz = size_of::<sys::bpf_xdp_query_opts>() as _;
    // SAFETY: `query` says its own size and outlives the call.
    let asked = unsafe { sys::bpf_xdp_query(ifindex as i32, 0, &raw mut query) };
    (asked == 0 && query.feature_flags != 0).then_some(query.feature_flags & NDO_XMIT != 0)
}
