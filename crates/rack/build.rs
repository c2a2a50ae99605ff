//! Compiles the switch program and generates its skeleton.

fn main() {
    underpass_bpf_build::skeleton("rack");
}
