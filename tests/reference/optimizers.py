"""The weights after some steps of optimizers by other people, in float64: `./run reference optimizers` writes goldens/optimizers.npz.

    torch              SGD, RMSprop, AdamW, Adafactor
    schedulefree       the authors' AdamWScheduleFree
    prodigyopt         the authors' Prodigy
    pytorch_optimizer  Lion, Adan, SOAP, Lookahead
    bitsandbytes       the levels of 8-bit states

Weights of `NAME` are in `NAME/w` and `NAME/b`, one for each of `optimizer_cases.AFTER`.
"""

import sys
import types
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from optimizer_cases import AFTER, STEPS, gradient, start

GOLDEN = Path(__file__).parents[1] / "goldens" / "optimizers.npz"


def run(make, evaluated=None):
    """The weights after the steps of AFTER. evaluated: (optimizer, weights) -> the weights that count."""
    weights = {name: torch.nn.Parameter(torch.tensor(w)) for name, w in start().items()}
    optimizer = make(list(weights.values()))
    out = {name: [] for name in weights}
    for step in range(STEPS):
        for name, g in gradient(step, {n: w.detach().numpy() for n, w in weights.items()}).items():
            weights[name].grad = torch.tensor(g)
        optimizer.step()
        if step + 1 in AFTER:
            if evaluated is not None:
                optimizer.eval()
            for name, w in weights.items():
                out[name].append(w.detach().numpy().copy())
            if evaluated is not None:
                optimizer.train()
    return {name: np.stack(each) for name, each in out.items()}


def main():
    import bitsandbytes.functional as functional
    import prodigyopt
    import pytorch_optimizer
    import schedulefree

    def schedule_free(weights):
        optimizer = schedulefree.AdamWScheduleFree(
            weights, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1, warmup_steps=4, foreach=False
        )
        optimizer.train()
        return optimizer

    def soap(weights):
        # Its decompositions are in float32 whatever the weights are.
        module = sys.modules[pytorch_optimizer.SOAP.__module__]
        module.torch = types.SimpleNamespace(**vars(torch) | {"float32": torch.float64})
        return pytorch_optimizer.SOAP(
            weights, lr=0.01, betas=(0.95, 0.9), weight_decay=0.0, precondition_frequency=3, precondition_1d=False
        )

    def lookahead(weights):
        inner = torch.optim.AdamW(weights, lr=0.01, betas=(0.9, 0.99), weight_decay=0.0)
        return pytorch_optimizer.Lookahead(inner, k=3, alpha=0.4, pullback_momentum="none")

    cases = {
        "sgd": lambda w: torch.optim.SGD(w, lr=0.01, momentum=0.8),
        "sgd_nesterov": lambda w: torch.optim.SGD(w, lr=0.01, momentum=0.8, nesterov=True),
        "rmsprop": lambda w: torch.optim.RMSprop(w, lr=0.01, alpha=0.9, eps=1e-6, momentum=0.5),
        "rmsprop_centered": lambda w: torch.optim.RMSprop(w, lr=0.01, alpha=0.9, eps=1e-6, centered=True),
        "adamw": lambda w: torch.optim.AdamW(w, lr=0.01, betas=(0.9, 0.99), eps=1e-7, weight_decay=0.1),
        "adafactor": lambda w: torch.optim.Adafactor(w, lr=0.01, weight_decay=0.0, eps=(1e-30, 1e-3)),
        "lion": lambda w: pytorch_optimizer.Lion(w, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1, weight_decouple=True),
        "adan": lambda w: pytorch_optimizer.Adan(w, lr=0.01, betas=(0.98, 0.92, 0.99), weight_decay=0.0),
        "soap": soap,
        "prodigy": lambda w: prodigyopt.Prodigy(w, lr=1.0, betas=(0.9, 0.99), weight_decay=0.1, d0=1e-2),
        "prodigy_corrected": lambda w: prodigyopt.Prodigy(
            w, lr=1.0, betas=(0.9, 0.99), d0=1e-3, use_bias_correction=True, safeguard_warmup=True
        ),
        "lookahead": lookahead,
    }
    out = {f"{name}/{leaf}": a for name, make in cases.items() for leaf, a in run(make).items()}
    out |= {f"schedule_free/{leaf}": a for leaf, a in run(schedule_free).items()}
    out |= {f"schedule_free_average/{leaf}": a for leaf, a in run(schedule_free, evaluated=True).items()}
    for signed in (False, True):
        out[f"levels/{'signed' if signed else 'unsigned'}"] = functional.create_dynamic_map(signed=signed).numpy()
    np.savez_compressed(GOLDEN, **out)
    print(f"{GOLDEN}: {len(out)} arrays, {GOLDEN.stat().st_size} bytes")


if __name__ == "__main__":
    main()
