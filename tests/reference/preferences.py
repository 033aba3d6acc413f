"""Losses over preferences by TRL's own trainers, from given log-probabilities: `./run reference preferences`.

The methods run on objects that hold only what they read, and on a model that answers the given log-probabilities. Random numbers, in
float64 where TRL lets them be. Written to goldens/preferences.json.
"""

import json
import os
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.reward_trainer import RewardTrainer

GOLDEN = Path(__file__).parents[1] / "goldens" / "preferences.json"
STORIES = Path(os.environ.get("ARGOSY_TEST_DATA") or GOLDEN.parents[3] / "shared" / "data") / "models" / "stories260k"
PAIRS, TOKENS = 6, 9
BETA, SMOOTHING, GAMMA, CENTER = 0.3, 0.15, 0.7, 0.01
LOSSES = ("sigmoid", "sigmoid_norm", "robust", "ipo", "hinge", "apo_zero", "apo_down")
ACCELERATOR = SimpleNamespace(
    device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x if isinstance(x, torch.Tensor) else torch.tensor(x)
)


def answering(by_ids: dict) -> object:
    """A model whose log-probabilities of each batch are known by the batch's first id."""

    def model(input_ids: torch.Tensor, labels: torch.Tensor, **_: object) -> SimpleNamespace:
        logps = by_ids[int(input_ids[0, 0])] * (labels[:, 1:] != -100)
        zeros = torch.zeros_like(logps)
        return SimpleNamespace(log_probs=logps, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())

    return model


def trainer(kind: type, **has: object) -> object:
    instance = object.__new__(kind)
    vars(instance).update(
        model=SimpleNamespace(training=True), accelerator=ACCELERATOR, _metrics={"train": defaultdict(list)}, _total_train_tokens=0,
        _tp_size=1, aux_loss_enabled=False, beta=BETA, **has,
    )  # fmt: skip
    return instance


def batch(rng: np.random.Generator, rows: int, first: int) -> tuple[dict, torch.Tensor, list[int]]:
    """Ids whose first is `first`, a mask of completions of uneven lengths, and log-probabilities of the targets."""
    lengths = rng.integers(1, TOKENS - 1, rows)
    ids = torch.full((rows, TOKENS + 1), first)
    mask = torch.zeros((rows, TOKENS + 1), dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, 1 : 1 + length] = 1
    logps = torch.tensor(-rng.gamma(1.0, 0.8, (rows, TOKENS)))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask}, logps, lengths.tolist()


def dpo(rng: np.random.Generator) -> dict:
    inputs, logps, lengths = batch(rng, 2 * PAIRS, 1)
    sums = (logps * inputs["completion_mask"][:, 1:]).sum(1)
    reference = sums + torch.tensor(rng.normal(0, 2, 2 * PAIRS))
    inputs |= {"ref_chosen_logps": reference[:PAIRS], "ref_rejected_logps": reference[PAIRS:]}
    losses = {}
    for name in LOSSES:
        instance = trainer(
            DPOTrainer, ld_alpha=None, precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=[name], loss_weights=[1.0],
            label_smoothing=SMOOTHING, use_weighting=False,
        )  # fmt: skip
        losses[name] = float(instance._compute_loss(answering({1: logps}), dict(inputs), False))
    instance.loss_types, instance.loss_weights = ["sigmoid", "ipo"], [0.8, 0.3]
    mixture = float(instance._compute_loss(answering({1: logps}), dict(inputs), False))
    metrics = {name: values[-1] for name, values in instance._metrics["train"].items() if "/" in name and "logits" not in name}
    document = {"logps": sums.tolist(), "lengths": lengths, "reference": reference.tolist(), "losses": losses}
    return document | {"mixture": mixture, "metrics": metrics, "label_smoothing": SMOOTHING}


def without_reference(of: dict) -> dict:
    """CPO, SimPO and the odds ratio of ORPO on the same log-probabilities."""
    sums, means = torch.tensor(of["logps"]), torch.tensor(of["logps"]) / torch.tensor(of["lengths"])
    instance = trainer(CPOTrainer, alpha=0.0, simpo_gamma=GAMMA, label_smoothing=0.0, loss_type="sigmoid")
    cpo = float(instance.cpo_loss(sums[:PAIRS], sums[PAIRS:])[0].mean())
    instance.loss_type = "simpo"
    simpo = float(instance.cpo_loss(means[:PAIRS], means[PAIRS:])[0].mean())
    odds = trainer(ORPOTrainer).odds_ratio_loss(means[:PAIRS], means[PAIRS:])
    return {"cpo": cpo, "simpo": simpo, "gamma": GAMMA, "log_odds_ratio": float(odds[4]), "odds_ratio": -float(odds[3])}


def kto(rng: np.random.Generator) -> dict:
    inputs, logps, _ = batch(rng, PAIRS, 1)
    other, other_logps, _ = batch(rng, PAIRS, 2)
    sums, other_sums = ((logps_of * of["completion_mask"][:, 1:]).sum(1) for logps_of, of in ((logps, inputs), (other_logps, other)))
    reference = sums + torch.tensor(rng.normal(0, 2, PAIRS))
    other_reference = other_sums - torch.tensor(rng.normal(1, 2, PAIRS))
    label = torch.tensor([True, False, True, True, False, True])
    whole = inputs | {f"KL_{name}": value for name, value in other.items()}
    whole |= {"label": label, "ref_logps": reference, "ref_KL_logps": other_reference}
    instance = trainer(
        KTOTrainer, calculate_KL=True, precompute_ref_logps=True, loss_type="kto", desirable_weight=1.5, undesirable_weight=0.5
    )
    loss = float(instance._compute_loss(answering({1: logps, 2: other_logps}), whole, False))
    document = {"logps": sums.tolist(), "reference": reference.tolist(), "desirable": label.tolist(), "loss": loss}
    return document | {
        "other_logps": other_sums.tolist(), "other_reference": other_reference.tolist(), "kl": instance._metrics["train"]["kl"][-1],
        "weights": [1.5, 0.5],
    }  # fmt: skip


def reward(rng: np.random.Generator) -> dict:
    scores, margin = rng.normal(0, 2, 2 * PAIRS), rng.random(PAIRS)
    instance = trainer(RewardTrainer, args=SimpleNamespace(center_rewards_coefficient=CENTER))
    inputs = {"margin": torch.tensor(margin), "attention_mask": torch.ones(1)}
    model = lambda **_: SimpleNamespace(logits=torch.tensor(scores)[:, None])  # noqa: E731
    loss = float(instance.compute_loss(model, inputs))
    return {"scores": scores.tolist(), "margin": margin.tolist(), "center": CENTER, "loss": loss}


def scores() -> dict:
    """stories260K under a head of one score, by transformers: read at the last token."""
    from transformers import LlamaForSequenceClassification

    model = LlamaForSequenceClassification.from_pretrained(STORIES, num_labels=1, dtype=torch.float32).eval()
    rng, width = np.random.default_rng(1), model.config.hidden_size
    with torch.no_grad():
        model.score.weight.copy_(torch.sin(torch.arange(width, dtype=torch.float32))[None])
        rows = [[1, *rng.integers(3, 512, size).tolist()] for size in (4, 11, 30)]
        return {"tokens": rows, "scores": [float(model(torch.tensor([row])).logits[0, 0]) for row in rows]}


def main() -> None:
    rng = np.random.default_rng(0)
    of = dpo(rng)
    document = {"beta": BETA, "dpo": of, "without_reference": without_reference(of), "kto": kto(rng), "reward": reward(rng)}
    document["scores"] = scores()
    GOLDEN.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
