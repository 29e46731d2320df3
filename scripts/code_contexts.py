#!/usr/bin/env python3
"""Puts the trainings on program source at 256, 1,024, 4,096 and 8,192 tokens into one table, and
draws what each attention is worth beside softmax with the same parts.

    python3 -m pip install matplotlib
    scripts/code_contexts.py

Writes benchmarks/code-contexts/table.json, which scripts/book_check.py compares with the tables of
the book, and two charts: book/src/results/code-contexts.svg with a copy in
benchmarks/code-contexts, contexts.png, and code-positions.svg with positions.png.
It reads the reports of benchmarks/code-256, code-1024 and code-long with the archives of their
runs, the files of benchmarks/code-8192, and speeds in benchmarks/code-contexts and
benchmarks/code-long. Nothing is measured here.

At each context the table has, for each attention that was trained there:

 - the loss of the test text, in nats a token and in bits a byte. At 256, 1,024 and 4,096 tokens all
   rows read as many tokens. At 8,192 they read 9.1 to 10.7 million, and softmax, with the same
   parts or without any, 9.3 million;
 - the mean loss in the second and in the last quarter of a piece of the test text, and in the
   second half of a piece that is twice as long as those that were trained on;
 - its speed, of whole training steps on one thread of an idle machine, and the ratio of this to the
   speed of softmax with the same parts: the fastest of five measurements at 256 and 1,024 tokens,
   between which other guests of the machine took their share, and one at 4,096 and 8,192. What is
   not in those files was measured five times beside that softmax, on other days. The fastest of
   the five is scaled as the fastest of softmax would have to be to equal its speed of that file;
 - in equal time: the last quick validation on the way, less that of softmax with the same parts
   after as many minutes of its own training. Where softmax would have been done by then, it is its
   last quick validation. At 8,192 tokens there is no such number.
"""

import json
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import matplotlib.ticker

from code_charts import at, figure_style, validations

ROOT = pathlib.Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
OUT = BENCHMARKS / "code-contexts"
PARTS = ",gate,conv,output-gate,output-norm"
SOFTMAX = f"softmax:{PARTS[1:]}"
UNIFORM = f"uniform:{PARTS[1:]}"
POLYNOMIAL = f"favor:map=taylor2{PARTS},key-dim=16"
WIDE = f"favor:map=taylor2{PARTS},key-dim=32"
WINDOW = f"softmax:window=75{PARTS}"
# The attentions in the order of the table: what the chart calls them, their colour and line. Those
# without a colour are in the table only.
ROWS = {
    SOFTMAX: ("softmax", "#000000", "-"),
    "softmax": ("plain softmax", None, None),
    f"{POLYNOMIAL}+{SOFTMAX}/first": ("softmax, then features", "#009e73", "-"),
    f"{WINDOW}+{SOFTMAX}/first": ("softmax, then windows of 75", "#0072b2", ":"),
    f"{UNIFORM}+{SOFTMAX}/first": ("softmax, then averages", "#cc79a7", "-"),
    f"{UNIFORM}+softmax:window=1000{PARTS}/first": ("window of 1,000, then averages", None, None),
    f"{UNIFORM}+softmax:window=300{PARTS}/first": ("window of 300, then averages", "#56b4e9", "-"),
    f"softmax:window=1000{PARTS}": ("windows of 1,000", "#8c564b", "-"),
    f"{WINDOW}+softmax:window=1000{PARTS}/first": ("window of 1,000, then of 75", "#17becf", ":"),
    f"{POLYNOMIAL}+softmax:window=1000{PARTS}/first": (
        "window of 1,000, then features",
        "#bcbd22",
        "-",
    ),
    f"softmax:window=300{PARTS}": ("windows of 300", None, None),
    WINDOW: ("windows of 75", "#d55e00", "--"),
    POLYNOMIAL: ("polynomial features", "#009e73", "--"),
    f"favor:m=128{PARTS}": ("random features", "#e69f00", "--"),
    "favor:m=128": ("plain FAVOR+", None, None),
    f"favor:m=64,window=41{PARTS}": ("random features behind a window of 41", "#7f7f7f", "-."),
    f"{UNIFORM}+{WIDE}/first": ("wide polynomial features, then averages", None, None),
}
# Where all rows read as many tokens: the folder, and its reports with the archives of their runs.
EQUAL_TOKENS = {
    256: (
        "code-256",
        {"compare.json": "runs.tar.gz", "window-features.json": "window-features-runs.tar.gz"},
    ),
    1024: (
        "code-1024",
        {
            "compare.json": "runs.tar.gz",
            "plain.json": "plain-runs.tar.gz",
            "first.json": "first-runs.tar.gz",
            "window-features.json": "window-features-runs.tar.gz",
            "windows-300.json": "windows-300-runs.tar.gz",
        },
    ),
    4096: (
        "code-long",
        {
            "compare.json": "runs.tar.gz",
            "plain.json": "plain-runs.tar.gz",
            "random.json": "random-runs.tar.gz",
            "windows.json": "windows-runs.tar.gz",
            "window-features.json": "window-features-runs.tar.gz",
        },
    ),
}
SPEEDS = {
    256: OUT / "speed-256.json",
    1024: OUT / "speed-1024.json",
    4096: BENCHMARKS / "code-long/speed.json",
    8192: BENCHMARKS / "code-long/speed-8192.json",
}
# Five measurements of softmax with all parts and of attentions that are not in the file above.
LATER_SPEEDS = {
    256: [OUT / "windows-256.json"],
    1024: [OUT / "windows-1024.json"],
    4096: [OUT / "speed-4096.json", OUT / "windows-4096.json"],
    8192: [OUT / "speed-8192.json", OUT / "windows-8192.json", OUT / "first-windows-8192.json"],
}
CONTEXTS = list(SPEEDS)


def trained(context):
    """The finished runs at a context, by attention."""
    if context in EQUAL_TOKENS:
        folder, reports = EQUAL_TOKENS[context]
        files = [BENCHMARKS / folder / report for report in reports]
    else:
        files = sorted((BENCHMARKS / "code-8192").glob("*.json"))
        # Softmax on as many tokens as the others, with the same parts and without any, not for as
        # many minutes.
        files.append(BENCHMARKS / "code-8192-longer/softmax.json")
        files.append(BENCHMARKS / "code-8192-longer/plain-softmax.json")
        # Those whose other seeds are in the same folder.
        files.append(BENCHMARKS / "code-seeds/8192-first-window-seed1.json")
        files.append(BENCHMARKS / "code-seeds/8192-first-window-features-seed1.json")
    runs = [run for file in files for run in json.loads(file.read_text())["runs"]]
    return {run["attention_spec"]: run for run in runs}


def fastest(file):
    """The most tokens a second that a file has for each attention."""
    speeds = {}
    for point in json.loads(file.read_text())["points"]:
        spec, speed = point["attention_spec"], point["tokens_per_second"]
        speeds[spec] = max(speed, speeds.get(spec, 0))
    return speeds


def measured(context):
    """Tokens a second of whole training steps at a context, by attention."""
    speeds = fastest(SPEEDS[context])
    for file in LATER_SPEEDS[context]:
        later = fastest(file)
        scale = speeds[SOFTMAX] / later[SOFTMAX]
        speeds = {spec: scale * speed for spec, speed in later.items()} | speeds
    return speeds


def quarter(run, context, number):
    """The mean loss in a quarter of a piece of the test text, in nats a token; the first is 1."""
    low, high = (number - 1) * context // 4, number * context // 4
    parts = [part for part in run["loss_by_position"] if low < part["until"] <= high]
    return sum(part["loss"] for part in parts) / len(parts)


def beyond(run, context):
    """The mean loss from the trained length to twice that, in nats a token."""
    parts = [part for part in run["loss_by_position"] if part["until"] > context]
    return sum(part["loss"] for part in parts) / len(parts)


def in_equal_time(context, runs, speeds):
    """The loss less that of softmax with the same parts after as many minutes, by attention."""
    if context not in EQUAL_TOKENS:
        return {}
    folder, reports = EQUAL_TOKENS[context]
    curves = {}
    for archive in reports.values():
        curves |= validations(BENCHMARKS / folder / archive)
    softmax, differences = curves[SOFTMAX], {}
    for spec in runs.keys() & speeds.keys():
        tokens, loss = curves[spec][-1]
        seconds = min(tokens / speeds[spec], softmax[-1][0] / speeds[SOFTMAX])
        differences[spec] = loss - at(softmax, speeds[SOFTMAX], seconds)
    return differences


def table():
    """One object for each attention, with one for each context below it."""
    rows = {spec: {"attention_spec": spec, "contexts": {}} for spec in ROWS}
    for context in CONTEXTS:
        runs, speeds = trained(context), measured(context)
        equal = in_equal_time(context, runs, speeds)
        for spec, row in rows.items():
            cell = {"tokens_per_second": speeds[spec]} if spec in speeds else {}
            if cell:
                cell["speed_beside_softmax"] = speeds[spec] / speeds[SOFTMAX]
            if spec in runs:
                test = runs[spec]["test"]
                cell |= {
                    "tokens": runs[spec]["tokens"],
                    "loss": test["loss"],
                    "bits_per_byte": test["bits_per_byte"],
                    "beside_softmax": test["loss"] - runs[SOFTMAX]["test"]["loss"],
                    "state_bytes": runs[spec]["state_bytes"],
                    "quarter_2": quarter(runs[spec], context, 2),
                    "quarter_4": quarter(runs[spec], context, 4),
                    "beyond": beyond(runs[spec], context),
                }
                if spec in equal:
                    cell["beside_softmax_in_equal_time"] = equal[spec]
            if cell:
                row["contexts"][str(context)] = cell
    return list(rows.values())


def panel(axes, rows, key, title, contexts):
    """Draws one number of every attention over the contexts, at equal distances."""
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xticks(range(len(contexts)), [f"{context:,}" for context in contexts])
    axes.set_xlim(-0.3, len(contexts) - 0.7)
    axes.set_xlabel("context (tokens)")
    figure_style(axes)
    for row in rows:
        name, colour, line = ROWS[row["attention_spec"]]
        points = [
            (contexts.index(context), row["contexts"][str(context)][key])
            for context in contexts
            if key in row["contexts"].get(str(context), {})
        ]
        if colour and points:
            axes.plot(
                *zip(*points), color=colour, linestyle=line, marker="o", markersize=4, label=name
            )


def draw(rows):
    plt.rcParams["svg.hashsalt"] = "contexts"
    plot, (tokens, time, speed) = plt.subplots(1, 3, figsize=(12, 4.8), layout="constrained")
    title = "Loss less that of softmax, after about as many tokens"
    panel(tokens, rows, "beside_softmax", title, CONTEXTS)
    # At 8,192 tokens budgets differ, so losses on the way are not compared.
    panel(
        time,
        rows,
        "beside_softmax_in_equal_time",
        "The difference in equal time, by first steps",
        list(EQUAL_TOKENS),
    )
    title = "Speed of first steps over that of softmax"
    panel(speed, rows, "speed_beside_softmax", title, CONTEXTS)
    for axes in (tokens, time):
        axes.set_ylabel("nats a token; lower is better")
        axes.set_ylim(-0.13, 0.85)
    speed.set_ylabel("ratio; higher is better")
    speed.set_ylim(bottom=0)
    names = tokens.get_legend_handles_labels()
    plot.legend(*names, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    plot.savefig(ROOT / "book/src/results/code-contexts.svg", metadata={"Date": None})
    plot.savefig(OUT / "contexts.png", dpi=160)


def draw_positions():
    """Draws the loss by position in a piece, at each context to twice the trained length."""
    plt.rcParams["svg.hashsalt"] = "positions"
    plot, panels = plt.subplots(2, 2, figsize=(12, 7.6), layout="constrained", sharey=True)
    for axes, context in zip(panels.flat, CONTEXTS):
        runs = trained(context)
        softmax = {part["until"]: part["loss"] for part in runs[SOFTMAX]["loss_by_position"]}
        axes.set_title(f"trained at {context:,} tokens (dotted)", loc="left", fontsize=10)
        axes.set_xlabel("position (tokens)")
        axes.axvline(context, color="#808080", linestyle=":")
        axes.set_ylim(-0.13, 1.2)
        axes.set_xlim(0, 2 * context)
        axes.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))
        figure_style(axes)
        for spec, (name, colour, line) in ROWS.items():
            if colour and spec in runs:
                curve = [
                    (part["until"], part["loss"] - softmax[part["until"]])
                    for part in runs[spec]["loss_by_position"]
                ]
                axes.plot(*zip(*curve), color=colour, linestyle=line, label=name)
    for axes in panels[:, 0]:
        axes.set_ylabel("loss less that of softmax (nats a token)")
    lines = {}
    for axes in panels.flat:
        lines |= {line.get_label(): line for line in axes.get_legend_handles_labels()[0]}
    names = [name for name, _, _ in ROWS.values() if name in lines]
    plot.legend(
        [lines[name] for name in names],
        names,
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=9,
    )
    plot.savefig(ROOT / "book/src/results/code-positions.svg", metadata={"Date": None})
    plot.savefig(OUT / "positions.png", dpi=160)


def main():
    rows = table()
    (OUT / "table.json").write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    draw(rows)
    draw_positions()


if __name__ == "__main__":
    main()
