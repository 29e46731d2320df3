#!/usr/bin/env python3
"""Writes texts in which a pass key is told and asked for, to train on.

    scripts/pass_keys.py TEXT COUNT > keys.txt

Each text is a stretch of 250 to 600 words of TEXT in which a sentence says a number of five
digits, at a random place in its first nine tenths; the end asks for the number and gives it. The
words are those by which `performer-lm eval --recall` asks for pass keys, so a model that was
trained on these texts is not surprised by the question, and its result says less of other
questions. COUNT texts are written, each followed by a line with `<|endoftext|>`; the same TEXT
gives the same texts.
"""

import pathlib
import random
import sys

END = "<|endoftext|>"


def texts(words, count):
    """Yields so many texts made of stretches of `words`."""
    draw = random.Random(1)
    for _ in range(count):
        length = draw.randint(250, 600)
        start = draw.randrange(len(words) - length)
        stretch = words[start : start + length]
        place = draw.randrange(length * 9 // 10)
        key = draw.randint(10_000, 99_999)
        told = f"\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
        before, after = " ".join(stretch[:place]), " ".join(stretch[place:])
        yield f"{before}{told}{after}\nWhat is the pass key? The pass key is {key}\n"


def main():
    try:
        path, count = sys.argv[1], int(sys.argv[2])
    except (IndexError, ValueError):
        sys.exit(__doc__)
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"cannot read {path}: {error}")
    # A separator inside a stretch would cut it in two texts, one of which tells the key and another
    # asks for it.
    words = text.replace(END, " ").split()
    if len(words) <= 600:
        sys.exit(f"{path} has {len(words)} words; more than 600 are needed")
    for text in texts(words, count):
        sys.stdout.write(f"{text}{END}\n")


if __name__ == "__main__":
    main()
