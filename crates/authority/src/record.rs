//! Records as bytes.

use serde::Deserialize;
use underpass_protocol::agent::{RECORD_VERSION, Record};

/// The version alone, of a record of any version.
#[derive(Deserialize)]
struct Version {
    version: u32,
}

/// Reads the record of a shard; says what is wrong with it, and what to do.
pub(crate) fn parse(bytes: &[u8], shard: u32) -> Result<Record, String> {
    let Version { version } = serde_json::from_slice(bytes).map_err(|e| format!("it is not a record: {e}"))?;
    if version != RECORD_VERSION {
        let other = if version > RECORD_VERSION { "newer" } else { "older" };
        return Err(format!(
            "it has format {version}, and this build knows format {RECORD_VERSION}: start the {other} build that wrote it"
        ));
    }
    let record: Record = serde_json::from_slice(bytes).map_err(|e| format!("it is not a record: {e}"))?;
    record.validate()?;
    if record.shard != shard {
        return Err(format!("it is the record of shard {}", record.shard));
    }
    Ok(record)
}

pub(crate) fn to_bytes(record: &Record) -> Vec<u8> {
    serde_json::to_vec(record).expect("a record has string keys alone")
}
