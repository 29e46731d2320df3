#!/usr/bin/env python3
"""Checks training by several processes with a build that has MPI.

    scripts/mpi_check.py target/debug/performer-lm [--kills 50] [--seed 1]

Trains a small model on 1, 2 and 4 processes and compares the files byte by byte; cuts each sequence
over 2 and 4 processes and compares losses and gradients with those of one; then lets things
go wrong (another setting on one rank, no data on one, no space on the disk of the first) and
expects that all processes end within seconds with one message that names the rank; lets a rank stand
still, with whole sequences and with cut ones, and expects a message of a rank that has waited for
it; then kills ranks at random moments, goes on with the run on another number of ranks, and
expects the bytes of a run that nobody killed. Nothing here depends on how fast the machine is, but
for the patience of 60 seconds that an end is given.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

PATIENCE = 60  # seconds for an end after something went wrong
LONG = 1800  # for a run that nothing happens to, on however slow a machine
TRAIN = "train --data sample --preset seed --vocab-size 300 --context 32 --batch-size 16 --micro-batch 2".split()
TOLERANCE = 1e-5  # of sequences over several processes: relative to the largest number of a map
FILES = ["model.safetensors", "optimizer.safetensors", "metrics.jsonl"]


def fail(text):
    sys.exit(f"FAILED: {text}")


class Check:
    def __init__(self, program, folder):
        self.program = str(pathlib.Path(program).resolve())
        self.folder = pathlib.Path(folder)
        if shutil.which("mpirun") is None:
            sys.exit("there is no mpirun: install OpenMPI or MPICH")
        version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
        self.is_open_mpi = "Open MPI" in version
        self.launcher = ["mpirun"]
        if self.is_open_mpi:
            self.launcher += ["--oversubscribe", "--bind-to", "none"]
            self.launcher += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        self.stuck_launchers = 0
        print(version.strip().splitlines()[0])
        self.environment = dict(os.environ, PERFORMER_CACHE=str(self.folder / "cache"), HF_HUB_OFFLINE="1")

    def start(self, *groups):
        """Starts groups of (number, arguments, shell text before or None) under one launcher."""
        command = list(self.launcher)
        for i, (number, arguments, first) in enumerate(groups):
            own = [self.program, *arguments, "--threads", "1"]
            if first:
                own = ["bash", "-c", first + '; exec "$@"', "_", *own]
            command += [":"] * (i > 0) + ["-n", str(number), *own]
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environment, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )

    def end(self, process, what, patience=PATIENCE):
        """Waits for the end of all processes; returns the exit code and what was said."""
        try:
            said, _ = process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            left = self.ranks(process.pid)
            os.killpg(process.pid, signal.SIGKILL)
            for rank in left:
                # It may have a session of its own, or be gone with the launcher.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)
            if left or not self.is_open_mpi:
                fail(f"{what}: still there after {patience} s: {left or 'the launcher alone'}")
            # Where a rank is killed in MPI_Init, OpenMPI's mpirun may wait in PMIx_server_finalize
            # for a lock that nobody holds, long after all of its processes have ended.
            self.stuck_launchers += 1
            said, _ = process.communicate()
            return process.returncode, said
        left = self.ranks(process.pid)
        if left:
            fail(f"{what}: processes {left} are left")
        return process.returncode, said

    def ranks(self, session):
        """The processes of the program in a session."""
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                except OSError:
                    continue
                parent_session, state = int(fields[3]), fields[0]
                # A launcher may give its processes sessions of their own; the folder is ours alone.
                ours = parent_session == session or self.is_ours(entry)
                if words[0].decode(errors="replace") == self.program and ours and state != "Z":
                    found.append(int(entry.name))
        return found

    def is_ours(self, entry):
        try:
            return pathlib.Path(os.readlink(entry / "cwd")) == self.folder.resolve()
        except OSError:
            return False

    def succeeds(self, number, arguments):
        code, said = self.end(self.start((number, arguments, None)), " ".join(arguments), LONG)
        if code != 0:
            fail(f"{number} ranks, {' '.join(arguments)}: exit code {code}\n{said}")
        return said

    def same(self, one, other):
        for file in FILES:
            a, b = (self.folder / run / file for run in (one, other))
            if a.read_bytes() != b.read_bytes():
                fail(f"{a} and {b} differ")

    def fails(self, what, pattern, *groups, between=None):
        """All processes end, the first message of ours is as expected, and without `between` it is the only one."""
        process = self.start(*groups)
        if between:
            between(process)
        begun = time.monotonic()
        code, said = self.end(process, what)
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        if code == 0 or not errors or not re.search(pattern, errors[0]) or (between is None and len(errors) != 1):
            fail(f"{what}: exit code {code}, expected one error like {pattern!r}\n{said}")
        print(f"{what}: all ended after {time.monotonic() - begun:.1f} s: {errors[0][7:120]}")


def equal_bits(check):
    run = [*TRAIN, "--attention", "favor-gated:m=16", "--max-steps", "12", "--eval-every", "5", "--save-every", "4"]
    for number in (1, 2, 4):
        check.succeeds(number, [*run, "--out", f"on{number}"])
        check.same(f"on{number}", "on1")
    print("1, 2 and 4 ranks: the same bytes in", ", ".join(FILES))


def sequences(check):
    """Losses of a run, and the first moments after one step: gradients, but for a factor."""
    for name, attention in [("favor", "favor-gated:m=16,conv"), ("window", "favor-window:m=16,window=5"),
                            ("softmax", "softmax:gate")]:
        run = [*TRAIN, "--attention", attention, "--dropout", "0"]
        worst = 0.0
        for number, parallel in [(1, 1), (2, 2), (4, 2), (4, 4)]:
            cut = ["--sequence-parallel", str(parallel)]
            out = f"cut-{name}-{number}-{parallel}"
            check.succeeds(number, [*run, *cut, "--max-steps", "1", "--out", out])
            check.succeeds(number, [*run, *cut, "--max-steps", "8", "--eval-every", "4", "--out", out + "-long"])
            found = {"losses": losses(check.folder / f"{out}-long"), **moments(check.folder / out)}
            if number == 1:
                expected = found
                continue
            for what, numbers in expected.items():
                error = max(abs(a - b) for a, b in zip(numbers, found[what], strict=True))
                # A weight and its bias are one map. Softmax has no gradient for the bias of keys,
                # which is rounding and nothing else.
                whole = [*numbers, *expected.get(what.removesuffix(".bias") + ".weight", [])]
                relative = error / max(abs(a) for a in whole)
                worst = max(worst, relative)
                if not relative <= TOLERANCE:
                    fail(f"{attention}, {parallel} processes a sequence, {number} in all: {what} is {relative:.1e} off")
        print(f"{attention}: sequences over 2 and 4 processes, losses and gradients {worst:.1e} from one process")
    check.fails("a length that cannot be cut", r"context of 32 tokens cannot be cut into 3",
                (3, [*TRAIN, "--attention", "favor:m=8", "--sequence-parallel", "3", "--out", "e0"], None))
    check.fails("a number of processes that cannot be divided", r"does not divide the number of processes, 3",
                (3, [*TRAIN, "--attention", "favor:m=8", "--sequence-parallel", "2", "--out", "e0"], None))


def losses(folder):
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record[key] for record in records for key in ("train_loss", "val_loss") if record.get(key) is not None]


def moments(folder):
    """The first moments in a file of the optimiser, by the name of the parameter."""
    data = (folder / "optimizer.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8:8 + length]), data[8 + length:]
    tensors = {name: body[slice(*entry["data_offsets"])] for name, entry in header.items() if name.startswith("m.")}
    return {name: struct.unpack(f"<{len(bytes) // 4}f", bytes) for name, bytes in tensors.items()}


def errors(check):
    run = [*TRAIN, "--attention", "favor:m=8", "--max-steps", "4"]
    other = [*run, "--learning-rate", "0.5"]
    nowhere = ["nowhere.txt" if word == "sample" else word for word in run]
    check.fails("another setting on rank 1", r"rank 1 of 2: .*learning_rate is",
                (1, [*run, "--out", "e1"], None), (1, [*other, "--out", "e1"], None))
    check.fails("no data on rank 1", r"rank 1 of 2: .*nowhere",
                (1, [*run, "--out", "e2"], None), (1, [*nowhere, "--out", "e2"], None))
    full = "trap '' XFSZ; ulimit -f 100"
    check.fails("no space on rank 0", r"rank 0 of 2: .*cannot (save a checkpoint|write)",
                (1, [*run, "--out", "e3"], full), (1, [*run, "--out", "e3"], None))
    many = [*TRAIN, "--attention", "favor:m=8", "--epochs", "100000", "--eval-every", "1000000", "--deadline", "3"]

    for what, out, cut in [("a rank that stands still", "e4", []),
                           ("one that shares a sequence", "e5", ["--sequence-parallel", "2"])]:
        def stop_one(process):
            wait_for(lambda: lines(check.folder / out / "metrics.jsonl") > 2, process, "the first steps")
            os.kill(check.ranks(process.pid)[-1], signal.SIGSTOP)

        check.fails(what, r"rank \d of 2: .*no answer within 3 s", (2, [*many, *cut, "--out", out], None),
                    between=stop_one)


def lines(path):
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def wait_for(condition, process, what):
    """Waits for a condition; if there is a process, it must not end before."""
    begun = time.monotonic()
    while not condition():
        ended = process and process.poll() is not None
        if ended or time.monotonic() - begun > LONG:
            fail(f"{what} did not come: {process.communicate()[0] if ended else ''}")
        time.sleep(0.01)


def kills(check, count, seed):
    rng = random.Random(seed)
    begin = [*TRAIN, "--attention", "favor-gated:m=16", "--max-steps", "60", "--eval-every", "20", "--save-every", "3"]
    began = time.monotonic()
    check.succeeds(2, [*begin, "--out", "whole"])
    whole = time.monotonic() - began
    done, runs, slowest = 0, 0, 0.0
    while done < count:
        runs += 1
        out = f"killed{runs}"
        while True:
            ranks = rng.choice([2, 3, 4])
            resumes = (check.folder / out / "train_state.json").exists()
            arguments = ["train", "--resume", out] if resumes else [*begin, "--overwrite", "--out", out]
            process = check.start((ranks, arguments, None))
            if done < count:
                wait_for(lambda: check.ranks(process.pid) or process.poll() is not None, None, "the first rank")
                time.sleep(rng.uniform(0, whole))
                alive = check.ranks(process.pid)
                if alive and process.poll() is None:
                    os.kill(rng.choice(alive), signal.SIGKILL)
                    killed = time.monotonic()
                    code, said = check.end(process, f"kill {done + 1}")
                    if code != 0:
                        done += 1
                        if process.returncode == -signal.SIGKILL:
                            continue
                        slowest = max(slowest, time.monotonic() - killed)
                        if not re.search(r"rank \d+|RANK \d+", said):
                            fail(f"kill {done}: no message names a rank\n{said}")
                        if done % 10 == 0:
                            print(f"{done} of {count} kills")
                        continue
                    # It was at its end when the signal came.
            ended = process.poll() is not None
            code, said = (process.returncode, "") if ended else check.end(process, "a run that nobody kills", LONG)
            if code != 0:
                fail(f"a run that nobody killed: exit code {code}\n{said}")
            break
        check.same(out, "whole")
    print(f"{done} ranks killed in {runs} runs: all processes ended within {slowest:.1f} s, and every run went on to "
          "the bytes of one that nobody killed")
    if check.stuck_launchers:
        print(f"{check.stuck_launchers} times mpirun stayed behind, alone, and was ended")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        check = Check(options.program, folder)
        equal_bits(check)
        sequences(check)
        errors(check)
        kills(check, options.kills, options.seed)


if __name__ == "__main__":
    main()
