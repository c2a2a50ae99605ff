//! What an agent tells about itself: over its control socket, as one JSON line, and to people as a table.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    io::{self, BufRead, BufReader, Read, Write},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::{
            fs::PermissionsExt,
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::counters;

/// An agent at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// `xdp` or `socket`.
    pub datapath: String,
    /// How it runs.
    pub mode: String,
    /// Address and port.
    pub listen: String,
    /// Process.
    pub pid: u32,
    /// Milliseconds since the agent started.
    pub uptime_ms: u64,
    /// Sessions open.
    pub sessions_open: usize,
    /// Sessions that there can be.
    pub sessions: usize,
    /// The shards.
    pub shards: Vec<ShardStats>,
    /// Counters by name ([`crate::counters`]), and what the data path counts beside them.
    pub counters: BTreeMap<String, u64>,
}

/// A shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardStats {
    /// Its number.
    pub shard: u32,
    /// Its epoch.
    pub epoch: u32,
    /// `starting`, `serving` or `stopping`.
    pub state: String,
    /// Every write up to this seq is resolved.
    pub stable: u64,
    /// Writes that are starting, pending or committing.
    pub unresolved: u32,
    /// Whether writes that may grow the store are refused.
    pub store_full: bool,
    /// Its replicas.
    pub members: Vec<MemberStats>,
}

/// A replica.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberStats {
    /// Address and port.
    pub address: String,
    /// Which life of the process; 0: not known.
    pub incarnation: u64,
    /// Whether reads go to it.
    pub serving: bool,
    /// Milliseconds since it was last heard of.
    pub silent_ms: Option<u64>,
    /// Bytes of its budget in use.
    pub used_bytes: u64,
    /// Its budget.
    pub budget_bytes: u64,
    /// Items it holds.
    pub items: u64,
    /// Link-layer address that its packets go to; `None` if the kernel finds its way, empty if it is not known.
    pub next_hop: Option<String>,
    /// What is wrong with it; empty if nothing.
    pub trouble: String,
}

impl Stats {
    /// For people. With the stats of `seconds` before, counters show their rate as well.
    pub fn table(&self, before: Option<(&Stats, f64)>) -> String {
        let mut out = String::new();
        // Writing to a string does not fail.
        let _ = self.write_table(&mut out, before);
        out
    }

    fn write_table(&self, out: &mut String, before: Option<(&Stats, f64)>) -> std::fmt::Result {
        writeln!(
            out,
            "coordinator {} ({}, {}), process {}, up {} s, sessions {} of {}",
            self.listen,
            self.datapath,
            self.mode,
            self.pid,
            self.uptime_ms / 1000,
            self.sessions_open,
            self.sessions
        )?;
        for shard in &self.shards {
            writeln!(
                out,
                "shard {} {}, epoch {}, {} unresolved writes{}",
                shard.shard,
                shard.state,
                shard.epoch,
                shard.unresolved,
                if shard.store_full { ", FULL: refuses writes that may grow the store" } else { "" }
            )?;
            for (index, member) in shard.members.iter().enumerate() {
                let mebibytes = |bytes: u64| bytes as f64 / f64::from(1 << 20);
                writeln!(
                    out,
                    "  replica {index} {:<21} {:<9} {:>10} items {:>9.1} of {:.0} MiB{}{}{}",
                    member.address,
                    if member.serving { "serving" } else { "NOT USED" },
                    member.items,
                    mebibytes(member.used_bytes),
                    mebibytes(member.budget_bytes),
                    member.next_hop.as_deref().map_or(String::new(), |hop| {
                        format!(", via {}", if hop.is_empty() { "UNRESOLVED" } else { hop })
                    }),
                    if member.trouble.is_empty() { "" } else { ": " },
                    member.trouble
                )?;
            }
        }
        let known = counters::all();
        let meaning =
            |name: &str| known.iter().find(|counter| counter.name == name).map_or("", |counter| &counter.meaning);
        let order = |name: &str| known.iter().position(|counter| counter.name == name).unwrap_or(known.len());
        let mut shown: Vec<_> = self.counters.iter().filter(|(_, count)| **count > 0).collect();
        shown.sort_by_key(|(name, _)| (order(name), name.as_str()));
        for (name, count) in shown {
            let rate = before.map_or(String::new(), |(before, seconds)| {
                let earlier = before.counters.get(name).copied().unwrap_or(0);
                format!(" {:>12.0}/s", count.saturating_sub(earlier) as f64 / seconds)
            });
            writeln!(out, "{count:>15}{rate}  {name:<22} {}", meaning(name))?;
        }
        Ok(())
    }
}

/// Connections served at once; more wait.
const CONNECTIONS_MAX: usize = 16;
/// Longest request.
const REQUEST_MAX: usize = 64;

/// The agent's end of the control socket. Never blocks.
pub struct Server {
    path: PathBuf,
    listener: UnixListener,
    connections: Vec<(UnixStream, Vec<u8>)>,
}

impl Server {
    /// Listens at `path`, open to its owner alone.
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
        std::fs::rename(&temporary, path).with_context(advice)?;
        listener.set_nonblocking(true)?;
        Ok(Self { path: path.to_owned(), listener, connections: Vec::new() })
    }

    /// What becomes readable when there is something to do.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let listens = (self.connections.len() < CONNECTIONS_MAX).then(|| self.listener.as_fd());
        listens.into_iter().chain(self.connections.iter().map(|(stream, _)| stream.as_fd()))
    }

    /// Takes new connections and answers requests that have arrived.
    pub fn serve(&mut self, answer: &mut dyn FnMut() -> Result<Stats>) {
        while self.connections.len() < CONNECTIONS_MAX
            && let Ok((stream, _)) = self.listener.accept()
        {
            if stream.set_nonblocking(true).is_ok() {
                self.connections.push((stream, Vec::new()));
            }
        }
        self.connections.retain_mut(|(stream, request)| match read_request(stream, request) {
            Request::Unfinished => true,
            Request::Closed => false,
            Request::Whole => {
                let text = match &request[..] {
                    b"stats\n" => answer().and_then(|stats| Ok(serde_json::to_string(&stats)?)),
                    _ => Err(anyhow::anyhow!("unknown request; there is `stats`")),
                };
                let line =
                    text.unwrap_or_else(|error| serde_json::json!({ "error": format!("{error:#}") }).to_string());
                // A few kilobytes fit a socket's buffer; who does not read them loses them.
                let _ = stream.write_all(format!("{line}\n").as_bytes());
                false
            }
        });
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

enum Request {
    Unfinished,
    Whole,
    Closed,
}

fn read_request(stream: &mut UnixStream, request: &mut Vec<u8>) -> Request {
    let mut buffer = [0; REQUEST_MAX];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return Request::Closed,
            Ok(n) => request.extend_from_slice(&buffer[..n]),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Request::Unfinished,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return Request::Closed,
        }
        if request.contains(&b'\n') {
            return Request::Whole;
        }
        if request.len() >= REQUEST_MAX {
            return Request::Closed;
        }
    }
}

/// Asks the agent whose control socket this is.
///
/// # Errors
/// Nobody answers there, or what answers is not an agent of this version.
pub fn ask(path: &Path) -> Result<Stats> {
    let mut stream = UnixStream::connect(path).with_context(|| {
        format!(
            "no coordinator answers at {}: is it running, and is this its control socket (--control)?",
            path.display()
        )
    })?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    stream.write_all(b"stats\n")?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).with_context(|| format!("{} does not answer", path.display()))?;
    #[derive(Deserialize)]
    struct Failure {
        error: String,
    }
    if let Ok(Failure { error }) = serde_json::from_str(&line) {
        bail!("the coordinator answers: {error}");
    }
    serde_json::from_str(&line).with_context(|| format!("{} is answered by something else", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats() -> Stats {
        Stats {
            datapath: "socket".into(),
            mode: "1 thread".into(),
            listen: "127.0.0.1:5550".into(),
            pid: 1,
            uptime_ms: 61_000,
            sessions_open: 3,
            sessions: 64,
            shards: vec![ShardStats {
                shard: 0,
                epoch: 2,
                state: "serving".into(),
                stable: 9,
                unresolved: 1,
                store_full: true,
                members: vec![MemberStats {
                    address: "127.0.0.1:5551".into(),
                    incarnation: 7,
                    serving: false,
                    silent_ms: Some(1200),
                    used_bytes: 15 << 20,
                    budget_bytes: 16 << 20,
                    items: 1000,
                    next_hop: None,
                    trouble: "is silent".into(),
                }],
            }],
            counters: [("read".to_owned(), 1000), ("write".to_owned(), 0), ("reject_token".to_owned(), 5)].into(),
        }
    }

    #[test]
    fn a_table_shows_what_happened_and_how_fast() {
        let now = stats();
        let mut before = stats();
        before.counters.insert("read".into(), 500);
        let table = now.table(Some((&before, 2.0)));
        assert!(table.contains("250/s  read"), "{table}");
        assert!(table.contains("rejected: wrong token or reply address"), "{table}");
        assert!(table.contains("NOT USED") && table.contains(": is silent") && table.contains("FULL"), "{table}");
        assert!(!table.contains("writes ordered"), "what never happened is left out: {table}");
        assert!(table.find("read").unwrap() < table.find("reject_token").unwrap());
    }

    #[test]
    fn asked_over_a_private_socket() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("deep/control.sock");
        assert!(ask(&path).unwrap_err().to_string().contains("is it running"));
        let mut server = Server::bind(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(Server::bind(&path).err().unwrap().to_string().contains("another coordinator"));
        let asking = std::thread::spawn({
            let path = path.clone();
            move || (ask(&path), ask(&path))
        });
        let mut failing = true;
        let mut idle = UnixStream::connect(&path).unwrap();
        idle.write_all(b"sta").unwrap();
        while !asking.is_finished() {
            server.serve(&mut || {
                if std::mem::take(&mut failing) { Err(anyhow::anyhow!("busy")) } else { Ok(stats()) }
            });
            std::thread::sleep(Duration::from_millis(1));
        }
        let (first, second) = asking.join().unwrap();
        assert!(first.unwrap_err().to_string().contains("busy"));
        assert_eq!(second.unwrap(), stats());
        // What is no request is told so, and what is none at all is cut off.
        idle.write_all(b"tsu\n").unwrap();
        let mut flood = UnixStream::connect(&path).unwrap();
        flood.write_all(&[b'x'; 200]).unwrap();
        server.serve(&mut || Ok(stats()));
        let mut text = String::new();
        idle.read_to_string(&mut text).unwrap();
        assert!(text.contains("unknown request"), "{text}");
        assert_eq!(server.connections.len(), 0);
        // A crash leaves the file behind; the next agent replaces it.
        std::mem::forget(server);
        drop(UnixListener::bind(directory.path().join("other")));
        std::fs::rename(directory.path().join("other"), &path).unwrap();
        drop(Server::bind(&path).unwrap());
        assert!(!path.exists());
    }
}
