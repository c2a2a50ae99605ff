//! Which part the replica takes: INSTALL, HEARTBEAT and LOCATE (protocol.md, section 7).

use std::{
    fmt, mem,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
};

use serde::Serialize;
use underpass_abi::wire::{UP_EPOCH_MAX, UP_EPOCH_SHIFT};

use super::{Action, Count, Drop, Replica, sessions::SessionTable};
use crate::{
    control::{
        self, Configuration, Copying, HEARTBEAT_PADDING, Heartbeat, HeartbeatAck, Install, Installed, Located,
        OPEN_PADDING,
    },
    wire::{Endpoint, Header, Op, Packet, Reason, WireError},
};

/// Most sessions of a coordinator: what a session's index can tell apart.
pub const SESSIONS_MAX: u32 = 1 << 16;

/// The part in one epoch.
pub(super) struct Role {
    pub configuration: Configuration,
    // Of the configuration, at hand for every packet.
    pub shard: u32,
    pub tenure: u32,
    /// Packets of epochs before this were for another life at this address, or are of another tenure.
    pub first: u32,
    pub epoch: u32,
    pub coordinator: Endpoint,
    pub index: u8,
    pub learner: bool,
    /// When this tenure was heard of first, by the replica's own clock: no lease of it is older.
    pub since_ms: u64,
    /// Reads are answered until then.
    pub lease_until_ms: AtomicU64,
    /// A learner that has copied everything.
    pub copied: AtomicBool,
    pub sessions: SessionTable,
}

/// What an operator wants to read in the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// It takes part in a new epoch.
    Installed {
        /// Shard.
        shard: u32,
        /// Epoch.
        epoch: u32,
        /// Member index.
        index: u8,
        /// Active, or a learner.
        active: bool,
        /// Coordinator.
        coordinator: Endpoint,
        /// Items held.
        items: u64,
    },
    /// It gave up everything, as ordered, and is another incarnation.
    Reset {
        /// Who ordered it.
        from: Endpoint,
        /// Its new incarnation.
        incarnation: u64,
        /// Items given up.
        items: u64,
    },
    /// It refused to take part, and why.
    Refused {
        /// Who asked.
        from: Endpoint,
        /// Why not, and what to do.
        refusal: String,
    },
    /// It begins to copy.
    Copying {
        /// From whom.
        donor: Endpoint,
    },
    /// It has copied everything.
    Copied {
        /// Items.
        items: u64,
    },
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Installed { shard, epoch, index, active, coordinator, items } => {
                let part = if *active { "member" } else { "learner" };
                write!(
                    f,
                    "takes part in shard {shard}, epoch {epoch}, as {part} {index} of coordinator {coordinator}, with \
                     {items} items"
                )
            }
            Self::Reset { from, incarnation, items } => {
                write!(f, "gave up {items} items as {from} ordered: incarnation {incarnation}")
            }
            Self::Refused { from, refusal } => write!(f, "refused an INSTALL from {from}: {refusal}"),
            Self::Copying { donor } => write!(f, "copies from {donor}"),
            Self::Copied { items } => write!(f, "has copied {items} items"),
        }
    }
}

/// What becomes of an INSTALL.
enum Decision {
    /// A new epoch, with everything that is held.
    Accept,
    /// This very part already.
    Already,
    /// It is for another life of this replica: the sender is told this one.
    Tell,
    /// Give up everything.
    Reset,
    Refuse(String),
}

impl Replica {
    /// Handles a control packet.
    pub fn control(&self, now_ms: u64, from: Endpoint, datagram: &[u8]) -> Vec<Action> {
        let packet = match Packet::parse(datagram) {
            Ok(packet) => packet,
            Err(WireError::Truncated) => return dropped(Drop::Truncated),
            Err(_) => return dropped(Drop::Op),
        };
        match packet.header.op {
            // From clients.
            Op::Locate => return self.locate(from, &packet),
            // A client that takes a replica for its coordinator.
            Op::Open | Op::Close => return self.client_reject(Reason::NotCoordinator, from, &packet),
            _ if !control::is_sealed(datagram, self.cluster_key) => return dropped(Drop::Unsealed),
            _ => {}
        }
        match packet.header.op {
            Op::Install => self.install(now_ms, from, &packet),
            Op::Heartbeat => self.heartbeat(now_ms, from, &packet),
            Op::Collect => self.collect(from, &packet),
            Op::Query => self.query(from, &packet),
            Op::Abort => self.abort(from, &packet),
            Op::Pull => self.pull(now_ms, from, &packet),
            Op::Fetch => self.fetch(from, &packet),
            Op::Fetched => self.fetched(now_ms, from, &packet),
            _ => dropped(Drop::Op),
        }
    }

    /// A datagram under the cluster's seal.
    pub(super) fn send(&self, to: Endpoint, header: Header, key: &[u8], value: &[u8]) -> Action {
        let header = Header { token: 0, ..header };
        Action::Send { to, bytes: control::seal(header.datagram(key, value), self.cluster_key) }
    }

    pub(super) fn send_document<T: Serialize>(&self, to: Endpoint, header: Header, message: &T) -> Action {
        let header = Header { token: 0, ..header };
        Action::Send { to, bytes: control::seal(control::emit(header, message), self.cluster_key) }
    }

    /// CONTROL_REJECT to an agent or replica.
    pub(super) fn control_reject(&self, reason: Reason, from: Endpoint, packet: &Packet<'_>) -> Vec<Action> {
        let header = Header { op: Op::ControlReject, status: reason.to_wire(), epoch: self.epoch(), ..packet.header };
        vec![Action::Count(Count::ControlReject(reason)), self.send(from, header, &[], &[])]
    }

    /// CONTROL_REJECT to a client, which looks for its own token.
    fn client_reject(&self, reason: Reason, from: Endpoint, packet: &Packet<'_>) -> Vec<Action> {
        let header = Header { op: Op::ControlReject, status: reason.to_wire(), epoch: self.epoch(), ..packet.header };
        vec![Action::Count(Count::ControlReject(reason)), Action::Send { to: from, bytes: header.datagram(&[], &[]) }]
    }

    fn epoch(&self) -> u32 {
        self.membership().map_or(0, |membership| membership.epoch)
    }

    /// What the packet of an agent fails for, if it is not from the role's coordinator or not of its epochs.
    pub(super) fn not_obeyed(
        &self,
        role: Option<&Role>,
        from: Endpoint,
        header: &Header,
        exactly: bool,
    ) -> Option<Reason> {
        let Some(role) = role else { return Some(Reason::Epoch) };
        if header.shard != role.shard {
            Some(Reason::Shard)
        } else if exactly && header.epoch != role.epoch || !self.takes(role, header.epoch) {
            Some(Reason::Epoch)
        } else if from.addr != role.coordinator.addr && !self.accepts_old_tenure() {
            Some(Reason::NotCoordinator)
        } else {
            None
        }
    }

    fn install(&self, now_ms: u64, from: Endpoint, packet: &Packet<'_>) -> Vec<Action> {
        let Some(install) = control::parse::<Install>(packet) else {
            return self.control_reject(Reason::Malformed, from, packet);
        };
        let is_question = install.incarnation != self.incarnation();
        if from.addr != install.configuration.coordinator_addr && !is_question {
            return self.control_reject(Reason::NotCoordinator, from, packet);
        }

        let mut actions = Vec::new();
        let mut refusal = String::new();
        let (mut shard, mut epoch) = (0, 0);
        {
            let mut guard = self.role.write().expect("a thread panicked while it installed an epoch");
            match self.decide(guard.as_ref(), &install) {
                Decision::Accept => {
                    let role = self.accept(now_ms, guard.take(), &install);
                    actions.push(Action::Count(Count::Install));
                    actions.push(Action::Note(Note::Installed {
                        shard: role.shard,
                        epoch: role.epoch,
                        index: role.index,
                        active: !role.learner,
                        coordinator: role.coordinator,
                        items: self.usage().items,
                    }));
                    *guard = Some(role);
                }
                Decision::Reset => {
                    let items = self.usage().items;
                    *guard = None;
                    let incarnation = self.reset();
                    actions.push(Action::Count(Count::Reset));
                    actions.push(Action::Note(Note::Reset { from, incarnation, items }));
                }
                Decision::Already => actions.push(Action::Count(Count::Install)),
                Decision::Tell => actions.push(Action::Count(Count::InstallRefused)),
                Decision::Refuse(why) => {
                    refusal = why;
                    actions.push(Action::Count(Count::InstallRefused));
                    actions.push(Action::Note(Note::Refused { from, refusal: refusal.clone() }));
                }
            }
            if let Some(role) = &*guard {
                (shard, epoch) = (role.shard, role.epoch);
            }
        }

        let answer = Installed {
            incarnation: self.incarnation(),
            shard,
            epoch,
            refusal,
            items: self.usage().items,
            time: self.time.load(Relaxed),
        };
        actions.push(self.send_document(from, Header { op: Op::Installed, ..packet.header }, &answer));
        actions
    }

    fn decide(&self, role: Option<&Role>, install: &Install) -> Decision {
        let Install { incarnation, index, reset, configuration, sessions } = install;
        if *incarnation != self.incarnation() {
            return Decision::Tell;
        }
        if let Err(why) = configuration.validate() {
            return Decision::Refuse(why);
        }
        let Configuration { shard, epoch, tenure, .. } = *configuration;
        if epoch == 0 || epoch > UP_EPOCH_MAX {
            return Decision::Refuse(format!("epoch {epoch} is not within 1 to {UP_EPOCH_MAX}"));
        }
        if let Some(role) = role.filter(|role| role.shard != shard) {
            return Decision::Refuse(format!(
                "it serves shard {}, and keeps its data; start another replica for shard {shard}",
                role.shard
            ));
        }
        let held_epoch = role.map_or(0, |role| role.epoch);
        if epoch < held_epoch {
            return Decision::Refuse(format!("epoch {epoch} is over: it is in epoch {held_epoch}"));
        }
        if *reset {
            if configuration.members.iter().any(|member| member.incarnation == *incarnation) {
                return Decision::Refuse(format!(
                    "it is a member in epoch {epoch}, and a member does not give up its data; remove it first"
                ));
            }
            if epoch == held_epoch {
                return Decision::Refuse(format!(
                    "it is in epoch {epoch}; only a later one can have it give up its data"
                ));
            }
            return Decision::Reset;
        }
        if *sessions == 0 || *sessions > SESSIONS_MAX {
            return Decision::Refuse(format!("{sessions} sessions are not within 1 to {SESSIONS_MAX}"));
        }
        let Some(member) = configuration.member(*index).filter(|member| member.incarnation == *incarnation) else {
            return Decision::Refuse(format!(
                "epoch {epoch} does not name it (incarnation {incarnation}) as member {index}"
            ));
        };
        let Some(role) = role else { return Decision::Accept };
        if epoch == role.epoch {
            return if (&role.configuration, role.index) == (configuration, *index) {
                Decision::Already
            } else {
                Decision::Refuse(format!(
                    "in epoch {epoch} it is member {} of coordinator {}; another configuration needs a higher epoch",
                    role.index, role.coordinator
                ))
            };
        }
        let same_tenure = tenure == role.tenure && configuration.coordinator() == role.coordinator;
        if !same_tenure && tenure <= role.epoch {
            return Decision::Refuse(format!(
                "tenure {tenure} of {} is not later than epoch {held_epoch} of {}, in which it takes part",
                configuration.coordinator(),
                role.coordinator
            ));
        }
        // What a learner holds is of use in its tenure alone: no take-over has looked at it (hole 17).
        match (role.learner, member.active) {
            (false, false) => {
                Decision::Refuse("it is active: to begin as a learner it must give up its data first".into())
            }
            (true, true) if !self.may_be_active(role) => {
                Decision::Refuse("it has not copied everything, and so cannot be active".into())
            }
            (true, false) if !(same_tenure || self.store.is_empty() && role.sessions.is_empty()) => Decision::Refuse(
                "it learned under another coordinator: to begin again it must give up its data first".into(),
            ),
            _ => Decision::Accept,
        }
    }

    fn may_be_active(&self, role: &Role) -> bool {
        #[cfg(feature = "published")]
        if self.published.half_learner {
            return true;
        }
        role.copied.load(Relaxed)
    }

    /// The role in the new epoch. Everything held stays; what was frozen thaws.
    fn accept(&self, now_ms: u64, role: Option<Role>, install: &Install) -> Role {
        let configuration = install.configuration.clone();
        let mut next = Role {
            shard: configuration.shard,
            tenure: configuration.tenure,
            // Of a life that takes part for the first time: no epoch before named it, for all it knows.
            first: configuration.epoch,
            epoch: configuration.epoch,
            coordinator: configuration.coordinator(),
            index: install.index,
            learner: configuration.member(install.index).is_some_and(|member| !member.active),
            since_ms: now_ms,
            lease_until_ms: AtomicU64::new(0),
            copied: AtomicBool::new(false),
            sessions: SessionTable::default(),
            configuration,
        };
        if let Some(mut role) = role {
            next.first = next.tenure.max(role.first);
            if role.tenure == next.tenure {
                next.since_ms = role.since_ms;
                next.lease_until_ms = mem::take(&mut role.lease_until_ms);
                next.copied = mem::take(&mut role.copied);
                self.fetching().change(&next);
            } else {
                self.fetching().forget();
            }
            next.sessions = role.sessions;
            if role.learner && !next.learner {
                self.fetching().forget();
                self.store.forget_tombstones();
            }
        }
        next.sessions.grow(install.sessions as usize);
        next.sessions.thaw();
        next
    }

    /// Empties it; the caller has locked the role for writing. Returns the new incarnation.
    fn reset(&self) -> u64 {
        self.store.clear();
        self.stable.store(0, Relaxed);
        self.time.store(0, Relaxed);
        self.fetching().forget();
        self.cuts().forget();
        let incarnation = self.incarnation().wrapping_add(1).max(1);
        self.incarnation.store(incarnation, Relaxed);
        incarnation
    }

    fn heartbeat(&self, now_ms: u64, from: Endpoint, packet: &Packet<'_>) -> Vec<Action> {
        let header = &packet.header;
        let mut actions = vec![Action::Count(Count::Heartbeat)];
        let mut copying = None;
        let refused = 'obeyed: {
            // Held until the store is settled: `stable` of one epoch is never applied in another.
            let guard = self.role.read().expect("a thread panicked while it installed an epoch");
            let Some(role) = &*guard else {
                // Not a word of it is believed, but the answer tells an agent of this life: anybody may be it, so only who
                // asked with as many bytes gets that answer.
                break 'obeyed (packet.value.len() < HEARTBEAT_PADDING).then_some(Reason::Malformed);
            };
            if let Some(reason) = self.not_obeyed(Some(role), from, header, false) {
                break 'obeyed Some(reason);
            }
            let heartbeat = control::parse::<Heartbeat>(packet)
                // No write of this epoch, and so no `stable`, is beyond its numbers.
                .filter(|heartbeat| heartbeat.stable >> UP_EPOCH_SHIFT <= u64::from(role.epoch));
            let Some(heartbeat) = heartbeat else { break 'obeyed Some(Reason::Malformed) };
            self.see_time(heartbeat.time);
            if let Some(stamp) = heartbeat.echo.filter(|stamp| (role.since_ms..=now_ms).contains(stamp)) {
                let until_ms = stamp.saturating_add(role.configuration.lease_ms);
                role.lease_until_ms.fetch_max(until_ms, Relaxed);
            }
            if self.stable.fetch_max(heartbeat.stable, Relaxed) < heartbeat.stable {
                self.store.settle(heartbeat.stable, self.keeps_tombstones(role));
            }
            copying = match heartbeat.donor {
                Some(donor) if role.learner => {
                    let progress = self.copy_from(now_ms, role, donor, &mut actions);
                    Some(progress)
                }
                _ => self.fetching().copying(),
            };
            None
        };
        // The role is released first: the answer reads it, and a lock for reading is not to be taken twice.
        if let Some(reason) = refused {
            return self.control_reject(reason, from, packet);
        }
        actions.insert(1, self.heartbeat_ack(now_ms, from, packet, copying));
        actions
    }

    /// Whether tombstones stay though they are stable.
    pub(super) fn keeps_tombstones(&self, role: &Role) -> bool {
        #[cfg(feature = "published")]
        if self.published.learner_drops_tombstones {
            return false;
        }
        role.learner
    }

    fn heartbeat_ack(&self, now_ms: u64, to: Endpoint, packet: &Packet<'_>, copying: Option<Copying>) -> Action {
        let usage = self.usage();
        let answer = HeartbeatAck {
            incarnation: self.incarnation(),
            stamp: now_ms,
            used_bytes: usage.used_bytes,
            budget_bytes: usage.budget_bytes,
            items: usage.items,
            copying,
        };
        self.send_document(to, Header { op: Op::HeartbeatAck, ..packet.header }, &answer)
    }

    /// LOCATE: a client that lost its coordinator asks whom it finds.
    fn locate(&self, from: Endpoint, packet: &Packet<'_>) -> Vec<Action> {
        let configuration = {
            let role = self.role.read().expect("a thread panicked while it installed an epoch");
            role.as_ref().filter(|role| role.shard == packet.header.shard).map(|role| role.configuration.clone())
        };
        let Some(configuration) = configuration else { return self.client_reject(Reason::Shard, from, packet) };
        if packet.value.len() < OPEN_PADDING {
            return self.client_reject(Reason::Malformed, from, packet);
        }
        let header = Header { op: Op::Located, epoch: configuration.epoch, ..packet.header };
        let bytes = control::emit(header, &Located { configuration, serves: false });
        vec![Action::Count(Count::Located), Action::Send { to: from, bytes }]
    }
}

pub(super) fn dropped(reason: Drop) -> Vec<Action> {
    vec![Action::Count(Count::Drop(reason))]
}
