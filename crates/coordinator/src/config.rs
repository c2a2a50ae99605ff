//! Configuration: from a TOML file, from the command line, or from code.

use std::{
    collections::BTreeSet,
    fmt,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    str::FromStr,
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::ValueEnum;
use serde::Deserialize;
use underpass_abi::abi::UP_SHARD_SLOTS;
use underpass_authority::{Config as Authority, FileConfig};
use underpass_protocol::{
    agent::LEASE_MS,
    control::ClusterKey,
    wire::{Endpoint, MEMBERS_MAX},
};

/// Buckets of the dirty set for each shard slot, by default: with 4 ways each, as many keys as there are sessions.
pub const BUCKETS_DEFAULT: u32 = 1 << 14;
/// Sessions by default: all that an index can tell.
pub const SESSIONS_DEFAULT: u32 = 1 << 16;
/// A session not used for this long is closed, by default.
pub const IDLE_MS_DEFAULT: u64 = 60_000;
/// Time between heartbeats, by default.
pub const HEARTBEAT_MS_DEFAULT: u64 = 10;
/// A member silent for this long gets no reads, by default.
pub const SUSPECT_MS_DEFAULT: u64 = 40;
/// A member silent for this long is removed, by default.
pub const LOST_MS_DEFAULT: u64 = 600;
/// How long a take-over waits for members that do not answer, by default.
pub const REACH_MS_DEFAULT: u64 = 300;
/// A write pending for this long is asked about, by default.
pub const STUCK_MS_DEFAULT: u64 = 1000;
/// Where the authority's records are, by default.
pub const STATE_DEFAULT: &str = "/var/lib/underpass/coordinator";
/// The agent's control socket, by default.
pub const CONTROL_DEFAULT: &str = "/run/underpass/coordinator.sock";

/// Which implementation handles the packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum DataPathKind {
    /// In the kernel, in front of the network stack.
    Xdp,
    /// Batched UDP sockets: runs anywhere.
    Socket,
}

impl fmt::Display for DataPathKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Xdp => "xdp",
            Self::Socket => "socket",
        })
    }
}

/// How `xdp` sends a write to every replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum WritePath {
    /// Cloned inside XDP.
    Broadcast,
    /// Cloned at TC ingress, for drivers that cannot transmit from XDP.
    Tc,
    /// The published design: forwarded by user space, cloned at TC egress.
    Published,
}

/// Where `xdp` runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// In the driver.
    Native,
    /// In the kernel's generic hook: works with every driver, slower.
    Generic,
}

/// An IPv4 address and a UDP port, written `10.0.0.1:5550`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Address(pub Endpoint);

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<std::net::SocketAddr>() {
            Ok(std::net::SocketAddr::V4(address)) => Ok(Self(address.into())),
            Ok(_) => Err(format!("{text} is an IPv6 address; only IPv4 is supported")),
            Err(_) => Err(format!("`{text}` is not an IPv4 address and port; write it like 10.0.0.1:5550")),
        }
    }
}

impl TryFrom<String> for Address {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

/// Everything that can be set, all of it optional: the content of a configuration file, or of the command line.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, clap::Args)]
#[serde(deny_unknown_fields)]
pub struct Options {
    /// The coordinator's own address and port [default: 127.0.0.1:5550]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: Option<Address>,
    /// What handles the packets [default: xdp; socket on loopback]
    #[arg(long, value_enum)]
    pub datapath: Option<DataPathKind>,
    /// Network device for xdp [default: the one that has the address]
    #[arg(long)]
    pub device: Option<String>,
    /// Where xdp runs [default: native]
    #[arg(long, value_enum)]
    pub mode: Option<Mode>,
    /// How xdp sends a write to every replica [default: broadcast]
    #[arg(long, value_enum)]
    pub write_path: Option<WritePath>,
    /// Buckets of the dirty set for each shard, a power of two [default: 16384]
    #[arg(long)]
    pub buckets: Option<u32>,
    /// Sessions that can be open at once, a power of two [default: 65536]
    #[arg(long)]
    pub sessions: Option<u32>,
    /// Close a session not used for this long [default: 60000]
    #[arg(long)]
    pub idle_ms: Option<u64>,
    /// Time between heartbeats to replicas [default: 10]
    #[arg(long)]
    pub heartbeat_ms: Option<u64>,
    /// A replica silent for this long gets no reads [default: 40]
    #[arg(long)]
    pub suspect_ms: Option<u64>,
    /// A replica silent for this long is removed from the shard [default: 600]
    #[arg(long)]
    pub lost_ms: Option<u64>,
    /// How long a take-over waits for replicas that do not answer [default: 300]
    #[arg(long)]
    pub reach_ms: Option<u64>,
    /// A write that is pending for this long is repaired [default: 1000]
    #[arg(long)]
    pub stuck_ms: Option<u64>,
    /// Length of leases of a shard that is on record nowhere yet [default: 1000]
    #[arg(long)]
    pub lease_ms: Option<u64>,
    /// File with the 32 hexadecimal digits that coordinators and replicas share [default: none; their network is trusted]
    #[arg(long, value_name = "FILE")]
    pub cluster_key_file: Option<PathBuf>,
    /// Directory of the shards' records, if no authority is configured [default: /var/lib/underpass/coordinator]
    #[arg(long, value_name = "DIRECTORY")]
    pub state: Option<PathBuf>,
    /// What keeps the shards' records, in a file.
    #[arg(skip)]
    pub authority: Option<Authority>,
    /// Unix socket for `stats` and commands [default: /run/underpass/coordinator.sock]
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
    /// CPUs for the threads of the socket data path, one each [default: all]
    #[arg(long, value_delimiter = ',')]
    pub cpus: Option<Vec<usize>>,
    /// The shards, in a file.
    #[arg(skip)]
    #[serde(rename = "shard", default)]
    pub shards: Vec<ShardOptions>,
    /// Number of the one shard to serve [default: 0, if there is a --member]
    #[arg(long = "shard")]
    #[serde(skip)]
    pub shard_id: Option<u32>,
    /// A replica of the shard, for its first start; give it once for each
    #[arg(long = "member", value_name = "ADDRESS:PORT")]
    #[serde(skip)]
    pub members: Vec<Address>,
}

/// A shard in a configuration file.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardOptions {
    /// Its number.
    pub id: u32,
    /// Its replicas, for its first start; afterwards the record counts.
    #[serde(default)]
    pub members: Vec<Address>,
}

/// A shard to serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Its number.
    pub id: u32,
    /// Its replicas. If there is no record of the shard yet, one is made that wants these; else the record counts.
    pub members: Vec<Endpoint>,
}

/// A whole configuration. [`Config::validate`] tells whether it can be meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The coordinator's own address and port. Port 0, from code alone: any that is free (`socket`).
    pub listen: Endpoint,
    /// What handles the packets.
    pub datapath: DataPathKind,
    /// `xdp`: network device; `None`: the one that has the address.
    pub device: Option<String>,
    /// `xdp`: where it runs.
    pub mode: Mode,
    /// `xdp`: how writes are multiplied.
    pub write_path: WritePath,
    /// Buckets of the dirty set for each shard slot.
    pub buckets: u32,
    /// Sessions.
    pub sessions: u32,
    /// A session not used for this long, in milliseconds, is closed.
    pub idle_ms: u64,
    /// Milliseconds between heartbeats.
    pub heartbeat_ms: u64,
    /// A member silent for this long gets no reads.
    pub suspect_ms: u64,
    /// A member silent for this long is removed.
    pub lost_ms: u64,
    /// How long a take-over waits for members that do not answer.
    pub reach_ms: u64,
    /// A write pending for this long is asked about.
    pub stuck_ms: u64,
    /// Length of leases of shards that this coordinator makes a record of.
    pub lease_ms: u64,
    /// File with the cluster key.
    pub cluster_key_file: Option<PathBuf>,
    /// What keeps the records; `None`, from code alone: nothing outlives the process.
    pub authority: Option<Authority>,
    /// The control socket; `None`, from code alone: there is none.
    pub control: Option<PathBuf>,
    /// `socket`: a thread on each of these CPUs; empty: one on each that this process may use.
    pub cpus: Vec<usize>,
    /// The shards.
    pub shards: Vec<Shard>,
}

impl Default for Config {
    /// A socket coordinator on loopback, without a shard.
    fn default() -> Self {
        Self {
            listen: Endpoint { addr: Ipv4Addr::LOCALHOST, port: underpass_abi::wire::UP_PORT_DEFAULT as u16 },
            datapath: DataPathKind::Socket,
            device: None,
            mode: Mode::Native,
            write_path: WritePath::Broadcast,
            buckets: BUCKETS_DEFAULT,
            sessions: SESSIONS_DEFAULT,
            idle_ms: IDLE_MS_DEFAULT,
            heartbeat_ms: HEARTBEAT_MS_DEFAULT,
            suspect_ms: SUSPECT_MS_DEFAULT,
            lost_ms: LOST_MS_DEFAULT,
            reach_ms: REACH_MS_DEFAULT,
            stuck_ms: STUCK_MS_DEFAULT,
            lease_ms: LEASE_MS,
            cluster_key_file: None,
            authority: None,
            control: None,
            cpus: Vec::new(),
            shards: Vec::new(),
        }
    }
}

impl Options {
    /// Reads a file.
    ///
    /// # Errors
    /// It cannot be read, is not TOML, or sets what does not exist.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        toml::from_str(&text).with_context(|| format!("{} is not a coordinator's configuration", path.display()))
    }

    /// These options, and those of `other` where these say nothing.
    pub fn or(self, other: Self) -> Self {
        Self {
            listen: self.listen.or(other.listen),
            datapath: self.datapath.or(other.datapath),
            device: self.device.or(other.device),
            mode: self.mode.or(other.mode),
            write_path: self.write_path.or(other.write_path),
            buckets: self.buckets.or(other.buckets),
            sessions: self.sessions.or(other.sessions),
            idle_ms: self.idle_ms.or(other.idle_ms),
            heartbeat_ms: self.heartbeat_ms.or(other.heartbeat_ms),
            suspect_ms: self.suspect_ms.or(other.suspect_ms),
            lost_ms: self.lost_ms.or(other.lost_ms),
            reach_ms: self.reach_ms.or(other.reach_ms),
            stuck_ms: self.stuck_ms.or(other.stuck_ms),
            lease_ms: self.lease_ms.or(other.lease_ms),
            cluster_key_file: self.cluster_key_file.or(other.cluster_key_file),
            state: self.state.or(other.state),
            authority: self.authority.or(other.authority),
            control: self.control.or(other.control),
            cpus: self.cpus.or(other.cpus),
            shards: if self.shards.is_empty() { other.shards } else { self.shards },
            shard_id: self.shard_id.or(other.shard_id),
            members: if self.members.is_empty() { other.members } else { self.members },
        }
    }

    /// The configuration that these options describe.
    ///
    /// # Errors
    /// What contradicts itself or cannot be meant, and what to do about it.
    pub fn into_config(self) -> Result<Config> {
        let defaults = Config::default();
        let listen = self.listen.map_or(defaults.listen, |address| address.0);
        ensure!(listen.port != 0, "listen: port 0 is no port; clients and replicas must know it (5550 is usual)");
        let on_loopback = listen.addr.is_loopback();
        let datapath = self.datapath.unwrap_or(if on_loopback { DataPathKind::Socket } else { DataPathKind::Xdp });
        if datapath == DataPathKind::Socket {
            for (given, name) in [
                (self.device.is_some(), "device"),
                (self.mode.is_some(), "mode"),
                (self.write_path.is_some(), "write_path"),
            ] {
                let because = if self.datapath.is_none() { ", which is the default on loopback" } else { "" };
                ensure!(
                    !given,
                    "{name} is of the xdp data path, and this is socket{because}: remove it or change datapath"
                );
            }
        } else {
            ensure!(
                self.cpus.is_none(),
                "cpus is of the socket data path, and this is xdp: remove it or change datapath"
            );
        }
        let mut shards: Vec<Shard> = self
            .shards
            .into_iter()
            .map(|shard| Shard { id: shard.id, members: shard.members.into_iter().map(|address| address.0).collect() })
            .collect();
        if !self.members.is_empty() || self.shard_id.is_some() {
            ensure!(
                shards.is_empty(),
                "--shard and --member describe the one shard of a coordinator, but the file has shards too: use one or the other"
            );
            shards.push(Shard {
                id: self.shard_id.unwrap_or(0),
                members: self.members.into_iter().map(|address| address.0).collect(),
            });
        }
        ensure!(
            self.state.is_none() || self.authority.is_none(),
            "state names the directory of a local file of records, and [authority] names an authority too: use one or the other"
        );
        let file = |state: Option<PathBuf>| {
            Authority::File(FileConfig { directory: state.unwrap_or_else(|| STATE_DEFAULT.into()) })
        };
        let config = Config {
            listen,
            datapath,
            device: self.device,
            mode: self.mode.unwrap_or(defaults.mode),
            write_path: self.write_path.unwrap_or(defaults.write_path),
            buckets: self.buckets.unwrap_or(defaults.buckets),
            sessions: self.sessions.unwrap_or(defaults.sessions),
            idle_ms: self.idle_ms.unwrap_or(defaults.idle_ms),
            heartbeat_ms: self.heartbeat_ms.unwrap_or(defaults.heartbeat_ms),
            suspect_ms: self.suspect_ms.unwrap_or(defaults.suspect_ms),
            lost_ms: self.lost_ms.unwrap_or(defaults.lost_ms),
            reach_ms: self.reach_ms.unwrap_or(defaults.reach_ms),
            stuck_ms: self.stuck_ms.unwrap_or(defaults.stuck_ms),
            lease_ms: self.lease_ms.unwrap_or(defaults.lease_ms),
            cluster_key_file: self.cluster_key_file,
            authority: Some(self.authority.unwrap_or_else(|| file(self.state))),
            control: Some(self.control.unwrap_or_else(|| CONTROL_DEFAULT.into())),
            cpus: self.cpus.unwrap_or_default(),
            shards,
        };
        config.validate()?;
        Ok(config)
    }
}

impl Config {
    /// Refuses what cannot be meant, or cannot work.
    pub fn validate(&self) -> Result<()> {
        usable("listen", self.listen)?;
        if self.datapath == DataPathKind::Xdp && self.listen.addr.is_loopback() {
            bail!(
                "listen: {} is on loopback, where there is no XDP: listen on a network device's address, or use the socket \
                 data path",
                self.listen
            );
        }
        if let Some(device) = &self.device {
            let len = device.len();
            ensure!(len > 0 && len < libc::IFNAMSIZ, "device: `{device}` is not the name of a network device");
        }
        power_of_two("buckets", self.buckets, 64, 1 << 20)?;
        power_of_two("sessions", self.sessions, 1, 1 << 16)?;
        between("idle_ms", self.idle_ms, 5_000, 24 * 3600 * 1000)?;
        between("heartbeat_ms", self.heartbeat_ms, 1, 1000)?;
        between("reach_ms", self.reach_ms, 10, 60_000)?;
        between("stuck_ms", self.stuck_ms, 10, 600_000)?;
        between("lease_ms", self.lease_ms, 100, 60_000)?;
        for (less, less_ms, more, more_ms, why) in [
            (
                "heartbeat_ms",
                self.heartbeat_ms,
                "suspect_ms",
                self.suspect_ms,
                "a replica is heard of once in a heartbeat",
            ),
            (
                "suspect_ms",
                self.suspect_ms,
                "lost_ms",
                self.lost_ms,
                "a silent replica gets no reads before it is removed",
            ),
            (
                "lost_ms",
                self.lost_ms,
                "lease_ms",
                self.lease_ms,
                "a silent replica is removed before it ends the lease",
            ),
        ] {
            ensure!(less_ms < more_ms, "{less} ({less_ms}) must be less than {more} ({more_ms}): {why}");
        }
        ensure!(self.cpus.len() <= 256, "cpus: {} are given; at most 256 are supported", self.cpus.len());
        for (i, cpu) in self.cpus.iter().enumerate() {
            ensure!(!self.cpus[..i].contains(cpu), "cpus: {cpu} is given twice; each thread has a CPU of its own");
        }
        self.validate_shards()
    }

    /// The key that agents and replicas share.
    ///
    /// # Errors
    /// Its file cannot be read, or holds something else.
    pub fn cluster_key(&self) -> Result<ClusterKey> {
        let Some(path) = &self.cluster_key_file else { return Ok(ClusterKey::default()) };
        let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        text.parse().map_err(|says: String| anyhow!("{}: {says}", path.display()))
    }

    fn validate_shards(&self) -> Result<()> {
        ensure!(
            !self.shards.is_empty(),
            "no shard to serve: give one (--shard NUMBER, or its replicas: --member ADDRESS:PORT), or [[shard]] sections in a \
             file"
        );
        let mut addresses = BTreeSet::new();
        for (i, shard) in self.shards.iter().enumerate() {
            let id = shard.id;
            for other in &self.shards[..i] {
                ensure!(other.id != id, "shard {id} is given twice");
                ensure!(
                    other.id % UP_SHARD_SLOTS != id % UP_SHARD_SLOTS,
                    "shards {} and {id} need the same slot ({} = {id} modulo {UP_SHARD_SLOTS}): number one of them otherwise, \
                     or give it to another coordinator",
                    other.id,
                    id % UP_SHARD_SLOTS
                );
            }
            let count = shard.members.len();
            ensure!(count <= MEMBERS_MAX, "shard {id} has {count} members; it can have {MEMBERS_MAX} at most");
            for &member in &shard.members {
                usable(&format!("shard {id}: member"), member)?;
                ensure!(member.port != 0, "shard {id}: member {member}: port 0 is no port");
                ensure!(member != self.listen, "shard {id}: member {member} is the coordinator's own address");
                ensure!(
                    addresses.insert(member),
                    "shard {id}: member {member} is given twice; a replica is a member of one shard, once"
                );
                ensure!(
                    member.addr.is_loopback() == self.listen.addr.is_loopback(),
                    "shard {id}: the coordinator listens on {} and cannot reach {member}: loopback and other addresses do \
                     not mix",
                    self.listen
                );
            }
        }
        Ok(())
    }
}

/// Whether a host can have this address.
fn usable(what: &str, endpoint: Endpoint) -> Result<()> {
    let addr = endpoint.addr;
    ensure!(
        !addr.is_unspecified(),
        "{what}: {addr} is any address; replicas and clients check where packets come from, so name one"
    );
    ensure!(!addr.is_multicast() && !addr.is_broadcast(), "{what}: {addr} is not the address of one host");
    Ok(())
}

fn power_of_two(what: &str, value: u32, least: u32, most: u32) -> Result<()> {
    ensure!(
        value.is_power_of_two() && (least..=most).contains(&value),
        "{what}: {value} is not a power of two from {least} to {most}"
    );
    Ok(())
}

fn between(what: &str, value: u64, least: u64, most: u64) -> Result<()> {
    ensure!((least..=most).contains(&value), "{what}: {value} is not from {least} to {most}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(toml: &str) -> Result<Config> {
        toml::from_str::<Options>(toml)?.into_config()
    }

    const SHARD: &str = "[[shard]]\nid = 0\nmembers = [\"10.0.0.2:5550\", \"10.0.0.3:5550\"]\n";

    #[test]
    fn a_whole_file() {
        let config = parse(
            r#"
            listen = "10.0.0.1:5550"
            datapath = "xdp"
            device = "eth0"
            write_path = "tc"
            mode = "generic"
            buckets = 1024
            sessions = 4096
            idle_ms = 30000
            heartbeat_ms = 5
            suspect_ms = 50
            lost_ms = 700
            lease_ms = 800
            reach_ms = 200
            stuck_ms = 2000
            cluster_key_file = "/etc/key"
            state = "/tmp/state"
            control = "/tmp/control"
            [[shard]]
            id = 0
            members = ["10.0.0.2:5550", "10.0.0.3:5550", "10.0.0.4:5550"]
            [[shard]]
            id = 9
            members = ["10.0.0.2:5551"]
            "#,
        )
        .unwrap();
        assert_eq!(config.datapath, DataPathKind::Xdp);
        assert_eq!(config.device.as_deref(), Some("eth0"));
        assert_eq!((config.mode, config.write_path), (Mode::Generic, WritePath::Tc));
        assert_eq!((config.buckets, config.sessions, config.idle_ms, config.heartbeat_ms), (1024, 4096, 30000, 5));
        assert_eq!((config.suspect_ms, config.lost_ms, config.lease_ms), (50, 700, 800));
        assert_eq!((config.reach_ms, config.stuck_ms), (200, 2000));
        assert_eq!(config.cluster_key_file.as_deref(), Some(Path::new("/etc/key")));
        assert_eq!(config.authority, Some(Authority::File(FileConfig { directory: "/tmp/state".into() })));
        assert_eq!(config.shards.len(), 2);
        assert_eq!(config.shards[1], Shard { id: 9, members: vec!["10.0.0.2:5551".parse::<Address>().unwrap().0] });
    }

    #[test]
    fn defaults() {
        let config = parse("[[shard]]\nid = 0\nmembers = [\"127.0.0.1:5551\"]").unwrap();
        assert_eq!(config.listen.to_string(), "127.0.0.1:5550");
        assert_eq!(config.datapath, DataPathKind::Socket);
        assert_eq!(config.authority, Some(Authority::File(FileConfig { directory: STATE_DEFAULT.into() })));
        assert!(parse("[[shard]]\nid = 0").unwrap().shards[0].members.is_empty(), "they are on record");
        let config = parse(&format!("listen = \"10.0.0.1:5550\"\n{SHARD}")).unwrap();
        assert_eq!(config.datapath, DataPathKind::Xdp);
        assert_eq!((config.mode, config.write_path), (Mode::Native, WritePath::Broadcast));
    }

    #[test]
    fn the_command_line_comes_before_the_file() {
        let file: Options =
            toml::from_str(&format!("listen = \"10.0.0.1:5550\"\nbuckets = 64\nsessions = 64\n{SHARD}")).unwrap();
        let line = Options { buckets: Some(128), datapath: Some(DataPathKind::Socket), ..Options::default() };
        let config = line.or(file).into_config().unwrap();
        assert_eq!((config.buckets, config.sessions, config.datapath), (128, 64, DataPathKind::Socket));
        assert_eq!(config.shards[0].members.len(), 2);
    }

    /// What is wrong, and a piece of what is said about it.
    #[test]
    fn what_cannot_be_meant_is_refused() {
        let on_nic = |line: &str| format!("listen = \"10.0.0.1:5550\"\n{line}\n{SHARD}");
        let with_shards = |shards: &str| format!("listen = \"10.0.0.1:5550\"\n{shards}");
        let table = [
            (String::new(), "no shard to serve"),
            (on_nic("listne = \"10.0.0.1:1\""), "unknown field `listne`"),
            (on_nic("datapath = \"dpdk\""), "unknown variant `dpdk`"),
            (on_nic("buckets = 1000"), "buckets: 1000 is not a power of two"),
            (on_nic("buckets = 32"), "from 64"),
            (on_nic("sessions = 131072"), "sessions: 131072"),
            (on_nic("sessions = 0"), "sessions: 0"),
            (on_nic("idle_ms = 10"), "idle_ms: 10"),
            (on_nic("heartbeat_ms = 0"), "heartbeat_ms: 0"),
            (on_nic("heartbeat_ms = 40"), "heartbeat_ms (40) must be less than suspect_ms (40)"),
            (on_nic("suspect_ms = 600"), "suspect_ms (600) must be less than lost_ms (600)"),
            (on_nic("lost_ms = 1000"), "lost_ms (1000) must be less than lease_ms (1000)"),
            (on_nic("lease_ms = 60001"), "lease_ms: 60001"),
            (on_nic("reach_ms = 1"), "reach_ms: 1"),
            (on_nic("stuck_ms = 1"), "stuck_ms: 1"),
            (on_nic("state = \"/s\"\n[authority]\nkind = \"file\"\ndirectory = \"/d\""), "use one or the other"),
            (on_nic("[authority]\nkind = \"zookeeper\""), "unknown variant `zookeeper`"),
            (on_nic("cpus = [0]"), "cpus is of the socket data path"),
            (on_nic("datapath = \"socket\"\ncpus = [0, 1, 0]"), "cpus: 0 is given twice"),
            (on_nic("datapath = \"socket\"\ndevice = \"eth0\""), "device is of the xdp data path"),
            (on_nic("datapath = \"socket\"\nmode = \"native\""), "mode is of the xdp data path"),
            (on_nic("datapath = \"socket\"\nwrite_path = \"tc\""), "write_path is of the xdp data path"),
            (on_nic("device = \"a-name-too-long-for-linux\""), "not the name of a network device"),
            (format!("listen = \"10.0.0.1\"\n{SHARD}"), "write it like 10.0.0.1:5550"),
            (format!("listen = \"[::1]:5550\"\n{SHARD}"), "only IPv4"),
            (format!("listen = \"0.0.0.0:5550\"\n{SHARD}"), "any address"),
            (format!("listen = \"224.0.0.1:5550\"\n{SHARD}"), "not the address of one host"),
            (format!("listen = \"10.0.0.1:0\"\n{SHARD}"), "port 0"),
            (format!("listen = \"127.0.0.1:5550\"\ndatapath = \"xdp\"\n{SHARD}"), "there is no XDP"),
            (format!("listen = \"127.0.0.1:5550\"\nmode = \"native\"\n{SHARD}"), "the default on loopback"),
            (format!("listen = \"127.0.0.1:5550\"\n{SHARD}"), "cannot reach 10.0.0.2:5550"),
            (
                with_shards(&format!(
                    "[[shard]]\nid = 0\nmembers = [{}]",
                    (0..9).map(|i| format!("\"10.0.1.{i}:1\"")).collect::<Vec<_>>().join(",")
                )),
                "has 9 members",
            ),
            (with_shards("[[shard]]\nid = 0\nmembers = [\"10.0.0.1:5550\"]"), "coordinator's own address"),
            (with_shards("[[shard]]\nid = 0\nmembers = [\"10.0.0.2:1\", \"10.0.0.2:1\"]"), "given twice"),
            (with_shards("[[shard]]\nid = 0\nmembers = [\"10.0.0.2:0\"]"), "port 0"),
            (
                with_shards(
                    "[[shard]]\nid = 0\nmembers = [\"10.0.0.2:1\"]\n[[shard]]\nid = 1\nmembers = [\"10.0.0.2:1\"]",
                ),
                "a replica is a member of one shard",
            ),
            (
                with_shards(
                    "[[shard]]\nid = 0\nmembers = [\"10.0.0.2:1\"]\n[[shard]]\nid = 8\nmembers = [\"10.0.0.3:1\"]",
                ),
                "need the same slot",
            ),
            (
                with_shards(
                    "[[shard]]\nid = 0\nmembers = [\"10.0.0.2:1\"]\n[[shard]]\nid = 0\nmembers = [\"10.0.0.3:1\"]",
                ),
                "shard 0 is given twice",
            ),
            (with_shards("[[shard]]\nid = 0\nmember = [\"10.0.0.2:1\"]"), "unknown field `member`"),
            (with_shards("[[shard]]\nmembers = [\"10.0.0.2:1\"]"), "missing field `id`"),
        ];
        for (toml, says) in table {
            let error = format!("{:#}", parse(&toml).expect_err(&toml));
            assert!(error.contains(says), "{toml}\nsays: {error}\nnot: {says}");
        }
        let both = Options {
            members: vec!["10.0.0.2:1".parse().unwrap()],
            ..toml::from_str(&format!("listen = \"10.0.0.1:5550\"\n{SHARD}")).unwrap()
        };
        assert!(both.into_config().unwrap_err().to_string().contains("use one or the other"));
    }

    #[test]
    fn the_examples_are_valid() {
        let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dist/examples");
        let mut seen = 0;
        for entry in std::fs::read_dir(examples).unwrap() {
            let path = entry.unwrap().path();
            if path.file_name().unwrap().to_string_lossy().starts_with("coordinator") {
                Options::read(&path).unwrap().into_config().unwrap();
                seen += 1;
            }
        }
        assert!(seen >= 2);
    }
}
