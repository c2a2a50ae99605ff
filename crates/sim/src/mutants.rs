//! Faults in the protocol itself, switched in one by one: each has to be caught.

use underpass_protocol::{agent, coordinator, replica};

/// One of [`ALL`].
#[derive(Clone, Copy)]
pub struct Mutant {
    /// Its name: that of the switch.
    pub name: &'static str,
    /// What it breaks: a hole of protocol.md, section 9, or a rule.
    pub breaks: &'static str,
    switch: Switch,
}

#[derive(Clone, Copy)]
enum Switch {
    Coordinator(fn(&mut coordinator::Published)),
    Replica(fn(&mut replica::Published)),
    Agent(fn(&mut agent::Mutants)),
}

impl std::fmt::Debug for Mutant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

macro_rules! mutants {
    ($($role:ident $name:ident: $breaks:literal;)+) => {
        /// Every mutant that a simulation can show; `docs/testing.md` says what shows the others.
        pub const ALL: &[Mutant] = &[$(Mutant {
            name: stringify!($name),
            breaks: $breaks,
            switch: Switch::$role(|published| published.$name = true),
        },)+];
    };
}

mutants! {
    Coordinator count_acks: "hole 1";
    Coordinator residual_count: "hole 2";
    Coordinator uncommitted_read: "hole 3";
    Coordinator late_read: "hole 4";
    Coordinator clear_early: "hole 5";
    Coordinator two_slots: "hole 6";
    Coordinator shared_conditional: "a conditional write is alone";
    Coordinator retry_is_new: "hole 7";
    Coordinator keep_bits: "hole 15";
    Coordinator any_epoch_ack: "hole 15";
    Coordinator no_lease_check: "hole 10";
    Coordinator count_aborted_ack: "hole 14";
    Coordinator abort_keeps_way: "an aborted write's key is clean";
    Coordinator keep_clock: "hole 9";
    Coordinator read_stamped_freely: "hole 22";
    Coordinator rebuilt_take_new: "hole 23";
    Replica ignore_bound: "holes 3 and 4";
    Replica forget_sessions: "hole 7";
    Replica ignore_loser: "hole 13";
    Replica copy_no_records: "hole 16";
    Replica record_is_enough: "hole 25";
    Replica accept_old_tenure: "hole 10";
    Replica ignore_lease: "a replica's lease, of a coordinator that was suspended";
    Replica no_freeze: "hole 14";
    Replica abort_is_processed: "hole 14";
    Replica pull_ignores_stable: "what is stable is not pulled";
    Replica execute_uncopied: "a conditional write waits for its chain";
    Replica accept_former_life: "a life takes nothing of epochs before it joined";
    Agent lease_of_active: "the lease is granted by learners, too";
    Agent skip_settled: "a take-over waits unless the record was settled";
    Agent no_wait: "hole 10";
    Agent abort_early: "hole 14";
    Agent abort_despite_lower: "hole 14";
    Agent no_converge: "hole 9";
    Agent believe_learners: "hole 17";
    Agent believe_latecomers: "hole 24";
    Agent echo_at_once: "the stamp that is echoed is older than the lease";
    Agent promote_early: "hole 17";
    Agent no_repair: "hole 8";
}

impl Mutant {
    /// The mutant of this name.
    pub fn named(name: &str) -> Result<Self, String> {
        ALL.iter().find(|mutant| mutant.name == name).copied().ok_or_else(|| {
            let names: Vec<_> = ALL.iter().map(|mutant| mutant.name).collect();
            format!("there is no mutant {name:?}; there are {}", names.join(", "))
        })
    }

    /// Switches it on in new tables.
    pub fn infect_tables(&self, tables: &mut coordinator::Coordinator) {
        if let Switch::Coordinator(on) = self.switch {
            on(&mut tables.published);
        }
    }

    /// Switches it on in a new agent.
    pub fn infect_agent(&self, agent: &mut agent::Agent) {
        if let Switch::Agent(on) = self.switch {
            on(&mut agent.mutants);
        }
    }

    /// Switches it on in a new replica.
    pub fn infect_replica(&self, replica: &mut replica::Replica) {
        if let Switch::Replica(on) = self.switch {
            on(&mut replica.published);
        }
    }
}
