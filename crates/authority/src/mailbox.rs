//! Notices on their way from a driver's thread to its agent.

use std::{
    collections::{BTreeMap, VecDeque},
    os::fd::{AsFd, BorrowedFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use anyhow::{Context, Result};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::{Notice, Trouble};

/// An agent that takes nothing is told of no further troubles: [`crate::Authority::troubles`] still has them.
const TROUBLES_QUEUED_MAX: usize = 64;

/// A queue whose file descriptor is readable while something is in it. It is bounded by what an agent has asked for: of each
/// shard it holds one record, and one answer for each store under way.
#[derive(Clone, Debug)]
pub(crate) struct Mailbox(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    ready: EventFd,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Notice>,
    /// By what is in trouble.
    troubles: BTreeMap<String, Trouble>,
}

impl Mailbox {
    pub(crate) fn new() -> Result<Self> {
        let ready = EventFd::from_value_and_flags(0, EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)
            .context("making an eventfd for the authority: raise the limit of open files")?;
        Ok(Self(Arc::new(Shared { state: Mutex::default(), ready })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn push(&self, notice: Notice) {
        self.push_into(&mut self.state(), notice);
    }

    fn push_into(&self, state: &mut State, notice: Notice) {
        match &notice {
            Notice::Record { shard, .. } => {
                state.queue.retain(|other| !matches!(other, Notice::Record { shard: of, .. } if of == shard));
            }
            Notice::Trouble { .. } | Notice::Recovered { .. } if state.queue.len() >= TROUBLES_QUEUED_MAX => return,
            _ => {}
        }
        if state.queue.is_empty() {
            // It saturates only after 2^64 - 2 unread writes; a failed one leaves it readable.
            let _ = self.0.ready.write(1);
        }
        state.queue.push_back(notice);
    }

    pub(crate) fn pop(&self) -> Option<Notice> {
        let mut state = self.state();
        let notice = state.queue.pop_front();
        if notice.is_some() && state.queue.is_empty() {
            // Not readable already: nothing to take back.
            let _ = self.0.ready.read();
        }
        notice
    }

    /// `part` is in trouble. Told when it is new, or another than before.
    pub(crate) fn trouble(&self, part: &str, what: String) {
        let mut state = self.state();
        let since = match state.troubles.get(part) {
            Some(known) if known.what == what => return,
            Some(known) => known.since,
            None => Instant::now(),
        };
        state.troubles.insert(part.to_owned(), Trouble { since, what: what.clone() });
        self.push_into(&mut state, Notice::Trouble { what });
    }

    /// `part` is in trouble no more.
    pub(crate) fn recovered(&self, part: &str) {
        let mut state = self.state();
        if state.troubles.remove(part).is_some() {
            self.push_into(&mut state, Notice::Recovered { what: part.to_owned() });
        }
    }

    pub(crate) fn troubles(&self) -> Vec<Trouble> {
        self.state().troubles.values().cloned().collect()
    }
}

impl AsFd for Mailbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.ready.as_fd()
    }
}
