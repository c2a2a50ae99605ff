//! A virtual rack: hosts in network namespaces behind an XDP switch with faults.
//!
//! Each host is a network namespace with one interface, connected to a switch: a native XDP program
//! (`bpf/rack.bpf.c`) in a namespace of its own, which forwards, loses, cuts, duplicates, reorders and delays frames,
//! all drawn from a seed and changeable while the rack runs.
//!
//! ```no_run
//! use underpass_rack::{Config, Fault, Links, Probability, Rack};
//!
//! let rack = Rack::up(&Config::of_hosts("demo", &["a", "b"]))?;
//! let b = rack.host("b")?;
//! rack.set_fault(Links::ALL, &Fault { loss: Probability::new(0.01)?, ..Default::default() })?;
//! rack.host("a")?.command("ping")?.args(["-c", "3"]).arg(b.addr.to_string()).status()?;
//! let socket = b.enter(|| std::net::UdpSocket::bind((b.addr, 7000)))??;
//! println!("lost: {}", rack.fault_counters(Links::ALL)?.lost);
//! rack.down()?;
//! # drop(socket);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod cli;
mod config;
mod error;
mod fault;
mod line;
mod link;
mod namespace;
mod rack;
mod state;
mod switch;

pub use config::{
    Config, HOST_NAME_MAX, HostConfig, HostPlan, LinkPlan, MacAddr, PORTS_MAX, RACK_NAME_MAX, RoutePlan, RouterConfig,
    RouterLinkConfig, SubnetConfig, Topology,
};
pub use error::{Error, Result};
pub use fault::{Fault, FaultCounts, HOLD_MAX, LinkStatus, Links, Probability, parse_hold};
pub use line::HELD_MAX;
pub use namespace::Process;
pub use rack::{Host, HostStatus, LineStatus, PortStatus, Rack, Status, down, run_switch_daemon};
pub use switch::{LineCounts, PortCounts};

#[allow(clippy::all, clippy::undocumented_unsafe_blocks, missing_docs, unused_imports, dead_code)]
mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/rack.skel.rs"));
}
