"""The batches of a run: rows of stored data, or rollouts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

from argosy.core.progress import Say
from argosy.data import pipeline
from argosy.data.batch import Batch, Batches
from argosy.data.distillation.across import FIELDS as TEACHER_FIELDS
from argosy.data.sources.clicks import ClickRows
from argosy.data.tokenizers.load import Tokenizer
from argosy.models.diffusion.controlnets.base import ControlNetSettings
from argosy.models.diffusion.learned_embeddings import LearnedEmbeddingsConfig
from argosy.parallel.place import rows_here
from argosy.run.assembly.assembly import Updates
from argosy.run.assembly.decided import Decided
from argosy.run.assembly.updates import BatchUpdates
from argosy.run.distillation import teacher_cache
from argosy.run.distillation.across import Both, is_across
from argosy.run.distillation.teacher import ROLE as TEACHER
from argosy.run.frozen import reference
from argosy.run.settings.run import Run

if TYPE_CHECKING:
    from argosy.run.assembly.encoded import SamplePrompts
    from argosy.run.rl.parts import RolloutParts


@dataclass(frozen=True)
class DataParts:
    """The parts of a run that depend on its data. `Assembly` describes the fields."""

    batches: Batches
    evals: Batches | None
    updates: Updates
    rollouts: "RolloutParts | None" = None
    prompts: "SamplePrompts | None" = None


class UnreadBatches(Batches):
    """Batches of which only the shapes are known, for a run that is planned and not started.

    shape: the shape of the micro-batches of a rollout; None for other batches.
    """

    shape: Any = None

    def __init__(self, run: Run):
        self.fingerprint, self.bytes_per_token = {}, None
        is_text = run.model.inputs == "tokens"
        # A row of other data counts as one token.
        self.tokens_per_batch = run.data.batch * (run.data.sequence if is_text else 1)
        self.sizes = {"images": image_sizes, "clicks": lambda run: ClickRows.own_sizes}.get(run.model.inputs, lambda run: {})(run)

    def __next__(self) -> Batch:
        raise StopIteration

    def position(self) -> dict[str, Any]:
        return {}

    def seek(self, position: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


def image_sizes(run: Run) -> dict[str, int]:
    """Returns the sizes of images or latents, and of the hidden states of captions, by the letters of their axes, from the settings.
    Without `data.image.size`, images have the size that the model was made for."""
    model = run.model
    side = getattr(model, "size", model.size_multiple)
    if (pixels := run.data.image.size) is not None:
        from argosy.infer.denoise.encoders import autoencoder_factor

        side = pixels // autoencoder_factor(run.encoders)
    text = {"s": getattr(model, "text_tokens", 1), "e": getattr(model, "text_width", 1), "o": getattr(model, "pooled_width", None) or 1}
    control = dict[str, int]()
    if isinstance(model, ControlNetSettings):
        control = {"y": side * model.factor, "x": side * model.factor, "k": model.id_spaces.channels if model.reads_latents else 3}
    learned = {"n": len(model.widths), "t": model.text_tokens} if isinstance(model, LearnedEmbeddingsConfig) else {}
    return {"h": side, "w": side, "c": run.model.channels} | text | control | learned


def unread_data(run: Run, decided: Decided, mesh: Any) -> DataParts:
    """Makes the data parts of a run that is only planned: no data are read, and nothing is sampled."""
    if run.rollout is None:
        return DataParts(UnreadBatches(run), UnreadBatches(run) if run.eval.batches else None, BatchUpdates())
    from argosy.run.rl.parts import part_shape
    from argosy.run.rl.updates import RolloutUpdates

    batches = UnreadBatches(run)
    batches.shape = part_shape(run, mesh, decided.shared_prompts)
    batches.sizes = batches.shape.sizes
    batches.tokens_per_batch //= run.rollout.minibatches
    return DataParts(batches, None, RolloutUpdates((TEACHER,) if run.objective.roles.get(TEACHER) else ()))


def stored_data(
    run: Run,
    decided: Decided,
    mesh: Mesh,
    source: Any,
    tokenizer: Tokenizer | None,
    progress: Callable[..., Any] | None,
    say: Say,
) -> DataParts:
    """Makes the batches of stored data, with the fields that the objective reads in addition, such as a cached reference.

    Args:
        source: the source of the data.
        progress: reports the preparation of data.
        say: called with messages.

    Raises:
        UserError: there is a mistake in data or settings.
    """
    encoded = None
    if run.encoders.used:
        from argosy.run.assembly.encoded import EncodedData

        encoded = EncodedData(run, decided, source, say)
        source = encoded.source
    share, shares = rows_here(mesh, run.data.batch)
    cached_teacher = run.objective.roles.get(TEACHER) == "cached"
    both = Both(run, tokenizer) if is_across(run.objective) else None
    fields = (teacher_cache if cached_teacher else reference).asked_of_data(run.objective)
    fields = {name: field for name, field in fields.items() if both is None or name not in TEACHER_FIELDS}
    common: dict[str, Any] = {
        "vocab": run.model.id_spaces,
        "seed": run.seed,
        "progress": progress,
        "process": share,
        "processes": shares,
        "source": source,
        "fields": fields,
        "rows_per_group": run.objective.rows_per_group,
    }

    def completed(batches: Any) -> Any:
        if run.objective.roles.get(reference.ROLE) == "cached":
            batches = reference.WithReference(batches)
        if cached_teacher:
            batches = teacher_cache.WithTeacher(batches, run.objective.top)
        return batches if both is None else both(batches)

    batches = completed(pipeline.build(run.data, tokenizer, **common))
    evals = None
    if run.eval.batches and pipeline.holds_out(run.data, source):
        evals = completed(pipeline.eval_batches(run.data, tokenizer, limit=run.eval.batches, **common))
    prompts = None if encoded is None else encoded.finish(batches.sizes)
    return DataParts(batches, evals, BatchUpdates(), prompts=prompts)


def sampled_data(run: Run, decided: Decided, mesh: Mesh, tokenizer: Tokenizer) -> DataParts:
    """Makes the batches of a run that learns from rollouts, by rewards or by a teacher.

    Raises:
        UserError: there is a mistake in prompts, rewards or settings.
    """
    from argosy.run.rl.updates import RolloutUpdates

    if run.objective.roles.get(TEACHER):
        from argosy.run.distillation.student import student_rollouts

        rollouts = student_rollouts(run, mesh, tokenizer)
    else:
        from argosy.run.rl.policy import policy_rollouts

        rollouts = policy_rollouts(run, decided, mesh, tokenizer)
    return DataParts(rollouts.batches, None, RolloutUpdates(rollouts.roles), rollouts)
