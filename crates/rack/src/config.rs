//! What a rack consists of: the file a user writes, checked and worked out into ports, addresses and routes.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fmt,
    net::Ipv4Addr,
    path::Path,
    str::FromStr,
};

use ipnet::Ipv4Net;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::{Error, Result, fault::Fault};

/// The most links of hosts to the switch that a rack can have; a router has one in each of its subnets.
pub const PORTS_MAX: usize = 64;
/// The longest name of a host, in bytes: it is also the name of the host's interface.
pub const HOST_NAME_MAX: usize = 15;
/// The longest name of a rack, in bytes.
pub const RACK_NAME_MAX: usize = 32;

/// The first port: number 1 is the loopback interface of the switch's namespace.
const PORT_FIRST: u32 = 2;

/// A rack's description, as its TOML file has it.
///
/// ```
/// let config: underpass_rack::Config = r#"
///     name = "demo"
///     subnet = "10.77.0.0/24"
///     host = [{ name = "a" }, { name = "b", address = "10.77.0.20" }]
/// "#.parse()?;
/// assert_eq!(config.host[1].address, Some("10.77.0.20".parse()?));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Lower-case letters, digits and inner hyphens; at most [`RACK_NAME_MAX`] bytes.
    pub name: String,
    /// Where every random fault is drawn from.
    #[serde(default)]
    pub seed: u64,
    /// One subnet, written as `subnet = "10.77.0.0/24"`, or several, each a `[[subnet]]` with `name` and `range`.
    #[serde(deserialize_with = "subnets")]
    pub subnet: Vec<SubnetConfig>,
    /// The hosts.
    #[serde(default)]
    pub host: Vec<HostConfig>,
    /// Hosts that forward between subnets.
    #[serde(default)]
    pub router: Vec<RouterConfig>,
    /// The faults of every link at the start.
    #[serde(default)]
    pub fault: Fault,
}

/// A subnet: hosts of one subnet reach each other directly, other subnets through a router.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct SubnetConfig {
    /// What hosts call it.
    pub name: String,
    /// Its range of addresses.
    pub range: Ipv4Net,
}

/// A host.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct HostConfig {
    /// Its name and that of its interface.
    pub name: String,
    /// The subnet's name; may be left out when there is one subnet.
    pub subnet: Option<String>,
    /// The first free one of the subnet if left out.
    pub address: Option<Ipv4Addr>,
    /// Further addresses of the same interface.
    #[serde(default)]
    pub extra_addresses: Vec<Ipv4Addr>,
    /// Derived from the address if left out.
    pub mac: Option<MacAddr>,
    /// Receive in a kernel thread instead of on the processor that sends.
    #[serde(default)]
    pub threaded: bool,
    /// The processor that the kernel thread is pinned to; needs `threaded`.
    pub cpu: Option<usize>,
}

/// A host that forwards between subnets.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RouterConfig {
    /// Its name; its interfaces are called `NAME-0`, `NAME-1` and so on, in the order of `link`.
    pub name: String,
    /// Where it is connected; at least two.
    pub link: Vec<RouterLinkConfig>,
}

/// A router's connection to a subnet.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RouterLinkConfig {
    /// The subnet's name.
    pub subnet: String,
    /// The last free one of the subnet if left out.
    pub address: Option<Ipv4Addr>,
    /// Derived from the address if left out.
    pub mac: Option<MacAddr>,
}

fn subnets<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<SubnetConfig>, D::Error> {
    struct Subnets;
    impl<'de> de::Visitor<'de> for Subnets {
        type Value = Vec<SubnetConfig>;
        fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
            f.write_str("a range such as \"10.77.0.0/24\", or [[subnet]] tables with name and range")
        }
        fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
            let range = text.parse().map_err(|_| E::invalid_value(de::Unexpected::Str(text), &self))?;
            Ok(vec![SubnetConfig { name: "main".into(), range }])
        }
        fn visit_seq<A: de::SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
            let mut subnets = Vec::new();
            while let Some(subnet) = seq.next_element()? {
                subnets.push(subnet);
            }
            Ok(subnets)
        }
    }
    deserializer.deserialize_any(Subnets)
}

impl FromStr for Config {
    type Err = Error;

    /// # Errors
    /// [`Error::Config`] if the text is not the TOML of a rack. What it describes is checked by [`Config::topology`].
    fn from_str(text: &str) -> Result<Self> {
        toml::from_str(text).map_err(|error| Error::Config(error.to_string().trim_end().into()))
    }
}

impl Config {
    /// Reads a file.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be read, [`Error::Config`], naming the file, if it is not right.
    pub fn read(path: &Path) -> Result<Self> {
        let in_file = |error| Error::Config(format!("{}: {error}", path.display()));
        let text = std::fs::read_to_string(path).map_err(Error::io(format!("cannot read {}", path.display())))?;
        let config: Self = text.parse().map_err(in_file)?;
        config.topology().map_err(in_file)?;
        Ok(config)
    }

    /// A rack of hosts with the given names in one subnet, `10.77.0.0/24`, addressed from `10.77.0.1` in their order.
    pub fn of_hosts(name: &str, hosts: &[&str]) -> Self {
        Self {
            name: name.into(),
            seed: 0,
            subnet: vec![SubnetConfig {
                name: "main".into(),
                range: Ipv4Net::new_assert(Ipv4Addr::new(10, 77, 0, 0), 24),
            }],
            host: hosts.iter().map(|&name| HostConfig { name: name.into(), ..Default::default() }).collect(),
            router: Vec::new(),
            fault: Fault::default(),
        }
    }

    /// Checks the description and works out what it leaves open: ports, addresses, routes.
    ///
    /// # Errors
    /// [`Error::Config`] says what contradicts what, and what to change.
    pub fn topology(&self) -> Result<Topology> {
        let mut plan = Planner::new(self)?;
        plan.take_given(self)?;
        let mut hosts = Vec::new();
        for host in &self.host {
            hosts.push(plan.host(host)?);
        }
        for router in &self.router {
            hosts.push(plan.router(router)?);
        }
        let routes: Vec<_> = (0..hosts.len()).map(|index| plan.routes(&hosts, index)).collect();
        for (host, routes) in hosts.iter_mut().zip(routes) {
            host.routes = routes;
        }
        if hosts.is_empty() {
            return config_error("a rack needs at least one [[host]]");
        }
        Ok(Topology { name: self.name.clone(), seed: self.seed, fault: self.fault, hosts })
    }
}

fn config_error<T>(text: impl Into<String>) -> Result<T> {
    Err(Error::Config(text.into()))
}

/// Accepts what can be a part of the names of namespaces, interfaces and files without quoting or ambiguity.
pub(crate) fn check_name(what: &str, name: &str, max: usize) -> Result<()> {
    if name.is_empty() {
        return config_error(format!("{what} has an empty name: give it one"));
    }
    if name.len() > max {
        return config_error(format!("{what} {name:?}: the name has {} characters; shorten it to {max}", name.len()));
    }
    let reserved = |c: char| !(c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-');
    if let Some(c) = name.chars().find(|&c| reserved(c)) {
        return config_error(format!(
            "{what} {name:?}: the name contains {c:?}; use lower-case letters, digits and hyphens"
        ));
    }
    if name.starts_with('-') || name.ends_with('-') {
        return config_error(format!("{what} {name:?}: the name must not begin or end with a hyphen"));
    }
    Ok(())
}

struct Planner<'a> {
    subnets: &'a [SubnetConfig],
    names: BTreeSet<String>,
    /// Who has an address, for the message about its second owner.
    addresses: BTreeMap<Ipv4Addr, String>,
    macs: BTreeMap<MacAddr, String>,
    port: u32,
}

impl<'a> Planner<'a> {
    fn new(config: &'a Config) -> Result<Self> {
        check_name("rack", &config.name, RACK_NAME_MAX)?;
        if config.subnet.is_empty() {
            return config_error("a rack needs a subnet: add subnet = \"10.77.0.0/24\"");
        }
        for (index, subnet) in config.subnet.iter().enumerate() {
            check_name("subnet", &subnet.name, RACK_NAME_MAX)?;
            let range = subnet.range;
            if range.addr() != range.network() {
                return config_error(format!("subnet {range} has host bits set: write {}", range.trunc()));
            }
            if !(8..=30).contains(&range.prefix_len()) {
                return config_error(format!(
                    "subnet {range}: the prefix length must be 8 to 30, so that hosts find room in it"
                ));
            }
            let first = range.network();
            if first.is_loopback() || first.is_multicast() || first.octets()[0] == 0 || first.octets()[0] >= 240 {
                return config_error(format!("subnet {range} is reserved: use one for hosts, such as 10.77.0.0/24"));
            }
            for other in &config.subnet[..index] {
                if other.name == subnet.name {
                    return config_error(format!("two subnets are called {:?}: rename one", subnet.name));
                }
                if other.range.contains(&range) || range.contains(&other.range) {
                    return config_error(format!(
                        "subnets {:?} ({}) and {:?} ({range}) overlap: give one another range",
                        other.name, other.range, subnet.name
                    ));
                }
            }
        }
        let ports = config.host.len() + config.router.iter().map(|router| router.link.len()).sum::<usize>();
        if ports > PORTS_MAX {
            return config_error(format!(
                "hosts and routers have {ports} links to the switch, which has {PORTS_MAX} ports: remove some"
            ));
        }
        Ok(Self {
            subnets: &config.subnet,
            names: BTreeSet::new(),
            addresses: BTreeMap::new(),
            macs: BTreeMap::new(),
            port: PORT_FIRST,
        })
    }

    /// Takes every address that the file names, so that none of them is handed out to somebody else.
    fn take_given(&mut self, config: &Config) -> Result<()> {
        for host in &config.host {
            let subnet = self.subnet(&host.name, host.subnet.as_deref())?;
            for &address in host.address.iter().chain(&host.extra_addresses) {
                self.take(&host.name, subnet, address)?;
            }
        }
        for router in &config.router {
            for link in &router.link {
                let subnet = self.subnet(&router.name, Some(&link.subnet))?;
                if let Some(address) = link.address {
                    self.take(&router.name, subnet, address)?;
                }
            }
        }
        Ok(())
    }

    fn subnet(&self, owner: &str, name: Option<&str>) -> Result<&'a SubnetConfig> {
        let known = || self.subnets.iter().map(|subnet| subnet.name.as_str()).collect::<Vec<_>>().join(", ");
        match name {
            None if self.subnets.len() == 1 => Ok(&self.subnets[0]),
            None => {
                config_error(format!("host {owner:?}: there are several subnets; add subnet = one of: {}", known()))
            }
            Some(name) => match self.subnets.iter().find(|subnet| subnet.name == name) {
                Some(subnet) => Ok(subnet),
                None => config_error(format!("host {owner:?}: there is no subnet {name:?}; there is: {}", known())),
            },
        }
    }

    fn take(&mut self, owner: &str, subnet: &SubnetConfig, address: Ipv4Addr) -> Result<()> {
        let range = subnet.range;
        if !range.contains(&address) {
            return config_error(format!(
                "host {owner:?}: address {address} is outside of its subnet {range}: choose one inside"
            ));
        }
        if address == range.network() || address == range.broadcast() {
            return config_error(format!(
                "host {owner:?}: address {address} is the network or broadcast address of {range}: choose another"
            ));
        }
        if let Some(other) = self.addresses.insert(address, owner.into()) {
            return config_error(if other == owner {
                format!("host {owner:?} has address {address} twice: remove one")
            } else {
                format!("hosts {other:?} and {owner:?} both have address {address}: change one")
            });
        }
        Ok(())
    }

    fn free_address(&mut self, owner: &str, subnet: &SubnetConfig, last: bool) -> Result<Ipv4Addr> {
        let free = |address: &Ipv4Addr| !self.addresses.contains_key(address);
        // PORTS_MAX addresses and those that the file names bound the search.
        let found = if last {
            let top = u32::from(subnet.range.broadcast()) - 1;
            (u32::from(subnet.range.network()) + 1..=top).rev().map(Ipv4Addr::from).find(free)
        } else {
            subnet.range.hosts().find(free)
        };
        match found {
            Some(address) => {
                self.take(owner, subnet, address)?;
                Ok(address)
            }
            None => config_error(format!(
                "host {owner:?}: subnet {} has no free address left: make it larger or remove hosts",
                subnet.range
            )),
        }
    }

    fn name(&mut self, name: &str) -> Result<String> {
        if !self.names.insert(name.into()) {
            return config_error(format!("two hosts or interfaces are called {name:?}: rename one"));
        }
        Ok(name.into())
    }

    fn link(
        &mut self,
        owner: &str,
        ifname: String,
        subnet: &SubnetConfig,
        address: Ipv4Addr,
        mac: Option<MacAddr>,
    ) -> Result<LinkPlan> {
        let mac = mac.unwrap_or_else(|| MacAddr::of(address));
        if mac.0[0] & 1 == 1 || mac.0 == [0; 6] {
            return config_error(format!(
                "host {owner:?}: {mac} is not the address of one interface: choose one such as {}",
                MacAddr::of(address)
            ));
        }
        if let Some(other) = self.macs.insert(mac, owner.into()) {
            return config_error(format!("hosts {other:?} and {owner:?} both have MAC address {mac}: change one"));
        }
        let port = self.port;
        self.port += 1;
        Ok(LinkPlan {
            port,
            ifname,
            subnet: subnet.name.clone(),
            range: subnet.range,
            address,
            extra_addresses: Vec::new(),
            mac,
        })
    }

    fn host(&mut self, host: &HostConfig) -> Result<HostPlan> {
        check_name("host", &host.name, HOST_NAME_MAX)?;
        if host.name == "lo" {
            return config_error("host \"lo\": the name is that of the loopback interface; choose another");
        }
        let ifname = self.name(&host.name)?;
        if host.cpu.is_some() && !host.threaded {
            return config_error(format!(
                "host {:?}: cpu pins the thread that threaded = true starts: add it, or remove cpu",
                host.name
            ));
        }
        let subnet = self.subnet(&host.name, host.subnet.as_deref())?;
        let address = match host.address {
            Some(address) => address,
            None => self.free_address(&host.name, subnet, false)?,
        };
        let mut link = self.link(&host.name, ifname, subnet, address, host.mac)?;
        link.extra_addresses = host.extra_addresses.clone();
        Ok(HostPlan {
            name: host.name.clone(),
            router: false,
            threaded: host.threaded,
            cpu: host.cpu,
            links: vec![link],
            routes: Vec::new(),
        })
    }

    fn router(&mut self, router: &RouterConfig) -> Result<HostPlan> {
        // Two bytes of the interface's name are the link's number.
        check_name("router", &router.name, HOST_NAME_MAX - 3)?;
        self.name(&router.name)?;
        if router.link.len() < 2 {
            return config_error(format!(
                "router {:?} has {} link: give it two or more",
                router.name,
                router.link.len()
            ));
        }
        let mut links: Vec<LinkPlan> = Vec::new();
        for (index, link) in router.link.iter().enumerate() {
            let subnet = self.subnet(&router.name, Some(&link.subnet))?;
            if links.iter().any(|other| other.subnet == subnet.name) {
                return config_error(format!(
                    "router {:?} has two links to subnet {:?}: remove one",
                    router.name, subnet.name
                ));
            }
            let ifname = self.name(&format!("{}-{index}", router.name))?;
            let address = match link.address {
                Some(address) => address,
                None => self.free_address(&router.name, subnet, true)?,
            };
            links.push(self.link(&router.name, ifname, subnet, address, link.mac)?);
        }
        Ok(HostPlan { name: router.name.clone(), router: true, threaded: false, cpu: None, links, routes: Vec::new() })
    }

    /// The shortest way from a host to each subnet that it is not in: breadth first over the routers.
    fn routes(&self, hosts: &[HostPlan], index: usize) -> Vec<RoutePlan> {
        let host = &hosts[index];
        let own: BTreeSet<&str> = host.links.iter().map(|link| link.subnet.as_str()).collect();
        let mut first_hops: BTreeMap<&str, Ipv4Addr> = BTreeMap::new();
        let mut queue: VecDeque<(&str, Option<Ipv4Addr>)> = own.iter().map(|&subnet| (subnet, None)).collect();
        while let Some((subnet, first_hop)) = queue.pop_front() {
            for router in hosts.iter().filter(|other| other.router && other.name != host.name) {
                let Some(near) = router.links.iter().find(|link| link.subnet == subnet) else { continue };
                for far in &router.links {
                    if own.contains(far.subnet.as_str()) || first_hops.contains_key(far.subnet.as_str()) {
                        continue;
                    }
                    let hop = first_hop.unwrap_or(near.address);
                    first_hops.insert(&far.subnet, hop);
                    queue.push_back((&far.subnet, Some(hop)));
                }
            }
        }
        let range = |name: &str| self.subnets.iter().find(|subnet| subnet.name == name).map(|subnet| subnet.range);
        first_hops.iter().filter_map(|(name, &via)| Some(RoutePlan { to: range(name)?, via })).collect()
    }
}

/// A rack worked out in full.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Topology {
    /// The rack's name.
    pub name: String,
    /// Where every random fault is drawn from, at the start.
    pub seed: u64,
    /// The faults of every link at the start.
    pub fault: Fault,
    /// Hosts, then routers, in the file's order.
    pub hosts: Vec<HostPlan>,
}

/// A host worked out in full.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct HostPlan {
    /// Its name.
    pub name: String,
    /// Whether it forwards between its links.
    pub router: bool,
    /// Whether it receives in a kernel thread.
    pub threaded: bool,
    /// The processor that the kernel thread is pinned to.
    pub cpu: Option<usize>,
    /// One for a host, two or more for a router.
    pub links: Vec<LinkPlan>,
    /// The subnets that it reaches through routers.
    pub routes: Vec<RoutePlan>,
}

/// A host's interface and the port of the switch that it is connected to.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct LinkPlan {
    /// The switch's port: the index of the interface in the switch's namespace.
    pub port: u32,
    /// The name of the interface in the host's namespace, and of its peer in the switch's.
    pub ifname: String,
    /// The subnet's name.
    pub subnet: String,
    /// The subnet's range.
    pub range: Ipv4Net,
    /// The interface's address.
    pub address: Ipv4Addr,
    /// Its further addresses.
    pub extra_addresses: Vec<Ipv4Addr>,
    /// Its MAC address.
    pub mac: MacAddr,
}

/// A route through a router.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct RoutePlan {
    /// The subnet that it leads to.
    pub to: Ipv4Net,
    /// The router's address on this side.
    pub via: Ipv4Addr,
}

/// An Ethernet address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MacAddr(pub [u8; 6]);

impl MacAddr {
    /// The locally administered address that an interface gets if the file names none: `02:00` and the IP address.
    pub fn of(address: Ipv4Addr) -> Self {
        let [a, b, c, d] = address.octets();
        Self([2, 0, a, b, c, d])
    }
}

impl fmt::Display for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl FromStr for MacAddr {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bytes: Option<Vec<u8>> = text
            .split(':')
            .map(|part| if part.len() == 2 { u8::from_str_radix(part, 16).ok() } else { None })
            .collect();
        match bytes.and_then(|bytes| bytes.try_into().ok()) {
            Some(bytes) => Ok(Self(bytes)),
            None => Err(format!("{text:?} is not a MAC address such as 02:00:0a:4d:00:01")),
        }
    }
}

impl Serialize for MacAddr {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for MacAddr {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}
