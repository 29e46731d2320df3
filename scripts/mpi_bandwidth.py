#!/usr/bin/env python3
"""Measures training by processes that reach each other over slow networks, beside the model of its
time: on one Linux machine, as root, with OpenMPI, ip and tc.

    scripts/mpi_bandwidth.py target/debug/performer-lm [--out benchmarks/several-machines]

Each process lives in a network namespace of its own, joined to the others by a bridge; what leaves
a namespace is held to a number of bits a second. A step's time is that between two lines of the
run's log, the median of several; its bytes are those that the kernel counted on the way out of all
namespaces. The model: the time of a step without a limit, and all of these bytes divided by the
bandwidth, as if one message always waited for the other.
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

SWITCH = "pf-switch"
RATES = [None, 100, 30, 10]  # megabits a second
SKIPPED, STEPS = 3, 12
TRAIN = "train --data sample --preset seed --vocab-size 300 --eval-every 1000000 --save-every 1000000 --threads 1".split()
# What is run: on how many processes, with what options.
CASES = {
    "batch over 2": (2, "--attention favor:m=64 --context 64 --batch-size 4 --micro-batch 2"),
    "batch over 4": (4, "--attention favor:m=64 --context 64 --batch-size 4 --micro-batch 1"),
    "favor over 4": (4, "--attention favor:m=64 --context 1024 --batch-size 1 --micro-batch 1 --sequence-parallel 4"),
}


def sh(command, check=True):
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    if check and done.returncode != 0:
        sys.exit(f"{command} failed:\n{done.stderr}")
    return done.stdout


def space(i):
    return f"pf-rank{i}"


def tear_down(count):
    for name in [SWITCH, *map(space, range(count))]:
        sh(f"ip netns del {name}", check=False)


def set_up(count):
    tear_down(count)
    sh(f"ip netns add {SWITCH} && ip -n {SWITCH} link add br0 type bridge && ip -n {SWITCH} link set br0 up")
    for i in range(count):
        sh(f"ip netns add {space(i)} && ip -n {space(i)} link set lo up")
        sh(f"ip -n {space(i)} link add eth0 type veth peer name port{i} netns {SWITCH}")
        sh(f"ip -n {SWITCH} link set port{i} master br0 up")
        sh(f"ip -n {space(i)} addr add 10.99.0.{i + 1}/24 dev eth0 && ip -n {space(i)} link set eth0 up")


def limit(count, rate):
    for i in range(count):
        sh(f"ip netns exec {space(i)} tc qdisc del dev eth0 root", check=False)
        if rate:
            sh(f"ip netns exec {space(i)} tc qdisc add dev eth0 root tbf rate {rate}mbit burst 32kb latency 2s")


def sent(count):
    """Bytes that have left all namespaces."""
    path = "/sys/class/net/eth0/statistics/tx_bytes"
    return sum(int(sh(f"ip netns exec {space(i)} cat {path}")) for i in range(count))


def measure(program, count, options, folder, agent):
    """Seconds and bytes of a step."""
    hosts = ",".join(f"10.99.0.{i + 1}:1" for i in range(count))
    out = pathlib.Path(folder) / "run"
    steps = SKIPPED + STEPS
    command = [
        "ip", "netns", "exec", space(0), "mpirun", "--allow-run-as-root", "--bind-to", "none", "--host", hosts,
        "--mca", "plm_rsh_agent", agent, "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "eth0",
        "--mca", "oob_tcp_if_include", "eth0", "-n", str(count), "-x", "PERFORMER_CACHE", program, *TRAIN,
        *options.split(), "--max-steps", str(steps), "--overwrite", "--out", str(out),
    ]
    out.mkdir(exist_ok=True)
    log = out / "metrics.jsonl"
    log.unlink(missing_ok=True)
    environment = dict(os.environ, PERFORMER_CACHE=str(pathlib.Path(folder) / "cache"))
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    times, first, last = [], None, None
    while len(times) < steps and process.poll() is None:
        lines = log.read_text().count("train_loss") if log.exists() else 0
        if lines > len(times):
            times += [time.monotonic()] * (lines - len(times))
            if first is None and lines >= SKIPPED:
                first = (lines, sent(count))
            last = (lines, sent(count))
        time.sleep(0.002)
    said, _ = process.communicate()
    if process.returncode != 0 or len(times) < steps:
        sys.exit(f"{' '.join(command)}\n{said}")
    seconds = statistics.median(b - a for a, b in zip(times[SKIPPED - 1:], times[SKIPPED:]))
    return seconds, (last[1] - first[1]) / (last[0] - first[0])


def machine():
    names = [line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    # Not every processor's file has its name.
    name = names[0] if names else platform.machine()
    return f"{os.cpu_count()} cores of an {name}; {sh('mpirun --version').splitlines()[0]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    # What may fail comes before an hour of measuring.
    measured = machine()
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    most = max(count for count, _ in CASES.values())
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        agent = pathlib.Path(folder) / "agent"
        # Takes the place of ssh: a host is a namespace, with a name of its own.
        agent.write_text(
            '#!/bin/sh\nhost=$1; shift; i=$((${host##*.} - 1))\n'
            'exec ip netns exec pf-rank$i unshare -u sh -c "hostname pf-rank$i; $*"\n'
        )
        agent.chmod(0o755)
        try:
            set_up(most)
            for case, (count, arguments) in CASES.items():
                for rate in RATES:
                    limit(most, rate)
                    seconds, size = measure(str(options.program.resolve()), count, arguments, folder, str(agent))
                    if rate is None:
                        alone = seconds
                    modelled = alone + (8e-6 * size / rate if rate else 0)
                    name = f"{case}, {f'{rate} Mbit/s' if rate else 'no limit'}"
                    revision = json.loads((pathlib.Path(folder) / "run" / "metrics.json").read_text())["revision"]
                    rows.append({"case": name, "seconds": seconds, "modelled_seconds": modelled, "bytes": size})
                    print(f"{name:>26}: {seconds:7.3f} s, {modelled:7.3f} s by the model, {size:10,.0f} bytes a step", flush=True)
        finally:
            tear_down(most)
    if options.out:
        found = {"machine": measured, "revision": revision, "steps": rows}
        (options.out / "namespaces.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
