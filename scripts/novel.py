#!/usr/bin/env python3
"""Divides a novel into a training text, a validation text and a test text, as the experiments on
War and Peace use it: the first 80% of its characters, the next 10% and the rest, each cut moved on
to the next line that begins with CHAPTER.

Usage: scripts/novel.py NOVEL OUT

Writes OUT/train.txt, OUT/valid.txt and OUT/test.txt, each of which is one document. The same file
gives the same bytes. A file of one of these names with another content is refused. Needs Python
3.11 and nothing else.
"""

import pathlib
import sys

import corpus_folder

CHAPTER = "\nCHAPTER "


def divide(text):
    """The three parts of a text, in its order; joined they are the text."""
    cuts = []
    for tenths in (8, 9):
        start = text.find(CHAPTER, len(text) * tenths // 10)
        if start < 0:
            raise SystemExit(f"error: no line begins with CHAPTER after {tenths}0% of the text")
        cuts.append(start + 1)
    return {"train": text[: cuts[0]], "valid": text[cuts[0] : cuts[1]], "test": text[cuts[1] :]}


def main():
    if len(sys.argv) != 3:
        raise SystemExit(__doc__.split("\n\n")[1])
    novel, out = map(pathlib.Path, sys.argv[1:])
    try:
        # Ends of lines stay as they are, so that the parts joined are the file.
        text = novel.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"error: cannot read {novel}: {error}")
    parts = divide(text)
    if not all(parts.values()):
        raise SystemExit(f"error: {novel} has too few chapters to be divided")
    corpus_folder.write(out, {f"{name}.txt": part.encode() for name, part in parts.items()})
    for name, part in parts.items():
        print(f"{name}.txt  {len(part.encode()):,} bytes")


if __name__ == "__main__":
    main()
