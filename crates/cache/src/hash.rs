//! How a key finds its set, its word and its tag; `bpf/lib/cache.h` computes the same.

use underpass_abi::cache::UC_SET_WORDS;

/// Hash of a key under secrets.
pub fn hash(key: &[u8], secret: &[u64; 2]) -> u64 {
    let mix = |hash: u64, word: u64| {
        let hash = (hash ^ word).wrapping_mul(secret[1] | 1);
        hash ^ hash >> 29
    };
    let hash = key.chunks(8).fold(secret[0], |hash, chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        mix(hash, u64::from_le_bytes(word))
    });
    let hash = (hash ^ key.len() as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    hash ^ hash >> 32
}

/// The index of its set.
pub fn set(hash: u64, mask: u32) -> usize {
    (hash as u32 & mask) as usize
}

/// The index of its word in the set.
pub fn which(hash: u64) -> usize {
    const { assert!(UC_SET_WORDS == 4) };
    (hash >> 62) as usize
}

/// Its tag.
pub fn tag(hash: u64) -> u32 {
    (hash >> 32) as u32
}
