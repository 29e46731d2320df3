#!/usr/bin/env python3
"""Makes the folder of stories that this project's experiments read: OUT/train.txt, OUT/valid.txt
and OUT/test.txt, in which a line <|endoftext|> ends every story.

Usage: scripts/tinystories.py OUT [--from FILE]... [--whole]
       scripts/tinystories.py --split FOLDER OUT

The first form fetches the public file SOURCE below (22 MB), or reads files that are on this machine
already, and takes from them the 17,872 stories to train on and the 2,000 held out. They are a part
of the file in an order of their own, so tinystories.order beside this script holds five bytes of
the SHA-256 of each story's words, in that order. White space at the ends of lines and stories is
dropped. All files written have the SHA-256 named below, or nothing is written. With either form
nothing is written where OUT has a file of one of these names with other contents.

The second form reads a folder with train.txt and valid.txt, of any stories, and copies the first.
Of both it leaves out empty stories, and adds the last <|endoftext|> where there is none.

With either, the first half of the held-out stories goes to OUT/valid.txt, on which settings are
chosen, and the second half to OUT/test.txt, on which results are reported. Of an odd number, the
one in the middle goes to valid.txt. Stories keep their bytes and their order, so both halves joined
are the whole. With --whole all of them stay in valid.txt and there is no test.txt: results in
benchmarks/ that name no test text were measured so.

Prints the stories, bytes and SHA-256 of each file. Needs Python 3.11 and nothing else.
"""

import argparse
import hashlib
import http.client
import os
import pathlib
import sys
import urllib.request

import corpus_folder

SOURCE = "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main/TinyStoriesV2-GPT4-valid.txt"
END = b"<|endoftext|>"
ORDER = pathlib.Path(__file__).with_suffix(".order")
# Bytes of a SHA-256 in ORDER.
DIGEST = 5
TRAIN = 17_872
CHECKSUMS = {
    "train": "e5c1d533150a1e411094fe5649441bb180f5cc03101a84df20e3379e5e64fc43",
    "valid": "978b966defc9831ab7deec72a0e7001df91fec4e014904013286ce38643b87f0",
    "test": "97978bf450d93ae2b1a4e415e68de3696fd27764ef1e352e4bf74a2c040f7b63",
}
WHOLE = {
    "train": CHECKSUMS["train"],
    "valid": "0a15e46cf98aa81a288fa3f6a94f86cac988fb3662e5b08e7248816d0cd82983",
}


def fetched():
    """The public file's content."""
    print(f"fetching {SOURCE} (22 MB)", file=sys.stderr)
    try:
        with urllib.request.urlopen(SOURCE, timeout=60) as answer:
            return answer.read()
    except (OSError, http.client.HTTPException) as error:
        sys.exit(f"cannot fetch {SOURCE}: {error}; fetch it some other way and name it with --from")


def content_of(path, hint):
    try:
        return path.read_bytes()
    except OSError as error:
        sys.exit(f"cannot read {path}: {error.strerror}; {hint}")


def published(contents):
    """The stories of the published experiment, to train on and held out, out of public files."""
    order = content_of(ORDER, "it belongs beside this script")
    wanted = [order[at : at + DIGEST] for at in range(0, len(order), DIGEST)]
    found = dict.fromkeys(wanted)
    for content in contents:
        for story in content.split(END):
            digest = hashlib.sha256(b" ".join(story.split())).digest()[:DIGEST]
            if digest in found:
                lines = b"\n".join(map(bytes.rstrip, story.strip().split(b"\n")))
                found[digest] = lines + b"\n" + END + b"\n"
    missing = sum(story is None for story in found.values())
    if missing:
        sys.exit(
            f"{missing} of the {len(wanted)} stories are not in the text given; the public file may "
            "have changed: name other files of the dataset with --from, which may be repeated"
        )
    stories = [found[digest] for digest in wanted]
    return stories[:TRAIN], stories[TRAIN:]


def documents(content):
    """A file's documents as they stand there, each with the separator and line break behind it."""
    found, start = [], 0
    while (end := content.find(END, start)) >= 0:
        end += len(END)
        end += content.startswith(b"\n", end) or 2 * content.startswith(b"\r\n", end)
        found.append(content[start:end])
        start = end
    if content[start:].strip():
        found.append(content[start:] + (b"" if content.endswith(b"\n") else b"\n") + END + b"\n")
    # Two separators with nothing between them are no document, here as in the program.
    return [document for document in found if document.strip().removesuffix(END).strip()]


def halves(held_out):
    """The stories to choose settings on, and those to report results on."""
    if len(held_out) < 2:
        sys.exit(f"valid.txt has {len(held_out)} documents; it takes two to divide them")
    middle = (len(held_out) + 1) // 2
    return held_out[:middle], held_out[middle:]


def write(out, splits, checksums):
    contents = {name: b"".join(stories) for name, stories in splits.items()}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    for name, digest in digests.items():
        if checksums and digest != checksums[name]:
            sys.exit(
                f"the SHA-256 of {name}.txt would be {digest} and should be {checksums[name]}, "
                "though every story was found; please report it with the source of the text"
            )
    if "test" not in splits and (out / "test.txt").exists():
        sys.exit(f"{out} holds a test.txt, whose stories would stand in valid.txt too: name another folder, or remove it")
    corpus_folder.write(out, {f"{name}.txt": content for name, content in contents.items()})
    for name, content in contents.items():
        print(f"{name}.txt\t{len(splits[name])} stories\t{len(content)} bytes\tsha256 {digests[name]}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=pathlib.Path)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--from", type=pathlib.Path, action="append", metavar="FILE", dest="files")
    source.add_argument("--split", type=pathlib.Path, metavar="FOLDER")
    parser.add_argument("--whole", action="store_true", help="no test.txt: all held-out stories in valid.txt")
    options = parser.parse_args()
    if options.split:
        hint = "--split takes a folder with train.txt and valid.txt"
        paths = options.split / "train.txt", options.split / "valid.txt"
        train, held_out = (documents(content_of(path, hint)) for path in paths)
        if options.out.exists() and options.out.samefile(options.split):
            sys.exit(f"{options.out} is the folder to split, whose valid.txt would be lost; name another")
        checksums = None
    else:
        hint = f"--from takes files such as {os.path.basename(SOURCE)}"
        contents = [content_of(path, hint) for path in options.files] if options.files else [fetched()]
        train, held_out = published(contents)
        checksums = WHOLE if options.whole else CHECKSUMS
    splits = {"train": train, "valid": held_out}
    if not options.whole:
        splits["valid"], splits["test"] = halves(held_out)
    write(options.out, splits, checksums)


if __name__ == "__main__":
    main()
