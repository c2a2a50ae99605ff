//! The client library: sessions, retries, shards.
