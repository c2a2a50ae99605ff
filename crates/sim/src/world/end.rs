//! The end of a run: liveness, and the last judgements.

use std::collections::BTreeSet;

use underpass_check::{
    history,
    invariants::{Violation, linearizable},
    linearizability::{Checker, Options, Verdict},
};
use underpass_protocol::{client::NEVER, coordinator::unresolved};

use super::{Step, World};
use crate::{
    host::{Host, MS},
    watch::Watch,
};

/// Steps that the linearizability checker may try for one key.
const BUDGET: u64 = 1_000_000;

impl World<'_> {
    /// How long a healed cluster may take until all is well, in milliseconds.
    fn patience_ms(&self) -> u64 {
        let timing = &self.plan.shape.timing;
        // Late datagrams; the role; a take-over or two with their waits; joins; the slowest retries of clients and repairs.
        3 * self.plan.shape.weather.slow_ms
            + 3 * (timing.role + 2 * timing.lease + timing.reach + timing.lost)
            + 4 * timing.stuck
            + 10_000
    }

    /// Ends the run if all is well; fails it if that takes too long.
    pub(super) fn may_be_over(&mut self) -> Step {
        let healed_at = self.healed_at.unwrap_or(self.now);
        match self.unwell()? {
            None if self.probing => {
                self.over = true;
                Ok(())
            }
            None => {
                self.counts.recovery_ms += (self.now - healed_at) / MS;
                self.say(Host::Authority, || "-- all is well".into());
                self.probe()
            }
            Some((invariant, what)) if self.now > healed_at + self.patience_ms() * MS => {
                self.fail(invariant, format!("{} ms after everything healed: {what}", (self.now - healed_at) / MS))
            }
            Some(_) => Ok(()),
        }
    }

    /// What is not yet as it should be.
    fn unwell(&mut self) -> Step<Option<(&'static str, String)>> {
        for shard in self.shard_count() {
            if self.watch(shard).lost_at.is_some() {
                if let Some(what) = self.silent_about_loss(shard) {
                    return Ok(Some(("liveness", what)));
                }
                continue;
            }
            if let Some(what) = self.unserved(shard) {
                return Ok(Some(("liveness", what)));
            }
            let dirty = self.dirty(shard);
            let result = self.seen(shard, |_, all, active| {
                let active: Vec<_> =
                    active.iter().map(|&at| crate::watch::Seen { dump: all[at].dump, ..all[at] }).collect();
                Ok(Watch::clean(&dirty, &active))
            })?;
            if let Err(violation) = result {
                return Ok(Some((violation.invariant, violation.what)));
            }
        }
        for (i, user) in self.users.iter().enumerate() {
            let open = (0..user.deadlines.len()).find(|&tag| user.deadlines[tag] != NEVER);
            if let Some(tag) = open {
                return Ok(Some(("liveness", format!("client {i} still waits for {tag}: {}", user.history[tag]))));
            }
            if !user.probes.is_empty() {
                return Ok(Some(("liveness", format!("client {i} could not ask all that it wants to"))));
            }
        }
        Ok(None)
    }

    /// Why a shard is not served as it should be.
    fn unserved(&self, shard: u32) -> Option<String> {
        let (record, revision) = self.authority.record(shard);
        let Some(Host::Coordinator(i)) = record.coordinator().and_then(Host::at) else {
            return Some(format!("shard {shard} has no coordinator"));
        };
        let i = usize::from(i);
        let host = &self.coordinators[i];
        let (Some(process), Some(path)) = (&host.process, &host.data_path) else {
            return Some(format!("coordinator {i} of shard {shard} is down"));
        };
        let now_ms = host.clock.ms(self.now);
        let status = || {
            let status = process.agent.status(now_ms).into_iter().find(|status| status.shard == shard);
            status.map_or_else(String::new, |status| format!("{status:?}"))
        };
        if !process.agent.serves(shard) {
            return Some(format!("coordinator {i} does not serve shard {shard}, revision {revision}: {}", status()));
        }
        let Some(config) = path.tables.config(shard).filter(|config| config.epoch == record.epoch) else {
            return Some(format!(
                "coordinator {i} has not configured epoch {} of shard {shard}: {}",
                record.epoch,
                status()
            ));
        };
        if config.lease_until_ms <= now_ms {
            return Some(format!("coordinator {i}'s lease of shard {shard} is over: {}", status()));
        }
        if !record.settled {
            return Some(format!("epoch {} of shard {shard} is not settled: {}", record.epoch, status()));
        }
        for wanted in &record.wanted {
            let member = record.members.iter().find(|member| member.id == wanted.id);
            let alive = self.replicas[wanted.id as usize].replica.as_ref().map(|replica| replica.incarnation());
            if !member.is_some_and(|member| {
                member.active && Some(member.incarnation) == alive && config.serving & (1 << member.index) != 0
            }) {
                return Some(format!("replica {} of shard {shard} is not active: {}", wanted.id, status()));
            }
        }
        if record.members.len() != record.wanted.len() {
            return Some(format!("shard {shard} has members that nobody wants: {}", status()));
        }
        let open = path.tables.sessions().iter().find(|record| record.shard == shard && unresolved(record.state));
        open.map(|record| {
            let name = crate::trace::session(underpass_protocol::wire::SessionId(record.session));
            format!("{name}/{} of shard {shard} is unresolved, in state {}: {}", record.request, record.state, status())
        })
    }

    /// Sequence numbers of ways still taken.
    fn dirty(&self, shard: u32) -> Vec<u64> {
        let (record, _) = self.authority.record(shard);
        let Some(Host::Coordinator(i)) = record.coordinator().and_then(Host::at) else { return Vec::new() };
        let Some(path) = &self.coordinators[usize::from(i)].data_path else { return Vec::new() };
        let (buckets, _) = path.tables.buckets();
        let each = buckets.len() / underpass_abi::abi::UP_SHARD_SLOTS as usize;
        let at = underpass_protocol::coordinator::slot(shard) * each;
        buckets[at..at + each]
            .iter()
            .flat_map(|bucket| bucket.ways)
            .map(|way| way.last)
            .filter(|last| *last != 0)
            .collect()
    }

    /// A shard whose last copy is lost has to say so.
    fn silent_about_loss(&self, shard: u32) -> Option<String> {
        let says = self.coordinators.iter().any(|host| {
            let now_ms = host.clock.ms(self.now);
            let status = host.process.iter().flat_map(|process| process.agent.status(now_ms));
            status.into_iter().any(|status| status.shard == shard && !status.trouble.is_empty())
        });
        (!says).then(|| format!("nobody holds what shard {shard} held, and no agent says so"))
    }

    /// What can only be judged at the end.
    pub(super) fn judge(&mut self) -> Step {
        let history = || self.users.iter().flat_map(|user| &user.history);
        let check = |keep: &dyn Fn(&history::Operation) -> bool| {
            let mut checker = Checker::new();
            history().filter(|entry| keep(entry)).for_each(|entry| checker.add(entry));
            checker.check(&Options { budget: BUDGET, threads: 1 })
        };
        let report = check(&|_| true);
        let undecided = match report.verdict() {
            Verdict::Linearizable => false,
            Verdict::Undecided => true,
            // Packets' time may run ahead of the hosts' at a take-over: when the items of writes without a stamp expire is
            // not known closely enough to blame anybody.
            Verdict::Violation => {
                let vague = |entry: &&history::Operation| entry.ttl_ms.is_some() && entry.time_ms.is_none();
                let vague: BTreeSet<_> = history().filter(vague).map(|entry| &entry.key).collect();
                let rest = check(&|entry| !vague.contains(&entry.key));
                if rest.verdict() == Verdict::Violation {
                    return linearizable::verify(&report)
                        .map_err(|violation| Violation { what: format!("{}\n{report}", violation.what), ..violation });
                }
                true
            }
        };
        self.counts.undecided += u64::from(undecided);
        Ok(())
    }
}
