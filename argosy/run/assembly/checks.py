"""Opens the mesh, data and tokenizer of a run, and checks them against its settings."""

from functools import partial
from typing import Any

from jax.sharding import Mesh

from argosy.core.counts import plural
from argosy.core.errors import BadInput, mistakes_of, raise_mistakes
from argosy.core.settings import Choice
from argosy.data import pipeline
from argosy.data.images.shards import image_data
from argosy.data.sources import RowSource
from argosy.data.tokenizers.load import Tokenizer
from argosy.ops.attention import ATTENTION
from argosy.ops.grouped import GROUPED_MATMUL
from argosy.ops.matmul import MATMUL
from argosy.parallel.place import row_shares
from argosy.parallel.target import Target
from argosy.run.settings.run import Run
from argosy.run.start.preflight import check_experts
from argosy.train.objectives import OBJECTIVES


def check_implementations(execution: Any) -> None:
    """Checks that the implementations in the settings exist.

    Raises:
        UserError: an implementation does not exist.
    """
    choices = ((ATTENTION, execution.attention), (GROUPED_MATMUL, execution.experts), (MATMUL, execution.products))
    raise_mistakes(mistakes_of(*(partial(registry.__getitem__, name) for registry, name in choices if name is not None)))


def mesh_of(run: Run, target: Target) -> Mesh:
    """Makes the mesh of a run over its devices. On this machine, devices that only sample are left out.

    Raises:
        BadInput: the mesh does not fit the devices, or the batch or the experts are not divisible by its axes.
    """
    if run.rollout is not None:
        from argosy.run.rl.rollout_engine import trainer_devices

        mesh = (Target.here(trainer_devices(run.rollout)) if target.is_here else target).mesh(run.mesh)
        check_experts(run.model, mesh.shape["expert"])
        return mesh
    mesh = target.mesh(run.mesh)
    check_experts(run.model, mesh.shape["expert"])
    shares, together = row_shares(mesh), run.objective.rows_per_group
    if run.data.batch % (shares * run.accumulate * together):
        raise BadInput(
            f"data.batch = {run.data.batch} does not divide over {plural(shares, 'device')}"
            + (f", accumulate = {run.accumulate}" if run.accumulate > 1 else "")
            + (f" and groups of {together} rows" if together > 1 else ""),
            hint=f"make it a multiple of {shares * run.accumulate * together}",
        )
    if (context := mesh.shape["context"]) > 1 and run.data.sequence % (2 * context):
        problem = f"data.sequence = {run.data.sequence} does not divide into {2 * context} pieces, twice mesh.context"
        raise BadInput(problem, hint=f"make it a multiple of {2 * context}")
    return mesh


def source_of(run: Run) -> tuple[Any, Tokenizer | None]:
    """Returns the source of a run's data, and its tokenizer.

    Raises:
        UserError: the source or the tokenizer is missing, or the tokenizer has tokens that the model lacks.
    """
    data = image_data(run.data) if run.model.inputs == "images" else run.data
    source, tokenizer = pipeline.find(data), pipeline.tokenizer_for(data)
    is_text = not isinstance(source, RowSource)
    check_formats(run, source)
    return source, pipeline.fitting(tokenizer, run.data, run.model.vocab) if is_text else tokenizer


def prompts_tokenizer(run: Run) -> Tokenizer:
    """Returns the tokenizer of a run that learns from completions of prompts.

    Raises:
        BadInput: the data have no tokenizer.
    """
    tokenizer = pipeline.tokenizer_for(run.data)
    if tokenizer is None:
        raise BadInput("prompts are texts, and this data has no tokenizer", hint="data.tokenizer=FOLDER")
    return pipeline.fitting(tokenizer, run.data, run.model.vocab)


def check_formats(run: Run, source: Any) -> None:
    """Checks that the records of the data have the format that the objective trains on.

    Raises:
        BadInput: the records have another format, or the data have no records.
    """
    from argosy.data.mixtures.table import DataMixture
    from argosy.data.prepare import Prepared
    from argosy.data.sources import Source
    from argosy.data.sources.records import FORMATS, GROUPS

    if isinstance(source, DataMixture):
        for part in source.parts:
            check_formats(run, part.source)
        return
    if not isinstance(source, Source | Prepared):
        return
    data_format = source.format if isinstance(source, Source) else source.fingerprint.get("source.format", "text")
    formats, name = run.objective.formats, Choice(OBJECTIVES).name_of(run.objective)
    where = f"data.source={run.data.source_name}"
    if formats and data_format not in formats:
        columns = " or ".join(" and ".join(f"`{c}`" for c in FORMATS[kind][0]) for kind in formats)
        problem = f"objective={name} trains on `{'` or `'.join(formats)}` records, and this data is `{data_format}`"
        prefix = "objective.negatives=N trains on records with N negatives; or " if data_format in run.objective.needs.formats else ""
        raise BadInput(problem, where=where, hint=f"{prefix}give records with {columns}; data.columns.NAME=COLUMN renames")
    if not formats and data_format in GROUPS:
        others = {
            "preference": "data.columns.completion=chosen trains on the chosen answers; data.format=messages reads other columns",
            "kto": "data.format=completion reads the answers without their labels",
            **dict.fromkeys(("pair", "triplet", "negatives"), "objective=contrastive trains on it"),
        }
        problem = f"objective={name} trains on single texts, and this data is `{data_format}`"
        raise BadInput(problem, where=where, hint=others.get(data_format, "objective=process_reward trains on it"))
    together, least = run.objective.rows_per_group, run.objective.needs.least_groups
    if (examples := run.data.batch // together) < least:
        problem = f"data.batch = {run.data.batch} holds {plural(examples, 'example')}, and objective={name} compares those of a batch"
        raise BadInput(problem, where=where, hint=f"make it at least {least * together}: an example is {plural(together, 'row')}")
