#!/usr/bin/env python3
"""Fails when a relative link in a Markdown file leads nowhere.

Usage: links.py ROOT

A link must name a file or folder that exists and, behind a `#`, a heading of it. Links to other sites are not looked at.
"""

import os
import re
import sys
from pathlib import Path
from urllib.parse import unquote

SKIPPED_FOLDERS = {".git", "target", "node_modules"}
INLINE = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)<>\s]*)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE = re.compile(r"^\s{0,3}\[[^\]]+\]:\s*<?([^<>\s]+)>?", re.MULTILINE)
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|//", re.IGNORECASE)


def without_code(text):
    """The text with fenced blocks and code spans blanked, line numbers kept."""
    blank = lambda match: "\n" * match[0].count("\n")
    text = re.sub(r"^( *)(`{3,}|~{3,}).*?^ *\2[`~]*\s*?$", blank, text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", blank, text, flags=re.DOTALL)


def anchors(text):
    """The anchors that GitHub makes for the headings, and those written by hand."""
    found, seen = set(re.findall(r"<a\s+(?:id|name)=\"([^\"]+)\"", text)), {}
    outside_fences = re.sub(r"^( *)(`{3,}|~{3,}).*?^ *\2[`~]*\s*?$", "", text, flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#{1,6}\s+(.*?)\s*#*\s*$", outside_fences, flags=re.MULTILINE):
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


def check(root):
    """Complaints about every Markdown file below `root`, and how many links were followed."""
    complaints, count = [], 0
    for source in markdown_files(root):
        text = without_code(source.read_text())
        for match in [*INLINE.finditer(text), *REFERENCE.finditer(text)]:
            count += 1
            why = objection(source, match[1])
            if why:
                line = text.count("\n", 0, match.start(1)) + 1
                complaints.append(f"{source}:{line}: {match[1]}: {why}")
    return complaints, count


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    found, followed = check(Path(sys.argv[1]))
    print("\n".join(found), end="\n" if found else "")
    print(f"{followed} links followed")
    sys.exit(1 if found else 0)
