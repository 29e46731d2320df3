#!/usr/bin/env python3
"""What a card has to do for each of FAVOR's CUDA kernels, from their machine code for Hopper:
`cuda_report.py > benchmarks/cuda-kernels/kernels.json`, and a table on stderr. No card is needed.

Each kernel is compiled by NVRTC and taken apart by nvdisasm. Counted is the loop with the most
products, which goes over chunks of tokens; paths in it that are seldom taken are counted as well.
From that follow three times a token and head that no run can fall below on an H100: that of
issuing the loop's instructions, that of its products at the tensor cores' highest rate, and that
of reading and writing each tensor once. The largest of the three is the kernel's floor.

Needs libnvrtc.so.13 where the system looks for libraries (scripts/cuda-check.sh fetches it, and
says where), and nvdisasm on the path (Python package nvidia-cuda-nvdisasm).
"""

import ctypes
import json
import re
import subprocess
import sys
import tempfile

import nvrtc_check
from nvrtc_check import CRATES, LIST

ARCH = "sm_90a"
# H100 SXM: multiprocessors, clock in Hz while it computes, bytes a second of its memory.
MULTIPROCESSORS, CLOCK, BANDWIDTH = 132, 1.755e9, 3.35e12
SCHEDULERS = 4
# Operations a multiprocessor does in a clock: of bf16, of TF32.
BF16_RATE, TF32_RATE = 4096, 2048

SIZES = "DIM=64 FEATURES=128 VALUES=64"
# Bytes a token and head that a kernel reads and writes once, in numbers of 64 and of 1.
TENSORS = {
    "forward": (4, 1),  # q, k, v, out; logarithms
    "sums": (2, 1),
    "query_gradients": (5, 2),  # q, k, v, gradient of out, dq
    "key_gradients": (6, 2),
}


def compile_to_cubin(library, path, macros):
    """Returns the machine code and the compiler's log."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    included = nvrtc_check.headers(path, {})
    strings = lambda items: (ctypes.c_char_p * max(len(items), 1))(*[item.encode() for item in items])
    names, texts = list(included), list(included.values())
    library.nvrtcCreateProgram(
        ctypes.byref(program), path.read_text().encode(), path.name.encode(), len(names), strings(texts), strings(names)
    )
    options = [f"--gpu-architecture={ARCH}", "--std=c++17", "--ptxas-options=-v"]
    options += [f"--define-macro={macro}" for macro in macros]
    if library.nvrtcCompileProgram(program, len(options), strings(options)) != 0:
        raise SystemExit(f"{path.name} {' '.join(macros)} does not compile")
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    library.nvrtcGetCUBIN(program, code)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw, log.value.decode()


def instructions(code):
    """The instructions of each kernel by name, and the places of its labels."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = ["nvdisasm", "-c", file.name]
        try:
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except OSError as error:
            raise SystemExit(
                f"nvdisasm cannot be started: {error.strerror}; "
                "put that of the Python package nvidia-cuda-nvdisasm on the path"
            ) from error
    kernels, current, labels = {}, [], {}
    for line in text.splitlines():
        if section := re.match(r"^\s*\.section\s+\.text\.(\w+)", line):
            current, labels = kernels.setdefault(section[1], ([], {}))
        elif label := re.match(r"^(\.L_\S+?):", line):
            labels[label[1]] = len(current)
        elif found := re.match(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)(.*);", line):
            current.append((found[1], found[2]))
    return kernels


def operations(name):
    """Operations of a product by a warp, and how many of them a multiprocessor does in a clock."""
    if group := re.match(r"HGMMA\.64x(\d+)x16", name):
        return 16 * int(group[1]) * 16 * 2, BF16_RATE
    if name.startswith("HMMA.16816"):
        return 16 * 8 * 16 * 2, BF16_RATE
    if name.startswith("HMMA.1688"):
        return 16 * 8 * 8 * 2, TF32_RATE
    return 0, 1


def loop_of(found):
    """The instructions between a label and a branch back to it, of which most are products."""
    code, labels = found
    best = []
    for i, (name, rest) in enumerate(code):
        target = re.search(r"\((\.L_\S+?)\)", rest) if name.startswith("BRA") else None
        if target and labels.get(target[1], len(code)) <= i:
            loop = [name for name, _ in code[labels[target[1]] : i + 1]]
            products = lambda names: sum(operations(name)[0] > 0 for name in names)
            if (products(loop), -len(loop)) > (products(best), -len(best)):
                best = loop
    return best


def picoseconds(clocks_a_token):
    return clocks_a_token / CLOCK / MULTIPROCESSORS * 1e12


def main():
    library = nvrtc_check.Nvrtc().library
    rows = []
    for name, macros, only in nvrtc_check.variants(LIST.read_text()):
        chosen = dict(macro.split("=") for macro in macros)
        # One variant of each kernel: causal, features computed in it, by a projection that is exact
        # or by rows that keys have of their own.
        if not ("/favor_" in name and SIZES in " ".join(macros) and chosen.get("CAUSAL") == "1" and chosen["MAP"] in "03"):
            continue
        own_keys = chosen["MAP"] == "3"
        if chosen.get("EXACT") == "0" or chosen.get("LOGS") == "1" or chosen.get("PARTIAL") == "1":
            continue
        if only not in (None, ARCH) or chosen["STORAGE"] == "1":
            continue
        half = chosen["STORAGE"] == "2"
        if half and "bf16" not in name and not own_keys:
            continue
        code, log = compile_to_cubin(library, CRATES / name, macros)
        usage = {kernel: numbers for kernel, *numbers in nvrtc_check.usage(log)}
        for kernel, found in instructions(code).items():
            loop, work = loop_of(found), next((w for w in TENSORS if kernel.endswith(w)), None)
            if work is None:
                continue
            warps = 4 if "bf16" in kernel else 8
            tokens = int(chosen["CHUNK"])
            products = [operations(name) for name in loop if operations(name)[0]]
            wide, single = TENSORS[work]
            times = {
                "issue": picoseconds(len(loop) * warps / SCHEDULERS / tokens),
                "products": picoseconds(sum(n / rate for n, rate in products) * warps / tokens),
                "memory": (wide * 64 * (2 if half else 4) + single * 4) / BANDWIDTH * 1e12,
            }
            registers, _, _, stored, loaded = usage[kernel]
            rows.append({
                "kernel": kernel + (" (queries)" if chosen.get("QUERIES") == "1" else ""),
                "dtype": "bf16" if half else "f32",
                "gated": chosen["GATED"] == "1",
                "own_keys": own_keys,
                "metric": chosen.get("METRIC") == "1",
                "warpgroups": chosen.get("WGMMA") == "1",
                "registers": registers,
                "spilled_bytes": [stored, loaded],
                "instructions": len(loop),
                "products": len(products),
                "exponentials": sum(name.startswith("MUFU") for name in loop),
                "loads_of_factors": sum(name.startswith(("LDSM", "LDG")) for name in loop),
                "picoseconds": {of: round(time) for of, time in times.items()},
                "floor_picoseconds": round(max(times.values())),
            })
    print(json.dumps({"architecture": ARCH, "sizes": SIZES, "kernels": rows}, indent=1))
    for row in rows:
        marks = "".join(f" {mark}" for mark in ("gated", "warpgroups", "own_keys", "metric") if row[mark])
        print(f"{row['kernel'] + marks:48} {row['dtype']:5} {row['registers']:4} {row['spilled_bytes']!s:13} "
              f"{row['instructions']:6} {row['products']:5} {row['picoseconds']} {row['floor_picoseconds']}", file=sys.stderr)


if __name__ == "__main__":
    main()
