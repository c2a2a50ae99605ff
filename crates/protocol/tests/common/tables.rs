//! What must hold of the coordinator's tables at every moment at which no lock is held, and when all is quiet.

use underpass_abi::abi::{self, UP_BUCKET_DIRTY, UP_BUCKET_LAST_SHIFT, up_session};
use underpass_protocol::coordinator::{Coordinator, slot, unresolved};

use super::{BASE, SHARD};

/// How a session's record may change in one critical section.
pub fn legal(before: &up_session, after: &up_session) -> bool {
    use abi::*;
    let (from, to) = (u32::from(before.state), u32::from(after.state));
    if before.session != after.session {
        return !unresolved(before.state);
    }
    if before.request != after.request {
        return after.request > before.request && !unresolved(before.state) && to == UP_STATE_STARTING;
    }
    match (from, to) {
        _ if from == to => before.acks & after.acks == before.acks && (before.seq == after.seq),
        (UP_STATE_IDLE, UP_STATE_STARTING) | (UP_STATE_STARTING, UP_STATE_IDLE) => true,
        (UP_STATE_STARTING, UP_STATE_PENDING) => after.acks == 0 && after.seq > before.seq,
        (UP_STATE_PENDING, UP_STATE_COMMITTING) | (UP_STATE_COMMITTING, UP_STATE_COMMITTED) => before.seq == after.seq,
        _ => false,
    }
}

/// What is wrong with the tables after a critical section that led from `before` to `after`.
pub fn wrong_step(before: &Coordinator, after: &Coordinator) -> Option<String> {
    for (index, (was, is)) in before.sessions().iter().zip(after.sessions()).enumerate() {
        if !legal(was, is) {
            return Some(format!(
                "session {index} went from state {} of request {} to state {} of request {}",
                was.state, was.request, is.state, is.request
            ));
        }
    }
    let clock = |c: &Coordinator| c.shards()[slot(SHARD)].clock;
    if clock(after) < clock(before) {
        return Some(format!("the clock went back from {} to {}", clock(before), clock(after)));
    }
    let words = before.buckets().1.iter().zip(after.buckets().1);
    if let Some((was, is)) = words.clone().find(|(was, is)| *is >> UP_BUCKET_LAST_SHIFT < *was >> UP_BUCKET_LAST_SHIFT)
    {
        return Some(format!("a bucket's last seq went back from {was:#x} to {is:#x}"));
    }
    wrong(after)
}

/// What is wrong with the tables at this moment.
pub fn wrong(coordinator: &Coordinator) -> Option<String> {
    let clock = coordinator.shards()[slot(SHARD)].clock;
    let (buckets, words) = coordinator.buckets();
    for (index, (bucket, word)) in buckets.iter().zip(words).enumerate() {
        let taken: Vec<_> = bucket.ways.iter().filter(|way| way.last != 0).collect();
        let last = word >> UP_BUCKET_LAST_SHIFT;
        if (word & u64::from(UP_BUCKET_DIRTY) != 0) == taken.is_empty() {
            return Some(format!("bucket {index}: dirty bit {}, ways taken {}", word & 1, taken.len()));
        }
        if last > clock {
            return Some(format!("bucket {index}: last {last} above the clock {clock}"));
        }
        for way in &taken {
            if way.first > way.last || way.last > last || way.committed >= way.last {
                return Some(format!("bucket {index}: {way:?} in a bucket with last {last}"));
            }
            let twice = taken.iter().filter(|other| other.fingerprint == way.fingerprint).count();
            if twice != 1 {
                return Some(format!("bucket {index}: one key in {twice} ways"));
            }
        }
    }
    // Every pending write that no later one of its key superseded has its key's way.
    for (index, session) in coordinator.sessions().iter().enumerate() {
        if u32::from(session.state) != abi::UP_STATE_PENDING {
            continue;
        }
        let way = buckets[session.bucket as usize].ways.iter();
        let way = way.filter(|way| way.last != 0 && way.fingerprint == session.fingerprint);
        let kept = way.clone().any(|way| way.first <= session.seq && session.seq <= way.last);
        // Superseded: its way was freed by a later seq's commit, or its key was made dirty anew after that.
        let superseded = words[session.bucket as usize] >> UP_BUCKET_LAST_SHIFT > session.seq;
        if !kept && !superseded {
            return Some(format!("session {index}: seq {} is pending and its key is not dirty", session.seq - BASE));
        }
    }
    // No sequence number is two writes'.
    let mut seqs: Vec<_> = coordinator
        .sessions()
        .iter()
        .filter(|s| s.seq > BASE && u32::from(s.state) >= abi::UP_STATE_PENDING)
        .map(|s| s.seq)
        .collect();
    let all = seqs.len();
    seqs.sort_unstable();
    seqs.dedup();
    (seqs.len() != all).then(|| "a sequence number was issued twice".to_owned())
}

/// What is left that must not be once every write is resolved.
pub fn left_over(coordinator: &Coordinator) -> Option<String> {
    let (buckets, words) = coordinator.buckets();
    if let Some(session) = coordinator.sessions().iter().find(|session| unresolved(session.state)) {
        return Some(format!("seq {} is in state {}", session.seq - BASE, session.state));
    }
    let taken = buckets.iter().flat_map(|bucket| &bucket.ways).filter(|way| way.last != 0).count();
    let dirty = words.iter().filter(|word| **word & u64::from(UP_BUCKET_DIRTY) != 0).count();
    (taken + dirty > 0).then(|| format!("{taken} ways are taken and {dirty} buckets say dirty, with nothing pending"))
}
