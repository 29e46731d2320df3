#!/usr/bin/env python3
"""Checks what the project depends on and what it does without the compiler's protection.

It fails if

 - a crate in Cargo.lock has a licence that deny.toml does not allow, or comes from elsewhere than
   the registry;
 - a piece of unsafe code has no comment that begins with SAFETY and says why it is sound.

It says which crates are there in several versions. `--unsafe` prints the unsafe code with its
reasons as a table in Markdown. Needs Python 3.11 and cargo, and no network once the crates are
fetched. What needs a list of known faults is `cargo deny check advisories`.
"""

import collections
import json
import pathlib
import re
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
# The type of a function has no name after `fn`, and needs no reason.
UNSAFE = re.compile(r'\bunsafe\s*(extern\s*("[^"]*"\s*)?)?(\{|\(|fn\s+[\w$]|impl\b|trait\b)')
# Lines above unsafe code in which its reason may stand: of a statement that spans several.
ABOVE = 14


def permitted(expression, allowed):
    """Whether a licence expression leaves a choice that is allowed."""
    tokens = re.findall(r"\(|\)|[^\s()]+", expression.replace("/", " OR "))

    def one_of():
        value = all_of()
        while tokens and tokens[0] == "OR":
            tokens.pop(0)
            value = all_of() or value
        return value

    def all_of():
        value = single()
        while tokens and tokens[0] == "AND":
            tokens.pop(0)
            value = single() and value
        return value

    def single():
        token = tokens.pop(0)
        if token == "(":
            value = one_of()
            tokens.pop(0)
            return value
        if tokens and tokens[0] == "WITH":
            token += f" {tokens.pop(0)} {tokens.pop(0)}"
        return token in allowed

    return one_of() and not tokens


def licences():
    rules = tomllib.loads((ROOT / "deny.toml").read_text())["licenses"]
    exceptions = {rule["crate"]: rule["allow"] for rule in rules["exceptions"]}
    command = ["cargo", "metadata", "--locked", "--format-version", "1"]
    try:
        told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError as error:
        sys.exit(f"cargo cannot be started: {error.strerror}; install Rust with rustup (https://rustup.rs)")
    if told.returncode != 0:
        sys.exit(f"cargo metadata failed:\n{told.stderr}")
    packages = json.loads(told.stdout)["packages"]
    for package in packages:
        name, source = f"{package['name']} {package['version']}", package["source"]
        if source is not None and not source.startswith("registry+"):
            yield f"{name} comes from {source}"
        if not permitted(package["license"] or "none", exceptions.get(package["name"], rules["allow"])):
            yield f"{name} has the licence {package['license']}, which deny.toml does not allow"
    names = collections.Counter(package["name"] for package in packages)
    several = sorted(name for name, count in names.items() if count > 1)
    print(f"{len(packages)} crates; in several versions: {', '.join(several)}")


def unsafe_code():
    """Yields each piece of unsafe code: file, line, and its reason, or none."""
    for path in sorted((ROOT / "crates").glob("*/src/**/*.rs")):
        lines = path.read_text().split("\n")
        whole = None
        for i, line in enumerate(lines):
            if line.startswith("}"):
                whole = None
            if not UNSAFE.search(line) or line.strip().startswith("//"):
                continue
            # What an unsafe implementation does is what its own reason covers.
            if whole is not None and line.startswith("    "):
                continue
            whole = None
            reason = reason_above(lines, i)
            if line.startswith("unsafe impl") and not line.rstrip().endswith("}"):
                whole = reason
            yield path.relative_to(ROOT), i + 1, reason


def reason_above(lines, at):
    for start in range(at, max(-1, at - ABOVE), -1):
        text = lines[start].strip()
        # A reason further up is that of the unsafe code in between.
        if start < at and UNSAFE.search(text) and not text.startswith("//"):
            return None
        for mark in ["// SAFETY:", "/// # Safety"]:
            if text.startswith(mark):
                own = [text.removeprefix(mark)]
                for line in lines[start + 1 : at]:
                    if not line.strip().startswith("//"):
                        break
                    own.append(line.strip().lstrip("/"))
                return " ".join(" ".join(own).split())
    return None


def main():
    found = list(unsafe_code())
    if sys.argv[1:] == ["--unsafe"]:
        print("| where | why it is sound |\n|---|---|")
        for path, line, reason in found:
            print(f"| `{path}`, {line} | {reason} |")
        return
    failures = [f"{path}:{line}: unsafe code without a SAFETY comment" for path, line, reason in found if not reason]
    failures += licences()
    print(f"{len(found)} pieces of unsafe code, each with its reason" if not failures else "\n".join(failures))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
