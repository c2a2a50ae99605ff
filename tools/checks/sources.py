#!/usr/bin/env python3
"""Fails when a kernel source lacks its licence line, or a file refers to what its reader cannot see.

Usage: sources.py ROOT
"""

import os
import re
import sys
from pathlib import Path

SKIPPED_FOLDERS = {".git", "target"}
KERNEL_SUFFIXES = {".c", ".h"}
SPDX = "SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)"
# A reader elsewhere has no such folders and no such tracker. Put together here so that this file names none either.
FOLDERS = r"(?<![\w.~$}/-])/(?:" + "|".join(["work", "home", "Users"]) + r")/\w|\.\./" + "shared" + r"\b"
PRIVATE = re.compile(FOLDERS + r"|\b[Ii]ssue #?\d")


def files(root):
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - SKIPPED_FOLDERS)
        yield from (Path(folder, name) for name in sorted(names))


def kernel_objection(path, text):
    """Kernel code says under which licence it is, in its first line."""
    if path.suffix in KERNEL_SUFFIXES and text.split("\n", 1)[0] not in (f"// {SPDX}", f"/* {SPDX} */"):
        return [f"{path}:1: the first line must be: // {SPDX}"]
    return []


def private_references(path, text):
    """Lines that refer to a path on one machine or to a number in somebody's tracker."""
    return [
        f"{path}:{number}: refers to what only its author can see: {line.strip()[:100]}"
        for number, line in enumerate(text.split("\n"), 1)
        if PRIVATE.search(line)
    ]


def check(root):
    """Complaints about every text file below `root`."""
    complaints = []
    for path in files(root):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if root / "bpf" in path.parents:
            complaints += kernel_objection(path, text)
        complaints += private_references(path, text)
    return complaints


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    found = check(Path(sys.argv[1]))
    print("\n".join(found), end="\n" if found else "")
    sys.exit(1 if found else 0)
