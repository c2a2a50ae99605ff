//! The coherence word: commands that name its keys and are in memcached's hands, and how many ever were (a generation).
//!
//! The kernel changes words, the agent reads them. A value that memcached told while the word was idle and had some value is
//! the key's for as long as the word has it: one comparison of 64 bits decides the refill race, the race with what is in
//! flight, and invalidation.

use underpass_abi::cache::{UC_FLIGHT_BITS, UC_FLIGHT_MASK, UC_GENERATION};

/// A command that names one of the word's keys was given to memcached.
pub fn begin(word: u64) -> u64 {
    word.wrapping_add(UC_GENERATION as u64 + 1)
}

/// memcached has obeyed it.
pub fn end(word: u64) -> u64 {
    word.wrapping_sub(1)
}

/// What was known of the word's keys is so no more.
pub fn forget(word: u64) -> u64 {
    word.wrapping_add(UC_GENERATION as u64)
}

/// Whether no command is in flight: then memcached may be asked.
pub fn idle(word: u64) -> bool {
    word & UC_FLIGHT_MASK as u64 == 0
}

/// Commands in flight.
pub fn in_flight(word: u64) -> u64 {
    word & UC_FLIGHT_MASK as u64
}

/// How often anything has happened to the word's keys.
pub fn generation(word: u64) -> u64 {
    word >> UC_FLIGHT_BITS
}
