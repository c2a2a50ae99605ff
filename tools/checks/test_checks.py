"""Each check is shown what it is for, and has to complain: a check that cannot fail checks nothing."""

import sys
import tempfile
import unittest
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "mutants"))

import licences
import links
import mutants
import pure
import sources


class Tree(unittest.TestCase):
    """A test with a folder of its own."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


class Pure(unittest.TestCase):
    def test_planted_impurity_is_found(self):
        planted = [
            "use std::time::Instant;",
            "use std::{fmt, time::{Duration, SystemTime}};",
            "use std::net::UdpSocket;",
            "use std::net::{Ipv4Addr, TcpStream};",
            "use std::net;",
            "use std::thread;",
            "use ::std::fs::File;",
            "use core::net::*;",
            "use std::*;",
            "use std as s;",
            "use std::{self as s};",
            "use std::collections::hash_map::RandomState;",
            "use std::sync::{Arc, Condvar};",
            "extern crate std as s;",
            "fn f() { let now = std::time::Instant::now(); }",
            "fn f() -> std::io::Result<()> { Ok(()) }",
            "fn f() { std::process::exit(1) }",
            "fn f() { println!(\"hello\") }",
            "fn f<'a>(x: &'a str) { eprintln!(\"{x}\") }",
            "/* /* nested */ */ use std::env;",
            "const Q: char = '\"'; use std::fs; const R: char = '\"';",
        ]
        for text in planted:
            with self.subTest(text):
                self.assertTrue(pure.check_source("lib.rs", text))

    def test_pure_code_passes(self):
        innocent = [
            "use std::{collections::{BTreeMap, HashMap}, fmt::{self, Display}, net::{Ipv4Addr, SocketAddrV4}};",
            "use std::time::Duration;",
            "// use std::fs;\n/* std::thread::spawn */",
            "const HELP: &str = \"use std::fs\"; const RAW: &str = r#\"println!(\"x\")\"#;",
            "fn f(x: std::net::Ipv6Addr) -> u32 { u32::from_be_bytes([0; 4]) }",
            "mod time {} use crate::time; fn println() {}",
            "use self::wire::Header; use super::{self, control as c};",
        ]
        for text in innocent:
            with self.subTest(text):
                self.assertEqual(pure.check_source("lib.rs", text), [])

    def test_the_line_is_named(self):
        self.assertIn("lib.rs:3:", pure.check_source("lib.rs", "/* one\ntwo */\nuse std::fs;\n")[0])

    def test_dependencies_are_listed(self):
        self.assertTrue(pure.check_manifest("Cargo.toml", '[dependencies]\nrand = "1"\n'))
        self.assertTrue(pure.check_manifest("Cargo.toml", '[target."cfg(unix)".dependencies]\nlibc = "1"\n'))
        allowed = '[dependencies]\nserde.workspace = true\n[dev-dependencies]\nrand = "1"\n'
        self.assertEqual(pure.check_manifest("Cargo.toml", allowed), [])


class PureCrate(Tree):
    def test_a_crate_without_sources_is_no_success(self):
        self.write("Cargo.toml", "")
        self.assertTrue(pure.check(self.root))

    def test_sub_modules_are_read(self):
        self.write("Cargo.toml", "")
        self.write("src/lib.rs", "")
        self.write("src/deep/er.rs", "use std::fs;")
        self.assertEqual(len(pure.check(self.root)), 1)


class Licences(unittest.TestCase):
    def test_expressions(self):
        for expression, expected in [
            ("MIT", True),
            ("MIT/Apache-2.0", True),
            ("GPL-3.0-only", False),
            ("GPL-3.0-only OR MIT", True),
            ("GPL-3.0-only AND MIT", False),
            ("MIT OR GPL-3.0-only AND ISC", True),
            ("(MIT OR GPL-3.0-only) AND LGPL-2.1-only", False),
            ("(MIT OR Apache-2.0) AND Unicode-3.0", True),
            ("Apache-2.0 WITH LLVM-exception", True),
            ("GPL-2.0-only WITH Classpath-exception-2.0", False),
        ]:
            with self.subTest(expression):
                self.assertEqual(licences.permitted(expression), expected)

    def test_what_cannot_be_read_is_refused(self):
        for expression in ["MIT OR", "(MIT", "MIT Apache-2.0", "MIT)", "AND"]:
            with self.subTest(expression):
                self.assertRaises(ValueError, licences.permitted, expression)
                self.assertTrue(licences.objection({"license": expression}))

    def test_no_licence_is_refused(self):
        self.assertTrue(licences.objection({"license": None}))
        self.assertEqual(len(licences.check({"packages": [{"name": "a", "version": "1", "license": None}]})), 1)


class Links(Tree):
    def complaints(self, text):
        self.write("docs/here.md", text)
        return links.check(self.root)[0]

    def test_dead_links_are_found(self):
        self.write("docs/there.md", "# A heading\n\n```\n# Not one\n```\n")
        for text in [
            "[x](gone.md)",
            "[x](there.md#gone)",
            "[x](there.md#not-one)",
            "[x](#gone)",
            "[`code` in text](gone.md)",
            "![picture](gone.svg)",
            "[x]: gone.md",
            "[x](/docs/there.md)",
            "see `docs/gone.md`",
            "see `docs/gone`, section 2",
            "```\nfence\n```\n[x](gone.md)",
        ]:
            with self.subTest(text):
                self.assertEqual(len(self.complaints(text)), 1)

    def test_living_links_pass(self):
        self.write("docs/there.md", "# A heading: with `code`, twice\n## Again\n## Again\n")
        for text in [
            "[x](there.md) [y](../docs) [z](there.md#a-heading-with-code-twice) [w](there.md#again-1)",
            "# Own\n[x](#own)",
            "[x](https://example.org/gone.md) [m](mailto:a@example.org)",
            "see `docs/there.md`, `docs/there.md:12` and `docs/NAME.md`, and `not/ours.md`".replace("NAME", "*"),
            "`[x](gone.md)`\n\n```\n[x](gone.md)\n```\n",
        ]:
            with self.subTest(text):
                self.assertEqual(self.complaints(text), [])

    def test_the_line_is_named(self):
        self.assertIn("here.md:3:", self.complaints("one\n\n[x](gone.md)\n")[0])


class Sources(Tree):
    def test_licence_line(self):
        self.write("bpf/lib/good.h", f"/* {sources.SPDX} */\n")
        self.write("bpf/good.bpf.c", f"// {sources.SPDX}\n")
        self.write("other/free.c", "int x;\n")
        self.assertEqual(sources.check(self.root), [])
        self.write("bpf/bad.bpf.c", "// SPDX-License-Identifier: MIT\n")
        self.assertEqual(len(sources.check(self.root)), 1)

    def test_private_references(self):
        for text in [f"see /{'work'}/notes", f"see /{'home'}/someone/notes", f"as {'issue'} 12 says"]:
            with self.subTest(text):
                self.write("README.md", text)
                self.assertEqual(len(sources.check(self.root)), 1)
        self.write("README.md", "crates/network/work/x and $ROOT/home/x and https://example.org/home/page\n")
        self.assertEqual(sources.check(self.root), [])


class Mutants(Tree):
    def complaints(self, document=None, **changes):
        mutant = {"name": "one", "row": "r", "breaks": "b", "file": "f.c", "old": "old();", "new": "new();", "test": "t works"}
        table = [{**mutant, **changes}]
        self.write("f.c", "first(); old(); twice(); twice();")
        self.write("tests/t.rs", "#[test]\nfn works() {}\n")
        settings = {"tests": "tests"}
        self.write(mutants.DOCUMENT, document or "# T\n\n" + mutants.documented(settings, table))
        return mutants.check(settings, table, self.root)

    def test_a_table_that_fits_passes(self):
        self.assertEqual(self.complaints(), [])

    def test_a_rotten_table_is_found(self):
        for changes in [{"old": "gone();"}, {"old": "twice();"}, {"new": "old();"}, {"test": "t idle"}, {"test": "u works"}]:
            with self.subTest(changes):
                self.assertEqual(len(self.complaints(**changes)), 1)
        self.assertEqual(len(self.complaints(document="another table")), 1)

    def test_only_assertions_of_tests_count(self):
        panic = "thread 'x' panicked at {}:1:2:\n{}\n"
        mine = "crates/cache/tests/t.rs"
        self.assertEqual(mutants.assertion(panic.format(mine, "left is right")), "left is right")
        for out in [panic.format("crates/cache/src/a.rs", "x"), panic.format(mine, "called `Result::unwrap()`"), "killed"]:
            with self.subTest(out), self.assertRaises(mutants.Bad):
                mutants.assertion(out)


if __name__ == "__main__":
    unittest.main()
