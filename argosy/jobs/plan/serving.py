"""`argosy plan serve MODEL`: whether a server of a model fits on devices that may be absent, how many sequences it holds, and how fast
it answers. No weight is read."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar

from pydantic import Field

from argosy.core.errors import BadInput, UserError
from argosy.core.settings import Settings
from argosy.infer.settings import MTP, DraftModel, EngineSettings, LoraSettings
from argosy.jobs.plan.compiler import answer_of_compiler, cached_answer
from argosy.jobs.plan.served import PUBLISHED, planned_files
from argosy.serve.settings import ServeSettings
from argosy.serve.vllm_flags import NAMES

Say = Callable[[str], None]
PRESETS = ("w8", "w4")
# Settings of `argosy serve` that say nothing of its size or speed.
OF_SERVERS = {*ServeSettings.model_fields} - {"dtype", "quantization", "tensor", "copies", "engine"}


class ServePlanSettings(Settings):
    """What a server is planned for."""

    elsewhere: ClassVar = {name: hint for name, hint in NAMES.items() if not OF_SERVERS & {name, *hint.split("`")}}

    device: str = "this"
    """The devices: `this` machine's, or a kind with a number: v4-8, v5e-16, v5p-128, v6e-256, v7x-128 (a name as Google Cloud counts:
    cores for v4, v5p and v7x, chips for the others), h100-8, h200-8 (up to 8, which are part of one host, or a multiple of 8)."""
    compile: bool = True
    """Whether the compiler of TPUs is asked, where it is installed. false: the analytic answer alone."""
    price: float | None = Field(None, gt=0)
    """Price of a chip for an hour. With it, the cost of a million tokens of completions is shown."""
    input_len: int = Field(1024, gt=0)
    """Length of a prompt in tokens. Where neither length is given, both are shorter for models that read less."""
    output_len: int = Field(128, gt=0)
    """Length of a completion in tokens."""
    acceptance: float = Field(0.7, ge=0, lt=1)
    """With `engine.speculative`: the probability that a draft is accepted if those before it are. It depends on the texts and on the
    draft model; a server's /metrics count it."""
    dtype: str | None = None
    """Type of weights and activations, float32 or bfloat16. None: float32 on CPUs, bfloat16 elsewhere."""
    quantization: str | None = None
    """A preset of `argosy quantize`, such as w8 or w4, or a YAML file of rules, by which weights are quantized as they are read."""
    tensor: int = Field(1, gt=0)
    """Number of devices that share heads, feed-forward features, vocabulary and cache, for models that one device cannot hold."""
    copies: int = Field(1, gt=0)
    """Copies of the model, each with its own engine and cache, on its own device or on `tensor` of them."""
    engine: EngineSettings = EngineSettings()


def plan_serving(name: str, settings: ServePlanSettings, say: Say) -> dict[str, Any]:
    """Plans a server. Returns the plan as a JSON object. If the server does not fit, `fits` is false in it.

    Args:
        name: a preset, or a model on this machine.

    Raises:
        UserError: there is a mistake in the settings.
    """
    from argosy.observe.memory import resident_bytes
    from argosy.parallel.target import Target
    from argosy.run.plan.drafts import drafted_step, tokens_per_step
    from argosy.run.plan.serving import planned_steps, serving_memory, serving_rates
    from argosy.run.plan.serving_cpu import programs_bytes

    target, process = Target.described(settings.device), resident_bytes()
    _check(settings, target)
    model = _served_model(name, settings, target)
    settings = _with_lengths(settings, model.context)
    if settings.input_len + settings.output_len > model.context:
        problem = f"input_len + output_len = {settings.input_len + settings.output_len:,}, and {name} reads {model.context:,} tokens"
        raise BadInput(problem, hint="shorter sequences")
    memory, size = serving_memory(model, settings.copies)
    if target.shares_memory:
        programs = sum(programs_bytes(part) for part in (model, model.draft) if part is not None)
        memory["process"] = process + programs * settings.copies
    prices, limit = _prices(target), target.memory_bytes
    keys = planned_steps(model, size, settings.input_len, settings.output_len)
    steps = {} if prices is None else {key: drafted_step(model, *key, prices) for key in keys}
    # Programs of adapters and of drafts are not compiled here.
    plain = settings.engine.speculative is None and not settings.engine.lora.enabled
    per_step = tokens_per_step(settings.engine.speculative, settings.acceptance)
    fits, verdict, missing, answer = limit is None or sum(memory.values()) <= limit, "model", None, {}
    if fits and plain and settings.compile and target.platform == "tpu" and not target.is_here:
        missing = target.missing_compiler()
        if missing is None:
            say("asking the compiler; compile=false answers without it ...")
            inputs = {"name": name, "settings": settings.model_dump(mode="json", exclude_unset=True), "pages": size.pages}
            answer = answer_of_compiler("argosy.jobs.plan.serving:compiled_serving_answer", inputs, settings.device)
            verdict, fits = "compiler", answer["fits"] and answer["needed"] <= (limit or answer["needed"])
            # Of a program that is refused, the compiler says what it asks for beside the weights and the cache, or nothing.
            base_bytes = memory["weights"] + memory["cache"] if answer["fits"] else 0
            memory["temporaries"] = max(0 if answer["fits"] else memory["temporaries"], answer["needed"] - base_bytes)
            steps = {tuple(key): _step(*key[:2], *fields) for key, *fields in answer["steps"]} if answer["steps"] else steps
    rates = serving_rates(model, size, settings.input_len, settings.output_len, steps, per_step) if steps and fits else []
    document = _document(name, settings, model, memory, size, rates, target.count)
    best = max((rate.tokens_per_s for rate in rates), default=0.0) * settings.copies
    chips = (target.hardware.chips / target.count if target.hardware else 1) * settings.tensor * settings.copies
    return document | {
        "published_in": None if settings.quantization else PUBLISHED.get(name, {}).get("weights"),
        "tokens_per_step": per_step,
        "fits": fits,
        "verdict_by": verdict,
        "uncounted_kernels": answer.get("uncounted", []),
        "unknown_loops": answer.get("unknown_loops", 0),
        "missing_compiler": missing,
        "cost_per_million_tokens": settings.price * chips / best * 1e6 / 3600 if settings.price and best else None,
        "nearest": [] if fits else _nearest(name, settings, target),
    }


def _with_lengths(settings: ServePlanSettings, context: int) -> ServePlanSettings:
    """The settings, with shorter sequences where the default ones are longer than the model reads."""
    if {"input_len", "output_len"} & settings.model_fields_set or settings.input_len + settings.output_len <= context:
        return settings
    output = max(1, context // 4)
    return settings.model_copy(update={"input_len": max(1, context - output), "output_len": output})


def _check(settings: ServePlanSettings, target: Any) -> None:
    """Refuses what a plan does not count."""
    engine = settings.engine
    if settings.tensor * settings.copies > target.count:
        problem = f"tensor={settings.tensor} copies={settings.copies} take {settings.tensor * settings.copies} devices"
        raise BadInput(f"{problem}, and {target.name} has {target.count}", hint="fewer, or a larger device")
    if isinstance(engine.speculative, MTP):
        hint = "leave it out: the rest is planned; ngram and draft_model are counted"
        raise BadInput("engine.speculative=mtp: a plan does not count drafts of the model's own module", hint=hint)
    if engine.speculative is None and "acceptance" in settings.model_fields_set:
        raise BadInput(f"acceptance={settings.acceptance:g}: there are no drafts", hint="engine.speculative=ngram, or leave it out")


def _served_model(name: str, settings: ServePlanSettings, target: Any) -> Any:
    """The model as the server has it, with its draft model.

    Raises:
        UserError: there is no such model, it cannot be served so, or the draft model does not go with it.
    """
    model, speculative = _planned_model(name, settings, target), settings.engine.speculative
    if not isinstance(speculative, DraftModel):
        return model
    from argosy.run.plan.drafts import as_draft

    engine = settings.engine.model_copy(update={"speculative": None, "lora": LoraSettings(), "context": None})
    draft = _planned_model(speculative.model, settings.model_copy(update={"quantization": None, "engine": engine}), target)
    if draft.config.vocab != model.config.vocab:
        problem = f"the draft model has {draft.config.vocab} tokens, the model {model.config.vocab}"
        raise BadInput(problem, hint="two models of one tokenizer")
    if draft.config.context < model.context:
        problem = f"the draft model's context of {draft.config.context} tokens is shorter than {model.context}"
        raise BadInput(problem, hint=f"engine.context={draft.config.context}, or another draft model")
    return replace(model, draft=as_draft(draft, model))


def _planned_model(name: str, settings: ServePlanSettings, target: Any) -> Any:
    """A model as the server has it."""
    from argosy.adapt.quant import by_layer
    from argosy.adapt.qwix import as_rules
    from argosy.adapt.rules import schemes_of
    from argosy.models.parts.stack import Unroll
    from argosy.run.plan.serving import served_model
    from argosy.weights.build import as_dtype

    files = planned_files(name)
    config, schemes = files.config, files.schemes
    if config.inputs == "images" or not getattr(config, "causal", False) or getattr(config, "scored", False):
        raise BadInput(f"{name} generates no text, and a plan is of an engine that does", hint="a language model with a head")
    if settings.dtype is not None:
        as_dtype(settings.dtype)
    if settings.engine.context is not None:
        config.for_context(settings.engine.context)
    if settings.quantization is not None:
        if schemes and not files.is_preset:
            raise BadInput(f"{name} is quantized already", hint="leave out `quantization`")
        single = config.build(Unroll())
        schemes = by_layer(single, schemes_of(single, as_rules(settings.quantization)))
    return served_model(config, target, settings.engine, settings.dtype, settings.tensor, schemes, files.dtype)


def _prices(target: Any) -> Any:
    from argosy.run.plan.measured import prices_here
    from argosy.run.plan.speed import prices_of

    return prices_here(target.platform) if target.chip is None else prices_of(target.chip)


def compiled_serving_answer(inputs: dict[str, Any]) -> dict[str, Any]:
    """The compiler's answer for the steps of a server, in the process that has it."""
    from argosy.parallel.target import Target
    from argosy.run.plan.compiled_serving import compiled_serving
    from argosy.run.plan.serving import planned_steps

    settings = ServePlanSettings.model_validate(inputs["settings"])
    target = Target.described(settings.device).compiled()
    model = _served_model(inputs["name"], settings, target)
    chip = target.chip
    assert chip is not None
    size = model.needs.size(settings.engine.slots, inputs["pages"])
    keys = planned_steps(model, size, settings.input_len, settings.output_len)

    def make() -> dict[str, Any]:
        compiled = compiled_serving(model, size, keys, _prices(target))
        steps = [[key, dict(step.by_kind), [asdict(t) for t in step.traffic]] for key, step in compiled.steps.items()]
        return asdict(compiled) | {"steps": steps}

    return cached_answer(_content(model, size, keys, settings.device), chip.library, make)


def _content(model: Any, size: Any, keys: Any, device: str) -> list[str]:
    """What the compiler's answer depends on."""
    from argosy.run.plan.compiled_serving import lowered_step

    return [lowered_step(model, size, key).as_text() for key in keys] + [str(keys), device]


def _step(decodes: int, prompt: int, by_kind: dict[str, float], traffic: list[dict[str, Any]]) -> Any:
    from argosy.run.plan.figures import Traffic
    from argosy.run.plan.serving import ServingStep

    return ServingStep(decodes, prompt, by_kind, [Traffic(**fields) for fields in traffic])


def _nearest(name: str, settings: ServePlanSettings, target: Any) -> list[dict[str, Any]]:
    """Settings near these with which the server fits: at most two."""
    from argosy.run.plan.serving import serving_memory

    ways: list[dict[str, Any]] = [{"tensor": n} for n in (2, 4, 8, 16) if settings.tensor < n <= target.count // settings.copies]
    ways += [{"quantization": preset} for preset in PRESETS if settings.quantization is None]
    ways += [{"engine": settings.engine.model_copy(update={"context": n})} for n in (32_768, 8192, 2048)]
    nearest: list[dict[str, Any]] = []
    for way in ways:
        other = settings.model_copy(update=way)
        try:
            memory = serving_memory(_served_model(name, other, target), other.copies)[0]
        except UserError:
            continue
        if target.memory_bytes is not None and sum(memory.values()) <= target.memory_bytes:
            key, value = next(iter(way.items()))
            word = f"engine.context={value.context}" if key == "engine" else f"{key}={value}"
            if not any(entry["settings"][0].partition("=")[0] == word.partition("=")[0] for entry in nearest):
                nearest.append({"settings": [word], "memory_bytes": sum(memory.values())})
        if len(nearest) == 2:
            break
    return nearest


def _document(
    name: str, settings: ServePlanSettings, model: Any, memory: dict[str, int], size: Any, rates: Sequence[Any], count: int
) -> dict[str, Any]:
    from argosy.run.plan.serving import largest_weights, unsplit_text

    target, page = model.target, settings.engine.page
    each = settings.input_len + settings.output_len
    return {
        "model": name,
        "device": target.name,
        "device_kind": target.kind,
        "devices": settings.tensor * settings.copies,
        "devices_available": count,
        "copies": settings.copies,
        "tensor": settings.tensor,
        "parameters": model.config.parameters(),
        "dtype": model.dtype.name,
        "quantization": settings.quantization,
        "context": model.context,
        "input_len": settings.input_len,
        "output_len": settings.output_len,
        "speculative": None if settings.engine.speculative is None else settings.engine.speculative.model_dump(mode="json"),
        "acceptance": None if settings.engine.speculative is None else settings.acceptance,
        "lora": settings.engine.lora.model_dump(mode="json") if settings.engine.lora.enabled else None,
        "memory_bytes": {**memory, "total": sum(memory.values())},
        "memory_limit_bytes": target.memory_bytes,
        "cache_bytes_per_token": memory["cache"] / max(1, size.pages * page),
        "cache_tokens": size.pages * page,
        "cache_sequences": min(settings.engine.slots, size.pages // -(-each // page)),
        "buffers": [asdict(buffer) for buffer in largest_weights(model)],
        "replicated": unsplit_text(model),
        "rates": [
            {
                "sequences": rate.sequences * settings.copies,
                "step_seconds": rate.step.seconds,
                "time_to_first_token_s": rate.first_token_seconds,
                "time_per_output_token_s": rate.token_seconds,
                "output_tokens_per_s": rate.tokens_per_s * settings.copies,
                "bound_by": rate.step.bound_by,
                "seconds_by_kind": dict(rate.step.by_kind),
                "collectives": [transfer.document() for transfer in rate.step.traffic],
            }
            for rate in rates
        ],
    }
