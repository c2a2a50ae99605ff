//! How a key finds its bucket and how keys are told apart. `bpf/lib/hash.h` computes the same.

use siphasher::sip128::{Hasher128, SipHasher24};

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Bucket hash: NH over 32-bit halves of the key's 8-byte words (little-endian, zero-padded), with the length added
/// and the result mixed. Cheap, and keyed, so that nobody outside can aim many keys at one bucket.
///
/// `secret` holds two 32-bit words for each 8 bytes of key.
pub fn bucket_hash(key: &[u8], secret: &[u32; 64]) -> u32 {
    let mut sum = (key.len() as u64).wrapping_mul(GOLDEN);
    for (chunk, secret) in key.chunks(8).zip(secret.chunks_exact(2)) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        let word = u64::from_le_bytes(word);
        let low = (word as u32).wrapping_add(secret[0]);
        let high = ((word >> 32) as u32).wrapping_add(secret[1]);
        sum = sum.wrapping_add(u64::from(low).wrapping_mul(u64::from(high)));
    }
    sum ^= sum >> 32;
    (sum.wrapping_mul(GOLDEN) >> 32) as u32
}

/// Fingerprint: SipHash-2-4 with 128 bits of output.
pub fn fingerprint(key: &[u8], secret: [u64; 2]) -> [u64; 2] {
    let mut hasher = SipHasher24::new_with_keys(secret[0], secret[1]);
    std::hash::Hasher::write(&mut hasher, key);
    let hash = hasher.finish128();
    [hash.h1, hash.h2]
}

/// Which of `count` serving replicas a read goes to: spread by session and request, so that a hot key uses them all, and
/// by time, so that a read sent again may find another replica than the one that did not answer.
pub fn spread(session: u64, request: u64, time: u64, count: u8) -> u8 {
    let mixed = session.wrapping_add(request).wrapping_add(time).wrapping_mul(GOLDEN) >> 32;
    (mixed.wrapping_mul(u64::from(count)) >> 32) as u8
}
