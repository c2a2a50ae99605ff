//! A connection to one etcd member at a time.

use std::{error::Error as _, fs, path::Path, time::Duration};

use anyhow::{Context, Result};
use etcd_client::{Certificate, Client, ConnectOptions, Error, GetOptions, GetResponse, Identity, TlsOptions};
use tokio::time::timeout;

use crate::EtcdConfig;

/// How to reach etcd.
pub(crate) struct Settings {
    endpoints: Vec<String>,
    options: ConnectOptions,
    /// Ends in `/`.
    prefix: String,
    timeout: Duration,
    ca: Option<String>,
    user: Option<String>,
}

impl Settings {
    /// Reads the files that the configuration names.
    pub(crate) fn new(config: &EtcdConfig) -> Result<Self> {
        config.validate()?;
        let timeout = Duration::from_millis(config.timeout_ms);
        // A member that is cut off from the others would not say so to a watcher otherwise.
        let mut options =
            ConnectOptions::new().with_connect_timeout(timeout).with_require_leader(true).with_auto_token_refresh(true);
        if let Some(ca) = &config.ca {
            let mut tls = TlsOptions::new().ca_certificate(Certificate::from_pem(read(ca, "ca")?));
            if let (Some(cert), Some(key)) = (&config.cert, &config.key) {
                tls = tls.identity(Identity::from_pem(read(cert, "cert")?, read(key, "key")?));
            }
            options = options.with_tls(tls);
        }
        if let (Some(user), Some(file)) = (&config.user, &config.password_file) {
            let password = String::from_utf8(read(file, "password_file")?)
                .with_context(|| format!("{} (`password_file`) is not text", file.display()))?;
            options = options.with_user(user, password.trim_end_matches(['\r', '\n']));
        }
        Ok(Self {
            endpoints: config.endpoints.clone(),
            options,
            prefix: format!("{}/", config.prefix.trim_end_matches('/')),
            timeout,
            ca: config.ca.as_ref().map(|path| path.display().to_string()),
            user: config.user.clone(),
        })
    }

    pub(crate) fn name(&self) -> String {
        format!("etcd {} below {}", self.endpoints.join(", "), self.prefix)
    }

    pub(crate) fn shards(&self) -> String {
        format!("{}shards/", self.prefix)
    }

    pub(crate) fn record_key(&self, shard: u32) -> String {
        format!("{}shards/{shard}", self.prefix)
    }

    pub(super) fn role_key(&self, shard: u32) -> String {
        format!("{}coordinators/{shard}", self.prefix)
    }

    /// What an error means, and what to do.
    fn explain(&self, endpoint: &str, error: &Error) -> String {
        let mut detail = match error {
            Error::GRpcStatus(status) => status.message().to_owned(),
            other => other.to_string(),
        };
        // The message of a status is the outermost of the causes; the innermost says what happened.
        let mut source = match error {
            Error::GRpcStatus(status) => status.source(),
            other => other.source(),
        };
        while let Some(cause) = source {
            let text = cause.to_string();
            if !detail.contains(&text) {
                detail = format!("{detail}: {text}");
            }
            source = cause.source();
        }
        let has = |words: &[&str]| words.iter().any(|word| detail.contains(word));
        let user = self.user.as_deref().unwrap_or("none");
        if has(&["invalid user ID or password"]) {
            format!("etcd at {endpoint} refuses user `{user}`: check `user` and `password_file` ({detail})")
        } else if has(&["user name is empty"]) {
            format!("etcd at {endpoint} wants a login: set `user` and `password_file` ({detail})")
        } else if has(&["authentication is not enabled"]) {
            format!("etcd at {endpoint} knows no users: enable its authentication, or remove `user` ({detail})")
        } else if has(&["permission denied"]) {
            format!(
                "etcd at {endpoint} lets user `{user}` not use keys that begin with {}: etcdctl role grant-permission ROLE \
                 --prefix=true readwrite {} ({detail})",
                self.prefix, self.prefix
            )
        } else if has(&["database space exceeded"]) {
            format!("etcd at {endpoint} is full: compact and defragment it, then etcdctl alarm disarm ({detail})")
        } else if has(&["no leader", "leader changed"]) {
            format!("etcd at {endpoint} has no leader: start most of its members, and connect them ({detail})")
        } else if has(&["invalid peer certificate"]) {
            format!(
                "etcd at {endpoint} shows a certificate that `ca` ({}) does not vouch for, or of another name: check `ca` and \
                 `endpoints` ({detail})",
                self.ca.as_deref().unwrap_or("none")
            )
        } else if has(&[
            "CertificateRequired",
            "BadCertificate",
            "UnknownCA",
            "bad certificate",
            "certificate required",
        ]) {
            format!("etcd at {endpoint} refuses our certificate: check `cert` and `key` ({detail})")
        } else if has(&["InvalidContentType", "corrupt message", "tls handshake eof"]) {
            format!("etcd at {endpoint} speaks no TLS: start it with certificates, or remove `ca` ({detail})")
        } else {
            let tls = if self.ca.is_some() { "" } else { "; if it wants TLS, set `ca`" };
            format!(
                "etcd at {endpoint} cannot be used: check that it runs and can be reached from here{tls} ({detail})"
            )
        }
    }
}

fn read(path: &Path, option: &str) -> Result<Vec<u8>> {
    fs::read(path)
        .with_context(|| format!("reading {} (`{option}`): name a file that this user may read", path.display()))
}

/// A connection, made when it is needed. After any error the next member is tried.
pub(crate) struct Link<S> {
    settings: S,
    next: usize,
    client: Option<Client>,
    cluster: Option<u64>,
}

impl<S: AsRef<Settings>> Link<S> {
    pub(crate) fn new(settings: S) -> Self {
        Self { settings, next: 0, client: None, cluster: None }
    }

    pub(crate) fn settings(&self) -> &Settings {
        self.settings.as_ref()
    }

    fn endpoint(&self) -> &str {
        let endpoints = &self.settings().endpoints;
        &endpoints[self.next % endpoints.len()]
    }

    pub(crate) fn members(&self) -> usize {
        self.settings().endpoints.len()
    }

    /// Asks something; says why it cannot. Then it may have been done or not.
    pub(crate) async fn call<T>(
        &mut self,
        limit: Option<Duration>,
        ask: impl AsyncFnOnce(&mut Client) -> Result<T, Error>,
    ) -> Result<T, String> {
        let limit = limit.unwrap_or(self.settings().timeout);
        let asked = timeout(limit, async {
            if self.client.is_none() {
                let settings = self.settings.as_ref();
                let endpoint = &settings.endpoints[self.next % settings.endpoints.len()];
                self.client = Some(Client::connect([endpoint], Some(settings.options.clone())).await?);
            }
            ask(self.client.as_mut().expect("connected above")).await
        })
        .await;
        let failed = match asked {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) => self.settings().explain(self.endpoint(), &error),
            Err(_) => format!(
                "etcd at {} does not answer within {} ms: check that it runs and can be reached from here",
                self.endpoint(),
                limit.as_millis()
            ),
        };
        self.client = None;
        self.next = (self.next + 1) % self.members();
        Err(failed)
    }

    /// Reads a key, from a majority. Refuses the answer of a cluster other than before.
    pub(crate) async fn get(&mut self, key: &str, options: Option<GetOptions>) -> Result<GetResponse, String> {
        let answer = self.call(None, async |client| client.get(key, options).await).await?;
        let cluster = answer.header().map(etcd_client::ResponseHeader::cluster_id);
        if self.cluster.is_some() && self.cluster != cluster {
            return Err(format!(
                "{} are not one cluster, or it was made anew: `endpoints` must be members of one. If its data is gone, stop every \
                 coordinator before you restore it",
                self.settings().endpoints.join(", ")
            ));
        }
        self.cluster = cluster;
        Ok(answer)
    }
}
