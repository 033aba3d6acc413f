"""Builds everything a training run needs from its settings, before anything is written, and checks that it fits."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from argosy.adapt.base import base_addresses, lay, retrained
from argosy.adapt.settings import Dora
from argosy.core.counts import plural
from argosy.core.errors import BadInput, Unsupported, mistakes_of, refuse
from argosy.core.settings import Choice
from argosy.data import pipeline
from argosy.data.batch import Batches
from argosy.data.distillation.across import FIELDS as OF_BOTH
from argosy.data.sources import RowSource
from argosy.data.tokenizers.load import Tokenizer
from argosy.models.parts.stack.remat import check_kept
from argosy.models.parts.weight import Choosing, abstract, logical, variables
from argosy.ops.attention import ATTENTION
from argosy.ops.grouped import GROUPED_MATMUL
from argosy.ops.matmul import MATMUL
from argosy.parallel.gather import Once
from argosy.parallel.place import like_weights, row_shares, rows_here
from argosy.parallel.rules import shardings
from argosy.rl.policy.critic import PREFIX, attach_critic
from argosy.run import diloco as replicas
from argosy.run.assembly import Assembly, scheduled_steps
from argosy.run.combinations import Situation, violated
from argosy.run.decided import Decided, backend
from argosy.run.distillation import teacher_cache
from argosy.run.distillation.across import Both, is_across
from argosy.run.distillation.address import is_endpoint
from argosy.run.distillation.served import ServedTeacher
from argosy.run.distillation.teacher import ROLE as TEACHER
from argosy.run.distillation.teacher import Teacher
from argosy.run.distillation.teacher import kind_of as taught
from argosy.run.frozen import reference
from argosy.run.frozen.role import Role
from argosy.run.memory import estimated_need
from argosy.run.offload import check_offload
from argosy.run.preflight import check_experts
from argosy.run.products import products_of
from argosy.run.settings import Run
from argosy.run.stages import check_groups, execution
from argosy.train import diloco, projection
from argosy.train.guard import begin
from argosy.train.offload import HOST, pieces_for, places_on_host, weights_on_host
from argosy.train.optim import scaled
from argosy.train.settings import OBJECTIVES
from argosy.train.state import TrainState, meanings_of, trained


def check_implementations(execution: Any) -> None:
    """Checks that the implementations that the settings name exist.

    Raises:
        UserError: one does not.
    """
    named = ((ATTENTION, execution.attention), (GROUPED_MATMUL, execution.experts), (MATMUL, execution.products))
    refuse(mistakes_of(*(partial(registry.__getitem__, name) for registry, name in named if name is not None)))


def mesh_of(run: Run) -> Mesh:
    """The mesh of a run over the devices of this process.

    Raises:
        BadInput: it does not fit the devices, or the batch or the experts do not divide over it.
    """
    if run.rollout is not None:
        from argosy.run.rl.rollout_engine import trainer_devices

        mesh = run.mesh.build(trainer_devices(run.rollout))
        check_experts(run.model, mesh.shape["expert"])
        return mesh
    mesh = run.mesh.build()
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
        what = f"data.sequence = {run.data.sequence} does not divide into {2 * context} pieces, twice mesh.context"
        raise BadInput(what, hint=f"make it a multiple of {2 * context}")
    return mesh


def data_of(run: Run) -> tuple[Any, Tokenizer | None]:
    """The source of a run's data and its tokenizer.

    Raises:
        UserError: one of them is missing, or the tokenizer makes tokens that the model lacks.
    """
    source, tokenizer = pipeline.find(run.data), pipeline.tokenizer_for(run.data)
    is_text = not isinstance(source, RowSource)
    check_formats(run, source)
    return source, pipeline.fitting(tokenizer, run.data, run.model.vocab) if is_text else tokenizer


def prompts_tokenizer(run: Run) -> Tokenizer:
    """The tokenizer of a run that learns from answers to prompts.

    Raises:
        BadInput: there is none.
    """
    tokenizer = pipeline.tokenizer_for(run.data)
    if tokenizer is None:
        raise BadInput("prompts are texts, and this data has no tokenizer", hint="data.tokenizer=FOLDER")
    return pipeline.fitting(tokenizer, run.data, run.model.vocab)


def check_formats(run: Run, source: Any) -> None:
    """Checks that the records of the data are what the objective trains on.

    Raises:
        BadInput: they are not, or the data has none.
    """
    from argosy.data.prepare import Prepared
    from argosy.data.sources import Source
    from argosy.data.sources.records import FORMATS, GROUPS

    if not isinstance(source, Source | Prepared):
        return
    found = source.format if isinstance(source, Source) else source.fingerprint.get("source.format", "text")
    wanted, name = getattr(run.objective, "trains_on", ()), Choice(OBJECTIVES).name_of(run.objective)
    where = f"data.source={run.data.source}"
    if wanted and found not in wanted:
        columns = " or ".join(" and ".join(f"`{c}`" for c in FORMATS[one][0]) for one in wanted)
        what = f"objective={name} trains on `{'` or `'.join(wanted)}` records, and this data is `{found}`"
        raise BadInput(what, where=where, hint=f"give records with {columns}; data.columns.NAME=COLUMN renames")
    if not wanted and found in GROUPS:
        others = {
            "preference": "data.columns.completion=chosen trains on the chosen answers; data.format=messages reads other columns",
            "kto": "data.format=completion reads the answers without their labels",
        }
        what = f"objective={name} trains on single texts, and this data is `{found}`"
        raise BadInput(what, where=where, hint=others.get(found, "objective=process_reward trains on it"))
    batch, least = run.data.batch // run.objective.rows_per_group, getattr(run.objective, "least_groups", 1)
    if batch < least:
        what = f"data.batch = {run.data.batch} holds {batch} example, and objective={name} estimates a divergence over the batch"
        raise BadInput(
            what, where=where, hint=f"make it at least {least * run.objective.rows_per_group}: two rows an example"
        )


def assemble(run: Run, decided: Decided, progress: Any = None) -> Assembly:
    """Checks and builds everything, without drawing or reading weights.

    Raises:
        UserError: a mistake in implementations, data, tokenizer, model, mesh, batch or memory.
    """
    refuse(list(violated(Situation(run, jax.process_count(), backend()))))
    parts: dict[str, Any] = {}
    refuse(
        mistakes_of(
            lambda: check_implementations(run.execution),
            lambda: parts.update(mesh=mesh_of(run)),
            lambda: parts.update(data=data_of(run) if run.rollout is None else (None, prompts_tokenizer(run))),
        )
    )
    mesh, (source, tokenizer) = parts["mesh"], parts["data"]
    replicas.check(run, mesh)
    if run.rollout is not None and taught(run.objective):
        from argosy.run.distillation.lessons import Tutored, lessons_of

        return _assembled(Tutored, run, decided, mesh, tokenizer, lessons_of(run, mesh, tokenizer), None)
    if run.rollout is not None:
        from argosy.run.rl.reinforce import Reinforced, rollouts_of

        return _assembled(Reinforced, run, decided, mesh, tokenizer, rollouts_of(run, decided, mesh, tokenizer), None)
    common: dict[str, Any] = {"vocab": run.model.vocab, "seed": run.seed, "progress": progress}
    share, shares = rows_here(mesh, run.data.batch)
    common |= {"process": share, "processes": shares, "source": source}
    teaching = taught(run.objective)
    both = Both(run, tokenizer) if is_across(run.objective) else None
    fields = (
        teacher_cache.asked_of_data(run.objective) if teaching == "cached" else reference.asked_of_data(run.objective)
    )
    fields = {name: field for name, field in fields.items() if both is None or name not in OF_BOTH}
    common |= {"fields": fields, "rows_per_group": run.objective.rows_per_group}
    batches: Any = pipeline.build(run.data, tokenizer, **common)
    evals: Any = None
    if run.eval.batches and pipeline.holds_out(run.data, source):
        evals = pipeline.eval_batches(run.data, tokenizer, limit=run.eval.batches, **common)
    if reference.kind_of(run.objective) == "cached":
        batches, evals = reference.WithReference(batches), evals and reference.WithReference(evals)
    if teaching == "cached":
        batches, evals = (of and teacher_cache.WithTeacher(of, run.objective.top) for of in (batches, evals))
    if both is not None:
        batches, evals = both(batches), both(evals)
    return _assembled(Assembly, run, decided, mesh, tokenizer, batches, evals)


def _assembled(
    kind: type[Assembly],
    run: Run,
    decided: Decided,
    mesh: Mesh,
    tokenizer: Any,
    batches: Batches,
    evals: Batches | None,
) -> Assembly:
    """What does not depend on where batches come from: the model, the optimizer, and whether they fit."""
    how = execution(run, decided, mesh)
    model = run.model.build(how)
    check_groups(model, mesh.shape["stage"], run.execution.rounds)
    check_kept(model, run.execution.keep)
    replicas.check_model(run, model, scheduled_steps(run.steps, batches))
    if not (run.init.weights or run.init.state) and (
        drawn := [a for a, v in variables(model).items() if isinstance(v, Choosing)]
    ):
        raise BadInput(
            f"{plural(len(drawn), 'weight')} of the sparse-attention indexer would keep their random values: nothing trains them",
            hint="start from trained weights (init.weights=FOLDER), or leave the indexer out: model.index=none",
        )
    adapted, beneath = list[str](), dict[str, Any]()
    if not run.adapter.trains_base:
        laid = beneath_of(run)
        under = (lambda model: beneath.update(lay(model, laid))) if laid else None
        adapted = run.adapter.put_on(model, jnp.dtype(decided.base_dtype), under)
    base = frozenset(base_addresses(model)) if adapted else frozenset()
    whole = frozenset(retrained(model))
    critic = getattr(run.objective, "critic", None)
    if critic is not None:
        attach_critic(model, run.model, how)
    roles: dict[str, Role] = {}
    teaching = taught(run.objective)
    served = teaching == "cached" and is_endpoint(run.objective.teacher)
    teacher: Any = None
    if teaching:
        teacher = ServedTeacher(run, tokenizer) if served else Teacher(run, decided, mesh, tokenizer)
    if teacher is not None and teaching == "online":
        roles[TEACHER] = teacher.role
        projection.attach(model, run.objective, roles)
    graph, params, rest = trained(model)
    rate = run.schedule.build(scheduled_steps(run.steps, batches))
    shapes = abstract(model)
    weights = shardings(logical(model), {a: s.shape for a, s in shapes.items()}, run.mesh.table(), mesh)
    offloads = run.execution.offload != "none"
    if offloads:
        check_offload(run, decided, mesh)
    pieces = pieces_for(run.optimizer, meanings_of(model), shapes, weights) if offloads else None
    optimizer = run.optimizer.build(rate, meanings_of(model), pieces)
    if critic is not None:
        optimizer = scaled(optimizer, PREFIX, critic.rate)
    if run.diloco.every:
        optimizer = diloco.around(optimizer, mesh.shape[diloco.AXIS])

    def described(leaf: Any, place: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    state = jax.eval_shape(
        lambda params, rest: TrainState.start(params, rest, optimizer.init(params), 0, begin(run.guard)),
        {a: shapes[a] for a in params},
        {a: shapes[a] for a in rest},
    )
    places = like_weights(state, weights, shapes, mesh)
    if offloads:
        places = replace(places, optimizer=places_on_host(places.optimizer, state.optimizer, state.params))
        if run.execution.offload == "weights":
            places = replace(places, params=weights_on_host(places.params, meanings_of(model)))
        elif not any(place.memory_kind == HOST for place in jax.tree.leaves(places.optimizer)):
            what = f"{type(run.optimizer).__name__} keeps no arrays with these settings, so there is nothing to move to the host"
            raise BadInput(what, where="set by execution.offload", hint="execution.offload=none")
    if run.execution.gather == "once" and not Once(weights).gathers:
        raise BadInput(
            "no weight is split over mesh.fsdp, so there is nothing to gather once", where="set by execution.gather"
        )
    if run.diloco.every:
        places = replace(places, optimizer=diloco.places(state.optimizer, weights, shapes, mesh))
    stated = jax.tree.map(described, state, places)
    if reference.kind_of(run.objective) in ("online", "rollout"):
        beside = frozenset(a for a in shapes if a.startswith(PREFIX)) if critic is not None else frozenset()
        roles[reference.ROLE] = Role(graph, stated.params | stated.rest, base | beside)
    estimated_need(run, decided, state, places, mesh, roles).check()
    learning_rate = lambda step: run.optimizer.learning_rate * rate(step)  # noqa: E731
    return kind(
        run, decided, mesh, tokenizer, batches, evals, model, graph, optimizer, learning_rate,
        stated, places, tuple(adapted), base, whole, beneath, roles, teacher=teacher,
        multiplies=products_of(run, decided.products, decided.precision, mesh),
    )  # fmt: skip


def beneath_of(run: Run) -> Mapping[str, Any]:
    """The adapters of the base that stay as they are under a run's own ones, by the per-layer name of their contraction.

    Raises:
        BadInput: the base has adapters, and the run does not say what happens to them; or it says so, and there are none.
        Unsupported: DoRA on either side, adapters of a quantized base, or rollouts.
    """
    from argosy.checkpoint.open import open_model

    onto, weights = run.adapter.onto, str(run.init.weights)
    if "://" not in weights and not Path(weights).exists():
        # A run that resumes says what is missing when it looks for its base.
        return {}
    under = open_model(weights).adapted
    if under is None:
        if onto is not None:
            raise BadInput(f"adapter.onto = {onto}, and {weights} has no adapters", hint="leave adapter.onto out")
        return {}
    if onto is None:
        hint = "adapter.onto=merge puts the new ones on their sum; adapter.onto=stack keeps them as they are under the new ones"
        raise BadInput(f"{weights} has adapters already", hint=hint)
    if onto == "merge":
        return {}
    merge = "adapter.onto=merge"
    if under.is_quantized:
        raise Unsupported("adapters of a quantized base cannot be stacked on: its rounding would be lost", hint=merge)
    if isinstance(run.adapter, Dora) or any(one.m is not None for one in under.adapters.values()):
        raise Unsupported("DoRA is not stacked: it scales the sum of all below it", hint=merge)
    if run.rollout is not None:
        raise Unsupported("rollouts with stacked adapters are not built", hint=merge)
    return under.adapters
