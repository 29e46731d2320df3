#!/usr/bin/env python3
"""Opens this project's models in PyTorch: one file that needs Python 3.9, PyTorch 2.1 and no more.

FOLDER is a model as `performer-lm train` and `convert` write it, or a Performer as `performer-lm
export` writes it. Copy this file to where you want it:

    from performer_torch import load

    model = load(FOLDER)                             # an nn.Module in eval mode, f32, on the CPU
    logits = model(ids)                              # (batch, tokens) -> (batch, tokens, vocab)
    logits, state = model.step(prompt)               # decoding: the state has a constant size,
    logits, state = model.step(next_ids, state)      # but for layers of plain softmax

Weights and trained feature maps are parameters with gradients; random projections are buffers.
`model.state_dict()` has the names of model.safetensors. Attention is computed in f32 at least.
FOLDER/tokenizer.json is one of Hugging Face's, which makes the ids:
`transformers.PreTrainedTokenizerFast(tokenizer_file="FOLDER/tokenizer.json")`. Texts of models that
were trained here begin with the id of their `<|endoftext|>`.

    python3 performer_torch.py FOLDER --ids 1,2,3    # the five likeliest ids that come next
    python3 performer_torch.py FOLDER < LOGITS.json  # compare with the program's own logits

LOGITS.json is what `cargo run --release -p performer-lm --example logits -- FOLDER TEXT` prints.
The exit code is 0 if no logit differs by more than 1e-4, 1 if one does, and 2 after an error.

A setting, tensor or type that this file does not know is an error. What it does not check is the
digest that the program writes into model.safetensors, since Python has no BLAKE3.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import pathlib
import struct
import sys
from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import nn

# The largest difference to the program's logits that passes.
TOLERANCE = 1e-4


class ModelError(Exception):
    """What is wrong with a model's files, and what to do."""


def load(folder):
    """Returns the model of a folder, in eval mode, in f32 on the CPU."""
    folder = pathlib.Path(folder)
    path = folder / "config.json"
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}; give the folder of a model") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is no JSON: {error}; copy the model again") from None
    if not isinstance(read, dict):
        raise ModelError(f"{path} is no JSON object; copy the model again")
    path = folder / "model.safetensors"
    if "model_type" in read:
        config = config_of_export(Fields(read, "config.json"))
        tensors = names_of_this_project(read_safetensors(path), config, read["performer"]["base"])
    else:
        config = config_of_checkpoint(Fields(read, "config.json"))
        tensors = read_safetensors(path)
    tensors = Tensors(tensors)
    model = Performer(config, tensors)
    tensors.require_empty()
    return model.eval()


# -------------------------------------------------------------------------------------------------
# Configurations
# -------------------------------------------------------------------------------------------------

# Feature maps by where their numbers come from.
DRAWN = ("positive", "hyperbolic", "trigonometric", "phase", "gaussian-phase", "relu", "hermite-tail")
WITH_OFFSETS = ("phase", "gaussian-phase")
FITTED = ("optimal", "dense")
TRAINED = ("learned", "hedgehog")
WITHOUT_NUMBERS = ("elu", "exp", "taylor2")  # and limit-N
# Those, and limit-N, that come as values and not as logarithms.
VALUES = ("trigonometric", "phase", "gaussian-phase", "relu", "taylor2", "hermite-tail")

PARTS = ("gate", "convolution", "output_gate", "output_norm", "mup_scale")

# Bounds on sizes that a damaged file exceeds and no model does, and the most features of a
# polynomial map.
MAX_SIZE, MAX_LAYERS, MAX_MONOMIALS = 1 << 24, 1 << 12, 1 << 14


class Fields:
    """The fields of a JSON object. Each is taken once, and what is left in the end is an error."""

    def __init__(self, fields, name):
        if not isinstance(fields, dict):
            raise ModelError(f"{name} is {fields!r}; it must be an object")
        self.left, self.name = dict(fields), name

    def take(self, name, *default):
        if name not in self.left and not default:
            raise ModelError(f"{self.name} lacks {name}, which this model needs")
        return self.left.pop(name, *default)

    def count(self, name, *default, least=1, most=MAX_SIZE):
        value = self.take(name, *default)
        if value is None and default:
            return default[0]
        if type(value) is not int or not least <= value <= most:
            raise ModelError(f"{self.name}: {name} is {value!r}; it must be a whole number in {least}..{most}")
        return value

    def number(self, name, *default):
        value = self.take(name, *default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ModelError(f"{self.name}: {name} is {value!r}; it must be a number")
        return float(value)

    def one_of(self, name, known, *default):
        value = self.take(name, *default)
        # True is 1 in Python, but not in JSON.
        if not any(type(value) is type(one) and value == one for one in known):
            raise ModelError(f"{self.name}: {name} is {value!r}, which is not known here; known are {list(known)}")
        return value

    def flag(self, name, *default):
        return self.one_of(name, (False, True), *default)

    def inner(self, name, *default):
        return Fields(self.take(name, *default), f"{self.name}: {name}")

    def require_empty(self):
        if self.left:
            name, value = next(iter(self.left.items()))
            raise ModelError(f"{self.name} has the field {name} ({value!r}), which is not known here")


@dataclasses.dataclass(frozen=True)
class Attention:
    """The attention of a layer. Query i sees keys j > i - window and j < sinks exactly, and the
    other keys through features. So softmax has an endless window, and FAVOR one of no tokens."""

    kind: str
    window: float = 0
    sinks: int = 0
    # A feature map's name, "constant" for features that are all 1, None if there are no features.
    map: Optional[str] = None
    features: int = 0
    parts: frozenset = frozenset()
    # The dimension of queries and keys, where it is not that of values.
    key_dim: Optional[int] = None

    def __str__(self):
        drawn = f" m={self.features}" if self.features else ""
        window = f" window={self.window}" if 0 < self.window < math.inf else ""
        sinks = f" sinks={self.sinks}" if self.sinks else ""
        kind = "favor" if self.kind == "windowed" else self.kind
        of_map = "" if self.map in (None, "constant") else f" {self.map}{drawn}"
        key_dim = f" key_dim={self.key_dim}" if self.key_dim else ""
        return f"{kind}{of_map}{window}{sinks}" + "".join(f" {part}" for part in PARTS if part in self.parts) + key_dim


def attention_of(fields):
    kinds = ("softmax", "softmax-window", "favor", "windowed", "equipped", "uniform", "none")
    kind = fields.one_of("kind", kinds)
    settings = {"kind": kind}
    if kind == "equipped":
        parts = fields.inner("parts")
        there = frozenset(part for part in PARTS if parts.flag(part, False))
        key_dim = parts.count("key_dim", None)
        parts.require_empty()
        inner = attention_of(fields.inner("of"))
        if inner.parts or inner.key_dim:
            raise ModelError(f"{fields.name}: parts are around parts; put them in one place")
        if inner.kind == "none" and "gate" in there:
            raise ModelError(f"{fields.name}: the attention none has nothing to forget; leave its gate out")
        fields.require_empty()
        return dataclasses.replace(inner, parts=there, key_dim=key_dim)
    if kind == "softmax":
        settings["window"] = math.inf
    if kind in ("softmax-window", "windowed"):
        settings["window"] = fields.count("window")
        settings["sinks"] = fields.count("sinks", 0, least=0)
    if kind == "uniform":
        settings["map"] = "constant"
    if kind in ("favor", "windowed"):
        favor = fields if kind == "favor" else fields.inner("far")
        settings["map"] = feature_map(favor)
        features = favor.count("features", 128)
        if settings["map"] in DRAWN + FITTED + TRAINED:
            settings["features"] = features
        # How the rows were drawn: they are in the weights.
        favor.one_of("projection", ("orthogonal", "gaussian", "hadamard"), "orthogonal")
        favor.one_of("radii", ("chi", "sqrt", "quantile"), "chi")
        favor.require_empty()
        if kind == "windowed" and has_values(settings["map"]):
            raise ModelError(f"{favor.name}: the features of the map {settings['map']} cannot stand behind a window")
    fields.require_empty()
    return Attention(**settings)


def feature_map(fields):
    """The name of a map; that of {"limit": 4} is limit-4."""
    value = fields.take("map", "positive")
    if isinstance(value, dict):
        limit = Fields(value, f"{fields.name}: map")
        n = limit.count("limit", least=2)
        limit.require_empty()
        if n % 2:
            raise ModelError(f"{fields.name}: map limit is {n}; it must be even")
        return f"limit-{n}"
    known = DRAWN + FITTED + TRAINED + WITHOUT_NUMBERS
    return Fields({"map": value}, fields.name).one_of("map", known)


def has_values(name):
    return name in VALUES or name.startswith("limit-")


@dataclasses.dataclass
class Config:
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward_size: int
    # Tokens of a training sequence, and of learned positions.
    context: int
    feed_forward: str
    norm: str
    norm_position: str
    norm_eps: float
    # The base of rotary positions; None for learned ones.
    rotary_base: Optional[float]
    tied_head: bool
    bias: bool
    qkv_bias: bool
    dropout: float
    attention: list  # of each layer

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise ModelError(f"config.json: heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        for attention in self.attention if self.rotary_base is not None else ():
            key_dim = attention.key_dim or self.head_dim
            if key_dim % 2 or self.rotary_base <= 0:
                raise ModelError(
                    f"config.json: rotary positions of base {self.rotary_base} in queries and keys of {key_dim}; the base "
                    "must be positive and the dimension even"
                )
        if not 0 <= self.dropout < 1:
            raise ModelError(f"config.json: dropout is {self.dropout}; it must be in [0, 1)")


def attention_by_layer(fields, layers):
    """The attention of each layer: the same for all, but for those that have one of their own."""
    most = attention_of(fields.inner("attention"))
    own = fields.inner("attention_by_layer", {})
    of_layers = [attention_of(own.inner(str(i))) if str(i) in own.left else most for i in range(layers)]
    own.require_empty()
    return of_layers


def head_dim_of(hidden_size, heads):
    if hidden_size % heads:
        raise ModelError(f"config.json: hidden_size {hidden_size} must be a multiple of heads {heads}, or head_dim be given")
    return hidden_size // heads


def config_of_checkpoint(fields):
    """Reads the config.json of a model as the program saves it."""
    if fields.flag("leak", False):
        raise ModelError(
            'config.json has "leak": true: the model was trained to see the tokens that it predicts, and shows nothing '
            "but what such a loss is worth; take a model without it"
        )
    fields.take("borders", None)  # the tokenizer's matter
    positions = fields.take("positions")
    if positions == "learned":
        rotary_base = None
    else:
        # Anything but an object is no kind of positions that is known.
        positions = Fields({"positions": positions}, fields.name).inner("positions")
        rotary = positions.inner("rotary")
        rotary_base = rotary.number("base")
        rotary.require_empty()
        positions.require_empty()
    layers, heads, hidden_size = fields.count("layers", most=MAX_LAYERS), fields.count("heads"), fields.count("hidden_size")
    config = Config(
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        layers=layers,
        heads=heads,
        kv_heads=fields.count("kv_heads"),
        head_dim=fields.count("head_dim", None) or head_dim_of(hidden_size, heads),
        feed_forward_size=fields.count("feed_forward_size"),
        context=fields.count("context"),
        feed_forward=fields.one_of("feed_forward", ("gelu", "gelu-exact", "swiglu")),
        norm=fields.one_of("norm", ("layer-norm", "rms-norm")),
        norm_position=fields.one_of("norm_position", ("pre", "post")),
        norm_eps=fields.number("norm_eps", 1e-5),
        rotary_base=rotary_base,
        tied_head=fields.flag("tied_head"),
        bias=fields.flag("bias", False),
        qkv_bias=fields.flag("qkv_bias", False),
        dropout=fields.number("dropout", 0.0),
        attention=attention_by_layer(fields, layers),
    )
    fields.require_empty()
    return config


def config_of_export(fields):
    """Reads the config.json of an exported Performer: that of a Hugging Face family, and the
    attention in its field `performer`."""
    model_type = fields.take("model_type")
    if model_type != "performer":
        raise ModelError(
            f"config.json: model_type is {model_type!r}, which is no Performer; transformers' "
            "AutoModelForCausalLM.from_pretrained opens such folders"
        )
    own = fields.inner("performer")
    family = own.one_of("base", ("llama", "mistral", "qwen2", "starcoder2", "gpt2"))
    own.take("borders", None)
    # What says nothing about the logits.
    for name in ("architectures", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype"):
        fields.take(name, None)
    for name in ("transformers_version", "use_cache", "initializer_range"):
        fields.take(name, None)
    gelus = {"gelu": "gelu-exact", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu"}
    if family == "gpt2":
        layers, heads, hidden_size = fields.count("n_layer", most=MAX_LAYERS), fields.count("n_head"), fields.count("n_embd")
        sizes = dict(
            kv_heads=heads,
            head_dim=head_dim_of(hidden_size, heads),
            feed_forward_size=fields.count("n_inner"),
            context=fields.count("n_positions"),
            feed_forward=gelus[fields.one_of("activation_function", gelus)],
            norm="layer-norm",
            norm_eps=fields.number("layer_norm_epsilon"),
            rotary_base=None,
            bias=True,
            qkv_bias=False,
        )
        fields.one_of("n_ctx", (sizes["context"],), sizes["context"])
        dropouts = ("attn_pdrop", "embd_pdrop", "resid_pdrop")
    else:
        layers, heads = fields.count("num_hidden_layers", most=MAX_LAYERS), fields.count("num_attention_heads")
        hidden_size = fields.count("hidden_size")
        sizes = dict(
            kv_heads=fields.count("num_key_value_heads", heads),
            head_dim=fields.count("head_dim", None) or head_dim_of(hidden_size, heads),
            feed_forward_size=fields.count("intermediate_size"),
            context=fields.count("max_position_embeddings"),
            rotary_base=fields.number("rope_theta"),
        )
        dropouts = ("attention_dropout", "embedding_dropout", "residual_dropout")
        if family == "starcoder2":
            sizes.update(
                feed_forward=gelus[fields.one_of("hidden_act", gelus)],
                norm="layer-norm",
                norm_eps=fields.number("norm_epsilon"),
                bias=fields.flag("use_bias"),
                qkv_bias=False,
            )
            fields.one_of("sliding_window", (None,), None)
        else:
            fields.one_of("hidden_act", ("silu", "swish"))
            sizes.update(feed_forward="swiglu", norm="rms-norm", norm_eps=fields.number("rms_norm_eps"))
            if family == "qwen2":
                sizes.update(bias=False, qkv_bias=True)
                fields.one_of("use_sliding_window", (False,), False)
            else:
                bias = fields.flag("attention_bias", False)
                fields.one_of("mlp_bias", (bias,), bias)
                sizes.update(bias=bias, qkv_bias=False)
    for name in dropouts:
        # Numbers compare as numbers do: 0 is 0.0.
        if fields.number(name, 0.0) != 0:
            raise ModelError(f"config.json: {name} is not 0; only a dropout of 0 is known here")
    config = Config(
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        layers=layers,
        heads=heads,
        norm_position="pre",
        tied_head=fields.flag("tie_word_embeddings"),
        dropout=0.0,
        attention=attention_by_layer(own, layers),
        **sizes,
    )
    own.require_empty()
    fields.require_empty()
    return config


# -------------------------------------------------------------------------------------------------
# Weights
# -------------------------------------------------------------------------------------------------

TYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


def read_safetensors(path):
    """Reads a file of tensors, each as f32: 8 bytes with the length of the header, the header in
    JSON with the type, shape and place of each tensor, and the numbers."""
    try:
        data = bytearray(path.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}; the folder must hold one file of weights") from None

    def damaged(why):
        return ModelError(f"{path} is damaged or incomplete: {why}; copy it again")

    if len(data) < 8:
        raise damaged(f"it has {len(data)} bytes, and its header begins with 8")
    (length,) = struct.unpack("<Q", data[:8])
    if length > len(data) - 8:
        raise damaged(f"its header has {length} bytes, and the file {len(data)}")
    first, size = 8 + length, len(data) - 8 - length
    try:
        header = json.loads(data[8:first].decode("utf-8"))
    except (ValueError, RecursionError):
        raise damaged("its header is no JSON") from None
    if not isinstance(header, dict):
        raise damaged("its header is no JSON object")
    header.pop("__metadata__", None)
    tensors, places = {}, []
    for name, of in header.items():
        try:
            dtype, shape, (start, end) = of["dtype"], of["shape"], of["data_offsets"]
            whole = all(type(n) is int and n >= 0 for n in [*shape, start, end])
        except (KeyError, TypeError, ValueError):
            raise damaged(f"its header does not say the type, shape and place of {name}") from None
        if not whole:
            raise damaged(f"the shape or place of {name} is no list of whole numbers")
        if not isinstance(dtype, str) or dtype not in TYPES:
            raise ModelError(f"{path}: {name} has the type {dtype!r}; known are {', '.join(TYPES)}")
        count = math.prod(shape)
        if end - start != count * TYPES[dtype].itemsize or end > size:
            raise damaged(f"{name} {shape} of {dtype} lies at bytes {start} to {end} of {size}")
        places.append((start, end, name))
        if count:
            numbers = torch.frombuffer(data, dtype=TYPES[dtype], count=count, offset=first + start)
        else:
            numbers = torch.empty(0)
        # A copy, so that no tensor keeps the file in memory.
        tensors[name] = numbers.reshape(shape).to(torch.float32, copy=True)
    expected = 0
    for start, end, name in sorted(places):
        if start != expected:
            raise damaged(f"{name} begins at byte {start}, and what is before it ends at {expected}")
        expected = end
    if expected != size:
        raise damaged(f"its tensors have {expected} bytes, and it holds {size}")
    return tensors


def names_of_this_project(theirs, config, family):
    """Gives the tensors of an export the names that models have here: those of Llama. GPT-2 keeps
    queries, keys and values in one tensor, and its matrices transposed."""
    ours = {}

    def rename(name):
        if family == "starcoder2":
            return name.replace(".mlp.c_fc.", ".mlp.up_proj.").replace(".mlp.c_proj.", ".mlp.down_proj.")
        if family != "gpt2" or not name.startswith("transformer."):
            return name
        name = "model." + name[len("transformer.") :]
        for theirs, ours in (
            (".wte.", ".embed_tokens."),
            (".wpe.", ".embed_positions."),
            (".ln_f.", ".norm."),
            (".h.", ".layers."),
            (".ln_1.", ".input_layernorm."),
            (".ln_2.", ".post_attention_layernorm."),
            (".mlp.c_fc.", ".mlp.up_proj."),
            (".mlp.c_proj.", ".mlp.down_proj."),
            (".attn.c_proj.", ".self_attn.o_proj."),
            (".attn.c_attn.", ".self_attn.c_attn."),
        ):
            name = name.replace(theirs, ours)
        return name

    for their_name, tensor in theirs.items():
        name = rename(their_name)
        if family == "gpt2" and ".c_" in their_name and their_name.endswith(".weight") and tensor.dim() == 2:
            tensor = tensor.t().contiguous()
        if ".self_attn.c_attn." not in name:
            parts = {name: tensor}
        else:
            # Queries and keys are as wide as each other, and may be narrower than values.
            queries, odd = divmod(tensor.shape[0] - config.hidden_size, 2)
            if odd or queries < 1:
                raise ModelError(
                    f"{their_name} has {tensor.shape[0]} outputs, which are no queries, keys and {config.hidden_size} values"
                )
            split = tensor.split((queries, queries, config.hidden_size))
            parts = {name.replace("c_attn", part): rows for part, rows in zip(("q_proj", "k_proj", "v_proj"), split)}
        for part in parts:
            if part in ours:
                raise ModelError(f"the weights hold {part} twice; copy the model again")
        ours.update(parts)
    return ours


class Tensors:
    """The tensors of a model. Each is taken once, and what is left in the end is an error."""

    def __init__(self, tensors):
        self.left = dict(tensors)

    def take(self, name, *shape, optional=False):
        """The tensor of a name; where a dimension is a tuple, it may be any of its numbers."""
        tensor = self.left.pop(name, None)
        if tensor is None:
            if optional:
                return None
            raise ModelError(f"the weights lack {name}, which the model of config.json needs")
        fits = [n in (of if isinstance(of, tuple) else (of,)) for n, of in zip(tensor.shape, shape)]
        if tensor.dim() != len(shape) or not all(fits):
            raise ModelError(f"{name} has shape {list(tensor.shape)}; the model of config.json needs {list(shape)}")
        return tensor

    def parameter(self, name, *shape):
        return nn.Parameter(self.take(name, *shape))

    def require_empty(self):
        if self.left:
            name = min(self.left)
            raise ModelError(
                f"the weights hold {name} {list(self.left[name].shape)}, for which the model of config.json has no place "
                f"({len(self.left)} such tensors)"
            )


# -------------------------------------------------------------------------------------------------
# Features
# -------------------------------------------------------------------------------------------------


class Features(NamedTuple):
    """Features e^log * values of rows. Most maps have logarithms (..., F) and no values; those
    whose features may be negative or zero have values (..., F) and one logarithm (..., 1). So
    attention can take the scale away before it exponentiates."""

    log: torch.Tensor
    values: Optional[torch.Tensor] = None


def by_head(x, rows):
    """x (B, Hkv, ..., D) times rows (M, D), or (1 or Hkv, M, D) -> (B, Hkv, ..., M)."""
    if rows.dim() == 3:
        rows = rows.view(rows.shape[0], *[1] * (x.dim() - 4), *rows.shape[1:])
    return x @ rows.to(x.dtype).mT


def half_square(x):
    """|x|^2 / 2 of each row, (..., 1)."""
    return x.square().sum(-1, keepdim=True) / 2


@functools.lru_cache(maxsize=None)
def factors(variables, degree):
    """The indices of the factors of all monomials, (degree, F), and the square root of the number
    of orders that the factors of each can have, (F)."""
    tuples = list(itertools.combinations_with_replacement(range(variables), degree))
    orders = [math.factorial(degree) // math.prod(math.factorial(t.count(i)) for i in set(t)) for t in tuples]
    return torch.tensor(tuples).t().contiguous(), torch.tensor([math.sqrt(n) for n in orders], dtype=torch.float64)


def monomials(x, degree):
    """All products of `degree` entries of the rows, each by the square root of the number of orders
    that its factors can have."""
    columns, weights = factors(x.shape[-1], degree)
    product = weights.to(x.dtype).to(x.device)
    for column in columns.to(x.device):
        product = product * x.index_select(-1, column)
    return product


def taylor2(x):
    return torch.cat([torch.ones_like(x[..., :1]), x, monomials(x, 2) * math.sqrt(0.5)], -1)


def features(name, layer, x, of_keys):
    """The features of rows x (B, Hkv, ..., T, D), which are scaled by D^(-1/4). `layer` has the
    numbers of the map: `projection` (M, D) and `offsets` (M), or those of `feature_map`."""
    if name == "constant":
        return Features(torch.zeros_like(x[..., :1]))
    if name == "elu":
        return Features(x.clamp(max=0) + x.clamp(min=0).log1p())
    if name == "exp":
        return Features(x)
    zero = torch.zeros_like(x[..., :1])
    if name == "taylor2":
        return Features(zero, taylor2(x))
    if name.startswith("limit-"):
        n = int(name[len("limit-") :])
        return Features(zero, monomials(torch.cat([zero + 1, x / math.sqrt(n)], -1), n))
    if name == "hedgehog":
        u = by_head(x, layer.feature_map.keys if of_keys else layer.feature_map.queries)
        return Features(torch.cat([u.log_softmax(-1), (-u).log_softmax(-1)], -1))
    if name in ("learned", "optimal", "dense"):
        of = layer.feature_map
        rows, metric = (of.keys, of.key_metric) if of_keys else (of.queries, of.query_metric)
        log = by_head(x, rows) - half_square(x if metric is None else by_head(x, metric)) - math.log(rows.shape[-2]) / 2
        if of_keys:
            log = log + of.log_weights.to(x.dtype)[:, None]
        return Features(log)

    u = by_head(x, layer.projection)
    m = u.shape[-1]
    if name == "positive":
        return Features(u - half_square(x) - math.log(m) / 2)
    if name == "hyperbolic":
        return Features(torch.cat([u, -u], -1) - half_square(x) - math.log(2 * m) / 2)
    if name == "relu":
        return Features(zero, u.relu() / math.sqrt(m) + 1e-3)
    if name == "trigonometric":
        return Features(half_square(x), torch.cat([u.sin(), u.cos()], -1) / math.sqrt(m))
    if name in WITH_OFFSETS:
        values = (u + layer.offsets.to(x.dtype)).cos() * math.sqrt(2 / m)
        return Features(half_square(x) if name == "phase" else zero, values)
    if name == "hermite-tail":
        half = half_square(x)
        log = u - half
        # The largest exponential of a row, at least 1, sets its scale.
        scale = log.detach().amax(-1, keepdim=True).relu()
        tail = (log - scale).exp() - (1 + u + u.square() / 2 - half) * (-scale).exp()
        return Features(scale, torch.cat([taylor2(x) * (-scale).exp(), tail / math.sqrt(m)], -1))
    raise ModelError(f"the feature map {name} is not known here")


# -------------------------------------------------------------------------------------------------
# Attention
# -------------------------------------------------------------------------------------------------
#
# Shapes: B sequences, Hkv key heads, G query heads to each key head, T tokens, D dimensions of a
# head, F features. Queries are (B, Hkv, G, T, D), keys and values (B, Hkv, T, D), logarithms of
# forget gates (B, Hkv, T, 1). Values have a column of ones behind them, so that one product gives
# the numerators and the denominator of attention.
#
# Features and weights span more orders of magnitude than f32 has. Each sum is therefore divided by
# e^m, where m is the largest logarithm among its terms. The m of a row comes from keys that the row
# sees, so that no later token changes it. It cancels in the quotient, and is a constant to the
# gradient.

# The logarithm of nothing: finite, so that differences of it are numbers.
NOTHING = -1e37


class Sums(NamedTuple):
    """Numerators and denominators of rows, to be multiplied by e^log."""

    rows: torch.Tensor  # (B, Hkv, G, T, D + 1)
    log: torch.Tensor  # (B, Hkv, G, T, 1)

    def plus(self, other):
        log = torch.maximum(self.log, other.log)
        return Sums(self.rows * (self.log - log).exp() + other.rows * (other.log - log).exp(), log)

    def after_nothing(self, count):
        """These rows behind `count` rows without any key."""
        return Sums(F.pad(self.rows, (0, 0, count, 0)), F.pad(self.log, (0, 0, count, 0), value=NOTHING))


class Memory(NamedTuple):
    """The sums over keys that all later queries see through features."""

    log: torch.Tensor  # (B, Hkv, 1, F), or (B, Hkv, 1, 1) for features with values
    sums: torch.Tensor  # (B, Hkv, F, D + 1), to be multiplied by e^log


def weigh(k, log):
    """The features of keys divided by e^log."""
    weights = (k.log - log).exp()
    return weights if k.values is None else weights * k.values


def query(q, log):
    """The features of queries times e^log, divided by their largest, and its logarithm."""
    if q.values is not None:
        # Their own scale cancels in the quotient.
        return q.values, log.expand(*q.values.shape[:-1], 1)
    log = q.log + log
    most = log.detach().amax(-1, keepdim=True)
    return (log - most).exp(), most


def unfold(x, size):
    """Cuts tokens (..., T, X) into pairs of blocks: (..., T / 2 size, 2, size, X)."""
    return x.unflatten(-2, (-1, 2, size))


def through_features(q, k, v1, gates, memory):
    """Causal attention through features: the sums of the T rows over the keys up to their own and
    those of `memory`, and the memory after the last. In blocks of 2, 4, 8, ... tokens, the rows of
    the second half read the keys of the first half; what is left is each row's own key. Sums of
    gates begin at the border between the halves, so that none is a difference of two long ones."""
    tokens = v1.shape[-2]
    padding = (1 << (tokens - 1).bit_length()) - tokens

    def pad(x):
        # Behind all tokens, where only rows of the padding see it.
        return None if x is None else F.pad(x, (0, 0, 0, padding))

    q_padded, k_padded = Features(pad(q.log), pad(q.values)), Features(pad(k.log), pad(k.values))
    v_padded, g_padded = pad(v1), pad(gates)
    # Each row and its own key.
    if q.values is None:
        log = q_padded.log + k_padded.log[:, :, None]
        most = log.detach().amax(-1, keepdim=True)
        sums = Sums((log - most).exp().sum(-1, keepdim=True) * v_padded[:, :, None], most)
    else:
        kernel = (q_padded.values * k_padded.values[:, :, None]).sum(-1, keepdim=True)
        # A key's scale has a gradient, which e^0 hands on.
        scale = k_padded.log[:, :, None]
        rows = kernel * (scale - scale.detach()).exp() * v_padded[:, :, None]
        sums = Sums(rows, scale.detach().expand(*kernel.shape))
    size = 1
    while size < tokens:

        def half(x, which, size=size):
            return None if x is None else unfold(x, size)[..., which, :, :]

        q_half = Features(half(q_padded.log, 1), half(q_padded.values, 1))
        k_half = Features(half(k_padded.log, 0), half(k_padded.values, 0))
        if gates is not None:
            k_half = k_half._replace(log=k_half.log + sums_after(half(g_padded, 0)))
        log = k_half.log.detach().amax(-2, keepdim=True)
        weights, most = query(q_half, log[:, :, None])
        rows = weights @ weigh(k_half, log).mT[:, :, None] @ half(v_padded, 0)[:, :, None]
        if gates is not None:
            # What is forgotten between the border of the halves and each row.
            most = most + half(g_padded, 1).cumsum(-2)[:, :, None]
        second = Sums(rows, most).after_nothing(size)
        sums = sums.plus(Sums(second.rows.flatten(-3, -2), second.log.flatten(-3, -2)))
        size *= 2
    sums = Sums(sums.rows[..., :tokens, :], sums.log[..., :tokens, :])

    if memory is not None:
        weights, most = query(q, memory.log[:, :, None])
        if gates is not None:
            most = most + gates.cumsum(-2)[:, :, None]
        sums = sums.plus(Sums(weights @ memory.sums[:, :, None], most))
    if gates is not None:
        k = k._replace(log=k.log + sums_after(gates))
    log = k.log.detach().amax(-2, keepdim=True)
    if memory is not None:
        before = memory.log if gates is None else memory.log + gates.sum(-2, keepdim=True)
        log = torch.maximum(log, before.detach())
    kept = weigh(k, log).mT @ v1
    if memory is not None:
        kept = kept + memory.sums * (before - log).exp().mT
    return sums, Memory(log, kept)


def sums_after(gates):
    """The sum of the gates behind each token, of (..., T, 1)."""
    return F.pad(gates[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


def sums_between(gates):
    """The sum of the gates behind key j up to query i: (B, Hkv, T, 1) -> (B, Hkv, T, T)."""
    t = gates.shape[-2]
    return gates.expand(*gates.shape[:-1], t).tril(-1).cumsum(-2)


class Held(NamedTuple):
    """The keys that later queries see exactly, and those that are still to leave the window."""

    positions: torch.Tensor  # (T): the sinks, then a run that ends with the last token
    k: torch.Tensor  # scaled keys (B, Hkv, T, D)
    v1: torch.Tensor  # (B, Hkv, T, D + 1)
    gates: Optional[torch.Tensor]  # (B, Hkv, T, 1)
    # The sum of the gates behind each key, up to the last token, (B, Hkv, 1, T).
    forgotten: Optional[torch.Tensor]


class AttentionState(NamedTuple):
    held: Held
    memory: Optional[Memory]


def attend(attention, layer, q, k, v, gates, start, state):
    """Attention of T queries, of which the first stands at position `start`, to their own keys and
    to what `state` remembers: (B, Hkv, G, T, D) and the state after them. q and k are scaled by
    D^(-1/4)."""
    t, window, sinks = q.shape[-2], attention.window, attention.sinks
    own = torch.arange(start, start + t, device=q.device)
    held = Held(own, k, torch.cat([v, torch.ones_like(v[..., :1])], -1), gates, None)
    if state is not None:
        before = state.held
        joined = [
            None if new is None else torch.cat([old, new], dim)
            for old, new, dim in zip(before, held, (0, -2, -2, -2))
        ]
        held = Held(*joined, before.forgotten)
    decay = None
    if gates is not None:
        decay = sums_between(gates)
        if state is not None:
            decay = torch.cat([held.forgotten + gates.cumsum(-2), decay], -1)
        held = held._replace(forgotten=decay[..., -1:, :])

    parts = []
    if window > 0:
        distance = own[:, None] - held.positions
        visible = (distance >= 0) & ((distance < window) | (held.positions < sinks))
        log = q @ held.k.mT[:, :, None]
        if decay is not None:
            log = log + decay[:, :, None]
        log = log.masked_fill(~visible, -math.inf)
        most = log.detach().amax(-1, keepdim=True)
        parts.append(Sums((log - most).exp() @ held.v1[:, :, None], most))

    memory = None if state is None else state.memory
    # One key leaves the window with each query from position window + sinks on.
    first = max(0, window + sinks - start)
    if attention.map is not None and first < t:
        n, end = t - first, len(held.positions) - window
        leaving = slice(end - n, end)
        far_gates = None if gates is None else held.gates[..., leaving, :]
        q_features = features(attention.map, layer, q[..., first:, :], of_keys=False)
        k_features = features(attention.map, layer, held.k[..., leaving, :], of_keys=True)
        sums, memory = through_features(q_features, k_features, held.v1[..., leaving, :], far_gates, memory)
        if decay is not None:
            # What was forgotten since each of these keys was the last one.
            since = decay[..., first:, leaving].diagonal(dim1=-2, dim2=-1)
            sums = sums._replace(log=sums.log + since[:, :, None, :, None])
        parts.append(sums.after_nothing(first))

    sums = parts[0] if len(parts) == 1 else parts[0].plus(parts[1])
    out = sums.rows[..., :-1] / sums.rows[..., -1:]
    if window < math.inf:
        front = min(sinks, start + t)
        last = start + t - max(front, start + t - window)
        if front + last < len(held.positions):
            held = Held(*(
                None if x is None else torch.cat([x.narrow(dim, 0, front), x.narrow(dim, x.shape[dim] - last, last)], dim)
                for x, dim in zip(held, (0, 2, 2, 2, 3))
            ))
    return out, AttentionState(held, memory)


class LayerState(NamedTuple):
    rows: Optional[list]  # the last three rows of q, k and v before their convolutions
    attention: Optional[AttentionState]


# Tokens that are attended to at once: time and memory are quadratic in them alone.
SEGMENT = 128


def short_convolution(rows, weight, before):
    """Mixes each row (B, T, C) with the three before it by weight (C, 4), whose last column is the
    row's own; also returns the last three rows."""
    if before is None:
        before = torch.zeros_like(rows[:, :1]).expand(-1, 3, -1)
    rows = torch.cat([before, rows], 1)
    mixed = sum(rows[:, i : rows.shape[1] - 3 + i] * weight[:, i] for i in range(4))
    return mixed, rows[:, -3:]


def turn(x, angles):
    """Rotary positions of (B, T, H, D): dimension i turns with i + D/2."""
    cos, sin = (of[:, None].to(x.dtype) for of in angles)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class SelfAttention(nn.Module):
    def __init__(self, config, attention, tensors, name):
        super().__init__()
        self.attention, self.heads, self.kv_heads = attention, config.heads, config.kv_heads
        self.head_dim = config.head_dim
        self.key_dim = d = attention.key_dim or config.head_dim
        e, q, k = config.hidden_size, config.heads * d, config.kv_heads * d
        v, out = config.kv_heads * self.head_dim, config.heads * self.head_dim
        qkv_bias = config.bias or config.qkv_bias
        self.q_proj = Linear(tensors, f"{name}.q_proj", e, q, qkv_bias)
        self.k_proj = Linear(tensors, f"{name}.k_proj", e, k, qkv_bias)
        self.v_proj = Linear(tensors, f"{name}.v_proj", e, v, qkv_bias)
        self.o_proj = Linear(tensors, f"{name}.o_proj", out, e, config.bias)
        if "gate" in attention.parts:
            self.gate = Linear(tensors, f"{name}.gate", e, config.kv_heads, True)
        if "convolution" in attention.parts:
            self.q_conv1d = Linear(tensors, f"{name}.q_conv1d", 4, q, False)
            self.k_conv1d = Linear(tensors, f"{name}.k_conv1d", 4, k, False)
            self.v_conv1d = Linear(tensors, f"{name}.v_conv1d", 4, v, False)
        if "output_norm" in attention.parts:
            self.output_norm = Norm(tensors, f"{name}.output_norm", self.head_dim, "rms-norm", 1e-5)
        if "output_gate" in attention.parts:
            self.output_gate = Linear(tensors, f"{name}.output_gate", e, out, False)
        m = attention.features
        if attention.map in DRAWN:
            self.register_buffer("projection", tensors.take(f"{name}.projection", m, d))
        if attention.map in WITH_OFFSETS:
            self.register_buffer("offsets", tensors.take(f"{name}.offsets", m))
        if attention.map in FITTED + TRAINED:
            self.feature_map = FeatureMap(tensors, f"{name}.feature_map", attention.map, config.kv_heads, m, d)
        degree = 2 if attention.map in ("taylor2", "hermite-tail") else 0
        if (attention.map or "").startswith("limit-"):
            degree = int(attention.map[len("limit-") :])
            d += 1
        if degree and math.comb(d + degree - 1, degree) > MAX_MONOMIALS:
            raise ModelError(f"{name}: the map {attention.map} has more than {MAX_MONOMIALS} features in heads of {d}")

    def forward(self, x, start, angles, state):
        """The output for x (B, T, E), whose first token stands at position `start`, from the layer's
        state before it; and the state after it."""
        b, t, _ = x.shape
        rows = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        last = None
        if "convolution" in self.attention.parts:
            filters = [self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight]
            before = [None] * 3 if state is None else state.rows
            mixed = [short_convolution(*of) for of in zip(rows, filters, before)]
            rows, last = [row for row, _ in mixed], [row for _, row in mixed]
        q, k = (of.view(b, t, -1, self.key_dim) for of in rows[:2])
        v = rows[2].view(b, t, -1, self.head_dim)
        if angles is not None:
            q, k = turn(q, angles[self.key_dim]), turn(k, angles[self.key_dim])
        if "mup_scale" in self.attention.parts:
            q = q / math.sqrt(self.key_dim)
        # Half types have too few digits for exponents.
        wide = torch.promote_types(x.dtype, torch.float32)
        gates = None
        if "gate" in self.attention.parts:
            gates = F.linear(x.to(wide), self.gate.weight.to(wide), self.gate.bias.to(wide))
            gates = F.logsigmoid(gates).transpose(1, 2)[..., None]
        scale = self.key_dim**-0.25
        # The query heads of a key head are neighbours.
        q = q.to(wide).unflatten(2, (self.kv_heads, -1)).permute(0, 2, 3, 1, 4) * scale
        k, v = k.to(wide).transpose(1, 2) * scale, v.to(wide).transpose(1, 2)
        of_attention = None if state is None else state.attention
        if self.attention.kind == "none":
            out = q.new_zeros(*q.shape[:-1], self.head_dim)
        else:
            outs = []
            for i in range(0, t, SEGMENT):
                s = slice(i, i + SEGMENT)
                g = None if gates is None else gates[..., s, :]
                of_segment, of_attention = attend(
                    self.attention, self, q[..., s, :], k[..., s, :], v[..., s, :], g, start + i, of_attention
                )
                outs.append(of_segment)
            out = torch.cat(outs, -2)
        out = out.permute(0, 3, 1, 2, 4).reshape(b, t, self.heads, self.head_dim).to(x.dtype)
        if "output_norm" in self.attention.parts:
            out = self.output_norm(out)
        out = out.flatten(2)
        if "output_gate" in self.attention.parts:
            out = out * (2 * torch.sigmoid(self.output_gate(x)))
        return self.o_proj(out), LayerState(last, of_attention)


class FeatureMap(nn.Module):
    """The numbers of a map that is fitted or trained, for each key head or one set for all."""

    def __init__(self, tensors, name, kind, kv_heads, m, d):
        super().__init__()
        heads = (1, kv_heads)
        shapes = {"queries": (heads, m, d), "keys": (heads, m, d)}
        if kind != "hedgehog":
            shapes.update(log_weights=(heads, m), query_metric=(heads, d, d), key_metric=(heads, d, d))
        for part, shape in shapes.items():
            tensor = tensors.take(f"{name}.{part}", *shape, optional=part.endswith("_metric"))
            # What all features of a query have in common cancels, and has no gradient.
            if tensor is not None and kind in TRAINED and part != "query_metric":
                setattr(self, part, nn.Parameter(tensor))
            else:
                self.register_buffer(part, tensor)


# -------------------------------------------------------------------------------------------------
# The model
# -------------------------------------------------------------------------------------------------


class Linear(nn.Module):
    def __init__(self, tensors, name, inputs, outputs, bias):
        super().__init__()
        self.weight = tensors.parameter(f"{name}.weight", outputs, inputs)
        self.bias = tensors.parameter(f"{name}.bias", outputs) if bias else None

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class Norm(nn.Module):
    def __init__(self, tensors, name, size, kind, eps):
        super().__init__()
        self.eps = eps
        self.weight = tensors.parameter(f"{name}.weight", size)
        self.bias = tensors.parameter(f"{name}.bias", size) if kind == "layer-norm" else None

    def forward(self, x):
        if self.bias is not None:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight).to(x.dtype)


class FeedForward(nn.Module):
    def __init__(self, config, tensors, name):
        super().__init__()
        outer, inner = config.hidden_size, config.feed_forward_size
        self.kind = config.feed_forward
        if self.kind == "swiglu":
            self.gate_proj = Linear(tensors, f"{name}.gate_proj", outer, inner, config.bias)
        self.up_proj = Linear(tensors, f"{name}.up_proj", outer, inner, config.bias)
        self.down_proj = Linear(tensors, f"{name}.down_proj", inner, outer, config.bias)

    def forward(self, x):
        inner = self.up_proj(x)
        if self.kind == "swiglu":
            inner = F.silu(self.gate_proj(x)) * inner
        else:
            inner = F.gelu(inner, approximate="tanh" if self.kind == "gelu" else "none")
        return self.down_proj(inner)


class Block(nn.Module):
    def __init__(self, config, attention, tensors, name):
        super().__init__()

        def norm(part):
            return Norm(tensors, f"{name}.{part}", config.hidden_size, config.norm, config.norm_eps)

        self.norm_position, self.dropout = config.norm_position, config.dropout
        self.input_layernorm = norm("input_layernorm")
        self.self_attn = SelfAttention(config, attention, tensors, f"{name}.self_attn")
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.mlp = FeedForward(config, tensors, f"{name}.mlp")

    def forward(self, x, start, angles, state):
        pre = self.norm_position == "pre"
        y, state = self.self_attn(self.input_layernorm(x) if pre else x, start, angles, state)
        x = x + F.dropout(y, self.dropout, self.training)
        x = x if pre else self.input_layernorm(x)
        y = self.mlp(self.post_attention_layernorm(x) if pre else x)
        x = x + F.dropout(y, self.dropout, self.training)
        return x if pre else self.post_attention_layernorm(x), state


class State(NamedTuple):
    """What `Performer.step` remembers. It is never changed, so several texts can go on from one."""

    tokens: int
    layers: list


class Performer(nn.Module):
    """A decoder-only language model."""

    def __init__(self, config, tensors):
        super().__init__()
        self.config = config
        e = config.hidden_size
        self.model = nn.Module()
        self.model.embed_tokens = nn.Module()
        self.model.embed_tokens.weight = tensors.parameter("model.embed_tokens.weight", config.vocab_size, e)
        if config.rotary_base is None:
            self.model.embed_positions = nn.Module()
            self.model.embed_positions.weight = tensors.parameter("model.embed_positions.weight", config.context, e)
        self.model.layers = nn.ModuleList(
            Block(config, attention, tensors, f"model.layers.{i}") for i, attention in enumerate(config.attention)
        )
        if config.norm_position == "pre":
            self.model.norm = Norm(tensors, "model.norm", e, config.norm, config.norm_eps)
        if not config.tied_head:
            self.lm_head = Linear(tensors, "lm_head", e, config.vocab_size, False)

    def forward(self, ids):
        """The logits of the token after each: ids (batch, tokens) -> (batch, tokens, vocab)."""
        return self.step(ids)[0]

    def step(self, ids, state=None):
        """Goes on from `state`, or from the beginning: ids (batch, tokens) -> logits
        (batch, tokens, vocab) and the state after them."""
        if ids.dim() != 2 or ids.shape[1] == 0:
            raise ValueError(f"ids have shape {list(ids.shape)}; they must be (batch, tokens), at least one token")
        start, t = (0 if state is None else state.tokens), ids.shape[1]
        x = F.embedding(ids, self.model.embed_tokens.weight)
        angles = None
        if self.config.rotary_base is None:
            if start + t > self.config.context:
                raise ValueError(
                    f"positions {start} to {start + t - 1}: the model has learned {self.config.context} of them; give it "
                    "fewer tokens"
                )
            x = x + self.model.embed_positions.weight[start : start + t]
        else:
            angles = self.angles(start, t, x.device)
        layers = []
        for i, block in enumerate(self.model.layers):
            x, of_layer = block(x, start, angles, None if state is None else state.layers[i])
            layers.append(of_layer)
        if self.config.norm_position == "pre":
            x = self.model.norm(x)
        head = self.model.embed_tokens if self.config.tied_head else self.lm_head
        return F.linear(x, head.weight), State(start + t, layers)

    def angles(self, start, tokens, device):
        """Cosines and sines of rotary positions, (T, D/2) each, computed in f64, by the dimension D
        of queries and keys."""
        of_dim = {}
        for d in {attention.key_dim or self.config.head_dim for attention in self.config.attention}:
            frequencies = self.config.rotary_base ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
            angles = torch.outer(torch.arange(start, start + tokens, dtype=torch.float64), frequencies)
            of_dim[d] = angles.cos().float().to(device), angles.sin().float().to(device)
        return of_dim


# -------------------------------------------------------------------------------------------------
# The command
# -------------------------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description="Opens a model of performer-lm in PyTorch; see the head of this file.")
    parser.add_argument("folder", help="a model as performer-lm writes it, or a Performer as it exports it")
    parser.add_argument("--ids", help="ids of tokens, as in 1,2,3: print the five likeliest ids that come next")
    args = parser.parse_args()
    try:
        model = load(args.folder)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.ids is None and sys.stdin.isatty():
        parser.error("give --ids, or on standard input what the example logits prints")
    if args.ids is not None:
        try:
            ids, theirs = [int(i) for i in args.ids.split(",")], None
        except ValueError:
            parser.error(f"--ids {args.ids}: they must be whole numbers, as in 1,2,3")
    else:
        try:
            given = json.load(sys.stdin)
            ids, theirs = given["ids"], torch.tensor(given["logits"])
        except (ValueError, KeyError, TypeError) as error:
            parser.error(f"standard input is not what the example logits prints: {error!r}")
    vocab = model.config.vocab_size
    if not ids or not all(0 <= i < vocab for i in ids):
        parser.error(f"there must be at least one id, and all must lie in 0..{vocab - 1}")
    try:
        with torch.no_grad():
            logits = model(torch.tensor([ids]))[0]
    except ValueError as error:
        parser.error(str(error))
    if theirs is None:
        likeliest = logits[-1].softmax(-1).topk(min(5, vocab))
        for p, i in zip(likeliest.values.tolist(), likeliest.indices.tolist()):
            print(f"{i} {p:.4f}")
        return 0
    if theirs.shape != logits.shape:
        parser.error(f"the logits given have shape {list(theirs.shape)}, and the model's {list(logits.shape)}")
    difference = (logits - theirs).abs().max().item()
    kinds = "; ".join(dict.fromkeys(str(attention) for attention in model.config.attention))
    print(f"torch {torch.__version__}, {kinds}, {len(ids)} tokens, {vocab} logits each")
    print(f"logits up to {theirs.abs().max().item():.2f}, largest difference {difference:.1e}")
    # Not a number is a difference, too.
    return 0 if difference <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
