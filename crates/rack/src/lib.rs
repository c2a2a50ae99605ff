//! A virtual rack: hosts in network namespaces behind an XDP switch with faults.
