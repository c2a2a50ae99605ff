//! Changes of members while a shard serves: the record says who shall take part, the tables who does. `docs/protocol.md`,
//! section 7, "Change of members" and what follows it.

use std::collections::{BTreeMap, BTreeSet};

use underpass_abi::abi::{up_config, up_member};

use super::{
    Level, Record, TablesError,
    member::Member,
    members::HELLO_MS,
    shard::{Context, Part, Serving, Shard},
};
use crate::{
    control::{self, MemberInfo},
    wire::{Endpoint, MEMBERS_MAX, Reason},
};

/// Sessions scanned for each millisecond between scans: a scan of a large table takes a while.
const SCAN_PER_MS: usize = 1024;

impl Shard {
    // The tables.

    /// The data path's configuration with these members.
    pub(super) fn config(
        &self,
        serving: &Serving,
        epoch: u32,
        must_ack: &BTreeMap<u8, u64>,
        refuse: bool,
    ) -> up_config {
        let mut config = up_config {
            shard: self.id,
            epoch,
            lease_until_ms: serving.lease_until_ms,
            time_offset_ms: serving.time_offset_ms,
            store_full: serving.store_full.into(),
            ..up_config::default()
        };
        let readers = |strict: bool| {
            self.members.values().filter(move |member| {
                member.info.active
                    && !member.lost
                    && (!strict || !member.suspect)
                    && must_ack.get(&member.info.index) == Some(&member.info.incarnation)
            })
        };
        let strict = readers(true).next().is_some();
        for member in readers(strict) {
            config.serving |= 1 << member.info.index;
            config.serving_list[usize::from(config.serving_count)] = member.info.index;
            config.serving_count += 1;
        }
        for (&index, &incarnation) in must_ack {
            config.must_ack |= 1 << index;
            config.must_ack_list[usize::from(config.must_ack_count)] = index;
            config.must_ack_count += 1;
            let known = self.members.get(&index).filter(|member| member.info.incarnation == incarnation);
            config.members[usize::from(index)] = match (known, &serving.written) {
                (Some(member), _) => up_member {
                    addr: u32::from(member.info.addr).to_be(),
                    port: member.info.port.to_be(),
                    ..up_member::default()
                },
                (None, Some(written)) => written.members[usize::from(index)],
                (None, None) => up_member::default(),
            };
            if known.is_some_and(|member| member.lost) {
                // Its acknowledgement never comes: better no new write than one that waits.
                config.refuse_writes = Reason::NoMember.to_wire();
            }
        }
        if refuse {
            config.lease_until_ms = 0;
        }
        config
    }

    /// Tells the tables who gets reads, and what is refused, if that changed.
    pub(super) fn write(&mut self, cx: &mut Context<'_>) -> Result<(), TablesError> {
        let Part::Serving(serving) = &self.part else { return Ok(()) };
        let config = self.config(serving, serving.epoch, &serving.must_ack, false);
        self.write_config(cx, config)
    }

    pub(super) fn write_config(&mut self, cx: &mut Context<'_>, config: up_config) -> Result<(), TablesError> {
        let Part::Serving(serving) = &mut self.part else { return Ok(()) };
        if serving.written.is_none_or(|written| !same(&written, &config)) {
            cx.tables.configure(&config)?;
            serving.written = Some(config);
        }
        Ok(())
    }

    // Changes of members.

    pub(super) fn reconcile_serving(&mut self, cx: &mut Context<'_>) -> Result<(), TablesError> {
        if self.is_storing() {
            return Ok(());
        }
        let record = self.record().clone();
        // Lost members go first, also out of a change that is not complete.
        if self.remove_lost(cx, &record) {
            return Ok(());
        }
        let Part::Serving(serving) = &self.part else { return Ok(()) };
        if serving.epoch < record.epoch {
            if self.members.values().all(|member| member.installed >= record.epoch) {
                self.apply(cx, &record)?;
                return self.reconcile_serving(cx);
            }
            return Ok(());
        }
        if !record.settled {
            self.store(cx, Record { settled: true, ..record }, Vec::new());
            return Ok(());
        }
        if serving.transfer.is_some() || self.reserve(cx, false) {
            return Ok(());
        }
        self.change(cx, record);
        Ok(())
    }

    /// The tables take the record's members: first the union, then, when every CPU uses the new epoch, the new ones alone.
    pub(super) fn apply(&mut self, cx: &mut Context<'_>, record: &Record) -> Result<(), TablesError> {
        let Part::Serving(serving) = &self.part else { return Ok(()) };
        let old = serving.must_ack.clone();
        let new: BTreeMap<u8, u64> = record.members.iter().map(|member| (member.index, member.incarnation)).collect();
        for index in new.keys().filter(|index| !old.contains_key(index)) {
            #[cfg(feature = "published")]
            if cx.mutant.keep_bits {
                continue;
            }
            cx.tables.forget_acks(self.id, *index)?;
        }
        let mut union = old.clone();
        union.extend(new.iter().map(|(&index, &incarnation)| (index, incarnation)));
        let lease = self.lease_of(record, &new, false);
        let Part::Serving(serving) = &mut self.part else { return Ok(()) };
        serving.lease_until_ms = serving.lease_until_ms.max(lease);
        serving.repairs.forget();
        let Part::Serving(serving) = &self.part else { return Ok(()) };
        let first = self.config(serving, record.epoch, &union, false);
        let last = self.config(serving, record.epoch, &new, false);
        #[cfg(feature = "published")]
        let in_one_step = cx.mutant.one_step_removal;
        #[cfg(not(feature = "published"))]
        let in_one_step = false;
        if !in_one_step {
            self.write_config(
                cx,
                up_config {
                    serving: last.serving,
                    serving_count: last.serving_count,
                    serving_list: last.serving_list,
                    ..first
                },
            )?;
        }
        self.write_config(cx, last)?;
        let Part::Serving(serving) = &mut self.part else { return Ok(()) };
        (serving.epoch, serving.must_ack) = (record.epoch, new);
        let names: Vec<_> = record
            .members
            .iter()
            .map(|member| {
                format!("{} ({}{})", member.id, member.endpoint(), if member.active { "" } else { ", learner" })
            })
            .collect();
        cx.log(Level::Info, format!("shard {}: epoch {} with replicas {}", self.id, record.epoch, names.join(", ")));
        self.hurry(cx.now_ms);
        Ok(())
    }

    /// Removes members that are lost or silent for long. True if a change was begun.
    pub(super) fn remove_lost(&mut self, cx: &mut Context<'_>, record: &Record) -> bool {
        let now_ms = cx.now_ms;
        let alive = |member: &Member| !member.lost && member.silent_ms(now_ms) <= cx.settings.suspect_ms;
        // Whoever hears nobody is the one that is cut off.
        if !self.members.values().any(|member| member.info.active && alive(member)) {
            let lost = self.members.values().filter(|member| member.info.active).all(|member| member.lost);
            let trouble = match lost {
                true => "every replica has lost its data; if none can be brought back: `underpass shard begin-empty`",
                false => "no active replica answers",
            };
            self.set_trouble(cx, Level::Error, trouble.to_owned());
            return false;
        }
        self.set_trouble(cx, Level::Info, String::new());
        let lost_ms = cx.settings.lost_ms;
        let refuses = |member: &Member| member.refused_ms.is_some_and(|since_ms| now_ms > since_ms + lost_ms);
        let gone = |member: &Member| member.lost || refuses(member) || member.silent_ms(now_ms) > lost_ms;
        let mut remove: BTreeSet<u8> =
            self.members.values().filter(|member| gone(member)).map(|member| member.info.index).collect();
        // A learner whose donor is gone, or that cannot go on, begins again.
        for member in self.members.values() {
            let Some(copying) = &member.copying else { continue };
            let donor = copying.donor.and_then(|(addr, port)| {
                self.members.values().find(|donor| donor.endpoint() == Endpoint { addr, port } && donor.info.active)
            });
            let donor_gone = copying.donor.is_some() && donor.is_none_or(|donor| remove.contains(&donor.info.index));
            if !copying.done && donor_gone {
                remove.insert(member.info.index);
            }
        }
        if remove.is_empty() {
            return false;
        }
        for index in &remove {
            let member = &self.members[index];
            let why = if member.lost {
                "it lost its data".to_owned()
            } else if refuses(member) {
                format!("it refuses: {}", member.trouble)
            } else if gone(member) {
                format!("silent for {} ms", member.silent_ms(now_ms))
            } else {
                "its donor is gone".to_owned()
            };
            cx.log(
                Level::Error,
                format!("shard {}: removes replica {} ({}): {why}", self.id, member.info.id, member.endpoint()),
            );
        }
        let members = record.members.iter().filter(|member| !remove.contains(&member.index)).cloned().collect();
        self.store(cx, Record { epoch: record.epoch + 1, members, settled: false, ..record.clone() }, Vec::new());
        true
    }

    /// The next change that the record and the replicas call for, if any. Everything before is complete.
    pub(super) fn change(&mut self, cx: &mut Context<'_>, record: Record) {
        let wanted = |member: &MemberInfo| {
            record.wanted.iter().any(|wanted| wanted.endpoint() == member.endpoint() && wanted.id == member.id)
        };
        let others_active = |index: u8| record.members.iter().any(|other| other.active && other.index != index);
        // No longer wanted.
        if let Some(member) = record.members.iter().find(|member| !wanted(member) && others_active(member.index)) {
            let members = record.members.iter().filter(|other| other.index != member.index).cloned().collect();
            return self.store(cx, Record { epoch: record.epoch + 1, members, settled: false, ..record }, Vec::new());
        }
        // A replacement is active: the old one goes.
        let replaced = record.wanted.iter().find_map(|by| {
            let old = by.replaces?;
            record.members.iter().any(|member| member.id == by.id && member.active).then_some((by.id, old))
        });
        if let Some((by, old)) = replaced {
            let mut next = record.clone();
            next.wanted.retain(|wanted| wanted.id != old);
            next.wanted.iter_mut().filter(|wanted| wanted.id == by).for_each(|wanted| wanted.replaces = None);
            return self.store(cx, next, Vec::new());
        }
        // A learner that has everything.
        #[cfg(feature = "published")]
        let early = cx.mutant.promote_early;
        #[cfg(not(feature = "published"))]
        let early = false;
        let ready = self.members.values().find(|member| {
            let has_all = |copying: &control::Copying| copying.done || early;
            !member.info.active && !member.lost && !member.suspect && member.copying.as_ref().is_some_and(has_all)
        });
        if let Some(index) = ready.map(|member| member.info.index) {
            let mut next = Record { epoch: record.epoch + 1, settled: false, ..record };
            next.members.iter_mut().filter(|member| member.index == index).for_each(|member| member.active = true);
            return self.store(cx, next, Vec::new());
        }
        // A newcomer, one at a time.
        if record.members.iter().any(|member| !member.active) {
            return;
        }
        let newcomer = record.wanted.iter().find_map(|wanted| {
            let candidate = self.candidates.get(&wanted.endpoint())?;
            let fresh = candidate.heard_ms.is_some_and(|heard_ms| heard_ms + 2 * HELLO_MS >= cx.now_ms);
            (candidate.is_empty && fresh).then_some((wanted, candidate.incarnation))
        });
        let free = (0..MEMBERS_MAX as u8).find(|index| !self.members.contains_key(index));
        if let (Some((wanted, incarnation)), Some(index)) = (newcomer, free) {
            cx.log(
                Level::Info,
                format!("shard {}: replica {} ({}) joins as a learner", self.id, wanted.id, wanted.endpoint()),
            );
            let mut next = Record { epoch: record.epoch + 1, settled: false, ..record.clone() };
            next.members.push(MemberInfo {
                index,
                id: wanted.id,
                incarnation,
                addr: wanted.addr,
                port: wanted.port,
                active: false,
            });
            next.members.sort_by_key(|member| member.index);
            self.store(cx, next, Vec::new());
        }
    }

    /// What is stable now, and writes that are stuck.
    pub(super) fn repair(&mut self, cx: &mut Context<'_>) -> Result<(), TablesError> {
        let Part::Serving(serving) = &mut self.part else { return Ok(()) };
        if cx.now_ms < serving.scan_ms {
            return Ok(());
        }
        let bound = cx.sessions.bound();
        serving.scan_ms = cx.now_ms + cx.settings.heartbeat_ms.max((bound / SCAN_PER_MS) as u64);
        let scan = cx.tables.scan(self.id, bound)?;
        serving.stable = serving.stable.max(scan.stable);
        serving.unresolved = scan.unresolved;
        // Within one epoch, and not while it changes.
        let quiet = self.record.as_ref().is_some_and(|record| record.epoch == serving.epoch) && self.storing.is_none();
        if scan.unresolved == 0 || !quiet {
            serving.repairs.forget();
            return Ok(());
        }
        let mut repairs = std::mem::take(&mut serving.repairs);
        let must_ack = serving.must_ack.clone();
        let epoch = serving.epoch;
        let result = repairs.step(self, cx, epoch, &must_ack);
        if let Part::Serving(serving) = &mut self.part {
            serving.repairs = repairs;
        }
        result
    }
}

/// Equal but for what the tables fill in or is raised in place.
fn same(a: &up_config, b: &up_config) -> bool {
    let bare = |config: &up_config| {
        let mut config = up_config { floor: 0, lease_until_ms: u64::from(config.lease_until_ms == 0), ..*config };
        config.members.iter_mut().for_each(|member| member.next_hop = [0; 6]);
        config
    };
    bare(a) == bare(b)
}
