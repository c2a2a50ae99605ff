//! Drills: failures on purpose in a virtual rack, with the real processes and data paths, under load.
//!
//! A rack holds an authority (etcd), two coordinators, four replicas of which three take part, and a host of clients, and
//! lives through many drills. Every drill has keys of its own, read again at its end; a few keys live as long as the rack.
//! What all clients were told is checked for linearizability, and for acknowledged writes that are gone.

pub mod cli;
mod cluster;
mod drills;
mod judge;
mod load;
mod measure;
mod report;
mod runner;

pub use load::operation;
