"""Mutants of what runs: a table of edits to the sources, each of which a test must notice.

    mutants.py TABLE check              every old text is there once, every test there is, the documented table is this one
    mutants.py TABLE table              that documented table
    mutants.py TABLE run DIR [NAME...]  builds and tests all of them, or some, on a copy of the sources below DIR

A mutant counts as caught if it builds, its kernel programs load, and its test fails by an assertion of its own.
"""

import json
import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = "docs/testing.md"
TEST_SECONDS = 120


class Bad(Exception):
    """Why a mutant proves nothing."""


def load(table):
    with open(table, "rb") as file:
        data = tomllib.load(file)
    groups = data.pop("group")
    mutants = [{**{key: group[key] for key in group if key != "mutant"}, **mutant} for group in groups for mutant in group["mutant"]]
    return data, mutants


def mutate(text, mutant):
    """The text with the mutant in it."""
    count = text.count(mutant["old"])
    if count != 1:
        raise Bad(f"its old text is {count} times in {mutant['file']}")
    if mutant["new"] == mutant["old"]:
        raise Bad("it changes nothing")
    return text.replace(mutant["old"], mutant["new"])


def documented(settings, mutants):
    rows = ["| mutant | breaks | caught by |", "|---|---|---|"]
    row = None
    for mutant in mutants:
        if mutant["row"] != row:
            row = mutant["row"]
            rows.append(f"| **{row}** | | |")
        binary, test = mutant["test"].split()
        rows.append(f"| `{mutant['name']}` | {mutant['breaks']} | {binary}: {test} |")
    return "\n".join(rows) + "\n"


def check(settings, mutants, root):
    """What is wrong with the table."""
    wrong, names = [], set()
    for mutant in mutants:
        try:
            mutate((root / mutant["file"]).read_text(), mutant)
            binary, test = mutant["test"].split()
            source = root / settings["tests"] / f"{binary}.rs"
            if not source.exists() or f"\nfn {test}()" not in source.read_text():
                raise Bad(f"there is no test {mutant['test']}")
            if mutant["name"] in names:
                raise Bad("another one has its name")
        except Bad as error:
            wrong.append(f"{mutant['name']}: {error}")
        names.add(mutant["name"])
    if (root / DOCUMENT).read_text().count(documented(settings, mutants)) != 1:
        wrong.append(f"{DOCUMENT} has another table, or it twice: `{sys.argv[0]} {sys.argv[1]} table` prints this one")
    return wrong


def from_files(text):
    """A Rust source that reads kernel programs from the files that it would else embed: a mutant of theirs needs no cargo."""
    read = r"static \1: std::sync::LazyLock<Vec<u8>> = std::sync::LazyLock::new(|| std::fs::read(\2).unwrap());"
    text, count = re.subn(r"static (\w+): &\[u8\] = include_bytes!\((.*\.bpf\.o.*)\);", read, text)
    return re.sub(r"open_memory\((\w+)\)", r"open_memory(&\1)", text) if count else text


class Copy:
    """The sources, in a folder that cargo keeps building in: what does not differ is not built again."""

    def __init__(self, folder, package):
        self.sources, self.package = folder / "src", package
        self.environment = {**os.environ, "CARGO_TARGET_DIR": str((folder / "build").resolve()), "UNDERPASS_SEED": "1"}
        self.folder = "crates/" + package.removeprefix("underpass-")
        self.texts = {}
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
        for name in listed.decode().split("\0"):
            if name and (ROOT / name).is_file():
                self.put(name, (ROOT / name).read_bytes())

    def text(self, name):
        """A file as it was when the copy was made."""
        if name not in self.texts:
            self.texts[name] = (ROOT / name).read_text()
        return self.texts[name]

    def put(self, name, content):
        if name.endswith(".rs"):
            content = from_files(content.decode()).encode()
        path = self.sources / name
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def build(self, binaries):
        """The test executables, by name."""
        command = ["cargo", "test", "--locked", "--quiet", "--no-run", "--message-format=json", "-p", self.package]
        for binary in binaries:
            command += ["--test", binary]
        done = subprocess.run(command, cwd=self.sources, env=self.environment, capture_output=True, text=True)
        messages = [json.loads(line) for line in done.stdout.splitlines()]
        if done.returncode:
            rendered = [message.get("message", {}).get("rendered", "") for message in messages]
            raise Bad(f"it does not build:\n{''.join(filter(None, rendered))}{done.stderr}")
        built = {}
        for message in messages:
            name, kinds = message.get("target", {}).get("name"), message.get("target", {}).get("kind")
            if message.get("executable"):
                built[name] = message["executable"]
            elif kinds == ["custom-build"] and f"/{self.folder}#" in message["package_id"]:
                self.script = message["filenames"][0]
            elif message["reason"] == "build-script-executed":
                out = Path(message["out_dir"])
                if f"/{self.folder}#" in message["package_id"]:
                    self.out = out
                elif "libbpf-sys@" in message["package_id"]:
                    told = (out.parent / "output").read_text()
                    self.headers = re.search(r"^cargo:+(?:metadata=)?include=(.*)$", told, re.MULTILINE)[1]
        return built

    def build_kernel(self):
        """The kernel programs alone, as the package's build script does it."""
        environment = {
            **self.environment,
            "CARGO_MANIFEST_DIR": str(self.sources.resolve() / self.folder),
            "CARGO_CFG_TARGET_ARCH": os.uname().machine,
            "DEP_BPF_INCLUDE": self.headers,
            "OUT_DIR": str(self.out),
        }
        done = subprocess.run([self.script], cwd=environment["CARGO_MANIFEST_DIR"], env=environment, capture_output=True, text=True)
        if done.returncode:
            raise Bad(f"it does not build:\n{done.stdout}{done.stderr}")

    def run(self, executable, test):
        """Whether it passes, and what it prints."""
        command = [executable, *([test, "--exact"] if test else [])]
        try:
            done = subprocess.run(
                command, cwd=self.sources / self.folder, env=self.environment, capture_output=True, text=True, errors="replace", timeout=TEST_SECONDS
            )
        except subprocess.TimeoutExpired as error:
            raise Bad(f"{test} does not end") from error
        out = done.stdout + done.stderr
        if "not run:" in out:
            raise Bad(f"{test} does not run here: {out}")
        if not re.search(r"test result: \w+\. (1 passed; 0|0 passed; 1) failed", out):
            raise Bad(f"{test} ran not once:\n{out}")
        return done.returncode == 0, out


def assertion(out):
    """The first panic: where it is, and its first line."""
    found = re.search(r"panicked at (\S+?):\d+:\d+:\n(.*)", out)
    if not found:
        raise Bad(f"its test fails without an assertion:\n{out}")
    where, what = found.groups()
    if "/tests/" not in where or what.startswith("called `"):
        raise Bad(f"its test fails by something else, {where}: {what}")
    return what


def of_kernel(mutant):
    return mutant["file"].startswith("bpf/")


def judge(copy, settings, mutant, built):
    """How the mutant is caught. What is built need not be built again if the mutant is one of the kernel's programs."""
    text = copy.text(mutant["file"])
    binary, test = mutant["test"].split()
    try:
        copy.put(mutant["file"], mutate(text, mutant).encode())
        if of_kernel(mutant):
            copy.build_kernel()
        else:
            built = copy.build({settings["load"], binary})
        passes, out = copy.run(built[settings["load"]], None)
        if not passes:
            raise Bad(f"its programs do not load:\n{out}")
        passes, out = copy.run(built[binary], test)
        if passes:
            raise Bad("SURVIVES")
        return assertion(out)
    finally:
        copy.put(mutant["file"], text.encode())


def run(settings, mutants, folder):
    copy = Copy(folder, settings["package"])
    for mutant in mutants:
        copy.text(mutant["file"])
    tests = sorted({mutant["test"] for mutant in mutants})
    built = copy.build({settings["load"], *(test.split()[0] for test in tests)})
    copy.build_kernel()
    for test in tests:
        binary, name = test.split()
        passes, out = copy.run(built[binary], name)
        if not passes:
            raise Bad(f"without a mutant {test} fails:\n{out}")
    width = max(len(mutant["name"]) for mutant in mutants)
    bad = 0
    for mutant in sorted(mutants, key=of_kernel, reverse=True):
        start = time.monotonic()
        try:
            verdict = f"{mutant['test']}: {judge(copy, settings, mutant, built)[:150]}"
        except Bad as error:
            bad += 1
            verdict = f"NOT CAUGHT by {mutant['test']}: {error}"
        print(f"{mutant['name']:{width}} {time.monotonic() - start:4.0f} s  {mutant['row']:12}  {verdict}", flush=True)
    print(f"{len(mutants) - bad} of {len(mutants)} mutants are caught")
    return bad


def main():
    table, command, *arguments = sys.argv[1:]
    settings, mutants = load(table)
    if command == "check":
        wrong = check(settings, mutants, ROOT)
        print("\n".join(wrong) or f"{len(mutants)} mutants")
        return bool(wrong)
    if command == "table":
        print(documented(settings, mutants), end="")
        return False
    folder, *names = arguments
    unknown = set(names) - {mutant["name"] for mutant in mutants}
    if unknown:
        raise Bad(f"no such mutants: {' '.join(sorted(unknown))}")
    return run(settings, [mutant for mutant in mutants if not names or mutant["name"] in names], Path(folder))


if __name__ == "__main__":
    try:
        sys.exit(bool(main()))
    except Bad as error:
        sys.exit(str(error))
