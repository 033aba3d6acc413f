"""Optimizers. Each has a file with its settings, equation, paper and differences from the paper.

    name             arrays per weight   what it is
    adamw, nadamw    2                   Adam with decoupled weight decay; with Nesterov's momentum
    lion, sgd        1; 0 or 1           the sign of a momentum; plain descent
    rmsprop          1                   divided by the root of the mean square
    adan             4                   momentum of gradients and of their differences
    adafactor        a row and a column  the mean square of a matrix in little memory
    muon             1                   orthogonalized momentum of matrices
    soap, shampoo    2 and 2 (m² + n²)   Kronecker-factored preconditioners of matrices [m, n]
    schedule_free    2                   an average of the weights in place of a schedule
    prodigy          4                   estimates its learning rate

All optimizers have groups of weights (`groups`), states in 8 bits (`state_types`) and slow weights (`lookahead`). To add an optimizer,
add a file here and its line below. A user's file needs no line: `optimizer=FILE.py:CLASS` names a class of settings that derives from
`train.optimizers.base.Optimizer`. A package needs no line either if it declares the entry point `argosy.optimizers`.

This file imports no jax, and neither do optimizers at their top, because settings are read without it.
"""

from argosy.core.registry import Registry

_HERE = "argosy.train.optimizers"

OPTIMIZERS = Registry(
    "optimizer",
    {
        "adamw": f"{_HERE}.adam:AdamW",
        "nadamw": f"{_HERE}.adam:NAdamW",
        "lion": f"{_HERE}.lion:Lion",
        "sgd": f"{_HERE}.sgd:SGD",
        "rmsprop": f"{_HERE}.sgd:RMSProp",
        "adan": f"{_HERE}.adan:Adan",
        "adafactor": f"{_HERE}.adafactor:Adafactor",
        "muon": f"{_HERE}.muon:Muon",
        "soap": f"{_HERE}.soap:SOAP",
        "shampoo": f"{_HERE}.shampoo:Shampoo",
        "schedule_free": f"{_HERE}.schedule_free:ScheduleFree",
        "prodigy": f"{_HERE}.prodigy:Prodigy",
    },
    files=True,
)
OPTIMIZERS.add_installed("argosy.optimizers")
