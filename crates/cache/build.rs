//! Compiles the cache's kernel programs.

fn main() {
    underpass_bpf_build::object("cache");
    underpass_bpf_build::object("cache_sockets");
    underpass_bpf_build::object("cache_stream");
}
