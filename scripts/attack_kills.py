#!/usr/bin/env python3
"""Kill every command that writes at random moments, and see that nothing is lost.

    scripts/attack_kills.py --program target/release/performer-lm --kills 300

Each command runs once undisturbed, which gives what it should leave and how long it takes. Then it
runs again in another folder and is killed (SIGKILL) at a random moment, and again, until as many
kills are made as its share is. After each kill

- every file with a name of its own is whole: JSON parses, lines of a log parse but for the last,
  weights have the length that their header tells;
- a model that is there loads, and generates a token;

and at last the command runs to its end and must leave the same bytes as the undisturbed one. After
the kills come a full disk (a limit on the size of files, and a file system of 512 KiB where one can
be mounted), a folder that cannot be written to, and two processes in one folder. Everything happens
in a temporary folder, with settings so small that a command takes a second. An attack of kills ends
at the first thing that it finds, and the others go on. Prints a table of attacks, counts and results
in Markdown; if anything was found, the exit code is 1 and the temporary folder stays.
"""

import argparse
import collections
import http.server
import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time

SMALL = "--context 16 --batch-size 4 --vocab-size 300".split()

# Trainings of every kind: maps, learned and fitted ones, windows, gates, bf16, dropout, redraws.
TRAININGS = {
    "softmax": "--attention softmax",
    "favor, redrawn": "--attention favor:m=8 --redraw-every 3",
    "relu": "--attention favor:m=8,map=relu",
    "hyperbolic": "--attention favor:m=8,map=hyperbolic",
    "learned": "--attention favor:m=8,map=learned",
    "learned, window": "--attention favor:m=8,map=learned,window=4,sinks=1",
    "hedgehog": "--attention favor:m=8,map=hedgehog",
    "fitted": "--attention favor:m=8,map=dense --fit-every 5",
    "gated, all parts": "--attention favor:m=8,gate,conv,output-gate,output-norm",
    "bf16": "--attention favor:m=8 --dtype bf16",
    "dropout": "--attention favor:m=8 --dropout 0.2",
    "hybrid": "--attention favor:m=8+softmax/2",
}

FAST = "--steps 6 --context 40 --batch-size 2 --features 4 --vocab-size 300".split()


def sentences(seed, count):
    words = "the a hen dog sun moon ran sat saw ate old red big".split()
    draw = random.Random(seed)
    return [" ".join(draw.choice(words) for _ in range(12)) + f" {i}." for i in range(count)]


class SlowHub(http.server.BaseHTTPRequestHandler):
    """Serves the texts in `texts` by name, as the hub does, in pieces that take a second in all."""

    protocol_version = "HTTP/1.1"
    texts = {}

    def log_message(self, *_):
        pass

    def do_GET(self):
        body = self.texts[self.path.rpartition("/")[2]]
        first, last = re.match(r"bytes=(\d+)-(\d*)", self.headers["Range"]).groups()
        first, last = int(first), int(last or len(body) - 1)
        self.close_connection = True
        if first >= len(body):
            self.send_response(416)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        part = body[first : last + 1]
        self.send_response(206)
        for name, value in [
            ("Content-Length", len(part)),
            ("Content-Range", f"bytes {first}-{last}/{len(body)}"),
            ("ETag", f'"{len(body)}"'),
            ("X-Repo-Commit", "revision"),
        ]:
            self.send_header(name, str(value))
        self.end_headers()
        size = len(body) // 40 + 1
        try:
            for start in range(0, len(part), size):
                self.wfile.write(part[start : start + size])
                self.wfile.flush()
                time.sleep(0.025 if len(part) > 1 else 0)
        except OSError:
            pass  # Whom it was for was killed.


class Attack:
    # Address of the hub that texts are downloaded from; without one, nothing is downloaded.
    hub = None

    def __init__(self, program, work, kills, seed):
        self.program, self.work, self.kills = str(program), work, kills
        self.random = random.Random(seed)
        self.rows = collections.OrderedDict()
        self.found = []
        self.attacking = None
        (work / "data").mkdir()
        for name, count in [("train", 400), ("valid", 20)]:
            lines = "\n<|endoftext|>\n".join(sentences(name, count))
            (work / "data" / f"{name}.txt").write_text(lines)

    def command(self, args, cache="cache"):
        env = dict(os.environ, PERFORMER_CACHE=str(self.work / cache), HF_HUB_OFFLINE="1")
        if self.hub is not None:
            env.update(HF_HUB_OFFLINE="0", HF_ENDPOINT=self.hub, HF_HOME=str(self.work / cache / "hub"))
        return dict(args=[self.program, *map(str, args)], cwd=self.work, env=env)

    def run(self, args, cache="cache", **more):
        return subprocess.run(**self.command(args, cache), capture_output=True, text=True, **more)

    def must_run(self, args, cache="cache"):
        """Runs a command to its end. Whether it succeeded, as it must."""
        done = self.run(args, cache)
        if done.returncode != 0:
            self.finding(f"{' '.join(map(str, args))} failed: {done.stderr}")
        return done.returncode == 0

    def start(self, attack):
        print(f"{attack} ...", file=sys.stderr)
        self.attacking = attack
        self.rows[attack] = (0, "passed")

    def finding(self, what):
        print(f"FOUND: {what}", file=sys.stderr)
        self.found.append(what)
        number, _ = self.rows.get(self.attacking, (0, ""))
        self.rows[self.attacking] = (number, "failed")

    def count(self):
        number, result = self.rows[self.attacking]
        self.rows[self.attacking] = (number + 1, result)

    def kill(self, args, seconds, cache="cache"):
        """Starts a command and kills it after that time. Whether it was alive then."""
        process = subprocess.Popen(
            **self.command(args, cache), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            _, error = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            return True
        if process.returncode != 0:
            self.finding(f"{' '.join(map(str, args))} failed after a kill: {error}")
        return False

    # What must hold of a folder at any moment.

    def check_files(self, folder, what):
        for path in sorted(folder.rglob("*")) if folder.exists() else []:
            name = path.name
            # Files that wait for their name, and files that are being made, are nobody's yet.
            is_pending = name.endswith((".new", ".partial")) or name.startswith(".tmp")
            if not path.is_file() or is_pending or name == ".lock":
                continue
            try:
                self.check_file(path)
            except Exception as error:
                self.finding(f"{what}: {path.relative_to(self.work)} is half-written: {error}")

    def check_file(self, path):
        content = path.read_bytes()
        if path.suffix == ".json":
            json.loads(content)
        elif path.suffix == ".jsonl":
            for line in content.decode().split("\n")[:-1]:
                json.loads(line)
        elif path.suffix == ".safetensors":
            (length,) = struct.unpack("<Q", content[:8])
            header = json.loads(content[8 : 8 + length])
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            if max(ends, default=0) != len(content) - 8 - length:
                raise ValueError(f"{len(content)} bytes")
        elif path.suffix == ".bin":
            (tokens,) = struct.unpack("<Q", content[16:24])
            if content[:8] != b"PERFTOKS" or len(content) - 128 not in (2 * tokens, 4 * tokens):
                raise ValueError("it has another length than its header tells")

    def check_model(self, folder, what):
        if not (folder / "model.safetensors").exists():
            return
        used = self.run(["generate", folder, "--max-tokens", 1])
        if used.returncode != 0:
            self.finding(f"{what}: {folder.name} does not load: {used.stderr}")

    # The attacks.

    def attack(self, name, begin, go_on, outcome, kills, check=None, own_cache=False):
        """Kills a command `kills` times; it must leave what it leaves undisturbed.

        `begin` and `go_on` return the arguments for a folder: where nothing, or something, of the
        work is there. `outcome` reads what a folder must hold at the end; where the command writes
        to the cache, the cache is that folder. Ends at a finding, and leaves the folders as they are.
        """

        def cache(out):
            return out if own_cache else "cache"

        self.start(name)
        found = len(self.found)
        whole, timed, killed = [f"{out}-{len(self.rows)}" for out in ("whole", "timed", "killed")]
        if not self.must_run(begin(whole), cache(whole)):
            return
        expected = outcome(whole)
        made = 0
        while made < kills:
            started = time.monotonic()
            if not self.must_run(begin(timed), cache(timed)):
                return
            seconds = time.monotonic() - started
            # A command that goes on is killed up to six times before it may end.
            for attempt in range(6):
                args = go_on(killed) if attempt > 0 else begin(killed)
                if not self.kill(args, self.random.uniform(0, 1.05) * seconds, cache(killed)):
                    break
                made += 1
                self.count()
                self.check_files(self.work / killed, f"{name}, kill {made}")
                if check is not None:
                    check(self.work / killed, f"{name}, kill {made}")
                if len(self.found) > found:
                    break
            if len(self.found) == found and self.must_run(go_on(killed), cache(killed)):
                if outcome(killed) != expected:
                    self.finding(f"{name}: after {made} kills the result is another one")
            if len(self.found) > found:
                return
            for out in [timed, killed]:
                shutil.rmtree(self.work / out)
        shutil.rmtree(self.work / whole)

    def bytes_of(self, *names):
        return lambda out: [(self.work / out / name).read_bytes() for name in names]

    def trainings(self, kills):
        for name, options in TRAININGS.items():
            settings = ["--data", "data", *SMALL, *options.split(), "--max-steps", 12, "--save-every", 1]
            train = lambda out: ["train", *settings, "--out", out]

            def go_on(out):
                if (self.work / out / "train_state.json").exists():
                    return ["train", "--resume", out]
                return [*train(out), "--overwrite"]

            outcome = self.bytes_of("model.safetensors", "optimizer.safetensors", "config.json", "tokenizer.json")
            self.attack(f"train and resume: {name}", train, go_on, outcome, kills, self.check_model)

    def data(self, kills):
        prepare = lambda _: ["data", "prepare", "--data", "data", "--vocab-size", 300]

        def outcome(cache):
            files = [path for path in (self.work / cache).iterdir() if path.suffix in (".bin", ".json")]
            return {path.name: path.read_bytes() for path in files}

        self.attack("data prepare", prepare, prepare, outcome, kills, own_cache=True)

    def download(self, kills):
        names = "TinyStoriesV2-GPT4-train.txt", "TinyStoriesV2-GPT4-valid.txt"
        for name, seed, count in zip(names, (1, 2), (3000, 30)):
            SlowHub.texts[name] = "\n<|endoftext|>\n".join(sentences(seed, count)).encode()
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), SlowHub)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.hub = f"http://127.0.0.1:{server.server_port}"
        prepare = lambda _: ["data", "prepare", "--data", "tinystories", "--vocab-size", 300]

        def outcome(cache):
            texts = [next((self.work / cache).glob(f"hub/**/snapshots/*/{name}")).read_bytes() for name in names]
            if texts != [SlowHub.texts[name] for name in names]:
                self.finding(f"download: {cache} has another text than the hub")
            return texts

        self.attack("download", prepare, prepare, outcome, kills, own_cache=True)
        self.hub = None
        server.shutdown()

    def with_teacher(self):
        train = ["train", "--data", "data", *SMALL, "--attention", "softmax", "--max-steps", 3, "--out", "teacher"]
        self.attacking = "teacher"
        self.must_run(train)

    def convert(self, kills):
        tiny = "--transfer-steps 8 --tune-steps 8 --calibrate-tokens 64 --measure-tokens 64".split()
        convert = lambda out: ["convert", "teacher", "--attention", "favor:m=4,map=learned", "--data", "data", *tiny,
                               "--out", out]
        self.attack("convert", convert, convert, self.bytes_of("model.safetensors", "config.json"), kills,
                    self.check_model)

    def export(self, kills):
        export = lambda out: ["export", "teacher", "--out", out]
        again = lambda out: ["export", "teacher", "--out", out, "--overwrite"]
        names = "model.safetensors", "config.json", "tokenizer.json", "generation_config.json"
        self.attack("export", export, again, self.bytes_of(*names), kills, self.check_model)

    def compare(self, kills):
        compare = lambda out: ["compare", "--data", "data", *SMALL, "--attention", "softmax", "--attention",
                               "favor:m=4", "--seeds", "1", "--max-steps", 5, "--save-every", 1, "--out", out]

        def outcome(out):
            runs = sorted((self.work / out).glob("*/model.safetensors"))
            losses = [run["val_loss"] for run in json.loads((self.work / out / "compare.json").read_text())["runs"]]
            return [len(runs), losses, *(run.read_bytes() for run in runs)]

        self.attack("compare", compare, compare, outcome, kills)

    def ablate(self, kills):
        ablate = lambda out: ["lab", "ablate", "--data", "data", *FAST, "--out", out]

        def outcome(out):
            return losses_in(json.loads((self.work / out / "data.json").read_text()))

        self.attack("lab ablate", ablate, ablate, outcome, kills)

    def full_disk(self):
        """Limits the size of files that a process may write: beyond, it fails as on a full disk."""
        train = ["train", "--data", "data", *SMALL, "--attention", "favor:m=8", "--save-every", 1]
        self.start("disk full: limit on files")
        if not self.must_run([*train, "--max-steps", 2, "--out", "full"]):
            return
        size = (self.work / "full" / "model.safetensors").stat().st_size
        before = self.bytes_of("model.safetensors", "config.json")("full")
        for limit in [0, 100, 1000, size // 4, size - 1, size + 1]:
            for out, more in [("full", ["--overwrite"]), (f"empty-{limit}", [])]:

                def limited(limit=limit):
                    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

                done = self.run([*train, "--max-steps", 4, "--seed", 7, "--out", out, *more], preexec_fn=limited)
                what = f"files of at most {limit} bytes"
                self.judge_failure(what, done)
                self.check_files(self.work / out, what)
                self.check_model(self.work / "full", what)
        if self.bytes_of("model.safetensors", "config.json")("full") != before:
            self.finding("disk full: the model that was there is another one")

    def small_disk(self):
        self.start("disk full: file system of 512 KiB")
        disk = self.work / "disk"
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)]
        if subprocess.run(mount, capture_output=True).returncode != 0:
            self.rows[self.attacking] = (0, "left out: nothing can be mounted here")
            return
        try:
            train = ["train", "--data", "data", *SMALL, "--attention", "favor:m=8", "--save-every", 1]
            for more in [["--out", "disk/run"], ["--out", "disk/run", "--overwrite"]]:
                done = self.run([*train, "--max-steps", 4, *more])
                self.judge_failure("a small disk", done)
                self.check_files(disk, "a small disk")
            self.start("read-only file system")
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
            done = self.run([*train, "--max-steps", 4, "--out", "disk/other"])
            self.judge_failure("a read-only disk", done)
        finally:
            subprocess.run(["umount", str(disk)], check=True)

    def judge_failure(self, what, done):
        self.count()
        if done.returncode != 1 or "panicked" in done.stderr or "error:" not in done.stderr:
            self.finding(f"{what}: exit code {done.returncode}: {done.stderr[-400:]}")

    def two_processes(self, times):
        train = ["train", "--data", "data", *SMALL, "--attention", "softmax", "--max-steps", 40, "--save-every", 1]
        self.start("two processes in one folder")
        if not self.must_run([*train, "--out", "alone"]):
            return
        expected = self.bytes_of("model.safetensors")("alone")
        for i in range(times):
            out = f"shared{i}"
            first = subprocess.Popen(**self.command([*train, "--out", out]), stdout=subprocess.DEVNULL,
                                     stderr=subprocess.DEVNULL)
            while not (self.work / out / "model.safetensors").exists() and first.poll() is None:
                time.sleep(0.005)
            second = self.run([*train, "--out", out, "--overwrite"])
            ended = first.poll() is not None
            first.wait()
            self.count()
            if not ended and (second.returncode != 1 or "another process works" not in second.stderr):
                self.finding(f"two processes: the second ended with {second.returncode}: {second.stderr[-300:]}")
            if first.returncode != 0 or self.bytes_of("model.safetensors")(out) != expected:
                self.finding("two processes: the first did not end as it does alone")

    def all(self):
        share = max(1, self.kills // 30)
        self.trainings(share + share // 2)
        self.data(2 * share)
        self.download(2 * share)
        self.with_teacher()
        self.convert(4 * share)
        self.export(2 * share)
        self.compare(3 * share)
        self.ablate(3 * share)
        self.full_disk()
        self.small_disk()
        self.two_processes(5)

    def report(self):
        print("| attack | count | result |\n|---|---|---|")
        for attack, (count, result) in self.rows.items():
            print(f"| {attack} | {count} | {result} |")
        kills = sum(count for attack, (count, _) in self.rows.items() if not attack.startswith(("disk", "read", "two")))
        print(f"\n{kills} kills, {len(self.found)} findings")


# What --only may name.
ATTACKS = ["trainings", "data", "download", "convert", "export", "compare", "ablate", "full_disk", "small_disk", "two_processes"]


def losses_in(value):
    """Every number under a key with "loss" in it, in order."""
    if isinstance(value, dict):
        own = [entry for key, entry in sorted(value.items()) if "loss" in key]
        return own + [found for _, entry in sorted(value.items()) for found in losses_in(entry)]
    if isinstance(value, list):
        return [found for entry in value for found in losses_in(entry)]
    return []


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=pathlib.Path, default="target/release/performer-lm")
    parser.add_argument("--kills", type=int, default=300, help="kills in all, about (default: 300)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=ATTACKS, help="one attack")
    args = parser.parse_args()
    program = args.program.resolve()
    if not program.exists():
        raise SystemExit(f"there is no {program}: cargo build --release -p performer-lm, or give --program")
    work = pathlib.Path(tempfile.mkdtemp(prefix="attack-kills-"))
    attack = Attack(program, work, args.kills, args.seed)
    try:
        if args.only in ("convert", "export"):
            attack.with_teacher()
        if args.only is None:
            attack.all()
        elif args.only in ("full_disk", "small_disk"):
            getattr(attack, args.only)()
        elif args.only == "two_processes":
            attack.two_processes(5)
        else:
            getattr(attack, args.only)(args.kills)
    finally:
        attack.report()
        if attack.found:
            print(f"what the attacks left is in {work}", file=sys.stderr)
        else:
            shutil.rmtree(work)
    sys.exit(1 if attack.found else 0)


if __name__ == "__main__":
    main()
