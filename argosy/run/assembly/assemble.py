"""Builds the parts of a training run from its settings, and checks that they fit, before any file is written."""

from typing import Any

from argosy.core.errors import mistakes_of, raise_mistakes
from argosy.core.progress import Say
from argosy.parallel.target import Target
from argosy.rl.policy.critic import PREFIX
from argosy.run.assembly import diloco as replicas
from argosy.run.assembly.assembly import Assembly, scheduled_steps
from argosy.run.assembly.checks import check_implementations, mesh_of, prompts_tokenizer, source_of
from argosy.run.assembly.data import sampled_data, stored_data, unread_data
from argosy.run.assembly.decided import Decided
from argosy.run.assembly.model import ModelParts, build_model
from argosy.run.assembly.products import products_of
from argosy.run.assembly.state import StateParts, build_state
from argosy.run.frozen import reference
from argosy.run.frozen.perceptual_net import PerceptualNet
from argosy.run.frozen.role import Role
from argosy.run.memory import estimated_need
from argosy.run.settings.combinations import Situation, violations
from argosy.run.settings.run import Run
from argosy.train.beside import CRITIC
from argosy.train.objectives.images.perceptual import PERCEPTUAL


def assemble(
    run: Run,
    decided: Decided,
    progress: Any = None,
    target: Target | None = None,
    reads: bool = True,
    say: Say = lambda _: None,
) -> Assembly:
    """Builds and checks all parts of a run. The weights of the model are neither initialized nor read. Weights of encoders are read if
    their outputs are not cached.

    Args:
        run: the settings of the run.
        decided: the resolved "auto" settings.
        progress: reports the preparation of data, as in `data.prepare.prepare`.
        target: the devices; None: those of this machine.
        reads: whether data and tokenizer are read. If not, batches have only shapes, and the memory need is not checked.
        say: called with messages about the encoding of images and captions.

    Raises:
        UserError: there is a mistake in implementations, data, tokenizer, model, mesh, batch or memory.
    """
    target = target or Target.here()
    raise_mistakes(list(violations(Situation(run, target.processes, target.platform))))
    checked: dict[str, Any] = {}
    raise_mistakes(
        mistakes_of(
            lambda: check_implementations(run.execution),
            lambda: checked.update(mesh=mesh_of(run, target)),
            lambda: checked.update(source=_source(run) if reads else (None, None)),
        )
    )
    mesh, (source, tokenizer) = checked["mesh"], checked["source"]
    replicas.check(run, mesh)
    if not reads:
        data = unread_data(run, decided, mesh)
    elif run.rollout is None:
        data = stored_data(run, decided, mesh, source, tokenizer, progress, say)
    else:
        data = sampled_data(run, decided, mesh, tokenizer)
    steps = scheduled_steps(run.steps, data.batches)
    model = build_model(run, decided, mesh, tokenizer, steps)
    if isinstance(net := model.parts.get(PERCEPTUAL), PerceptualNet):
        net.check_sizes(data.batches)
    state = build_state(run, decided, mesh, model.model, steps)
    roles = model.roles | _reference(run, model, state)
    if reads:
        estimated_need(run, decided, state.shapes, state.places, mesh, target, roles, data.batches.sizes).check()
    return Assembly(
        run=run,
        decided=decided,
        mesh=mesh,
        tokenizer=tokenizer,
        **vars(data),
        **vars(model) | {"roles": roles},
        **vars(state),
        products=products_of(run, decided.products, decided.precision, target.platform, mesh.size),
        target=target,
    )


def _source(run: Run) -> tuple[Any, Any]:
    return source_of(run) if run.rollout is None else (None, prompts_tokenizer(run))


def _reference(run: Run, model: ModelParts, state: StateParts) -> dict[str, Role]:
    """Returns the reference (the initial model) by its role, if updates or rollouts read it."""
    if run.objective.roles.get(reference.ROLE) not in ("online", "rollout"):
        return {}
    shapes = state.shapes.params | state.shapes.rest
    critic = frozenset(a for a in shapes if a.startswith(PREFIX)) if CRITIC in run.objective.trained_parts else frozenset()
    return {reference.ROLE: Role(state.graph, shapes, model.adapters.base | critic)}
