//! The wire format and kernel ABI of Underpass.
//!
//! All modules are generated from the C headers in `bpf/include/underpass`, which are the only definitions. The
//! generator refuses hidden padding and emits compile-time assertions on every size and offset.

#![allow(missing_docs, non_camel_case_types, non_upper_case_globals)]

#[rustfmt::skip]
#[allow(clippy::all, clippy::undocumented_unsafe_blocks)]
pub mod abi;
#[rustfmt::skip]
#[allow(clippy::all, clippy::undocumented_unsafe_blocks)]
pub mod cache;
#[rustfmt::skip]
#[allow(clippy::all, clippy::undocumented_unsafe_blocks)]
pub mod wire;
