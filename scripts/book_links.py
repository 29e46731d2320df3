#!/usr/bin/env python3
"""Checks the pages that mdBook has built: fails if a relative link, picture, script or style of a
page names no file, or an anchor that its page does not have. book_check.py looks at the sources,
and so does not see where mdBook puts a file and what it leaves out.

Usage: scripts/book_links.py FOLDER

Addresses with a scheme (https:, data:) are not looked at, for the network is not asked. Needs
Python 3.11 and nothing else.
"""

import html.parser
import pathlib
import re
import sys
import urllib.parse


class Page(html.parser.HTMLParser):
    """The anchors of a page, and what it names, with the line of each."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.targets = set(), []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name == "id" or (tag, name) == ("a", "name"):
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.targets.append((value, self.getpos()[0]))


def main():
    if len(sys.argv) != 2 or not pathlib.Path(sys.argv[1]).is_dir():
        sys.exit("usage: scripts/book_links.py FOLDER, which `mdbook build` has filled")
    root = pathlib.Path(sys.argv[1]).resolve()
    pages = {path: Page(path) for path in sorted(root.rglob("*.html"))}
    count, failures = 0, []
    for path, page in pages.items():
        # Says to a web server where the book lies, so its addresses begin at the server's root.
        if path == root / "404.html":
            continue
        for target, line in page.targets:
            if re.match(r"[a-z][a-z0-9+.-]*:", target, re.IGNORECASE):
                continue
            count += 1
            name, _, anchor = target.partition("#")
            file = path
            if name:
                file = (path.parent / urllib.parse.unquote(name.partition("?")[0])).resolve()
            where = f"{path.relative_to(root)}:{line}"
            if not file.is_relative_to(root):
                failures.append(f"{where}: {target} leads out of the book")
            elif not file.is_file():
                failures.append(f"{where}: {target} is not there")
            elif anchor and file in pages and urllib.parse.unquote(anchor) not in pages[file].anchors:
                failures.append(f"{where}: {target} has no such anchor")
    for failure in failures:
        print(failure, file=sys.stderr)
    print(f"{len(pages)} built pages, {count} links")
    if not count:
        sys.exit(f"no page of {root} links to anything")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
