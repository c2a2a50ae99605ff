#!/usr/bin/env python3
"""Fails when the protocol crate does I/O, reads a clock, starts threads or draws random numbers.

Usage: pure.py CRATE_DIR

The crate holds pure state machines: what is simulated and model-checked must be what runs. So its sources may name only
the modules of the standard library listed below, no I/O macro, and its manifest only the dependencies listed below.
"""

import re
import sys
import tomllib
from pathlib import Path

ALLOWED_MODULES = {
    *"alloc any array ascii borrow boxed char cell clone cmp collections convert default error fmt hash hint".split(),
    *"iter marker mem num ops option panic primitive ptr rc result slice str string sync vec".split(),
    *"bool f32 f64 i8 i16 i32 i64 i128 isize u8 u16 u32 u64 u128 usize".split(),
    *"assert assert_eq assert_ne concat debug_assert format matches unreachable write writeln include_str".split(),
}
# Addresses are data; sockets are not. A duration is data; a clock is not.
ALLOWED_PATHS = {
    *(("net", name) for name in ("Ipv4Addr", "Ipv6Addr", "IpAddr", "SocketAddrV4", "SocketAddr", "AddrParseError")),
    ("time", "Duration"),
}
# Inside allowed modules: random keys, and waiting for another thread. (A lock around state that threads share is not I/O.)
FORBIDDEN_NAMES = {"RandomState", "mpsc", "Condvar", "Barrier"}
FORBIDDEN_MACROS = {"print", "println", "eprint", "eprintln", "dbg", "thread_local"}
# hashbrown: hash tables whose order depends on a key that is passed in, not on a random one.
ALLOWED_DEPENDENCIES = {"underpass-abi", "hashbrown", "serde", "serde_json", "siphasher", "thiserror", "zerocopy"}

TOKEN = re.compile(
    r"""
      (?P<space>\s+|//[^\n]*)
    | (?P<comment>/\*)
    | (?P<raw>[bc]?r(?P<hashes>\#*)".*?"(?P=hashes))
    | (?P<string>[bc]?"(?:\\.|[^"\\])*")
    | (?P<char>b?'(?:\\u\{[^}]*\}|\\x..|\\.|[^'\\])')
    | (?P<lifetime>'\w+)
    | (?P<ident>(?:r\#)?[A-Za-z_]\w*)
    | (?P<number>\d\w*)
    | (?P<path>::)
    | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)


def end_of_comment(text, start):
    depth = 0
    for match in re.finditer(r"/\*|\*/", text[start:]):
        depth += 1 if match[0] == "/*" else -1
        if depth == 0:
            return start + match.end()
    return len(text)


def tokens(text):
    """(line, token) of everything that is not white space, comment or literal."""
    at, line = 0, 1
    while at < len(text):
        match = TOKEN.match(text, at)
        end = end_of_comment(text, at) if match.lastgroup == "comment" else match.end()
        if match["ident"] or match["path"] or match["other"]:
            yield line, match[0].removeprefix("r#")
        line += text.count("\n", at, end)
        at = end


def use_tree(stream, at, prefix):
    """The full paths that a `use` declaration names, and the position after it."""
    paths, path = [], list(prefix)
    while at < len(stream):
        line, token = stream[at]
        if token == "{":
            at += 1
            while stream[at][1] != "}":
                inner, at = use_tree(stream, at, path)
                paths += inner
                if stream[at][1] == ",":
                    at += 1
            return paths, at + 1
        if token in (",", "}", ";"):
            break
        if token == "as":
            at += 2
            continue
        if token not in ("::", "self") or (token == "self" and not path):
            path.append(token)
        at += 1
    return paths + [(stream[at - 1][0], tuple(path))], at


def paths(stream):
    """(line, path) of every path in the source, those of `use` trees in full."""
    at = 0
    while at < len(stream):
        line, token = stream[at]
        if token == "use":
            found, at = use_tree(stream, at + 1, [])
            yield from found
        elif re.match(r"\w", token):
            path = [token]
            while at + 2 < len(stream) and stream[at + 1][1] == "::" and re.match(r"\w", stream[at + 2][1]):
                path.append(stream[at + 2][1])
                at += 2
            yield line, tuple(path)
            at += 1
        else:
            at += 1


def objection(path):
    """Why a path may not be named here; None if it may."""
    if path[0] not in ("std", "core", "alloc"):
        return None
    inner = path[1:]
    if not inner or inner[0] == "*":
        return "names the whole standard library, which hides what is used"
    if inner[0] not in ALLOWED_MODULES and inner[:2] not in ALLOWED_PATHS:
        return "is not for pure code"
    forbidden = FORBIDDEN_NAMES.intersection(inner)
    return f"uses {forbidden.pop()}" if forbidden else None


def check_source(name, text):
    """Complaints about one file."""
    stream = list(tokens(text))
    complaints = []
    for line, path in paths(stream):
        why = objection(path)
        if why:
            complaints.append(f"{name}:{line}: {'::'.join(path)} {why}")
    for (line, token), (_, following) in zip(stream, stream[1:]):
        if following == "!" and token in FORBIDDEN_MACROS:
            complaints.append(f"{name}:{line}: {token}! does I/O or keeps hidden state")
        if (token, following) == ("extern", "crate"):
            complaints.append(f"{name}:{line}: extern crate hides what is used")
    return complaints


def check_manifest(name, text):
    """Complaints about the crate's dependencies; those of tests and benchmarks are free."""
    manifest = tomllib.loads(text)
    tables = [manifest, *manifest.get("target", {}).values()]
    names = {key for table in tables for key in table.get("dependencies", {})}
    return [
        f"{name}: dependency {key} is not on the list of pure ones in {Path(__file__).name}"
        for key in sorted(names - ALLOWED_DEPENDENCIES)
    ]


def check(crate):
    """Complaints about a crate."""
    # Unit tests in folders of their own may use threads; they are built for tests alone.
    sources = sorted(path for path in (crate / "src").rglob("*.rs") if "tests" not in path.parts)
    if not sources:
        return [f"{crate}/src: no sources found"]
    complaints = check_manifest(str(crate / "Cargo.toml"), (crate / "Cargo.toml").read_text())
    for source in sources:
        complaints += check_source(str(source), source.read_text())
    return complaints


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    found = check(Path(sys.argv[1]))
    print("\n".join(found), end="\n" if found else "")
    sys.exit(1 if found else 0)
