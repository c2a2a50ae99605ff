//! Structures of the kernel ABI as bytes.

use std::{mem::size_of, slice};

use underpass_abi::abi;

/// Plain data: no padding, no pointers, every bit pattern a value.
///
/// # Safety
/// The type must be exactly that.
pub unsafe trait Plain: Copy {}

// SAFETY: generated from headers whose generator refuses padding; integers and arrays of integers throughout.
unsafe impl Plain for abi::up_settings {}
// SAFETY: as above.
unsafe impl Plain for abi::up_shard {}
// SAFETY: as above.
unsafe impl Plain for abi::up_session {}
// SAFETY: as above.
unsafe impl Plain for abi::up_bucket {}
// SAFETY: as above.
unsafe impl Plain for abi::up_counters {}
// SAFETY: as above.
unsafe impl Plain for abi::up_session_command {}
// SAFETY: an integer.
unsafe impl Plain for u64 {}

/// The bytes of a value.
pub fn bytes_of<T: Plain>(value: &T) -> &[u8] {
    // SAFETY: plain data without padding, borrowed for as long as the value.
    unsafe { slice::from_raw_parts((value as *const T).cast(), size_of::<T>()) }
}

/// A value from its bytes.
///
/// # Panics
/// If there are too few or too many.
pub fn from_bytes<T: Plain>(bytes: &[u8]) -> T {
    assert_eq!(bytes.len(), size_of::<T>());
    // SAFETY: as many bytes as the type has, and any bytes are a value of it; read unaligned.
    unsafe { bytes.as_ptr().cast::<T>().read_unaligned() }
}
