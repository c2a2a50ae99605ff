//! Compiles kernel programs, for build scripts. Objects are embedded in what is built, so a host needs no compiler.
//!
//! The caller needs `libbpf-sys` among its dependencies: its headers are those of the libbpf that is linked, so that no
//! second one need be installed.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

use libbpf_cargo::SkeletonBuilder;

/// Beside the crate that is being built: asked for when the build script runs, for it may be a copy of another checkout's.
fn bpf() -> PathBuf {
    Path::new(&env::var_os("CARGO_MANIFEST_DIR").expect("set by cargo")).join("../../bpf")
}

fn out(file: String) -> PathBuf {
    PathBuf::from(env::var_os("OUT_DIR").expect("set by cargo")).join(file)
}

fn builder(name: &str) -> SkeletonBuilder {
    let clang = ["clang-19", "clang"]
        .into_iter()
        .find(|clang| Command::new(clang).arg("--version").output().is_ok_and(|output| output.status.success()))
        .expect("clang is missing: run `./dev setup`, or install the package clang-19");
    let architecture = env::var("CARGO_CFG_TARGET_ARCH").expect("set by cargo");
    println!("cargo::rerun-if-changed={}", bpf().display());
    let mut builder = SkeletonBuilder::new();
    builder.source(bpf().join(format!("{name}.bpf.c"))).obj(out(format!("{name}.bpf.o"))).clang(clang).clang_args([
        format!("-I{}", bpf().join("include").display()),
        format!("-I{}", bpf().display()),
        format!("-I{}", env::var("DEP_BPF_INCLUDE").expect("libbpf-sys says where its headers are")),
        // Debian keeps asm/types.h in the multiarch directory, which the bpf target does not search.
        format!("-I/usr/include/{architecture}-linux-gnu"),
        // Where arguments of traced functions are kept.
        format!("-D__TARGET_ARCH_{}", if architecture == "aarch64" { "arm64" } else { "x86" }),
        "-mcpu=v3".into(),
        "-Wall".into(),
        "-Werror".into(),
    ]);
    builder
}

/// Compiles `bpf/NAME.bpf.c` to `NAME.bpf.o` in the build script's output directory.
///
/// # Panics
/// If it does not compile.
pub fn object(name: &str) {
    builder(name).build().unwrap_or_else(|error| panic!("{name}.bpf.c: {error:?}"));
}

/// Compiles it, and generates its skeleton `NAME.skel.rs` beside it.
///
/// # Panics
/// If it does not compile.
pub fn skeleton(name: &str) {
    let skeleton = out(format!("{name}.skel.rs"));
    builder(name).build_and_generate(&skeleton).unwrap_or_else(|error| panic!("{name}.bpf.c: {error:?}"));
}
