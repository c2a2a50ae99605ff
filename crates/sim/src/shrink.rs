//! From a failing run to a small one that fails in the same way: whatever can be left out of its plan, is.

use std::time::{Duration, Instant};

use crate::{network::Weather, plan::Plan, runner, trace::Detail};

/// A plan as small as was found in time, and how it fails.
pub struct Shrunk {
    /// What is left.
    pub plan: Plan,
    /// Runs tried.
    pub tried: usize,
}

struct Search {
    invariant: &'static str,
    until: Instant,
    best: Plan,
    tried: usize,
}

/// Leaves out what is not needed for the plan to break the same invariant.
pub fn shrink(plan: &Plan, invariant: &'static str, time: Duration) -> Shrunk {
    let mut search = Search { invariant, until: Instant::now() + time, best: plan.clone(), tried: 0 };
    loop {
        let before = size(&search.best);
        search.lists(|plan| &mut plan.faults);
        for client in (0..search.best.clients.len()).rev() {
            search.attempt(|plan| plan.clients[client].operations.clear());
            search.lists(|plan| &mut plan.clients[client].operations);
        }
        search.simplify();
        if size(&search.best) == before || search.is_late() {
            return Shrunk { plan: search.best, tried: search.tried };
        }
    }
}

fn size(plan: &Plan) -> (usize, usize, u64, u64) {
    let Weather { loss, duplicate, slow, delay_us, .. } = plan.shape.weather;
    let lengths = plan.faults.iter().map(|fault| fault.for_ms).sum();
    (plan.faults.len(), plan.operations(), loss + duplicate + slow + delay_us, lengths)
}

impl Search {
    fn is_late(&self) -> bool {
        Instant::now() >= self.until
    }

    /// Changes the best plan, if it still fails then.
    fn attempt(&mut self, change: impl FnOnce(&mut Plan)) -> bool {
        let mut plan = self.best.clone();
        change(&mut plan);
        if self.is_late() || format!("{plan:?}") == format!("{:?}", self.best) {
            return false;
        }
        self.tried += 1;
        let fails = runner::run(&plan, Detail::None).failure.is_some_and(|f| f.violation.invariant == self.invariant);
        if fails {
            self.best = plan;
        }
        fails
    }

    /// Leaves out parts of a list: halves, quarters, and so on to single entries.
    fn lists<T>(&mut self, list: impl Fn(&mut Plan) -> &mut Vec<T>) {
        let mut part = list(&mut self.best).len();
        while part > 0 && !self.is_late() {
            let mut end = list(&mut self.best).len();
            while end > 0 {
                let begin = end.saturating_sub(part);
                self.attempt(|plan| drop(list(plan).drain(begin..end)));
                end = begin;
            }
            part /= 2;
        }
    }

    /// Better weather, better clocks, shorter faults.
    fn simplify(&mut self) {
        self.attempt(|plan| plan.shape.weather.loss = 0);
        self.attempt(|plan| plan.shape.weather.duplicate = 0);
        self.attempt(|plan| plan.shape.weather.slow = 0);
        self.attempt(|plan| plan.shape.weather.delay_us = 100);
        self.attempt(|plan| plan.shape.authority.answers_lost = 0);
        self.attempt(|plan| plan.shape.authority.requests_late = 0);
        self.attempt(|plan| plan.shape.authority.delay_us = 300);
        self.attempt(|plan| {
            plan.shape.coordinators.iter_mut().for_each(|host| host.clock.fast_ppm = 0);
            plan.shape.replicas.iter_mut().for_each(|host| host.clock.fast_ppm = 0);
        });
        for at in 0..self.best.faults.len() {
            self.attempt(|plan| plan.faults[at].for_ms /= 2);
        }
        self.attempt(|plan| {
            plan.clients.iter_mut().flat_map(|client| &mut client.operations).for_each(|op| op.ttl_ms = None);
        });
    }
}
