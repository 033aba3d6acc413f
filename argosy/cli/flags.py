"""The flags of vLLM's commands as our settings."""

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from argosy.client.settings import BatchSettings, BenchSettings, ChatSettings
from argosy.core.errors import BadInput, close_name, nearest
from argosy.jobs.plan.serving import ServePlanSettings
from argosy.predict.settings import PredictSettings
from argosy.serve.settings import ServeSettings
from argosy.serve.vllm_flags import ANSWERS, CHOICES, NAMED, OBJECTS, SETTINGS, SWITCHES

# The first part of a setting's name, which no adapter in `--lora-modules NAME=FOLDER` may have.
OURS = {*ServeSettings.model_fields, *BatchSettings.model_fields}


@dataclass(frozen=True)
class Flags:
    """The flags of one command.

    command: its name.
    known: the names of its settings.
    settings: flag -> our setting.
    switches: flag without a value -> the `key=value` arguments that replace it.
    choices: flag -> value -> words.
    several: flags of `settings` that take several values. The values are joined with spaces into one.
    objects: flag with a JSON object -> our group of settings, and vLLM's keys -> ours.
    named: flag with values such as `name=path` -> our setting, which is a map.
    answers: flag without a meaning here -> what to do instead.
    """

    command: str
    known: Collection[str]
    settings: Mapping[str, str]
    switches: Mapping[str, Sequence[str]] = field(default_factory=dict)
    choices: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    several: Sequence[str] = ()
    objects: Mapping[str, tuple[str, Mapping[str, str]]] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)
    answers: Mapping[str, str] = field(default_factory=dict)


SERVE = Flags("serve", ServeSettings.model_fields, SETTINGS, SWITCHES, CHOICES, objects=OBJECTS, named=NAMED, answers=ANSWERS)

# The flags that say how large a server is and how fast.
PLAN_SERVE = Flags(
    "plan",
    ServePlanSettings.model_fields,
    {flag: key for flag, key in SETTINGS.items() if key.partition(".")[0] in ServePlanSettings.model_fields},
    {flag: words for flag, words in SWITCHES.items() if all(word.startswith("engine.") for word in words)},
    CHOICES,
    objects=OBJECTS,
    answers={
        "--device": "device=v5e-8, h100-8 ...: the devices that the server would have",
        "--random-input-len": "`input_len=N`",
        "--random-output-len": "`output_len=N`",
        **{flag: hint for flag, hint in ANSWERS.items() if flag != "--device"},
    },
)

# Of Triton and TensorFlow Serving.
PREDICT = Flags(
    "predict",
    PredictSettings.model_fields,
    {
        **dict.fromkeys(("--host", "--http-address"), "host"),
        **dict.fromkeys(("--port", "--http-port", "--rest-api-port"), "port"),
        **dict.fromkeys(("--grpc", "--grpc-port"), "grpc"),
        **dict.fromkeys(("--poll", "--repository-poll-secs", "--file-system-poll-wait-seconds"), "poll"),
        "--api-key": "api_key",
    },
    answers={
        **dict.fromkeys(("--model-repository", "--model-store", "--model-base-path"), "the repository is the first word"),
        "--grpc-address": "gRPC listens on `host`",
        "--model-control-mode": "poll=SECONDS looks for changes; the API can always load and unload",
    },
)

BENCH_SERVE = Flags(
    "bench serve",
    BenchSettings.model_fields,
    {
        "--base-url": "url",
        "--model": "model",
        "--served-model-name": "model",
        "--dataset-path": "data",
        "--num-prompts": "num_prompts",
        "--input-len": "input_len",
        "--output-len": "output_len",
        "--random-input-len": "input_len",
        "--random-output-len": "output_len",
        "--random-range-ratio": "range_ratio",
        "--random-prefix-len": "prefix_len",
        "--sharegpt-output-len": "output_len",
        "--custom-output-len": "output_len",
        "--request-rate": "request_rate",
        "--burstiness": "burstiness",
        "--max-concurrency": "max_concurrency",
        "--num-warmups": "num_warmups",
        "--temperature": "temperature",
        "--top-p": "top_p",
        "--top-k": "top_k",
        "--seed": "seed",
        "--goodput": "goodput",
        "--percentile-metrics": "percentile_metrics",
        "--metric-percentiles": "metric_percentiles",
        "--result-filename": "save",
    },
    {"--ignore-eos": ["ignore_eos=true"], "--disable-tqdm": []},
    choices={
        "--backend": {"openai": [], "vllm": [], "openai-chat": ["api=chat"]},
        "--endpoint": {"/v1/completions": [], "/v1/chat/completions": ["api=chat"]},
        "--dataset-name": {"random": ["data=random"], "sharegpt": [], "custom": []},
    },
    several=("--goodput",),
    answers={
        "--host": "the address is the first word, such as http://127.0.0.1:8000",
        "--port": "the address is the first word, such as http://127.0.0.1:8000",
        "--save-result": "`save=FILE` saves the results, with those of every request",
        "--save-detailed": "`save=FILE` saves the results, with those of every request",
        "--result-dir": "`save=FOLDER/FILE`",
        "--tokenizer": "leave it out: prompts are token ids, and the server counts its own tokens",
        "--trust-remote-code": "leave it out: no code of a model is ever run",
        "--header": "`api_key=KEY` is the only header that can be set",
    },
)

RUN_BATCH = Flags(
    "run-batch",
    BatchSettings.model_fields,
    {
        "--served-model-name": "name",
        "--api-key": "api_key",
        "--dtype": "dtype",
        "--quantization": "quantization",
        "--seed": "seed",
        **{flag: key for flag, key in SETTINGS.items() if key.startswith("engine.")},
    },
    {flag: words for flag, words in SWITCHES.items() if not any(word.startswith(("log_requests", "request_chat")) for word in words)},
    CHOICES,
    objects=OBJECTS,
    named=NAMED,
    answers={
        "-i": "`run-batch MODEL IN.jsonl OUT.jsonl`",
        "-o": "`run-batch MODEL IN.jsonl OUT.jsonl`",
        "--input-file": "`run-batch MODEL IN.jsonl OUT.jsonl`",
        "--output-file": "`run-batch MODEL IN.jsonl OUT.jsonl`",
        "--data-parallel-size": "one copy of the model; or `serve MODEL copies=N`, and its address as MODEL here",
        **ANSWERS,
    },
)

CHAT = Flags(
    "chat",
    ChatSettings.model_fields,
    {
        "--url": "url",
        "--model-name": "model",
        "--system-prompt": "system",
        "--api-key": "api_key",
        "--dtype": "dtype",
        "--quantization": "quantization",
        "--max-model-len": "context",
        **{f"--{name.replace('_', '-')}": name for name in ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed")},
    },
    answers={"--model": "the model is the first word", "--quick": "`echo TEXT | argosy chat MODEL`"},
)


def translate_flags(words: Sequence[str], flags: Flags = SERVE) -> list[str]:
    """The words with flags of vLLM written as settings: `--port 80` and `--port=80` as `port=80`.

    Raises:
        BadInput: a flag that is not known, that has no meaning here, or that lacks its value.
    """
    translation, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            translation.append(word)
            continue
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        if flag in flags.switches and not equals:
            translation += flags.switches[flag]
        elif flag in flags.named:
            values = [value] if equals else []
            while rest and not equals and _names(rest[0]):
                values.append(rest.pop(0))
            translation.append(f"{flags.named[flag]}={json.dumps(dict(_name_and_path(flag, text) for text in values))}")
        elif flag in flags.settings or flag in flags.choices or flag in flags.objects:
            if not equals and (not rest or rest[0].startswith("--")):
                setting = flags.settings.get(flag) or next(iter(flags.objects.get(flag, ())), None)
                hint = f"`{setting}=VALUE`" if setting else f"one of {', '.join(flags.choices[flag])}"
                raise BadInput(f"{flag} needs a value", hint=hint)
            values = [value] if equals else [rest.pop(0)]
            while flag in flags.several and rest and not rest[0].startswith("-") and "=" not in rest[0]:
                values.append(rest.pop(0))
            translation += _words(flag, " ".join(values), flags)
        else:
            raise BadInput(f"no such option: {flag}", hint=flags.answers.get(flag) or _similar(flag, value, flags))
    return translation


def _similar(flag: str, value: str, flags: Flags) -> str:
    """The hint for a flag that nothing is known of: the setting of that name, the most similar flag, or where the settings stand."""
    key = flag.lstrip("-").replace("-", "_")
    if key in flags.known or key.split(".")[0] in flags.known:
        return f"settings have no dashes: `{key}={value or 'VALUE'}`"
    options = [*flags.settings, *flags.switches, *flags.choices, *flags.objects, *flags.named, *flags.answers]
    return close_name(flag, options) or f"`argosy {flags.command} --help` lists the settings, which have no dashes: `NAME=VALUE`"


def _names(word: str) -> bool:
    """Whether a word is `name=path`, or vLLM's JSON of both, and not one of our settings."""
    name, equals, _ = word.partition("=")
    return word.startswith("{") or bool(equals and not word.startswith("-") and name.split(".")[0] not in OURS)


def _name_and_path(flag: str, text: str) -> tuple[str, str]:
    """The name and the path in `name=path`, or in {"name": ..., "path": ...}.

    Raises:
        BadInput: it is neither.
    """
    name, _, path = text.partition("=")
    if text.startswith("{"):
        with suppress(ValueError):
            fields = json.loads(text)
            name, path = fields.get("name"), fields.get("path")
    if not (isinstance(name, str) and isinstance(path, str) and name and path):
        raise BadInput(f"{flag} {text[:80]}", hint=f"{flag} NAME=FOLDER")
    return name, path


def _words(flag: str, value: str, flags: Flags) -> list[str]:
    if flag in flags.settings:
        return [f"{flags.settings[flag]}={value}"]
    if flag in flags.objects:
        return _object(flag, value, *flags.objects[flag])
    choices = flags.choices[flag]
    if value not in choices:
        raise BadInput(f"{flag} {value} is not supported", hint=nearest(value, choices))
    return list(choices[value])


def _object(flag: str, value: str, group: str, names: Mapping[str, str]) -> list[str]:
    """The settings of a JSON object. Without a method it is a draft model, as in vLLM."""
    try:
        fields = json.loads(value)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise BadInput(f"{flag} {value} is no JSON object", hint="""such as '{"method": "ngram", "num_speculative_tokens": 4}'""")
    if unknown := [name for name in fields if name not in names]:
        raise BadInput(f"{flag}: `{unknown[0]}` is not supported", hint=nearest(unknown[0], names))
    # A method is read before the settings that belong to it.
    ordered = sorted(({"method": "draft_model"} | fields).items(), key=lambda item: item[0] != "method")
    return [f"{group}.{names[name]}={value}" for name, value in ordered]
