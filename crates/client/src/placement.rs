//! Which shard a key is in: rendezvous (highest random weight) hashing.
//!
//! The weight of a shard for a key is SipHash-2-4, with the 16-byte key [`PLACEMENT_KEY`], of the shard's id (4 bytes,
//! big-endian) followed by the key. The shard with the highest weight has the key; of equal weights the lower id wins.
//! Adding or removing a shard moves only the keys that go to it or come from it. Every client must agree on this, so it
//! never changes.

use std::hash::Hasher;

use siphasher::sip::SipHasher24;

/// Key of the hash. Not a secret.
pub const PLACEMENT_KEY: &[u8; 16] = b"underpass.shards";

/// Index in `shards` of the shard that has `key`.
///
/// # Panics
/// If `shards` is empty.
pub fn place(key: &[u8], shards: &[u32]) -> usize {
    match shards {
        [] => panic!("a configuration has shards"),
        [_] => 0,
        _ => {
            let weight = |&index: &usize| (weight(key, shards[index]), std::cmp::Reverse(shards[index]));
            (0..shards.len()).max_by_key(weight).expect("not empty")
        }
    }
}

fn weight(key: &[u8], shard: u32) -> u64 {
    let mut hasher = SipHasher24::new_with_key(PLACEMENT_KEY);
    hasher.write(&shard.to_be_bytes());
    hasher.write(key);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(i: u32) -> Vec<u8> {
        format!("key-{i}").into_bytes()
    }

    #[test]
    fn placement_never_changes() {
        // From another implementation of SipHash: every client ever built must agree.
        let expected = [0, 1, 2, 4, 2, 2, 4, 4, 2, 4, 0, 2, 3, 4, 1, 3];
        let shards = [0, 1, 2, 3, 7];
        let placed: Vec<usize> = (0..16).map(|i| place(&key(i), &shards)).collect();
        assert_eq!(placed, expected);
    }

    #[test]
    fn the_order_of_shards_does_not_matter() {
        for i in 0..1000 {
            let (a, b) = ([5, 2, 9], [9, 5, 2]);
            assert_eq!(a[place(&key(i), &a)], b[place(&key(i), &b)]);
        }
    }

    #[test]
    fn shards_get_equal_shares() {
        let shards = [0, 1, 2, 3];
        let mut counts = [0u32; 4];
        for i in 0..40_000 {
            counts[place(&key(i), &shards)] += 1;
        }
        assert!(counts.iter().all(|&count| (9_500..10_500).contains(&count)), "{counts:?}");
    }

    #[test]
    fn a_new_shard_takes_keys_and_moves_no_others() {
        let (before, after) = ([0, 1, 2], [0, 1, 2, 3]);
        let mut moved = 0;
        for i in 0..10_000 {
            let (old, new) = (before[place(&key(i), &before)], after[place(&key(i), &after)]);
            if old != new {
                assert_eq!(new, 3);
                moved += 1;
            }
        }
        assert!((2_200..2_800).contains(&moved), "{moved}");
    }
}
