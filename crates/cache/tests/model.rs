//! Everything within the bounds is explored, and every rule left out is found.

use underpass_cache::model::{MUTANTS, Mutant, Scope, explore};

/// Races: no lifetimes.
const RACES: Scope = Scope { commands: 4, fills: 2, evictions: 1, time: 0 };
/// Lifetimes: fewer commands, some seconds.
const LIFETIMES: Scope = Scope { commands: 2, fills: 1, evictions: 0, time: 13 };

#[test]
fn no_hit_is_stale() {
    for scope in [RACES, LIFETIMES] {
        let explored = explore(scope, None).unwrap();
        println!("{scope:?}: {explored:?}");
        assert!(explored.states > 10_000 && explored.hits > 100, "{explored:?}");
    }
}

#[test]
fn every_rule_is_needed() {
    for mutant in MUTANTS {
        let of_time = matches!(mutant, Mutant::NoExpiry | Mutant::SlackOfOne | Mutant::LifetimeFromAnswer);
        let scope = if of_time { LIFETIMES } else { RACES };
        assert!(explore(scope, Some(mutant)).is_err(), "{mutant:?} is not found");
    }
}
