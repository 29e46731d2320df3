#!/usr/bin/env python3
"""Measures a model's loss in each quarter of its context, where every quarter reads the same text.

    scripts/quarters.py TEXT MODEL... > quarters.json

`performer-lm eval --by-position` reads a text in pieces of one context, so the last quarter of a
piece never reads the words that the first quarter reads, and their losses differ by how hard these
words are. This program has the text read four times, with none, one, two and three quarters of a
context cut from its front, and averages: each quarter then sees nearly every place of the text. It
does not see the very beginning, of which the second quarter misses one quarter of a piece, and the
last one three. So the result also has what the loss of the last quarter is above that of the second
where both read exactly the same words: in the first cut and the third, and in the second cut and
the fourth. TEXT is a file. Every MODEL is a folder that `train` or `compare` wrote. The result goes
to stdout, progress to stderr. `PERFORMER_LM` names the program, the project's
"target/release/performer-lm" unless it is set.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = os.environ.get("PERFORMER_LM", ROOT / "target/release/performer-lm")
QUARTERS = 4


def evaluate(model, text, *options):
    """What `eval` reports of a model on a text."""
    command = [PROGRAM, "eval", model, "--data", text, "--threads", "1", "--json", *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        sys.exit(f"{PROGRAM} cannot be started: {error.strerror}; name performer-lm by PERFORMER_LM, or build it")
    if done.returncode != 0:
        sys.exit(f"eval of {model} failed: {done.stderr.strip()}")
    return json.loads(done.stdout)


def bytes_of(tokens, model, text, scratch):
    """How many bytes at the beginning of a text are so many tokens of a model, or within four."""
    length = 3 * tokens
    for _ in range(20):
        # A text does not end in the middle of a character.
        while length < len(text) and text[length] & 0xC0 == 0x80:
            length += 1
        scratch.write_bytes(text[:length])
        found = evaluate(model, scratch)["tokens"]
        if abs(found - tokens) <= 4:
            return length
        length = max(1, length + (tokens - found) * length // max(1, found))
    sys.exit(f"found no place {tokens} tokens into the text at which it can be cut")


def quarters_of(losses):
    """The mean loss of each quarter of the positions."""
    quarter = len(losses) // QUARTERS
    return [statistics.fmean(losses[i * quarter : (i + 1) * quarter]) for i in range(QUARTERS)]


def measure(model, text, scratch):
    """The losses of a model by quarter, for each cut of the text and on average."""
    try:
        config = json.loads((pathlib.Path(model) / "config.json").read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"{model} is no model's folder: {error}")
    metrics = pathlib.Path(model) / "metrics.json"
    seed = json.loads(metrics.read_text()).get("seed") if metrics.exists() else None
    context = config["context"]
    cuts = []
    for cut in range(QUARTERS):
        start = bytes_of(cut * context // QUARTERS, model, text, scratch) if cut else 0
        scratch.write_bytes(text[start:])
        report = evaluate(model, scratch, "--by-position")
        if len(report["loss_by_position"]) != context:
            sys.exit(f"the text has not one whole piece of {context} tokens for {model}")
        cuts.append(
            {
                "bytes_cut": start,
                "tokens": report["tokens"],
                "quarters": quarters_of(report["loss_by_position"]),
            }
        )
        print(f"{model}: {cuts[-1]}", file=sys.stderr)
    mean = [statistics.fmean(cut["quarters"][i] for cut in cuts) for i in range(QUARTERS)]
    pairs = [(0, 2), (1, 3)]
    rises = [cuts[first]["quarters"][3] - cuts[second]["quarters"][1] for first, second in pairs]
    return {
        "attention_spec": report["attention_spec"],
        "model": str(model),
        "seed": seed,
        "context": context,
        "cuts": cuts,
        **{f"quarter_{i + 1}": loss for i, loss in enumerate(mean)},
        "last_less_second_on_the_same_words": rises,
    }


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    path, models = sys.argv[1], sys.argv[2:]
    try:
        text = pathlib.Path(path).read_bytes()
    except OSError as error:
        sys.exit(f"cannot read {path}: {error.strerror}; give a file as TEXT")
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder) / pathlib.Path(path).name
        rows = [measure(model, text, scratch) for model in models]
    json.dump({"text": path, "rows": rows}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
