"""`argosy generate MODEL [PROMPT] [key=value ...]`: text, or with `image=FILE` images."""

import json
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from pydantic import Field

from argosy.adapt.methods.settings import AT_LOAD
from argosy.cli.output import Doing, answer, say
from argosy.core.errors import BadInput
from argosy.core.formats.recognize import HEAD_BYTES, refuse_binary
from argosy.core.settings import Settings, read_settings, words_layer
from argosy.infer.settings import PlainEngineSettings, with_adapters
from argosy.jobs import machine
from argosy.jobs.image_models import draws_images
from argosy.jobs.images import GenerateImages, generate_images

app = typer.Typer(rich_markup_mode=None, add_completion=False)


class Generate(Settings):
    """The completion of a prompt."""

    elsewhere: ClassVar = AT_LOAD

    max_tokens: int = Field(64, gt=0)
    """Most tokens to generate."""
    temperature: float | None = Field(None, ge=0)
    """Sampling temperature; 0 takes the likeliest token. None: the value of the model's generation config, or 0 without one."""
    top_k: int | None = Field(None, ge=0)
    """Samples from the k likeliest tokens; 0: from all."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Samples from the likeliest tokens whose probabilities first sum to p."""
    min_p: float | None = Field(None, ge=0, le=1)
    """Excludes tokens less likely than this share of the likeliest token's probability."""
    typical_p: float | None = Field(None, gt=0, le=1)
    """Samples from the tokens whose information is nearest to the entropy and whose probabilities first sum to p (arXiv:2202.00666)."""
    repetition_penalty: float | None = Field(None, gt=0)
    """Above 1, makes tokens of prompt and completion less likely (arXiv:1909.05858)."""
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    """Subtracted from the logit of each token that is in the completion."""
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    """Subtracted from the logit of a token for each time it is in the completion."""
    logit_bias: dict[int, float] = Field(default_factory=dict)
    """Added to the logits of token ids, such as `{198: -100}`, which bans token 198."""
    bad_words: tuple[str, ...] = ()
    """Texts that may not be in the completion, such as `[one, two words]`."""
    min_tokens: int = Field(0, ge=0)
    """Tokens before the completion may end by an end-of-sequence token or the stop text."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Random seed of sampling."""
    n: int = Field(1, gt=0)
    """Number of completions of the prompt."""
    stop: str | None = None
    """Text that ends the completion and is not part of it."""
    json_schema: str | None = None
    """File of a JSON schema that the completion must match."""
    json_object: bool = False
    """The completion is a JSON object."""
    regex: str | None = None
    """Regular expression that all of the completion must match, without quotes of YAML."""
    choice: tuple[str, ...] = ()
    """Texts of which the completion must be one, such as `[yes, no]`."""
    grammar: str | None = None
    """File of a grammar in Lark or GBNF that the completion must match."""
    ignore_eos: bool = False
    """Continues after the end-of-sequence token."""
    logprobs: bool = False
    """Adds the log-probability of each token; needs --json."""
    dtype: str | None = None
    """Type of weights and activations, float32 or bfloat16. None: float32 on CPUs, bfloat16 elsewhere."""
    quantization: str | None = None
    """A preset of `argosy quantize`, such as w8 or w4, or a YAML file of rules, by which weights are quantized as they are read. None:
    they stay as they are stored."""
    adapter: str | None = None
    """A folder of low-rank adapters in the PEFT library's format, to apply to the model."""
    engine: PlainEngineSettings = PlainEngineSettings()


NAMES = [*Generate.model_fields, *GenerateImages.model_fields, *(f"engine.{name}" for name in PlainEngineSettings.model_fields)]


@app.command()
def generate(
    model: Annotated[
        str, typer.Argument(help="Hub folder, .gguf file, run, checkpoint or hf:OWNER/NAME", show_default=False)
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PROMPT] [key=value ...]",
            help="text, @file, or from stdin; then settings: " + ", ".join(Generate.model_fields)
            + "; of images: " + ", ".join(GenerateImages.model_fields),
            show_default=False,
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="sends the prompt as a message, with the model's chat template")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Continues a prompt with a trained model, streaming; or draws it, with image=FILE."""
    prompt, settings = split_prompt(words or [])
    if any(word.startswith("image=") for word in settings):
        return draw(model, prompt, settings, chat, as_json)
    if draws_images(model, say):
        raise BadInput(f"{model} is no language model", hint="image=out.png draws, with a denoiser or a folder of diffusers")
    options = read_settings(Generate, words_layer([literal(word) for word in settings])).value
    if options.logprobs and not as_json:
        raise BadInput("logprobs need --json", hint="add --json")
    structured, text = structured_of(options), read_prompt(prompt)
    with Doing() as doing:
        doing("loading jax")
        machine.start_jax()
        from argosy.jobs.api import load

        doing(f"loading {model}")
        stored: Any = {name: getattr(options, name) for name in ("dtype", "adapter", "quantization")}
        lm = load(model, **stored, engine=with_adapters(options.engine), blocks="auto")
    lm.check_predicts()
    sampling = sampling_options(options, lm.generation)
    if options.n > 1 and not sampling.get("temperature"):
        raise BadInput(f"n={options.n} completions at temperature 0 would be equal", hint="set temperature, such as 0.7")
    ids = lm.chat_prompt([{"role": "user", "content": text}]) if chat else lm.encode(text) or start_of(lm)
    answers = lm.pieces(
        [ids] * options.n,
        options.max_tokens,
        stop=[options.stop] if options.stop else [],
        ignore_eos=options.ignore_eos,
        seed=options.seed,
        structured=structured,
        **sampling,
    )
    with Doing() as doing:
        # Once text streams, a line that replaces itself would erase it.
        streams = False
        lm.say = lambda activity: None if streams else doing(activity)
        for piece in answers:
            streams = True
            doing.done()
            if not as_json and piece.row == 0 and options.n == 1:
                print(piece.text, end="", flush=True)
    document = [document_of(c, options.logprobs) for c in answers.completions]
    if as_json:
        answer("", document, True)
    elif options.n > 1:
        print("\n---\n".join(c.text for c in answers.completions))
    else:
        print()
    context = min(options.engine.context or lm.config.context, lm.config.context)
    if len(ids) + options.max_tokens > context and any(c.finish_reason == "length" for c in answers.completions):
        say(f"ended at the context of {context} tokens, of which the prompt has {len(ids)}")


def draw(model: str, prompt: str | None, settings: list[str], chat: bool, as_json: bool) -> None:
    """Draws images of the prompt, and prints the names of their files."""
    options = read_settings(GenerateImages, words_layer(settings)).value
    if chat:
        raise BadInput("--chat is for text", hint="leave it out")
    text = read_prompt(prompt)
    with Doing() as doing:
        doing("loading jax")
        machine.start_jax()
        images = generate_images(model, text, options, doing)
    if cached := images[0].get("step_cache"):
        say(f"step caching reused {cached['reused']} of {cached['evaluations']} evaluations")
        if "error" in cached:
            worst = max(image["step_cache"]["error"] for image in images)
            say(f"error of the latents against the full drawing, of their size: {worst:.2g}{' at most' if options.n > 1 else ''}")
    answer("\n".join(image["file"] for image in images), images, as_json)


def split_prompt(words: list[str]) -> tuple[str | None, list[str]]:
    """The prompt is the first word, unless that is a setting, or nearly one."""
    if words and not is_setting(words[0]):
        return words[0], words[1:]
    return None, words


def is_setting(word: str) -> bool:
    """`max_tokens=5` is one, and `maxtokens=5` was meant to be; `x = 5` and `if a==b:` are prompts."""
    name, equals, value = word.partition("=")
    plausible = name.startswith("engine.") or get_close_matches(name, NAMES, n=1, cutoff=0.8)
    plausible = plausible and all(part.isidentifier() for part in name.split("."))
    return bool(equals and value and plausible) and not value.startswith("=")


def literal(word: str) -> str:
    """A regular expression as a quoted text: as YAML, `regex=[ab]` would be a list."""
    name, equals, value = word.partition("=")
    return f"{name}={json.dumps(value)}" if name == "regex" and equals else word


def read_prompt(prompt: str | None) -> str:
    """The prompt itself, a file's text for @file, or standard input (also for `-`); the line break that ends a file is no
    part of it."""
    if prompt is None or prompt == "-":
        return "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read().removesuffix("\n")
    return _read_text(prompt[1:]).removesuffix("\n") if prompt.startswith("@") else prompt


def _read_text(path: str) -> str:
    try:
        data = Path(path).read_bytes()
        refuse_binary(data[:HEAD_BYTES], path)
        # Line ends as `_read_text` gives them.
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise BadInput(f"cannot read {path}: {(error.strerror or '').lower()}") from None


def structured_of(settings: Generate) -> dict[str, Any] | None:
    """The constraint on the completion, as `lm.generate(structured=)` takes it.

    Raises:
        BadInput: several constraints are given, or a file cannot be read.
    """
    names = ("json_schema", "json_object", "regex", "choice", "grammar")
    constraints = {name: value for name in names if (value := getattr(settings, name)) not in (None, False, ())}
    if len(constraints) > 1:
        raise BadInput(f"{' and '.join(constraints)} exclude each other", hint="give one of them")
    files = {name: _read_text(constraints[name]) for name in ("json_schema", "grammar") if name in constraints}
    return {{"json_schema": "json"}.get(name, name): files.get(name, value) for name, value in constraints.items()} or None


def start_of(lm: Any) -> list[int]:
    """The tokens an empty prompt begins with."""
    if lm.tokenizer is None:
        raise BadInput("an empty prompt", hint="give some text")
    for token in (lm.tokenizer.bos, lm.tokenizer.eos):
        if token is not None:
            return [token]
    raise BadInput("an empty prompt, and the model has no token to begin with", hint="give some text")


def sampling_options(settings: Generate, generation: Any) -> dict[str, Any]:
    """The sampling settings: given on the command line, otherwise the model's generation config (which is printed), otherwise
    greedy."""
    filters = ("temperature", "top_k", "top_p", "min_p", "typical_p")
    names = (*filters, "repetition_penalty", "presence_penalty", "frequency_penalty")
    sampling = {name: getattr(settings, name) for name in names if getattr(settings, name) is not None}
    sampling |= {name: value for name in ("logit_bias", "bad_words", "min_tokens") if (value := getattr(settings, name))}
    draws = bool(generation.get("do_sample"))
    ours = names if draws else names[len(filters) :]  # penalties also apply to greedy decoding
    defaults = {name: generation[name] for name in ours if generation.get(name) is not None}
    if draws:
        defaults = {"temperature": 1.0, "top_k": 50} | defaults  # the defaults of transformers
    # Greedy decoding has no use for filters.
    excluded = sampling if sampling.get("temperature") != 0 else {*sampling, *filters}
    defaults = {name: value for name, value in defaults.items() if name not in excluded}
    if defaults:
        say("sampling as its generation config says: " + " ".join(f"{k}={v}" for k, v in defaults.items()))
        sampling = defaults | sampling
    return sampling


def document_of(completion: Any, logprobs: bool) -> dict[str, Any]:
    names = ("text", "tokens", "finish_reason", "prompt_tokens")
    document = {name: getattr(completion, name) for name in names}
    return document | {"logprobs": completion.logprobs} if logprobs else document
