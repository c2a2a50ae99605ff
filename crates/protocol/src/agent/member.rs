//! One replica as its agent sees it.

use std::collections::VecDeque;

use crate::{
    control::{Copying, MemberInfo},
    wire::Endpoint,
};

/// A member of the shard's record, and what is known of it.
#[derive(Clone, Debug)]
pub(super) struct Member {
    pub info: MemberInfo,
    /// When it became a member, for all this agent knows: answers to earlier questions may be another life's.
    pub since_ms: u64,
    /// Since when it has refused every INSTALL.
    pub refused_ms: Option<u64>,
    /// The latest time of ours at which something was sent that it has answered in this tenure: the moment from which its grant
    /// runs.
    pub granted_ms: Option<u64>,
    /// When it was last heard of.
    pub heard_ms: Option<u64>,
    /// The stamps of its latest answers, each with the time at which it came.
    pub stamps: VecDeque<(u64, u64)>,
    /// A stamp was echoed to it in this tenure: it may answer reads.
    pub echoed: bool,
    /// When the last heartbeat was sent to it.
    pub sent_ms: u64,
    /// The epoch that it confirmed last.
    pub installed: u32,
    /// It answered with another incarnation: what it held is gone.
    pub lost: bool,
    /// When that answer came: one to a later question that tells the incarnation of the record shows that it was a late one.
    pub lost_ms: u64,
    /// It gets no reads because it is silent.
    pub suspect: bool,
    pub used_bytes: u64,
    pub budget_bytes: u64,
    pub items: u64,
    /// Highest packet time that it saw.
    pub time: u64,
    pub copying: Option<Copying>,
    /// Why it is not as it should be; empty if all is well.
    pub trouble: String,
    /// When INSTALL is due.
    pub send_ms: u64,
    pub retry_ms: u64,
}

/// Stamps kept: more than come within a lease that is of any use.
pub(super) const STAMPS_MAX: usize = 256;
/// First wait for an answer to INSTALL; doubled up to [`RETRY_MAX_MS`].
pub(super) const RETRY_MIN_MS: u64 = 10;
/// Longest wait for an answer to INSTALL.
pub(super) const RETRY_MAX_MS: u64 = 200;

impl Member {
    pub fn new(info: MemberInfo, now_ms: u64) -> Self {
        Self {
            info,
            since_ms: now_ms,
            refused_ms: None,
            granted_ms: None,
            heard_ms: Some(now_ms),
            stamps: VecDeque::new(),
            echoed: false,
            sent_ms: 0,
            installed: 0,
            lost: false,
            lost_ms: 0,
            suspect: false,
            used_bytes: 0,
            budget_bytes: 0,
            items: 0,
            time: 0,
            copying: None,
            trouble: String::new(),
            send_ms: now_ms,
            retry_ms: RETRY_MIN_MS,
        }
    }

    pub fn endpoint(&self) -> Endpoint {
        self.info.endpoint()
    }

    pub fn silent_ms(&self, now_ms: u64) -> u64 {
        now_ms.saturating_sub(self.heard_ms.unwrap_or(0))
    }

    /// The latest stamp that came before the moment from which the coordinator's lease runs: older than an answer of every
    /// member, so older than any fence. Earlier ones are of no use any more.
    pub fn echo(&mut self, lease_from_ms: u64) -> Option<u64> {
        while self.stamps.get(1).is_some_and(|&(came_ms, _)| came_ms < lease_from_ms) {
            self.stamps.pop_front();
        }
        self.stamps.front().filter(|&&(came_ms, _)| came_ms < lease_from_ms).map(|&(_, stamp)| stamp)
    }

    /// Whether another message that waits for an answer is due; counts it as sent.
    pub fn is_due(&mut self, now_ms: u64) -> bool {
        if now_ms < self.send_ms {
            return false;
        }
        self.send_ms = now_ms + self.retry_ms;
        self.retry_ms = (self.retry_ms * 2).min(RETRY_MAX_MS);
        true
    }

    pub fn due_now(&mut self, now_ms: u64) {
        (self.send_ms, self.retry_ms) = (now_ms, RETRY_MIN_MS);
    }
}
