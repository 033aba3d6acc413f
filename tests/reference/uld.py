"""Distances of sorted probabilities by TRL's GOLD trainer, from given logits and given bytes of tokens: `./run reference uld`. Random
numbers, in float64. Written to goldens/uld.json.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from trl.experimental.gold.gold_trainer import ULDLoss

GOLDEN = Path(__file__).parents[1] / "goldens" / "uld.json"
VOCAB, OTHER = 11, 7
PROMPT = 2
# Bytes of the tokens of an answer, by both tokenizers.
CASES = {"equal": ([1, 2, 1], [1, 2, 1]), "merged": ([2, 3, 1, 2], [1, 1, 1, 1, 1, 3]), "one": ([1, 1, 1, 1], [4])}


def offsets(sizes: list[int]) -> torch.Tensor:
    ends = np.cumsum(sizes)
    spans = [[0, 0]] * PROMPT + [[int(end) - size, int(end)] for size, end in zip(sizes, ends, strict=True)]
    return torch.tensor([spans])


def main() -> None:
    rng = np.random.default_rng(0)
    found = []
    for name, (ours, theirs) in CASES.items():
        for temperature in (1.0, 2.0):
            config = SimpleNamespace(
                uld_crossentropy_weight=0, uld_distillation_weight=1, uld_student_temperature=temperature,
                uld_teacher_temperature=temperature, uld_skip_student_eos=False, uld_skip_teacher_eos=False, use_extended_uld=True,
                uld_token_merge_strategy="bayesian", uld_use_hybrid_loss=False,
            )  # fmt: skip
            student, teacher = rng.normal(0, 1, (1, PROMPT + len(ours), VOCAB)), rng.normal(0, 2, (1, PROMPT + len(theirs), OTHER))
            ids, other = rng.integers(0, VOCAB, student.shape[:2]), rng.integers(0, OTHER, teacher.shape[:2])
            labels = [torch.tensor(np.where(np.arange(of.shape[1]) < PROMPT, -100, of)) for of in (ids, other)]
            logits = torch.tensor(student, requires_grad=True)
            args = (logits, torch.tensor(teacher), *labels, torch.tensor(ids), torch.tensor(other), offsets(ours), offsets(theirs))
            value = ULDLoss(config)(*args)
            value.backward()
            assert logits.grad is not None
            found.append(
                {
                    "name": name, "temperature": temperature, "sizes": [ours, theirs], "student": student.tolist(),
                    "teacher": teacher.tolist(), "ids": ids.tolist(), "teacher_ids": other.tolist(), "loss": float(value.detach()),
                    "gradient": logits.grad.tolist(),
                }
            )  # fmt: skip
    GOLDEN.write_text(json.dumps({"prompt": PROMPT, "cases": found}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
