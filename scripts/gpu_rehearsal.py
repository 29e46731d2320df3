#!/usr/bin/env python3
"""Rehearses the first half hour with a card where there is none: packs the program and its kernels,
unpacks them elsewhere, and runs gpu-run.sh on an emulated card, with narrow checks, in minutes.

    scripts/gpu_rehearsal.py [--out FOLDER]

It fails unless

 - nothing is compiled there, and NVRTC is not needed, while kernels came with the program;
 - a program that is killed takes the process along that works for it, and loses no finished result;
 - a process that is killed while it works, and a kernel that makes the card fail, cost one result
   each, and the same command goes on;
 - a training that is killed leaves the one before it finished, and is done by the same command;
 - a damaged kernel is said, compiled anew, and kept.

Kernels are compiled for one architecture, by the emulated NVRTC (scripts/cuda-emulate.sh). --out keeps
what was made. Needs Linux, a C++ compiler, and Rust.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
ARCHITECTURE = "90"
# A kernel of one quick check, and of no attention.
FAULTY, LOST = "cross_entropy_forward", "cross-entropy"


def say(text):
    print(f"{time.strftime('%T')} {text}", file=sys.stderr, flush=True)


def demand(condition, text, log=""):
    if not condition:
        sys.exit(f"{text}\n{log[-3000:]}")


def descendants(process):
    """The command lines of the processes that a process started, and those started, by number."""
    parents, lines = {}, {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                lines[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (OSError, ValueError):
                # It has ended meanwhile.
                continue
    found = {}
    for pid in parents:
        above = pid
        while above in parents and above != process.pid:
            above = parents[above]
        if above == process.pid and pid != process.pid:
            found[pid] = lines.get(pid, "")
    return found


def lines_of(path):
    """The whole lines of results, each an object with one key."""
    text = path.read_text() if path.exists() else ""
    lines = []
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            # A process was ended in its middle.
            continue
    return lines


def items(path, kind):
    return [line[kind]["item"] for line in lines_of(path) if kind in line]


class Rehearsal:
    def __init__(self, folder):
        self.pack, self.there, self.results = folder / "pack", folder / "elsewhere", folder / "results"
        self.without, self.folder = folder / "without-nvrtc", folder
        # Of the folder that is given, only what an earlier rehearsal made is removed.
        mark = folder / "rehearsal"
        if not mark.exists() and any(folder.iterdir()):
            raise SystemExit(f"{folder} holds files that are of no rehearsal: name another folder")
        mark.touch()
        for old in [self.there, self.results, self.without]:
            shutil.rmtree(old, ignore_errors=True)
        self.quick = self.results / "quick.jsonl"

    def make(self):
        built = subprocess.run([ROOT / "scripts/cuda-emulate.sh", "--build-only"], check=True, stdout=subprocess.PIPE, text=True)
        toolkit = pathlib.Path(built.stdout.strip())
        self.libraries = toolkit / "lib64"
        self.images = os.environ.get("EMULATED_CACHE", str(toolkit / "images"))
        narrow = {"NVRTC": "emulated", "EXTENT": "quick", "PRESETS": "seed", "PROGRAM": str(toolkit / "performer-lm")}
        subprocess.run([ROOT / "scripts/cuda-pack.sh", self.pack, ARCHITECTURE], check=True, env={**os.environ, **narrow})
        shutil.copytree(self.pack, self.there)
        self.without.mkdir()
        for library in self.libraries.glob("lib*"):
            if not library.name.startswith("libnvrtc"):
                (self.without / library.name).symlink_to(library.resolve())

    def settings(self, nvrtc=False, **more):
        return {
            **os.environ,
            "LD_LIBRARY_PATH": str(self.libraries if nvrtc else self.without),
            "EMULATED_CACHE": self.images,
            "PERFORMER_CACHE": str(self.folder / "cache"),
            **{"PRESET": "seed", "BATCH": "2", "STEPS": "2"},
            **more,
        }

    def start(self, *stages, **more):
        log = open(self.folder / "log.txt", "w+")
        command = [self.there / "gpu-run.sh", "--out", self.results, *stages]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.settings(**more))
        process.log = log
        return process

    def end(self, process):
        """Waits for a run; its exit code and what it said."""
        code = process.wait()
        process.log.seek(0)
        text = process.log.read()
        with open(self.folder / "all.txt", "a") as everything:
            everything.write(text)
        return code, text

    def kill(self, process, pattern, when):
        """Ends the process of a run with a pattern in its command line, as soon as `when` holds."""
        while not when():
            demand(process.poll() is None, "the run ended before it could be killed", pathlib.Path(process.log.name).read_text())
            time.sleep(0.02)
        victims = [pid for pid, line in descendants(process).items() if re.search(pattern, line)]
        demand(len(victims) == 1, f"{len(victims)} processes instead of one are like {pattern}")
        os.kill(victims[0], signal.SIGKILL)

    def warm(self, text):
        """Nothing was compiled, and all kernels came with the program."""
        counts = re.findall(r"kernels: (\d+) came with the program, (\d+) were kept from before, (\d+) compiled now", text)
        demand(counts, "the program does not say where its kernels came from", text)
        demand(all(kept == compiled == "0" for _, kept, compiled in counts), "kernels did not come with the program", text)
        return sum(int(shipped) for shipped, _, _ in counts)

    def checks(self):
        say("quick, and the program is killed")
        run = self.start("quick")
        self.kill(run, r"gpu-check (?!.*--work)", lambda: len(items(self.quick, "end")) >= 5)
        code, text = self.end(run)
        demand(code != 0, "a run whose program was killed succeeded", text)
        finished = items(self.quick, "end")

        say("the same again: a process is killed while it works, and a kernel makes the card fail")
        run = self.start("quick", EMULATED_FAULT=FAULTY)
        # The lock of results is free only if nothing of the first run is left.
        self.kill(run, r"gpu-check .*--work", lambda: len(items(self.quick, "end")) >= len(finished) + 5)
        code, text = self.end(run)
        demand(code != 0, "a run with a kernel that made the card fail succeeded", text)
        shipped = self.warm(text)
        done, lost = items(self.quick, "end"), items(self.quick, "lost")
        demand(done[: len(finished)] == finished, "results of the killed run are gone", text)
        demand(len(set(done)) == len(done), "a piece of work was done twice", text)
        demand(sum(LOST not in item for item in lost) <= 1, f"one kill lost {lost}", text)
        demand(any(LOST in item for item in lost), f"the kernel that makes the card fail lost nothing: {lost}", text)
        report = json.loads((self.results / "quick.json").read_text())
        wrong = [check["what"] for check in report["checks"] if not check["passed"] and LOST not in check["what"]]
        demand(not wrong, f"wrong: {wrong}", text)
        demand(len(report["checks"]) >= len(done), "checks are missing in the report", text)
        say(f"{len(done)} pieces of work done, {len(lost)} lost, {shipped} kernels loaded in the last processes")

    def trainings(self):
        say("training, and it is killed in the second model")
        first, second = self.results / "train-softmax.json", self.results / "train-favor.json"
        run = self.start("training", STEPS="4")
        self.kill(run, r"bench train .*--attention favor", lambda: any("--attention favor" in line for line in descendants(run).values()))
        code, text = self.end(run)
        demand(code != 0 and first.exists() and not second.exists(), "a killed training did not leave the first alone", text)
        before = first.read_bytes()
        say("the same again")
        code, text = self.end(self.start("training", STEPS="4"))
        demand(code == 0 and first.read_bytes() == before and json.loads(second.read_text())["points"], "the training did not go on", text)
        self.warm(text)

    def damage(self):
        """Every kernel that came along is damaged; one is used."""
        say("damaged kernels")
        for kernel in (self.there / "kernels").iterdir():
            code = bytearray(kernel.read_bytes())
            code[len(code) // 2] ^= 1
            kernel.write_bytes(code)
        kept = self.folder / "kept"
        shutil.rmtree(kept, ignore_errors=True)

        def check(nvrtc):
            command = [self.there / "performer-lm", "gpu-check", "--device", "cuda", "--quick", "--only", "gelu f32", "--out", self.folder / "one.json"]
            run = subprocess.run(command, env=self.settings(nvrtc=nvrtc, PERFORMER_KERNELS=str(kept)), capture_output=True, text=True)
            return run.returncode, run.stdout + run.stderr

        code, text = check(nvrtc=False)
        demand(code != 0 and "NVRTC" in text and "damaged" in text, "a damaged kernel was used without NVRTC", text)
        code, text = check(nvrtc=True)
        demand(code == 0 and text.count("is damaged, and was not used") == 1, "a damaged kernel was not said once", text)
        demand("0 came with the program, 0 were kept from before, 1 compiled now" in text, "it was not compiled anew", text)
        (only,) = kept.iterdir()
        code, text = check(nvrtc=True)
        demand(code == 0 and "1 were kept from before, 0 compiled now" in text, "what was compiled is not kept", text)
        only.write_bytes(only.read_bytes()[:-1])
        code, text = check(nvrtc=True)
        demand(code == 0 and str(only) in text and "1 compiled now" in text, "a damaged file of the user's is used", text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path,
                        help="folder that keeps what was made; what an earlier rehearsal left there is replaced")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.out.resolve() if args.out else pathlib.Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        rehearsal = Rehearsal(folder)
        for stage in [rehearsal.make, rehearsal.checks, rehearsal.trainings, rehearsal.damage]:
            stage()
    say("all held")


if __name__ == "__main__":
    main()
