//! An explicit-state model of `docs/protocol.md`, sections 3, 4 and 7, explored exhaustively within stated bounds.
//!
//! It is not the code (simulation runs that): it is the protocol's text as steps on a small state, to check the text's argument
//! against. Each [`Scope`](scopes::Scope) bounds one part of it; each [`Mutant`](mutants::Mutant) relaxes one rule, and must
//! then break an invariant or make a goal unreachable.
//!
//! Abstractions, each of which only adds behaviours or is without effect:
//! - The network is the set of everything ever sent: any message arrives any number of times, in any order, or never.
//! - A process that crashed is one that takes no further step; only the loss of a replica's data is a step of its own.
//! - A client's request, the coordinator's answer and its receipt are immediate: the tightest real-time order that there can
//!   be. Copies of every request that a session ever sent may arrive at any coordinator at any time.
//! - What the agent asks a member and is answered is one step; what members send each other, and what a member is told, is not.
//! - Leases: time is divided by the waits of rule (b) alone. For each wait it is known whether what a lease rests on happened
//!   before it began; when it is over, a lease that rests on something earlier is over too.
//!
//! Not modelled: expiry and `time`, CAS, budgets, marks of versions left out, opening and closing of sessions, tokens.

pub mod checker;
pub mod invariants;
pub mod mutants;
pub mod scopes;
pub mod state;
pub mod steps;

use mutants::Mutant;
use scopes::Scope;
use state::{Goals, State};
use steps::Action;

/// A scope, with one rule relaxed or none.
pub struct Model {
    /// Bounds and the start.
    pub scope: Scope,
    /// The rule that does not hold.
    pub mutant: Option<Mutant>,
}

impl Model {
    /// Where it starts.
    pub fn initial(&self) -> State {
        self.scope.initial()
    }

    /// Appends everything that can happen next.
    pub fn successors(&self, state: &State, out: &mut Vec<(Action, State)>, goals: &mut Goals) {
        steps::successors(self, state, out, goals);
    }

    /// Is this rule relaxed?
    pub fn is(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }
}
