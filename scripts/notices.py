#!/usr/bin/env python3
"""Writes the licence notices of everything that is compiled into a program, for those who pass the
program on.

    scripts/notices.py PACKAGE TARGET FILE [--features A,B]

The crates are those that PACKAGE depends on for TARGET, as `cargo tree` lists them: normal
dependencies, without those of tests and build scripts. Macros, whose output is compiled in, are
among them with what they use; a notice too many does no harm. The licence texts are read from the
crates' folders as cargo unpacked them, so the crates must have been fetched. Texts that differ in
nothing but white space are printed once, under the names of all crates that have them.

Beside the crates a program has Rust's standard library in it, whose notices are in the toolchain,
and for some targets a C library, whose notices the system's packages have. What has no text of its
own is listed with its licence, its authors and its address.

Needs Python 3.11 and cargo.
"""

import argparse
import html
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent
NOTICE = re.compile(r"(un)?licen[sc]e|copying|copyright|notice|ofl|ufl", re.IGNORECASE)
# Files of such a name that are program text, and folders that are not compiled into anything.
NO_NOTICE = {".rs", ".c", ".h", ".json", ".toml"}
NOT_COMPILED = {"tests", "test", "examples", "benches", "fuzz"}
WRAPPED = textwrap.TextWrapper(96, break_on_hyphens=False, break_long_words=False)
# C libraries that are linked into the program: end of the target's name, name, licence, address,
# and where Debian's packages, with which these targets are built, keep the notices.
C_LIBRARIES = [
    ("-musl", "musl", "MIT", "https://musl.libc.org", "/usr/share/doc/musl/copyright"),
    (
        "-windows-gnu",
        "mingw-w64",
        "ZPL-2.1, MIT and public domain",
        "https://www.mingw-w64.org",
        "/usr/share/doc/mingw-w64-common/copyright",
    ),
]


class Notices:
    """Texts with those who have them, and lines for those who have none."""

    def __init__(self):
        self.texts, self.without = {}, []

    def add(self, owner, text):
        # Addresses are compared as they are, white space is not.
        key = " ".join(text.split())
        if key:
            self.texts.setdefault(key, (text, []))[1].append(owner)

    def write(self, file, title, crates):
        lines = [title, "=" * len(title), ""]
        about = (
            f"{len(crates)} crates and the libraries of the toolchain are compiled into this program, besides the "
            "project's own code, which is under the licences in LICENSE-MIT and LICENSE-APACHE. Each crate is listed "
            "with its licence; the texts of the licences follow. Where a crate leaves a choice of licences, any of "
            "them may be chosen. What the standard library has in it is listed for all targets together."
        )
        lines += [*WRAPPED.wrap(about), "", *crates, ""]
        if self.without:
            lines += ["Without a text of their own:", "", *self.without, ""]
        for number, (text, owners) in enumerate(self.texts.values(), 1):
            owned = WRAPPED.wrap(f"Text {number} of {len(self.texts)}: {', '.join(owners)}")
            lines += ["-" * 96, *owned, "-" * 96, "", textwrap.dedent(text).strip("\n"), ""]
        # The mark before the text tells browsers of the encoding, where a server does not.
        text = "\n".join(line.rstrip() for line in "\n".join(lines).split("\n"))
        file.write_text(text, encoding="utf-8-sig", newline="\n")


def output(*command):
    try:
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    except OSError as error:
        sys.exit(f"{command[0]} cannot be started: {error.strerror}; install Rust with rustup (https://rustup.rs)")


def compiled_in(package, target, features):
    """The names and versions of a program's crates. The dependencies that `cargo metadata` gives are
    of the features of the whole workspace, more than one of its packages has."""
    command = ["cargo", "tree", "--locked", "-p", package, "--target", target, "-e", "normal"]
    chosen = ["--features", features] if features else []
    listed = output(*command, *chosen, "--prefix", "none", "--format", "{p}")
    return {(name, version.removeprefix("v")) for name, version, *_ in map(str.split, listed.splitlines())}


def files_of(folder):
    """The paths of a crate's notices, relative to its folder."""
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if NOT_COMPILED.isdisjoint(inside.parts[:-1]) and path.suffix not in NO_NOTICE:
            if NOTICE.match(path.name) and path.is_file():
                yield inside


def add_crates(notices, package, target, features):
    """Adds the notices of a program's crates, and returns a line about each crate."""
    chosen = compiled_in(package, target, features)
    metadata = output("cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", target)
    lines = []
    for crate in sorted(json.loads(metadata)["packages"], key=lambda crate: (crate["name"], crate["version"])):
        # The project's own have no source.
        if (crate["name"], crate["version"]) not in chosen or crate["source"] is None:
            continue
        name, folder = f"{crate['name']} {crate['version']}", pathlib.Path(crate["manifest_path"]).parent
        lines.append(f"  {name}, {crate['license'] or 'licence in its text'}")
        found = list(files_of(folder))
        for inside in found:
            notices.add(f"{name} ({inside})", (folder / inside).read_text(encoding="utf-8", errors="replace"))
        if not found:
            by = [f"by {', '.join(crate['authors'])}"] if crate["authors"] else []
            about = [name, crate["license"] or "licence unknown", *by, crate["repository"] or "no address"]
            notices.without.append(f"  {', '.join(about)}")
    return lines


def add_standard_library(notices):
    """Adds the notices of Rust's standard library and of the crates that are in it."""
    rust = pathlib.Path(output("rustc", "--print", "sysroot").strip()) / "share" / "doc" / "rust"
    version = output("rustc", "--version").split()[1]
    name = f"Rust's standard library {version}"
    listed = rust / "COPYRIGHT-library.html"
    if not listed.exists():
        notices.without.append(f"  {name}, MIT OR Apache-2.0, https://github.com/rust-lang/rust")
        return
    own, *crates = re.split(r"<h3>📦 ", listed.read_text(encoding="utf-8"))
    own = html.unescape(re.sub(r"<[^>]+>", "", own[own.index("In-tree files</h2>") :].split("<h2", 1)[0]))
    notices.add(name, "\n".join(line.strip() for line in own.splitlines() if line.strip()))
    for text in sorted((rust / "licenses").glob("*.txt")):
        if re.search(rf"\b{re.escape(text.stem)}\b", own):
            notices.add(f"{name} ({text.name})", text.read_text(encoding="utf-8"))
    for crate in crates:
        title = crate.split("</h3>", 1)[0].strip()
        texts = re.findall(r"<summary><code>(.*?)</code></summary>\s*<pre>(.*?)</pre>", crate, re.DOTALL)
        for file, text in texts:
            notices.add(f"{title} in the standard library ({html.unescape(file)})", html.unescape(text))
        if not texts:
            licence = re.search(r"<b>License:</b>\s*([^<]*)", crate)
            licence = licence[1].strip() if licence else "licence unknown"
            notices.without.append(f"  {title} in the standard library, {licence}")


def add_c_library(notices, target):
    for end, name, licence, address, place in C_LIBRARIES:
        if not target.endswith(end):
            continue
        if os.path.exists(place):
            notices.add(name, pathlib.Path(place).read_text(encoding="utf-8", errors="replace"))
        else:
            notices.without.append(f"  {name}, {licence}, {address}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("package")
    parser.add_argument("target")
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--features", default="")
    arguments = parser.parse_args()
    notices = Notices()
    try:
        crates = add_crates(notices, arguments.package, arguments.target, arguments.features)
        add_standard_library(notices)
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(error.cmd)} failed:\n{error.stderr}")
    add_c_library(notices, arguments.target)
    title = f"Notices of what is compiled into {arguments.package} for {arguments.target}"
    notices.write(arguments.file, title, crates)
    print(
        f"{arguments.file}: {len(crates)} crates, {len(notices.texts)} texts, {len(notices.without)} without one, "
        f"{arguments.file.stat().st_size:,} bytes"
    )


if __name__ == "__main__":
    main()
