"""The flags of vLLM's commands as our settings."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from argosy.client.settings import BatchSettings
from argosy.core.errors import BadInput, nearest
from argosy.serve.settings import ServeSettings

# The first part of a setting's name, which no adapter in `--lora-modules NAME=FOLDER` may have.
OURS = {*ServeSettings.model_fields, *BatchSettings.model_fields}


@dataclass(frozen=True)
class Flags:
    """The flags of one command.

    settings: flag -> our setting.
    switches: flag without a value -> words.
    choices: flag -> value -> words.
    several: flags of `settings` that take any number of values, which become one.
    objects: flag with a JSON object -> our group of settings, and vLLM's keys -> ours.
    named: flag with values such as `name=path` -> our setting, which is a map.
    answers: flag without a meaning here -> what to do instead.
    """

    settings: Mapping[str, str]
    switches: Mapping[str, Sequence[str]] = field(default_factory=dict)
    choices: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    several: Sequence[str] = ()
    objects: Mapping[str, tuple[str, Mapping[str, str]]] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)
    answers: Mapping[str, str] = field(default_factory=dict)


# vLLM's flag -> our setting.
SETTINGS = {
    "--host": "host",
    "--port": "port",
    "--served-model-name": "name",
    "--api-key": "api_key",
    "--dtype": "dtype",
    "--quantization": "quantization",
    "--seed": "seed",
    "--tensor-parallel-size": "tensor",
    "-tp": "tensor",
    "--data-parallel-size": "copies",
    "-dp": "copies",
    "--ssl-certfile": "tls_certificate",
    "--ssl-keyfile": "tls_key",
    "--shutdown-timeout": "drain",
    "--reasoning-parser": "reasoning_parser",
    "--max-logprobs": "limits.logprobs",
    "--max-num-queued-reqs": "limits.queue",
    "--max-num-queued-tokens": "limits.queue_tokens",
    "--max-model-len": "engine.context",
    "--max-num-seqs": "engine.slots",
    "--max-num-batched-tokens": "engine.budget",
    "--block-size": "engine.page",
    "--num-gpu-blocks-override": "engine.pages",
    "--kv-cache-memory-bytes": "engine.memory",
    "--max-loras": "engine.lora.adapters",
    "--max-lora-rank": "engine.lora.rank",
}

NAMED = {"--lora-modules": "lora_modules"}

# Flags without a value.
SWITCHES = {
    "--enable-prefix-caching": ["engine.reuse=true"],
    "--no-enable-prefix-caching": ["engine.reuse=false"],
    "--enable-log-requests": ["log_requests=true"],
    "--enable-lora": ["engine.lora.enabled=true"],
    # What these ask for is always so here.
    "--enable-chunked-prefill": [],
    "--disable-uvicorn-access-log": [],
    "--async-scheduling": [],
}

# Flags with a value of a list.
CHOICES = {
    "--kv-cache-dtype": {
        "auto": [],
        "int8": ["engine.cache_dtype=int8"],
        "fp8": ["engine.cache_dtype=fp8_e4m3"],
        "fp8_e4m3": ["engine.cache_dtype=fp8_e4m3"],
        "fp8_e5m2": ["engine.cache_dtype=fp8_e5m2"],
    },
}

# Flags with a JSON object.
OBJECTS = {
    "--speculative-config": (
        "engine.speculative",
        {
            "method": "method",
            "model": "model",
            "num_speculative_tokens": "tokens",
            "prompt_lookup_min": "lookup_min",
            "prompt_lookup_max": "lookup_max",
        },
    ),
}

# Flags whose meaning there is nothing of here, and what to do.
ANSWERS = {
    "--model": "the model is the first word",
    "--pipeline-parallel-size": "layers are split over devices in training alone; `tensor=N` shares each of them",
    "--data-parallel-rank": "a server chooses the copy for each request by itself",
    "--data-parallel-address": "the copies of a server are on the devices of one process",
    "--gpu-memory-utilization": "`engine.memory` is the cache's size in bytes",
    "--calculate-kv-scales": "leave it out: each token and head of a quantized cache has its own scale",
    "--trust-remote-code": "leave it out: no code of a model is ever run",
    "--enforce-eager": "leave it out: every step is compiled, and kept for the next start",
    "--max-cpu-loras": "leave it out: every adapter that is loaded is on the device, at most `engine.lora.adapters`",
    "--chat-template": "the template comes with the model's tokenizer",
}


SERVE = Flags(SETTINGS, SWITCHES, CHOICES, objects=OBJECTS, named=NAMED, answers=ANSWERS)

BENCH_SERVE = Flags(
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
    {
        "--served-model-name": "name",
        "--api-key": "api_key",
        "--dtype": "dtype",
    "--quantization": "quantization",
        "--seed": "seed",
        **{flag: key for flag, key in SETTINGS.items() if key.startswith("engine.")},
    },
    {flag: words for flag, words in SWITCHES.items() if flag != "--enable-log-requests"},
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


def translated(words: Sequence[str], flags: Flags = SERVE) -> list[str]:
    """The words with flags of vLLM written as settings: `--port 80` and `--port=80` as `port=80`.

    Raises:
        BadInput: a flag that is not known, that has no meaning here, or that lacks its value.
    """
    found, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            found.append(word)
            continue
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        if flag in flags.switches and not equals:
            found += flags.switches[flag]
        elif flag in flags.named:
            values = [value] if equals else []
            while rest and not equals and _names(rest[0]):
                values.append(rest.pop(0))
            found.append(f"{flags.named[flag]}={json.dumps(dict(_named(flag, one) for one in values))}")
        elif flag in flags.settings or flag in flags.choices or flag in flags.objects:
            if not equals and (not rest or rest[0].startswith("--")):
                setting = flags.settings.get(flag) or next(iter(flags.objects.get(flag, ())), None)
                hint = f"`{setting}=VALUE`" if setting else f"one of {', '.join(flags.choices[flag])}"
                raise BadInput(f"{flag} needs a value", hint=hint)
            values = [value] if equals else [rest.pop(0)]
            while flag in flags.several and rest and not rest[0].startswith("-") and "=" not in rest[0]:
                values.append(rest.pop(0))
            found += _words(flag, " ".join(values), flags)
        else:
            key = flag.lstrip("-").replace("-", "_")
            hint = flags.answers.get(flag, f"settings have no dashes: `{key}={value or 'VALUE'}`")
            raise BadInput(f"no such option: {flag}", hint=hint)
    return found


def _names(word: str) -> bool:
    """Whether a word is `name=path`, or vLLM's JSON of both, and not one of our settings."""
    name, equals, _ = word.partition("=")
    return word.startswith("{") or bool(equals and not word.startswith("-") and name.split(".")[0] not in OURS)


def _named(flag: str, text: str) -> tuple[str, str]:
    """The name and the path in `name=path`, or in {"name": ..., "path": ...}.

    Raises:
        BadInput: it is neither.
    """
    name, _, path = text.partition("=")
    if text.startswith("{"):
        with suppress(ValueError):
            given = json.loads(text)
            name, path = given.get("name"), given.get("path")
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
        given = json.loads(value)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise BadInput(f"{flag} {value} is no JSON object", hint="""such as '{"method": "ngram", "num_speculative_tokens": 4}'""")
    if unknown := [name for name in given if name not in names]:
        raise BadInput(f"{flag}: `{unknown[0]}` is not supported", hint=nearest(unknown[0], names))
    # A method is read before the settings that belong to it.
    ordered = sorted(({"method": "draft_model"} | given).items(), key=lambda item: item[0] != "method")
    return [f"{group}.{names[name]}={one}" for name, one in ordered]
