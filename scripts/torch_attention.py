#!/usr/bin/env python3
"""Times PyTorch's scaled_dot_product_attention and a plain chunked FAVOR+ at the shapes of `performer-lm bench attention`.

    python3 scripts/torch_attention.py > torch.json
    performer-lm bench attention --against torch.json

Needs PyTorch (`pip install torch`). Prints JSON on stdout and progress on stderr. The FAVOR+ is what one writes in PyTorch
without kernels of one's own: chunks of 64 tokens, one maximum over all keys as stabiliser (which lets the future into the past by
rounding; it is here for its speed), prefix sums over chunks by cumsum.
"""

import argparse
import json
import sys
import time

import torch


def favor(q, k, v, omega, causal, chunk=64):
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


def measure(work, seconds, synchronize):
    work()
    synchronize()
    runs, begun = [], time.perf_counter()
    while len(runs) < 5 or time.perf_counter() - begun < seconds:
        start = time.perf_counter()
        work()
        synchronize()
        runs.append((time.perf_counter() - start) * 1e3)
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
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    synchronize = torch.cuda.synchronize if args.device.startswith("cuda") else lambda: None
    causal = not args.bidirectional
    points = []
    for t in args.tokens:
        q, k, v, g = (torch.randn(args.batch, args.heads, t, args.head_dim, device=args.device) for _ in range(4))
        work = [("torch-sdpa", None, lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal))]
        for m in args.features:
            omega = torch.randn(m, args.head_dim, device=args.device)
            work.append(("torch-favor", m, lambda q, k, v, omega=omega: favor(q, k, v, omega, causal)))
        for name, m, attention in work:
            print(f"{name} {m or ''} {t} tokens", file=sys.stderr)
            for backward in (False, True):
                x = [t.detach().requires_grad_(backward) for t in (q, k, v)]

                def run():
                    if not backward:
                        with torch.no_grad():
                            attention(*x)
                    else:
                        attention(*x).backward(g)
                        for t in x:
                            t.grad = None

                timing = measure(run, args.milliseconds / 1e3, synchronize)
                points.append({"implementation": name, "tokens": t, "features": m, "backward": backward, **timing})
    sweep = {"head_dim": args.head_dim, "batch": args.batch, "heads": args.heads, "causal": causal}
    about = {"torch": torch.__version__, "threads": torch.get_num_threads(), "device": args.device}
    json.dump({"sweep": sweep, "about": about, "points": points}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
