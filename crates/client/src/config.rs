//! Where the shards are: the configuration of a client.

use std::{fmt, fs, net::Ipv4Addr, net::SocketAddrV4, path::Path, time::Duration};

use serde::{Deserialize, Deserializer, de};
use underpass_abi::{abi::UP_SHARD_SLOTS, wire::UP_PORT_DEFAULT};

/// Most shards of a configuration.
pub const SHARDS_MAX: usize = 1024;
/// Most sessions of each shard: what a coordinator's table can number.
pub const SESSIONS_MAX: usize = 1 << 16;
/// Most coordinators given for one shard.
pub const COORDINATORS_MAX: usize = 16;
/// Most reads outstanding in one session.
pub const READS_MAX: usize = 4096;

/// Configuration of a client, usually a TOML file:
///
/// ```
/// let config: underpass_client::Config = r#"
///     sessions = 4          # writes outstanding at once, for each shard
///     deadline_ms = 1000    # how long an operation may take
///
///     [[shard]]
///     id = 0
///     coordinator = "10.0.0.1:5550"
///
///     [[shard]]
///     id = 1
///     coordinator = ["10.0.0.2", "10.0.0.3"]    # port 5550; whichever serves
/// "#.parse()?;
/// assert_eq!(config.shards.len(), 2);
/// # Ok::<(), underpass_client::ConfigError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Sessions of each shard: as many writes can be outstanding at once.
    #[serde(default = "default_sessions")]
    pub sessions: usize,
    /// Reads that may be outstanding at once in each session.
    #[serde(default = "default_reads")]
    pub reads_per_session: usize,
    /// How long an operation may take, in milliseconds, unless it says otherwise.
    #[serde(default = "default_deadline_ms")]
    pub deadline_ms: u64,
    /// Local address. Coordinator and replicas must reach the client at it, so translated addresses (NAT) do not work.
    /// 0.0.0.0: that of the route to each coordinator.
    #[serde(default = "default_bind")]
    pub bind: Ipv4Addr,
    /// Local UDP port; 0: any.
    #[serde(default)]
    pub port: u16,
    /// The shards.
    #[serde(default, rename = "shard")]
    pub shards: Vec<ShardConfig>,
}

/// One shard of a [`Config`].
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardConfig {
    /// Number of the shard: keys are placed by it, so it must be the same in every client's configuration.
    pub id: u32,
    /// The addresses of its coordinator and of those that may take over, in TOML one or a list of them. Any order; further
    /// ones are learnt.
    #[serde(rename = "coordinator", deserialize_with = "coordinators")]
    pub coordinators: Vec<SocketAddrV4>,
}

/// What is wrong with a configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// It is not TOML, or not of the expected shape.
    #[error("{path}: {source}")]
    Parse {
        /// The file, or `configuration`.
        path: String,
        /// Where and what.
        source: Box<toml::de::Error>,
    },
    /// It contradicts itself.
    #[error("{path}: {what}")]
    Contradiction {
        /// The file, or `configuration`.
        path: String,
        /// What, and what to do.
        what: String,
    },
}

fn default_sessions() -> usize {
    4
}

fn default_reads() -> usize {
    32
}

fn default_deadline_ms() -> u64 {
    1000
}

fn default_bind() -> Ipv4Addr {
    Ipv4Addr::UNSPECIFIED
}

fn coordinators<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<SocketAddrV4>, D::Error> {
    struct Visitor;
    impl<'de> de::Visitor<'de> for Visitor {
        type Value = Vec<SocketAddrV4>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an IPv4 address and a port, such as \"10.0.0.1:5550\", or a list of them")
        }

        fn visit_str<E: de::Error>(self, text: &str) -> Result<Vec<SocketAddrV4>, E> {
            Ok(vec![parse_coordinator(text).map_err(E::custom)?])
        }

        fn visit_seq<A: de::SeqAccess<'de>>(self, mut list: A) -> Result<Vec<SocketAddrV4>, A::Error> {
            let mut all = Vec::new();
            while let Some(text) = list.next_element::<String>()? {
                all.push(parse_coordinator(&text).map_err(de::Error::custom)?);
            }
            Ok(all)
        }
    }
    deserializer.deserialize_any(Visitor)
}

/// Parses `ADDRESS:PORT` or `ADDRESS`, which means port 5550.
pub fn parse_coordinator(text: &str) -> Result<SocketAddrV4, String> {
    let parsed = match text.parse() {
        Ok(address) => Ok(address),
        Err(_) => text.parse::<Ipv4Addr>().map(|addr| SocketAddrV4::new(addr, UP_PORT_DEFAULT as u16)),
    };
    let wrong = |what: &str| format!("{text:?} is not a coordinator's address: {what}");
    match parsed {
        Ok(address) if address.port() == 0 => Err(wrong("port 0 cannot be sent to")),
        Ok(address) if address.ip().is_unspecified() || address.ip().is_multicast() || address.ip().is_broadcast() => {
            Err(wrong("it must be one host's own address"))
        }
        Ok(address) => Ok(address),
        Err(_) if text.matches(':').count() > 1 => Err(wrong("IPv6 is not supported; give an IPv4 address")),
        Err(_) => Err(wrong("give an IPv4 address and a port, such as 10.0.0.1:5550 (names are not resolved)")),
    }
}

impl Config {
    /// A configuration of one shard, everything else at its default.
    pub fn single(shard: u32, coordinator: SocketAddrV4) -> Self {
        Self::of_shard(shard, vec![coordinator])
    }

    /// A configuration of one shard that may have any of these coordinators.
    pub fn of_shard(shard: u32, coordinators: Vec<SocketAddrV4>) -> Self {
        Self {
            sessions: default_sessions(),
            reads_per_session: default_reads(),
            deadline_ms: default_deadline_ms(),
            bind: default_bind(),
            port: 0,
            shards: vec![ShardConfig { id: shard, coordinators }],
        }
    }

    /// Reads and checks a TOML file.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let path = path.as_ref();
        let name = path.display().to_string();
        let text = fs::read_to_string(path).map_err(|source| ConfigError::Read { path: name.clone(), source })?;
        Self::from_toml(&name, &text)
    }

    fn from_toml(name: &str, text: &str) -> Result<Self, ConfigError> {
        let config: Self = toml::from_str(text)
            .map_err(|source| ConfigError::Parse { path: name.to_owned(), source: Box::new(source) })?;
        config.check().map_err(|what| ConfigError::Contradiction { path: name.to_owned(), what })?;
        Ok(config)
    }

    /// Refuses what cannot be meant. What is read from TOML has been checked.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.check().map_err(|what| ConfigError::Contradiction { path: "configuration".to_owned(), what })
    }

    /// How long an operation may take unless it says otherwise.
    pub fn deadline(&self) -> Duration {
        Duration::from_millis(self.deadline_ms)
    }

    fn check(&self) -> Result<(), String> {
        let within = |name: &str, value: usize, max: usize| {
            if value == 0 || value > max {
                return Err(format!("{name} is {value}; it must be 1 to {max}"));
            }
            Ok(())
        };
        if self.shards.is_empty() {
            return Err("no shard is given; add a [[shard]] with id and coordinator".to_owned());
        }
        within("the number of shards", self.shards.len(), SHARDS_MAX)?;
        within("sessions", self.sessions, SESSIONS_MAX)?;
        within("reads_per_session", self.reads_per_session, READS_MAX)?;
        if self.deadline_ms == 0 {
            return Err("deadline_ms is 0; nothing can be done in no time".to_owned());
        }
        if self.bind.is_multicast() || self.bind.is_broadcast() {
            return Err(format!("bind is {}; it must be one of this host's own addresses", self.bind));
        }
        for (i, a) in self.shards.iter().enumerate() {
            within(&format!("the number of shard {}'s coordinators", a.id), a.coordinators.len(), COORDINATORS_MAX)?;
            for (at, coordinator) in a.coordinators.iter().enumerate() {
                if a.coordinators[..at].contains(coordinator) {
                    return Err(format!("coordinator {coordinator} of shard {} is given twice", a.id));
                }
            }
            for b in &self.shards[..i] {
                if a.id == b.id {
                    return Err(format!("shard {} is given twice", a.id));
                }
                let both = a.coordinators.iter().find(|coordinator| b.coordinators.contains(coordinator));
                if let Some(both) = both
                    && a.id % UP_SHARD_SLOTS == b.id % UP_SHARD_SLOTS
                {
                    return Err(format!(
                        "shards {} and {} have the same coordinator, {both}, but their ids are equal modulo \
                         {UP_SHARD_SLOTS}: one coordinator cannot serve both",
                        b.id, a.id
                    ));
                }
            }
        }
        Ok(())
    }
}

impl std::str::FromStr for Config {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        Self::from_toml("configuration", text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        text.parse::<Config>().expect_err("it was to be refused").to_string()
    }

    fn shard(id: u32, coordinator: &str) -> String {
        format!("[[shard]]\nid = {id}\ncoordinator = \"{coordinator}\"\n")
    }

    #[test]
    fn what_cannot_be_meant_is_refused_with_a_reason() {
        for (text, expected) in [
            (String::new(), "no shard is given"),
            (shard(1, "10.0.0.1:5550") + &shard(1, "10.0.0.2:5550"), "shard 1 is given twice"),
            (shard(1, "10.0.0.1:5550") + &shard(9, "10.0.0.1:5550"), "equal modulo 8"),
            ("sessions = 0\n".to_owned() + &shard(1, "10.0.0.1:5550"), "sessions is 0; it must be 1 to"),
            ("reads_per_session = 0\n".to_owned() + &shard(1, "10.0.0.1"), "reads_per_session is 0"),
            ("deadline_ms = 0\n".to_owned() + &shard(1, "10.0.0.1:5550"), "deadline_ms is 0"),
            ("session = 3\n".to_owned() + &shard(1, "10.0.0.1:5550"), "unknown field `session`"),
            ("bind = \"224.0.0.1\"\n".to_owned() + &shard(1, "10.0.0.1:5550"), "one of this host's own addresses"),
            (shard(1, "10.0.0.1:99999"), "\"10.0.0.1:99999\" is not a coordinator's address"),
            (shard(1, "[::1]:5550"), "IPv6 is not supported"),
            (shard(1, "kv.example:5550"), "names are not resolved"),
            (shard(1, "0.0.0.0:5550"), "one host's own address"),
            ("[[shard]]\nid = 1\ncoordinator = []\n".to_owned(), "the number of shard 1's coordinators is 0"),
            ("[[shard]]\nid = 1\ncoordinator = [\"10.0.0.1\", \"10.0.0.1:5550\"]\n".to_owned(), "is given twice"),
            ("[[shard]]\nid = 1\ncoordinator = [\"10.0.0.1\", \"::1\"]\n".to_owned(), "IPv6 is not supported"),
            ("[[shard]]\nid = 1\ncoordinator = 5550\n".to_owned(), "or a list of them"),
            (shard(1, "10.0.0.1:0"), "port 0"),
            ("[[shard]]\nid = 1\n".to_owned(), "missing field `coordinator`"),
            ("[[shard]]\nid = -1\ncoordinator = \"10.0.0.1\"".to_owned(), "id"),
        ] {
            let told = error(&text);
            assert!(told.contains(expected), "{text:?} is told {told:?}");
        }
    }

    #[test]
    fn a_missing_port_is_the_default_one() {
        let config: Config = shard(3, "10.0.0.1").parse().unwrap();
        assert_eq!(config, Config::single(3, "10.0.0.1:5550".parse().unwrap()));
    }

    #[test]
    fn several_coordinators_are_a_list() {
        let config: Config = "[[shard]]\nid = 3\ncoordinator = [\"10.0.0.1\", \"10.0.0.2:1\"]\n".parse().unwrap();
        let coordinators = vec!["10.0.0.1:5550".parse().unwrap(), "10.0.0.2:1".parse().unwrap()];
        assert_eq!(config, Config::of_shard(3, coordinators));
    }

    #[test]
    fn a_missing_file_is_named() {
        let told = Config::from_file("/nonexistent/client.toml").unwrap_err().to_string();
        assert!(told.starts_with("cannot read /nonexistent/client.toml: "), "{told}");
    }

    #[test]
    fn shipped_examples_are_valid() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../dist/examples");
        let mut seen = 0;
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.file_name().unwrap().to_string_lossy().starts_with("client") {
                Config::from_file(&path).unwrap();
                seen += 1;
            }
        }
        assert!(seen >= 2);
    }
}
