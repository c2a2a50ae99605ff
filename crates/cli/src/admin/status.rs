//! `underpass status`: a screenful for whoever is called at night. What is wrong and what to do comes first.

use std::{fmt::Write as _, path::PathBuf, thread, time::Duration};

use anyhow::Result;
use clap::Args;
use underpass_coordinator::{admin, config::CONTROL_DEFAULT, stats::Stats};
use underpass_protocol::agent::{MemberStatus, ShardStatus};

/// Which agent to ask, and how to show it.
#[derive(Clone, Debug, Args)]
pub struct StatusArgs {
    /// The control socket of a coordinator's agent; one that stands by knows less than the one that serves
    #[arg(long, value_name = "PATH", default_value = CONTROL_DEFAULT)]
    control: PathBuf,
    /// One JSON document on a line
    #[arg(long)]
    json: bool,
    /// Show it again every second
    #[arg(long)]
    watch: bool,
}

/// Time between two looks.
const AGAIN: Duration = Duration::from_secs(1);
/// A replica whose memory is used up to this share, in percent, is worth a look: writes that need more are refused at 94.
const MEMORY_WARN_PERCENT: u64 = 85;

/// Shows how a coordinator and its shards are.
///
/// # Errors
/// No agent answers.
pub fn run(args: &StatusArgs) -> Result<()> {
    let mut before: Option<Stats> = None;
    loop {
        let now = admin::status(&args.control)?;
        if args.json {
            println!("{}", serde_json::to_string(&now)?);
        } else {
            if args.watch {
                // Home, and nothing below.
                print!("\x1b[H\x1b[2J");
            }
            print!("{}", text(&now, before.as_ref()));
        }
        if !args.watch {
            return Ok(());
        }
        before = Some(now);
        thread::sleep(AGAIN);
    }
}

/// Everything, for people. With an earlier look, the time that copies will take is told.
fn text(now: &Stats, before: Option<&Stats>) -> String {
    let mut out = String::new();
    let troubles = troubles(now);
    if troubles.is_empty() {
        out += "All is well.\n";
    }
    for Trouble { what, next } in &troubles {
        let _ = writeln!(out, "! {what}\n    {next}");
    }
    let _ = writeln!(
        out,
        "\ncoordinator {} ({}, {}), process {}, up {}; authority {}",
        now.listen,
        now.datapath,
        now.mode,
        now.pid,
        time(now.uptime_ms),
        now.authority
    );
    for shard in &now.shards {
        let _ = write!(out, "\n{}", describe(now, shard));
        let earlier = before.and_then(|before| {
            let same = before.shards.iter().find(|other| other.shard == shard.shard)?;
            Some((same, now.uptime_ms.saturating_sub(before.uptime_ms)))
        });
        out += &members_since(shard, earlier);
    }
    out
}

/// The shard, without its replicas.
fn describe(now: &Stats, shard: &ShardStatus) -> String {
    let mut out = format!("shard {} {}, epoch {}", shard.shard, in_words(&shard.state), shard.epoch);
    match (&shard.coordinator, shard.lease_left_ms) {
        (_, Some(left_ms)) if left_ms > 0 => {
            let _ = write!(out, ", served here, lease for another {left_ms} ms");
        }
        (_, Some(_)) => out += ", served by nobody: the lease is over",
        (Some(at), None) if *at == now.listen => out += ", by the record served here",
        (Some(at), None) => {
            let _ = write!(out, ", by the record served at {at}");
        }
        (None, None) => out += ", never served yet",
    }
    if shard.unresolved > 0 {
        let _ = write!(out, ", {} writes under way", shard.unresolved);
    }
    if shard.storing {
        out += ", a change of the record is under way";
    }
    out + "\n"
}

fn in_words(state: &str) -> &str {
    match state {
        "serving" => "is served",
        "changing" => "is served, its members are changing",
        "standby" => "is left to another coordinator",
        "forming" => "waits for its replicas to begin",
        "leaving" => "is being handed over",
        other => other,
    }
}

/// The replicas of a shard, one on a line.
pub fn members(shard: &ShardStatus) -> String {
    members_since(shard, None)
}

fn members_since(shard: &ShardStatus, earlier: Option<(&ShardStatus, u64)>) -> String {
    let mut out = String::new();
    for member in &shard.members {
        let state = match (member.active, member.serving) {
            (true, true) => "active",
            (true, false) => "active, gets no reads",
            (false, _) => "being filled",
        };
        let _ = write!(
            out,
            "  replica {:<3} {:<21} {state:<21} heard of {:>9} {:>10} items {:>5} of {} MiB",
            member.id,
            member.address,
            member.silent_ms.map_or("never".to_owned(), |silent| format!("{} ago", time(silent))),
            member.items,
            member.used_bytes >> 20,
            member.budget_bytes >> 20,
        );
        if let Some(copying) = &member.copying {
            let _ = write!(out, ", copied {} of {} items ({} MiB)", copying.items, copying.of, copying.bytes >> 20);
            if let Some(left) = earlier.and_then(|earlier| time_left(member, earlier)) {
                let _ = write!(out, ", about {} left", time(left));
            }
        }
        let _ = writeln!(out, "{}{}", if member.trouble.is_empty() { "" } else { ": " }, member.trouble);
    }
    for candidate in &shard.candidates {
        let why = if candidate.trouble.is_empty() { "has not answered yet" } else { &candidate.trouble };
        let _ = writeln!(out, "  replica {:<3} {:<21} takes no part: {why}", candidate.id, candidate.address);
    }
    out
}

/// Milliseconds until a copy is complete, by what came since the earlier look.
fn time_left(member: &MemberStatus, (earlier, elapsed_ms): (&ShardStatus, u64)) -> Option<u64> {
    let now = member.copying.as_ref()?;
    let same = earlier.members.iter().find(|other| other.incarnation == member.incarnation)?;
    let came = now.items.checked_sub(same.copying.as_ref()?.items)?;
    now.of.saturating_sub(now.items).saturating_mul(elapsed_ms).checked_div(came)
}

fn time(ms: u64) -> String {
    match ms {
        0..1000 => format!("{ms} ms"),
        1000..120_000 => format!("{:.1} s", ms as f64 / 1000.0),
        120_000..7_200_000 => format!("{} min", ms / 60_000),
        7_200_000..172_800_000 => format!("{} h", ms / 3_600_000),
        _ => format!("{} days", ms / 86_400_000),
    }
}

/// Something that is not as it should be, and what to do about it.
struct Trouble {
    what: String,
    next: String,
}

/// What is wrong, the worst first.
fn troubles(now: &Stats) -> Vec<Trouble> {
    let mut troubles = Vec::new();
    let mut add = |rank: u8, what: String, next: &str| troubles.push((rank, Trouble { what, next: next.to_owned() }));
    for trouble in &now.authority_troubles {
        add(
            3,
            format!("The authority: {trouble}"),
            "Service goes on; changes, take-overs and new sessions wait for it. Bring it back (docs/operating.md, \"The authority \
             is down\").",
        );
    }
    for shard in &now.shards {
        let number = shard.shard;
        let serves = shard.lease_left_ms.is_some();
        if shard.lease_left_ms.is_some_and(|left_ms| left_ms <= 0) {
            add(
                0,
                format!("Shard {number} is not served: its replicas do not all answer this coordinator."),
                "Those silent for long are removed by themselves if others answer. If none does, this host is cut off: look at its \
                 network.",
            );
        }
        if !shard.trouble.is_empty() {
            let rank = if serves { 1 } else { 0 };
            add(rank, format!("Shard {number}: {}", shard.trouble), "docs/operating.md explains each of these texts.");
        } else if !serves && !matches!(shard.state.as_str(), "standby" | "leaving") {
            add(
                1,
                format!("Shard {number} is not served yet: it {}.", in_words(&shard.state)),
                "A take-over ends by itself, within seconds. Look again.",
            );
        } else if shard.state == "standby" && shard.coordinator.as_deref() == Some(now.listen.as_str()) {
            add(
                0,
                format!("Shard {number} is on record as served here, and is not; this agent does not hold the role."),
                "If no other coordinator serves it (`underpass status` there), the authority gives the role to nobody: look at it.",
            );
        }
        if shard.store_full {
            add(
                2,
                format!("Shard {number} refuses writes that may grow it: a replica has used up its memory."),
                "Delete items, or replace the replicas one by one by ones with more --memory (`underpass members replace`).",
            );
        }
        let active = shard.members.iter().filter(|member| member.active).count();
        if serves && active == 1 && !shard.members.is_empty() {
            let next = match shard.members.len() + shard.candidates.len() {
                1 => "Add another (`underpass members add`).",
                _ => "Others are being filled, or wait for what is said below.",
            };
            add(1, format!("Shard {number}: one replica alone holds the data: its loss would be theirs."), next);
        }
        for member in &shard.members {
            let name = format!("Shard {number}, replica {} ({})", member.id, member.address);
            let used = member.used_bytes.saturating_mul(100).checked_div(member.budget_bytes).unwrap_or(0);
            if !member.trouble.is_empty() {
                let next = match member.active {
                    true => "Silent for long, it is removed by itself, and comes back by itself, empty, to be filled.",
                    false => "It is being filled, and begins again by itself if it has to.",
                };
                add(2, format!("{name}: {}", member.trouble), next);
            } else if used >= MEMORY_WARN_PERCENT && !shard.store_full {
                add(
                    3,
                    format!("{name} has used {used} % of its memory."),
                    "At 94 % writes that may grow it are refused.",
                );
            }
        }
        for candidate in &shard.candidates {
            let why = if candidate.trouble.is_empty() { "has not answered yet" } else { &candidate.trouble };
            add(
                2,
                format!("Shard {number}, replica {} ({}) takes no part: it {why}.", candidate.id, candidate.address),
                "Start it if it does not run. If it is gone for good: `underpass members replace`, or `members remove`.",
            );
        }
    }
    troubles.sort_by_key(|(rank, _)| *rank);
    troubles.into_iter().map(|(_, trouble)| trouble).collect()
}

#[cfg(test)]
mod tests {
    use underpass_protocol::{agent::CandidateStatus, control::Copying};

    use super::*;

    fn member(id: u32) -> MemberStatus {
        MemberStatus {
            index: id as u8 - 1,
            id,
            address: format!("10.0.0.{id}:5550"),
            incarnation: u64::from(id) << 32,
            active: true,
            serving: true,
            installed: 7,
            silent_ms: Some(4),
            used_bytes: 100 << 20,
            budget_bytes: 1024 << 20,
            items: 1000,
            copying: None,
            trouble: String::new(),
        }
    }

    fn stats() -> Stats {
        Stats {
            datapath: "xdp".into(),
            mode: "native, broadcast".into(),
            listen: "10.0.0.9:5550".into(),
            pid: 42,
            uptime_ms: 4_000_000,
            sessions_open: 8,
            sessions: 65536,
            authority: "etcd 10.0.0.8:2379".into(),
            authority_troubles: vec![],
            shards: vec![ShardStatus {
                shard: 5,
                state: "serving".into(),
                role: true,
                epoch: 7,
                tenure: 6,
                coordinator: Some("10.0.0.9:5550".into()),
                revision: 3,
                storing: false,
                lease_left_ms: Some(990),
                stable: 9,
                unresolved: 0,
                store_full: false,
                trouble: String::new(),
                members: (1..=3).map(member).collect(),
                candidates: vec![],
            }],
            counters: Default::default(),
            next_hops: None,
        }
    }

    #[test]
    fn a_shard_that_is_well_is_a_few_lines() {
        let text = text(&stats(), None);
        assert!(text.starts_with("All is well.\n"), "{text}");
        for part in ["10.0.0.9:5550", "up 66 min", "shard 5 is served, epoch 7, served here, lease for another 990 ms"]
        {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
        assert!(text.lines().count() < 10 && text.contains("replica 3   10.0.0.3:5550         active"), "{text}");
    }

    /// What each trouble does to the text; the first line tells of the worst.
    #[test]
    fn what_is_wrong_comes_first_with_what_to_do() {
        type Spoil = fn(&mut Stats);
        let cases: [(Spoil, &str, &str); 11] = [
            (|s| s.shards[0].lease_left_ms = Some(-20), "Shard 5 is not served", "look at its network"),
            (|s| s.shards[0].trouble = "no active replica answers".into(), "no active replica answers", "operating.md"),
            (|s| s.shards[0].store_full = true, "refuses writes that may grow", "more --memory"),
            (|s| s.shards[0].members.truncate(1), "one replica alone", "members add"),
            (
                |s| s.shards[0].members[1].trouble = "is silent".into(),
                "replica 2 (10.0.0.2:5550): is silent",
                "removed by itself",
            ),
            (|s| s.shards[0].members[2].used_bytes = 900 << 20, "87 % of its memory", "94 %"),
            (|s| s.authority_troubles = vec!["no answer".into()], "The authority: no answer", "Service goes on"),
            (
                |s| {
                    s.shards[0].candidates = vec![CandidateStatus {
                        id: 4,
                        address: "10.0.0.4:5550".into(),
                        silent_ms: None,
                        trouble: String::new(),
                    }];
                },
                "replica 4 (10.0.0.4:5550) takes no part: it has not answered yet",
                "members replace",
            ),
            (
                |s| (s.shards[0].state, s.shards[0].lease_left_ms) = ("standby".into(), None),
                "on record as served here, and is not",
                "the authority",
            ),
            (
                |s| (s.shards[0].state, s.shards[0].lease_left_ms) = ("forming".into(), None),
                "not served yet: it waits for its replicas",
                "Look again",
            ),
            (
                |s| {
                    s.authority_troubles = vec!["x".into()];
                    s.shards[0].lease_left_ms = Some(0);
                },
                "! Shard 5 is not served: its replicas do not all answer this coordinator.\n",
                "! The authority",
            ),
        ];
        for (spoil, what, next) in cases {
            let mut stats = stats();
            spoil(&mut stats);
            let text = text(&stats, None);
            let first = text.lines().next().unwrap_or_default();
            assert!(
                first.starts_with("! ") && what.contains(first) || first.contains(what.trim_end()),
                "{what}:\n{text}"
            );
            assert!(text.contains(next), "{next} is missing in\n{text}");
        }
        let mut standby = stats();
        (standby.shards[0].state, standby.shards[0].lease_left_ms) = ("standby".into(), None);
        standby.shards[0].coordinator = Some("10.0.0.7:5550".into());
        let text = text(&standby, None);
        assert!(text.starts_with("All is well") && text.contains("by the record served at 10.0.0.7:5550"), "{text}");
    }

    #[test]
    fn a_copy_tells_when_it_will_be_complete() {
        let mut before = stats();
        let mut learner = MemberStatus { active: false, serving: false, ..member(3) };
        learner.copying = Some(Copying { items: 1000, of: 10_000, ..Copying::default() });
        before.shards[0].members[2] = learner.clone();
        let mut now = before.clone();
        now.uptime_ms += 1000;
        let copying = now.shards[0].members[2].copying.as_mut().unwrap();
        (copying.items, copying.bytes) = (4000, 3 << 20);
        let alone = text(&now, None);
        assert!(alone.contains("copied 4000 of 10000 items (3 MiB)\n"), "{alone}");
        let text = text(&now, Some(&before));
        assert!(text.contains("being filled") && text.contains(", about 2.0 s left\n"), "{text}");
        // One that does not advance has no end to tell.
        assert!(!super::text(&now, Some(&now)).contains("left"));
    }
}
