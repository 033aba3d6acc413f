"""Collects the facts of a run for the header of its log and report."""

from typing import TYPE_CHECKING, Any

from argosy.core.counts import plural
from argosy.run.settings.run import Run

if TYPE_CHECKING:
    from argosy.run.assembly.assembly import Assembly

# What models read that read no tokens, as their runs count it.
UNITS = {"images": "image", "clicks": "row"}


def header_of(a: "Assembly", command: str, resumed: int | None) -> dict[str, Any]:
    """Returns the facts of a run's header, by name.

    Args:
        command: the command that started the run.
        resumed: the step that the run resumes from; None for a new run.
    """
    from argosy.observe.environment import versions
    from argosy.run.assembly import diloco, grid, stages
    from argosy.run.assembly.winners import winners_text

    settings, all_versions = a.run, versions()
    installed = {
        name: all_versions[name]
        for name in ("argosy", "python", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
        if name in all_versions
    }
    return {
        "command": command,
        "versions": installed,
        "model": settings.model.preset or _family_of(settings),
        "parameters": a.parameters,
        **_adapter(a),
        **({"vocab": settings.model.vocab} if settings.model.inputs == "tokens" else {}),
        "steps": a.steps,
        **_ends(a),
        **_work(a),
        "devices": a.mesh.size,
        "device": a.mesh.devices.flat[0].device_kind,
        "precision": a.decided.precision,
        "layers": a.decided.layers,
        "products": a.products.name,
        **({"tuned": tuned} if (tuned := winners_text(a)) else {}),
        **grid.mesh_header(a.mesh, a.shapes.params | a.shapes.rest),
        **(stages.stages_header(a.model.layers.run) if hasattr(a.model, "layers") else {}),
        **diloco.diloco_header(settings, a.mesh),
        "weights": _weights(settings, resumed),
        "tokenizer": tokenizer_of(a),
        "corpus": a.batches.summary(settings.steps).text,
    }


def _ends(a: "Assembly") -> dict[str, str]:
    """Returns the reason why the run has fewer steps than its settings say; empty if it does not."""
    return {} if a.steps == a.run.steps else {"ends": f"by data.epochs, before steps={a.run.steps}"}


def _work(a: "Assembly") -> dict[str, Any]:
    """Describes the work of a step: tokens and FLOPs. For rollouts, whose lengths are unknown, describes how much is sampled."""
    if a.run.rollout is None:
        counted = UNITS.get(a.run.model.inputs)
        fields = {"tokens_per_step": a.batches.tokens_per_batch, "flops_per_step": a.flops_per_step}
        return fields if counted is None else fields | {"unit": counted}
    from argosy.run.rl.begin import rollout_header

    return rollout_header(a)


def _weights(settings: Run, resumed: int | None) -> str:
    """Describes where the weights of the first step come from."""
    init = settings.init
    if resumed is not None:
        return f"from step {resumed} of this run"
    if init.weights:
        return f"from {init.weights}"
    if init.state:
        return f"from the state of {init.state}"
    if (word := getattr(settings.objective, "initializer", None)) is not None:
        return f"those of the word {word!r} in {settings.encoders.pipeline}"
    return f"random, from seed {settings.seed}"


def _adapter(a: "Assembly") -> dict[str, str]:
    """Describes the adapter and the share of the parameters that it trains; empty without an adapter."""
    from argosy.adapt.settings import ADAPTERS
    from argosy.core.settings.schema import Choice
    from argosy.models.parts.weight import parameter_count

    if not a.adapters.contractions:
        return {}
    settings, some, all_ = a.run.adapter, parameter_count(a.shapes.params), a.parameters
    kind = Choice(ADAPTERS).name_of(settings)
    extra = f", beside {plural(len(a.adapters.retrained), 'weight')} in full" if a.adapters.retrained else ""
    on = f"{kind}, rank {settings.rank}, on {plural(len(a.adapters.contractions), 'weight')}{extra}"
    return {"adapter": f"{on}; {some:,} trained ({some / all_:.2%})"}


def tokenizer_of(a: "Assembly") -> str:
    """Describes the tokenizer, and its size relative to the model's vocabulary."""
    if a.run.model.inputs == "clicks":
        return f"none; the model's tables have {a.run.model.dims['V']:,} rows"
    if a.run.model.inputs == "images":
        sizes = a.batches.sizes
        kind = "latents" if a.run.encoders.pipeline or a.run.encoders.autoencoder else "images"
        return f"none; {kind} of {sizes['h']} x {sizes['w']} with {plural(sizes['c'], 'channel')}"
    tokenizer, vocab = a.tokenizer, a.run.model.vocab
    if tokenizer is None:
        return f"none; the model's vocabulary has {vocab:,} tokens"
    return f"{a.run.data.tokenizer}, {tokenizer.vocab:,} tokens of the model's {vocab:,}"


def _family_of(settings: Run) -> str:
    """Returns the name of the model's family."""
    from argosy.core.settings import dump

    return str(dump(settings)["model"]["family"])
