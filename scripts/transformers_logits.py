"""Compares an exported folder with Hugging Face transformers.

    python3 scripts/transformers_logits.py FOLDER < LOGITS.json

LOGITS.json is what `cargo run --release -p performer-lm --example logits -- FOLDER TEXT` prints.
Logits may differ by 1e-4. Needs torch and transformers.
"""

import json
import sys

if len(sys.argv) != 2:
    sys.exit(__doc__)

import torch
import transformers

TOLERANCE = 1e-4
folder, ours = sys.argv[1], json.load(sys.stdin)
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
with torch.no_grad():
    theirs = model(torch.tensor([ours["ids"]])).logits[0]
difference = (theirs - torch.tensor(ours["logits"])).abs().max().item()
same_ids = tokenizer(ours["text"], add_special_tokens=False)["input_ids"] == ours["ids"]
same_text = tokenizer.decode(ours["ids"]) == ours["text"]
print(f"transformers {transformers.__version__}, {type(model).__name__}, {len(ours['ids'])} tokens, {theirs.shape[1]} logits each")
print(f"logits up to {theirs.abs().max().item():.2f}, largest difference {difference:.1e}; ids equal: {same_ids}; text equal: {same_text}")
# A difference that is no number is none that may be.
sys.exit(not difference <= TOLERANCE or not (same_ids and same_text))
