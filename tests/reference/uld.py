"""Distances of sorted probabilities by TRL's GOLD trainer, from given logits and given bytes of tokens, also those that compare the
tokens of both vocabularies as themselves: `./run reference uld`. Random numbers, in float64. Written to goldens/uld.json.
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
# Ids of tokens that both have, the student's and the teacher's.
PAIRS = [[0, 3], [4, 0], [7, 6], [10, 2]]
# Weights of these in a hybrid distance, with beta.
HYBRIDS = [(None, 0.5), (0.6, 0.0), (0.25, 1.0), (0.5, 0.3)]


def offsets(sizes: list[int]) -> torch.Tensor:
    ends = np.cumsum(sizes)
    spans = [[0, 0]] * PROMPT + [[int(end) - size, int(end)] for size, end in zip(sizes, ends, strict=True)]
    return torch.tensor([spans])


def tokenizer_of(size: int, whose: str) -> SimpleNamespace:
    """A tokenizer of which only the vocabulary is known; those of a pair have one name."""
    side = ["student", "teacher"].index(whose)
    names = {pair[side]: f"pair {i}" for i, pair in enumerate(PAIRS)}
    return SimpleNamespace(get_vocab=lambda: {names.get(i, f"{whose} {i}"): i for i in range(size)})


def main() -> None:
    rng = np.random.default_rng(0)
    cases = []
    for name, (ours, theirs) in CASES.items():
        plain = [(temperature, None) for temperature in (1.0, 2.0)]
        for temperature, hybrid in plain + [(1.5, hybrid_case) for hybrid_case in HYBRIDS]:
            matched, beta = hybrid or (None, 0.5)
            config = SimpleNamespace(
                uld_crossentropy_weight=0, uld_distillation_weight=1, uld_student_temperature=temperature,
                uld_teacher_temperature=temperature, uld_skip_student_eos=False, uld_skip_teacher_eos=False, use_extended_uld=True,
                uld_token_merge_strategy="bayesian", uld_use_hybrid_loss=hybrid is not None, uld_hybrid_matched_weight=matched,
                uld_hybrid_unmatched_weight=None if matched is None else 1 - matched, beta=beta,
            )  # fmt: skip
            student, teacher = rng.normal(0, 1, (1, PROMPT + len(ours), VOCAB)), rng.normal(0, 2, (1, PROMPT + len(theirs), OTHER))
            ids, other = rng.integers(0, VOCAB, student.shape[:2]), rng.integers(0, OTHER, teacher.shape[:2])
            labels = [torch.tensor(np.where(np.arange(of.shape[1]) < PROMPT, -100, of)) for of in (ids, other)]
            logits = torch.tensor(student, requires_grad=True)
            args = (logits, torch.tensor(teacher), *labels, torch.tensor(ids), torch.tensor(other), offsets(ours), offsets(theirs))
            value = ULDLoss(config, tokenizer_of(VOCAB, "student"), tokenizer_of(OTHER, "teacher"))(*args)
            value.backward()
            assert logits.grad is not None
            cases.append(
                {
                    "name": name, "temperature": temperature, "sizes": [ours, theirs], "student": student.tolist(),
                    "teacher": teacher.tolist(), "ids": ids.tolist(), "teacher_ids": other.tolist(), "loss": float(value.detach()),
                    "gradient": logits.grad.tolist(), "hybrid": hybrid,
                }
            )  # fmt: skip
    GOLDEN.write_text(json.dumps({"prompt": PROMPT, "pairs": PAIRS, "cases": cases}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
