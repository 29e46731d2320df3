#!/usr/bin/env python3
"""Evaluates this project's models with EleutherAI's lm-evaluation-harness.

    python3 -m pip install torch lm-eval transformers
    python3 scripts/lm_eval_performer.py run --model performer --model_args pretrained=FOLDER --tasks lambada_openai

FOLDER is a model as `performer-lm train` or `convert` writes it, or a Performer that `export` wrote;
for an exported softmax model take the harness's own `--model hf`. The options are those of `lm_eval`,
to which this file adds the model `performer`; performer_torch.py has to lie beside it.
Arguments of the model, separated by commas behind --model_args:

    pretrained=FOLDER
    max_length=N      the most tokens that a prediction sees, its own among them [default: the context
                      in config.json]; positions that were learned end there
    dtype=bfloat16    the type of the weights [default: float32]

Texts begin with the token that the model's texts began with in training. --batch_size says how many
texts are read at a time, and --device where [default: a GPU if PyTorch finds one].
"""

import json
import pathlib

import torch
from lm_eval import utils
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from tokenizers import Tokenizer
from tqdm import tqdm

from performer_torch import ModelError, load

# Tokens that begin and end texts, in the order in which they are looked for.
BORDERS = ("<|endoftext|>", "<s>", "</s>", "<|im_end|>")


@register_model("performer")
class PerformerLM(TemplateLM):
    """A model of this project, as the harness asks for it: log-likelihoods of texts, and texts."""

    def __init__(self, pretrained, max_length=None, device=None, dtype="float32", batch_size=1, **_):
        super().__init__()
        # The harness asks for CUDA where nobody asks for anything.
        if device is None or (str(device).startswith("cuda") and not torch.cuda.is_available()):
            device = "cuda" if torch.cuda.is_available() else "cpu"
        folder = pathlib.Path(pretrained)
        self.model = load(folder).to(device=device, dtype=getattr(torch, dtype))
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.max_length = int(max_length or self.model.config.context)
        if self.model.config.rotary_base is None and self.max_length > self.model.config.context:
            raise ModelError(f"max_length={max_length}: learned positions end at {self.model.config.context} tokens")
        self.at_once = 1 if str(batch_size).startswith("auto") else max(1, int(batch_size))
        self.where = device
        # The borders that the model was saved with come before those that have a usual name.
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        own = config.get("borders") or (config.get("performer") or {}).get("borders") or {}
        known = [own.get("begin"), own.get("end"), *map(self.tokenizer.token_to_id, BORDERS)]
        known = [token for token in known if token is not None]
        if not known:
            raise ModelError(f"{folder}/tokenizer.json has none of the tokens {', '.join(BORDERS)}, one of which begins a text")
        self.border = known[0]
        self.ends = {known[0], own.get("end"), *own.get("stop", [])}

    @property
    def eot_token_id(self):
        return self.border

    def tok_encode(self, string, add_special_tokens=None, **_):
        ids = self.tokenizer.encode(string, add_special_tokens=False).ids
        return ids if add_special_tokens is False else [self.border, *ids]

    @torch.no_grad()
    def log_probabilities(self, texts):
        """Of every text, `(tokens - 1, vocab)`: what each token but the first was given."""
        longest = max(map(len, texts)) - 1
        # Later tokens change nothing before them, so shorter texts are filled up at their end.
        ids = [text[:-1] + [self.border] * (longest - len(text) + 1) for text in texts]
        logits = self.model(torch.tensor(ids, device=self.where)).float().log_softmax(-1).cpu()
        return [logits[i, : len(text) - 1] for i, text in enumerate(texts)]

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **_):
        # The last tokens of a text that is too long, and at least one of its context.
        whole = [(context + continuation)[-self.max_length - 1 :] for _, context, continuation in requests]
        order = sorted(range(len(whole)), key=lambda i: -len(whole[i]))
        found = [None] * len(whole)
        for first in tqdm(range(0, len(order), self.at_once), disable=disable_tqdm, desc="log-likelihoods"):
            batch = order[first : first + self.at_once]
            for i, logs in zip(batch, self.log_probabilities([whole[i] for i in batch])):
                count = min(len(requests[i][2]), len(whole[i]) - 1)
                targets = torch.tensor(whole[i][len(whole[i]) - count :], dtype=torch.long)
                logs = logs[len(logs) - count :]
                of_targets = logs.gather(1, targets[:, None]).sum().item()
                found[i] = (of_targets, bool((logs.argmax(1) == targets).all()))
        return found

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """The log-likelihood of whole texts, each in pieces of `max_length` tokens."""
        sums = []
        for request in tqdm(requests, disable=disable_tqdm, desc="texts"):
            pieces = utils.get_rolling_token_windows(
                self.tok_encode(request.args[0], add_special_tokens=False), self.border, self.max_length, 1
            )
            pieces = [(None, *utils.make_disjoint_window(piece)) for piece in pieces]
            sums.append(sum(value for value, _ in self._loglikelihood_tokens(pieces, disable_tqdm=True)))
        return sums

    @torch.no_grad()
    def generate_until(self, requests, disable_tqdm=False):
        """Greedy continuations, up to the first of the texts that end one."""
        written = []
        for request in tqdm(requests, disable=disable_tqdm, desc="texts"):
            prompt, settings = request.args
            until = settings.get("until") or []
            until = [until] if isinstance(until, str) else until
            ids = self.tok_encode(prompt)
            most = int(settings.get("max_gen_toks", 256))
            if len(ids) + most > self.max_length:
                # The prompt says what is asked, so it is not cut for what is to be written.
                most = max(1, self.max_length - len(ids))
                ids = ids[-(self.max_length - most) :]
            logits, state = self.model.step(torch.tensor([ids], device=self.where))
            new, text = [], ""
            while len(new) < most:
                token = int(logits[0, -1].argmax())
                if token in self.ends:
                    break
                new.append(token)
                text = self.tokenizer.decode(new)
                if any(end in text for end in until):
                    break
                logits, state = self.model.step(torch.tensor([[token]], device=self.where), state)
            for end in until:
                text = text.split(end)[0]
            written.append(text)
        return written


if __name__ == "__main__":
    cli_evaluate()
