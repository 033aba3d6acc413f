"""`LM`: a language model with its tokenizer. `argosy.load` returns it; samples during training, `argosy generate` and
the tests use it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from argosy.core.errors import BadInput
from argosy.core.progress import Say
from argosy.infer.decode import Generator, bucket, decode_rows, room_for
from argosy.infer.held import Held
from argosy.infer.sample import Sampling, Seed, streams, words_of

Prompt = str | Sequence[int]
Reason = Literal["stop", "length"]

ROWS = 64  # most prompts continued at the same time
# Most tokens of all their buffers: 6 GB for SmolLM2 135M in float32.
TOKENS = 1 << 17


@dataclass
class Completion:
    """The answer to one prompt. tokens: ids, without the token that stopped it. logprobs: the model's own, one per token, before
    temperature, filters and penalties."""

    text: str
    tokens: list[int]
    finish_reason: Reason | None
    prompt_tokens: int
    logprobs: list[float]


@dataclass(frozen=True)
class Piece:
    """Text that a step added to a row, in whole characters. done: the row has ended."""

    row: int
    text: str
    done: bool


@dataclass
class LM:
    """A language model: its settings, its module, its tokenizer (None: token ids only).

    generation: its generation_config.json. hub: the config.json it came with. companions: the folder of its small files.
    dtypes: the type of each stored tensor, by per-layer name. merged: the adapters that `merge(keep=True)` removed.
    say: called with the current operation, such as `compiling for 512 tokens`, if it takes longer than a second; None: silent.
    """

    config: Any
    module: Any
    tokenizer: Any = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    hub: Mapping[str, Any] = field(default_factory=dict)
    companions: Path | None = None
    dtypes: Mapping[str, Any] = field(default_factory=dict, repr=False)
    merged: Mapping[str, Any] = field(default_factory=dict, repr=False)
    say: Say | None = field(default=None, repr=False, compare=False)
    _held: Held = field(default_factory=Held, init=False, repr=False, compare=False)

    def __repr__(self) -> str:
        words = "no tokenizer" if self.tokenizer is None else f"{self.tokenizer.vocab:,} tokens"
        return (
            f"LM({type(self.config).__name__}, {self.config.parameters():,} parameters in {self.module.dtype}, {words})"
        )

    # ---------------------------------------------------------------- numbers

    def logits(self, tokens: Any) -> np.ndarray:
        """Logits of whole sequences, causal: [B T] ints (or [T]) -> [B T V] float32.

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
        return np.asarray(self.generator().logits(padded, segments))[:, :T]

    # ---------------------------------------------------------------- text

    def generate(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int = 64,
        *,
        stop: Sequence[str] = (),
        stop_tokens: Sequence[int] = (),
        ignore_eos: bool = False,
        seed: Seed = 0,
        **sampling: Any,
    ) -> list[Completion]:
        """Continues each prompt: text, or token ids, which are used as they are.

        Args:
            max_tokens: the most tokens of each answer.
            stop: strings that end an answer; they are not part of it.
            stop_tokens: token ids that end an answer, besides the model's own.
            ignore_eos: continue after the model's own end-of-sequence tokens.
            seed: a whole number of up to 64 bits, or several, such as (run seed, step). Seed and row are folded into one random
                stream a row: an answer depends on its own prompt, settings, seed and place among the prompts, and on nothing
                else (to rounding), whatever the other prompts are. Streams of different (seed, row) have nothing in common.
            sampling: the settings of `infer.sample.Sampling`: temperature, top_k, top_p, min_p and penalties.

        There may be any number of prompts: 64 are continued at a time, fewer if their buffers would have more than 131,072 tokens.

        Raises:
            BadInput: text without a tokenizer, ids outside the vocabulary, a prompt that leaves no room in the context, a seed of
                more than 64 bits, an encoder.
        """
        if isinstance(prompts, str):
            raise BadInput("generate takes a list of prompts, not one text", hint="generate([text])")
        answers = Answers(self, list(prompts), max_tokens, list(stop), list(stop_tokens), ignore_eos, seed, sampling)
        for _ in answers:
            pass
        return answers.completions

    def stream(self, prompt: Prompt, max_tokens: int = 64, **how: Any) -> Iterator[str]:
        """The answer to one prompt while it is generated, in pieces of whole characters."""
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
        seed: Seed = 0,
        **sampling: Any,
    ) -> "Answers":
        """`generate`, step by step: iterating gives the text that each step adds; `completions` is complete at the end."""
        return Answers(self, list(prompts), max_tokens, list(stop), list(stop_tokens), ignore_eos, seed, sampling)

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """A conversation as token ids, rendered with the model's chat template.

        Args:
            tools: JSON descriptions of functions, for templates that list them.

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
        """One vector per text, [texts D] float32, pooled as the model's folder says (`infer.embed`).

        Args:
            normalize: scales vectors to length 1; None: as the folder says.
            how: pooling and batch, as in `infer.embed.embed`.

        Raises:
            BadInput: the model is not an encoder, there is no tokenizer, ids are outside the vocabulary, or a step is not built.
        """
        from argosy.infer.embed import embed

        return embed(self, texts, normalize, **how)

    # ---------------------------------------------------------------- files

    def merge(self, *, keep: bool = False) -> list[str]:
        """Merges adapters into the weights, in the weights' type. Returns the names of the contractions that had one.

        Args:
            keep: keeps the unmerged weights in memory, for `unmerge`.

        Raises:
            BadInput: there is no adapter, or one is on a quantized weight.
        """
        from argosy.adapt.lora import merge

        kept: dict[str, Any] = {}
        names = merge(self.module, kept if keep else None)
        self.merged = kept
        return names

    def unmerge(self) -> list[str]:
        """Undoes `merge(keep=True)`, bit for bit. Returns the names of the contractions.

        Raises:
            BadInput: nothing was kept.
        """
        from argosy.adapt.lora import unmerge

        if not self.merged:
            raise BadInput("no merged adapters were kept", hint="lm.merge(keep=True)")
        names, self.merged = unmerge(self.module, self.merged), {}
        return names

    def save(self, folder: str | Path, format: Literal["hub", "argosy", "peft"] = "hub", dtype: Any = None) -> None:
        """Writes model and tokenizer as a Hub folder or an Argosy checkpoint, or the adapters alone as a PEFT folder."""
        from argosy.checkpoint.save import save

        save(self, Path(folder), format, dtype)

    # ---------------------------------------------------------------- checks

    def generator(self) -> Generator:
        """The generator of the model in its current state, including surgery and changed weights."""
        return self._held.generator(self.module, self.say)

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt, with the beginning-of-sequence token in front where the tokenizer adds one."""
        if not isinstance(prompt, str):
            return _ids(prompt).tolist()
        if self.tokenizer is None:
            raise BadInput("this model came without a tokenizer", hint="give token ids")
        ids = self.tokenizer.encode(prompt)
        return [self.tokenizer.bos, *ids] if self.tokenizer.adds_bos else ids

    def stops(self) -> set[int]:
        """The token ids that end an answer: those of the generation config, config.json and the tokenizer."""
        found = {self.tokenizer.eos} if self.tokenizer is not None and self.tokenizer.eos is not None else set()
        for source in (self.generation.get("eos_token_id"), self.hub.get("eos_token_id")):
            found |= set(source) if isinstance(source, list) else {source} if isinstance(source, int) else set()
        return found

    def check_predicts(self) -> None:
        """Checks that the model predicts tokens.

        Raises:
            BadInput: it is an encoder.
        """
        if not self.config.causal:
            raise BadInput("this model is an encoder: it predicts no tokens", hint="lm.embed(texts) returns its vectors")

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
        seed: Seed,
        sampling: Mapping[str, Any],
    ):
        lm.check_predicts()
        check_prompts(prompts)
        if max_tokens < 1:
            raise BadInput(f"max_tokens = {max_tokens}", hint="at least 1")
        if any(not s for s in stop):
            raise BadInput("an empty stop string would stop everything")
        if stop and lm.tokenizer is None:
            raise BadInput("stop strings need a tokenizer", hint="use stop_tokens")
        words_of(seed)
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
        self._streams = [_after(lm.tokenizer, ids) for ids in self.ids]
        self._held = ["" for _ in self.ids]
        self._pieces = self._run()

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def _run(self) -> Iterator[Piece]:
        for rows in self._batches():
            yield from self._continue(rows)

    def _batches(self) -> Iterator[list[int]]:
        """The rows in order, as many at a time as `ROWS` and `TOKENS` allow."""
        batch: list[int] = []
        longest = 0
        for row, (ids, most) in enumerate(zip(self.ids, self.most)):
            longest = max(longest, len(ids) + most)
            room = room_for(longest, self.lm.config.context)
            if batch and (len(batch) == ROWS or decode_rows(len(batch) + 1) * room > TOKENS):
                yield batch
                batch, longest = [], len(ids) + most
            batch.append(row)
        yield batch

    def _continue(self, rows: list[int]) -> Iterator[Piece]:
        unfinished = set(rows)
        most = max(self.most[row] for row in rows)
        keys = streams(self.seed, rows)
        generator = self.lm.generator()
        steps = generator.generate([self.ids[row] for row in rows], [self.sampling] * len(rows), keys, most)
        for n, step in enumerate(steps, 1):
            tokens, logprobs = np.asarray(step.tokens), np.asarray(step.logprobs)
            for at, row in enumerate(rows):
                if row not in unfinished:
                    continue
                piece = self._take(row, int(tokens[at]), float(logprobs[at]), n == self.most[row])
                if piece.done:
                    unfinished.discard(row)
                yield piece
            if not unfinished:
                return

    def _take(self, row: int, token: int, logprob: float, last: bool) -> Piece:
        """Adds one token to a row. Returns the text that can no longer change."""
        done = self.completions[row]
        if token in self.ends:
            return self._end(row, "stop")
        done.tokens.append(token)
        done.logprobs.append(logprob)
        stream = self._streams[row]
        if stream is not None:
            self._held[row] += stream.push(token)
            if (cut := _first(self._held[row], self.stop)) is not None:
                self._held[row] = self._held[row][:cut]
                return self._end(row, "stop", flush=False)
        if last:
            return self._end(row, "length")
        return Piece(row, self._release(row), False)

    def _release(self, row: int) -> str:
        """Releases the text that can no longer become part of a stop string."""
        held = self._held[row]
        keep = max((n for s in self.stop for n in range(1, len(s)) if held.endswith(s[:n])), default=0)
        text = held[: len(held) - keep]
        self._held[row] = held[len(held) - keep :]
        self.completions[row].text += text
        return text

    def _end(self, row: int, reason: Reason, flush: bool = True) -> Piece:
        stream = self._streams[row]
        if flush and stream is not None:
            self._held[row] += stream.end()
        text, self._held[row] = self._held[row], ""
        self.completions[row].text += text
        self.completions[row].finish_reason = reason
        return Piece(row, text, True)


def check_prompts(prompts: Sequence[Any]) -> None:
    """Checks that these are prompts.

    Raises:
        BadInput: there is none, or they are the messages of a conversation, or the token ids of one prompt.
    """
    if not prompts:
        raise BadInput("no prompt")
    first = [p[0] if isinstance(p, list | tuple) and p else p for p in prompts]
    if any(isinstance(one, Mapping) for one in first):
        raise BadInput("generate takes prompts, not messages", hint="lm.generate([lm.chat_prompt(messages)])")
    if any(isinstance(p, int | np.integer) for p in prompts):
        raise BadInput("generate takes a list of prompts, not one list of token ids", hint="generate([ids])")


def _after(tokenizer: Any, ids: list[int]) -> Any:
    """A text stream that has read the prompt, so that the answer keeps its leading space. None without a tokenizer."""
    if tokenizer is None:
        return None
    stream = tokenizer.stream()
    for token in ids:
        stream.push(token)
    return stream


def _first(text: str, stops: list[str]) -> int | None:
    """The index at which the first stop string begins, None if there is none."""
    found = [at for s in stops if (at := text.find(s)) >= 0]
    return min(found) if found else None


def _sampling(given: Mapping[str, Any]) -> Sampling:
    from argosy.core.settings import SettingsLayer, read_settings

    sampling = read_settings(Sampling, SettingsLayer("generate", dict(given))).value
    idle = [name for name in ("top_k", "top_p", "min_p") if name in given and name in sampling.model_fields_set]
    if idle and not sampling.temperature:
        raise BadInput(f"{', '.join(idle)}: no effect at temperature 0", hint="set temperature, such as 0.7")
    return sampling


def _ids(tokens: Any) -> np.ndarray:
    """Token ids as an array of whole numbers.

    Raises:
        BadInput: rows of unequal length, or values that are not whole numbers.
    """
    try:
        ids = np.asarray(tokens)
    except ValueError:
        raise BadInput(
            "rows of tokens have unequal lengths", hint="call logits once per row"
        ) from None
    if ids.size and not np.issubdtype(ids.dtype, np.integer):
        raise BadInput(f"token ids are whole numbers, not {ids.dtype}")
    return ids

