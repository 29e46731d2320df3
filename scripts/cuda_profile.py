#!/usr/bin/env python3
"""Turns what ncu wrote in the stage `profile` of scripts/gpu-run.sh into the files of benchmarks/:

    scripts/cuda_profile.py RESULTS OUT

RESULTS is the folder of results, OUT the one to write steps.json and profile.json into.

steps.json says how long each kernel ran in one training step, from steps-*.csv. A step is what lies
between two launches of the embedding's gradient, of which there is one a step; where the profile
has fewer than two, all launches are taken, and `whole` is false. The time of a step by its speed
stands beside, if the stage `parts` has measured it. profile.json says what held the
kernels of attention up, from profile-*.txt: how much of the time their schedulers issued
instructions, and how many warps there were to issue them for.
"""

import collections
import csv
import json
import pathlib
import re
import sys

ONCE_A_STEP = "embedding_backward"
# The context and the sequences of a step that the stage profiles.
CONTEXT, SEQUENCES = 8192, 8
MILLISECONDS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0}
# What a step consists of, by the beginnings of its kernels' names.
GROUPS = {
    "attention": ("favor_", "softmax_"),
    "polynomial features": ("quadratic_",),
    "norms": ("norm_",),
    "sums of two tensors": ("badd", "add_wide", "add"),
    "convolutions": ("convol",),
    "forget gates": ("forget_gate",),
    "gradient of the embedding": (ONCE_A_STEP,),
    "matrix products": ("nvjet", "cublas", "cutlass", "sm80_", "sm90_"),
}
# What ncu calls a number of a kernel, and what it is called here.
DETAILS = {
    "Duration": "microseconds",
    "Issue Slots Busy": "issue_slots_busy_percent",
    "No Eligible": "no_eligible_warp_percent",
    "Achieved Occupancy": "occupancy_percent",
    "Registers Per Thread": "registers",
    "DRAM Throughput": "memory_percent",
}


def number(text):
    return float(text.replace(",", ""))


def launches(path):
    """The kernels of a profile with their milliseconds, in order."""
    lines = [line for line in path.read_text().splitlines() if line.startswith('"')]
    for row in csv.DictReader(lines):
        name = row["Kernel Name"].split("(")[0].removeprefix("void ").split("<")[0]
        yield name, number(row["Metric Value"]) * MILLISECONDS[row["Metric Unit"]]


def step(path):
    """How long each kernel ran in one step, and each group of kernels."""
    found = list(launches(path))
    ends = [i for i, (name, _) in enumerate(found) if name == ONCE_A_STEP]
    whole = len(ends) > 1
    if whole:
        found = found[ends[0] + 1 : ends[1] + 1]
    count, time, group = collections.Counter(), collections.Counter(), collections.Counter()
    for name, milliseconds in found:
        count[name] += 1
        time[name] += milliseconds
        group[next((g for g, begin in GROUPS.items() if name.startswith(begin)), "others")] += milliseconds
    return {
        "whole": whole,
        "launches": len(found),
        "milliseconds": round(sum(time.values()), 1),
        "groups_milliseconds": {name: round(milliseconds, 1) for name, milliseconds in group.most_common()},
        "kernels": [
            {"kernel": name, "launches": count[name], "microseconds": round(1000 * milliseconds, 1)}
            for name, milliseconds in time.most_common()
        ],
    }


def by_speed(results, attention):
    """The milliseconds of a step by the tokens a second that were measured, if they were."""
    path = results / f"code-{CONTEXT}.json"
    settings = lambda spec: sorted(spec.replace(":", ",").split(","))
    points = json.loads(path.read_text())["points"] if path.exists() else []
    speeds = [point["tokens_per_second"] for point in points if settings(point["attention_spec"]) == settings(attention)]
    return {"milliseconds_by_speed": round(1000 * SEQUENCES * CONTEXT / speeds[0], 1)} if speeds else {}


def details(path):
    """What ncu says of each launch in a report of all details."""
    found = []
    for line in path.read_text().splitlines():
        kernel = re.match(r"  (\w+) \((\d+), (\d+), (\d+)\)x\((\d+),", line)
        if kernel:
            x, y, z, threads = (int(kernel[i]) for i in range(2, 6))
            found.append({"kernel": kernel[1], "blocks": x * y * z, "threads": threads})
            continue
        value = re.match(r"    (\S[\w /.()]*?)  +\S+ +([\d.,]+)\s*$", line)
        if value and found and value[1] in DETAILS:
            found[-1].setdefault(DETAILS[value[1]], number(value[2]))
    return found


def main(results, out):
    checks = sorted(results.glob("*.json"))
    about = next((json.loads(path.read_text()) for path in checks if '"revision"' in path.read_text()), {})
    about = {key: about[key] for key in ["revision", "machine"] if key in about}
    steps = []
    for path in sorted(results.glob("steps-*.csv")):
        attention = path.with_suffix(".attention").read_text().strip()
        steps.append({"attention_spec": attention, "context": CONTEXT, **by_speed(results, attention), **step(path)})
    command = (results / "steps.command").read_text().strip() if steps else None
    reports = {path.stem.removeprefix("profile-"): details(path) for path in sorted(results.glob("profile-*.txt"))}
    files = {
        "steps.json": steps and {"command": command, **about, "steps": steps},
        "profile.json": reports and {**about, "tokens": CONTEXT, **reports},
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, what in files.items():
        if what:
            (out / name).write_text(json.dumps(what, indent=1) + "\n")
            print(out / name)
    if not steps and not reports:
        sys.exit(f"{results} has neither steps-*.csv nor profile-*.txt: run gpu-run.sh profile first")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__.strip())
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
