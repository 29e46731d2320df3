#!/usr/bin/env python3
"""Draws what the longest trainings on program source came to (benchmarks/code-long): the loss over
the time of training, and the loss by position beside that of softmax in all layers.

    python3 -m pip install matplotlib
    scripts/code_charts.py

Writes the charts of the book, book/src/results/code-time.svg and code-beside.svg, and time.png and
equal-time.json into benchmarks/code-long, from the files that lie there. Nothing is measured here.
The time of a training is the number of its tokens over the speed of whole training steps in
speed.json, which was measured on one thread of an idle machine; the trainings themselves ran beside
other work. Losses over time are those of the quick validations on the way, which all read the same
first part of the validation text; the last validation of a run reads all of it, and is left out.
equal-time.json has what the charts show at the places that the book names, so that
scripts/book_check.py can compare them. It also has the speeds with trained gates, the medians of
benchmarks/code-contexts/trained-4096.json and trained-8192.json, and what these say of equal time.
"""

import json
import pathlib
import statistics
import tarfile

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks/code-long"
TRAINED = {
    context: ROOT / f"benchmarks/code-contexts/trained-{context}.json" for context in (4096, 8192)
}
PARTS = ",gate,conv,output-gate,output-norm"
POLYNOMIAL = f"favor:map=taylor2{PARTS},key-dim=16"
SOFTMAX = f"softmax:{PARTS[1:]}"
UNIFORM = f"uniform:{PARTS[1:]}"
# The reports, with the archives of their runs.
REPORTS = {"compare.json": "runs.tar.gz", "random.json": "random-runs.tar.gz"}
# Softmax in all layers once more, with a schedule of as many minutes as a hybrid took: by the speeds
# of first steps, and by those with trained gates.
SHORT = {
    "by_first_steps": ("short.json", "short-runs.tar.gz"),
    "by_trained_gates": ("short-trained.json", "short-trained-runs.tar.gz"),
}
# What is not in speed.json.
UNTIMED = {"favor:m=128"}
# What each attention is called in the charts, with its colour and the style of its line.
SHOWN = {
    SOFTMAX: ("softmax in all layers", "#000000", "-"),
    f"{POLYNOMIAL}+{SOFTMAX}/first": ("softmax in the first layer, then features", "#009e73", "-"),
    f"softmax:window=75{PARTS}+{SOFTMAX}/first": (
        "softmax in the first layer, then windows of 75",
        "#0072b2",
        ":",
    ),
    f"{UNIFORM}+{SOFTMAX}/first": ("softmax in the first layer, then averages", "#cc79a7", "-"),
    f"{UNIFORM}+softmax:window=1000{PARTS}/first": (
        "a window of 1,000 in the first, then averages",
        "#e69f00",
        "-",
    ),
    f"{UNIFORM}+softmax:window=300{PARTS}/first": (
        "a window of 300 in the first, then averages",
        "#56b4e9",
        "-",
    ),
    f"softmax:window=75{PARTS}": ("windows of 75 in all layers", "#d55e00", "--"),
    POLYNOMIAL: ("polynomial features in all layers", "#009e73", "--"),
    f"favor:m=128{PARTS}": ("random features in all layers", "#999999", "--"),
}


def validations(archive):
    """The quick validations of each attention's run in an archive, as (tokens, nats a token)."""
    specs, curves = {}, {}
    with tarfile.open(archive) as runs:
        for member in runs.getmembers():
            run, name = pathlib.PurePath(member.name).parts
            text = runs.extractfile(member).read().decode()
            if name == "metrics.json":
                specs[run] = json.loads(text)["attention_spec"]
            elif name == "metrics.jsonl":
                records = [json.loads(line) for line in text.splitlines()]
                quick = [record for record in records if record.get("whole") is False]
                curves[run] = [(record["tokens"], record["val_loss"]) for record in quick]
    return {specs[run]: curve for run, curve in curves.items()}


def at(curve, speed, seconds):
    """The loss at a time, between the two validations around it."""
    times = [tokens / speed for tokens, _ in curve]
    for i in range(1, len(curve)):
        if times[i - 1] <= seconds <= times[i]:
            share = (seconds - times[i - 1]) / (times[i] - times[i - 1])
            return curve[i - 1][1] + share * (curve[i][1] - curve[i - 1][1])
    raise ValueError(f"no validation about {seconds} seconds")


def medians(file):
    """The median of the tokens a second that a file has for each attention."""
    speeds = {}
    for point in json.loads(file.read_text())["points"]:
        speeds.setdefault(point["attention_spec"], []).append(point["tokens_per_second"])
    return {spec: statistics.median(of_spec) for spec, of_spec in speeds.items()}


def save(plot, name):
    # Without a date, the same numbers give the same bytes.
    plot.savefig(ROOT / f"book/src/results/code-{name}.svg", metadata={"Date": None})


def label_ends(axes, ends, least):
    """Writes the names of lines at their right ends, as far apart as they must be to be read."""
    below = None
    for x, y, (name, colour, _) in sorted(ends, key=lambda end: end[1]):
        y = y if below is None else max(y, below + least)
        axes.annotate(
            name,
            (x, y),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            fontsize=9,
        )
        below = y


def figure_style(axes):
    """A grid in the background, and no frame at the top and on the right."""
    axes.grid(color="#e0e0e0")
    axes.spines[["top", "right"]].set_visible(False)


def figure(title, x, y):
    plot, axes = plt.subplots(figsize=(9, 4.6), layout="constrained")
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    figure_style(axes)
    return plot, axes


def main():
    plt.rcParams["svg.hashsalt"] = "code"
    runs, curves = {}, {}
    for report, archive in REPORTS.items():
        found = json.loads((FOLDER / report).read_text())["runs"]
        runs |= {run["attention_spec"]: run for run in found if run["attention_spec"] not in UNTIMED}
        curves |= validations(FOLDER / archive)
    points = json.loads((FOLDER / "speed.json").read_text())["points"]
    speeds = {point["attention_spec"]: point["tokens_per_second"] for point in points}

    plot, axes = figure(
        "Program source, 4,096 tokens, trained on 16 million (the shorter schedule: 11.8): loss over time",
        "minutes on one thread by the speed of the first steps (the first six are not shown)",
        "validation loss (nats a token)",
    )
    for spec, look in SHOWN.items():
        curve = [(tokens / speeds[spec] / 60, loss) for tokens, loss in curves[spec]]
        curve = [point for point in curve if point[0] > 6]
        axes.plot(
            *zip(*curve), color=look[1], linestyle=look[2], marker="o", markersize=3, label=look[0]
        )
    short_curve = [
        (tokens / speeds[SOFTMAX] / 60, loss)
        for tokens, loss in validations(FOLDER / SHORT["by_first_steps"][1])[SOFTMAX]
    ]
    axes.plot(
        *zip(*[point for point in short_curve if point[0] > 6]),
        color="#000000",
        linestyle=":",
        marker="o",
        markersize=3,
        label="softmax in all layers, with a shorter schedule",
    )
    axes.legend(frameon=False, fontsize=9)
    save(plot, "time")
    plot.savefig(FOLDER / "time.png", dpi=160)

    plot, axes = figure(
        "Program source, trained at 4,096 tokens: loss by position, less that of softmax in all layers",
        "position in a piece (tokens)",
        "difference (nats a token)",
    )
    softmax = {part["until"]: part["loss"] for part in runs[SOFTMAX]["loss_by_position"]}
    ends = []
    for spec, look in SHOWN.items():
        curve = [
            (part["until"], part["loss"] - softmax[part["until"]])
            for part in runs[spec]["loss_by_position"]
        ]
        axes.plot(*zip(*curve), color=look[1], linestyle=look[2], marker="o", markersize=3)
        ends.append((*curve[-1], look))
    context = runs[SOFTMAX]["key"]["model"]["context"]
    axes.axvline(context, color="#808080", linestyle=":")
    top = axes.get_ylim()[1]
    axes.annotate(
        "trained length", (context, top), xytext=(4, -10), textcoords="offset points", fontsize=9
    )
    label_ends(axes, ends, 0.033)
    axes.set_xlim(0, 13000)
    axes.set_xticks(range(0, 2 * context + 1, context // 4 * 2))
    save(plot, "beside")

    def quarter(spec, number):
        """The mean loss of a quarter of the trained length, counted from 1."""
        low, high = (number - 1) * context // 4, number * context // 4
        losses = [
            part["loss"] for part in runs[spec]["loss_by_position"] if low < part["until"] <= high
        ]
        return sum(losses) / len(losses)

    rows = []
    for spec in runs:
        curve = curves[spec]
        seconds = curve[-1][0] / speeds[spec]
        then = at(curves[SOFTMAX], speeds[SOFTMAX], seconds)
        row = {
            "attention_spec": spec,
            "minutes": seconds / 60,
            "quick_loss": curve[-1][1],
            "softmax_quick_loss_then": then,
        }
        # Four quarters of the trained length, and as many beyond it.
        for number in range(1, 9):
            row[f"quarter_{number}"] = quarter(spec, number)
            row[f"quarter_{number}_beside_softmax"] = quarter(spec, number) - quarter(
                SOFTMAX, number
            )
        rows.append(row)
    trained = {context: medians(file) for context, file in TRAINED.items()}
    with_trained_gates = []
    for spec in trained[4096]:
        row = {"attention_spec": spec}
        for context, of_context in trained.items():
            row[f"tokens_per_second_{context}"] = of_context[spec]
            row[f"speed_beside_softmax_{context}"] = of_context[spec] / of_context[SOFTMAX]
        if spec in curves and spec not in UNTIMED:
            (tokens, loss), softmax_speed = curves[spec][-1], trained[4096][SOFTMAX]
            seconds = min(tokens / trained[4096][spec], curves[SOFTMAX][-1][0] / softmax_speed)
            then = at(curves[SOFTMAX], softmax_speed, seconds)
            row |= {"minutes": seconds / 60, "quick_loss": loss, "softmax_quick_loss_then": then}
            row["quick_loss_beside_softmax"] = loss - then
        with_trained_gates.append(row)
    as_long = {}
    speed_of_softmax = {
        "by_first_steps": speeds[SOFTMAX],
        "by_trained_gates": trained[4096][SOFTMAX],
    }
    for how, (report, archive) in SHORT.items():
        run = json.loads((FOLDER / report).read_text())["runs"][0]
        # The last quick validation stands before the end, where all of the text is read.
        tokens, loss = validations(FOLDER / archive)[SOFTMAX][-1]
        as_long[how] = {
            "tokens": run["tokens"],
            "minutes": run["tokens"] / speed_of_softmax[how] / 60,
            "quick_tokens": tokens,
            "quick_loss": loss,
            "quick_loss_of_the_longer_schedule_then": at(curves[SOFTMAX], 1, tokens),
            "test_loss": run["test"]["loss"],
            "bits_per_byte": run["test"]["bits_per_byte"],
        }
    found = {
        "rows": rows,
        "softmax_with_as_long_a_schedule": as_long,
        "with_trained_gates": with_trained_gates,
    }
    (FOLDER / "equal-time.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
