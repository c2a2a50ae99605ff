//! An independent judge of small histories: tries every order. (`crates/check` has the one for large histories.)

use std::collections::HashSet;

use underpass_protocol::wire::Status;

use super::Ask;

/// One operation on the one key of a history.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Done {
    pub client: u16,
    pub ask: Ask,
    /// Operations whose answer was there before this one was called: bits of their places in the history.
    pub after: u32,
    /// `None`: no answer.
    pub answer: Option<Answer>,
}

/// What the client was told.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Answer {
    /// Of a read: the item, if there was one.
    Read(Option<Vec<u8>>),
    /// Of a write; the number is that of an INCR with status OK.
    Wrote(Status, Option<i64>),
    /// Definitely without effect.
    Failed,
}

/// The item that one operation leaves, and the answer that it must give.
pub fn apply(ask: &Ask, item: Option<&[u8]>) -> (Option<Vec<u8>>, Answer) {
    let keep = item.map(<[u8]>::to_vec);
    let told = |status| Answer::Wrote(status, None);
    let set = |value: &str| (Some(value.as_bytes().to_vec()), told(Status::Ok));
    match (ask, item) {
        (Ask::Get, _) => (keep.clone(), Answer::Read(keep)),
        (Ask::Put(value), _) | (Ask::Add(value), None) | (Ask::Replace(value), Some(_)) => set(value),
        (Ask::Add(_), Some(_)) | (Ask::Replace(_) | Ask::Append(_) | Ask::Prepend(_), None) => {
            (keep, told(Status::NotStored))
        }
        (Ask::Delete | Ask::Incr(_), None) => (keep, told(Status::NotFound)),
        (Ask::Delete, Some(_)) => (None, told(Status::Ok)),
        (Ask::Append(value), Some(item)) => (Some([item, value.as_bytes()].concat()), told(Status::Ok)),
        (Ask::Prepend(value), Some(item)) => (Some([value.as_bytes(), item].concat()), told(Status::Ok)),
        (Ask::Incr(delta), Some(item)) => {
            let number = std::str::from_utf8(item).ok().and_then(|text| text.parse::<i64>().ok());
            match number {
                None => (keep, told(Status::NotANumber)),
                Some(number) => {
                    let sum = number + delta;
                    (Some(sum.to_string().into_bytes()), Answer::Wrote(Status::Ok, Some(sum)))
                }
            }
        }
    }
}

/// Whether some order of the operations, each between its call and its answer, explains every answer. `item` is what was
/// there before.
pub fn linearizable(history: &[Done], item: Option<&[u8]>) -> bool {
    assert!(history.len() <= 20, "a history to try every order of");
    let mut seen = HashSet::new();
    explain(history, 0, item.map(<[u8]>::to_vec), &mut seen)
}

fn explain(history: &[Done], done: u32, item: Option<Vec<u8>>, seen: &mut HashSet<(u32, Option<Vec<u8>>)>) -> bool {
    let open = |at: usize| done & 1 << at == 0;
    if history.iter().enumerate().all(|(at, op)| !open(at) || matches!(op.answer, None | Some(Answer::Failed))) {
        return true;
    }
    if !seen.insert((done, item.clone())) {
        return false;
    }
    for (at, op) in history.iter().enumerate() {
        // What had an answer before this was called comes before it; what never had one may come or not.
        let must = (0..history.len()).filter(|&other| {
            op.after & 1 << other != 0 && history[other].answer.as_ref().is_some_and(|a| *a != Answer::Failed)
        });
        if !open(at) || op.answer == Some(Answer::Failed) || must.clone().any(open) {
            continue;
        }
        let (next, answer) = apply(&op.ask, item.as_deref());
        if op.answer.as_ref().is_none_or(|told| *told == answer) && explain(history, done | 1 << at, next, seen) {
            return true;
        }
    }
    false
}

#[test]
fn the_oracle_tells_a_lost_write_and_an_order_that_cannot_be() {
    let put = |v: &str, after, answered: bool| Done {
        client: 0,
        ask: Ask::Put(v.into()),
        after,
        answer: answered.then_some(Answer::Wrote(Status::Ok, None)),
    };
    let get = |v: Option<&str>, after| Done {
        client: 1,
        ask: Ask::Get,
        after,
        answer: Some(Answer::Read(v.map(|v| v.as_bytes().to_vec()))),
    };
    assert!(linearizable(&[put("a", 0, true), get(Some("a"), 1)], None));
    assert!(!linearizable(&[put("a", 0, true), get(None, 1)], None));
    assert!(linearizable(&[put("a", 0, true), get(None, 0)], None));
    assert!(linearizable(&[put("a", 0, false), get(Some("a"), 0), get(Some("a"), 2)], None));
    assert!(!linearizable(&[put("a", 0, false), get(Some("a"), 0), get(None, 2)], None));
}
