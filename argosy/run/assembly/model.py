"""Builds the model of a run with its adapters, critic and projection, and the frozen models. Weights are neither initialized nor
read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from argosy.adapt.base import base_addresses, lay, retrained_addresses
from argosy.adapt.quant import Scheme, apply_schemes
from argosy.adapt.settings import Dora, Lora
from argosy.core.addresses import is_address, is_missing
from argosy.core.counts import plural
from argosy.core.errors import BadInput, Unsupported
from argosy.data.tokenizers.load import Tokenizer
from argosy.models.parts.stack.remat import check_kept
from argosy.models.parts.weight import SelectionWeight, variables
from argosy.rl.policy.critic import attach_critic
from argosy.run.assembly import diloco as replicas
from argosy.run.assembly.assembly import AdapterParts
from argosy.run.assembly.decided import Decided
from argosy.run.assembly.stages import check_groups, execution
from argosy.run.distillation.address import is_endpoint
from argosy.run.distillation.served import ServedTeacher
from argosy.run.distillation.teacher import ROLE as TEACHER
from argosy.run.distillation.teacher import Teacher
from argosy.run.frozen.perceptual_net import PerceptualNet
from argosy.run.frozen.pipeline_parts import FrozenPart, frozen_parts
from argosy.run.frozen.role import Role
from argosy.run.settings.run import Run
from argosy.train.beside import CRITIC
from argosy.train.objectives.distillation import projection
from argosy.train.optimizers.groups import freeze_groups


@dataclass(frozen=True)
class ModelParts:
    """The parts of a run that depend on its model. `Assembly` describes the fields."""

    model: Any
    adapters: AdapterParts
    teacher: Teacher | ServedTeacher | None
    parts: dict[str, FrozenPart | PerceptualNet]
    roles: dict[str, Role]


def build_model(run: Run, decided: Decided, mesh: Mesh, tokenizer: Tokenizer | None, steps: int) -> ModelParts:
    """Builds the model of a run, its adapters, and the frozen models.

    Args:
        steps: the number of steps of the run.

    Raises:
        UserError: the layers do not divide into pipeline stages, some weights would stay random, or the teacher does not fit.
    """
    layers = execution(run, decided, mesh)
    model = run.model.build(layers)
    if run.model.inputs != "clicks":
        check_groups(model, mesh.shape["stage"], run.execution.rounds)
    check_kept(model, run.execution.keep)
    replicas.check_model(run, model, steps)
    _check_trained(run, model)
    run.quant.put_on(model)
    adapters = AdapterParts() if run.adapter.trains_base else _put_adapters(run, decided, model)
    if CRITIC in run.objective.trained_parts:
        attach_critic(model, run.model, layers)
    freeze_groups(model, run.optimizer.groups)
    teacher, kind = None, run.objective.roles.get(TEACHER)
    if kind:
        served = kind == "cached" and is_endpoint(run.objective.teacher)
        teacher = ServedTeacher(run, tokenizer) if served else Teacher(run, decided, mesh, tokenizer)
    roles: dict[str, Role] = {}
    if isinstance(teacher, Teacher) and kind == "online":
        roles[TEACHER] = teacher.role
        projection.attach(model, run.objective, roles)
    parts = frozen_parts(run, decided, mesh)
    roles |= {name: part.role for name, part in parts.items()}
    return ModelParts(model, adapters, teacher, parts, roles)


def _check_trained(run: Run, model: Any) -> None:
    """Checks that no weight would keep its random initial value.

    Raises:
        BadInput: a weight would keep it, because nothing trains it.
    """
    untrained = [] if run.init.weights or run.init.state else [a for a, v in variables(model).items() if isinstance(v, SelectionWeight)]
    if untrained:
        raise BadInput(
            f"{plural(len(untrained), 'weight')} of the sparse-attention indexer would keep their random values: nothing trains them",
            hint="start from trained weights (init.weights=FOLDER), or leave the indexer out: model.index=none",
        )


def _put_adapters(run: Run, decided: Decided, model: Any) -> AdapterParts:
    under, stacked, schemes = stacked_adapters(run), dict[str, Any](), stored_schemes(run)

    def prepare(model: Any) -> None:
        apply_schemes(model, schemes)
        if under:
            stacked.update(lay(model, under))

    contractions = run.adapter.put_on(model, jnp.dtype(decided.base_dtype), prepare)
    base = frozenset(base_addresses(model)) if contractions else frozenset()
    return AdapterParts(tuple(contractions), base, frozenset(retrained_addresses(model)), stacked, schemes)


def stored_schemes(run: Run) -> Mapping[str, Scheme]:
    """Returns the quantization of the base model in its file, by the name of each layer's weight, if the run can keep the quantized
    codes. That needs adapters that start from zero, and no other trained weights. Otherwise returns an empty mapping.
    """
    from argosy.checkpoint.open import open_model

    weights, adapter = str(run.init.weights), run.adapter
    if type(adapter) is not Lora or adapter.init != "zero" or adapter.train or is_address(weights) or is_missing(weights):
        return {}
    stored = open_model(weights)
    quantized = stored.quantized or stored.published()
    return {} if quantized is None or stored.adapted is not None else quantized.schemes


def stacked_adapters(run: Run) -> Mapping[str, Any]:
    """Returns the factors of adapters of the base that stay frozen under the run's adapters, by the name of each layer's matrix
    product.

    Raises:
        BadInput: the base has adapters and `adapter.onto` is not set, or it is set and the base has none.
        Unsupported: DoRA on either side, adapters of a quantized base, or rollouts.
    """
    from argosy.checkpoint.open import open_model

    onto, weights = run.adapter.onto, str(run.init.weights)
    if is_missing(weights):
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
    if isinstance(run.adapter, Dora) or any(adapter.m is not None for adapter in under.adapters.values()):
        raise Unsupported("DoRA is not stacked: it scales the sum of all below it", hint=merge)
    if run.rollout is not None:
        raise Unsupported("rollouts with stacked adapters are not built", hint=merge)
    return under.adapters
