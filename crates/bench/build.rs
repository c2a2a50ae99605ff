//! Compiles the load generator and generates its skeleton.

fn main() {
    underpass_bpf_build::skeleton("load");
}
