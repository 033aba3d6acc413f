"""Starts a run from the weights of another model, or from the complete training state of another run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from argosy.adapt.base import fill_base
from argosy.adapt.quant import apply_schemes
from argosy.checkpoint.base import describe_base
from argosy.checkpoint.open import open_base, open_model
from argosy.checkpoint.run_directory import CHECKPOINTS, RunDirectory
from argosy.checkpoint.step.layout import META, STATE
from argosy.checkpoint.step.load import load_item, read_meta
from argosy.checkpoint.step.reader import StepReader
from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.core.formats import Arrays, OverlaidTensors
from argosy.core.settings import diff, dump
from argosy.data.tokenizers.load import Tokenizer
from argosy.data.tokenizers.matched import same_tokens
from argosy.models.diffusion.controlnets.base import ControlNetSettings
from argosy.models.diffusion.learned_embeddings import LearnedEmbeddingsConfig
from argosy.models.parts.stack import stored_as
from argosy.models.parts.stack.addresses import from_layers, layer_addresses, stored_addresses
from argosy.models.parts.weight import Leaves, fill, put, split
from argosy.parallel.place import on_devices
from argosy.rl.policy.critic import PREFIX
from argosy.run.assembly.assembly import GUARD, Assembly
from argosy.run.settings.run import Run
from argosy.run.start.learned_tokens import put_first_rows
from argosy.train.beside import CRITIC, alone
from argosy.train.ema import RAW
from argosy.train.state import TrainState, split_trained
from argosy.weights import manifest
from argosy.weights.build import stored_tokenizer
from argosy.weights.fill import read_into, stored_arrays
from argosy.weights.model import OpenedModel, config_of

# The names of a head's weights, and of what an encoder has before it.
HEAD, BEFORE = frozenset(("head.w", "head.b")), frozenset(("pooler.w", "pooler.b"))


# Of a model's ids, the share that its own tokenizer makes: vocabularies are padded by a few percent.
LEAST_SHARE = 0.9


def weights_for(assembly: Assembly, model: str, say: Callable[[str], None]) -> tuple[TrainState, OpenedModel]:
    """Makes a state with the weights of a stored model and a fresh optimizer. Also returns the stored model, whose special token ids
    and generation settings the run keeps.

    Raises:
        BadInput: the architecture or the sizes differ. The message names each difference.
    """
    stored = open_model(model, say)
    _check_same(assembly.run.model, in_pipeline(stored, assembly.run.model), model)
    if assembly.adapters.base:
        say(f"base weights from {model}, frozen; adapters on {plural(len(assembly.adapters.contractions), 'contraction')}")
        if stored.adapted is not None:
            remark = "stay as they are under the new ones" if assembly.adapters.stacked else "are merged into them"
            say(f"its own adapters on {plural(len(stored.adapted.adapters), 'weight')} {remark}")
    else:
        say(f"weights from {model}")
    if assembly.adapters.schemes:
        say(f"its {plural(len(assembly.adapters.schemes), 'quantized weight')} stay in few bits")
    elif stored.quantized is not None:
        say(f"its {plural(len(stored.quantized.schemes), 'quantized weight')} became floats")
    if _fill_from(assembly, stored) and begins_from_denoiser(stored, assembly.run.model):
        say("the ControlNet begins as a copy of its first layers, and without effect")
    elif assembly.run.model.scored and not stored.config.scored:
        say("a head of scores takes the place of the language model's: drawn from the random seed")
    theirs, ours = stored_tokenizer(stored), assembly.tokenizer
    if theirs is not None and ours is not None and not same_tokens(theirs, ours):
        say(f"{model} was trained with another tokenizer than this run's (init.tokenizer_mismatch=allow)")
    _, params, rest = split_trained(assembly.model)
    return assembly.begin(params, rest), stored


def base_of(assembly: Assembly, base: dict[str, Any], say: Callable[[str], None]) -> Leaves:
    """Reads the frozen base weights of a resumed run with adapters. Returns them by parameter name.

    Args:
        base: the description of the base in the checkpoint.

    Raises:
        BadInput: the base is missing, or has changed since the run began.
    """
    _fill_base(assembly, open_base(base, say, thorough=True), fresh=False)
    arrays = split(assembly.model)[1]
    return {address: arrays[address] for address in assembly.adapters.base}


def _fill_from(assembly: Assembly, stored: OpenedModel) -> bool:
    """Reads the weights of a stored model into the model of a run, in place. Initializes the weights that the stored model lacks:
    adapters, a head of scores, or those of a ControlNet that its denoiser does not have. Returns whether it initialized any but
    adapters."""
    places = assembly.places.params | assembly.places.rest
    if assembly.adapters.base:
        _fill_base(assembly, stored, fresh=True)
        key = jax.random.key(assembly.run.seed)
        fill(assembly.model, key, addresses=layer_addresses(assembly.model), place=places.__getitem__)
        return bool(_fresh_names(assembly, stored))
    with alone(assembly.model) as parts:
        if CRITIC in parts:
            # The body of the weights, and a head that is drawn.
            read_into(parts[CRITIC], stored.weights, place=lambda address: places[PREFIX + address], but=HEAD)
        head = _fill_model(assembly, stored, places)
    if head or parts:
        assembly.draw()
    return head


def _fill_model(assembly: Assembly, stored: OpenedModel, places: dict[str, Any]) -> bool:
    fresh_names = _fresh_names(assembly, stored)
    read_into(assembly.model, stored.weights, place=places.__getitem__, but=fresh_names)
    return bool(fresh_names)


def _fresh_names(assembly: Assembly, stored: OpenedModel) -> frozenset[str]:
    """Returns the names of the weights that the stored model lacks and that are initialized: those of a head of scores, without a
    pooler that the stored model has. For a ControlNet that begins as a copy of a denoiser, returns the names of all weights that only
    one of the two has, both of stored weights and of parameters."""
    if begins_from_denoiser(stored, assembly.run.model):
        places = stored_addresses(assembly.model)
        apart = places.keys() ^ set(stored.weights.names)
        return frozenset(apart | {places[name][0] for name in apart & places.keys()})
    if not assembly.run.model.scored or stored.config.scored:
        return frozenset()
    return HEAD | (BEFORE - set(stored.weights.names))


def _fill_base(assembly: Assembly, stored: OpenedModel, *, fresh: bool) -> None:
    places = assembly.places.params | assembly.places.rest
    plain = assembly.run.model.build(assembly.decided.run("none"))
    weights, under = stored.weights, stored.adapted
    if assembly.adapters.schemes:
        apply_schemes(plain, assembly.adapters.schemes)
        quantized = stored.quantized or stored.published()
        assert quantized is not None
        weights = quantized.reader
    if assembly.adapters.stacked and under is not None:
        weights = OverlaidTensors(under.base.weights, Arrays(under.whole))
        put(assembly.model, {a: on_devices(factor, places[a]) for a, factor in on_top(assembly).items()})
    fill_base(
        assembly.model,
        # bfloat16 only where the file has no more bits, so nothing is lost of what is trained in full.
        stored_arrays(plain, weights, dtype=assembly.decided.base_dtype, but=_fresh_names(assembly, stored)),
        place=places.__getitem__,
        fresh=fresh,
        iterations=getattr(assembly.run.adapter, "pissa_iterations", None),
    )


def on_top(assembly: Assembly) -> dict[str, Any]:
    """Returns the factors of frozen adapters by the parameter name that they have under the trained adapters."""
    rest = assembly.shapes.rest
    return {a if a in rest else a[:-1] + "of." + a[-1]: factor for a, factor in assembly.adapters.stacked.items()}


def base_described(assembly: Assembly, stored: OpenedModel | None, name: str | None) -> dict[str, Any]:
    """Describes the base model of a run for its checkpoints; empty without adapters."""
    return describe_base(stored, name) if assembly.adapters.base and stored is not None and name is not None else {}


def state_from(assembly: Assembly, run: str, say: Callable[[str], None]) -> tuple[TrainState, OpenedModel]:
    """Makes a state with the weights, optimizer and step of another run, whatever its layout of layers. Also returns that run as a
    stored model, whose special token ids and generation settings this run keeps. The data start from the beginning.

    Raises:
        BadInput: there is no checkpoint, it has another model or optimizer, or it has only weights.
        Damaged: the files of the checkpoint differ from its manifest.
    """
    path, meta = _step_of(run, say)
    config = config_of(meta["model"])
    _check_same(assembly.run.model, config, run)
    with alone(assembly.model):
        read_into(
            assembly.model,
            StepReader(path, config.build(stored_as(meta["decided"]))),
            place=(assembly.places.params | assembly.places.rest).__getitem__,
        )
    # What a guard keeps is of the other run's losses.
    arrays = {name: a for name, a in load_item(path, STATE).items() if not name.startswith(GUARD)}
    expected = {name for name in assembly.state_places()[1] if not name.startswith(GUARD)}
    arrays = relaid(arrays, config.build(stored_as(meta["decided"])), assembly.model)
    # Of the weights themselves, where those that were read are an average.
    raw = {name.removeprefix(RAW): arrays.pop(name) for name in list(arrays) if name.startswith(RAW)}
    expected = {name for name in expected if not name.startswith(RAW)}
    if set(arrays) != expected:
        raise BadInput(f"{run} was trained with another optimizer", hint="init.weights takes only its weights")
    if int(arrays["step"]) >= assembly.run.steps:
        raise BadInput(
            f"{run} has made {plural(int(arrays['step']), 'step')}, but steps = {assembly.run.steps}",
            hint="raise steps, or take only its weights with init.weights",
        )
    _, places = assembly.state_places()
    placed = {name: on_devices(a, places[name]) for name, a in arrays.items()}
    _, params, rest = split_trained(assembly.model)
    raw = {a: on_devices(w, assembly.places.params[a]) for a, w in raw.items()}
    if assembly.run.averages:
        placed |= {f"{RAW}{a}": raw[a] if raw else w.copy() for a, w in params.items()}
    else:
        params |= raw
    say(f"weights, optimizer and step {int(placed['step'])} from {run}")
    return assembly.restored(params | rest, placed), open_model(path, say)


def first_weights(assembly: Assembly, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns the initial weights of a run by parameter name, on its devices. They are read from their source, or initialized again.

    Raises:
        BadInput, Damaged: as `weights_for`; or the source no longer exists.
    """
    init, places = assembly.run.init, assembly.places.params | assembly.places.rest
    if init.weights or init.state:
        check_source(assembly.run, say)
    if init.weights:
        _fill_from(assembly, open_model(init.weights, say))
    elif init.state:
        path, meta = _step_of(init.state, say)
        reader = StepReader(path, config_of(meta["model"]).build(stored_as(meta["decided"])))
        read_into(assembly.model, reader, place=places.__getitem__)
    else:
        if isinstance(assembly.run.model, LearnedEmbeddingsConfig):
            put_first_rows(assembly)
        assembly.draw()
    _, params, rest = split_trained(assembly.model)
    return params | rest


def check_source(run: Run, say: Callable[[str], None] = lambda _: None, tokenizer: Tokenizer | None = None) -> None:
    """Checks, before a file is written, that the model or run to start from exists and has the same architecture, and that it was
    trained with the run's tokenizer.

    Args:
        tokenizer: the run's tokenizer; None: tokenizers are not compared.

    Raises:
        BadInput, Damaged: as `weights_for` and `state_from`; or the weights belong to another tokenizer.
    """
    if run.init.weights:
        stored = open_model(run.init.weights, say)
        _check_same(run.model, in_pipeline(stored, run.model), run.init.weights)
        if tokenizer is not None and run.init.tokenizer_mismatch == "error":
            _check_tokenizer(run, tokenizer, stored_tokenizer(stored))
    if run.init.state:
        path, meta = _step_of(run.init.state, say)
        if "base" in meta:
            problem = f"{run.init.state} trained adapters, and init.state does not take the state of those"
            raise BadInput(problem, where="set by init.state", hint=f"init.weights={run.init.state} takes its weights")
        if meta["settings"].get("diloco", {}).get("every"):
            problem = f"{run.init.state} trained replicas (diloco.every), and init.state does not take the state of those"
            raise BadInput(problem, where="set by init.state", hint=f"init.weights={run.init.state} takes its outer weights")
        _check_same(run.model, config_of(meta["model"]), run.init.state)
        theirs = stored_tokenizer(open_model(path, say)) if tokenizer is not None else None
        if tokenizer is not None and theirs is not None and theirs.fingerprint != tokenizer.fingerprint:
            problem = f"{run.init.state} was trained with another tokenizer than data.tokenizer = {run.data.tokenizer}"
            raise BadInput(problem, where="set by init.state", hint="leave data.tokenizer out: init.state brings its own")


def _check_tokenizer(run: Run, ours: Tokenizer, theirs: Tokenizer | None) -> None:
    """Checks that weights belong to the run's tokenizer.

    Raises:
        BadInput: the weights belong to another tokenizer, or to one with many more ids.
    """
    model, name, vocab = run.init.weights, run.data.tokenizer, run.model.vocab
    consent = "init.tokenizer_mismatch=allow trains all the same"
    if theirs is not None and not same_tokens(theirs, ours):
        problem = f"{model} was trained with another tokenizer than data.tokenizer = {name}: its ids mean other words"
        raise BadInput(problem, where="set by init.weights", hint=f"leave data.tokenizer out: the model brings its own; {consent}")
    if theirs is None and ours.vocab < LEAST_SHARE * vocab:
        problem = f"the tokenizer makes {ours.vocab:,} of the {vocab:,} ids of {model}, which brings none: "
        problem += "it is probably another model's"
        raise BadInput(problem, where=f"data.tokenizer = {name}", hint=f"data.tokenizer=FOLDER names the model's own; {consent}")


def _step_of(run: str, say: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    """Finds and verifies the checkpoint of a run directory or of one step's folder. Returns its path and its meta.json.

    Raises:
        BadInput: there is no checkpoint, or it has only weights.
        Damaged: the checkpoint differs from its manifest.
    """
    path = Path(run)
    if (path / CHECKPOINTS).is_dir():
        checkpoints = RunDirectory(path, warn=say).checkpoints
        step = checkpoints.latest_good()
        if step is None:
            raise BadInput(f"{run} has no checkpoint yet")
        path = checkpoints.path(step)
    else:
        verify(path)
    meta = read_meta(path)
    if "data" not in meta:
        raise BadInput(f"{run} has only weights, no optimizer", hint="init.weights takes them")
    return path, meta


def verify(step: Path) -> None:
    """Checks one checkpoint against its manifest."""
    if not (step / META).is_file():
        raise BadInput(f"{step} is neither a run nor a checkpoint", hint="init.weights takes the weights of any model")
    manifest.verify_folder(step)


def relaid(arrays: dict[str, Any], was: Any, now: Any) -> dict[str, Any]:
    """Converts an optimizer's arrays, whose names contain parameter names, from one layout of layers to another.

    Args:
        was: the model in the old layout.
        now: the model in the new layout.
    """
    before, addresses = stored_addresses(was), set(split(now)[1])
    stored = {address for address, _ in before.values()}
    out: dict[str, Any] = {}
    mirrored: dict[str, dict[str, Any]] = {}
    for name, array in arrays.items():
        address = max((a for a in stored if name.endswith("." + a)), key=len, default=None)
        if address is None:
            out[name] = array
        else:
            mirrored.setdefault(name.removesuffix(address), {})[address] = array
    for prefix, leaves in mirrored.items():
        by_layer = {n: leaves[a] if i is None else leaves[a][i] for n, (a, i) in before.items() if a in leaves}
        present = {a for n, (a, _) in stored_addresses(now).items() if n in by_layer}
        partial = from_layers(now, _Default(by_layer))
        out |= {prefix + a: partial[a] for a in addresses & present}
    return out


class _Default(dict):
    """A mapping that returns zeros for weights without an array of the optimizer. The zeros are dropped again later."""

    def __missing__(self, name: str) -> Any:
        return jnp.zeros(())


def begins_from_denoiser(stored: OpenedModel, mine: Any) -> bool:
    """Whether a run trains a ControlNet that begins as a copy of the first layers of a denoiser."""
    return isinstance(mine, ControlNetSettings) and isinstance(stored.config, mine.steers)


def in_pipeline(stored: OpenedModel, mine: Any) -> Any:
    """Returns the config of a stored model. Settings that its folder leaves to the pipeline it belongs to are those of the run.

    Args:
        mine: the config of the run's model.
    """
    if begins_from_denoiser(stored, mine):
        mine.check_copy(stored.config)
        # Its sizes must be those of the denoiser; what the denoiser does not have is the run's own.
        values = {name: getattr(mine, name) for name in type(mine).model_fields if name not in mine.copied}
        return type(mine).of_denoiser(stored.config).model_copy(update=values)
    names = getattr(stored.config, "pipeline_settings", ()) if stored.kind == "hub" else ()
    return stored.config.model_copy(update={name: getattr(mine, name) for name in names if hasattr(mine, name)})


def _check_same(mine: Any, theirs: Any, where: str) -> None:
    """Checks that two configs describe the same architecture and sizes. The name of the preset, the declared context, and whether a
    size was set or derived may differ.

    Args:
        mine: the config of the run's model.
        theirs: the config of the stored model.
        where: the name of the stored model, for errors.
    """
    if mine.scored and not theirs.scored and "scores" in type(theirs).model_fields:
        # The head is replaced.
        theirs = theirs.model_copy(update={"scores": mine.scored})
    # Names of classes change no weight.
    labels = {name: getattr(mine, name) for name in ("labels", "problem_type") if name in type(theirs).model_fields}
    theirs = theirs.model_copy(update=labels)
    theirs_dumped, mine_dumped = dump(theirs.resolved()), dump(mine.resolved())
    changed = [(k, was, now) for k, was, now in diff(theirs_dumped, mine_dumped) if k not in ("preset", "context", "family")]
    if type(mine) is not type(theirs) or changed:
        differences = "; ".join(f"model.{k} is {was} there, {now} here" for k, was, now in changed) or "another family"
        raise BadInput(f"{where} is another model", where=differences, hint="give this run the same model settings")
