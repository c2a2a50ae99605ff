//! What an operator asks and orders: `underpass members`, `shard`, `status`, `coordinator transfer`.

mod status;

use std::{
    net::{Ipv4Addr, SocketAddrV4},
    path::{Path, PathBuf},
    str::FromStr,
};

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, Subcommand};
use underpass_authority::{Admin, FileConfig};
use underpass_coordinator::{
    admin::{self, Command},
    config::{CONTROL_DEFAULT, Options, STATE_DEFAULT},
};
use underpass_protocol::agent::{LEASE_MS, Record, Wanted};

pub use status::{StatusArgs, run as show_status};

const CONFIG_DEFAULT: &str = "/etc/underpass/coordinator.toml";

/// Which agent to ask: the one that coordinates the shard.
#[derive(Clone, Debug, Args)]
pub struct Target {
    /// The control socket of the agent that coordinates the shard; `underpass status` on any coordinator tells which does
    #[arg(long, value_name = "PATH", default_value = CONTROL_DEFAULT)]
    control: PathBuf,
    /// Number of the shard [default: the only one]
    #[arg(long, value_name = "N")]
    shard: Option<u32>,
}

impl Target {
    fn shard(&self) -> Result<u32> {
        if let Some(shard) = self.shard {
            return Ok(shard);
        }
        let shards = admin::status(&self.control)?.shards;
        match shards.as_slice() {
            [only] => Ok(only.shard),
            several => {
                let numbers: Vec<String> = several.iter().map(|shard| shard.shard.to_string()).collect();
                bail!("this coordinator has shards {}: say which with --shard", numbers.join(", "))
            }
        }
    }

    fn change(&self, command: Command) -> Result<()> {
        println!("{}", admin::change(&self.control, self.shard()?, command)?);
        Ok(())
    }
}

/// A replica, as `3=10.0.0.7:5550`: its number in the shard, and where it listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replica {
    id: u32,
    address: SocketAddrV4,
}

impl FromStr for Replica {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no replica; write its number and its address, such as 3=10.0.0.7:5550");
        let (id, address) = text.split_once('=').ok_or_else(wrong)?;
        let id = id.parse().map_err(|_| wrong())?;
        let address: SocketAddrV4 = address.parse().map_err(|_| wrong())?;
        let ip = address.ip();
        if address.port() == 0 || *ip == Ipv4Addr::UNSPECIFIED || ip.is_multicast() || ip.is_broadcast() {
            return Err(format!("{address} is not the address of one host and port"));
        }
        Ok(Self { id, address })
    }
}

/// Changes which replicas take part in a shard.
#[derive(Debug, Subcommand)]
pub enum Members {
    /// Show the replicas of a shard
    List {
        /// Whom to ask.
        #[command(flatten)]
        target: Target,
    },
    /// Have another replica filled from the others, and take part
    Add {
        /// Its number in the shard, and where it listens
        #[arg(value_name = "ID=ADDR:PORT")]
        replica: Replica,
        /// Whom to ask.
        #[command(flatten)]
        target: Target,
    },
    /// Have a replica that is being filled take part as soon as it can: that happens by itself; this tells why if it has not
    Promote {
        /// Its number
        id: u32,
        /// Whom to ask.
        #[command(flatten)]
        target: Target,
    },
    /// Take a replica out of the shard
    Remove {
        /// Its number
        id: u32,
        /// Even if one replica alone then holds the data: what it holds is lost with it
        #[arg(long)]
        to_a_single_copy: bool,
        /// Whom to ask.
        #[command(flatten)]
        target: Target,
    },
    /// Have another replica filled, and then take an old one out
    Replace {
        /// Number of the old one
        id: u32,
        /// The new one
        #[arg(long, value_name = "ID=ADDR:PORT")]
        by: Replica,
        /// Whom to ask.
        #[command(flatten)]
        target: Target,
    },
}

/// Does what is ordered about members.
///
/// # Errors
/// The agent refuses, and says why, or does not answer.
pub fn members(action: Members) -> Result<()> {
    match action {
        Members::List { target } => {
            let shard = target.shard()?;
            let stats = admin::status(&target.control)?;
            let status = stats.shards.iter().find(|status| status.shard == shard);
            let status = status.with_context(|| format!("this coordinator has no shard {shard}"))?;
            print!("{}", status::members(status));
            Ok(())
        }
        Members::Add { replica: Replica { id, address }, target } => target.change(Command::Add { id, address }),
        Members::Promote { id, target } => target.change(Command::Promote { id }),
        Members::Remove { id, to_a_single_copy, target } => {
            target.change(Command::Remove { id, lose_data: to_a_single_copy })
        }
        Members::Replace { id, by: Replica { id: by, address }, target } => {
            target.change(Command::Replace { id, by, address })
        }
    }
}

/// Which authority.
#[derive(Clone, Debug, Args)]
pub struct AtAuthority {
    /// A coordinator's configuration: its section `[authority]`, or its `state`, tells where shards are on record
    #[arg(long, value_name = "FILE", default_value = CONFIG_DEFAULT)]
    config: PathBuf,
}

impl AtAuthority {
    fn open(&self) -> Result<Admin> {
        Admin::open(&authority(&self.config)?)
    }
}

/// The authority of a coordinator's configuration; nothing else in it need be right for this host.
fn authority(path: &Path) -> Result<underpass_authority::Config> {
    let options = Options::read(path)?;
    let local = || FileConfig { directory: options.state.clone().unwrap_or_else(|| STATE_DEFAULT.into()) };
    Ok(options.authority.clone().unwrap_or_else(|| underpass_authority::Config::File(local())))
}

/// Shards on record.
#[derive(Debug, Subcommand)]
pub enum Shard {
    /// Put a new shard on record; coordinators that name it serve it once all its replicas answer, empty
    Create {
        /// Its number
        id: u32,
        /// A replica of it; give it once for each
        #[arg(long = "replica", value_name = "ID=ADDR:PORT", required = true)]
        replicas: Vec<Replica>,
        /// Length of its leases in milliseconds
        #[arg(long, value_name = "MS", default_value_t = LEASE_MS)]
        lease_ms: u64,
        /// Where.
        #[command(flatten)]
        at: AtAuthority,
    },
    /// Show the shards on record
    List {
        /// Where.
        #[command(flatten)]
        at: AtAuthority,
        /// One line of JSON for each
        #[arg(long)]
        json: bool,
    },
    /// Give up what a shard held: only when no replica has the data any more
    BeginEmpty {
        /// The agent of a coordinator of it.
        #[command(flatten)]
        target: Target,
        /// Yes, all data of the shard
        #[arg(long)]
        lose_all_data: bool,
    },
}

/// Does what is ordered about shards.
///
/// # Errors
/// It is refused, or authority or agent do not answer.
pub fn shard(action: Shard) -> Result<()> {
    match action {
        Shard::Create { id, replicas, lease_ms, at } => {
            let wanted = replicas.iter().map(|replica| Wanted {
                id: replica.id,
                addr: *replica.address.ip(),
                port: replica.address.port(),
                replaces: None,
            });
            let record = Record { lease_ms, ..Record::new(id, wanted.collect()) };
            record.validate().map_err(anyhow::Error::msg)?;
            at.open()?.create(record)?;
            println!(
                "shard {id} is on record with {} replicas; its coordinators serve it once all answer",
                replicas.len()
            );
            Ok(())
        }
        Shard::List { at, json } => {
            let shards = at.open()?.shards()?;
            if shards.is_empty() && !json {
                println!("no shard is on record: `underpass shard create`");
            }
            for shard in shards {
                match (&shard.record, json) {
                    (Ok(record), true) => println!("{}", serde_json::to_string(record)?),
                    (Err(why), true) => println!("{}", serde_json::json!({ "shard": shard.id, "error": why })),
                    (Ok(record), false) => print!("{}", describe(record)),
                    (Err(why), false) => println!("shard {}: {why}", shard.id),
                }
            }
            Ok(())
        }
        Shard::BeginEmpty { target, lose_all_data } => {
            ensure!(
                lose_all_data,
                "everything that was ever written to shard {} would be given up for good. If no replica that held it can be \
                 brought back, say so with --lose-all-data",
                target.shard()?
            );
            target.change(Command::BeginEmpty)
        }
    }
}

fn describe(record: &Record) -> String {
    let mut text = match record.coordinator() {
        None => format!("shard {}: never served yet\n", record.shard),
        Some(at) => format!("shard {}: epoch {}, coordinator {at}\n", record.shard, record.epoch),
    };
    for wanted in &record.wanted {
        let member = record.members.iter().find(|member| member.endpoint() == wanted.endpoint());
        let state = match member {
            Some(member) if member.active => "active",
            Some(_) => "being filled",
            None => "wanted, takes no part",
        };
        text += &format!("  replica {} {:<21} {state}\n", wanted.id, wanted.endpoint().to_string());
    }
    for member in &record.members {
        if !record.wanted.iter().any(|wanted| wanted.endpoint() == member.endpoint()) {
            text += &format!("  replica {} {:<21} is being removed\n", member.id, member.endpoint().to_string());
        }
    }
    text
}

/// Hands a shard over.
#[derive(Debug, Args)]
pub struct TransferArgs {
    /// The address of the coordinator that is to serve it; it must be running
    #[arg(long, value_name = "ADDR:PORT")]
    to: SocketAddrV4,
    /// Whom to ask.
    #[command(flatten)]
    target: Target,
}

/// Hands a shard over.
///
/// # Errors
/// The agent refuses, and says why, or does not answer.
pub fn transfer(args: &TransferArgs) -> Result<()> {
    args.target.change(Command::Transfer { to: args.to })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replicas_are_written_with_their_numbers() {
        assert_eq!("3=10.0.0.7:5550".parse(), Ok(Replica { id: 3, address: "10.0.0.7:5550".parse().unwrap() }));
        for wrong in ["", "3", "10.0.0.7:5550", "x=10.0.0.7:5550", "3=10.0.0.7", "3=host:5550", "-1=10.0.0.7:5550"] {
            let told = wrong.parse::<Replica>().unwrap_err();
            assert!(told.contains("3=10.0.0.7:5550"), "{wrong}: {told}");
        }
        for wrong in ["3=0.0.0.0:5550", "3=10.0.0.7:0", "3=224.0.0.1:5550", "3=255.255.255.255:1"] {
            assert!(wrong.parse::<Replica>().unwrap_err().contains("one host"), "{wrong}");
        }
    }

    #[test]
    fn a_record_is_described_with_who_is_missing() {
        let wanted = |id: u32| Wanted { id, addr: [10, 0, 0, id as u8].into(), port: 5550, replaces: None };
        let record = Record::new(4, vec![wanted(1), wanted(2)]);
        let text = describe(&record);
        assert!(text.contains("shard 4: never served") && text.contains("replica 2 10.0.0.2:5550"), "{text}");
        assert!(text.contains("takes no part"), "{text}");
    }
}
