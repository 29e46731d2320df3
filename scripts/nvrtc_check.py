#!/usr/bin/env python3
"""Compiles every CUDA kernel with NVRTC, which needs no GPU: `nvrtc_check.py sm_80 sm_90a`.

What is compiled is in crates/performer-core/src/kernels/cuda/kernels.txt. Prints the most
registers, static shared memory, stack and spills that each kernel needs in any variant, and the
variants with spills; fails if one does not compile, or if a .cu file is not in the list. Needs
libnvrtc.so.13 and its builtins where the system looks for libraries.
"""

import ctypes
import functools
import itertools
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

CRATES = Path(__file__).resolve().parent.parent / "crates"
LIST = CRATES / "performer-core/src/kernels/cuda/kernels.txt"


def variants(text):
    """Each line `FILE NAME=a,b OTHER=c` gives FILE with every combination of values, and the
    architecture that `only=` names, if it does."""
    for line in text.splitlines():
        words = line.split("#")[0].split()
        if not words:
            continue
        names, values, only = [], [], None
        for word in words[1:]:
            name, _, value = word.partition("=")
            if name == "only":
                only = value
                continue
            names.append(name)
            values.append(value.split(","))
        for chosen in itertools.product(*values):
            yield words[0], [f"{n}={v}" for n, v in zip(names, chosen)], only


def headers(path, found):
    """Files that a source includes, and those they include, by the name it calls them."""
    for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE):
        if name not in found:
            file = next((f for f in (path.parent / name, LIST.parent / name) if f.exists()), None)
            if file is None:
                raise SystemExit(f"{path}: there is no {name} to include")
            found[name] = file.read_text()
            headers(file, found)
    return found


class Nvrtc:
    def __init__(self):
        try:
            self.library = ctypes.CDLL("libnvrtc.so.13")
        except OSError as error:
            raise SystemExit(f"NVRTC cannot be loaded ({error}): run scripts/cuda-check.sh, which fetches it")

    def compile(self, path, macros, arch):
        """Whether it compiles, and the compiler's log."""
        program = ctypes.c_void_p()
        included = headers(path, {})
        strings = lambda items: (ctypes.c_char_p * max(len(items), 1))(*[item.encode() for item in items])
        self.library.nvrtcCreateProgram(
            ctypes.byref(program),
            path.read_text().encode(),
            str(path.relative_to(CRATES)).encode(),
            len(included),
            strings(list(included.values())),
            strings(list(included)),
        )
        options = [f"--gpu-architecture={arch}", "--std=c++17", "--ptxas-options=-v"]
        options += [f"--define-macro={macro}" for macro in macros]
        status = self.library.nvrtcCompileProgram(program, len(options), strings(options))
        size = ctypes.c_size_t()
        self.library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        self.library.nvrtcGetProgramLog(program, log)
        self.library.nvrtcDestroyProgram(ctypes.byref(program))
        return status == 0, log.value.decode()


@functools.cache
def library():
    return Nvrtc()


def compile_one(job):
    """Compiles a file with its macros for an architecture: whether it compiles, and the log."""
    name, macros, arch = job
    return library().compile(CRATES / name, macros, arch)


def usage(log):
    """Registers, static shared bytes, stack bytes, and spilled bytes (stored, loaded) by kernel."""
    for part in re.split(r"Compiling entry function ", log)[1:]:
        number = lambda pattern: int((re.search(pattern, part) or [0, 0])[1])
        yield (
            re.match(r"'([^']+)'", part)[1],
            number(r"Used (\d+) registers"),
            number(r"(\d+) bytes smem"),
            number(r"(\d+) bytes stack frame"),
            number(r"(\d+) bytes spill stores"),
            number(r"(\d+) bytes spill loads"),
        )


def main(archs):
    listed = list(variants(LIST.read_text()))
    paths = {str(path.relative_to(CRATES)) for path in CRATES.rglob("*.cu") if "tests" not in path.parts}
    failed = 0
    for unlisted in sorted(paths - {name for name, _, _ in listed}):
        print(f"{unlisted} is not in {LIST.relative_to(CRATES)}", file=sys.stderr)
        failed += 1
    jobs = [(name, macros, arch) for name, macros, only in listed for arch in ([only] if only else archs)]
    rows, spilling, kernels = {}, [], 0
    # Processes, since NVRTC compiles for one thread at a time.
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(compile_one, jobs)
        for (name, macros, arch), (compiled, log) in zip(jobs, results):
            if not compiled:
                print(f"{' '.join([name, *macros, arch])} does not compile:\n{log}", file=sys.stderr)
                failed += 1
            for kernel, *numbers in usage(log):
                rows.setdefault((name.split("/src/")[-1], kernel, arch), []).append(numbers)
                kernels += 1
                if numbers[3] + numbers[4] > 0:
                    spilling.append((kernel, numbers, macros, arch))
    print("most of all variants:")
    print(f"{'variants':>8} {'registers':>9} {'shared':>6} {'stack':>5} {'stored':>6} {'loaded':>6}  (stored and loaded: bytes spilled)")
    for (file, kernel, arch), seen in sorted(rows.items()):
        registers, shared, stack, stored, loaded = map(max, zip(*seen))
        print(f"{len(seen):8} {registers:9} {shared:6} {stack:5} {stored:6} {loaded:6}  {arch:6} {kernel} ({file})")
    for kernel, (registers, _, _, stored, loaded), macros, arch in spilling:
        print(f"spills {stored}/{loaded} bytes at {registers} registers: {kernel} {' '.join(macros)} {arch}")
    print(f"{kernels} kernels from {len(paths)} files, {len(spilling)} with spills, {failed} failures")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["sm_80", "sm_90a"]))
