//! Members of a shard: who they are, whether they live, what they are granted and grant. `docs/protocol.md`, section 7,
//! "Replicas and epochs" and "Leases".

use std::collections::BTreeMap;

use super::{
    Action, Level, Record, TablesError,
    member::{Member, RETRY_MAX_MS, STAMPS_MAX},
    shard::{Context, Part, STORE_MS, Shard},
    takeover::Stage,
};
use crate::{
    control::{self, Answer, Heartbeat, HeartbeatAck, Install, Installed},
    transfer::{Collected, Fetched},
    wire::{Endpoint, Header, Op, Packet, Reason},
};

/// Time between questions to those that shall take part and do not.
pub(super) const HELLO_MS: u64 = 200;
/// Time between heartbeats before the first echo: that takes three of them.
const HURRY_MS: u64 = 2;
/// Longer than this between two looks for silence, and the agent was held up.
const HELD_UP_MS: u64 = 30;

impl Shard {
    // Members.

    /// Questions and orders that are due.
    pub(super) fn tick(&mut self, cx: &mut Context<'_>) -> Result<(), TablesError> {
        if let Some(storing) = &self.storing
            && cx.now_ms >= storing.since_ms + STORE_MS
            && cx.now_ms >= self.hello_ms
        {
            cx.out.push(Action::Load { shard: self.id });
        }
        match &self.part {
            Part::Standby => return self.begin(cx),
            Part::Leaving { .. } => return self.reconcile(cx),
            Part::Forming => self.greet(cx),
            Part::TakingOver(_) => {
                self.send_installs(cx);
                self.send_heartbeats(cx);
                self.take_over_step(cx)?;
            }
            Part::Serving(_) => {
                self.check_silence(cx)?;
                self.send_installs(cx);
                self.send_heartbeats(cx);
                self.greet(cx);
                self.repair(cx)?;
                self.check_transfer(cx);
                self.reconcile(cx)?;
            }
        }
        Ok(())
    }

    /// Asks those that shall take part and do not who they are.
    pub(super) fn greet(&mut self, cx: &mut Context<'_>) {
        if cx.now_ms < self.hello_ms {
            return;
        }
        self.hello_ms = cx.now_ms + HELLO_MS;
        let record = self.record().clone();
        for wanted in &record.wanted {
            let at = wanted.endpoint();
            if self.members.values().any(|member| member.endpoint() == at) {
                continue;
            }
            self.candidates.entry(at).or_default();
            let install = self.hello(cx, &record, 0, false);
            cx.send(at, control::emit(self.header(cx, Op::Install, record.epoch), &install));
        }
    }

    /// INSTALL for one that is no member: a question, or an order to give up what it holds.
    pub(super) fn hello(&self, cx: &Context<'_>, record: &Record, incarnation: u64, reset: bool) -> Install {
        let configuration = record.configuration();
        Install { incarnation, index: u8::MAX, reset, configuration, sessions: cx.tables.session_count() }
    }

    /// INSTALL for members that have not confirmed the record's epoch.
    pub(super) fn send_installs(&mut self, cx: &mut Context<'_>) {
        if let Part::TakingOver(over) = &self.part
            && over.stage == Stage::Claiming
        {
            return;
        }
        let record = self.record().clone();
        let sessions = cx.tables.session_count();
        let header = self.header(cx, Op::Install, record.epoch);
        for member in self.members.values_mut() {
            if member.installed >= record.epoch || member.lost || !member.is_due(cx.now_ms) {
                continue;
            }
            let install = Install {
                incarnation: member.info.incarnation,
                index: member.info.index,
                reset: false,
                configuration: record.configuration(),
                sessions,
            };
            cx.send(member.endpoint(), control::emit(header, &install));
        }
    }

    /// An answer to INSTALL.
    pub(super) fn installed(
        &mut self,
        cx: &mut Context<'_>,
        from: Endpoint,
        header: &Header,
        answer: &Installed,
    ) -> Result<(), TablesError> {
        if self.record.is_none() || matches!(self.part, Part::Standby) || header.request > cx.now_ms {
            return Ok(());
        }
        if let Some(member) = self.members.values_mut().find(|member| member.info.endpoint() == from) {
            if header.request < member.since_ms {
                return Ok(());
            }
            if answer.incarnation != member.info.incarnation {
                // An answer to a question of long ago may come from the life before. Only a member's own silence and a
                // fresh answer count.
                if header.request + RETRY_MAX_MS >= cx.now_ms {
                    return self.lost(cx, from, answer.incarnation);
                }
                return Ok(());
            }
            member.heard_ms = Some(cx.now_ms);
            // One to an earlier question says nothing of the present one.
            if !answer.refusal.is_empty() && header.epoch != self.record.as_ref().map_or(0, |record| record.epoch) {
                return Ok(());
            }
            if !answer.refusal.is_empty() {
                member.refused_ms.get_or_insert(cx.now_ms);
                if member.trouble != answer.refusal {
                    let (index, shard) = (member.info.index, self.id);
                    cx.log(Level::Error, format!("shard {shard}: member {index} ({from}) refuses: {}", answer.refusal));
                    member.trouble.clone_from(&answer.refusal);
                }
                return Ok(());
            }
            let record = self.record.as_ref().expect("checked above");
            if answer.shard == self.id && (record.tenure..=record.epoch).contains(&answer.epoch) && answer.epoch > 0 {
                member.refused_ms = None;
                member.installed = member.installed.max(answer.epoch);
                member.granted_ms = member.granted_ms.max(Some(header.request));
                member.items = answer.items;
                member.time = member.time.max(answer.time);
                member.trouble.clear();
                if let Part::TakingOver(over) = &mut self.part {
                    over.confirmed(cx.now_ms, &member.info);
                }
                self.send_heartbeat_to(cx, from);
                return self.reconcile(cx);
            }
            return Ok(());
        }
        if header.request + 2 * HELLO_MS < cx.now_ms {
            // Long under way: it may be of a life that is over.
            return Ok(());
        }
        self.greeted(cx, from, answer)
    }

    /// An answer of one that is no member.
    pub(super) fn greeted(
        &mut self,
        cx: &mut Context<'_>,
        from: Endpoint,
        answer: &Installed,
    ) -> Result<(), TablesError> {
        let record = self.record().clone();
        let Some(wanted) = record.wanted.iter().find(|wanted| wanted.endpoint() == from) else { return Ok(()) };
        let mut candidate = self.candidates.get(&from).cloned().unwrap_or_default();
        candidate.heard_ms = Some(cx.now_ms);
        candidate.incarnation = answer.incarnation;
        let was_member = self.former.contains(&answer.incarnation);
        candidate.is_empty = answer.epoch == 0 && answer.items == 0 && !was_member;
        let mut reset = false;
        let trouble = if !answer.refusal.is_empty() {
            answer.refusal.clone()
        } else if candidate.is_empty {
            String::new()
        } else if answer.epoch != 0 && answer.shard != self.id {
            format!(
                "serves shard {}, not {}: name another replica, or restart it to give its data up",
                answer.shard, self.id
            )
        } else if answer.epoch > record.epoch {
            format!("is in epoch {}, and the record says {}: is this the right authority?", answer.epoch, record.epoch)
        } else if self.serves() {
            // What it holds is older than this epoch, which others have whole; or it held something once, and a late packet
            // to that life may be under way.
            reset = record.epoch > answer.epoch;
            "holds what it had before it was removed; it is told to begin empty".to_owned()
        } else {
            format!(
                "holds {} items of epoch {}, which the record of this shard does not count on: restart it to give them up",
                answer.items, answer.epoch
            )
        };
        if candidate.trouble != trouble {
            if !trouble.is_empty() {
                cx.log(Level::Warn, format!("shard {}: replica {} ({from}) {trouble}", self.id, wanted.id));
            }
            candidate.trouble = trouble;
        }
        if reset {
            let install = self.hello(cx, &record, answer.incarnation, true);
            cx.send(from, control::emit(self.header(cx, Op::Install, record.epoch), &install));
        }
        self.candidates.insert(from, candidate);
        self.reconcile(cx)
    }

    /// A member answered as another incarnation: what it held is gone.
    pub(super) fn lost(&mut self, cx: &mut Context<'_>, at: Endpoint, incarnation: u64) -> Result<(), TablesError> {
        let shard = self.id;
        let Some(member) = self.members.values_mut().find(|member| member.info.endpoint() == at) else {
            return Ok(());
        };
        // A reset adds one; a member is never reset while it is one.
        if member.lost || incarnation == member.info.incarnation {
            return Ok(());
        }
        (member.lost, member.lost_ms) = (true, cx.now_ms);
        member.trouble = "was restarted and lost its data".to_owned();
        let level = if member.info.active { Level::Error } else { Level::Warn };
        cx.log(level, format!("shard {shard}: member {} ({at}) was restarted and lost its data", member.info.index));
        self.write(cx)?;
        self.reconcile(cx)
    }

    // Leases and heartbeats.

    pub(super) fn send_heartbeats(&mut self, cx: &mut Context<'_>) {
        if cx.now_ms < self.heartbeat_ms {
            return;
        }
        self.heartbeat_ms = cx.now_ms + cx.settings.heartbeat_ms;
        let all: Vec<_> = self.members.values().filter(|member| member.installed > 0).map(Member::endpoint).collect();
        all.into_iter().for_each(|to| self.send_heartbeat_to(cx, to));
    }

    /// Another round at once: something waits for it.
    pub(super) fn hurry(&mut self, now_ms: u64) {
        self.heartbeat_ms = now_ms;
    }

    pub(super) fn send_heartbeat_to(&mut self, cx: &mut Context<'_>, to: Endpoint) {
        let lease_from_ms = self.lease_from(cx);
        let Some(record) = &self.record else { return };
        let (tenure, epoch) = (record.tenure, record.epoch);
        let Some(member) = self.members.values().find(|member| member.endpoint() == to) else { return };
        let (stable, time, settled) = match &self.part {
            Part::Serving(serving) => (
                serving.stable,
                cx.now_ms.saturating_add_signed(serving.time_offset_ms),
                serving.epoch == epoch && record.settled,
            ),
            // Nothing is told of stability before everything is merged; the time is what the member itself has seen.
            Part::TakingOver(_) => (0, member.time, false),
            _ => return,
        };
        let donor = if !member.info.active && settled { self.donor() } else { None };
        let header = Header { time, ..self.header(cx, Op::Heartbeat, member.installed.max(tenure)) };
        let Some(member) = self.members.values_mut().find(|member| member.endpoint() == to) else { return };
        let echo = member.echo(lease_from_ms);
        member.echoed |= echo.is_some();
        member.sent_ms = cx.now_ms;
        cx.send(to, control::emit(header, &Heartbeat { stable, time, echo, donor }));
    }

    /// The moment from which the coordinator's lease runs; 0 if it is over or there is none.
    fn lease_from(&self, cx: &Context<'_>) -> u64 {
        let Some(record) = &self.record else { return 0 };
        let until_ms = match &self.part {
            Part::Serving(serving) => serving.lease_until_ms,
            Part::TakingOver(_) => {
                let present = self.members.values().filter(|member| member.installed >= record.tenure && !member.lost);
                let granted = present.map(|member| member.granted_ms.unwrap_or(0)).min().unwrap_or(0);
                if granted == 0 { 0 } else { granted + record.lease_ms }
            }
            _ => 0,
        };
        #[cfg(feature = "published")]
        if cx.mutant.echo_at_once {
            return if cx.now_ms < until_ms { u64::MAX } else { 0 };
        }
        if cx.now_ms < until_ms { until_ms - record.lease_ms } else { 0 }
    }

    /// Whom a learner copies from: the last active member, and always the same while it is one.
    pub(super) fn donor(&self) -> Option<(std::net::Ipv4Addr, u16)> {
        let donors = || self.members.values().filter(|member| member.info.active && !member.lost);
        let copying = self.members.values().find_map(|member| member.copying.as_ref()?.donor);
        let begun = copying.filter(|&(addr, port)| donors().any(|member| member.endpoint() == Endpoint { addr, port }));
        // A copy that was begun from one that is gone is not gone on with from another.
        if copying.is_some() {
            return begun;
        }
        donors().rfind(|member| !member.suspect).map(|member| (member.info.addr, member.info.port))
    }

    /// An answer to a heartbeat.
    pub(super) fn heartbeat_ack(
        &mut self,
        cx: &mut Context<'_>,
        from: Endpoint,
        header: &Header,
        ack: &HeartbeatAck,
    ) -> Result<(), TablesError> {
        let Some(record) = &self.record else { return Ok(()) };
        if matches!(self.part, Part::Standby | Part::Forming | Part::Leaving { .. })
            || !(record.tenure..=record.epoch).contains(&header.epoch)
            || header.request > cx.now_ms
        {
            return Ok(());
        }
        let Some(member) = self.members.values_mut().find(|member| member.endpoint() == from) else { return Ok(()) };
        if header.request < member.since_ms {
            return Ok(());
        }
        if ack.incarnation != member.info.incarnation {
            return self.lost(cx, from, ack.incarnation);
        }
        if member.lost && header.request <= member.lost_ms {
            return Ok(());
        }
        let was_lost = std::mem::take(&mut member.lost);
        if was_lost {
            member.trouble.clear();
        }
        member.heard_ms = Some(cx.now_ms);
        member.granted_ms = member.granted_ms.max(Some(header.request));
        if member.stamps.back().is_none_or(|&(_, stamp)| stamp < ack.stamp) && member.stamps.len() < STAMPS_MAX {
            member.stamps.push_back((cx.now_ms, ack.stamp));
        }
        // It may not answer reads before a stamp of its own is echoed: soon, but not in a tight loop.
        if !member.echoed {
            self.heartbeat_ms = self.heartbeat_ms.min(member.sent_ms + HURRY_MS);
        }
        (member.used_bytes, member.budget_bytes, member.items) = (ack.used_bytes, ack.budget_bytes, ack.items);
        let was_suspect = std::mem::take(&mut member.suspect);
        let had_trouble = member.copying.as_ref().map(|copying| copying.trouble.clone()).unwrap_or_default();
        member.copying = if member.info.active { None } else { ack.copying.clone() };
        let trouble = member.copying.as_ref().map(|copying| copying.trouble.clone()).unwrap_or_default();
        let done = member.copying.as_ref().is_some_and(|copying| copying.done);
        if trouble != had_trouble && !trouble.is_empty() {
            let (shard, index) = (self.id, member.info.index);
            cx.log(Level::Error, format!("shard {shard}: learner {index} ({from}) cannot copy: {trouble}"));
        }
        let full_changed = self.check_full(cx);
        self.extend(cx)?;
        if was_suspect || was_lost || full_changed {
            if was_suspect || was_lost {
                cx.log(Level::Info, format!("shard {}: {from} answers again", self.id));
            }
            self.write(cx)?;
        }
        if done || matches!(self.part, Part::TakingOver(_)) {
            return self.reconcile(cx);
        }
        Ok(())
    }

    /// The lease that the members of `must_ack` grant.
    pub(super) fn lease_of(&self, record: &Record, must_ack: &BTreeMap<u8, u64>, active_only: bool) -> u64 {
        let grants = must_ack.iter().filter_map(|(index, incarnation)| {
            let member = self.members.get(index).filter(|member| member.info.incarnation == *incarnation)?;
            let granted_ms = member.granted_ms.filter(|&granted_ms| granted_ms > self.suspended_ms);
            (!active_only || member.info.active).then(|| granted_ms.unwrap_or(0))
        });
        grants.min().map_or(0, |granted| if granted == 0 { 0 } else { granted + record.lease_ms })
    }

    /// The lease ran on while this host's clock stood still: it is over, until members answer anew.
    pub(super) fn suspended(&mut self, cx: &mut Context<'_>) -> Result<(), TablesError> {
        self.suspended_ms = cx.now_ms;
        let Part::Serving(serving) = &mut self.part else { return Ok(()) };
        serving.lease_until_ms = 0;
        cx.log(Level::Warn, format!("shard {}: this host was suspended: its lease is over", self.id));
        self.write(cx)
    }

    pub(super) fn extend(&mut self, cx: &mut Context<'_>) -> Result<(), TablesError> {
        let (Part::Serving(serving), Some(record)) = (&self.part, &self.record) else { return Ok(()) };
        #[cfg(feature = "published")]
        let active_only = cx.mutant.lease_of_active;
        #[cfg(not(feature = "published"))]
        let active_only = false;
        let until = self.lease_of(record, &serving.must_ack, active_only);
        let Part::Serving(serving) = &mut self.part else { unreachable!() };
        if until > serving.lease_until_ms {
            serving.lease_until_ms = until;
            if let Some(written) = &mut serving.written {
                written.lease_until_ms = until;
            }
            cx.tables.extend_lease(self.id, until)?;
        }
        Ok(())
    }

    /// Full above 15/16 of a budget, no more below 14/16. True if that changed.
    pub(super) fn check_full(&mut self, cx: &mut Context<'_>) -> bool {
        let Part::Serving(serving) = &mut self.part else { return false };
        let limit = if serving.store_full { 14 } else { 15 };
        let above = |member: &Member| u128::from(member.used_bytes) * 16 > u128::from(member.budget_bytes) * limit;
        let full = self.members.values().any(above);
        if full == serving.store_full {
            return false;
        }
        serving.store_full = full;
        let (level, what) = match full {
            true => (Level::Warn, "a replica is near its memory budget; writes that may grow the store are refused"),
            false => (Level::Info, "replicas have room again"),
        };
        cx.log(level, format!("shard {}: {what}", self.id));
        true
    }

    /// Takes reads away from members that are silent.
    pub(super) fn check_silence(&mut self, cx: &mut Context<'_>) -> Result<(), TablesError> {
        // While this agent was held up itself nobody was asked anything.
        let held_up_ms =
            cx.now_ms.saturating_sub(self.checked_ms).saturating_sub(HELD_UP_MS.max(cx.settings.heartbeat_ms));
        self.checked_ms = cx.now_ms;
        let mut changed = Vec::new();
        for member in self.members.values_mut() {
            member.heard_ms = member.heard_ms.map(|heard_ms| heard_ms.saturating_add(held_up_ms).min(cx.now_ms));
            if !member.suspect && member.silent_ms(cx.now_ms) > cx.settings.suspect_ms {
                member.suspect = true;
                changed.push(member.endpoint());
            }
        }
        if changed.is_empty() {
            return Ok(());
        }
        for at in changed {
            cx.log(Level::Warn, format!("shard {}: {at} is silent: it gets no reads", self.id));
        }
        self.write(cx)
    }

    /// CONTROL_REJECT of a member.
    pub(super) fn rejected(&mut self, cx: &mut Context<'_>, from: Endpoint, header: &Header) {
        let Some(record) = &self.record else { return };
        let is_member = self.members.values().any(|member| member.endpoint() == from);
        if is_member && Reason::from_wire(header.status) == Some(Reason::Epoch) {
            if header.epoch > record.epoch {
                // Somebody took over. The lease runs out by itself; the record will tell.
                cx.out.push(Action::Load { shard: self.id });
            } else if let Some(member) = self.members.values_mut().find(|member| member.endpoint() == from) {
                // It missed something, or was restarted: it is asked.
                if header.request + RETRY_MAX_MS >= cx.now_ms && member.installed > header.epoch {
                    member.installed = header.epoch.min(member.installed - 1);
                    member.due_now(cx.now_ms);
                }
            }
        }
    }

    /// ANSWER of a member.
    pub(super) fn answered(
        &mut self,
        cx: &mut Context<'_>,
        from: Endpoint,
        packet: &Packet<'_>,
        answer: &Answer,
    ) -> Result<(), TablesError> {
        let Some(member) = self.members.values().find(|member| member.endpoint() == from) else { return Ok(()) };
        if answer.incarnation != member.info.incarnation {
            return Ok(());
        }
        let (index, header) = (member.info.index, packet.header);
        match &mut self.part {
            Part::TakingOver(over) if header.epoch == self.record.as_ref().map_or(0, |record| record.epoch) => {
                over.answered(index, &header, answer);
                self.take_over_step(cx)
            }
            Part::Serving(serving) if header.epoch == serving.epoch => {
                let mut repairs = std::mem::take(&mut serving.repairs);
                let (must_ack, epoch) = (serving.must_ack.clone(), serving.epoch);
                repairs.answered(index, packet, answer);
                let result = repairs.act(self, cx, epoch, &must_ack);
                if let Part::Serving(serving) = &mut self.part {
                    serving.repairs = repairs;
                }
                result
            }
            _ => Ok(()),
        }
    }

    pub(super) fn collected(
        &mut self,
        cx: &mut Context<'_>,
        from: Endpoint,
        header: &Header,
        collected: Collected,
    ) -> Result<(), TablesError> {
        let Some(member) = self.members.values_mut().find(|member| member.endpoint() == from) else { return Ok(()) };
        let current = self.record.as_ref().is_some_and(|record| record.epoch == header.epoch);
        if !current || collected.incarnation != member.info.incarnation {
            return Ok(());
        }
        member.heard_ms = Some(cx.now_ms);
        member.time = member.time.max(collected.time);
        let index = member.info.index;
        if let Part::TakingOver(over) = &mut self.part {
            over.collected(index, header, collected);
            return self.take_over_step(cx);
        }
        Ok(())
    }

    pub(super) fn fetched(
        &mut self,
        cx: &mut Context<'_>,
        from: Endpoint,
        fetched: Fetched,
    ) -> Result<(), TablesError> {
        if let (Part::TakingOver(over), Fetched::Sessions { from: at, end, records }) = (&mut self.part, fetched) {
            over.fetched(from, at, end, records);
            return self.take_over_step(cx);
        }
        Ok(())
    }
}
