#!/usr/bin/env python3
"""Models how long a training step takes whose sequence is cut over many cards: FAVOR beside softmax
in a ring.

    scripts/step_time_model.py [--out FILE] [--chart FILE]

Writes benchmarks/several-machines/model.json, with every assumption, and the chart of the book,
book/src/tutorials/several-machines.svg, unless the options name other files. Nothing is measured
here: times of attention are those of one H100 in benchmarks/h100/timings.json, sizes of messages
are what the program sends (the test `segments::` of performer-lm counts them), bandwidths are
those that makers publish.

The model: one sequence of T tokens, cut over N ranks. In each layer

  FAVOR    sums, M(D + 2) + 1 numbers a head in f32, are merged by a scan: ceil(log2 N) messages one
           after the other, and as many gradients the other way.
  softmax  keys and values of T/N tokens go around the ring in bf16: N - 1 messages forward; backward
           they go around once more with their gradients. Each is sent while the one before it is
           computed with, so that the longer of the two counts. Work is spread evenly, at best.

Everything else in a step takes the same time with both: matrix products, 6 operations a parameter
and token, and the sum of gradients over all ranks. Times of exchanges add a latency each.
"""

import argparse
import json
import math
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODEL = {"layers": 24, "heads": 32, "head_dim": 64, "features": 128, "parameters": 1.3e9}
# Bytes a second in one direction, and seconds until a message begins to arrive.
NETWORKS = {
    "10 GbE": {"bandwidth": 1.25e9, "latency": 3e-5},
    "100 GbE": {"bandwidth": 12.5e9, "latency": 1e-5},
    "NVLink 4": {"bandwidth": 450e9, "latency": 3e-6},
}
# Half of the 989e12 operations a second that the maker gives for bf16.
PRODUCTS = 0.5 * 989e12
RANKS = [8, 64, 1024]
TOKENS = {"64k": 1 << 16, "1M": 1 << 20, "16M": 1 << 24}


def measured():
    """Seconds of causal attention both ways: for FAVOR, of a token and head; for softmax, of a head
    and square of the length, by the faster of the two that were measured."""
    speed = json.loads((ROOT / "benchmarks/h100/timings.json").read_text())["speed"]
    both = [s for s in speed if s["work"] == "both" and s["dtype"] == "bf16"]
    favor = max((s for s in both if s["attention"] == "favor"), key=lambda s: s["tokens"])
    softmax = max((s for s in both if s["attention"] == "softmax"), key=lambda s: s["tokens"])
    seconds = min(softmax["milliseconds"], softmax["pytorch_milliseconds"]) / 1e3
    return favor["picoseconds"] / 1e12, seconds / softmax["tokens"] ** 2 / softmax["heads"]


def step(network, ranks, tokens, rates):
    """Seconds of one step, and bytes that the busiest rank sends in a layer."""
    m, net = MODEL, NETWORKS[network]
    send = lambda count: net["latency"] + count / net["bandwidth"]
    own = tokens / ranks
    sums = m["heads"] * (m["features"] * (m["head_dim"] + 2) + 1) * 4
    block = 2 * own * m["heads"] * m["head_dim"] * 2  # keys and values in bf16
    compute = rates[0] * own * m["heads"]
    # Between two messages of the ring; going back takes two and a half times as long as forward.
    hops, rounds = ranks - 1, math.ceil(math.log2(ranks))
    part = rates[1] * own * own * m["heads"]
    forward, backward = part / 3.5, part * 2.5 / 3.5
    gradients = 2 * m["parameters"] * 2 * hops / ranks
    same = 6 * m["parameters"] * own / PRODUCTS + 2 * hops * net["latency"] + gradients / net["bandwidth"]
    names = {count: name for name, count in TOKENS.items()}
    return {
        "case": f"{network}, {ranks:,} ranks, {names[tokens]} tokens",
        "network": network,
        "ranks": ranks,
        "tokens": tokens,
        "favor_seconds": same + m["layers"] * (compute + 2 * rounds * send(sums)),
        "softmax_seconds": same
        + m["layers"] * (forward + backward + hops * (max(forward, send(block)) + max(backward, send(2 * block)))),
        "same_seconds": same,
        "favor_bytes": 2 * rounds * sums,
        "softmax_bytes": hops * 3 * block,
    }


def chart(rows):
    """Seconds a step over tokens, a panel for each network and number of ranks."""
    width, height, left, top = 190, 150, 80, 40
    values = [row[key] for row in rows for key in ("favor_seconds", "softmax_seconds")]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    parts = []
    for i, network in enumerate(NETWORKS):
        for j, ranks in enumerate(RANKS):
            x0, y0 = left + j * (width + 30), top + i * (height + 50)
            parts.append(f'<text x="{x0}" y="{y0 - 8}">{network}, {ranks:,} ranks</text>')
            parts.append(f'<rect x="{x0}" y="{y0}" width="{width}" height="{height}" fill="none" stroke="#999"/>')
            place = lambda k, value: (
                x0 + 15 + k * (width - 30) / 2,
                y0 + height * (high - math.log10(value)) / (high - low),
            )
            for power in range(low, high + 1):
                y = y0 + height * (high - power) / (high - low)
                parts.append(f'<path d="M{x0} {y:.1f}h{width}" stroke="#999" stroke-opacity="0.25"/>')
                if j == 0:
                    parts.append(f'<text x="{x0 - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:,g} s</text>')
            for k, name in enumerate(TOKENS):
                x = x0 + 15 + k * (width - 30) / 2
                parts.append(f'<text x="{x:.0f}" y="{y0 + height + 15}" text-anchor="middle">{name}{" tokens" if k == 1 else ""}</text>')
            here = [r for r in rows if r["network"] == network and r["ranks"] == ranks]
            for key, colour in [("softmax_seconds", "#c44"), ("favor_seconds", "#06c")]:
                points = " ".join("%.1f,%.1f" % place(k, row[key]) for k, row in enumerate(here))
                parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    bottom = top + len(NETWORKS) * (height + 50)
    for k, (text, colour) in enumerate([("softmax in a ring", "#c44"), ("FAVOR+", "#06c")]):
        x = left + 170 * k
        parts.append(f'<path d="M{x} {bottom - 4}h24" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 30}" y="{bottom}">{text}</text>')
    size = f'width="{left + 3 * (width + 30)}" height="{bottom + 15}"'
    style = 'font-family="sans-serif" font-size="12" fill="#777"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{"".join(parts)}</svg>\n'


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks/several-machines/model.json")
    parser.add_argument("--chart", type=pathlib.Path, default=ROOT / "book/src/tutorials/several-machines.svg")
    args = parser.parse_args()
    rates = measured()
    rows = [step(net, ranks, tokens, rates) for net in NETWORKS for ranks in RANKS for tokens in TOKENS.values()]
    assumed = {
        "model": MODEL,
        "networks": NETWORKS,
        "products_per_second": PRODUCTS,
        "favor_seconds_per_token_and_head": rates[0],
        "softmax_seconds_per_token_squared_and_head": rates[1],
    }
    args.out.write_text(json.dumps({"assumed": assumed, "steps": rows}, indent=1) + "\n")
    args.chart.write_text(chart(rows))
    for row in rows:
        print(
            f"{row['case']:>34}: FAVOR {row['favor_seconds']:9.3f} s, "
            f"softmax {row['softmax_seconds']:9.3f} s, the rest {row['same_seconds']:.3f} s"
        )


if __name__ == "__main__":
    main()
