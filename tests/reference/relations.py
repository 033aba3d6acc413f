"""Divergences of relations by the MiniLMv2 of Bloomberg (github.com/bloomberg/minilmv2.bb, Apache-2.0), from given queries, keys and
values: `.reference/bin/python tests/reference/relations.py FOLDER`, where FOLDER/minilmv2/minilmv2.py is theirs. Random numbers, in
float64. Its models are encoders; here, scores of later tokens are set to -1e30 before they are handed to it. Written to
goldens/relations.json.
"""

import json
import math
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import torch

GOLDEN = Path(__file__).parents[1] / "goldens" / "relations.json"
# Lengths of the sequences, and the features of a token: queries, keys, values.
LENGTHS, STUDENT, TEACHER, HEADS = (7, 4), (12, 6, 6), (18, 18, 24), (1, 3, 6)
RELATIONS = {"qq": (0, 0), "kk": (1, 1), "vv": (2, 2)}


def main(folder: str) -> None:
    spec = spec_from_file_location("minilmv2", Path(folder) / "minilmv2" / "minilmv2.py")
    assert spec is not None
    assert spec.loader is not None
    theirs = module_from_spec(spec)
    spec.loader.exec_module(theirs)
    rng = np.random.default_rng(0)
    inputs = {
        name: [rng.normal(0, scale, (len(LENGTHS), max(LENGTHS), size)) for size in sizes]
        for name, sizes, scale in (("student", STUDENT, 1.0), ("teacher", TEACHER, 1.3))
    }
    mask = torch.tensor([[int(t < length) for t in range(max(LENGTHS))] for length in LENGTHS])
    later = torch.triu(torch.ones(max(LENGTHS), max(LENGTHS)), 1).bool()
    cases = []
    for heads in HEADS:
        student_model = theirs.MiniLM.__new__(theirs.MiniLM)
        torch.nn.Module.__init__(student_model)
        student_model.A_r, student_model.kl_loss_fn = heads, torch.nn.KLDivLoss(reduction="sum")

        def scores(a: torch.Tensor, b: torch.Tensor, student_model: object = student_model, heads: int = heads) -> torch.Tensor:
            size = a.shape[-1] // heads
            x, y = (student_model._transpose_for_scores_relation(each, size) for each in (a, b))
            return (torch.matmul(x, y.transpose(-1, -2)) / math.sqrt(size)).masked_fill(later, -1e30)

        for name, (i, j) in RELATIONS.items():
            ours = [torch.tensor(array, requires_grad=True) for array in inputs["student"]]
            other = [torch.tensor(array) for array in inputs["teacher"]]
            value = student_model._get_kl_loss(scores(other[i], other[j]), scores(ours[i], ours[j]), mask)
            value.backward()
            gradient = ours[i].grad
            assert gradient is not None
            cases.append({"relation": name, "heads": heads, "loss": float(value.detach()), "gradient": gradient.tolist()})
    arrays = {name: [array.tolist() for array in arrays] for name, arrays in inputs.items()}
    GOLDEN.write_text(json.dumps(arrays | {"lengths": LENGTHS, "cases": cases}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
