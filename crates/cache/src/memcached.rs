//! The memcached that is accelerated: finding it, what it is asked before, and asking it for items.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Write},
    net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream},
    time::Duration,
};

use anyhow::{Context, Result, bail};

/// A running memcached.
#[derive(Clone, Debug)]
pub struct Memcached {
    /// Where it is asked.
    pub at: SocketAddrV4,
    /// Its process.
    pub pid: i32,
    /// Its UDP port, and the IPv4 addresses that it listens on there; unspecified: all.
    pub udp_port: u16,
    /// As above.
    pub udp_addrs: Vec<Ipv4Addr>,
    /// What it calls itself.
    pub version: String,
}

/// A socket of this network namespace, of /proc/net.
struct Socket {
    addr: Ipv4Addr,
    port: u16,
    listens: bool,
    inode: u64,
}

fn sockets(protocol: &str) -> Result<Vec<Socket>> {
    let path = format!("/proc/thread-self/net/{protocol}");
    let text = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    Ok(text
        .lines()
        .skip(1)
        .filter_map(|line| {
            let mut fields = line.split_whitespace();
            let (addr, port) = fields.nth(1)?.split_once(':')?;
            let state = fields.nth(1)?;
            let inode = fields.nth(5)?;
            Some(Socket {
                addr: u32::from_str_radix(addr, 16).ok()?.to_ne_bytes().into(),
                port: u16::from_str_radix(port, 16).ok()?,
                listens: state == "0A",
                inode: inode.parse().ok()?,
            })
        })
        .collect())
}

/// The processes that hold one of these sockets.
fn holders(inodes: &[u64]) -> Vec<i32> {
    let wanted: Vec<_> = inodes.iter().map(|inode| format!("socket:[{inode}]")).collect();
    let Ok(processes) = fs::read_dir("/proc") else { return Vec::new() };
    let mut found: Vec<i32> = processes
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|pid: &i32| {
            let Ok(open) = fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
            open.flatten()
                .filter_map(|fd| fs::read_link(fd.path()).ok())
                .any(|target| wanted.iter().any(|socket| target.as_os_str() == socket.as_str()))
        })
        .collect();
    found.sort_unstable();
    found
}

/// The listening address of a process, for `--pid`.
pub fn address_of(pid: i32) -> Result<SocketAddrV4> {
    let listening: Vec<_> =
        sockets("tcp")?.into_iter().filter(|s| s.listens && holders(&[s.inode]).contains(&pid)).collect();
    let Some(socket) = listening.first() else {
        bail!("process {pid} listens on no IPv4 TCP socket of this network namespace: run this in its namespace")
    };
    let addr = if socket.addr.is_unspecified() { Ipv4Addr::LOCALHOST } else { socket.addr };
    Ok(SocketAddrV4::new(addr, socket.port))
}

impl Memcached {
    /// Finds who listens at an address, and asks whether it can be accelerated.
    pub fn find(at: SocketAddrV4) -> Result<Self> {
        let listening: Vec<_> = sockets("tcp")?
            .into_iter()
            .filter(|s| s.listens && s.port == at.port() && (s.addr.is_unspecified() || s.addr == *at.ip()))
            .collect();
        if listening.is_empty() {
            bail!("nobody listens at {at} in this network namespace: start memcached, or give the address that it has");
        }
        let pids = holders(&listening.iter().map(|s| s.inode).collect::<Vec<_>>());
        let pid = match pids[..] {
            [pid] => pid,
            [] => bail!("the process that listens at {at} is not to be seen from here: run this where its /proc is"),
            _ => bail!(
                "processes {pids:?} share the port {at}: writes to one are not seen by the other, so neither can be cached. \
                 Give each a port of its own"
            ),
        };
        let mut asked = Asked::new(at)?;
        let version = asked.line("version")?;
        let Some(version) = version.strip_prefix("VERSION ").map(str::to_string) else {
            bail!("{at} does not answer like memcached without authentication and TLS: {version:?}")
        };
        if !version.starts_with("1.6.") {
            bail!("memcached {version} is not known: its reading of commands was checked for 1.6");
        }
        let settings = asked.stats("stats settings")?;
        let is = |name: &str, value: &str| settings.get(name).is_some_and(|is| is == value);
        for (name, off, advice) in [
            ("ssl_enabled", "no", "what TLS carries cannot be followed"),
            ("auth_enabled_sasl", "no", "the kernel would answer those who have not authenticated"),
            ("auth_enabled_ascii", "no", "the kernel would answer those who have not authenticated"),
            ("binding_protocol", "auto-negotiate", "start it without -B: the protocol is told by the first byte"),
        ] {
            if settings.contains_key(name) && !is(name, off) {
                bail!("memcached has {name} {:?}: {advice}", settings[name]);
            }
        }
        if settings.keys().any(|name| name.starts_with("proxy_")) && is("proxy_enabled", "yes") {
            bail!("memcached is a proxy: what it forwards is not its own to cache");
        }
        let udp_port: u16 = settings.get("udpport").and_then(|port| port.parse().ok()).unwrap_or(0);
        if udp_port == 0 {
            bail!(
                "memcached's UDP is off, which is its default, so there is nothing to accelerate: start it with `-U {}`",
                at.port()
            );
        }
        let held = |s: &Socket| s.port == udp_port && holders(&[s.inode]).contains(&pid);
        let mut udp_addrs: Vec<_> = sockets("udp")?.iter().filter(|s| held(s)).map(|s| s.addr).collect();
        udp_addrs.sort_unstable();
        udp_addrs.dedup();
        if udp_addrs.is_empty() {
            bail!("memcached listens on no IPv4 UDP socket of this network namespace");
        }
        Ok(Self { at, pid, udp_port, udp_addrs, version })
    }
}

/// The delay of a `flush_all` that is to come, or takes what is stored in this second, as if it were asked for now; none: there
/// is none.
pub fn flush_to_come(at: SocketAddrV4) -> Result<Option<u64>> {
    /// memcached's clock counts from so long before its start.
    const BEFORE_START_S: u64 = 60;
    let mut asked = Asked::new(at)?;
    let number = |stats: &BTreeMap<String, String>, name| -> Result<u64> {
        stats.get(name).and_then(|is| is.parse().ok()).with_context(|| format!("memcached does not tell its {name}"))
    };
    let oldest = number(&asked.stats("stats settings")?, "oldest")?;
    let now = number(&asked.stats("stats")?, "uptime")? + BEFORE_START_S;
    Ok((oldest >= now).then(|| oldest + 1 - now))
}

struct Asked {
    stream: BufReader<TcpStream>,
}

impl Asked {
    fn new(at: SocketAddrV4) -> Result<Self> {
        let wait = Duration::from_secs(2);
        let stream =
            TcpStream::connect_timeout(&SocketAddr::V4(at), wait).with_context(|| format!("connecting to {at}"))?;
        stream.set_read_timeout(Some(wait))?;
        Ok(Self { stream: BufReader::new(stream) })
    }

    fn line(&mut self, command: &str) -> Result<String> {
        self.stream.get_mut().write_all(format!("{command}\r\n").as_bytes())?;
        self.next()
    }

    fn next(&mut self) -> Result<String> {
        let mut line = String::new();
        self.stream.read_line(&mut line).context("memcached does not answer")?;
        if line.is_empty() {
            bail!("memcached closed the connection");
        }
        Ok(line.trim_end().to_string())
    }

    fn stats(&mut self, command: &str) -> Result<BTreeMap<String, String>> {
        let mut stats = BTreeMap::new();
        let mut line = self.line(command)?;
        while line != "END" {
            let Some((name, value)) = line.strip_prefix("STAT ").and_then(|stat| stat.split_once(' ')) else {
                bail!("memcached does not answer {command:?}: {line:?}")
            };
            stats.insert(name.to_string(), value.to_string());
            line = self.next()?;
        }
        Ok(stats)
    }
}

/// What memcached says to `mg KEY v f c t`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It has none.
    Miss,
    /// An item: where its value is in the bytes, and what it is.
    Item {
        /// Client flags.
        flags: u32,
        /// CAS number.
        cas: u64,
        /// Seconds left; none: for ever.
        left: Option<u64>,
        /// The value's bytes, of what was parsed.
        value: std::ops::Range<usize>,
        /// Marked stale, or won: another read might be told otherwise.
        stale: bool,
    },
    /// It cannot or will not.
    Refused,
}

/// The first answer in `bytes` and how many of them it is; none: it is not all there yet. An error: no answer at all.
pub fn parse_answer(bytes: &[u8]) -> Result<Option<(Answer, usize)>> {
    const LINE_MAX: usize = 2048;
    let Some(end) = bytes.iter().position(|&b| b == b'\n') else {
        if bytes.len() > LINE_MAX {
            bail!("memcached sends a line without end");
        }
        return Ok(None);
    };
    let line = String::from_utf8_lossy(&bytes[..end]);
    let mut words = line.split_whitespace();
    match words.next() {
        Some("EN") => Ok(Some((Answer::Miss, end + 1))),
        Some("VA") => {
            let len: usize = words.next().and_then(|len| len.parse().ok()).context("memcached tells no length")?;
            let total = end + 1 + len + 2;
            if bytes.len() < total {
                return Ok(None);
            }
            let (mut flags, mut cas, mut left, mut stale) = (None, None, None, false);
            for word in words {
                let rest = word.get(1..).unwrap_or_default();
                match word.as_bytes()[0] {
                    b'f' => flags = rest.parse().ok(),
                    b'c' => cas = rest.parse().ok(),
                    b't' => left = rest.parse::<i64>().ok(),
                    _ => stale = true,
                }
            }
            let (Some(flags), Some(cas), Some(left)) = (flags, cas, left) else { bail!("memcached answers {line:?}") };
            let value = end + 1..end + 1 + len;
            Ok(Some((Answer::Item { flags, cas, left: u64::try_from(left).ok(), value, stale }, total)))
        }
        Some("SERVER_ERROR" | "CLIENT_ERROR") => Ok(Some((Answer::Refused, end + 1))),
        _ => bail!("memcached answers {line:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_parsed_whole_or_not_at_all() {
        let bytes = b"VA 4 f7 c12 t-1\r\na\r\nb\r\nEN\r\nVA 0 f0 c1 t30 W\r\n\r\n";
        let item = Answer::Item { flags: 7, cas: 12, left: None, value: 17..21, stale: false };
        assert_eq!(parse_answer(bytes).unwrap(), Some((item, 23)));
        assert_eq!(parse_answer(&bytes[23..]).unwrap(), Some((Answer::Miss, 4)));
        let stale = Answer::Item { flags: 0, cas: 1, left: Some(30), value: 18..18, stale: true };
        assert_eq!(parse_answer(&bytes[27..]).unwrap(), Some((stale, 20)));
        for len in 0..23 {
            assert_eq!(parse_answer(&bytes[..len]).unwrap(), None, "{len}");
        }
        assert!(parse_answer(b"STORED\r\n").is_err());
    }
}
