#!/usr/bin/env python3
"""Trains the same small model with the instructions of several processors, and says how far the
weights and losses drift apart.

    scripts/drift.py --steps 200

The processors are emulated by `qemu-x86_64` and `qemu-aarch64`, of the package qemu-user; the
program for the latter is compiled with gcc-aarch64-linux-gnu. As a measure of how much rounding
matters at all, one more training on this machine adds up the gradients of a step in other groups.
Exits with 1 where a loss differs by more than --tolerance from that of this machine.
"""

import argparse
import array
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
AARCH64 = "aarch64-unknown-linux-gnu"
ATTENTIONS = ["softmax", "favor:m=16,gate,conv", "favor:m=16,map=learned,window=6"]
# The processors that are compared, and the programs that each needs.
TOOLS = {
    "this machine": [],
    "other groups": [],
    "x86-64 with AVX2": ["qemu-x86_64"],
    "x86-64 without AVX": ["qemu-x86_64"],
    "aarch64 with NEON": ["qemu-aarch64", "aarch64-linux-gnu-gcc"],
}


def build(target=None):
    """The path of the example, built for this machine or another one."""
    command = ["cargo", "build", "-p", "performer-lm", "--no-default-features", "--example", "drift"]
    command += ["--message-format", "json"] + (["--target", target] if target else [])
    linker = {"CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER": "aarch64-linux-gnu-gcc"}
    out = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, env=os.environ | linker).stdout
    messages = [json.loads(line) for line in out.splitlines() if line.startswith(b"{")]
    [program] = [m["executable"] for m in messages if m.get("executable") and m["target"]["name"] == "drift"]
    return program


def weights(path):
    """All weights of a file in the safetensors format, one after the other by name."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header.pop("__metadata__", None)
    numbers = array.array("f")
    for name in sorted(header):
        assert header[name]["dtype"] == "F32", name
        first, last = header[name]["data_offsets"]
        numbers.frombytes(data[end + first : end + last])
    return numbers


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tolerance", type=float, default=1e-3, help="nats by which losses may differ")
    parser.add_argument("--only", nargs="+", help="names of processors, of those in the table")
    options = parser.parse_args()
    if unknown := set(options.only or []) - set(TOOLS):
        parser.error(f"unknown processors: {', '.join(sorted(unknown))}; known are {', '.join(TOOLS)}")
    tools = {tool for name in options.only or TOOLS for tool in TOOLS[name]}
    if missing := sorted(tool for tool in tools if not shutil.which(tool)):
        parser.error(f"this machine lacks {', '.join(missing)}")
    here = build()
    processors = {
        "this machine": ([here], 4),
        "other groups": ([here], 2),
        "x86-64 with AVX2": (["qemu-x86_64", "-cpu", "Haswell", here], 4),
        "x86-64 without AVX": (["qemu-x86_64", "-cpu", "Nehalem", here], 4),
        "aarch64 with NEON": (["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-cpu", "max"], 4),
    }
    if options.only is not None:
        processors = {name: how for name, how in processors.items() if name in ["this machine", *options.only]}
    if "aarch64 with NEON" in processors:
        processors["aarch64 with NEON"][0].append(build(AARCH64))
    print("| attention | processor | loss | differs by | largest change of a weight | of all weights |")
    print("|---|---|---|---|---|---|", flush=True)
    failed = False
    for attention in ATTENTIONS:
        with tempfile.TemporaryDirectory() as folder:
            first = None
            for name, (command, micro_batch) in processors.items():
                out = pathlib.Path(folder, name.replace(" ", "-"))
                words = [*command, out, str(options.steps), attention, str(micro_batch)]
                loss = float(subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout)
                mine = weights(out / "model.safetensors")
                first = first or (loss, mine)
                assert len(mine) == len(first[1])
                changes = [abs(a - b) for a, b in zip(mine, first[1])]
                relative = math.sqrt(sum(c * c for c in changes) / sum(w * w for w in first[1]))
                differs = abs(loss - first[0])
                failed |= not differs <= options.tolerance
                line = f"| `{attention}` | {name} | {loss:.6f} | {differs:.1e} | {max(changes):.1e} | {relative:.1e} |"
                print(line, flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
