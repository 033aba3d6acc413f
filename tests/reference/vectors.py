"""Vectors of texts by language models of transformers: `./run reference vectors`.

Small models of odd sizes without a head, read at the last token (Qwen3-Embedding, E5-Mistral) and as a mean over all tokens, from rows
that are padded on the left and on the right. Pooling as in sentence-transformers' lasttoken and mean. Written to goldens/vectors.json.
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

GOLDEN, SEED, PAD, EOS = TESTS / "goldens" / "vectors.json", 11, 1, 2
SMALL = {"vocab_size": 113, "hidden_size": 44, "num_hidden_layers": 2, "intermediate_size": 70, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 90, "pad_token_id": PAD}  # fmt: skip
FAMILIES = {
    "qwen3": SMALL | {"tie_word_embeddings": True, "rope_theta": 1000000.0},
    "mistral": SMALL | {"tie_word_embeddings": False, "sliding_window": 6},
    "llama": SMALL | {"tie_word_embeddings": True},
}
LENGTHS = [13, 7, 2, 10]


def pool(hidden: torch.Tensor, mask: torch.Tensor) -> dict[str, list]:
    """The last token that counts, wherever padding is, and the mean of those that count."""
    last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
    weights = mask[..., None].float()
    mean = (hidden * weights).sum(1) / weights.sum(1)
    return {"last": hidden[torch.arange(len(mask)), last].tolist(), "mean": mean.tolist()}


def golden(kind: str, rng: np.random.Generator) -> dict:
    config = transformers.AutoConfig.for_model(kind, attn_implementation="eager", **FAMILIES[kind])
    model = transformers.AutoModel.from_config(config).eval()
    tensors = {name: [list(value.shape), float("norm" in name), 0.2] for name, value in model.state_dict().items()}
    weights = draw_weights(tensors, SEED)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    texts = [[*rng.integers(3, 113, length - 1).tolist(), EOS] for length in LENGTHS]
    vectors = {}
    for side in ("left", "right"):
        blank = [[PAD] * (max(LENGTHS) - len(ids)) for ids in texts]
        rows = [fill + ids if side == "left" else ids + fill for fill, ids in zip(blank, texts)]
        ids = torch.tensor(rows)
        mask = (ids != PAD).long()
        places = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            hidden = model(input_ids=ids, attention_mask=mask, position_ids=places).last_hidden_state
        vectors[side] = pool(hidden, mask)
    hub = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}
    return {
        "config": {key: value for key, value in hub.items() if not key.startswith("_") and key != "attn_implementation"},
        "tensors": tensors, "sha256": digest(weights), "texts": texts, "vectors": vectors,
    }  # fmt: skip


if __name__ == "__main__":
    made = {kind: golden(kind, np.random.default_rng(i)) for i, kind in enumerate(FAMILIES)}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    GOLDEN.write_text(json.dumps({"versions": versions, "seed": SEED, "models": made}) + "\n", encoding="utf-8")
    sys.stdout.write(f"wrote {GOLDEN}: {', '.join(made)}\n")
