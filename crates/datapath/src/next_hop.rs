//! Next hops: through which link-layer address an IPv4 address is reached over one given device.
//!
//! A data path in the kernel sends frames out of the device it is attached to and never asks the routing table. The agent
//! asks for it, here, and asks again whenever [`NextHops::poll_changes`] says that the answer may be another.

use std::{
    io,
    net::Ipv4Addr,
    os::fd::{AsFd, BorrowedFd},
};

use netlink_packet_core::{NLM_F_ACK, NLM_F_CREATE, NetlinkPayload};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState},
    route::{RouteAddress, RouteAttribute, RouteMessage, RouteType},
};
use netlink_sys::{Socket, protocols::NETLINK_ROUTE};

use crate::netlink::{Netlink, messages};

/// Multicast groups of rtnetlink (`enum rtnetlink_groups`).
const RTNLGRP_LINK: u32 = 1;
const RTNLGRP_NEIGH: u32 = 3;
const RTNLGRP_IPV4_ROUTE: u32 = 7;

/// Why an address cannot be reached over the device.
#[derive(Debug, thiserror::Error)]
pub enum NextHopError {
    /// The kernel's routing table has no way there.
    #[error("no route to {addr}: {source}. Add one (`ip route add {addr}/32 dev {device} ...`)")]
    NoRoute {
        /// The address.
        addr: Ipv4Addr,
        /// The device asked about.
        device: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// The route leaves through another device than the one the program is attached to.
    #[error(
        "{addr} is routed through {other}, but the data path is attached to {device}: attach it to {other}, or route \
         {addr} through {device} (`ip route add {addr}/32 dev {device} ...`)"
    )]
    OtherDevice {
        /// The address.
        addr: Ipv4Addr,
        /// The device asked about.
        device: String,
        /// The one that the route names.
        other: String,
    },
    /// The address is one of this host's, or is no unicast address.
    #[error(
        "{addr} is not reached over {device}: its route is of type {kind}. A replica on the coordinator's own host \
             works with the socket data path only"
    )]
    NotUnicast {
        /// The address.
        addr: Ipv4Addr,
        /// The device asked about.
        device: String,
        /// The route's type.
        kind: String,
    },
    /// The gateway of the route is no IPv4 address.
    #[error(
        "the route to {addr} over {device} has a gateway that is not an IPv4 address; only IPv4 gateways are supported"
    )]
    Gateway {
        /// The address.
        addr: Ipv4Addr,
        /// The device asked about.
        device: String,
    },
    /// Talking to the kernel failed.
    #[error("asking the kernel for the {what} of {addr} over {device}: {source}")]
    Netlink {
        /// What was asked.
        what: &'static str,
        /// The address.
        addr: Ipv4Addr,
        /// The device asked about.
        device: String,
        /// What it said.
        source: io::Error,
    },
}

/// Looks up next hops over one device and follows their changes.
pub struct NextHops {
    ifindex: u32,
    requests: Netlink,
    changes: Socket,
    buffer: Vec<u8>,
}

impl NextHops {
    /// For the device with this index in the calling thread's network namespace.
    pub fn new(ifindex: u32) -> io::Result<Self> {
        let mut changes = Socket::new(NETLINK_ROUTE)?;
        changes.bind_auto()?;
        for group in [RTNLGRP_LINK, RTNLGRP_NEIGH, RTNLGRP_IPV4_ROUTE] {
            changes.add_membership(group)?;
        }
        changes.set_non_blocking(true)?;
        Ok(Self { ifindex, requests: Netlink::new()?, changes, buffer: vec![0; 64 << 10] })
    }

    /// The MAC address that frames to `addr` must carry; `None` while the kernel has not resolved it, see
    /// [`NextHops::probe`].
    ///
    /// # Errors
    /// There is no way to `addr` over this device, and why.
    pub fn resolve(&mut self, addr: Ipv4Addr) -> Result<Option<[u8; 6]>, NextHopError> {
        let hop = self.hop(addr)?;
        let mut message = NeighbourMessage::default();
        message.header.family = AddressFamily::Inet;
        message.header.ifindex = self.ifindex;
        message.attributes.push(NeighbourAttribute::Destination(NeighbourAddress::Inet(hop)));
        let answer = match self.requests.request(RouteNetlinkMessage::GetNeighbour(message), 0) {
            Ok(answer) => answer,
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => return Ok(None),
            Err(source) => return Err(self.failed("neighbour", addr, source)),
        };
        let Some(RouteNetlinkMessage::NewNeighbour(neighbour)) = answer else { return Ok(None) };
        if !is_valid(neighbour.header.state) {
            return Ok(None);
        }
        Ok(neighbour.attributes.iter().find_map(|attribute| match attribute {
            NeighbourAttribute::LinkLayerAddress(mac) => <[u8; 6]>::try_from(mac.as_slice()).ok(),
            _ => None,
        }))
    }

    /// Has the kernel resolve the next hop to `addr`, or confirm it. Does not wait: the result shows as a change. Needs
    /// CAP_NET_ADMIN.
    ///
    /// # Errors
    /// As [`NextHops::resolve`].
    pub fn probe(&mut self, addr: Ipv4Addr) -> Result<(), NextHopError> {
        let hop = self.hop(addr)?;
        let mut message = NeighbourMessage::default();
        message.header.family = AddressFamily::Inet;
        message.header.ifindex = self.ifindex;
        message.header.state = NeighbourState::None;
        message.header.flags = NeighbourFlags::Use;
        message.attributes.push(NeighbourAttribute::Destination(NeighbourAddress::Inet(hop)));
        match self.requests.request(RouteNetlinkMessage::NewNeighbour(message), NLM_F_CREATE | NLM_F_ACK) {
            Ok(_) => Ok(()),
            Err(source) => Err(self.failed("resolution", addr, source)),
        }
    }

    /// Whether anything changed since the last call that may change a next hop over this device. Never blocks; many
    /// changes count as one. [`AsFd`] becomes readable when there is one.
    pub fn poll_changes(&mut self) -> bool {
        let mut changed = false;
        // Bounded, so that a storm of notifications cannot hold the caller: what is left is seen next time.
        for _ in 0..1024 {
            match self.changes.recv(&mut &mut self.buffer[..], 0) {
                Ok(len) => {
                    changed |= messages(&self.buffer[..len]).any(|message| match message {
                        Ok(message) => self.matters(&message.payload),
                        // Nothing that the parser does not know may be missed.
                        Err(_) => true,
                    });
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return changed,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                // ENOBUFS: notifications were lost, so anything may have changed.
                Err(_) => changed = true,
            }
        }
        changed
    }

    fn matters(&self, payload: &NetlinkPayload<RouteNetlinkMessage>) -> bool {
        use RouteNetlinkMessage::*;
        match payload {
            NetlinkPayload::InnerMessage(NewNeighbour(m) | DelNeighbour(m)) => {
                m.header.ifindex == self.ifindex && m.header.family == AddressFamily::Inet
            }
            NetlinkPayload::InnerMessage(NewLink(m) | DelLink(m)) => m.header.index == self.ifindex,
            NetlinkPayload::InnerMessage(NewRoute(_) | DelRoute(_)) => true,
            _ => false,
        }
    }

    /// The address whose neighbour entry frames to `addr` are sent by: its gateway, or itself.
    fn hop(&mut self, addr: Ipv4Addr) -> Result<Ipv4Addr, NextHopError> {
        let mut message = RouteMessage::default();
        message.header.address_family = AddressFamily::Inet;
        message.header.destination_prefix_length = 32;
        message.attributes.push(RouteAttribute::Destination(RouteAddress::Inet(addr)));
        let answer = match self.requests.request(RouteNetlinkMessage::GetRoute(message), 0) {
            Ok(answer) => answer,
            Err(source)
                if matches!(
                    source.raw_os_error(),
                    Some(libc::ENETUNREACH | libc::EHOSTUNREACH | libc::EACCES | libc::EINVAL)
                ) =>
            {
                return Err(NextHopError::NoRoute { addr, device: device_name(self.ifindex), source });
            }
            Err(source) => return Err(self.failed("route", addr, source)),
        };
        let Some(RouteNetlinkMessage::NewRoute(route)) = answer else {
            let source = io::Error::new(io::ErrorKind::InvalidData, "the answer is no route");
            return Err(self.failed("route", addr, source));
        };
        if route.header.kind != RouteType::Unicast {
            let kind = format!("{:?}", route.header.kind).to_lowercase();
            return Err(NextHopError::NotUnicast { addr, device: device_name(self.ifindex), kind });
        }
        let mut hop = addr;
        for attribute in &route.attributes {
            match attribute {
                RouteAttribute::Oif(ifindex) if *ifindex != self.ifindex => {
                    let (device, other) = (device_name(self.ifindex), device_name(*ifindex));
                    return Err(NextHopError::OtherDevice { addr, device, other });
                }
                RouteAttribute::Gateway(RouteAddress::Inet(gateway)) => hop = *gateway,
                RouteAttribute::Gateway(_) | RouteAttribute::Via(_) => {
                    return Err(NextHopError::Gateway { addr, device: device_name(self.ifindex) });
                }
                _ => {}
            }
        }
        Ok(hop)
    }

    fn failed(&self, what: &'static str, addr: Ipv4Addr, source: io::Error) -> NextHopError {
        NextHopError::Netlink { what, addr, device: device_name(self.ifindex), source }
    }
}

impl AsFd for NextHops {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.changes.as_fd()
    }
}

/// Whether the kernel itself would send frames by an entry in this state (NUD_VALID). A stale one is as good as any until
/// the kernel finds out otherwise.
fn is_valid(state: NeighbourState) -> bool {
    use NeighbourState::*;
    matches!(state, Reachable | Stale | Delay | Probe | Noarp | Permanent)
}

/// The device's name, or its number when it is gone.
fn device_name(ifindex: u32) -> String {
    nix::net::if_::if_indextoname(ifindex)
        .ok()
        .and_then(|name| name.into_string().ok())
        .unwrap_or_else(|| format!("interface {ifindex}"))
}
