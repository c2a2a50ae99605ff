//! What can go wrong, and what to look at.

use std::{fmt, io, net::SocketAddrV4, time::Duration};

use underpass_protocol::{
    client::{Doubt, Failure, Invalid},
    wire::Reason,
};

use crate::config::ConfigError;

/// Why an operation has no result.
///
/// What a caller may conclude differs: after [`Error::Unknown`] the write may or may not have taken effect, or may yet;
/// after every other error it did not and will not. A read has no effect in any case.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The request can never be taken, by any shard: a key or value of a wrong length.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// A write: it may have taken effect, may do so later, or never.
    #[error("the write may or may not have taken effect: {doubt} ({at}){}", .at.advice())]
    Unknown {
        /// Which shard.
        at: Diagnosis,
        /// Why it is not known.
        doubt: Doubt,
    },
    /// Definitely without effect.
    #[error("it had no effect: {failure} ({at}){}", failed_advice(.failure, .at))]
    Failed {
        /// Which shard.
        at: Diagnosis,
        /// Why.
        failure: Failure,
    },
    /// A read without an answer before its deadline.
    #[error("no answer before the deadline{} ({at}){}", timeout_detail(*.sent, *.last), .at.advice())]
    TimedOut {
        /// Which shard.
        at: Diagnosis,
        /// The latest reject, if there was any.
        last: Option<Reason>,
        /// False: not even a session could be opened.
        sent: bool,
    },
    /// No session could be opened in time.
    #[error("no session could be opened{} ({at}){}", because(*.reason), no_session_advice(*.reason, .at))]
    NoSession {
        /// Which shard.
        at: Diagnosis,
        /// The latest reject, if there was any.
        reason: Option<Reason>,
    },
    /// The configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The machine.
    #[error("cannot {what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// Why it failed.
        source: io::Error,
    },
    /// The client's own thread has ended, after an error of the machine that was logged.
    #[error("the client has stopped: {0}")]
    Stopped(String),
}

impl Error {
    pub(crate) fn io(what: impl Into<String>, source: io::Error) -> Self {
        Self::Io { what: what.into(), source }
    }

    /// Whether a write that ended so may have taken effect, or may do so later.
    pub fn may_have_taken_effect(&self) -> bool {
        matches!(self, Self::Unknown { .. })
    }
}

/// A shard, and what is known of why it does not answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnosis {
    /// Its number.
    pub shard: u32,
    /// Its coordinator, as far as is known: where requests go.
    pub coordinator: SocketAddrV4,
    /// Whether anything of the shard has ever answered this client.
    pub heard: bool,
    /// The network's latest error about the coordinator, if nothing has answered since.
    pub error: Option<io::ErrorKind>,
    /// Everybody who was asked where the coordinator is, or turned a request away.
    pub contacts: Vec<Contact>,
}

/// An address of a shard, a coordinator's or a replica's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contact {
    /// The address.
    pub address: SocketAddrV4,
    /// What it said last, other than replies to requests, and how long ago.
    pub last: Option<(Said, Duration)>,
}

/// What an address said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Said {
    /// It gave a session, or a token for one.
    Session,
    /// It rejected a request.
    Reject(Reason),
    /// It said who coordinates the shard.
    Located {
        /// The latest epoch that it knows of.
        epoch: u32,
        /// That epoch's coordinator.
        coordinator: SocketAddrV4,
        /// Which is the one who says so, and serves.
        serves: bool,
    },
    /// The network says that it cannot be reached.
    Error(io::ErrorKind),
}

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Session => f.write_str("gave a session"),
            Self::Reject(reason) => write!(f, "rejected: {reason}"),
            Self::Located { epoch, serves: true, .. } => write!(f, "serves epoch {epoch}"),
            Self::Located { epoch, coordinator, serves: false } => {
                write!(f, "does not serve; knows epoch {epoch} of coordinator {coordinator}")
            }
            Self::Error(error) => write!(f, "{error}"),
        }
    }
}

impl fmt::Display for Contact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.last {
            None => write!(f, "{} no answer", self.address),
            Some((said, age)) => write!(f, "{} {said} ({} ms ago)", self.address, age.as_millis()),
        }
    }
}

impl Diagnosis {
    /// What to check when it does not answer, as a sentence that can follow a message.
    pub fn advice(&self) -> String {
        let Self { coordinator, .. } = self;
        let advice = match self.error {
            Some(io::ErrorKind::ConnectionRefused) => format!(
                ". Connection refused: nothing listens at {coordinator}. Check the address, and that the coordinator runs"
            ),
            Some(error) => {
                format!(". The network says: {error}. Check the address and the route to {}", coordinator.ip())
            }
            None if !self.heard => format!(
                ". Nothing was ever heard from {coordinator}. Check the address, that the coordinator runs, and that no \
                 firewall drops UDP to it, or from it and its replicas to this host"
            ),
            None => {
                ". It answered before: check that the coordinator and every replica of the shard still run".to_owned()
            }
        };
        advice + &self.account()
    }

    /// Who was asked, and what each said last; nothing if it was the coordinator alone.
    fn account(&self) -> String {
        if self.contacts.iter().all(|contact| contact.address == self.coordinator) {
            return String::new();
        }
        let said: Vec<String> = self.contacts.iter().map(Contact::to_string).collect();
        format!(". Last answers: {}", said.join("; "))
    }
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "shard {}, coordinator {}", self.shard, self.coordinator)
    }
}

fn because(reason: Option<Reason>) -> String {
    reason.map_or_else(String::new, |reason| format!(": {reason}"))
}

fn timeout_detail(sent: bool, last: Option<Reason>) -> String {
    let what = if sent { "" } else { ": no session could be opened" };
    format!("{what}{}", last.map_or_else(String::new, |reason| format!("; last reject: {reason}")))
}

fn no_session_advice(reason: Option<Reason>, at: &Diagnosis) -> String {
    match reason {
        None => at.advice(),
        Some(Reason::Shard) => {
            let account = at.account();
            format!(". {} does not serve it. Check the shard's number in the configuration{account}", at.coordinator)
        }
        Some(Reason::NoSession) => {
            ". All sessions of the coordinator are taken: close other clients, or give it more sessions".to_owned()
        }
        Some(Reason::NoMember) => ". Check that the shard's replicas run and have joined".to_owned() + &at.account(),
        Some(Reason::Lease | Reason::NotCoordinator | Reason::Epoch) => {
            ". Nobody coordinates the shard, or not for long yet. Check that one of its coordinators and its replicas run"
                .to_owned()
                + &at.account()
        }
        Some(_) => String::new(),
    }
}

fn failed_advice(failure: &Failure, at: &Diagnosis) -> String {
    match *failure {
        Failure::NeverSent(reason) => no_session_advice(reason, at),
        Failure::Rejected(
            reason @ (Reason::Shard | Reason::NoMember | Reason::Lease | Reason::NotCoordinator | Reason::Epoch),
        ) => no_session_advice(Some(reason), at),
        Failure::Rejected(Reason::StoreFull) => ". Delete items, or give every replica more memory".to_owned(),
        Failure::Rejected(_) => String::new(),
    }
}
