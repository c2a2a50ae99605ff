//! The key that a cluster's agents and replicas share.

use std::{fs, path::Path};

use underpass_protocol::control::ClusterKey;

use crate::Error;

/// Reads a key: 16 bytes as they are, or as 32 hexadecimal digits on a line.
///
/// # Errors
/// A file that cannot be read or holds something else, or the key of all zeros, which stands for none.
pub fn cluster_key(path: &Path) -> Result<ClusterKey, Error> {
    let failed = |why: String| Error::ClusterKey { path: path.into(), why };
    let bytes = fs::read(path).map_err(|error| failed(error.to_string()))?;
    let key = parse(&bytes).ok_or_else(|| failed(format!("it holds {} bytes that are no key", bytes.len())))?;
    if key == ClusterKey::default() {
        return Err(failed("all zeros is no key".into()));
    }
    Ok(key)
}

fn parse(bytes: &[u8]) -> Option<ClusterKey> {
    let key: u128 = if let Ok(raw) = bytes.try_into() {
        u128::from_be_bytes(raw)
    } else {
        let digits = bytes.trim_ascii();
        let is_hex = digits.len() == 32 && digits.iter().all(u8::is_ascii_hexdigit);
        u128::from_str_radix(std::str::from_utf8(digits).ok().filter(|_| is_hex)?, 16).ok()?
    };
    Some(ClusterKey([(key >> 64) as u64, key as u64]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_16_bytes_or_32_digits() {
        let key = Some(ClusterKey([0x0011_2233_4455_6677, 0x8899_aabb_ccdd_eeff]));
        assert_eq!(parse(b"00112233445566778899aabbccddeeff"), key);
        assert_eq!(parse(b" 00112233445566778899AABBCCDDEEFF\n"), key);
        assert_eq!(parse(&0x0011_2233_4455_6677_8899_aabb_ccdd_eeff_u128.to_be_bytes()), key);
        for wrong in [&b""[..], b"0011", b"+0112233445566778899aabbccddeeff", b"00112233445566778899aabbccddeefg"] {
            assert_eq!(parse(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn a_file_that_is_no_key_is_named() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("key");
        let text = || cluster_key(&path).expect_err("refused").to_string();
        assert!(text().contains("No such file") && text().contains("--cluster-key-file"), "{}", text());
        fs::write(&path, "short").expect("written");
        assert!(text().contains("5 bytes that are no key"), "{}", text());
        fs::write(&path, [0; 16]).expect("written");
        assert!(text().contains("all zeros"), "{}", text());
        fs::write(&path, "f".repeat(32)).expect("written");
        assert_eq!(cluster_key(&path).expect("a key"), ClusterKey([u64::MAX; 2]));
    }
}
