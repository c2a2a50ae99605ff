//! Configuration files from anybody: reading and checking one never panics, and what is accepted can be meant.

#![no_main]

use std::collections::HashSet;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    client(text);
    coordinator(text);
    rack(text);
});

fn client(text: &str) {
    let Ok(config) = toml::from_str::<underpass_client::Config>(text) else { return };
    if config.validate().is_ok() {
        let shards: HashSet<u32> = config.shards.iter().map(|shard| shard.id).collect();
        assert!(!shards.is_empty() && shards.len() == config.shards.len(), "accepted with a shard twice, or none");
    }
}

fn coordinator(text: &str) {
    let Ok(options) = toml::from_str::<underpass_coordinator::config::Options>(text) else { return };
    if let Ok(config) = options.into_config() {
        config.validate().expect("what into_config accepts is valid");
    }
}

fn rack(text: &str) {
    let Ok(config) = text.parse::<underpass_rack::Config>() else { return };
    if let Ok(topology) = config.topology() {
        let links = topology.hosts.iter().flat_map(|host| &host.links);
        let mut addresses = HashSet::new();
        for link in links {
            for address in link.extra_addresses.iter().chain([&link.address]) {
                assert!(addresses.insert(*address), "accepted with {address} twice");
            }
        }
    }
}
