//! `underpass-model [--long] [NAME]...`: explores scopes and mutants, or those named, and prints what `docs/testing.md` lists.

use underpass_model::{
    Model,
    checker::{Outcome, explore},
    mutants::Mutant,
    scopes::{CAUGHT, LONG, SHORT, Scope},
};

fn main() {
    let mut names: Vec<String> = std::env::args().skip(1).collect();
    let long = names.iter().any(|name| name == "--long");
    names.retain(|name| name != "--long");
    let named = |name: &str| names.is_empty() || names.iter().any(|other| other == name);
    let scopes = || SHORT.iter().chain(LONG.iter().filter(|_| long));
    let mut as_it_should = true;
    println!("| scope | states | steps | depth | seconds |\n|---|---|---|---|---|");
    for scope in scopes().filter(|scope| named(scope.name)) {
        as_it_should &= report(scope, None);
    }
    println!("\n| mutant | scope | breaks | states | depth |\n|---|---|---|---|---|");
    for (mutant, name) in CAUGHT.iter().filter(|(mutant, _)| named(&format!("{mutant:?}"))) {
        if let Some(scope) = scopes().find(|scope| scope.name == *name) {
            as_it_should &= report(scope, Some(*mutant));
        }
    }
    std::process::exit(i32::from(!as_it_should));
}

/// A line of a table, and whether it is as it should be: a mutant breaks something, the protocol nothing.
fn report(scope: &Scope, mutant: Option<Mutant>) -> bool {
    let Outcome { states, steps, depth, goals, violation, complete, elapsed } =
        explore(&Model { scope: *scope, mutant }, usize::MAX);
    let missing: Vec<_> = scope.goals.iter().filter(|goal| !goals.has(**goal)).collect();
    let name = scope.name;
    match mutant {
        None => println!("| {name} | {states} | {steps} | {depth} | {:.1} |", elapsed.as_secs_f64()),
        Some(mutant) => {
            let breaks = match &violation {
                Some((invariant, _)) => format!("{invariant:?}"),
                None => format!("unreachable: {missing:?}"),
            };
            println!("| {mutant:?} | {name} | {breaks} | {states} | {depth} |");
        }
    }
    if mutant.is_none() || std::env::var_os("UNDERPASS_TRACE").is_some() {
        for action in violation.iter().flat_map(|(invariant, way)| {
            println!("{name}: {invariant:?} is broken by");
            way
        }) {
            println!("    {action:?}");
        }
    }
    match mutant {
        None => {
            if complete && !missing.is_empty() {
                println!("{name}: never reached: {missing:?}");
            }
            complete && missing.is_empty()
        }
        Some(_) => violation.is_some() || !missing.is_empty(),
    }
}
