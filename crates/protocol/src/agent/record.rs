//! What is on record about a shard (`docs/protocol.md`, section 7).

use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};
use underpass_abi::wire::UP_EPOCH_MAX;

use crate::{
    control::{Configuration, MemberInfo},
    wire::{Endpoint, MEMBERS_MAX},
};

/// The format that this build writes, and the newest that it reads.
pub const RECORD_VERSION: u32 = 2;
/// Length of leases unless the shard was made with another.
pub const LEASE_MS: u64 = 1000;

/// A replica that the operator wants in the shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wanted {
    /// Its number, unique in the shard.
    pub id: u32,
    /// Address.
    pub addr: Ipv4Addr,
    /// Port.
    pub port: u16,
    /// The replica that is to be removed once this one is active.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaces: Option<u32>,
}

impl Wanted {
    /// Where it listens.
    pub fn endpoint(&self) -> Endpoint {
        Endpoint { addr: self.addr, port: self.port }
    }
}

/// The record of one shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Format.
    pub version: u32,
    /// The shard.
    pub shard: u32,
    /// The epoch taken last; 0: it was never served.
    pub epoch: u32,
    /// The epoch at which the coordinator took over.
    pub tenure: u32,
    /// Who may act under this record.
    pub coordinator: Option<(Ipv4Addr, u16)>,
    /// Who takes part, by ascending index.
    pub members: Vec<MemberInfo>,
    /// Who shall take part.
    pub wanted: Vec<Wanted>,
    /// No coordinator's tables are older than `epoch`.
    pub settled: bool,
    /// Length of every lease, in milliseconds.
    pub lease_ms: u64,
    /// Session counters below this may have been issued in this tenure.
    pub generations: u32,
    /// The operator gives up what the members hold, up to this epoch: the shard may begin empty.
    #[serde(default)]
    pub given_up: u32,
}

impl Record {
    /// Of a shard never served, with these replicas wanted.
    pub fn new(shard: u32, wanted: Vec<Wanted>) -> Self {
        Self {
            version: RECORD_VERSION,
            shard,
            epoch: 0,
            tenure: 0,
            coordinator: None,
            members: Vec::new(),
            wanted,
            settled: true,
            lease_ms: LEASE_MS,
            generations: 0,
            given_up: 0,
        }
    }

    /// The coordinator's address.
    pub fn coordinator(&self) -> Option<Endpoint> {
        self.coordinator.map(|(addr, port)| Endpoint { addr, port })
    }

    /// As its members are told.
    pub fn configuration(&self) -> Configuration {
        let (coordinator_addr, coordinator_port) = self.coordinator.unwrap_or((Ipv4Addr::UNSPECIFIED, 0));
        Configuration {
            shard: self.shard,
            epoch: self.epoch,
            tenure: self.tenure,
            lease_ms: self.lease_ms,
            coordinator_addr,
            coordinator_port,
            members: self.members.clone(),
        }
    }

    /// Refuses what no agent of this version writes; says what is wrong and what to do.
    pub fn validate(&self) -> Result<(), String> {
        let Self { version, shard, epoch, tenure, .. } = *self;
        if version > RECORD_VERSION {
            return Err(format!(
                "shard {shard}: its record has format {version}, and this build knows formats up to {RECORD_VERSION}: start \
                 the newer build that wrote it"
            ));
        }
        if epoch >= UP_EPOCH_MAX {
            return Err(format!("shard {shard}: all {UP_EPOCH_MAX} epochs are used up; move its data to a new shard"));
        }
        if tenure > epoch || (epoch > 0) != self.coordinator.is_some() || (epoch > 0 && tenure == 0) {
            return Err(format!("shard {shard}: epoch {epoch}, tenure {tenure} and coordinator contradict each other"));
        }
        if !(100..=60_000).contains(&self.lease_ms) {
            return Err(format!("shard {shard}: a lease of {} ms is not within 100 to 60000", self.lease_ms));
        }
        if epoch > 0 {
            self.configuration().validate()?;
            if !self.members.iter().any(|member| member.active) {
                return Err(format!("shard {shard}: no member is active"));
            }
        }
        if self.wanted.len() > MEMBERS_MAX {
            return Err(format!(
                "shard {shard}: {} replicas are wanted; there can be {MEMBERS_MAX}",
                self.wanted.len()
            ));
        }
        for (i, a) in self.wanted.iter().enumerate() {
            if self.wanted[..i].iter().any(|b| b.id == a.id || b.endpoint() == a.endpoint()) {
                return Err(format!("shard {shard}: replica {} ({}) is wanted twice", a.id, a.endpoint()));
            }
        }
        Ok(())
    }
}
