#!/usr/bin/env python3
"""Fails when a crate that this project builds on has a licence that is not on the list.

Usage: cargo metadata --format-version 1 | licences.py
"""

import json
import re
import sys

# What may be linked into a program under Apache-2.0 OR MIT without asking more of its users than a notice.
ALLOWED = {
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "CC0-1.0",
    "ISC",
    "MIT",
    "NCSA",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
}


def permitted(expression):
    """Whether an SPDX expression can be met with allowed licences alone. Raises ValueError on one it cannot read."""
    # Cargo's old way to write OR.
    words = re.findall(r"[()]|[^\s()]+", expression.replace("/", " OR "))

    def term():
        word = words.pop(0) if words else ""
        if word == "(":
            value = alternatives()
            if not words or words.pop(0) != ")":
                raise ValueError("unbalanced")
            return value
        if not re.match(r"[A-Za-z0-9]", word) or word in ("OR", "AND", "WITH"):
            raise ValueError("licence expected")
        if words[:1] == ["WITH"] and len(words) > 1:
            word += f" WITH {words[1]}"
            del words[:2]
        return word in ALLOWED

    def conjunction():
        value = term()
        while words[:1] == ["AND"]:
            words.pop(0)
            value = term() and value
        return value

    def alternatives():
        value = conjunction()
        while words[:1] == ["OR"]:
            words.pop(0)
            value = conjunction() or value
        return value

    value = alternatives()
    if words:
        raise ValueError(f"unexpected {words[0]}")
    return value


def objection(package):
    """What is wrong with a package's licence; None if it is well."""
    expression = package.get("license")
    if not expression:
        return "names no licence in its manifest"
    try:
        return None if permitted(expression) else f"has licence {expression}"
    except ValueError as error:
        return f"has licence {expression}, which is not an SPDX expression: {error}"


def check(metadata):
    """Complaints about the packages in the output of `cargo metadata`."""
    named = [(f"{package['name']} {package['version']}", objection(package)) for package in metadata["packages"]]
    return [f"{name} {why}" for name, why in named if why]


if __name__ == "__main__":
    parsed = json.load(sys.stdin)
    found = check(parsed)
    print("\n".join(found), end="\n" if found else "")
    print(f"{len(parsed['packages'])} crates looked at")
    sys.exit(1 if found else 0)
