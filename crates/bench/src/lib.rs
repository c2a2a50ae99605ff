//! Workloads, generators, peers, reports and plots.
