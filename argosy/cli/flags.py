"""The flags of `vllm serve` as our settings."""

from argosy.core.errors import BadInput

# vLLM's flag -> our setting.
SETTINGS = {
    "--host": "host",
    "--port": "port",
    "--served-model-name": "name",
    "--api-key": "api_key",
    "--dtype": "dtype",
    "--seed": "seed",
    "--ssl-certfile": "tls_certificate",
    "--ssl-keyfile": "tls_key",
    "--shutdown-timeout": "drain",
    "--max-logprobs": "limits.logprobs",
    "--max-num-queued-reqs": "limits.queue",
    "--max-num-queued-tokens": "limits.queue_tokens",
    "--max-model-len": "engine.context",
    "--max-num-seqs": "engine.slots",
    "--max-num-batched-tokens": "engine.budget",
    "--block-size": "engine.page",
    "--num-gpu-blocks-override": "engine.pages",
}

# Flags without a value.
SWITCHES = {
    "--enable-prefix-caching": ["engine.reuse=true"],
    "--no-enable-prefix-caching": ["engine.reuse=false"],
    "--enable-log-requests": ["log_requests=true"],
    # What these ask for is always so here.
    "--enable-chunked-prefill": [],
    "--disable-uvicorn-access-log": [],
    "--async-scheduling": [],
}

# Flags whose meaning there is nothing of here, and what to do.
ANSWERS = {
    "--model": "the model is the first word",
    "--tensor-parallel-size": "models are served on one device so far",
    "--pipeline-parallel-size": "models are served on one device so far",
    "--data-parallel-size": "models are served on one device so far",
    "--gpu-memory-utilization": "the cache has `engine.pages` pages of `engine.page` tokens",
    "--kv-cache-memory-bytes": "the cache has `engine.pages` pages of `engine.page` tokens",
    "--trust-remote-code": "leave it out: no code of a model is ever run",
    "--enforce-eager": "leave it out: every step is compiled, and kept for the next start",
    "--quantization": "a model is served as it is stored",
    "--enable-lora": "`adapter=FOLDER` serves the model with one adapter",
    "--lora-modules": "`adapter=FOLDER` serves the model with one adapter",
    "--chat-template": "the template comes with the model's tokenizer",
}


def translated(words: list[str]) -> list[str]:
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
        if flag in SWITCHES and not equals:
            found += SWITCHES[flag]
        elif flag in SETTINGS:
            if not equals and (not rest or rest[0].startswith("--")):
                raise BadInput(f"{flag} needs a value", hint=f"`{SETTINGS[flag]}=VALUE`")
            found.append(f"{SETTINGS[flag]}={value if equals else rest.pop(0)}")
        else:
            key = flag.lstrip("-").replace("-", "_")
            hint = ANSWERS.get(flag, f"settings have no dashes: `{key}={value or 'VALUE'}`")
            raise BadInput(f"no such option: {flag}", hint=hint)
    return found
