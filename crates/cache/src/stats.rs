//! What is counted, and how it is shown.

use serde::Serialize;
use serde_json::{Value, json};
use underpass_abi::cache::UC_COUNT_END;

use crate::agent::Agent;

/// The kernel's counters, in the order of `enum uc_count`.
pub const NAMES: [&str; UC_COUNT_END as usize] = [
    "hits",
    "misses",
    "misses_absent",
    "misses_changed",
    "misses_in_flight",
    "misses_expired",
    "passed_other_request",
    "passed_untrusted",
    "passed_no_room",
    "passed_not_serving",
    "reported",
    "reports_lost",
    "seen_reads",
    "seen_writes",
    "seen_other",
    "seen_forget",
    "seen_flush",
    "seen_lost",
    "reads_that_hit",
    "reads_that_missed",
    "overflows",
    "gaps",
    "unreadable",
    "reads_not_followed",
    "followed_again",
    "bytes_parsed",
    "passed_limit",
    "replies_unseen",
];

/// The agent's counters.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Counts {
    /// Items that memcached was asked for.
    pub asked: u64,
    /// Items installed.
    pub fills: u64,
    /// Of those, taken from a set on its way to memcached.
    pub fills_by_set: u64,
    /// Items installed in the place of a valid one.
    pub evictions: u64,
    /// Not installed: a command came since memcached was asked.
    pub refused_changed: u64,
    /// Not asked, or not installed: a command was in flight.
    pub refused_in_flight: u64,
    /// Not installed: memcached had none.
    pub refused_absent: u64,
    /// Not installed: it expires too soon.
    pub refused_expiring: u64,
    /// Not installed: larger than a datagram.
    pub refused_too_large: u64,
    /// Not asked, or not installed: clients mark items stale.
    pub refused_stale: u64,
    /// Not installed: no slot was free just then.
    pub refused_no_slot: u64,
    /// Not installed: memcached refused.
    pub refused_error: u64,
    /// Not asked: the cache is full, and the key was not missed before, not long ago.
    pub not_admitted: u64,
    /// Not asked: too many were asked for already.
    pub dropped: u64,
    /// Connections to memcached that had to be made again.
    pub reconnects: u64,
}

/// Everything about a running cache.
pub fn report(agent: &Agent) -> anyhow::Result<Value> {
    let per_cpu = agent.kernel().counters()?;
    let named = |counts: &[u64]| -> Value {
        NAMES
            .iter()
            .zip(counts)
            .map(|(name, count)| (name.to_string(), json!(count)))
            .collect::<serde_json::Map<_, _>>()
            .into()
    };
    let total: Vec<u64> = (0..NAMES.len()).map(|i| per_cpu.iter().map(|cpu| cpu[i]).sum()).collect();
    let (used, pages) = agent.table().pages();
    let memcached = agent.memcached();
    Ok(json!({
        "pid": std::process::id(),
        "device": agent.options().device,
        "memcached": { "address": memcached.at.to_string(), "pid": memcached.pid, "version": memcached.version },
        "memory": {
            "budget_bytes": u64::from(agent.options().mib) << 20,
            "map_bytes": agent.kernel().map_bytes()?,
            "pages": pages,
            "pages_used": used,
            "entries": agent.table().entries(),
            "sets": agent.kernel().sizes().sets,
            "ways": agent.options().ways,
        },
        "kernel": named(&total),
        "agent": agent.counts(),
        "cpus": per_cpu.iter().map(|cpu| named(cpu)).collect::<Vec<_>>(),
    }))
}

/// For people: the counters that are not zero, one a line.
pub fn text(report: &Value) -> String {
    let mut lines = vec![format!(
        "memcached {} at {} (process {}), on {}",
        report["memcached"]["version"].as_str().unwrap_or_default(),
        report["memcached"]["address"].as_str().unwrap_or_default(),
        report["memcached"]["pid"],
        report["device"].as_str().unwrap_or_default(),
    )];
    for part in ["memory", "kernel", "agent"] {
        for (name, value) in report[part].as_object().into_iter().flatten().filter(|(_, value)| **value != json!(0)) {
            lines.push(format!("{part:<7} {name:<22} {value}"));
        }
    }
    lines.join("\n")
}
