//! Generates the Rust side of `bpf/include/underpass/{wire,abi,cache}.h`.
//!
//! `underpass-abi-generate write` replaces `crates/abi/src/{wire,abi,cache}.rs`; `check` compares and fails when stale.

use std::{env, fs, path::Path};

use anyhow::{Context, Result, bail};

fn generate(root: &Path, name: &str) -> Result<String> {
    let include = root.join("bpf/include");
    let header = include.join("underpass").join(format!("{name}.h"));
    let bindings = bindgen::Builder::default()
        .header(header.to_str().context("path is not UTF-8")?)
        .clang_arg(format!("-I{}", include.display()))
        // Hidden padding in a shared structure is an error, not a surprise.
        .clang_args(["-Wpadded", "-Werror=padded"])
        .allowlist_file(format!(".*/underpass/{name}\\.h"))
        .default_enum_style(bindgen::EnumVariation::Consts)
        .prepend_enum_name(false)
        .derive_default(true)
        .derive_eq(true)
        .use_core()
        .layout_tests(true)
        .generate_comments(true)
        .merge_extern_blocks(true)
        .disable_header_comment()
        .formatter(bindgen::Formatter::Prettyplease)
        .generate()
        .with_context(|| format!("bindgen on {}", header.display()))?
        .to_string();
    Ok(format!(
        "// Generated from bpf/include/underpass/{name}.h by underpass-abi-generate. Do not edit: run `./dev fix`.\n\n{bindings}"
    ))
}

fn main() -> Result<()> {
    let mode = env::args().nth(1).unwrap_or_default();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..").canonicalize()?;
    for name in ["wire", "abi", "cache"] {
        let text = generate(&root, name)?;
        let path = root.join("crates/abi/src").join(format!("{name}.rs"));
        match mode.as_str() {
            "write" => fs::write(&path, text)?,
            "check" => {
                if fs::read_to_string(&path).unwrap_or_default() != text {
                    bail!("{} is stale: run `./dev fix` and commit the result", path.display());
                }
            }
            _ => bail!("usage: underpass-abi-generate write|check"),
        }
    }
    Ok(())
}
