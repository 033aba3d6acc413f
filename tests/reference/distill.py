"""Divergences by TRL's own functions, from given logits: `./run reference distill`. Random numbers, in float64. Written to
goldens/distill.json.
"""

import json
from pathlib import Path

import numpy as np
import torch
from trl.experimental.gkd.gkd_trainer import GKDTrainer

GOLDEN = Path(__file__).parents[1] / "goldens" / "distill.json"
ROWS, TOKENS, VOCAB = 2, 5, 11
CASES = [(beta, temperature) for beta in (0.0, 0.1, 0.5, 0.9, 1.0) for temperature in (0.7, 1.0, 2.5)]


def main() -> None:
    rng = np.random.default_rng(0)
    student, teacher = (rng.normal(0, scale, (ROWS, TOKENS, VOCAB)) for scale in (1.0, 2.5))
    labels = rng.integers(0, VOCAB, (ROWS, TOKENS))
    mask = np.array([[0, 1, 1, 0, 1], [1, 1, 0, 0, 0]])
    cases = []
    for beta, temperature in CASES:
        logits = torch.tensor(student, requires_grad=True)
        of = torch.tensor(np.where(mask, labels, -100))
        value = GKDTrainer.generalized_jsd_loss(logits, torch.tensor(teacher), of, beta=beta, temperature=temperature)
        value.backward()
        assert logits.grad is not None
        cases.append({"beta": beta, "temperature": temperature, "loss": float(value.detach()), "gradient": logits.grad.tolist()})
    inputs = {"student": student.tolist(), "teacher": teacher.tolist(), "labels": labels.tolist(), "mask": mask.tolist()}
    GOLDEN.write_text(json.dumps(inputs | {"jsd": cases}, indent=None) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
