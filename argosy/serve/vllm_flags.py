"""The flags of `vllm serve`, each with the setting of `argosy serve` that it stands for, or advice.

Commands take these flags (`cli.flags`). If a flag is written as a setting, without dashes, the error names the right setting.
"""

from collections.abc import Mapping, Sequence

# vLLM's flag -> the setting of `argosy serve`.
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
    "--chat-template": "chat_template",
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
    "--trust-request-chat-template": ["request_chat_template=true"],
    # These ask for behavior that is always on here.
    "--disable-log-requests": [],
    "--no-enable-log-requests": [],
    "--enable-chunked-prefill": [],
    "--disable-uvicorn-access-log": [],
    "--async-scheduling": [],
}

# Flags whose value is one of a few words, each with the settings that it stands for.
CHOICES = {
    "--kv-cache-dtype": {
        "auto": [],
        "int8": ["engine.cache_dtype=int8"],
        "fp8": ["engine.cache_dtype=fp8_e4m3"],
        "fp8_e4m3": ["engine.cache_dtype=fp8_e4m3"],
        "fp8_e5m2": ["engine.cache_dtype=fp8_e5m2"],
    },
}

# Flags whose value is a JSON object.
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

_ALWAYS = "leave it out: it is always so here"
_MEMORY = "`engine.memory=BYTES` sets the cache's size on each device; by default a GPU or TPU gives it 0.8 of what the weights leave"
_TOOLS = "leave it out: calls are read in the notation of the model's chat template"
_IMAGES = "leave it out: models that take images are not built yet"
_UVICORN = "leave it out: only `log_requests=true` prints requests"

# Flags without a setting here, each with advice.
ANSWERS = {
    "--model": "the model is the first word",
    "--tokenizer": "leave it out: the tokenizer is the one in the model's folder or file",
    "--tokenizer-mode": "leave it out: the tokenizer's files say what it is",
    "--skip-tokenizer-init": "leave it out: requests may give token ids as `prompt`",
    "--task": "leave it out: the model's config says whether it generates or is an encoder",
    "--runner": "leave it out: the model's config says whether it generates or is an encoder",
    "--revision": "MODEL is hf:OWNER/NAME@REVISION",
    "--download-dir": "the variable HF_HOME says where downloads are kept",
    "--load-format": "leave it out: a folder in the Hub's layout, a .gguf file, a run and a checkpoint are told apart by their files",
    "--hf-overrides": "edit config.json in the model's folder",
    "--rope-scaling": "edit `rope_scaling` of config.json in the model's folder",
    "--generation-config": "edit generation_config.json in the model's folder, whose values are the defaults of requests",
    "--override-generation-config": "edit generation_config.json in the model's folder, whose values are the defaults of requests",
    "--pipeline-parallel-size": "layers are split over devices in training alone; `tensor=N` shares each of them",
    "--enable-expert-parallel": "`tensor=N` shares the model over N devices",
    "--data-parallel-rank": "a server chooses the copy for each request by itself",
    "--data-parallel-address": "the copies of a server are on the devices of one process",
    "--distributed-executor-backend": "leave it out: one process drives all devices of this machine",
    "--device": "the variable JAX_PLATFORMS=cpu, cuda or tpu chooses the device",
    "--gpu-memory-utilization": _MEMORY,
    "--swap-space": "leave it out: nothing is swapped; a sequence that loses its pages is computed again",
    "--cpu-offload-gb": "leave it out: weights stay on the device; `quantization=w8` or `w4` makes them smaller",
    "--calculate-kv-scales": "leave it out: each token and head of a quantized cache has its own scale",
    "--trust-remote-code": "leave it out: no code of a model is ever run",
    "--enforce-eager": "leave it out: every step is compiled, and kept for the next start",
    "--compilation-config": "leave it out: every step is compiled, and kept for the next start",
    "--attention-backend": "leave it out: attention is chosen by the device",
    "--max-cpu-loras": "leave it out: every adapter that is loaded is on the device, at most `engine.lora.adapters`",
    "--enable-auto-tool-choice": _TOOLS,
    "--tool-call-parser": _TOOLS,
    "--enable-reasoning": "leave it out: `reasoning_parser=auto` finds the thoughts of reasoning models",
    "--structured-outputs-config": "leave it out: schemas, regular expressions and grammars are always compiled by llguidance",
    "--guided-decoding-backend": "leave it out: schemas, regular expressions and grammars are always compiled by llguidance",
    "--limit-mm-per-prompt": _IMAGES,
    "--mm-processor-kwargs": _IMAGES,
    "--uvicorn-log-level": _UVICORN,
    "--max-log-len": _UVICORN,
    "--disable-log-stats": "leave it out: numbers are at /metrics and on the page at `/`, not in the log",
    "--allowed-origins": "leave it out: no page of another origin may read answers; a proxy in front can allow them",
    "--root-path": "leave it out: a proxy in front removes the path's prefix",
    "--response-role": "leave it out: answers have the role assistant",
}


def setting_answers(
    settings: Mapping[str, str], switches: Mapping[str, Sequence[str]], answers: Mapping[str, str], *groups: Mapping[str, object]
) -> dict[str, str]:
    """The hints for flags that are written as settings, without their dashes, such as `max_model_len=4096`; by that name.

    Args:
        settings: flags with the setting that each stands for.
        switches: flags without a value, each with the settings that it sets.
        answers: other flags, each with its hint.
        groups: mappings whose keys are flags that must be written with their dashes.
    """
    flag_answers: dict[str, str] = {}
    for flag, answer in answers.items():
        flag_answers[flag] = answer
    for flag, words in switches.items():
        flag_answers[flag] = f"did you mean `{' '.join(words).removesuffix('=true')}`?" if words else _ALWAYS
    for flag, setting in settings.items():
        flag_answers[flag] = f"did you mean `{setting}`?"
    for flag in (flag for group in groups for flag in group):
        flag_answers[flag] = f"give it with its dashes: `{flag} VALUE`"
    return {flag.lstrip("-").replace("-", "_"): answer for flag, answer in flag_answers.items() if flag.startswith("--")}


NAMES = setting_answers(SETTINGS, SWITCHES, ANSWERS, OBJECTS) | {
    "kv_cache_dtype": "did you mean `engine.cache_dtype`?",
    "enable_responses_api_store": "did you mean `stored_responses`?",
    "trust_request_chat_template": "did you mean `request_chat_template`?",
    "data_parallel": "did you mean `copies`?",
}
