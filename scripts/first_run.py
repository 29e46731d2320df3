#!/usr/bin/env python3
"""Makes crates/performer-lm/assets/first-run.json: the softmax run that comes with the program, and
that `train` shows beside a first run.

    performer-lm train --data sample --attention softmax --out RUN 2> LOG
    scripts/first_run.py RUN LOG > crates/performer-lm/assets/first-run.json

It holds the run's report, its validation losses over tokens of training, and the story that LOG
ends with. It is due again when the sample, the preset `seed` or what a key holds changes; a test
says when. Needs Python 3.11 and nothing else.
"""

import json
import pathlib
import sys

if len(sys.argv) != 3:
    sys.exit(__doc__)
run, log = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
try:
    report = json.loads((run / "metrics.json").read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    told = log.read_text(encoding="utf-8")
except OSError as error:
    sys.exit(f"cannot read {error.filename}: {error.strerror}")
except ValueError as error:
    sys.exit(f"{run} holds no whole results of a run: {error}")
curve = [[line["tokens"], line["val_loss"]] for line in lines if "val_loss" in line]
begin, end = "softmax writes:\n\n", "\n\nsaved in "
if begin not in told or end not in told:
    sys.exit(f"{log} does not end with a story by softmax: it must be what `train` wrote to its standard error")
# Where another run stands beside this one, a story by its model follows after an empty line.
story = told.split(begin)[1].split(end)[0].split("\n\n")[0]
json.dump({"report": report, "curve": curve, "story": story}, sys.stdout, indent=1)
print()
