//! What an agent says of its shards, for the operator.

use serde::{Deserialize, Serialize};

use super::shard::{Part, Shard};
use crate::control::Copying;

/// A shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardStatus {
    /// Number.
    pub shard: u32,
    /// `standby`, `forming`, a stage of a take-over, `changing`, `serving` or `leaving`.
    pub state: String,
    /// Whether this agent holds the role of coordinator.
    pub role: bool,
    /// Epoch on record.
    pub epoch: u32,
    /// Epoch at which the coordinator took over.
    pub tenure: u32,
    /// Who coordinates, by the record.
    pub coordinator: Option<String>,
    /// The record's version at the authority.
    pub revision: u64,
    /// A compare-and-swap is under way.
    pub storing: bool,
    /// Milliseconds until the lease is over, if it serves.
    pub lease_left_ms: Option<i64>,
    /// Every write up to here is resolved on every member.
    pub stable: u64,
    /// Writes under way.
    pub unresolved: u32,
    /// Writes that may grow the store are refused.
    pub store_full: bool,
    /// What is wrong with the shard as a whole, and what to do; empty if all is well.
    pub trouble: String,
    /// Replicas that take part.
    pub members: Vec<MemberStatus>,
    /// Replicas that shall take part and do not.
    pub candidates: Vec<CandidateStatus>,
}

/// A replica that takes part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberStatus {
    /// Member index.
    pub index: u8,
    /// Number.
    pub id: u32,
    /// Address.
    pub address: String,
    /// Life.
    pub incarnation: u64,
    /// It is active; otherwise it is a learner.
    pub active: bool,
    /// It gets reads.
    pub serving: bool,
    /// Epoch that it confirmed.
    pub installed: u32,
    /// How long it has been silent.
    pub silent_ms: Option<u64>,
    /// Bytes of its budget in use.
    pub used_bytes: u64,
    /// Its budget.
    pub budget_bytes: u64,
    /// Items held.
    pub items: u64,
    /// How far it has copied.
    pub copying: Option<Copying>,
    /// What is wrong with it; empty if all is well.
    pub trouble: String,
}

/// A replica that shall take part and does not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CandidateStatus {
    /// Number.
    pub id: u32,
    /// Address.
    pub address: String,
    /// When it answered last.
    pub silent_ms: Option<u64>,
    /// Why it does not take part.
    pub trouble: String,
}

impl Shard {
    pub(super) fn status(&self, now_ms: u64) -> ShardStatus {
        let record = self.record.as_ref();
        let serving = match &self.part {
            Part::Serving(serving) => Some(serving),
            _ => None,
        };
        let state = match &self.part {
            Part::Standby => "standby",
            Part::Forming => "forming",
            Part::TakingOver(_) => self.stage().unwrap_or_default(),
            Part::Serving(serving) if record.is_some_and(|record| record.epoch > serving.epoch) => "changing",
            Part::Serving(_) => "serving",
            Part::Leaving { .. } => "leaving",
        };
        let read_by = serving.and_then(|serving| serving.written).map_or(0, |written| written.serving);
        let members = self.members.values().map(|member| MemberStatus {
            index: member.info.index,
            id: member.info.id,
            address: member.endpoint().to_string(),
            incarnation: member.info.incarnation,
            active: member.info.active,
            serving: read_by & (1 << member.info.index) != 0,
            installed: member.installed,
            silent_ms: member.heard_ms.map(|_| member.silent_ms(now_ms)),
            used_bytes: member.used_bytes,
            budget_bytes: member.budget_bytes,
            items: member.items,
            copying: member.copying.clone(),
            trouble: match (&member.trouble, &member.copying) {
                (trouble, _) if !trouble.is_empty() => trouble.clone(),
                (_, Some(copying)) if !copying.trouble.is_empty() => copying.trouble.clone(),
                _ if member.suspect => "is silent: it gets no reads".to_owned(),
                _ => String::new(),
            },
        });
        let wanted = record.map_or(&[][..], |record| &record.wanted);
        let absent = wanted.iter().filter(|wanted| !self.members.values().any(|m| m.endpoint() == wanted.endpoint()));
        let candidates = absent.map(|wanted| {
            let candidate = self.candidates.get(&wanted.endpoint());
            CandidateStatus {
                id: wanted.id,
                address: wanted.endpoint().to_string(),
                silent_ms: candidate.and_then(|candidate| candidate.heard_ms).map(|heard| now_ms.saturating_sub(heard)),
                trouble: candidate.map_or(String::new(), |candidate| candidate.trouble.clone()),
            }
        });
        ShardStatus {
            shard: self.id,
            state: state.to_owned(),
            role: self.role,
            epoch: record.map_or(0, |record| record.epoch),
            tenure: record.map_or(0, |record| record.tenure),
            coordinator: record.and_then(|record| record.coordinator()).map(|at| at.to_string()),
            revision: self.revision,
            storing: self.is_storing(),
            lease_left_ms: serving.map(|serving| serving.lease_until_ms as i64 - now_ms as i64),
            stable: serving.map_or(0, |serving| serving.stable),
            unresolved: serving.map_or(0, |serving| serving.unresolved),
            store_full: serving.is_some_and(|serving| serving.store_full),
            trouble: self.trouble.clone(),
            members: members.collect(),
            candidates: if matches!(self.part, Part::Standby) { Vec::new() } else { candidates.collect() },
        }
    }
}
