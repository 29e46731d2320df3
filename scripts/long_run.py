#!/usr/bin/env python3
"""Watch a long command: its memory, threads, open files and output over time.

    scripts/long_run.py --seconds 7200 --every 10 --out target/long-run -- \\
        target/release/performer-lm train --data sample --attention favor --epochs 100000 \\
        --eval-every 50 --save-every 50 --out target/long-run/run

The command is interrupted (SIGINT) after that time and may end by itself before. Results are
OUT/samples.csv and a chart of them, OUT/samples.svg. Fails if memory, threads or open files grew
from the second quarter of the time to the last by more than a twentieth and 2 more (MiB, threads or
files): in the first quarter caches fill. How much the command writes in a second, and in a second
of the processor, is shown by quarters and not judged, since other work may slow it. Linux only,
since it reads /proc.
"""

import argparse
import csv
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time

FIELDS = ["seconds", "rss_mib", "threads", "files", "bytes_written", "cpu_seconds"]
# Of these, how much is judged.
JUDGED = FIELDS[1:4]
# How much the mean of the last quarter may exceed that of the second, relative and absolute: a
# single file or thread more or less is no growth.
GROWTH, SLACK = 1.05, 2


def sample(pid, seconds):
    status = pathlib.Path(f"/proc/{pid}/status").read_text().split("\n")
    fields = dict(line.split(":", 1) for line in status if ":" in line)
    files = len(list(pathlib.Path(f"/proc/{pid}/fd").iterdir()))
    written = dict(line.split(": ") for line in pathlib.Path(f"/proc/{pid}/io").read_text().splitlines())["wchar"]
    # After the name, which stands in brackets, the twelfth and thirteenth fields.
    times = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    cpu = sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
    return [round(seconds, 1), int(fields["VmRSS"].split()[0]) / 1024, int(fields["Threads"]), files, int(written), cpu]


def watch(command, seconds, every):
    try:
        process = subprocess.Popen(command)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be started: {error.strerror}")
    started = time.monotonic()
    samples = []
    while process.poll() is None and (passed := time.monotonic() - started) < seconds:
        try:
            samples.append(sample(process.pid, passed))
        except (KeyError, OSError):
            break  # It has just ended.
        time.sleep(every)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    return process.wait(), samples


def growth(samples):
    """Yields what grew."""
    quarter = len(samples) // 4
    for i, field in enumerate(JUDGED, 1):
        before = statistics.mean(row[i] for row in samples[quarter : 2 * quarter])
        after = statistics.mean(row[i] for row in samples[3 * quarter :])
        print(f"{field}: {before:.1f} in the second quarter, {after:.1f} in the last")
        if after > GROWTH * before + SLACK:
            yield field


def rates(samples):
    """Says how fast the command wrote in each quarter of the time."""
    quarter = len(samples) // 4
    ends = [samples[i * quarter] for i in range(4)] + [samples[-1]]
    for what, column in [("second", 0), ("second of the processor", 5)]:
        speeds = [(b[4] - a[4]) / max(b[column] - a[column], 1e-9) for a, b in zip(ends, ends[1:])]
        print(f"bytes written a {what}, by quarter:", ", ".join(f"{speed:.0f}" for speed in speeds))


def chart(samples):
    """Curves, one above the other, each from 0 to its largest value."""
    width, height, left = 640, 130, 70
    end = max(samples[-1][0], 1)
    parts = []
    for i, field in enumerate(FIELDS[1:], 1):
        top = 20 + (i - 1) * (height + 40)
        most = max(row[i] for row in samples) or 1
        point = lambda row: f"{left + row[0] / end * width:.1f},{top + height * (1 - row[i] / most):.1f}"
        parts.append(
            f'<text x="4" y="{top - 6}">{field}</text><text x="4" y="{top + 10}">{most:.0f}</text>'
            f'<text x="4" y="{top + height}">0</text>'
            f'<path d="M{left} {top}V{top + height}H{left + width}" fill="none" stroke="#888"/>'
            f'<polyline points="{" ".join(map(point, samples))}" fill="none" stroke="#06c"/>'
        )
    bottom = 20 + len(FIELDS[1:]) * (height + 40)
    parts.append(f'<text x="{left + width - 90}" y="{bottom - 20}">{end:.0f} seconds</text>')
    size = f'width="{left + width + 10}" height="{bottom}"'
    style = 'font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{"".join(parts)}</svg>\n'


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=7200)
    parser.add_argument("--every", type=float, default=10, help="seconds between two looks (default: 10)")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--to-end", action="store_true",
                        help="fail if the command has not ended by itself")
    parser.add_argument("command", nargs="+", help="the command, after --")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    code, samples = watch(args.command, args.seconds, args.every)
    if len(samples) < 8:
        raise SystemExit(
            f"only {len(samples)} looks, and 8 are needed; the command ended with {code}: if it was interrupted, "
            "give more --seconds or a smaller --every"
        )
    with open(args.out / "samples.csv", "w", newline="") as file:
        csv.writer(file).writerows([FIELDS, *samples])
    (args.out / "samples.svg").write_text(chart(samples))
    grown = list(growth(samples))
    rates(samples)
    print(f"exit code {code}; grew: {', '.join(grown) or 'nothing'}")
    # 130 is the code of a command that was interrupted.
    fine = (0,) if args.to_end else (0, 130)
    sys.exit(1 if grown or code not in fine else 0)


if __name__ == "__main__":
    main()
