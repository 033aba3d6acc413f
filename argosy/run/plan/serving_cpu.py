"""Predicts an engine's step on a CPU and the memory of its process, including costs that do not matter on accelerators.

Weights that are packed for compiled kernels (`infer.cpu.panels`) are read at the speed of the memory. XLA is slower with other weights:
unquantized experts, and the weights of latent attention. Small instructions between matrix products take longer than reading the
weights in small models. And compiled programs take memory of the process.
"""

import math
from dataclasses import replace

from argosy.infer.engine.batch import BatchBuilder
from argosy.infer.forward.layers import LayerPrograms
from argosy.infer.forward.passes import TOGETHER
from argosy.infer.forward.step import PageTables
from argosy.models.parts.attention.ragged import rows_share_pages
from argosy.models.parts.weight import logical
from argosy.observe.hlo.estimate import Prices
from argosy.ops.native.products import SMALLEST
from argosy.parallel.scope import scope
from argosy.run.plan.serving import PlannedModel, ServingStep, step_parts, step_work, weights_read

# All constants are measured (bench/plan_here.py engine, docs/measured.md).
# How many times as long as reading a packed weight takes one that XLA multiplies with: of experts, and of others.
EXPERTS, OTHERS = 6.0, 20.0
# Seconds of a head for each token that it attends to, in compiled kernels and in XLA's loop over blocks of pages.
SEEN_S, SEEN_BY_XLA_S = 1.2e-8, 1e-7
# Seconds of the small instructions of a layer, and for each row; of the sampler, and for each logit; of a step besides.
LAYER_S, ROW_S, SAMPLER_S, LOGIT_S, STEP_S = 8e-5, 3e-6, 1.5e-4, 2.5e-9, 1.5e-4
# The share of the speed of a large product that those of a decode step reach.
FEW_ROWS = 0.85
# Bytes of the programs for one size of a step: outside of layers, of a layer, and of a layer's experts.
OUTSIDE, LAYER, LAYER_EXPERTS = 9 << 20, 5 << 18, 8 << 20
SMALL = "small instructions"


def serving_step(model: PlannedModel, decodes: int, prompt: int, length: int, prices: Prices) -> ServingStep:
    """Predicts the time of a step on the devices of a model. The arguments are those of `step_work`."""
    step = step_work(model, decodes, prompt, length, prices)
    if not model.target.shares_memory:
        return step
    tokens, rows, config = decodes + prompt, decodes + bool(prompt), model.config
    speed = prices.read_bytes_per_s or prices.bytes_per_s
    parts = step_parts(model, decodes, prompt, length, replace(prices, bytes_per_s=speed))
    axes, times = logical(model.module), {True: EXPERTS - 1, False: OTHERS - 1}
    slow = sum(
        size * times["experts" in axes[address]]
        for address, size in weights_read(model, tokens).items()
        if model.packed and address not in model.packed and math.prod(model.shapes[address].shape) >= SMALLEST
    )
    seen = decodes * length * config.heads * config.layers * (SEEN_S if _has_kernel(model) else SEEN_BY_XLA_S)
    products = parts.products * (decodes / FEW_ROWS + prompt) / max(1, tokens)
    parts = parts._replace(weights=parts.weights + slow / speed, products=products, mixing=max(parts.mixing, seen))
    small = config.layers * (LAYER_S + ROW_S * tokens) + SAMPLER_S + LOGIT_S * rows * config.vocab + STEP_S
    return replace(step, by_kind={**parts.by_kind(), SMALL: small})


def _has_kernel(model: PlannedModel) -> bool:
    """Whether the compiled attention kernel supports this cache. It needs separate keys and values, not quantized."""
    entries = [name for spec, _ in model.needs.specs.values() for name, _ in spec.token]
    return bool(model.packed) and model.needs.narrow is None and set(entries) <= {"k", "v"}


def programs_bytes(model: PlannedModel) -> int:
    """Predicts the memory of an engine's compiled programs, one for each size of a step. It is 0 on accelerators, whose programs are
    small.
    """
    if not model.target.shares_memory:
        return 0
    needs = model.needs
    shares = rows_share_pages(needs.specs, needs.longest, slack=needs.longest)
    tables = PageTables(needs.page, needs.pages, tuple(needs.windows))
    with scope(model.mesh):
        sizes = BatchBuilder(model.settings, tables, shares, model.config.width).possible_sizes()
    layers = range(model.config.layers) if model.target.count > 1 else LayerPrograms(model.module, TOGETHER).compiled_layers
    of_experts = {address.split(".")[1] for address, names in logical(model.module).items() if "experts" in names}
    each = sum(LAYER + LAYER_EXPERTS * (str(i) in of_experts) for i in layers)
    return len(sizes) * (OUTSIDE + each)
