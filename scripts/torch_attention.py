#!/usr/bin/env python3
"""Times PyTorch's attention and a plain chunked FAVOR+ as `performer-lm bench attention` does.

    python3 scripts/torch_attention.py > torch.json
    performer-lm bench attention --against torch.json

On a GPU, at the sizes of `performer-lm gpu-check`, beside which it runs:

    python3 scripts/torch_attention.py --device cuda --dtype bf16 --heads 64 \\
        --tokens 512,1024,2048,4096,8192,16384 > torch.json

There scaled_dot_product_attention is held to FlashAttention (--sdpa), and inputs change from run to
run, so that no cache holds them.

Needs PyTorch (`pip install torch`). Prints JSON on stdout and progress on stderr. The FAVOR+ is
what one writes in PyTorch without kernels of one's own: chunks of 64 tokens, one maximum over all
keys as stabiliser (which lets the future into the past by rounding; it is here for its speed),
prefix sums over chunks by cumsum. --compile gives that FAVOR+ to torch.compile, once for each
shape; scaled_dot_product_attention is one kernel already.
"""

import argparse
import contextlib
import itertools
import json
import sys
import time

import torch


# Tokens of a chunk of causal FAVOR+.
CHUNK = 64


def favor(q, k, v, omega, causal, chunk=CHUNK):
    d = q.shape[-1]
    x, y = q * d**-0.25, k * d**-0.25
    lq, lk = x @ omega.T, y @ omega.T - 0.5 * (y * y).sum(-1, keepdim=True)
    phi_q = torch.exp(lq - lq.detach().amax(-1, keepdim=True))
    phi_k = torch.exp(lk - lk.detach().amax((-2, -1), keepdim=True))
    if not causal:
        sums = phi_k.transpose(-1, -2) @ v
        return (phi_q @ sums) / (phi_q @ phi_k.sum(-2).unsqueeze(-1))
    b, h, t, m = phi_q.shape
    chunk = min(chunk, t)
    assert t % chunk == 0, f"{t} tokens are not whole chunks of {chunk}"
    v1 = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    phi_q, phi_k = (x.view(b, h, t // chunk, chunk, m) for x in (phi_q, phi_k))
    v1 = v1.view(b, h, t // chunk, chunk, d + 1)
    sums = phi_k.transpose(-1, -2) @ v1
    before = sums.cumsum(2) - sums
    inside = torch.tril(phi_q @ phi_k.transpose(-1, -2))
    both = (phi_q @ before + inside @ v1).view(b, h, t, d + 1)
    return both[..., :d] / both[..., d:]


def quantile(values, share):
    values = sorted(values)
    return values[round((len(values) - 1) * share)]


def measure(work, seconds, on_gpu):
    """The times of some work, by the GPU's own clock where there is one; there, short work is repeated
    between two looks at it."""

    def sample(repeats):
        if on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(repeats):
                work()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / repeats
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - start) * 1e3 / repeats

    sample(1)
    once = sample(1)
    # As performer-lm times the CPU: one run at a time.
    repeats = min(max(int(5 / once), 1), 200) if on_gpu else 1
    runs, begun = [], time.perf_counter()
    while len(runs) < 5 or time.perf_counter() - begun < seconds:
        runs.append(sample(repeats))
    return {
        "median_ms": quantile(runs, 0.5),
        "quartiles_ms": [quantile(runs, 0.25), quantile(runs, 0.75)],
        "runs": len(runs),
    }


def main():
    numbers = lambda text: [int(x) for x in text.split(",")]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=numbers, default=[256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--features", type=numbers, default=[64, 128, 256])
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--bidirectional", action="store_true")
    parser.add_argument("--milliseconds", type=int, default=400)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["f32", "bf16", "f16"], default="f32")
    parser.add_argument("--compile", action="store_true", help="let torch.compile make the kernels of FAVOR+")
    parser.add_argument("--sdpa", choices=["flash", "any"], help="implementation [default: flash on a GPU in bf16 or f16, else any]")
    args = parser.parse_args()
    if not args.bidirectional and any(t > CHUNK and t % CHUNK for t in args.tokens):
        parser.error(f"--tokens: lengths above {CHUNK} must be multiples of {CHUNK}, the chunk of causal FAVOR+")
    if args.threads:
        torch.set_num_threads(args.threads)
    on_gpu = args.device.startswith("cuda")
    if on_gpu and not torch.cuda.is_available():
        raise SystemExit("PyTorch finds no CUDA device: see nvidia-smi, and whether this PyTorch was built with CUDA")
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[args.dtype]
    only_flash = (args.sdpa or ("flash" if on_gpu and args.dtype != "f32" else "any")) == "flash"
    backends = [torch.nn.attention.SDPBackend.FLASH_ATTENTION] if only_flash else None
    causal = not args.bidirectional
    linear = torch.compile(favor, dynamic=False) if args.compile else favor
    # One compilation for each length, number of features and direction.
    if args.compile:
        torch._dynamo.config.recompile_limit = 4 * len(args.tokens) * len(args.features)
    points = []
    for t in args.tokens:
        # More bytes than second-level caches hold, before any are read again.
        size = 4 * args.batch * args.heads * t * args.head_dim * dtype.itemsize
        sets = [
            [torch.randn(args.batch, args.heads, t, args.head_dim, device=args.device, dtype=dtype) for _ in range(4)]
            for _ in range(min(max((256 << 20) // size, 1), 64) if on_gpu else 1)
        ]
        work = [("torch-sdpa", None, lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal))]
        for m in args.features:
            omega = torch.randn(m, args.head_dim, device=args.device, dtype=dtype)
            work.append(("torch-favor", m, lambda q, k, v, omega=omega: linear(q, k, v, omega, causal)))
        for name, m, attention in work:
            print(f"{name} {m or ''} {t} tokens", file=sys.stderr)
            for backward in (False, True):
                for tensors in sets:
                    for x in tensors[:3]:
                        x.requires_grad_(backward)
                following = itertools.cycle(sets)

                def run():
                    *x, gradient = next(following)
                    if not backward:
                        with torch.no_grad():
                            attention(*x)
                    else:
                        attention(*x).backward(gradient)
                        for tensor in x:
                            tensor.grad = None

                with torch.nn.attention.sdpa_kernel(backends) if backends else contextlib.nullcontext():
                    timing = measure(run, args.milliseconds / 1e3, on_gpu)
                points.append({"implementation": name, "tokens": t, "features": m, "backward": backward, **timing})
    sweep = {"head_dim": args.head_dim, "batch": args.batch, "heads": args.heads, "causal": causal}
    about = {"torch": torch.__version__, "threads": torch.get_num_threads(), "device": torch.cuda.get_device_name() if on_gpu else args.device}
    about |= {"dtype": args.dtype, "sdpa": "flash" if only_flash else "any", "compile": args.compile}
    json.dump({"sweep": sweep, "about": about, "points": points}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
