#!/usr/bin/env python3
"""Checks the book in book/ without mdBook, in about a second. It fails if

 - a link leads nowhere: to a page, a heading, a file of the repository, an included file or part;
 - SUMMARY.md names a page that is not there, or a page is not in SUMMARY.md;
 - a line of prose has more than 100 columns (tables, code and addresses of links may be longer);
 - a code span that begins as a path of the repository, such as `benchmarks/seed`, is none;
 - a number differs from the file that it is said to come from.

Where numbers come from is said by a comment before a table or a paragraph:

    <!-- data: benchmarks/h100/timings.json#milliseconds benchmarks/h100/train.json scale=1000 -->

Every number of the block that follows, but for the header of a table and code spans, must be a
number of one of these files, rounded to the digits that are printed. Behind # stand the keys of a
JSON file below which numbers count; without, all do, those inside strings too. A number may also be
one of the files' times one of the scales, and a percentage 100 times one. With by=KEY, a row of a
table is compared only with those objects of the JSON files whose KEY is the code span (or else the
whole text) of the row's first cell, so that no two rows can be exchanged. These may also come from
two other numbers of the table, one of them in the same row, and a ratio must:

    1.35×          a ratio
    +1.3%  −12%    a ratio less one
    +0.047         a difference

In the book, a table with decimal places must have such a comment.

Usage: scripts/book_check.py [FILE...]

Files named on the command line, such as README.md, are checked like pages, but for the last rule.
Needs Python 3.11 and nothing else.
"""

import bisect
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = ROOT / "book" / "src"
WIDTH = 100
INCLUDE = re.compile(r"\{\{#include ([^}:\s]+)(?::([\w-]+))?\}\}")
LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(<?([^)\s>]+)>?\)")
CODE = re.compile(r"(`+)(.+?)\1", re.DOTALL)
PATH = re.compile(r"(?:\.ci|benchmarks|book|crates|docs|models|scripts)/[\w./*-]+")
DATA = re.compile(r"<!--\s*data:(.*?)-->", re.DOTALL)
NUMBER = re.compile(r"(?<![\w.,])(?<![A-Za-z]-)([+−-]?)(\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)([kM]\b|%|×)?(?![\d₀-₉]|\.\d)")


class Checker:
    def __init__(self):
        self.failures = []
        self.counts = {"links": 0, "numbers": 0}
        self.headings_of = {}

    def fail(self, path, line, message):
        self.failures.append(f"{path.relative_to(ROOT)}:{line}: {message}")

    # Text

    def expand(self, path, complain=False):
        """The text of a page with what it includes."""

        def included(match):
            name, part = match.groups()
            file = (path.parent / name).resolve()
            line = text[: match.start()].count("\n") + 1
            if not file.is_file():
                if complain:
                    self.fail(path, line, f"includes {name}, which does not exist")
                return ""
            content = file.read_text(encoding="utf-8")
            if part:
                found = re.search(rf"ANCHOR: {part}\b.*?\n(.*\n).*?ANCHOR_END: {part}\b", content, re.DOTALL)
                if not found:
                    if complain:
                        self.fail(path, line, f"includes {name}:{part}, but the file has no such part")
                    return ""
                content = found.group(1)
            return content

        text = path.read_text(encoding="utf-8")
        return INCLUDE.sub(included, text)

    def headings(self, path):
        """The anchors of a page, as mdBook and GitHub make them."""
        if path not in self.headings_of:
            found, inside = {}, False
            anchors = set()
            for line in self.expand(path).split("\n"):
                if line.startswith("```"):
                    inside = not inside
                match = None if inside else re.match(r"#{1,6} (.*)", line)
                if match:
                    title = LINK.sub(r"\1", match.group(1)).strip().lower()
                    anchor = "".join(
                        "-" if c.isspace() else c for c in title if c.isalnum() or c.isspace() or c in "-_"
                    )
                    seen = found.get(anchor, 0)
                    found[anchor] = seen + 1
                    anchors.add(f"{anchor}-{seen}" if seen else anchor)
            self.headings_of[path] = anchors
        return self.headings_of[path]

    # Pages

    def page(self, path, of_book):
        text = self.expand(path, complain=True)
        self.links(path, text, of_book)
        self.widths(path)
        self.data(path, of_book)

    def links(self, path, text, of_book):
        prose = re.sub(r"^```.*?^```$", lambda m: "\n" * m.group().count("\n"), text, flags=re.DOTALL | re.MULTILINE)
        for match in CODE.finditer(prose):
            span, line = match.group(2), prose[: match.start()].count("\n") + 1
            if PATH.fullmatch(span) and not list(ROOT.glob(span.rstrip("/."))):
                # Paths in the text of a crate's folder may be counted from there.
                if not (path.parent / span).exists():
                    self.fail(path, line, f"there is no {span}")
        spans = CODE.sub(lambda m: re.sub(r"[^\n]", "x", m.group()), prose)
        for match in LINK.finditer(spans):
            target, line = match.group(2), prose[: match.start()].count("\n") + 1
            self.counts["links"] += 1
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            file = (path.parent / name).resolve() if name else path
            if not file.exists() or not file.is_relative_to(ROOT):
                self.fail(path, line, f"the link {target} leads nowhere")
                continue
            if of_book and file.suffix == ".md" and not file.is_relative_to(SOURCES):
                self.fail(path, line, f"mdBook would turn {target} into a link to .html; link to its folder")
            if anchor and file.suffix == ".md" and anchor not in self.headings(file):
                self.fail(path, line, f"{name or 'the page'} has no heading #{anchor}")

    def widths(self, path):
        inside = comment = False
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
            if line.startswith("```"):
                inside = not inside
            comment = comment or line.lstrip().startswith("<!--")
            shown = LINK.sub(lambda m: f"[{m.group(1)}]", line)
            exempt = inside or comment or line.startswith("|") or INCLUDE.search(line)
            if not exempt and len(shown) > WIDTH:
                self.fail(path, number, f"{len(shown)} columns; a line has at most {WIDTH}")
            if "-->" in line:
                comment = False

    # Numbers

    def data(self, path, of_book):
        lines = path.read_text(encoding="utf-8").split("\n")
        sources, at, inside = None, 0, False
        while at < len(lines):
            line = lines[at]
            if line.startswith("```"):
                inside = not inside
            if inside or not line.strip():
                at += 1
                continue
            start = at
            while at < len(lines) and lines[at].strip() and (at == start or not lines[at].startswith(("```", "<!--"))):
                at += 1
                if "-->" in lines[at - 1]:
                    break
            block = lines[start:at]
            mark = DATA.fullmatch("\n".join(block).strip())
            if mark:
                sources = Source(self, path, start + 1, mark.group(1))
                continue
            if sources is not None:
                self.block(path, start + 1, block, sources)
            elif of_book and line.startswith("|") and any("." in n[0] for row in block for n in parse(row)):
                self.fail(path, start + 1, "a table of numbers that does not say which file holds them")
            if not line.startswith("<!--"):
                sources = None
        if sources is not None:
            self.fail(path, len(lines), "a data comment without anything behind it")

    def block(self, path, line, block, source):
        table = block[0].startswith("|")
        rows = [(line + i, row.strip().strip("|").split("|")) for i, row in enumerate(block)][2:]
        if not table:
            rows = [(line, ["\n".join(block)])]
        cells = [(n, parsed) for n, row in rows for cell in row for parsed in parse(cell)]
        names = {n: row_name(row[0]) for n, row in rows}
        for n, (shown, sign, mark, value, half) in cells:
            self.counts["numbers"] += 1
            others = [(v, h, m == n) for m, (_, g, k, v, h) in cells if not g and k != "×"]
            if mark == "×":
                right = related(others, lambda a, b: a / b if b else 0.0, value, half)
            else:
                right = source.has(names[n], 100.0 if mark == "%" else 1.0, value, half)
                if not right and sign and mark == "%":
                    right = related(others, lambda a, b: 100 * (a / b - 1) if b else 0.0, value, half)
                elif not right and sign:
                    right = related(others, lambda a, b: a - b, value, half)
            if not right:
                self.fail(path, n, f"{shown.strip()} is not in the data" if mark != "×" else
                          f"{shown} is no ratio of two numbers of the table")


def parse(cell):
    """The numbers of a cell: as printed, sign, mark, value, and half a unit of the last digit."""
    cell = CODE.sub(" ", LINK.sub(r"\1", cell))
    for match in NUMBER.finditer(cell):
        sign, digits, mark = match.group(1), match.group(2), match.group(3) or ""
        plain = digits.replace(",", "")
        whole, _, decimals = plain.partition(".")
        # Of a whole number, zeros at the end beyond three digits are rounding.
        zeros = 0 if decimals else min(len(whole) - len(whole.rstrip("0")), max(len(whole) - 3, 0))
        unit = {"k": 1e3, "M": 1e6}.get(mark, 1.0)
        value = float(plain) * unit * (-1 if sign in "−-" and sign else 1)
        yield match.group(), sign, mark, value, 0.5 * 10.0 ** (zeros - len(decimals)) * unit


def related(others, of, value, half):
    """Whether two of the others, within their rounding, give the value; one is of its own row."""
    for i, (a, da, near) in enumerate(others):
        for j, (b, db, also_near) in enumerate(others):
            if i == j or not (near or also_near):
                continue
            corners = [of(x, y) for x in (a - da, a + da) for y in (b - db, b + db)]
            if min(corners) <= value + half and max(corners) >= value - half:
                return True
    return False


def row_name(cell):
    span = CODE.search(cell)
    text = span.group(2) if span else cell.strip()
    return text.replace(",", "") if re.fullmatch(r"[\d,]+", text) else text


class Source:
    """The numbers that a data comment names."""

    def __init__(self, checker, path, line, mark):
        self.by = None
        self.scales = [1.0]
        # Numbers by the object that they stand in; all under None where objects do not matter.
        self.values = {}
        files = []
        for word in mark.split():
            if word.startswith("scale="):
                self.scales += map(float, word.removeprefix("scale=").split(","))
            elif word.startswith("by="):
                self.by = word.removeprefix("by=")
            else:
                files.append(word)
        for word in files:
            name, _, keys = word.partition("#")
            if not (ROOT / name).is_file():
                checker.fail(path, line, f"the data file {name} does not exist")
                continue
            before = sum(map(len, self.values.values()))
            self.read(ROOT / name, set(filter(None, keys.split(","))))
            if sum(map(len, self.values.values())) == before:
                checker.fail(path, line, f"{word} has no such numbers")
        for values in self.values.values():
            values.sort()

    def has(self, row, percent, value, half):
        values = self.values.get(row if self.by else None, [])
        for scale in [*self.scales, percent]:
            low, high = (value - half) / scale, (value + half) / scale
            slack = 1e-9 * max(abs(low), abs(high))
            at = bisect.bisect_left(values, low - slack)
            if at < len(values) and values[at] <= high + slack:
                return True
        return False

    def read(self, file, keys):
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".json":
            self.walk(json.loads(text), keys, not keys, None)
        else:
            self.add_text(None, text.replace("`", " "))

    def add_text(self, row, text):
        self.values.setdefault(row, []).extend(value for _, _, _, value, _ in parse(text))

    def walk(self, value, keys, counts, row):
        if isinstance(value, dict):
            if self.by in value:
                row = str(value[self.by])
            for key, inner in value.items():
                self.walk(inner, keys, counts or key in keys, row)
                if counts:
                    self.add_text(row, key)
        elif isinstance(value, list):
            for inner in value:
                self.walk(inner, keys, counts, row)
        elif counts and isinstance(value, str):
            self.add_text(row, value.replace("=", " ").replace(":", " "))
        elif counts and isinstance(value, (int, float)) and not isinstance(value, bool):
            self.values.setdefault(row, []).append(float(value))


def main():
    checker = Checker()
    summary = SOURCES / "SUMMARY.md"
    entries = [(SOURCES / match.group(2)).resolve() for match in LINK.finditer(summary.read_text(encoding="utf-8"))]
    pages = sorted(path for path in SOURCES.rglob("*.md") if path != summary)
    for entry in entries:
        if not entry.is_file():
            checker.fail(summary, 1, f"there is no page {entry.relative_to(SOURCES)}")
    for page in pages:
        if page not in entries:
            checker.fail(summary, 1, f"{page.relative_to(SOURCES)} is not in the summary")
        checker.page(page, of_book=True)
    others = [pathlib.Path(name).resolve() for name in sys.argv[1:]]
    for path in others:
        if not path.is_file() or not path.is_relative_to(ROOT):
            sys.exit(f"{path}: give Markdown files of this repository")
        checker.page(path, of_book=False)
    for failure in checker.failures:
        print(failure, file=sys.stderr)
    if checker.failures:
        sys.exit(f"{len(checker.failures)} failures; the head of {pathlib.Path(__file__).name} says what is checked")
    print(f"{len(pages) + len(others)} pages, {checker.counts['links']} links, {checker.counts['numbers']} numbers")


if __name__ == "__main__":
    main()
