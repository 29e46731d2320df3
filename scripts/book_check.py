#!/usr/bin/env python3
"""Checks the book in book/ without mdBook, in about a second. It fails if

 - a link leads nowhere: to a page, a heading, a file of the repository, an included file or part;
 - SUMMARY.md names a page that is not there, or a page is not in SUMMARY.md;
 - a line of prose has more than 100 columns (tables, code and addresses of links may be longer);
 - a code span that begins as a path of the repository, such as `benchmarks/seed`, is none;
 - a number differs from the file that it is said to come from;
 - a committed result is of a build with changes that were not committed.

A figure is a number with a decimal point or with %, ×, k or M behind it. Every table, paragraph,
list and quote that has one must say by a comment before it where its numbers come from. A blank
line, a heading, a fence or another comment ends such a block, so a comment between two items of a
list begins a new one. Headings, code spans, addresses and included text are not looked at.

    <!-- data: benchmarks/h100/timings.json#milliseconds benchmarks/h100/train.json scale=1000 -->

Every number of the block that follows, whole ones too, but for the header of a table, must be a
number of one of these files, rounded to the digits that are printed. Behind # stand the keys of a
JSON file below which numbers count; without, all do, those inside strings too. A number may also be
one of the files' times one of the scales, and a percentage 100 times one. With by=KEY, a row of a
table is compared only with those objects of the JSON files whose KEY is the code span (or else the
whole text) of the row's first cell, so that no two rows can be exchanged. In a table, these
may also come from two other numbers that are printed there, and a ratio must:

    1.35×          a ratio, of two numbers of its own row
    +1.3%  −12%    a ratio less one, of two numbers, one of them of its own row
    +0.047         a difference of two numbers, one of them of its own row

What prose computes from the data has its derivation among the words of the comment:

    ratio=70,700/28,100         2.5, 2.5× or 252%
    percent=10.61/8.95          18%, which is 100·(a/b − 1)
    difference=2.161-2.148      0.013

Both operands must be numbers of the files, as those of the block must, or sums of such (1.2+3.4).
They stand for what the files have, with all digits. What comes out, rounded to the digits that are
printed, is a number that the block may show; without a sign, its absolute value. A derivation that
no number of the block needs is an error.

Where no file can hold some or all of the numbers, a comment says why:

    <!-- no data for 80, 92%: the context that the command names, and what exp(−0.086) is -->
    <!-- no data: versions -->

The first stands beside a data comment and leaves out the numbers that it names, as they are
printed; each must be there. The second leaves out the block, which must have a figure.

Usage: scripts/book_check.py [FILE...]

Files named on the command line, such as README.md, are checked like pages of the book.
Needs Python 3.11 and git.
"""

import bisect
import dataclasses
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = ROOT / "book" / "src"
WIDTH = 100
INCLUDE = re.compile(r"\{\{#include ([^}:\s]+)(?::([\w-]+))?\}\}")
LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(<?([^)\s>]+)>?\)")
CODE = re.compile(r"(`+)(.+?)\1", re.DOTALL)
PATH = re.compile(r"(?:\.cargo|\.ci|\.github|benchmarks|book|crates|docs|fuzz|models|scripts|web)/[\w./*-]+")
MARK = re.compile(r"<!--\s*(data|no data|no data for [^:]+):(.*?)-->", re.DOTALL)
DIRTY = re.compile(r'"revision":\s*"[^"]*-dirty"')
ADDRESS = re.compile(r"<https?:[^>\s]*>")
NUMBER = re.compile(r"(?<![\w.,])(?<![A-Za-z]-)(?<![A-Za-z]\d-)([+−-]?)(\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)([kM]\b|%|×)?(?![\d₀-₉⁰¹²³⁴-⁹]|\.\d)")
# What numbers are made of two others.
MADE = {
    "ratio": lambda a, b: a / b if b else 0.0,
    "percent": lambda a, b: 100 * (a / b - 1) if b else 0.0,
    "difference": lambda a, b: a - b,
}


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
        self.data(path)

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
            if of_book and not file.is_relative_to(SOURCES):
                self.fail(path, line, f"the built book does not hold {target}; name the path in a code span")
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

    def data(self, path):
        marks = []
        for line, block in blocks(path.read_text(encoding="utf-8")):
            text = "\n".join(block).strip()
            mark = MARK.fullmatch(text)
            if mark:
                marks.append((line, *mark.groups()))
            elif not text.startswith("<!--"):
                self.block(path, line, block, marks)
                marks = []
        if marks:
            self.fail(path, marks[0][0], "a data comment without anything behind it")

    def block(self, path, line, block, marks):
        figures = [n[0].strip() for n in parse("\n".join(block)) if "." in n[0] or n[2]]
        kinds = [kind for _, kind, _ in marks]
        for at, kind, words in marks:
            if not words.strip():
                self.fail(path, at, f"'{kind}:' with nothing behind it")
        if not marks:
            if figures and not block[0].startswith("#"):
                self.fail(path, line, f"{', '.join(figures)}: no comment says which file holds these numbers")
        elif "no data" in kinds:
            if len(marks) > 1:
                self.fail(path, line, "'no data' beside another comment: name the numbers, as 'no data for 1.5, 80:'")
            if not figures:
                self.fail(path, line, "'no data' before a block that has no figure")
        else:
            self.compare(path, line, block, marks)

    def compare(self, path, line, block, marks):
        source = Source(self, path, marks[0][0], " ".join(words for _, kind, words in marks if kind == "data"))
        exempt = {n[0].strip() for _, kind, _ in marks if kind != "data" for n in parse(kind)}
        table = block[0].startswith("|")
        rows = [(line + i, cells_of(row)) for i, row in enumerate(block)][2:]
        if not table:
            rows = [(line, ["\n".join(block)])]
        cells = [(n, parsed) for n, row in rows for cell in row for parsed in parse(cell)]
        names = {n: row_name(row[0]) for n, row in rows}
        if not cells:
            self.fail(path, line, "a data comment before a block that has no number")
        for number in exempt - {parsed[0].strip() for _, parsed in cells}:
            self.fail(path, line, f"{number} has 'no data', but is not there")
        for n, (shown, sign, mark, value, half) in cells:
            self.counts["numbers"] += 1
            others = [(v, h, m == n) for m, (_, g, k, v, h) in cells if not g and k != "×"]
            if shown.strip() in exempt or source.derives(sign, mark, value, half):
                right = True
            elif mark == "×":
                right = table and related(others, "ratio", value, half)
            else:
                right = source.has(names[n], 100.0 if mark == "%" else 1.0, value, half)
                if not right and sign and table:
                    right = related(others, "percent" if mark == "%" else "difference", value, half)
            if not right:
                self.fail(path, n, f"{shown.strip()} is not in the data" if mark != "×" else
                          f"{shown} is no ratio of two numbers of its row, and has no derivation")
        for derivation in source.derived:
            if not derivation.used:
                self.fail(path, line, f"no number here needs {derivation.text}")


def blocks(text):
    """The blocks of a page, as lines with the number of the first; fenced code is in none."""
    found, inside, fresh = [], False, True
    for number, line in enumerate(text.split("\n"), 1):
        fence = line.lstrip().startswith("```")
        inside ^= fence
        if fence or inside or not line.strip():
            fresh = True
            continue
        heading = line.startswith("#")
        if fresh or heading or line.lstrip().startswith("<!--"):
            found.append((number, []))
        found[-1][1].append(line)
        fresh = heading or "-->" in line
    return found


def parse(cell):
    """The numbers of a cell: as printed, sign, mark, value, and half a unit of the last digit."""
    cell = CODE.sub(" ", ADDRESS.sub(" ", LINK.sub(r"\1", cell)))
    for match in NUMBER.finditer(cell):
        sign, digits, mark = match.group(1), match.group(2), match.group(3) or ""
        plain = digits.replace(",", "")
        whole, _, decimals = plain.partition(".")
        # Of a whole number, zeros at the end beyond three digits are rounding.
        zeros = 0 if decimals else min(len(whole) - len(whole.rstrip("0")), max(len(whole) - 3, 0))
        unit = {"k": 1e3, "M": 1e6}.get(mark, 1.0)
        value = float(plain) * unit * (-1 if sign in "−-" and sign else 1)
        yield match.group(), sign, mark, value, 0.5 * 10.0 ** (zeros - len(decimals)) * unit


def span(kind, a, b):
    """The bounds of what two numbers give, from the bounds of each."""
    corners = [MADE[kind](x, y) for x in a for y in b]
    return min(corners), max(corners)


def related(others, kind, value, half):
    """Whether two of the others, within their rounding, give the value; one is of its own row, of a
    ratio both."""
    for i, (a, da, near) in enumerate(others):
        for j, (b, db, also_near) in enumerate(others):
            if i == j or not (near or also_near) or kind == "ratio" and not (near and also_near):
                continue
            low, high = span(kind, (a - da, a + da), (b - db, b + db))
            if low <= value + half and high >= value - half:
                return True
    return False


def cells_of(row):
    """The cells of a table's row; a stroke behind a backslash is one of the text."""
    return [cell.replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", row.strip().strip("|"))]


def row_name(cell):
    span = CODE.search(cell)
    text = span.group(2) if span else cell.strip()
    return text.replace(",", "") if re.fullmatch(r"[\d,]+", text) else text


@dataclasses.dataclass
class Derivation:
    text: str
    kind: str
    low: float
    high: float
    used: bool = False


class Source:
    """The numbers that a data comment names."""

    def __init__(self, checker, path, line, mark):
        self.by = None
        self.scales = [1.0]
        # Numbers by the object that they stand in; all under None where objects do not matter.
        self.values = {}
        self.derived = []
        files, derivations = [], []
        for word in mark.split():
            kind, _, rest = word.partition("=")
            if kind == "scale":
                self.scales += map(float, rest.split(","))
            elif kind == "by":
                self.by = rest
            elif kind in MADE:
                derivations.append((word, kind, rest.split("-" if kind == "difference" else "/")))
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
        for word, kind, texts in derivations:
            operands = [[list(parse(term)) for term in text.split("+")] for text in texts]
            if len(operands) != 2 or any(len(term) != 1 for terms in operands for term in terms):
                checker.fail(path, line, f"{word} does not have two numbers")
                continue
            bounds = []
            for terms in operands:
                low = high = 0.0
                for ((shown, _, unit, value, half),) in terms:
                    percent = 100.0 if unit == "%" else 1.0
                    found = [v for row in self.values for v in self.matches(row, percent, value, half)]
                    if not found:
                        checker.fail(path, line, f"{shown} of {word} is not in the data")
                        found = [value]
                    low, high = low + min(found), high + max(found)
                bounds.append((low, high))
            self.derived.append(Derivation(word, kind, *span(kind, *bounds)))

    def derives(self, sign, mark, value, half):
        """Whether derivations give a number of the block, which it then marks as used."""
        right = False
        for derivation in self.derived:
            if mark == "×" and derivation.kind != "ratio" or mark != "%" and derivation.kind == "percent":
                continue
            factor = 100.0 if mark == "%" and derivation.kind == "ratio" else 1.0
            low, high = factor * derivation.low, factor * derivation.high
            slack = 1e-9 * abs(value)
            if any(low <= v + half + slack and high >= v - half - slack for v in ([value] if sign else [value, -value])):
                right = derivation.used = True
        return right

    def has(self, row, percent, value, half):
        return any(True for _ in self.matches(row if self.by else None, percent, value, half))

    def matches(self, row, percent, value, half):
        """The numbers of a row, times a scale, that the value may be rounded from."""
        values = self.values.get(row, [])
        for scale in [*self.scales, percent]:
            low, high = sorted(((value - half) / scale, (value + half) / scale))
            slack = 1e-9 * max(abs(low), abs(high))
            at = bisect.bisect_left(values, low - slack)
            while at < len(values) and values[at] <= high + slack:
                yield values[at] * scale
                at += 1

    def read(self, file, keys):
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".json":
            self.walk(json.loads(text), keys, not keys, None)
        else:
            self.add_text(None, text.replace("`", " ") if file.suffix != ".csv" else text.replace(",", " "))

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


def results_of_uncommitted_builds():
    """The results whose revision of the program nobody can have."""
    listed = subprocess.run(["git", "ls-files", "*.json"], cwd=ROOT, check=True, capture_output=True, text=True)
    files = [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]
    return [path for path in files if DIRTY.search(path.read_text(encoding="utf-8"))]


def main():
    checker = Checker()
    for path in results_of_uncommitted_builds():
        checker.fail(path, 1, "its revision ends in -dirty; make the result again with a build of a commit")
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
