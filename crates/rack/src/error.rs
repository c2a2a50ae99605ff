//! What can go wrong with a rack.

use std::{io, path::PathBuf};

/// Why something about a rack did not work, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The description of the rack contradicts itself or a limit.
    #[error("{0}")]
    Config(String),
    /// A rack of this name, or a part of one, is there already.
    #[error("rack {name:?} is up already ({found}): end it with `underpass rack down {name}` first")]
    Exists {
        /// The rack's name.
        name: String,
        /// What was found of it.
        found: String,
    },
    /// There is no rack of this name.
    #[error("there is no rack {name:?}; there is: {known}. Start one with `underpass rack up FILE.toml`")]
    NoRack {
        /// The name asked for.
        name: String,
        /// The names of the racks that are up.
        known: String,
    },
    /// The rack has no host of this name.
    #[error("rack {rack:?} has no host {host:?}; it has: {known}")]
    NoHost {
        /// The rack's name.
        rack: String,
        /// The name asked for.
        host: String,
        /// The names of its hosts.
        known: String,
    },
    /// A fault that cannot be set.
    #[error("{0}")]
    Fault(String),
    /// The kernel refused to load or attach the switch, or an operation on its maps.
    #[error("{what}: {source}")]
    Bpf {
        /// What was tried.
        what: String,
        /// The kernel's reason.
        source: libbpf_rs::Error,
    },
    /// The `ip` command failed.
    #[error("`{command}` failed: {message}")]
    Ip {
        /// The command.
        command: String,
        /// What it said, or why it did not run.
        message: String,
    },
    /// A system call or a file operation failed.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// The system's reason.
        source: io::Error,
    },
    /// A file of this crate's own is not as this crate writes it.
    #[error("{}: {reason}: end the rack with `underpass rack down` and start it again", path.display())]
    State {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Not enough rights.
    #[error(
        "a rack needs root (CAP_SYS_ADMIN, CAP_NET_ADMIN, CAP_BPF) to make namespaces and load its switch: run it with sudo"
    )]
    Privilege,
}

/// A result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub(crate) fn io<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        move |source| Self::Io { what: what.into(), source: source.into() }
    }

    pub(crate) fn bpf(what: impl Into<String>) -> impl FnOnce(libbpf_rs::Error) -> Self {
        move |source| Self::Bpf { what: what.into(), source }
    }
}
