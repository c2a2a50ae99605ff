//! Workloads, load generators, peers, reports and plots.
//!
//! Everything here compares: both sides run in one process, one after the other, over several rounds, and what is
//! reported is the median of the rounds and the ratio. `docs/benchmarks.md` says what is measured and how.

pub mod bed;
pub mod cache;
pub mod cache_load;
pub mod cli;
pub mod coordinator;
pub mod cpu;
pub mod demo;
pub mod driver;
pub mod exchange;
pub mod history;
pub mod load;
pub mod memory;
pub mod netns;
pub mod peer;
pub mod plot;
pub mod process;
pub mod replica;
pub mod report;
pub mod system;
pub mod worker;
pub mod workload;
pub mod ycsb;
