//! Compiles the coordinator's kernel programs.

fn main() {
    underpass_bpf_build::object("clock");
    underpass_bpf_build::object("coordinator");
    underpass_bpf_build::object("coordinator_tc");
}
