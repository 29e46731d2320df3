#!/usr/bin/env python3
"""Makes the folder of stories that this project's experiments read: OUT/train.txt, OUT/valid.txt
and OUT/test.txt, in which a line <|endoftext|> ends every story.

Usage: scripts/tinystories.py --split FOLDER OUT

`--split` reads a folder with train.txt and valid.txt. OUT/train.txt is a copy of the first; of the
second, the first half of the documents goes to OUT/valid.txt, on which settings are chosen, and the
second half to OUT/test.txt, on which results are reported. Of an odd number of documents, the one
in the middle goes to valid.txt. Every document keeps its bytes, so joining both parts gives the
whole back.

Prints the documents, bytes and SHA-256 of each file. Needs Python 3.11 and nothing else.
"""

import argparse
import hashlib
import pathlib
import sys

END = b"<|endoftext|>"


def read(path):
    """A file's documents, each with the separator and the line break behind it."""
    try:
        content = path.read_bytes()
    except OSError as error:
        sys.exit(f"cannot read {path}: {error.strerror}; --split takes a folder with train.txt and valid.txt")
    documents, start = [], 0
    while (end := content.find(END, start)) >= 0:
        end += len(END)
        end += content.startswith(b"\n", end) or 2 * content.startswith(b"\r\n", end)
        documents.append(content[start:end])
        start = end
    if content[start:].strip():
        documents.append(content[start:] + (b"" if content.endswith(b"\n") else b"\n") + END + b"\n")
    # Two separators with nothing between them are no document, here as in the program.
    return [document for document in documents if document.strip().removesuffix(END).strip()]


def halves(documents):
    """The documents to choose settings on, and those to report results on."""
    if len(documents) < 2:
        sys.exit(f"valid.txt has {len(documents)} documents; it takes two to divide them")
    middle = (len(documents) + 1) // 2
    return documents[:middle], documents[middle:]


def write(out, splits):
    out.mkdir(parents=True, exist_ok=True)
    for name, documents in splits.items():
        content = b"".join(documents)
        (out / f"{name}.txt").write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        print(f"{name}.txt\t{len(documents)} documents\t{len(content)} bytes\tsha256 {digest}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", type=pathlib.Path, metavar="FOLDER", required=True)
    parser.add_argument("out", type=pathlib.Path)
    options = parser.parse_args()
    if options.out.exists() and options.split.exists() and options.out.samefile(options.split):
        sys.exit(f"{options.out} is the folder to split, whose valid.txt would be lost; name another")
    train, valid = read(options.split / "train.txt"), read(options.split / "valid.txt")
    first, second = halves(valid)
    write(options.out, {"train": train, "valid": first, "test": second})


if __name__ == "__main__":
    main()
