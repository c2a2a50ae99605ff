//! Which authority, and how to reach it: the section `[authority]` of a configuration file.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use serde::Deserialize;

/// Which authority keeps the records.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Config {
    /// A local file: one coordinator.
    File(FileConfig),
    /// etcd: several coordinators, of which others take over when one is lost.
    Etcd(EtcdConfig),
}

/// A directory with a file of records.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileConfig {
    /// The directory; made if missing.
    pub directory: PathBuf,
}

/// An etcd cluster.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EtcdConfig {
    /// Its members: `10.0.0.1:2379`, or with `https://` in front.
    pub endpoints: Vec<String>,
    /// All keys begin with it.
    #[serde(default = "prefix_default")]
    pub prefix: String,
    /// How long the role outlives an agent that is gone. etcd counts whole seconds, and takes 2 for less.
    #[serde(default = "ttl_ms_default")]
    pub ttl_ms: u64,
    /// How long a connection or a request may take.
    #[serde(default = "timeout_ms_default")]
    pub timeout_ms: u64,
    /// PEM file of the authority that signed the members' certificates. With it, or an `https://`, TLS is used.
    pub ca: Option<PathBuf>,
    /// PEM file of this agent's own certificate.
    pub cert: Option<PathBuf>,
    /// PEM file of its key.
    pub key: Option<PathBuf>,
    /// User, if etcd's authentication is enabled.
    pub user: Option<String>,
    /// File that holds the user's password alone.
    pub password_file: Option<PathBuf>,
}

fn prefix_default() -> String {
    "underpass/".into()
}

fn ttl_ms_default() -> u64 {
    2000
}

fn timeout_ms_default() -> u64 {
    1000
}

impl EtcdConfig {
    /// With everything else by default.
    pub fn new(endpoints: Vec<String>) -> Self {
        Self {
            endpoints,
            prefix: prefix_default(),
            ttl_ms: ttl_ms_default(),
            timeout_ms: timeout_ms_default(),
            ca: None,
            cert: None,
            key: None,
            user: None,
            password_file: None,
        }
    }

    pub(crate) fn tls(&self) -> bool {
        self.ca.is_some() || self.endpoints.iter().any(|endpoint| endpoint.starts_with("https://"))
    }

    /// Whether it can be meant.
    pub(crate) fn validate(&self) -> Result<()> {
        ensure!(
            !self.endpoints.is_empty(),
            "[authority] names no etcd member: write `endpoints = [\"10.0.0.1:2379\"]`"
        );
        if self.tls() {
            ensure!(self.ca.is_some(), "[authority] wants TLS: name the file of the signing certificate with `ca`");
            if let Some(plain) = self.endpoints.iter().find(|endpoint| endpoint.starts_with("http://")) {
                anyhow::bail!("[authority] has `ca`, and `{plain}` is without TLS: write it with https://");
            }
        }
        ensure!(
            self.cert.is_some() == self.key.is_some(),
            "[authority] has one of `cert` and `key`: TLS needs both, or neither"
        );
        ensure!(self.cert.is_none() || self.ca.is_some(), "[authority] has `cert` without `ca`: name that too");
        ensure!(
            self.user.is_some() == self.password_file.is_some(),
            "[authority] has one of `user` and `password_file`: a login needs both"
        );
        ensure!(
            self.ttl_ms.is_multiple_of(1000) && (2000..=60_000).contains(&self.ttl_ms),
            "[authority] ttl_ms = {}: etcd counts in whole seconds: write 2000 to 60000",
            self.ttl_ms
        );
        ensure!(
            (50..=10_000).contains(&self.timeout_ms),
            "[authority] timeout_ms = {}: write 50 to 10000",
            self.timeout_ms
        );
        ensure!(!self.prefix.is_empty(), "[authority] prefix is empty: its keys would lie among all others'");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Deserialize)]
    struct Document {
        authority: Config,
    }

    fn parse(text: &str) -> Result<Config, String> {
        toml::from_str::<Document>(text).map(|document| document.authority).map_err(|e| e.to_string())
    }

    #[test]
    fn sections_of_a_configuration_file() {
        let file = parse("[authority]\nkind = \"file\"\ndirectory = \"/var/lib/underpass\"\n").unwrap();
        assert_eq!(file, Config::File(FileConfig { directory: "/var/lib/underpass".into() }));
        let etcd = parse("[authority]\nkind = \"etcd\"\nendpoints = [\"a:1\", \"b:2\"]\n").unwrap();
        assert_eq!(etcd, Config::Etcd(EtcdConfig::new(vec!["a:1".into(), "b:2".into()])));
        for (text, says) in [
            ("kind = \"file\"\n", "missing field `directory`"),
            ("kind = \"file\"\ndirectory = \"/x\"\nprefix = \"y\"\n", "unknown field `prefix`"),
            ("kind = \"etcd\"\n", "missing field `endpoints`"),
            ("kind = \"etcd\"\nendpoints = []\nttl = 3\n", "unknown field `ttl`"),
            ("kind = \"zookeeper\"\n", "unknown variant `zookeeper`"),
        ] {
            let error = parse(&format!("[authority]\n{text}")).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        let good = EtcdConfig::new(vec!["10.0.0.1:2379".into()]);
        good.validate().unwrap();
        let https = EtcdConfig { ca: Some("/ca".into()), ..EtcdConfig::new(vec!["https://a:2379".into()]) };
        https.validate().unwrap();
        for (bad, says) in [
            (EtcdConfig::new(vec![]), "names no etcd member"),
            (EtcdConfig::new(vec!["https://a:2379".into()]), "`ca`"),
            (EtcdConfig { endpoints: vec!["http://a:2379".into()], ..https.clone() }, "without TLS"),
            (EtcdConfig { cert: Some("/c".into()), ..https.clone() }, "both"),
            (EtcdConfig { cert: Some("/c".into()), key: Some("/k".into()), ..good.clone() }, "without `ca`"),
            (EtcdConfig { user: Some("u".into()), ..good.clone() }, "a login needs both"),
            (EtcdConfig { ttl_ms: 2500, ..good.clone() }, "whole seconds"),
            (EtcdConfig { ttl_ms: 1000, ..good.clone() }, "whole seconds"),
            (EtcdConfig { timeout_ms: 0, ..good.clone() }, "timeout_ms"),
            (EtcdConfig { prefix: String::new(), ..good.clone() }, "prefix"),
        ] {
            let error = bad.validate().unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
