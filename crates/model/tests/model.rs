//! The protocol holds within every short scope, and reaches what it should; every mutant whose scope is short is caught.

use underpass_model::{
    Model,
    checker::explore,
    scopes::{CAUGHT, LONG, REDUNDANT, SHORT, Scope},
};

fn holds(scope: &Scope) {
    let outcome = explore(&Model { scope: *scope, mutant: None }, usize::MAX);
    assert!(outcome.violation.is_none(), "{}: {:#?}", scope.name, outcome.violation);
    for goal in scope.goals {
        assert!(outcome.goals.has(*goal), "{}: {goal:?} is never reached", scope.name);
    }
    println!("{}: {} states, depth {}", scope.name, outcome.states, outcome.depth);
}

fn caught(scopes: &[Scope]) {
    for (mutant, name) in CAUGHT {
        let Some(scope) = scopes.iter().find(|scope| scope.name == *name) else { continue };
        let outcome = explore(&Model { scope: *scope, mutant: Some(*mutant) }, usize::MAX);
        let unreached = scope.goals.iter().any(|goal| !outcome.goals.has(*goal));
        assert!(outcome.violation.is_some() || unreached, "{mutant:?} is not caught in {name}");
        println!("{mutant:?} in {name}: {} states, depth {}", outcome.states, outcome.depth);
    }
}

#[test]
fn the_protocol_holds() {
    SHORT.iter().for_each(holds);
}

#[test]
fn every_mutant_is_caught() {
    caught(SHORT);
}

#[test]
#[ignore = "minutes: ./dev model --long"]
fn the_protocol_holds_in_larger_scopes() {
    LONG.iter().for_each(holds);
    caught(LONG);
}

/// If this fails, a rule that seemed redundant is not: move it to `CAUGHT`.
#[test]
fn redundant_rules_are_redundant() {
    for (mutant, name) in REDUNDANT {
        let scope = SHORT.iter().find(|scope| scope.name == *name).expect("a short scope");
        let outcome = explore(&Model { scope: *scope, mutant: Some(*mutant) }, usize::MAX);
        assert!(outcome.complete, "{mutant:?} breaks {:#?}", outcome.violation);
    }
}

#[test]
fn every_mutant_has_a_scope() {
    for (mutant, name) in CAUGHT {
        assert!(SHORT.iter().chain(LONG).any(|scope| scope.name == *name), "{mutant:?}: no scope {name}");
    }
}
