//! Which part the replica takes: INSTALL and HEARTBEAT (protocol.md, section 10).

use std::{fmt, sync::atomic::Ordering::Relaxed};

use underpass_abi::wire::{UP_EPOCH_MAX, UP_EPOCH_SHIFT};

use super::{Action, Count, Drop, Replica, sessions::SessionTable};
use crate::{
    control::{self, HEARTBEAT_PADDING, Heartbeat, HeartbeatAck, Install, Installed},
    wire::{Endpoint, Header, Op, Packet, Reason, WireError},
};

/// Most sessions of a coordinator: what a session's index can tell apart.
pub const SESSIONS_MAX: u32 = 1 << 16;

/// The part in one epoch.
pub(super) struct Role {
    pub shard: u32,
    pub epoch: u32,
    pub index: u8,
    pub coordinator: Endpoint,
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
        /// Coordinator.
        coordinator: Endpoint,
        /// Items kept from the epoch before.
        items: u64,
    },
    /// It refused to, and why.
    Refused {
        /// Who asked.
        from: Endpoint,
        /// Why not, and what to do.
        refusal: String,
    },
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Installed { shard, epoch, index, coordinator, items } => write!(
                f,
                "takes part in shard {shard}, epoch {epoch}, as member {index} of coordinator {coordinator}, with {items} items"
            ),
            Self::Refused { from, refusal } => write!(f, "refused an INSTALL from {from}: {refusal}"),
        }
    }
}

/// What becomes of an INSTALL.
enum Decision {
    /// A new part, with the data that is held: none, or what an epoch that ended in order left.
    Accept,
    /// This very part already.
    Already,
    /// The configuration names another life of this replica: it is told this one.
    Tell,
    Refuse(String),
}

impl Replica {
    /// Handles a control packet.
    pub fn control(&self, from: Endpoint, datagram: &[u8]) -> Vec<Action> {
        let packet = match Packet::parse(datagram) {
            Ok(packet) => packet,
            Err(WireError::Truncated) => return vec![Action::Count(Count::Drop(Drop::Truncated))],
            Err(_) => return vec![Action::Count(Count::Drop(Drop::Op))],
        };
        match packet.header.op {
            Op::Install => self.install(from, &packet),
            Op::Heartbeat => self.heartbeat(from, &packet),
            // A client that takes a replica for its coordinator.
            Op::Open | Op::Close => self.control_reject(Reason::NotCoordinator, from, &packet),
            _ => vec![Action::Count(Count::Drop(Drop::Op))],
        }
    }

    fn epoch(&self) -> u32 {
        self.membership().map_or(0, |membership| membership.epoch)
    }

    fn control_reject(&self, reason: Reason, from: Endpoint, packet: &Packet<'_>) -> Vec<Action> {
        let header = Header { op: Op::ControlReject, status: reason.to_wire(), epoch: self.epoch(), ..packet.header };
        vec![Action::Count(Count::ControlReject(reason)), Action::Send { to: from, bytes: header.datagram(&[], &[]) }]
    }

    fn install(&self, from: Endpoint, packet: &Packet<'_>) -> Vec<Action> {
        let Some(install) = control::parse::<Install>(packet) else {
            return self.control_reject(Reason::Malformed, from, packet);
        };
        let configuration = &install.configuration;
        if from.addr != configuration.coordinator_addr {
            // Without a long answer: whoever forges an address gets nothing out of us.
            return self.control_reject(Reason::NotCoordinator, from, packet);
        }

        let mut actions = Vec::new();
        let mut refusal = String::new();
        let mut takes_part = true;
        {
            let mut role = self.role.write().expect("a thread panicked while it installed an epoch");
            match self.decide(role.as_ref(), &install) {
                Decision::Accept => {
                    // Everything held was resolved, and every write of this epoch is above its floor.
                    let floor = u64::from(configuration.epoch) << UP_EPOCH_SHIFT;
                    self.store.settle_all(floor);
                    self.stable.fetch_max(floor, Relaxed);
                    let coordinator =
                        Endpoint { addr: configuration.coordinator_addr, port: configuration.coordinator_port };
                    *role = Some(Role {
                        shard: configuration.shard,
                        epoch: configuration.epoch,
                        index: install.index,
                        coordinator,
                        sessions: SessionTable::new(install.sessions as usize),
                    });
                    actions.push(Action::Note(Note::Installed {
                        shard: configuration.shard,
                        epoch: configuration.epoch,
                        index: install.index,
                        coordinator,
                        items: self.usage().items,
                    }));
                    actions.push(Action::Count(Count::Install));
                }
                Decision::Already => actions.push(Action::Count(Count::Install)),
                Decision::Tell => {
                    takes_part = false;
                    actions.push(Action::Count(Count::InstallRefused));
                }
                Decision::Refuse(why) => {
                    refusal = why;
                    actions.push(Action::Note(Note::Refused { from, refusal: refusal.clone() }));
                    actions.push(Action::Count(Count::InstallRefused));
                }
            }
        }

        let answer = Installed {
            incarnation: self.incarnation,
            shard: self.membership().map_or(0, |membership| membership.shard),
            epoch: if takes_part { self.epoch() } else { 0 },
            refusal,
            items: self.usage().items,
            time: 0,
        };
        let header = Header { op: Op::Installed, ..packet.header };
        actions.push(Action::Send { to: from, bytes: control::emit(header, &answer) });
        actions
    }

    fn decide(&self, role: Option<&Role>, install: &Install) -> Decision {
        let Install { index, configuration, sessions, .. } = install;
        if let Err(why) = configuration.validate() {
            return Decision::Refuse(why);
        }
        let Some(member) = configuration.members.get(usize::from(*index)) else {
            return Decision::Refuse(format!(
                "member index {index} is not in a configuration of {} members",
                configuration.members.len()
            ));
        };
        if member.incarnation != self.incarnation {
            return Decision::Tell;
        }
        let (shard, epoch) = (configuration.shard, configuration.epoch);
        if epoch == 0 || epoch > UP_EPOCH_MAX {
            return Decision::Refuse(format!("epoch {epoch} is not within 1 to {UP_EPOCH_MAX}"));
        }
        if *sessions == 0 || *sessions > SESSIONS_MAX {
            return Decision::Refuse(format!("{sessions} sessions are not within 1 to {SESSIONS_MAX}"));
        }
        let held_epoch = match role {
            None => 0,
            Some(role) => {
                let coordinator =
                    Endpoint { addr: configuration.coordinator_addr, port: configuration.coordinator_port };
                if role.shard != shard {
                    return Decision::Refuse(format!(
                        "it serves shard {}; start another replica for shard {shard}",
                        role.shard
                    ));
                }
                if epoch < role.epoch {
                    return Decision::Refuse(format!("epoch {epoch} is over: it is in epoch {}", role.epoch));
                }
                if epoch == role.epoch {
                    let same = (role.coordinator, role.index, role.sessions.len())
                        == (coordinator, *index, *sessions as usize);
                    return if same {
                        Decision::Already
                    } else {
                        Decision::Refuse(format!(
                            "in epoch {epoch} it is member {} of coordinator {} with {} sessions; another part needs a higher epoch",
                            role.index,
                            role.coordinator,
                            role.sessions.len()
                        ))
                    };
                }
                role.epoch
            }
        };
        if self.store.is_empty() {
            return Decision::Accept;
        }
        let _ = held_epoch;
        Decision::Accept
    }

    fn heartbeat(&self, from: Endpoint, packet: &Packet<'_>) -> Vec<Action> {
        let Header { shard, epoch, .. } = packet.header;
        {
            // Held until the store is settled: `stable` of one epoch is never applied in another.
            let role = self.role.read().expect("a thread panicked while it installed an epoch");
            let reason = match &*role {
                // Not a word of `stable` is believed, but the answer tells an agent of this life: anybody may be it, so
                // only who asked with as many bytes gets that answer.
                None if packet.value.len() >= HEARTBEAT_PADDING => return self.heartbeat_ack(from, packet),
                None => Some(Reason::Malformed),
                Some(role) if shard != role.shard => Some(Reason::Shard),
                Some(role) if epoch != role.epoch => Some(Reason::Epoch),
                Some(role) if from.addr != role.coordinator.addr => Some(Reason::NotCoordinator),
                Some(_) => None,
            };
            let heartbeat = control::parse::<Heartbeat>(packet)
                // No write of this epoch, and so no `stable`, is beyond its numbers.
                .filter(|heartbeat| heartbeat.stable >> UP_EPOCH_SHIFT <= u64::from(epoch));
            match (reason, heartbeat) {
                (None, Some(heartbeat)) => {
                    if self.stable.fetch_max(heartbeat.stable, Relaxed) < heartbeat.stable {
                        self.store.settle(heartbeat.stable);
                    }
                }
                (reason, _) => {
                    // Released first: the answer reads the role, and a lock for reading is not to be taken twice.
                    drop(role);
                    return self.control_reject(reason.unwrap_or(Reason::Malformed), from, packet);
                }
            }
        }
        self.heartbeat_ack(from, packet)
    }

    fn heartbeat_ack(&self, from: Endpoint, packet: &Packet<'_>) -> Vec<Action> {
        let usage = self.usage();
        let answer = HeartbeatAck {
            incarnation: self.incarnation,
            used_bytes: usage.used_bytes,
            budget_bytes: usage.budget_bytes,
            items: usage.items,
            stamp: 0,
            copying: None,
        };
        let header = Header { op: Op::HeartbeatAck, ..packet.header };
        vec![Action::Count(Count::Heartbeat), Action::Send { to: from, bytes: control::emit(header, &answer) }]
    }
}
