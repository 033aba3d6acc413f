"""Scores of texts and the losses of their labels by transformers' ForSequenceClassification: `./run reference texts`.

Small models of odd sizes, whose weights are drawn from what the golden says of each tensor. Written to goldens/texts.json.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from golden_weights import digest, draw_weights  # noqa: E402

GOLDEN, SEED, LABELS, PAD = TESTS / "goldens" / "texts.json", 5, 3, 1
SMALL = {"vocab_size": 113, "hidden_size": 44, "num_hidden_layers": 2, "intermediate_size": 70, "num_attention_heads": 4}
FAMILIES = {
    "bert": SMALL | {"max_position_embeddings": 90, "pad_token_id": PAD},
    "roberta": SMALL | {"max_position_embeddings": 92, "type_vocab_size": 1, "pad_token_id": PAD},
    "llama": SMALL | {"num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 90, "pad_token_id": PAD},
    "gpt2": {"vocab_size": 113, "n_embd": 44, "n_layer": 2, "n_head": 4, "n_positions": 90, "pad_token_id": PAD},
}


def golden(kind: str, rng: np.random.Generator) -> dict:
    config = transformers.AutoConfig.for_model(kind, num_labels=LABELS, attn_implementation="eager", **FAMILIES[kind])
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    tensors = {name: [list(value.shape), float("norm" in name.lower()), 0.2] for name, value in model.state_dict().items()
               if value.is_floating_point()}  # fmt: skip
    weights = draw_weights(tensors, SEED)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()}, strict=False)
    lengths = [13, 7, 1, 10]
    ids = rng.integers(3, 113, (len(lengths), max(lengths)))
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(int)
    ids = np.where(mask, ids, PAD)
    seconds = [6, 0, 0, 4]
    types = np.array([[int(bool(s) and s <= t < n) for t in range(max(lengths))] for s, n in zip(seconds, lengths)])
    inputs = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    if kind == "bert":
        inputs["token_type_ids"] = torch.tensor(types)
    labels = {
        "single_label_classification": torch.tensor(rng.integers(0, LABELS, len(lengths))),
        "multi_label_classification": torch.tensor(rng.integers(0, 2, (len(lengths), LABELS)).astype(np.float32)),
    }
    losses = {}
    for problem, label in labels.items():
        model.config.problem_type = problem
        losses[problem] = float(model(**inputs, labels=label).loss.detach())
    with torch.no_grad():
        logits = model(**inputs).logits
    config.problem_type = None
    hub = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}
    return {
        "config": {key: value for key, value in hub.items() if not key.startswith("_") and key != "attn_implementation"},
        "tensors": tensors, "sha256": digest(weights), "ids": ids.tolist(), "lengths": lengths, "seconds": seconds,
        "logits": logits.tolist(), "labels": {name: label.tolist() for name, label in labels.items()}, "losses": losses,
    }  # fmt: skip


if __name__ == "__main__":
    made = {kind: golden(kind, np.random.default_rng(i)) for i, kind in enumerate(FAMILIES)}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    GOLDEN.write_text(json.dumps({"versions": versions, "seed": SEED, "models": made}) + "\n", encoding="utf-8")
    sys.stdout.write(f"wrote {GOLDEN}: {', '.join(made)}\n")
