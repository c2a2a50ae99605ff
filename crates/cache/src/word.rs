//! The coherence word: reads of its keys that are in memcached's hands, other commands, and a generation.
//!
//! The kernel changes words, the agent reads them. A value that memcached told while no other command was in hand is the
//! key's for as long as the word has the generation that it had then: one comparison of 64 bits decides the refill race, the
//! race with what is in flight, and invalidation.

use underpass_abi::cache as abi;

const READ: u64 = abi::UC_READ as u64;
const WRITE: u64 = abi::UC_WRITE as u64;
const GENERATION: u64 = abi::UC_GENERATION;

/// A command that names one of the word's keys was given to memcached.
pub fn begin(word: u64) -> u64 {
    word.wrapping_add(GENERATION + WRITE)
}

/// memcached has obeyed it.
pub fn end(word: u64) -> u64 {
    word.wrapping_sub(WRITE)
}

/// A command that only looks was given to memcached, alone on its connection.
pub fn begin_read(word: u64) -> u64 {
    word.wrapping_add(READ)
}

/// memcached has answered it. If it may have missed, what was known of the word's keys is so no more.
pub fn end_read(word: u64, hit: bool) -> u64 {
    word.wrapping_sub(READ).wrapping_add(if hit { 0 } else { GENERATION })
}

/// What is known of the word's keys is so no more.
pub fn forget(word: u64) -> u64 {
    word.wrapping_add(GENERATION)
}

/// Whether memcached may be asked: a read in flight does not matter, for what it ends with does.
pub fn may_ask(word: u64) -> bool {
    writes(word) == 0
}

/// The word with which an entry is valid that was asked for while the word was this.
pub fn asked(word: u64) -> u64 {
    word - reads(word)
}

/// What a set is told with whose word this was when memcached had read it: the word once memcached has obeyed it.
pub fn stored(word: u64) -> u64 {
    end(asked(word))
}

/// The set was obeyed, and did not store.
pub fn end_failed(word: u64) -> u64 {
    forget(end(word))
}

/// How often it was changed.
pub fn generation(word: u64) -> u64 {
    word / GENERATION
}

/// Reads in flight.
pub fn reads(word: u64) -> u64 {
    word & abi::UC_READS as u64
}

/// Other commands in flight.
pub fn writes(word: u64) -> u64 {
    (word & abi::UC_WRITES as u64) / WRITE
}
