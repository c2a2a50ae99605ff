//! Compiles the kernel programs; the objects are embedded, so that a host needs no compiler.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

use libbpf_cargo::SkeletonBuilder;

fn main() {
    let root = Path::new(&env::var("CARGO_MANIFEST_DIR").expect("set by cargo")).join("../../bpf");
    let out = PathBuf::from(env::var("OUT_DIR").expect("set by cargo"));
    println!("cargo:rerun-if-changed={}", root.display());
    let clang = ["clang-19", "clang"]
        .into_iter()
        .find(|clang| Command::new(clang).arg("--version").output().is_ok())
        .expect("no clang: run `./dev setup`, or install clang-19");
    let arch = env::var("CARGO_CFG_TARGET_ARCH").expect("set by cargo");
    for name in ["coordinator", "coordinator_tc"] {
        SkeletonBuilder::new()
            .source(root.join(format!("{name}.bpf.c")))
            .obj(out.join(format!("{name}.bpf.o")))
            .clang(clang)
            .clang_args([
                format!("-I{}", root.join("include").display()),
                format!("-I{}", root.display()),
                format!("-I/usr/include/{arch}-linux-gnu"),
                "-mcpu=v3".into(),
                "-Wall".into(),
                "-Werror".into(),
            ])
            .build()
            .unwrap_or_else(|e| panic!("{name}.bpf.c: {e:?}"));
    }
}
