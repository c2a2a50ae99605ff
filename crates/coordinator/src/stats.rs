//! What an agent tells about itself: as a JSON document, and to people as a table.

use std::{collections::BTreeMap, fmt::Write as _};

use serde::{Deserialize, Serialize};
use underpass_protocol::agent::{CandidateStatus, MemberStatus, ShardStatus};

use crate::counters;

/// An agent at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// `xdp` or `socket`.
    pub datapath: String,
    /// How it runs.
    pub mode: String,
    /// Address and port.
    pub listen: String,
    /// Process.
    pub pid: u32,
    /// Milliseconds since the agent started.
    pub uptime_ms: u64,
    /// Sessions open.
    pub sessions_open: usize,
    /// Sessions that there can be.
    pub sessions: usize,
    /// Which authority keeps the records, and where.
    pub authority: String,
    /// What is wrong with the authority at the moment.
    pub authority_troubles: Vec<String>,
    /// The shards.
    pub shards: Vec<ShardStatus>,
    /// Link-layer address that frames for a host go to, by its address, empty if it is not known; `None` if the kernel finds
    /// its own way.
    pub next_hops: Option<BTreeMap<String, String>>,
    /// Counters by name ([`crate::counters`]), and what the data path counts beside them.
    pub counters: BTreeMap<String, u64>,
}

impl Stats {
    /// For people. With the stats of `seconds` before, counters show their rate as well.
    pub fn table(&self, before: Option<(&Stats, f64)>) -> String {
        let mut out = String::new();
        // Writing to a string does not fail.
        let _ = self.write_table(&mut out, before);
        out
    }

    fn write_table(&self, out: &mut String, before: Option<(&Stats, f64)>) -> std::fmt::Result {
        writeln!(
            out,
            "coordinator {} ({}, {}), process {}, up {} s, sessions {} of {}",
            self.listen,
            self.datapath,
            self.mode,
            self.pid,
            self.uptime_ms / 1000,
            self.sessions_open,
            self.sessions
        )?;
        writeln!(out, "authority {}", self.authority)?;
        for trouble in &self.authority_troubles {
            writeln!(out, "  TROUBLE: {trouble}")?;
        }
        for shard in &self.shards {
            writeln!(
                out,
                "shard {} {}, epoch {}, {} unresolved writes{}{}",
                shard.shard,
                shard.state,
                shard.epoch,
                shard.unresolved,
                match (&shard.coordinator, shard.lease_left_ms) {
                    (_, Some(left_ms)) if left_ms > 0 => String::new(),
                    (_, Some(_)) => ", NO LEASE: members do not answer".to_owned(),
                    (Some(at), None) => format!(", coordinator {at}"),
                    (None, None) => String::new(),
                },
                if shard.store_full { ", FULL: refuses writes that may grow the store" } else { "" }
            )?;
            if !shard.trouble.is_empty() {
                writeln!(out, "  TROUBLE: {}", shard.trouble)?;
            }
            for member in &shard.members {
                self.write_member(out, member)?;
            }
            for CandidateStatus { id, address, trouble, .. } in &shard.candidates {
                let trouble = if trouble.is_empty() { "takes no part yet" } else { trouble };
                writeln!(out, "  replica {id} {address:<21} absent    : {trouble}")?;
            }
        }
        let known = counters::all();
        let meaning =
            |name: &str| known.iter().find(|counter| counter.name == name).map_or("", |counter| &counter.meaning);
        let order = |name: &str| known.iter().position(|counter| counter.name == name).unwrap_or(known.len());
        let mut shown: Vec<_> = self.counters.iter().filter(|(_, count)| **count > 0).collect();
        shown.sort_by_key(|(name, _)| (order(name), name.as_str()));
        for (name, count) in shown {
            let rate = before.map_or(String::new(), |(before, seconds)| {
                let earlier = before.counters.get(name).copied().unwrap_or(0);
                format!(" {:>12.0}/s", count.saturating_sub(earlier) as f64 / seconds)
            });
            writeln!(out, "{count:>15}{rate}  {name:<22} {}", meaning(name))?;
        }
        Ok(())
    }

    fn write_member(&self, out: &mut String, member: &MemberStatus) -> std::fmt::Result {
        let mebibytes = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let host = member.address.split(':').next().unwrap_or_default();
        write!(
            out,
            "  replica {} {:<21} {:<9} {:>10} items {:>9.1} of {:.0} MiB",
            member.id,
            member.address,
            match (member.serving, member.active) {
                (true, _) => "serving",
                (false, true) => "NOT USED",
                (false, false) => "learner",
            },
            member.items,
            mebibytes(member.used_bytes),
            mebibytes(member.budget_bytes)
        )?;
        if let Some(hops) = &self.next_hops {
            let hop = hops.get(host).map_or("", String::as_str);
            write!(out, ", via {}", if hop.is_empty() { "UNRESOLVED" } else { hop })?;
        }
        if let Some(copying) = &member.copying {
            write!(out, ", copied {} of {} items", copying.items, copying.of)?;
        }
        if member.trouble.is_empty() { writeln!(out) } else { writeln!(out, ": {}", member.trouble) }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use underpass_protocol::control::Copying;

    use super::*;

    pub(crate) fn stats() -> Stats {
        let member = MemberStatus {
            index: 0,
            id: 0,
            address: "127.0.0.1:5551".into(),
            incarnation: 7,
            active: true,
            serving: false,
            installed: 2,
            silent_ms: Some(1200),
            used_bytes: 15 << 20,
            budget_bytes: 16 << 20,
            items: 1000,
            copying: None,
            trouble: "is silent".into(),
        };
        let learner = MemberStatus {
            id: 3,
            address: "127.0.0.1:5554".into(),
            active: false,
            copying: Some(Copying { items: 10, of: 1000, ..Copying::default() }),
            trouble: String::new(),
            ..member.clone()
        };
        let absent =
            CandidateStatus { id: 2, address: "127.0.0.1:5553".into(), silent_ms: None, trouble: String::new() };
        Stats {
            datapath: "socket".into(),
            mode: "1 thread".into(),
            listen: "127.0.0.1:5550".into(),
            pid: 1,
            uptime_ms: 61_000,
            sessions_open: 3,
            sessions: 64,
            authority: "file /tmp/authority.json".into(),
            authority_troubles: vec!["disk full".into()],
            shards: vec![ShardStatus {
                shard: 0,
                state: "serving".into(),
                role: true,
                epoch: 2,
                tenure: 1,
                coordinator: Some("127.0.0.1:5550".into()),
                revision: 3,
                storing: false,
                lease_left_ms: Some(990),
                stable: 9,
                unresolved: 1,
                store_full: true,
                trouble: "is sick".into(),
                members: vec![member, learner],
                candidates: vec![absent],
            }],
            next_hops: Some([("127.0.0.1".to_owned(), "02:00:00:00:00:01".to_owned())].into()),
            counters: [("read".to_owned(), 1000), ("write".to_owned(), 0), ("reject_token".to_owned(), 5)].into(),
        }
    }

    #[test]
    fn a_table_shows_what_happened_and_how_fast() {
        let now = stats();
        let mut before = stats();
        before.counters.insert("read".into(), 500);
        let table = now.table(Some((&before, 2.0)));
        assert!(table.contains("250/s  read"), "{table}");
        assert!(table.contains("rejected: wrong token or reply address"), "{table}");
        for says in [
            "NOT USED",
            ": is silent",
            "FULL",
            "TROUBLE: is sick",
            "TROUBLE: disk full",
            "via 02:00:00:00:00:01",
            "learner",
            "copied 10 of 1000 items",
            "replica 2 127.0.0.1:5553        absent",
        ] {
            assert!(table.contains(says), "{says} is not in\n{table}");
        }
        assert!(!table.contains("writes ordered"), "what never happened is left out: {table}");
        assert!(!table.contains("NO LEASE"), "{table}");
        assert!(table.find("read").unwrap() < table.find("reject_token").unwrap());
    }
}
