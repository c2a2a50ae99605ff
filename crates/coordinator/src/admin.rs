//! The admin socket: one question and one answer, a JSON line each, over a Unix socket.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::SocketAddrV4,
    os::{
        fd::AsFd,
        unix::{
            fs::PermissionsExt,
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, anyhow, bail};
use nix::poll::{PollFd, PollFlags};
use serde::{Deserialize, Serialize};
use underpass_protocol::agent::{self, Wanted};

use crate::stats::Stats;

/// What an agent is asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// How it is.
    Status,
    /// To change a shard that it coordinates.
    Change {
        /// The shard.
        shard: u32,
        /// How.
        command: Command,
    },
}

/// A change of a shard; see [`agent::Command`], which has no wire format.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Command {
    /// A replica shall take part.
    Add {
        /// Its number, unique in the shard.
        id: u32,
        /// Where it listens.
        address: SocketAddrV4,
    },
    /// A replica shall no longer take part.
    Remove {
        /// Its number.
        id: u32,
        /// Even if fewer hold the data than is safe.
        lose_data: bool,
    },
    /// Why a learner is not active yet.
    Promote {
        /// Its number.
        id: u32,
    },
    /// Another replica in place of one.
    Replace {
        /// Number of the old one.
        id: u32,
        /// Number of the new one.
        by: u32,
        /// Where the new one listens.
        address: SocketAddrV4,
    },
    /// Hand the shard over to another coordinator.
    Transfer {
        /// Its address.
        to: SocketAddrV4,
    },
    /// Every member has lost its data: begin empty.
    BeginEmpty,
}

impl From<Command> for agent::Command {
    fn from(command: Command) -> Self {
        let wanted =
            |id, address: SocketAddrV4| Wanted { id, addr: *address.ip(), port: address.port(), replaces: None };
        match command {
            Command::Add { id, address } => Self::Add(wanted(id, address)),
            Command::Remove { id, lose_data } => Self::Remove { id, lose_data },
            Command::Promote { id } => Self::Promote { id },
            Command::Replace { id, by, address } => Self::Replace { id, by: wanted(by, address) },
            Command::Transfer { to } => Self::Transfer { to: to.into() },
            Command::BeginEmpty => Self::BeginEmpty,
        }
    }
}

/// What an agent answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// How it is.
    Status(Box<Stats>),
    /// What was done.
    Done(String),
    /// Why nothing was done, and what to do.
    Refused(String),
}

/// How long an agent may take to say how it is.
const STATUS_WAIT: Duration = Duration::from_secs(5);
/// How long a change may take: an authority that does not answer is given up earlier.
const CHANGE_WAIT: Duration = Duration::from_secs(20);

/// Asks the agent whose admin socket this is, and waits for the answer.
///
/// # Errors
/// Nobody answers there, or what answers is not an agent of this version.
pub fn ask(path: &Path, request: &Request) -> Result<Answer> {
    let mut stream = UnixStream::connect(path).with_context(|| {
        format!(
            "no coordinator answers at {}: is it running, and is this its control socket (--control)?",
            path.display()
        )
    })?;
    let wait = if *request == Request::Status { STATUS_WAIT } else { CHANGE_WAIT };
    stream.set_read_timeout(Some(wait))?;
    stream.write_all(format!("{}\n", serde_json::to_string(request)?).as_bytes())?;
    let mut line = String::new();
    let unknown = match request {
        Request::Status => "",
        Request::Change { .. } => "; whether the change was made is not known: look before you ask again",
    };
    BufReader::new(stream)
        .read_line(&mut line)
        .with_context(|| format!("{} does not answer{unknown}", path.display()))?;
    anyhow::ensure!(!line.is_empty(), "the coordinator at {} ended before it answered{unknown}", path.display());
    serde_json::from_str(&line).with_context(|| format!("{} is answered by something else", path.display()))
}

/// How the agent is.
///
/// # Errors
/// As [`ask`].
pub fn status(path: &Path) -> Result<Stats> {
    match ask(path, &Request::Status)? {
        Answer::Status(stats) => Ok(*stats),
        Answer::Done(says) | Answer::Refused(says) => bail!("the coordinator answers: {says}"),
    }
}

/// Has the agent change a shard; what was done.
///
/// # Errors
/// As [`ask`], and what the agent has against it.
pub fn change(path: &Path, shard: u32, command: Command) -> Result<String> {
    match ask(path, &Request::Change { shard, command })? {
        Answer::Done(says) => Ok(says),
        Answer::Refused(says) => Err(anyhow!(says)),
        Answer::Status(_) => bail!("{} is answered by something else", path.display()),
    }
}

/// Connections at once; more wait.
const CONNECTIONS_MAX: usize = 16;
/// Longest request.
const REQUEST_MAX: usize = 1024;

struct Connection {
    number: u64,
    stream: UnixStream,
    request: Vec<u8>,
    /// Its request was taken; the answer is awaited.
    waits: bool,
}

/// The agent's end of the admin socket. Never blocks.
pub struct Server {
    path: PathBuf,
    /// Where it is now.
    at: PathBuf,
    listener: UnixListener,
    connections: Vec<Connection>,
    next: u64,
}

impl Server {
    /// Listens, open to its owner alone; at `path` once it is [published](Self::publish).
    ///
    /// # Errors
    /// Another agent listens there, or the directory cannot be written.
    pub fn bind(path: &Path) -> Result<Self> {
        let advice = || format!("control socket {}: name another one (`control`)", path.display());
        if let Some(directory) = path.parent() {
            std::fs::create_dir_all(directory).with_context(advice)?;
        }
        if UnixStream::connect(path).is_ok() {
            bail!(
                "another coordinator's agent answers at {}: stop it, or name another socket (`control`)",
                path.display()
            );
        }
        // Under a name of its own until its permissions are right; the rename also replaces what a crash left behind.
        let temporary = path.with_extension(format!("{}.new", std::process::id()));
        let _ = std::fs::remove_file(&temporary);
        let listener = UnixListener::bind(&temporary).with_context(advice)?;
        std::fs::set_permissions(&temporary, std::fs::Permissions::from_mode(0o600)).with_context(advice)?;
        listener.set_nonblocking(true)?;
        Ok(Self { path: path.to_owned(), at: temporary, listener, connections: Vec::new(), next: 0 })
    }

    /// Appears at its path: there is something to be asked about.
    ///
    /// # Errors
    /// The directory cannot be written any more.
    pub fn publish(&mut self) -> Result<()> {
        std::fs::rename(&self.at, &self.path)
            .with_context(|| format!("control socket {}: name another one (`control`)", self.path.display()))?;
        self.at.clone_from(&self.path);
        Ok(())
    }

    /// What becomes ready when there is something to do.
    pub fn fds(&self) -> impl Iterator<Item = PollFd<'_>> {
        let listens = (self.connections.len() < CONNECTIONS_MAX).then(|| self.listener.as_fd());
        let connections = self.connections.iter().map(|connection| {
            // Of one that waits, its end alone is of interest.
            let flags = if connection.waits { PollFlags::empty() } else { PollFlags::POLLIN };
            PollFd::new(connection.stream.as_fd(), flags)
        });
        listens.into_iter().map(|fd| PollFd::new(fd, PollFlags::POLLIN)).chain(connections)
    }

    /// Takes new connections; the requests that have arrived, each with the number to answer it by.
    pub fn requests(&mut self) -> Vec<(u64, Request)> {
        while self.connections.len() < CONNECTIONS_MAX
            && let Ok((stream, _)) = self.listener.accept()
        {
            if stream.set_nonblocking(true).is_ok() {
                self.next += 1;
                self.connections.push(Connection { number: self.next, stream, request: Vec::new(), waits: false });
            }
        }
        let mut requests = Vec::new();
        self.connections.retain_mut(|connection| match connection.read() {
            Some(false) => true,
            // One question for each connection.
            Some(true) if connection.waits => false,
            Some(true) => match serde_json::from_slice(&connection.request) {
                Ok(request) => {
                    connection.waits = true;
                    requests.push((connection.number, request));
                    true
                }
                Err(error) => {
                    connection.answer(&Answer::Refused(format!("this build does not know that request: {error}")));
                    false
                }
            },
            None => false,
        });
        requests
    }

    /// Answers a request, and ends its connection.
    pub fn answer(&mut self, number: u64, answer: &Answer) {
        // Whoever asked may have given up.
        if let Some(at) = self.connections.iter().position(|connection| connection.number == number) {
            self.connections.swap_remove(at).answer(answer);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.at);
    }
}

impl Connection {
    /// Whether something whole has arrived; `None`: it has ended, or sends too much.
    fn read(&mut self) -> Option<bool> {
        let mut buffer = [0; REQUEST_MAX];
        let before = self.request.len();
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => return None,
                Ok(n) => self.request.extend_from_slice(&buffer[..n]),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return None,
            }
            if self.request.len() > REQUEST_MAX {
                return None;
            }
        }
        Some(self.request[before..].contains(&b'\n'))
    }

    fn answer(&mut self, answer: &Answer) {
        let line = serde_json::to_string(answer).expect("answers have string keys alone");
        // A few kilobytes fit a socket's buffer; who does not read them loses them.
        let _ = self.stream.write_all(format!("{line}\n").as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add(id: u32) -> Command {
        Command::Add { id, address: "10.0.0.5:5550".parse().unwrap() }
    }

    #[test]
    fn asked_over_a_private_socket() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("deep/control.sock");
        assert!(status(&path).unwrap_err().to_string().contains("is it running"));
        let mut server = Server::bind(&path).unwrap();
        server.publish().unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(Server::bind(&path).err().unwrap().to_string().contains("another coordinator"));
        let asking = std::thread::spawn({
            let path = path.clone();
            move || (status(&path), change(&path, 3, add(4)), change(&path, 3, add(5)))
        });
        let mut idle = UnixStream::connect(&path).unwrap();
        idle.write_all(b"\"sta").unwrap();
        let mut asked = Vec::new();
        while !asking.is_finished() {
            for (number, request) in server.requests() {
                let answer = match &request {
                    Request::Status => Answer::Status(Box::new(crate::stats::tests::stats())),
                    Request::Change { command, .. } if *command == add(4) => Answer::Done("added".into()),
                    Request::Change { .. } => Answer::Refused("no".into()),
                };
                asked.push(request);
                server.answer(number, &answer);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let (first, second, third) = asking.join().unwrap();
        assert_eq!(first.unwrap(), crate::stats::tests::stats());
        assert_eq!((second.unwrap(), third.unwrap_err().to_string()), ("added".into(), "no".into()));
        assert_eq!(asked[1], Request::Change { shard: 3, command: add(4) });

        // What is no request is told so; what is none at all is cut off; who gives up is forgotten.
        idle.write_all(b"\n").unwrap();
        let mut flood = UnixStream::connect(&path).unwrap();
        flood.write_all(&[b'x'; REQUEST_MAX + 1]).unwrap();
        let mut leaves = UnixStream::connect(&path).unwrap();
        leaves.write_all(b"\"status\"\n").unwrap();
        assert_eq!(server.requests().len(), 1);
        let mut text = String::new();
        idle.read_to_string(&mut text).unwrap();
        assert!(text.contains("does not know that request"), "{text}");
        assert_eq!(server.connections.len(), 1);
        assert!(server.requests().is_empty(), "asked once");
        drop(leaves);
        assert!(server.requests().is_empty());
        assert_eq!(server.connections.len(), 0);
        // A crash leaves the file behind; the next agent replaces it.
        std::mem::forget(server);
        drop(UnixListener::bind(directory.path().join("other")));
        std::fs::rename(directory.path().join("other"), &path).unwrap();
        let mut again = Server::bind(&path).unwrap();
        again.publish().unwrap();
        drop(again);
        assert!(!path.exists());
    }

    #[test]
    fn requests_are_readable() {
        let request = Request::Change { shard: 3, command: add(4) };
        let text = r#"{"change":{"shard":3,"command":{"add":{"id":4,"address":"10.0.0.5:5550"}}}}"#;
        assert_eq!(serde_json::to_string(&request).unwrap(), text);
        assert_eq!(serde_json::from_str::<Request>(text).unwrap(), request);
    }
}
