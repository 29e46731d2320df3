#!/usr/bin/env python3
"""Draws what each attention recalls over the bytes of its state: 8 pairs in 128 tokens and 16 in
256, and 128 and 256 symbols to be copied, with the memory in both layers of a model or in its first
layer alone.

    python3 -m pip install matplotlib
    scripts/recall_charts.py

Writes the chart of the book, book/src/results/recall-state.svg, and a copy, state.png, into
benchmarks/recall, from the results that lie there. Nothing is measured here. A point is the mean
over the seeds that were trained, one to three of them.
"""

import collections
import json
import pathlib
import re
import statistics

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from code_charts import figure_style

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks/recall"
# The panels: a title, the parts that every attention of the panel has, and the files of its runs.
PANELS = [
    ("8 pairs in 128 tokens: answered", "gate,conv,output-gate,output-norm", ["pairs-8.json"]),
    (
        "16 pairs in 256 tokens: answered",
        "gate,conv,output-gate,output-norm",
        [
            "pairs.json",
            "pairs-seeds.json",
            "pairs-first.json",
            "pairs-list.json",
            "pairs-learned-first.json",
        ],
    ),
    (
        "128 symbols: copied",
        "conv,output-gate,output-norm",
        [
            "copying.json",
            "copying-state.json",
            "copying-first.json",
            "copying-first-small.json",
        ],
    ),
    (
        "256 symbols: copied",
        "conv,output-gate,output-norm",
        ["copying-256.json", "copying-256-first.json", "copying-256-first-features.json"],
    ),
]
# The curves: how an attention is written without its parts, in both layers or in the first, what
# the chart calls it, and its colour.
CURVES = [
    (r"favor:map=taylor2(,key-dim=\d+)?", "polynomial features", "#009e73"),
    (r"favor:m=\d+,map=learned", "trained features", "#cc79a7"),
    (r"favor:m=\d+", "random features", "#e69f00"),
    (r"softmax:window=\d+", "a window", "#d55e00"),
    (r"softmax:?", "softmax over everything", "#000000"),
]


def runs_of(file):
    """The runs of a file: a list of them, or a report of the lab."""
    content = json.loads((FOLDER / file).read_text())
    return content if isinstance(content, list) else content["tasks"]["tasks"][0]["runs"]


def points(parts, files):
    """(bytes of state, percent right, attention without its parts, place) of each attention."""
    accuracies, states = collections.defaultdict(dict), {}
    for file in files:
        for run in runs_of(file):
            # What was repeated with an equal seed counts once.
            accuracies[run["attention"]][run["seed"]] = 100 * run["accuracy"]
            states[run["attention"]] = run["state_bytes"]
    found = []
    for attention, by_seed in accuracies.items():
        layers, _, place = attention.partition("/")
        rest, _, first = layers.rpartition("+")
        # A model that has neither all of these parts nor none of others is no point of a curve.
        if rest not in ("", f"uniform:{parts}") or (rest and place != "first"):
            continue
        if set(re.findall(r"[a-z-]*gate|conv|output-norm", first)) != set(parts.split(",")):
            continue
        name = first.replace(f",{parts}", "").replace(parts, "")
        accuracy = statistics.mean(by_seed.values())
        found.append((states[attention], accuracy, name, "first" if rest else "both"))
    return sorted(found)


def main():
    plt.rcParams["svg.hashsalt"] = "recall"
    plot, panels = plt.subplots(2, 2, figsize=(11, 8.6), layout="constrained")
    panels = panels.flatten()
    for axes, (title, parts, files) in zip(panels, PANELS):
        found = points(parts, files)
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlabel("state (kB)")
        axes.set_ylabel("right (%)")
        axes.set_ylim(0, 104)
        for pattern, name, colour in CURVES:
            for place, line, marker in (("both", "--", "o"), ("first", "-", "s")):
                curve = [
                    (state / 1000, accuracy)
                    for state, accuracy, attention, where in found
                    if where == place and re.fullmatch(pattern, attention)
                ]
                if curve:
                    where = "in both layers" if place == "both" else "in the first layer alone"
                    axes.plot(
                        *zip(*curve),
                        color=colour,
                        linestyle=line,
                        marker=marker,
                        markersize=5,
                        label=f"{name}, {where}",
                    )
        figure_style(axes)
    # One legend for all panels, with each curve once.
    names = {}
    for axes in panels:
        for handle, name in zip(*axes.get_legend_handles_labels()):
            names.setdefault(name, handle)
    plot.legend(
        names.values(), names.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=9
    )
    plot.savefig(ROOT / "book/src/results/recall-state.svg", metadata={"Date": None})
    plot.savefig(FOLDER / "state.png", dpi=160)


if __name__ == "__main__":
    main()
