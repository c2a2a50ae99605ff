//! The counters of a coordinator's data path by name, with what each one means.

use underpass_abi::abi::*;
use underpass_protocol::wire::Reason;

/// One counter of `enum up_count`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counter {
    /// Its index.
    pub index: usize,
    /// Its name, in snake case.
    pub name: String,
    /// What it counts, in a line.
    pub meaning: String,
}

/// Name and meaning of those that are no rejects.
const VERDICTS: &[(up_count, &str, &str)] = &[
    (UP_COUNT_READ, "read", "reads forwarded to a replica"),
    (UP_COUNT_READ_DIRTY, "read_dirty", "of these, reads of a key with a pending write"),
    (UP_COUNT_WRITE, "write", "writes ordered"),
    (UP_COUNT_WRITE_AGAIN, "write_again", "retransmitted writes propagated again"),
    (UP_COUNT_WRITE_ANSWERED, "write_answered", "retransmitted writes answered from the session's record"),
    (UP_COUNT_CLONE, "clone", "write clones addressed to a replica"),
    (UP_COUNT_ACK, "ack", "acknowledgements recorded that did not decide"),
    (UP_COUNT_COMMIT, "commit", "acknowledgements that decided: writes committed"),
    (UP_COUNT_PASS_FOREIGN, "pass_foreign", "passed to the kernel: not for this address and port"),
    (UP_COUNT_PASS_CONTROL, "pass_control", "control packets handed to the agent"),
    (UP_COUNT_DROP_TRUNCATED, "drop_truncated", "dropped: lengths disagree"),
    (UP_COUNT_DROP_FRAGMENT, "drop_fragment", "dropped: an IP fragment"),
    (UP_COUNT_DROP_MAGIC, "drop_magic", "dropped: not an Underpass packet"),
    (UP_COUNT_DROP_VERSION, "drop_version", "dropped: another protocol version"),
    (UP_COUNT_DROP_OP, "drop_op", "dropped: an operation that is not for a coordinator"),
    (UP_COUNT_DROP_OLD, "drop_old", "dropped: a request older than its session's latest"),
    (UP_COUNT_DROP_STARTING, "drop_starting", "dropped: a copy of a write being ordered or committed at that moment"),
    (UP_COUNT_DROP_ACK_MEMBER, "drop_ack_member", "dropped: an acknowledgement not from a member's address"),
    (UP_COUNT_DROP_ACK_EPOCH, "drop_ack_epoch", "dropped: an acknowledgement of another epoch"),
    (UP_COUNT_DROP_ACK_STALE, "drop_ack_stale", "dropped: an acknowledgement of a write no longer pending"),
    (UP_COUNT_DROP_ACK_ABORTED, "drop_ack_aborted", "dropped: a replica's record says aborted"),
    (UP_COUNT_DROP_NEXT_HOP, "drop_next_hop", "dropped: the replica's link-layer address is not known"),
    (UP_COUNT_DROP_CLONE, "drop_clone", "dropped: a clone that could not be addressed"),
    (UP_COUNT_DROP_INTERNAL, "drop_internal", "dropped: a look-up that cannot fail did"),
];

/// Every counter, by index.
pub fn all() -> Vec<Counter> {
    let verdicts = VERDICTS.iter().map(|&(index, name, meaning)| Counter {
        index: index as usize,
        name: name.to_owned(),
        meaning: meaning.to_owned(),
    });
    let rejects = Reason::ALL.iter().map(|&reason| Counter {
        index: UP_COUNT_REJECT as usize + usize::from(reason.to_wire()),
        name: format!("reject_{}", snake_case(&format!("{reason:?}"))),
        meaning: format!("rejected: {reason}"),
    });
    verdicts.chain(rejects).collect()
}

fn snake_case(name: &str) -> String {
    let mut out = String::new();
    for (i, c) in name.chars().enumerate() {
        if c.is_ascii_uppercase() && i > 0 {
            out.push('_');
        }
        out.push(c.to_ascii_lowercase());
    }
    out
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_counter_has_one_name() {
        let all = all();
        let indices: BTreeSet<_> = all.iter().map(|counter| counter.index).collect();
        // Reason 0 is "none": nothing is ever rejected with it.
        let wanted: BTreeSet<_> = (0..UP_COUNT_END as usize).filter(|&i| i != UP_COUNT_REJECT as usize).collect();
        assert_eq!(indices, wanted);
        let names: BTreeSet<_> = all.iter().map(|counter| &counter.name).collect();
        assert_eq!(names.len(), all.len(), "a name is used twice");
        assert!(all.iter().all(|counter| !counter.meaning.is_empty()));
        assert!(names.contains(&"reject_session_busy".to_owned()));
    }
}
