#!/usr/bin/env python3
"""Times whole training steps of performer-lm's presets in PyTorch, on random tokens.

    python3 scripts/torch_train.py --preset seed --against benchmarks/train/train.json > torch.json

On a GPU, beside `performer-lm bench train --preset stories15m --device cuda --dtype bf16 --json >
train.json`:

    python3 scripts/torch_train.py --preset stories15m --device cuda --dtype bf16 \\
        --against train.json > torch.json

Needs PyTorch (`pip install torch`). Prints JSON on stdout, with the ratio to the file of
`performer-lm bench train` where one is given, and progress on stderr. The model is written as one
writes it in PyTorch: scaled_dot_product_attention, or the chunked FAVOR+ of torch_attention.py; one
batch at a time; AdamW in its fused form; gradients clipped to norm 1; --compile gives all of it to
torch.compile. With --dtype bf16, weights stay f32 and autocast does the rest.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

from torch_attention import favor

# Beside this script in a folder of scripts/cuda-pack.sh, else where the repository has them.
HERE = pathlib.Path(__file__).resolve().parent
MODELS = next((p for p in (HERE / "models", HERE.parent / "models") if p.is_dir()), None)
if MODELS is None:
    sys.exit("there is no folder models beside this script or above it")


class Attention(nn.Module):
    def __init__(self, c, features):
        super().__init__()
        e, self.heads = c["hidden_size"], c["heads"]
        self.d = e // self.heads
        bias = c.get("bias", False)
        self.qkv = nn.Linear(e, 3 * e, bias=bias)
        self.o = nn.Linear(e, e, bias=bias)
        self.rotary = "rotary" in c["positions"]
        if self.rotary:
            base = c["positions"]["rotary"]["base"]
            angles = torch.outer(torch.arange(c["context"]), base ** (-torch.arange(0, self.d, 2) / self.d))
            self.register_buffer("cos", angles.cos())
            self.register_buffer("sin", angles.sin())
        self.omega = None if features is None else nn.Buffer(torch.randn(features, self.d))

    def turn(self, x):
        t = x.shape[-2]
        a, b = x.chunk(2, -1)
        cos, sin = self.cos[:t], self.sin[:t]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, x):
        b, t, e = x.shape
        q, k, v = (y.view(b, t, self.heads, self.d).transpose(1, 2) for y in self.qkv(x).split(e, 2))
        if self.rotary:
            q, k = self.turn(q), self.turn(k)
        if self.omega is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            # One chunk where the text is short, as PyTorch prefers it.
            out = favor(q, k, v, self.omega, True, chunk=t if t <= 128 else 64)
        return self.o(out.transpose(1, 2).reshape(b, t, e))


class Block(nn.Module):
    def __init__(self, c, features):
        super().__init__()
        e, inner, bias = c["hidden_size"], c["feed_forward_size"], c.get("bias", False)
        norm = nn.LayerNorm if c["norm"] == "layer-norm" else nn.RMSNorm
        self.first, self.second = norm(e), norm(e)
        self.pre = c["norm_position"] == "pre"
        self.attention = Attention(c, features)
        self.gate = nn.Linear(e, inner, bias=bias) if c["feed_forward"] == "swiglu" else None
        self.up, self.down = nn.Linear(e, inner, bias=bias), nn.Linear(inner, e, bias=bias)

    def feed_forward(self, x):
        inner = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        return self.down(inner)

    def forward(self, x):
        if self.pre:
            x = x + self.attention(self.first(x))
            return x + self.feed_forward(self.second(x))
        x = self.first(x + self.attention(x))
        return self.second(x + self.feed_forward(x))


class Decoder(nn.Module):
    def __init__(self, c, features):
        super().__init__()
        e, v = c["hidden_size"], c["vocab_size"]
        self.embed = nn.Embedding(v, e)
        self.positions = nn.Embedding(c["context"], e) if c["positions"] == "learned" else None
        self.blocks = nn.ModuleList(Block(c, features) for _ in range(c["layers"]))
        norm = nn.LayerNorm if c["norm"] == "layer-norm" else nn.RMSNorm
        # Blocks with the norm behind them end with one already.
        self.norm = norm(e) if c["norm_position"] == "pre" else nn.Identity()
        self.head = nn.Linear(e, v, bias=False)
        if c["tied_head"]:
            self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, ids, targets):
        x = self.embed(ids)
        if self.positions is not None:
            x = x + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


# What must be equal in two models whose speeds are compared.
SIZES = ["vocab_size", "hidden_size", "layers", "heads", "feed_forward_size", "context"]


def measure(c, batch, micro, features, steps, device, dtype, compiled):
    torch.manual_seed(1)
    model = Decoder(c, features).to(device)
    # Compiled in place, with the parameters that it has.
    if compiled:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    times = []
    for step in range(steps + 2):
        tokens = torch.randint(c["vocab_size"], (batch, c["context"] + 1), device=device)
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        for part in tokens.split(micro):
            with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=dtype == "bf16"):
                loss = model(part[:, :-1], part[:, 1:])
            (loss * (len(part) / batch)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        # The first two warm up.
        if step >= 2:
            times.append(time.perf_counter() - start)
    rate = batch * c["context"] / statistics.median(times)
    return rate, sum(p.numel() for p in model.parameters())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="seed", choices=sorted(p.parent.name for p in MODELS.glob("*/training.json")))
    parser.add_argument("--features", type=lambda s: [int(x) for x in s.split(",")], default=[64, 128])
    parser.add_argument("--batch-size", type=int, help="sequences of a step (the preset's)")
    parser.add_argument("--micro-batch", type=int, help="sequences of one pass (all of a step)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true", help="let torch.compile make the model's kernels")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--against", type=argparse.FileType(), action="append", default=[],
                        help="JSON of `performer-lm bench train` for the same preset; may be given several times")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    if args.threads:
        torch.set_num_threads(args.threads)
    c = json.loads((MODELS / args.preset / "config.json").read_text())
    batch = args.batch_size or json.loads((MODELS / args.preset / "training.json").read_text())["batch_size"]
    micro = args.micro_batch or batch
    reports = [json.load(file) for file in args.against]
    for file, report in zip(args.against, reports):
        theirs = report.get("config", {})
        if different := [key for key in SIZES if theirs.get(key) != c[key]]:
            parser.error(
                f"{file.name} is of another model than {args.preset}: they differ in {', '.join(different)}"
            )
    ours = {p["attention_spec"]: p["tokens_per_second"] for report in reports for p in report["points"]}
    points = []
    for features in [None, *args.features]:
        name = "softmax" if features is None else f"favor:m={features}"
        rate, params = measure(c, batch, micro, features, args.steps, args.device, args.dtype, args.compile)
        point = {"attention": name, "params": params, "tokens_per_second": rate}
        if name in ours:
            point["performer_lm_over_torch"] = ours[name] / rate
        print(f"{name}: {rate:.0f} tokens/s", file=sys.stderr)
        points.append(point)
    about = {"torch": torch.__version__, "threads": torch.get_num_threads(), "device": args.device, "dtype": args.dtype, "compile": args.compile}
    sizes = {"preset": args.preset, "batch_size": batch, "micro_batch": micro, "steps": args.steps}
    json.dump({"about": about, "sizes": sizes, "points": points}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
