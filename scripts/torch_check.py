#!/usr/bin/env python3
"""Compares scripts/performer_torch.py with the program, attention by attention.

    just torch-check                                     # models of every kind, with random weights
    scripts/torch_check.py PROGRAM LOGITS                # the same with what is built already
    scripts/torch_check.py PROGRAM LOGITS FOLDER...      # these models instead

PROGRAM is performer-lm, and LOGITS its example `logits`. Each model is run over a text. The table
has the largest difference between the program's logits and those of PyTorch, and between a whole
pass in PyTorch and one in steps of 1, 2, 3, ... tokens. Models with random weights are exported as
well, where a Hugging Face family is theirs, and other tokens in the second half of a text must
leave the logits of the first alone. The exit code is 1 if a difference to the program is above
1e-4, or one between steps and a whole pass above 1e-5 of the largest logit, or if an export fails
for another reason than that no family is the model's. Needs PyTorch.
"""

import json
import pathlib
import struct
import subprocess
import sys
import tempfile

import torch

import performer_torch
from performer_torch import TOLERANCE, Performer, Tensors, load

SAMPLE = pathlib.Path(__file__).resolve().parent.parent / "crates/performer-lm/assets/sample.txt"

LLAMA = {"feed_forward": "swiglu", "norm": "rms-norm", "tied_head": True, "kv_heads": 2}
QWEN2 = {**LLAMA, "qkv_bias": True, "tied_head": False}
STARCODER2 = {"feed_forward": "gelu-exact", "norm": "layer-norm", "bias": True, "head_dim": 6}
GPT2 = {"positions": "learned", "feed_forward": "gelu", "norm": "layer-norm", "bias": True}
POST = {"norm_position": "post", "norm": "layer-norm", "feed_forward": "gelu", "tied_head": False}

SOFTMAX = {"kind": "softmax"}
ALL = ("gate", "convolution", "output_gate", "output_norm", "mup_scale")

# The largest difference between steps and a whole pass that passes, as a share of the largest logit:
# both are PyTorch's, and round as numbers of that size do.
OF_STEPS = 1e-5

# What `export` says of a model that is of no Hugging Face family.
NO_FAMILY = "no Hugging Face architecture is this model"

# Maps of which few features can make denominators near zero, where any rounding shows.
SIGNED = ("trigonometric", "phase", "gaussian-phase", "hermite-tail")


def favor(name):
    features = 256 if name in SIGNED else 24
    return {"kind": "favor", "map": name, "features": features, "projection": "orthogonal", "radii": "chi"}


def windowed(name, window, sinks=0):
    far = favor(name)
    del far["kind"]
    return {"kind": "windowed", "window": window, "sinks": sinks, "far": far}


def near(window, sinks=0):
    return {"kind": "softmax-window", "window": window, "sinks": sinks}


def equipped(of, *parts):
    return {"kind": "equipped", "parts": {part: True for part in parts}, "of": of}


def narrow(of, key_dim, *parts):
    """With queries and keys of a dimension of their own."""
    return {"kind": "equipped", "parts": {**{part: True for part in parts}, "key_dim": key_dim}, "of": of}


def cases():
    """Names, attentions, those of single layers, and what else is in the configuration."""
    maps = ["positive", "hyperbolic", "trigonometric", "phase", "gaussian-phase", "relu", "elu", "exp", "taylor2"]
    maps += [{"limit": 2}, {"limit": 4}, "hermite-tail", "optimal", "dense", "learned", "hedgehog"]
    for name in maps:
        yield favor(name), {}, LLAMA
    for name in ("positive", "relu", "elu", "taylor2", "hermite-tail", "learned", "hedgehog"):
        yield equipped(favor(name), *ALL), {}, LLAMA
    for part in ALL:
        yield equipped(favor("positive"), part), {}, STARCODER2
    for attention in (favor("taylor2"), favor("positive"), favor("optimal"), windowed("learned", 13), near(17, 5), SOFTMAX):
        yield narrow(attention, 4, *ALL), {}, LLAMA
    yield SOFTMAX, {1: narrow(favor("taylor2"), 4), 2: narrow(near(9), 12, "convolution")}, QWEN2
    for name in ("positive", "hyperbolic", "elu", "exp", "optimal", "dense", "learned", "hedgehog"):
        yield windowed(name, 13), {}, LLAMA
    yield windowed("learned", 200, 3), {}, QWEN2
    yield equipped(windowed("learned", 32, 4), *ALL), {}, LLAMA
    yield equipped(windowed("positive", 130, 2), "gate"), {}, STARCODER2
    for attention in (SOFTMAX, near(32), near(17, 5), {"kind": "uniform"}):
        yield attention, {}, LLAMA
        yield equipped(attention, *ALL), {}, LLAMA
    yield {"kind": "none"}, {}, LLAMA
    yield favor("learned"), {}, GPT2
    yield narrow(favor("positive"), 6), {}, GPT2
    yield favor("positive"), {}, {**GPT2, "head_dim": 10}
    yield windowed("learned", 20), {}, POST
    yield SOFTMAX, {1: equipped(favor("relu"), "gate"), 2: windowed("dense", 9)}, GPT2


def config_of(attention, by_layer, more):
    config = {
        "vocab_size": 300, "hidden_size": 32, "layers": 3, "heads": 4, "kv_heads": 4, "feed_forward_size": 48,
        "context": 512, "norm_position": "pre", "positions": {"rotary": {"base": 10000.0}}, "tied_head": True,
        "bias": False, "dropout": 0.0, "attention": attention,
    }
    if by_layer:
        config["attention_by_layer"] = {str(layer): own for layer, own in by_layer.items()}
    return {**config, **more}


class Invented(Tensors):
    """Tensors of whatever names and shapes a model asks for, so large that a part which is left out
    or wrong shows in the logits."""

    def __init__(self, config, seed):
        super().__init__({})
        self.made, self.config = {}, config
        self.random = torch.Generator().manual_seed(seed)

    def take(self, name, *shape, optional=False):
        # One set of numbers for all key heads, or one for each.
        heads = 1 if "optimal" in json.dumps(self.config["attention"]) else self.config["kv_heads"]
        shape = [heads if isinstance(n, tuple) else n for n in shape]
        numbers = torch.randn(shape, generator=self.random)
        part = name.rsplit(".", 2)[-2:]
        if "norm" in part[0] and part[1] == "weight":
            numbers = 1 + numbers / 4
        elif part == ["gate", "bias"]:
            numbers = 2 + 2 * numbers
        elif part[1] == "bias" or part[1] == "log_weights":
            numbers = numbers / 2
        elif part[1].endswith("_metric"):
            numbers = torch.eye(shape[-1]) + numbers / 4
        elif part[1] == "offsets":
            numbers = torch.rand(shape, generator=self.random) * 6.28
        elif part[1] == "weight" and "embed" not in part[0] and "conv1d" not in part[0]:
            gain = 0.5 if part[0] in ("q_proj", "k_proj") else 1.0
            numbers = numbers * gain / shape[-1] ** 0.5
        self.made[name] = numbers
        return numbers


def write(folder, config, tensors, tokenizer):
    """Writes a model as the program does, but for digests."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        numbers = struct.pack(f"<{tensor.numel()}f", *tensor.flatten().tolist())
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(numbers)]}
        data += numbers
    header = json.dumps(header).encode()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_bytes(tokenizer)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)


def differences(logits, folder, text):
    """The model, the ids, the largest differences to the program and between steps and the whole,
    and the largest logit."""
    run = subprocess.run([logits, folder, text], stdout=subprocess.PIPE, check=True)
    theirs = json.loads(run.stdout)
    model, ids = load(folder), torch.tensor([theirs["ids"]])
    with torch.no_grad():
        whole = model(ids)
        steps, state, at, size = [], None, 0, 1
        while at < ids.shape[1]:
            out, state = model.step(ids[:, at : at + size], state)
            steps.append(out)
            at, size = at + size, size % 40 + 1
    to_program = (whole[0] - torch.tensor(theirs["logits"])).abs().max().item()
    return model, ids, to_program, (whole - torch.cat(steps, 1)).abs().max().item(), whole.abs().max().item()


def looks_ahead(model, ids):
    """How far other tokens in the second half of a text move the logits of the first."""
    half = ids.shape[1] // 2 + 1
    other = torch.cat([ids[:, :half], (ids[:, half:] * 7 + 1) % model.config.vocab_size], 1)
    with torch.no_grad():
        return (model(ids)[:, :half] - model(other)[:, :half]).abs().max().item()


def name_of(model):
    c = model.config
    own = "; ".join(dict.fromkeys(str(attention) for attention in c.attention))
    norms = "" if c.norm_position == "pre" else " post"
    return f"{own} | {c.norm}{norms} {c.feed_forward} {'learned' if c.rotary_base is None else 'rotary'}"


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    program, logits, *folders = sys.argv[1:]
    torch.set_num_threads(1)
    text = SAMPLE.read_text()
    passed = True
    print("| attention | model | tokens | largest logit | difference | steps |\n|---|---|---|---|---|---|")

    def row(name, folder, text, invented):
        nonlocal passed
        model, ids, difference, of_steps, largest = differences(logits, folder, text)
        ahead = looks_ahead(model, ids) if invented else 0.0
        # What is not a number fails, too.
        passed = passed and difference <= TOLERANCE and ahead <= TOLERANCE and of_steps <= OF_STEPS * largest
        if ahead > 0:
            print(f"{folder}: later tokens move earlier logits by {ahead:.1e}", file=sys.stderr)
        print(f"| {name_of(model)} | {name} | {ids.shape[1]} | {largest:.1f} | {difference:.1e} | {of_steps:.1e} |", flush=True)

    for folder in folders:
        # Learned positions end, and a text has no more tokens than characters.
        config = load(folder).config
        row(folder, folder, text[: 1800 if config.rotary_base else config.context], False)
    if not folders:
        with tempfile.TemporaryDirectory() as temporary:
            temporary = pathlib.Path(temporary)
            command = [program, "train", "--data", "sample", "--preset", "seed", "--max-steps", "1", "--vocab-size", "300"]
            subprocess.run([*command, "--out", temporary / "first"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            tokenizer = (temporary / "first/tokenizer.json").read_bytes()
            for seed, (attention, by_layer, more) in enumerate(cases()):
                config = config_of(attention, by_layer, more)
                made = Invented(config, seed)
                Performer(performer_torch.config_of_checkpoint(performer_torch.Fields(config, "config")), made)
                folder = temporary / f"model{seed}"
                write(folder, config, made.made, tokenizer)
                row("checkpoint", folder, text[:700], True)
                exported = temporary / f"export{seed}"
                done = subprocess.run([program, "export", folder, "--out", exported], capture_output=True, text=True)
                if done.returncode != 0:
                    # Any other refusal is a fault.
                    passed = passed and NO_FAMILY in done.stderr
                    print(f"no export of {folder.name}: {done.stderr.strip()}", file=sys.stderr)
                elif (attention, by_layer) != (SOFTMAX, {}):
                    row("export", exported, text[:700], True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
