//! Compiles the switch program and generates its skeleton.

use std::{env, path::PathBuf, process::Command};

use libbpf_cargo::SkeletonBuilder;

fn main() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let source = root.join("bpf/rack.bpf.c");
    let clang = ["clang-19", "clang"]
        .into_iter()
        .find(|clang| Command::new(clang).arg("--version").output().is_ok_and(|output| output.status.success()))
        .expect("clang is missing: install the package clang-19");
    let architecture = env::var("CARGO_CFG_TARGET_ARCH").unwrap();
    let skeleton = PathBuf::from(env::var_os("OUT_DIR").unwrap()).join("rack.skel.rs");
    SkeletonBuilder::new()
        .source(&source)
        .clang(clang)
        .clang_args([
            format!("-I{}", root.join("bpf/include").display()),
            // The headers of the libbpf that is linked, so that no second one need be installed.
            format!("-I{}", env::var("DEP_BPF_INCLUDE").expect("libbpf-sys says where its headers are")),
            // Debian keeps asm/types.h in the multiarch directory, which the bpf target does not search.
            format!("-I/usr/include/{architecture}-linux-gnu"),
            "-mcpu=v3".into(),
            "-Wall".into(),
            "-Werror".into(),
        ])
        .build_and_generate(&skeleton)
        .unwrap_or_else(|error| panic!("{}: {error:?}", source.display()));
    println!("cargo::rerun-if-changed={}", source.display());
}
