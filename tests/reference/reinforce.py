"""Advantages, policy losses and importance weights by TRL's own trainers, from given numbers: `./run reference reinforce`.

Losses run in the trainer's method, on an object that holds only what it reads. Advantages and importance weights stand in the middle
of a method that generates, so their lines are cut out of its source and run. Random numbers in float64. Written to
goldens/reinforce.json.
"""

import inspect
import json
import math
import textwrap
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.grpo_trainer import GRPOTrainer, nanstd
from trl.trainer.rloo_trainer import RLOOTrainer

GOLDEN = Path(__file__).parents[1] / "goldens" / "reinforce.json"
GROUPS, EACH, TOKENS, LONGEST = 3, 4, 7, 9
ROWS = GROUPS * EACH
LOW, HIGH, DELTA, CISPO, BETA, ENTROPY = 0.2, 0.28, 3.0, 2.0, 0.1, 0.02
ACCELERATOR = SimpleNamespace(
    device="cpu", num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, reduction: x
)
ARGS = SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1)


def lines(kind: type, first: str, last: str) -> str:
    """The lines of a trainer's generating method from one that starts with `first` to one that starts with `last`, inclusive."""
    source = inspect.getsource(kind._generate_and_score_completions).splitlines()
    start = next(i for i, line in enumerate(source) if line.strip().startswith(first))
    end = next(i for i, line in enumerate(source) if i >= start and line.strip().startswith(last))
    return textwrap.dedent("\n".join(source[start : end + 1]))


def numbers(rng: np.random.Generator) -> dict[str, torch.Tensor]:
    lengths = rng.integers(1, TOKENS + 1, ROWS)
    mask = torch.tensor((np.arange(TOKENS) < lengths[:, None]).astype(np.float64))
    new = torch.tensor(-rng.gamma(1.0, 0.8, (ROWS, TOKENS)))
    return {
        "mask": mask,
        "new": new,
        "old": new + torch.tensor(rng.normal(0, 0.5, new.shape)),
        "reference": new + torch.tensor(rng.normal(0, 0.5, new.shape)),
        "sampler": new + torch.tensor(rng.normal(0, 0.5, new.shape)),
        "entropies": torch.tensor(rng.gamma(2.0, 0.5, new.shape)),
        "advantages": torch.tensor(rng.normal(0, 1, ROWS)),
    }


def loss(of: dict[str, torch.Tensor], **has: object) -> dict:
    """The loss of GRPOTrainer, its gradient by the new log-probabilities, and its metrics."""
    trainer = object.__new__(GRPOTrainer)
    new = of["new"].clone().requires_grad_()
    settings = {
        "model": SimpleNamespace(training=True), "accelerator": ACCELERATOR, "_metrics": {"train": defaultdict(list)}, "args": ARGS,
        "aux_loss_enabled": False, "beta": 0.0, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "loss_type": "dapo",
        "importance_sampling_level": "token", "epsilon_low": LOW, "epsilon_high": HIGH, "use_vllm": False,
        "current_gradient_accumulation_steps": 1, "max_completion_length": LONGEST, "_entropy_bonus_enabled": False,
        "_get_per_token_logps_and_entropies": lambda *a, **k: (new, of["entropies"], None),
    }  # fmt: skip
    vars(trainer).update(settings | has)
    ids = torch.zeros((ROWS, TOKENS), dtype=torch.long)
    inputs = {
        "prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": of["mask"], "advantages": of["advantages"],
        "old_per_token_logps": of["old"], "ref_per_token_logps": of["reference"], "num_items_in_batch": of["mask"].sum(),
    }  # fmt: skip
    value = trainer._compute_loss(None, inputs)
    value.backward()
    return {
        "loss": float(value.detach()),
        "gradient": new.grad.tolist(),
        "metrics": {name: values[-1] for name, values in trainer._metrics["train"].items()},
    }


def losses(of: dict[str, torch.Tensor]) -> dict:
    biased = SimpleNamespace(**vars(ARGS) | {"use_bias_correction_kl": True})
    entropy = {"_entropy_bonus_enabled": True, "use_adaptive_entropy": False, "entropy_coef": ENTROPY}
    return {
        "token": loss(of),
        "sequence": loss(of, loss_type="grpo"),
        "constant": loss(of, loss_type="dr_grpo"),
        "dual": loss(of, args=SimpleNamespace(**vars(ARGS) | {"delta": DELTA})),
        "gspo": loss(of, loss_type="grpo", importance_sampling_level="sequence"),
        "cispo": loss(of, loss_type="cispo", epsilon_high=CISPO),
        "k3": loss(of, beta=BETA),
        "k3_corrected": loss(of, beta=BETA, args=biased),
        "entropy": loss(of, **entropy),
    }


def advantages(rewards: torch.Tensor, weights: torch.Tensor, **has: object) -> list[float]:
    """Of GRPOTrainer: several rewards of each completion, NaN where missing."""
    trainer = SimpleNamespace(reward_weights=weights, **has)
    code = lines(GRPOTrainer, "unscorable_mask =", "advantages = torch.nan_to_num")
    names = {
        "torch": torch, "nanstd": nanstd, "self": trainer, "rewards_per_func": rewards, "num_generations": EACH, "device": "cpu"
    }  # fmt: skip
    trainer.reward_funcs = [None] * rewards.shape[1]
    exec(code, names)
    return names["advantages"].tolist()


def leave_one_out(rewards: torch.Tensor) -> list[float]:
    """Of RLOOTrainer."""
    trainer = SimpleNamespace(normalize_advantages=False)
    names = {"torch": torch, "nanstd": nanstd, "self": trainer, "rewards": rewards, "num_generations": EACH}
    exec(lines(RLOOTrainer, "grouped_rewards =", "advantages = torch.nan_to_num"), names)
    return names["advantages"].tolist()


def weights(of: dict[str, torch.Tensor], mode: str, low: float | None, high: float) -> list[list[float]]:
    trainer = SimpleNamespace(
        use_vllm=True, vllm_importance_sampling_correction=True, vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low, vllm_importance_sampling_clip_max=high,
    )  # fmt: skip
    names = {
        "torch": torch, "math": math, "self": trainer, "completion_mask": of["mask"], "tool_mask": None,
        "old_per_token_logps": of["old"], "sampling_per_token_logps": of["sampler"],
    }  # fmt: skip
    code = lines(GRPOTrainer, "if self.use_vllm and self.vllm_importance", "# Compute the per-token log probabilities for the ref")
    exec(code, names)
    return names["vllm_importance_sampling_ratio"].tolist()


def main() -> None:
    rng = np.random.default_rng(0)
    of = numbers(rng)
    rewards = torch.tensor(np.stack([rng.integers(0, 2, ROWS), rng.normal(0, 3, ROWS)], 1).astype(np.float64))
    rewards[5, 0], rewards[6], by = math.nan, math.nan, torch.tensor([1.0, 0.3], dtype=torch.float64)
    summed = (rewards * by).nansum(1)
    summed[6] = math.nan
    scales = {
        scale: advantages(rewards, by, multi_objective_aggregation="sum_then_normalize", scale_rewards=scale)
        for scale in ("group", "batch", "none")
    }
    each = advantages(rewards, by, multi_objective_aggregation="normalize_then_sum", scale_rewards="group")
    bounds = {"low": 0.5, "high": 1.6}
    document = {
        "constants": {
            "low": LOW, "high": HIGH, "delta": DELTA, "cispo": CISPO, "beta": BETA, "entropy": ENTROPY, "longest": LONGEST
        },
        "numbers": {name: array.tolist() for name, array in of.items()},
        "losses": losses(of),
        "rewards": [[None if math.isnan(r) else r for r in row] for row in rewards.tolist()],
        "weights": by.tolist(),
        "advantages": scales | {"each": each, "rloo": leave_one_out(summed)},
        "correction": bounds | {
            f"{level}_{mode}": weights(of, f"{level}_{mode}", bounds["low"], bounds["high"])
            for level in ("token", "sequence") for mode in ("truncate", "mask")
        },
        "overlong": get_soft_overlong_punishment(20, 8)([[1] * length for length in range(10, 24)]),
    }  # fmt: skip
    GOLDEN.write_text(json.dumps(document) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
