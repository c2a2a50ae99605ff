#!/usr/bin/env python3
"""Fails when a relative link in a Markdown file leads nowhere.

Usage: links.py ROOT

A link must name a file or folder that exists and, behind a `#`, a heading of it. Links to other sites are not looked at.
A path in a code span must exist too, if it begins with one of the repository's folders: prose names sources that way.
"""

import os
import re
import sys
from pathlib import Path
from urllib.parse import unquote

SKIPPED_FOLDERS = {".git", "target", "node_modules"}
INLINE = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)<>\s]*)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE = re.compile(r"^\s{0,3}\[[^\]]+\]:\s*<?([^<>\s]+)>?", re.MULTILINE)
NAMED = re.compile(r"(?<!`)`((?:bpf|crates|decisions|dist|docs|fuzz|tests|tools)/[\w./-]*\w)`(?!`)")
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|//", re.IGNORECASE)


def blank(match):
    """As many line ends as there were: line numbers stay true."""
    return "\n" * match[0].count("\n")


def without_fences(text):
    return re.sub(r"^( *)(`{3,}|~{3,}).*?^ *\2[`~]*\s*?$", blank, text, flags=re.MULTILINE | re.DOTALL)


def without_spans(text):
    return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", blank, text, flags=re.DOTALL)


def anchors(text):
    """The anchors that GitHub makes for the headings, and those written by hand."""
    found, seen = set(re.findall(r"<a\s+(?:id|name)=\"([^\"]+)\"", text)), {}
    for heading in re.findall(r"^#{1,6}\s+(.*?)\s*#*\s*$", without_fences(text), flags=re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        count = seen.get(slug, 0)
        seen[slug] = count + 1
        found.add(f"{slug}-{count}" if count else slug)
    return found


def markdown_files(root):
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - SKIPPED_FOLDERS)
        for name in sorted(names):
            if name.endswith(".md"):
                yield Path(folder, name)


def objection(source, link):
    """What is wrong with a link of the file `source`; None if it is well."""
    if ELSEWHERE.match(link):
        return None
    name, _, anchor = unquote(link).partition("#")
    if name.startswith("/"):
        return "begins with a slash: links are relative"
    target = (source.parent / name) if name else source
    if not target.exists():
        return "no such file"
    if anchor and target.suffix == ".md" and anchor not in anchors(target.read_text()):
        return f"no heading has the anchor #{anchor}"
    return None


def check_file(root, source):
    """For each link and each named path of a file: a complaint, or None."""
    prose = without_fences(source.read_text())
    plain = without_spans(prose)
    for match in [*INLINE.finditer(plain), *REFERENCE.finditer(plain)]:
        yield complaint(plain, match, source, objection(source, match[1]))
    for match in NAMED.finditer(prose):
        known = any((folder / match[1]).exists() for folder in (root, source.parent))
        yield complaint(prose, match, source, None if known else "no such file")


def complaint(text, match, source, why):
    line = text.count("\n", 0, match.start(1)) + 1
    return f"{source}:{line}: {match[1]}: {why}" if why else None


def check(root):
    """Complaints about every Markdown file below `root`, and how many links were followed."""
    results = [result for source in markdown_files(root) for result in check_file(root, source)]
    return [result for result in results if result], len(results)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    found, followed = check(Path(sys.argv[1]))
    print("\n".join(found), end="\n" if found else "")
    print(f"{followed} links followed")
    sys.exit(1 if found else 0)
