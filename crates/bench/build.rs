//! Compiles the load generators and generates their skeletons.

fn main() {
    underpass_bpf_build::skeleton("load");
    underpass_bpf_build::skeleton("cache_load");
}
