//! Section 8, as far as it can be said of the model.

use crate::state::{Chain, Phase, State, Version, bit, each, insert};

/// An invariant, by its name in section 8.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Invariant {
    /// A read returns less than was known when it started; a write is ordered below it; a key's committed versions are not a
    /// sequential history of it.
    Linearizable,
    /// An active replica, or a learner that copied the key, lacks a committed write and every newer one.
    CommittedEverywhere,
    /// A read returns what is neither committed nor superseded.
    ReadCommitted,
    /// A request has two versions, or one though its client was told that it is aborted.
    OneEffect,
    /// A replica's newest committed version goes back.
    Monotone,
    /// A coordinator has a read served, or commits what its successor does not know, after the successor served.
    OneCoordinator,
    /// Two replicas store different contents under one seq.
    SameOutcome,
}

/// A write becomes committed at a coordinator.
pub fn committed(next: &mut State, by: usize, key: usize, version: Version) {
    let known = next.ghost.history[key].iter().any(|held| held.seq == version.seq);
    if !known && next.coordinators[by + 1..].iter().any(|later| later.phase == Phase::Serving) {
        next.broken(Invariant::OneCoordinator);
    }
    if next.coordinators[by].slots[version.op.session as usize].below {
        next.broken(Invariant::Linearizable);
    }
    if next.ghost.history[key].iter().any(|held| held.op == version.op && held.seq != version.seq) {
        next.broken(Invariant::OneEffect);
    }
    insert(&mut next.ghost.history[key], version);
}

/// A new coordinator serves: whatever its members held when it rebuilt its tables counts as committed.
pub fn all_committed(next: &mut State, by: usize) {
    let floor = next.coordinators[by].floor;
    for r in each(next.coordinators[by].must_ack()) {
        for key in 0..next.ghost.history.len() {
            for version in next.replicas[r].chains[key].clone().into_iter().filter(|version| version.seq <= floor) {
                insert(&mut next.ghost.history[key], version);
            }
        }
    }
}

/// A read is answered and returns at once.
pub fn read(next: &mut State, key: usize, got: Option<Version>, atleast: u8, late: bool) {
    if late {
        next.broken(Invariant::OneCoordinator);
    }
    let history = &next.ghost.history[key];
    let seq = match got {
        Some(version) => {
            if history.last().is_none_or(|newest| newest.seq < version.seq) {
                next.broken(Invariant::ReadCommitted);
                return;
            }
            version.seq
        }
        // Nothing there: nothing was, or the last known is a tombstone, or a newer tombstone is.
        None if atleast == 0 => 0,
        None => history.iter().find(|version| version.seq >= atleast && version.content == 0).map_or(0, |v| v.seq),
    };
    if seq < atleast {
        next.broken(Invariant::Linearizable);
    }
    next.ghost.known[key] = next.ghost.known[key].max(seq);
}

/// The first invariant that a state breaks.
pub fn check(state: &State) -> Option<Invariant> {
    let checks = [committed_everywhere, one_effect, same_outcome, sequential, monotone];
    state.ghost.broken.or_else(|| checks.iter().find_map(|check| check(state)))
}

/// Replicas of the record that are still the life that it names.
fn members(state: &State) -> impl Iterator<Item = usize> {
    each(state.record.members()).filter(|&r| state.replicas[r].life == state.record.lives[r])
}

/// Does a replica hold this committed version or a newer one? Nothing is as good as a tombstone: what it must keep from coming
/// back is seen when it does.
fn holds(chain: &Chain, version: Version) -> bool {
    chain.last().map_or(version.content == 0, |newest| newest.seq >= version.seq)
}

fn committed_everywhere(state: &State) -> Option<Invariant> {
    for r in members(state) {
        let replica = &state.replicas[r];
        let active = state.record.active & bit(r) != 0;
        // A learner whose donor is no member any more starts over.
        let learns = state.record.lives[replica.donor.0 as usize] == replica.donor.1;
        for (key, history) in state.ghost.history.iter().enumerate() {
            let bound = active || learns && replica.records_copied && replica.keys_copied & bit(key) != 0;
            let Some(&newest) = history.last() else { continue };
            if bound && !holds(&replica.chains[key], newest) {
                return Some(Invariant::CommittedEverywhere);
            }
        }
    }
    None
}

fn one_effect(state: &State) -> Option<Invariant> {
    let twice = |chain: &Chain| chain.iter().enumerate().any(|(i, v)| chain[..i].iter().any(|other| other.op == v.op));
    let undone = |chain: &Chain| chain.iter().any(|version| state.ghost.aborted.contains(&version.op));
    let chains = members(state).flat_map(|r| &state.replicas[r].chains).chain(&state.ghost.history);
    chains.into_iter().any(|chain| twice(chain) || undone(chain)).then_some(Invariant::OneEffect)
}

fn same_outcome(state: &State) -> Option<Invariant> {
    let held = |r: usize| state.replicas[r].chains.iter().flatten();
    let differ = members(state).any(|a| {
        members(state)
            .filter(|&b| b > a)
            .any(|b| held(a).any(|one| held(b).any(|other| one.seq == other.seq && one.content != other.content)))
    });
    differ.then_some(Invariant::SameOutcome)
}

/// An increment follows what it counted on.
fn sequential(state: &State) -> Option<Invariant> {
    let wrong = |chain: &Chain| {
        chain.iter().enumerate().any(|(i, version)| {
            let before = if i > 0 { chain[i - 1].content } else { 0 };
            version.content & 7 != 0 && version.content != before + 1
        })
    };
    state.ghost.history.iter().any(wrong).then_some(Invariant::Linearizable)
}

fn monotone(state: &State) -> Option<Invariant> {
    for replica in &state.replicas {
        for (key, &newest) in replica.newest.iter().enumerate() {
            let history = &state.ghost.history[key];
            let Some(version) = history.iter().find(|version| version.seq == newest) else { continue };
            if !holds(&replica.chains[key], *version) {
                return Some(Invariant::Monotone);
            }
        }
    }
    None
}
