"""`LM`: a language model in hand. What `argosy.load` returns, and what samples during training, `argosy generate` and the
tests go through.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from argosy.core.errors import BadInput
from argosy.infer.decode import Decoder, bucket
from argosy.infer.sample import Sampling
from argosy.models.parts.attend import Packed
from argosy.models.parts.weight import merge, split

Prompt = str | Sequence[int]
Reason = Literal["stop", "length"]


@dataclass
class Completion:
    """What one prompt was continued with. tokens: ids, a stopping token not included; logprobs: of each of them."""

    text: str
    tokens: list[int]
    finish_reason: Reason | None
    prompt_tokens: int
    logprobs: list[float]


@dataclass(frozen=True)
class Piece:
    """What a step added to a row's text: whole characters only. `done` where the row has ended."""

    row: int
    text: str
    done: bool


@dataclass
class LM:
    """A language model: its settings, its module, its tokenizer (None: token ids only).

    generation: the settings of its generation_config.json. hub: the config.json it came with. companions: where its small
    files lie. dtypes: the types that tensors came in, by weight of a layer. merged: adapters that `merge(keep=True)` took off.
    """

    config: Any
    module: Any
    tokenizer: Any = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    hub: Mapping[str, Any] = field(default_factory=dict)
    companions: Path | None = None
    dtypes: Mapping[str, Any] = field(default_factory=dict, repr=False)
    merged: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        words = "no tokenizer" if self.tokenizer is None else f"{self.tokenizer.vocab:,} tokens"
        return (
            f"LM({type(self.config).__name__}, {self.config.parameters():,} parameters in {self.module.dtype}, {words})"
        )

    # ---------------------------------------------------------------- numbers

    def logits(self, tokens: Any) -> np.ndarray:
        """Of whole sequences, causal: [B T] ints (or [T]) -> [B T V] float32.

        Raises:
            BadInput: ids outside the vocabulary, a sequence longer than the model's context, an encoder.
        """
        self.check_predicts()
        ids = _ids(tokens)
        ids = ids[None] if ids.ndim == 1 else ids
        self._check(ids.ravel(), ids.shape[1])
        T = ids.shape[1]
        padded = np.zeros((len(ids), max(T, min(bucket(T), self.config.context))), np.int32)
        padded[:, :T] = ids
        segments = np.zeros_like(padded)
        segments[:, :T] = 1
        graph, weights = split(self.module)
        return np.asarray(_forward(graph, self.module.dtype)(weights, padded, segments))[:, :T]

    # ---------------------------------------------------------------- text

    def generate(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int = 64,
        *,
        stop: Sequence[str] = (),
        stop_tokens: Sequence[int] = (),
        ignore_eos: bool = False,
        seed: int = 0,
        **sampling: Any,
    ) -> list[Completion]:
        """Continues each prompt: text, or token ids that are taken as they are.

        Args:
            max_tokens: at most so many for each prompt.
            stop: strings that end an answer; they are not part of it.
            stop_tokens: ids that end it, beside the model's own.
            ignore_eos: do not stop at the model's own.
            seed: of the draws; row i draws from seed + i.
            sampling: the settings of `infer.sample.Sampling`: temperature, top_k, top_p, min_p and penalties.

        Raises:
            BadInput: text without a tokenizer, ids outside the vocabulary, a prompt that leaves no room in the context, an
                encoder.
        """
        if isinstance(prompts, str):
            raise BadInput("one text where a list of prompts is wanted", hint="generate([text])")
        answers = Answers(self, list(prompts), max_tokens, list(stop), list(stop_tokens), ignore_eos, seed, sampling)
        for _ in answers:
            pass
        return answers.completions

    def stream(self, prompt: Prompt, max_tokens: int = 64, **how: Any) -> Iterator[str]:
        """The answer to one prompt in pieces of whole characters, as it is made."""
        for piece in self.pieces([prompt], max_tokens, **how):
            if piece.text:
                yield piece.text

    def pieces(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int = 64,
        *,
        stop: Sequence[str] = (),
        stop_tokens: Sequence[int] = (),
        ignore_eos: bool = False,
        seed: int = 0,
        **sampling: Any,
    ) -> "Answers":
        """`generate`, step by step; the result holds `completions` when it has been run through."""
        return Answers(self, list(prompts), max_tokens, list(stop), list(stop_tokens), ignore_eos, seed, sampling)

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """A conversation as token ids, by the model's own template.

        Args:
            tools: descriptions of functions, for templates that tell the model of them.

        Raises:
            BadInput: there is no tokenizer or no template, or the template refuses these messages.
        """
        templates = getattr(self.tokenizer, "chat_templates", None) or {}
        if not templates:
            raise BadInput(
                "this model has no chat template", hint="generate without --chat, or give messages as one text"
            )
        from argosy.data.chat import choose_template, render

        template = choose_template(templates, tools=bool(tools))
        text = render(template, list(messages), self.tokenizer.special, tools=tools, add_generation_prompt=True)
        return self.tokenizer.encode(text, special=True)

    # ---------------------------------------------------------------- vectors

    def embed(self, texts: Sequence[Prompt], normalize: bool | None = None, **how: Any) -> np.ndarray:
        """Of each text a vector, [texts D] float32, as the model's folder says (`infer.embed`).

        Args:
            normalize: to length 1; as the folder says unless told.
            how: pooling and batch, as in `infer.embed.embed`.

        Raises:
            BadInput: a model that predicts tokens, no tokenizer, ids outside the vocabulary, steps that are not built.
        """
        from argosy.infer.embed import embed

        return embed(self, texts, normalize, **how)

    # ---------------------------------------------------------------- files

    def merge(self, *, keep: bool = False) -> list[str]:
        """Adapters become part of the weights, in the weights' type; returns the contractions that had one.

        Args:
            keep: the weights without them stay in memory too, for `unmerge`.

        Raises:
            BadInput: there is no adapter, or one lies on a quantised weight.
        """
        from argosy.adapt.lora import merge

        kept: dict[str, Any] = {}
        names = merge(self.module, kept if keep else None)
        self.merged = kept
        return names

    def unmerge(self) -> list[str]:
        """Adapters and weights apart again, bit for bit as they were before `merge(keep=True)`; returns the contractions.

        Raises:
            BadInput: nothing was kept.
        """
        from argosy.adapt.lora import unmerge

        if not self.merged:
            raise BadInput("no merged adapters were kept", hint="lm.merge(keep=True)")
        names, self.merged = unmerge(self.module, self.merged), {}
        return names

    def save(self, folder: str | Path, format: Literal["hub", "argosy", "peft"] = "hub", dtype: Any = None) -> None:
        """Writes the model as a Hub folder or an Argosy checkpoint, tokenizer and all; or its adapters as a PEFT folder."""
        from argosy.checkpoint.save import save

        save(self, Path(folder), format, dtype)

    # ---------------------------------------------------------------- checks

    def encode(self, prompt: Prompt) -> list[int]:
        """The ids of a prompt, the beginning-of-sequence token in front where the model was trained with one."""
        if not isinstance(prompt, str):
            return _ids(prompt).tolist()
        if self.tokenizer is None:
            raise BadInput("this model came without a tokenizer", hint="give token ids")
        ids = self.tokenizer.encode(prompt)
        return [self.tokenizer.bos, *ids] if self.tokenizer.adds_bos else ids

    def stops(self) -> set[int]:
        """The ids that end an answer: those of the generation config, of config.json and of the tokenizer."""
        found = {self.tokenizer.eos} if self.tokenizer is not None and self.tokenizer.eos is not None else set()
        for source in (self.generation.get("eos_token_id"), self.hub.get("eos_token_id")):
            found |= set(source) if isinstance(source, list) else {source} if isinstance(source, int) else set()
        return found

    def check_predicts(self) -> None:
        """That this is a model that predicts tokens.

        Raises:
            BadInput: it is an encoder.
        """
        if not self.config.causal:
            raise BadInput("this model is an encoder: it predicts no tokens", hint="lm.embed(texts) gives its vectors")

    def _check(self, ids: Any, length: int) -> None:
        ids = np.asarray(ids)
        if ids.size and (ids.min() < 0 or ids.max() >= self.config.vocab):
            wrong = int(ids[(ids < 0) | (ids >= self.config.vocab)][0])
            raise BadInput(f"token id {wrong} is outside the model's vocabulary of {self.config.vocab}")
        if length > self.config.context:
            raise BadInput(f"{length} tokens are more than the model's context of {self.config.context}")


class Answers:
    """Rows being continued; iterating yields what each step adds."""

    def __init__(
        self,
        lm: LM,
        prompts: list[Prompt],
        max_tokens: int,
        stop: list[str],
        stop_tokens: list[int],
        ignore_eos: bool,
        seed: int,
        sampling: Mapping[str, Any],
    ):
        lm.check_predicts()
        if not prompts:
            raise BadInput("no prompt")
        if any(isinstance(p, int | np.integer) for p in prompts):
            raise BadInput("one list of token ids where a list of prompts is wanted", hint="generate([ids])")
        if max_tokens < 1:
            raise BadInput(f"max_tokens = {max_tokens}", hint="at least 1")
        if any(not s for s in stop):
            raise BadInput("an empty stop string would stop everything")
        if stop and lm.tokenizer is None:
            raise BadInput("stop strings need a tokenizer", hint="use stop_tokens")
        self.lm, self.stop, self.seed = lm, stop, seed
        self.ids = [lm.encode(p) for p in prompts]
        for ids in self.ids:
            if not ids:
                raise BadInput(
                    "an empty prompt, and the model has no beginning-of-sequence token", hint="give some text"
                )
            lm._check(ids, len(ids))
        self.most = [min(max_tokens, lm.config.context - len(ids)) for ids in self.ids]
        if min(self.most) < 1:
            raise BadInput(f"the prompt fills the model's context of {lm.config.context} tokens", hint="shorten it")
        self.ends = set(stop_tokens) | (set() if ignore_eos else lm.stops())
        self.sampling = _sampling(sampling)
        self.completions = [Completion("", [], None, len(ids), []) for ids in self.ids]
        self._decoders = [_after(lm.tokenizer, ids) for ids in self.ids]
        self._held = ["" for _ in self.ids]
        self._pieces = self._run()

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def _run(self) -> Iterator[Piece]:
        open_rows = set(range(len(self.ids)))
        seeds = [(self.seed + i) % 2**32 for i in range(len(self.ids))]
        steps = Decoder(self.lm.module).generate(self.ids, [self.sampling] * len(self.ids), seeds, max(self.most))
        for n, step in enumerate(steps, 1):
            tokens, logprobs = np.asarray(step.tokens), np.asarray(step.logprobs)
            for row in sorted(open_rows):
                piece = self._take(row, int(tokens[row]), float(logprobs[row]), n == self.most[row])
                if piece.done:
                    open_rows.discard(row)
                yield piece
            if not open_rows:
                return

    def _take(self, row: int, token: int, logprob: float, last: bool) -> Piece:
        """Adds one token to a row; says what text is now certain."""
        done = self.completions[row]
        if token in self.ends:
            return self._end(row, "stop")
        done.tokens.append(token)
        done.logprobs.append(logprob)
        decoder = self._decoders[row]
        if decoder is not None:
            self._held[row] += decoder.push(token)
            if (cut := _first(self._held[row], self.stop)) is not None:
                self._held[row] = self._held[row][:cut]
                return self._end(row, "stop", flush=False)
        if last:
            return self._end(row, "length")
        return Piece(row, self._release(row), False)

    def _release(self, row: int) -> str:
        """What can no longer become part of a stop string."""
        held = self._held[row]
        keep = max((n for s in self.stop for n in range(1, len(s)) if held.endswith(s[:n])), default=0)
        text = held[: len(held) - keep]
        self._held[row] = held[len(held) - keep :]
        self.completions[row].text += text
        return text

    def _end(self, row: int, reason: Reason, flush: bool = True) -> Piece:
        decoder = self._decoders[row]
        if flush and decoder is not None:
            self._held[row] += decoder.end()
        text, self._held[row] = self._held[row], ""
        self.completions[row].text += text
        self.completions[row].finish_reason = reason
        return Piece(row, text, True)


def _after(tokenizer: Any, ids: list[int]) -> Any:
    """A decoder that has read the prompt: what follows it keeps its space in front. None without a tokenizer."""
    if tokenizer is None:
        return None
    decoder = tokenizer.stream()
    for token in ids:
        decoder.push(token)
    return decoder


def _first(text: str, stops: list[str]) -> int | None:
    """Where the first stop string begins."""
    found = [at for s in stops if (at := text.find(s)) >= 0]
    return min(found) if found else None


def _sampling(given: Mapping[str, Any]) -> Sampling:
    from argosy.core.settings import Layer, read_settings

    sampling = read_settings(Sampling, Layer("generate", dict(given))).value
    idle = [name for name in ("top_k", "top_p", "min_p") if name in given and name in sampling.model_fields_set]
    if idle and not sampling.temperature:
        raise BadInput(f"{', '.join(idle)}: nothing is drawn at temperature 0", hint="set temperature, such as 0.7")
    return sampling


def _ids(tokens: Any) -> np.ndarray:
    """Token ids as an array of whole numbers.

    Raises:
        BadInput: rows of unequal length, or something else than whole numbers.
    """
    try:
        ids = np.asarray(tokens)
    except ValueError:
        raise BadInput(
            "rows of tokens have unequal lengths", hint="give them one by one, or generate, which takes them"
        ) from None
    if ids.size and not np.issubdtype(ids.dtype, np.integer):
        raise BadInput(f"token ids are whole numbers, not {ids.dtype}")
    return ids


@lru_cache(maxsize=16)
def _forward(graph: Any, dtype: Any) -> Any:
    """(weights, tokens [B T], segments [B T]) -> logits [B T V]; compiled once for each model and shape."""

    def forward(weights: Any, tokens: Any, segments: Any) -> Any:
        model = merge(graph, weights)
        model.dtype = dtype
        return model(tokens, Packed(segments))[0]

    return jax.jit(forward)
