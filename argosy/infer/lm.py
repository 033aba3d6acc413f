"""`LM`: a language model with its tokenizer. `argosy.load` returns it; samples during training, `argosy generate` and
the tests use it.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from argosy.adapt.lora import merge, unmerge
from argosy.adapt.methods.settings import RoundingMethod
from argosy.adapt.qwix import as_rules
from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.core.progress import Say
from argosy.infer.chat import chat_ids
from argosy.infer.classify import TextOrPair, classify
from argosy.infer.completions import Completion, CompletionStream, Prompt, beam_search, check_prompts, token_ids
from argosy.infer.cpu.panels import count_in_blocks
from argosy.infer.embed import embed
from argosy.infer.engine.adapters import LoadedAdapter
from argosy.infer.engine.cached_engine import EngineCache, EngineParts
from argosy.infer.engine.engine import Engine
from argosy.infer.forward.sequences import BATCH, SequenceScorer, length_batches
from argosy.infer.quantize import Data, quantize_in_place
from argosy.infer.sampling.repetition import Repetition
from argosy.infer.sampling.sample import Seed
from argosy.infer.scores import rewards
from argosy.infer.settings import EngineSettings
from argosy.infer.speculation.tokenizers import check_tokenizers
from argosy.infer.tools.grammar import Grammar, Grammars, read_structure
from argosy.models.parts.weight import split
from argosy.weights.gguf.blocks import Origin

# A server compiles grammars in several threads.
_MAKING = threading.Lock()


@dataclass
class LM:
    """A language model: its settings, its module, its tokenizer (None: token ids only).

    generation: its generation_config.json.
    hub: the config.json it came with.
    companions: the folder of its small files.
    dtypes: the type of each stored tensor, by per-layer name.
    origin: the blocks of a file that the weights were read from.
    merged: the adapters that `merge(keep=True)` removed.
    say: called with the current operation, such as `compiling for 512 tokens`, if it takes longer than a second; None: silent.
    engine_settings: settings of the engine under `generate`, `stream`, `chat` and `beam_search`. Its cache grows with the requests, up
        to `slots` and `context`.
    draft: the draft model, if the settings need one.
    exporter: writes the model as a bundle; `argosy.load` sets it.
    """

    config: Any
    module: Any
    tokenizer: Any = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    hub: Mapping[str, Any] = field(default_factory=dict)
    companions: Path | None = None
    dtypes: Mapping[str, Any] = field(default_factory=dict, repr=False)
    origin: Origin | None = field(default=None, repr=False, compare=False)
    merged: Mapping[str, Any] = field(default_factory=dict, repr=False)
    say: Say | None = field(default=None, repr=False, compare=False)
    engine_settings: EngineSettings = field(default=EngineSettings(), repr=False)
    draft: "LM | None" = field(default=None, repr=False)
    exporter: Callable[..., Any] | None = field(default=None, repr=False, compare=False)
    _grammars: Grammars | None = field(default=None, init=False, repr=False, compare=False)
    _held: EngineCache = field(default_factory=EngineCache, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.draft is not None:
            check_tokenizers(self.tokenizer, self.draft.tokenizer)

    def __repr__(self) -> str:
        words = "no tokenizer" if self.tokenizer is None else f"{self.tokenizer.vocab:,} tokens"
        blocks_text = f", {plural(self.in_blocks, 'weight')} in blocks" if self.in_blocks else ""
        name = type(self.config).__name__
        return f"LM({name}, {self.config.parameters():,} parameters in {self.module.dtype}{blocks_text}, {words})"

    @property
    def in_blocks(self) -> int:
        """The number of weights that are kept in the blocks of their file (`argosy.load(FILE, blocks=True)`)."""
        return count_in_blocks(split(self.module)[1])[0]

    # ---------------------------------------------------------------- numbers

    def logits(self, tokens: Any) -> np.ndarray:
        """Logits of whole sequences, causal: [B T] ints (or [T]) -> [B T V] float32.

        Raises:
            BadInput: ids outside the vocabulary, a sequence longer than the model's context, an encoder.
        """
        self.check_predicts()
        ids = token_ids(tokens)
        ids = ids[None] if ids.ndim == 1 else ids
        self.check_ids(ids.ravel(), ids.shape[1])
        return self.sequences().logits(ids)

    def score(self, texts: Sequence[Prompt], *, batch: int = BATCH, adapter: str | None = None) -> list[np.ndarray]:
        """The log-probability of each token of these texts, given the tokens before it; float32, natural logarithm.

        A text of n ids has n - 1 of them, because nothing is before the first. `encode` gives the ids: where the tokenizer adds a
        beginning-of-sequence token, that is the first, and every token of the text has a log-probability.

        Args:
            batch: tokens of one forward pass, padding included. Texts of similar length share one.
            adapter: the name of a loaded adapter; None: the model alone.

        Raises:
            BadInput: text without a tokenizer, ids outside the vocabulary, more tokens than the context, an encoder, no such adapter.
        """
        self.check_predicts()
        check_prompts(texts, "score")
        under = None if adapter is None else self.adapter(adapter)
        rows = [np.asarray(self.encode(text)) for text in texts]
        for ids in rows:
            self.check_ids(ids, len(ids))
        logprobs = [np.zeros(0, np.float32)] * len(rows)
        some = [i for i, ids in enumerate(rows) if len(ids) > 1]
        sequences = self.sequences() if under is None else self._held.adapted(self._parts, self.say)[0]
        for places in length_batches([len(rows[i]) - 1 for i in some], batch, self.config.context):
            scores = sequences.scores([rows[some[i]] for i in places], under)
            for i, token_scores in zip(places, scores, strict=True):
                logprobs[some[i]] = token_scores.logprobs
        return logprobs

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
        top: int = 0,
        structured: Mapping[str, Any] | Grammar | None = None,
        repetition: Repetition | None = None,
        adapter: str | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        """Continues each prompt: text, or token ids, which are used as they are.

        Args:
            max_tokens: the most tokens of each completion.
            stop: strings that end a completion; they are not part of it.
            stop_tokens: token ids that end a completion, besides the model's own.
            ignore_eos: continue after the model's own end-of-sequence tokens.
            seed: a whole number of up to 64 bits, or several, such as (run seed, step). Seed and row are folded into one random
                stream a row: a completion depends on its own prompt, settings, seed and place among the prompts, and on nothing
                else (to rounding), whatever the other prompts are. Streams of different (seed, row) have nothing in common.
            top: number of likeliest tokens to return with each token, at most 20.
            structured: what every completion must match, by the names of vLLM's `structured_outputs`: {"json": schema}, {"regex": ...},
                {"choice": [...]}, {"grammar": Lark or GBNF} or {"json_object": True}; a schema may be a pydantic class. See
                `infer.tools.grammar.read_structure`. A completion that `max_tokens` cuts short is a beginning of what matches.
            repetition: ends answers that repeat themselves, such as `argosy.infer.sampling.repetition.Repetition(longest=20, count=4)`.
            adapter: the name of a loaded adapter (`load_adapter`); None: the model alone.
            sampling: the settings of `infer.sampling.sample.Sampling`: temperature, top_k, top_p, min_p, penalties, logit_bias and so
            on.
                `bad_words` may be texts too.

        There may be any number of prompts: 32 are continued at a time, and the others wait.

        Raises:
            BadInput: text without a tokenizer, ids outside the vocabulary, a prompt that leaves no room in the context, a seed of
                more than 64 bits, an encoder, a schema or grammar that is wrong or not supported, no such adapter.
        """
        if isinstance(prompts, str):
            raise BadInput("generate takes a list of prompts, not one text", hint="generate([text])")
        ends: Any = {"stop": stop, "stop_tokens": stop_tokens, "ignore_eos": ignore_eos, "repetition": repetition}
        more: Any = {"structured": structured, "adapter": adapter, **sampling}
        answers = self.pieces(prompts, max_tokens, **ends, seed=seed, top=top, **more)
        for _ in answers:
            pass
        return answers.completions

    def stream(self, prompt: Prompt, max_tokens: int = 64, **how: Any) -> Iterator[str]:
        """The completion to one prompt while it is generated, in pieces of whole characters."""
        for piece in self.pieces([prompt], max_tokens, **how):
            if piece.text:
                yield piece.text

    def pieces(self, prompts: Sequence[Prompt], max_tokens: int = 64, **how: Any) -> CompletionStream:
        """`generate`, step by step: iterating gives the text that each step adds; `completions` is complete at the end."""
        return CompletionStream(self, prompts, max_tokens, **how)

    def beam_search(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int = 64,
        *,
        beam_width: int = 4,
        length_penalty: float = 1.0,
        stop_tokens: Sequence[int] = (),
        ignore_eos: bool = False,
        adapter: str | None = None,
    ) -> list[list[Completion]]:
        """The `beam_width` continuations of each prompt with the highest scores, best first (`infer.sampling.beam`).

        Args:
            max_tokens: the most tokens of each completion.
            beam_width: number of beams, 1 to 10.
            length_penalty: scores are log-probabilities divided by the number of tokens to this power; above 0 it favors long
            completions. stop_tokens, ignore_eos, adapter: as in `generate`.

        Raises:
            BadInput: as `generate`, or a width out of range.
        """
        return beam_search(self, prompts, max_tokens, beam_width, length_penalty, stop_tokens, ignore_eos, adapter)

    def chat(self, messages: Sequence[Mapping[str, Any]], max_tokens: int = 256, **how: Any) -> Completion:
        """The completion to a conversation, rendered with the model's chat template.

        Args:
            how: as in `generate`.

        Raises:
            BadInput: as `chat_prompt` and `generate`.
        """
        return self.generate([self.chat_prompt(messages)], max_tokens, **how)[0]

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        **variables: Any,
    ) -> list[int]:
        """A conversation as token ids, rendered with the model's chat template.

        Args:
            tools: JSON descriptions of functions, for templates that list them.
            template: Jinja, in place of the model's. It is rendered in a process with limits, as that is.
            add_generation_prompt: end with the tokens that open a completion.
            continue_final_message: end with the content of the last message, so that a completion continues it; needs
                `add_generation_prompt=False`.
            add_special_tokens: put the beginning-of-sequence token in front, where the tokenizer adds one. Most templates write it
                themselves.
            variables: of the template, such as `documents` or `enable_thinking`. It ignores those it does not read.

        Raises:
            BadInput: there is no tokenizer or no template, the template refuses these messages, or the last one cannot be continued.
            Omitted: the template leaves out a message, a tool or the documents.
        """
        generation = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        return chat_ids(self.tokenizer, messages, tools, template, variables, generation, add_special_tokens)

    # ---------------------------------------------------------------- vectors

    def embed(self, texts: Sequence[Prompt], normalize: bool | None = None, **how: Any) -> np.ndarray:
        """One vector per text, [texts D] float32, pooled as the model's folder says (`infer.embed`).

        Args:
            normalize: scales vectors to length 1; None: as the folder says.
            how: prompt_name, prompt, pooling and batch, as in `infer.embed.embed`.

        Raises:
            BadInput: the model is not an encoder, there is no tokenizer, ids are outside the vocabulary, or a step is not built.
        """
        return embed(self, texts, normalize, **how)

    def rewards(self, conversations: Sequence[Any], *, batch: int = BATCH) -> np.ndarray:
        """The scores of a reward model, read at the last token of each: [n] float32, or [n Z] where its head gives Z > 1.

        Args:
            conversations: lists of messages, rendered by the chat template; or texts of a prompt and its completion, which end with the
                end-of-sequence token as in training; or token ids, used as they are.
            batch: tokens of one forward pass, padding included.

        Raises:
            BadInput: the model has no head of scores, or as `chat_prompt` and `score`.
        """
        return rewards(self, conversations, batch)

    def classify(self, texts: Sequence[TextOrPair], *, batch: int = BATCH) -> list[dict[str, float]]:
        """The probability of each class, by name, for each text or pair of texts; of a model of numbers, the number.

        Args:
            batch: tokens of one forward pass, padding included.

        Raises:
            BadInput: the model has no head of scores or no tokenizer.
        """
        return classify(self, texts, batch)

    # ---------------------------------------------------------------- adapters

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters that are loaded."""
        return list(self._held.loaded)

    def load_adapter(self, name: str, folder: str | Path, *, replace: bool = False) -> None:
        """Loads a PEFT folder as an adapter that `generate`, `stream`, `chat`, `score` and `beam_search` may name. The model's weights
        stay as they are, and answers under different adapters, or none, may run at the same time. `argosy.load` decides how many are
        loaded at a time, and their highest rank: `engine={"lora": {"enabled": True, "adapters": 2, "rank": 16}}`.

        Args:
            replace: another adapter of this name makes room.

        Raises:
            BadInput: there is no room for adapters, it does not fit the model or that room, or the name is taken; nothing is changed.
            Unsupported: it changes the model in another way too (DoRA, biases).
        """
        self.check_predicts()
        self._held.load_adapter(self._parts, name, folder, replace=replace)

    def unload_adapter(self, name: str) -> None:
        """Unloads an adapter. Answers that run finish with it.

        Raises:
            BadInput: none of this name is loaded.
        """
        self._held.unload_adapter(self._parts, name)

    def adapter(self, name: str) -> LoadedAdapter:
        """The loaded adapter of this name.

        Raises:
            BadInput: there is no such adapter.
        """
        return self._held.adapted(self._parts)[1].get(name)

    # ---------------------------------------------------------------- files

    def quantize(
        self, rules: str | Sequence[Any], *, method: str | RoundingMethod = "nearest", data: Data | None = None, samples: int = 128
    ) -> list[str]:
        """Quantizes weights in place, by a preset of `argosy quantize`, such as "w4", a YAML file of rules, or rules: those of this
        house, mappings with their keys, or `qwix.QuantizationRule`s. Returns the names of the contractions, at least one.

        Args:
            method: how weights are rounded, as in `argosy quantize`: nearest, mse, gptq, awq, smoothquant, or one of
                `argosy.adapt.methods.settings` with settings of its own, such as `GPTQ(damping=0.1)`.
            data: calibration data: a file or another source as `data.source` names it, a list of texts, or a mapping of data
                settings such as {"source": "texts.jsonl", "sequence": 256}.
            samples: sequences of it.

        Raises:
            UserError: there is no such preset, file or method, a rule matches nothing, a weight is quantized already or has an
                adapter, or there is too little data; the model is as it was.
        """
        options: Any = {"method": method, "data": data, "samples": samples}
        names = quantize_in_place(self.module, self.config, self.tokenizer, as_rules(rules), **options)
        self.forget()
        return names

    def merge(self, *, keep: bool = False) -> list[str]:
        """Merges adapters into the weights, in the weights' type. Returns the names of the contractions that had one.

        Args:
            keep: keeps the unmerged weights in memory, for `unmerge`.

        Raises:
            BadInput: there is no adapter, or one is on a quantized weight.
        """
        unmerged: dict[str, Any] = {}
        names = merge(self.module, unmerged if keep else None)
        self.merged = unmerged
        return names

    def unmerge(self) -> list[str]:
        """Undoes `merge(keep=True)`, bit for bit. Returns the names of the contractions.

        Raises:
            BadInput: nothing was kept.
        """
        if not self.merged:
            raise BadInput("no merged adapters were kept", hint="lm.merge(keep=True)")
        names, self.merged = unmerge(self.module, self.merged), {}
        return names

    def save(self, folder: str | Path, format: Literal["hub", "argosy", "peft"] = "hub", dtype: Any = None) -> None:
        """Writes model and tokenizer as a Hub folder or an Argosy checkpoint, or the adapters alone as a PEFT folder."""
        from argosy.checkpoint.save import save_model

        save_model(self, Path(folder), format, dtype)

    def export(self, folder: str | Path, **how: Any) -> Any:
        """Writes the model as a bundle, which runs without its source (`argosy export`). Returns its manifest.

        Args:
            how: signature, platforms, batch, length, max_tokens, mesh, store, sign, as in `export.model.export_model`.

        Raises:
            BadInput: the model has no such signature, the folder exists, or the model is not from `argosy.load`.
        """
        if self.exporter is None:
            raise BadInput("this model was not loaded by argosy.load", hint="argosy.load(FOLDER).export(OUT)")
        return self.exporter(self, folder, **how)

    # ---------------------------------------------------------------- checks

    def sequences(self) -> SequenceScorer:
        """The forward pass of the model in its current state, including surgery and changed weights."""
        return self._held.sequences(self._parts, self.say)

    def engine(self, lengths: Sequence[int]) -> Engine:
        """The engine, with room for sequences of these lengths."""
        return self._held.engine(self._parts, lengths, self.say)

    @property
    def longest(self) -> int:
        """The longest sequence that `generate` makes, in tokens, prompt and completion."""
        return self._parts.longest

    @property
    def _parts(self) -> EngineParts:
        return EngineParts(self.module, self.engine_settings, None if self.draft is None else self.draft.module, self.origin)

    def forget(self) -> None:
        """Frees the cache of earlier completions."""
        self._held.forget()

    def reset_prefix_cache(self) -> None:
        """Forgets the beginnings of prompts. A prompt that is found there is computed in other parts, which changes rounding."""
        self._held.reset_prefix_cache()

    def sleep(self) -> None:
        """Frees the cache as `forget` does, and keeps its programs, so that the next completions compile nothing."""
        self._held.sleep()

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt, with the beginning-of-sequence token in front where the tokenizer adds one."""
        if not isinstance(prompt, str):
            return token_ids(prompt).tolist()
        if self.tokenizer is None:
            hint = "in Python token ids do: argosy.load(MODEL).generate([[1, 2, 3]])"
            raise BadInput("this model came without a tokenizer", hint=hint)
        ids = self.tokenizer.encode(prompt)
        return [self.tokenizer.bos, *ids] if self.tokenizer.adds_bos else ids

    def grammar(self, structured: Mapping[str, Any]) -> Grammar:
        """Compiles what answers must match, for `generate(structured=)`. The latest 32 are kept, so this is called with each
        completion.

        Args:
            structured: as in `generate`.

        Raises:
            BadInput: no tokenizer, or a schema or grammar that is wrong or not supported.
        """
        return self.grammars().get(read_structure(structured))

    def grammars(self) -> Grammars:
        """The compiler of grammars over this model's tokens.

        Raises:
            BadInput: no tokenizer, or one that is not supported.
        """
        with _MAKING:
            if self._grammars is None or self._grammars.tokenizer is not self.tokenizer:
                self._grammars = Grammars(self.tokenizer, self.config.vocab)
            return self._grammars

    def stops(self) -> set[int]:
        """The token ids that end a completion: those of the generation config, config.json and the tokenizer."""
        stops = {self.tokenizer.eos} if self.tokenizer is not None and self.tokenizer.eos is not None else set()
        for source in (self.generation.get("eos_token_id"), self.hub.get("eos_token_id")):
            stops |= set(source) if isinstance(source, list) else {source} if isinstance(source, int) else set()
        return stops

    def check_predicts(self) -> None:
        """Checks that the model predicts tokens.

        Raises:
            BadInput: it is an encoder, or scores sequences.
        """
        if self.config.inputs == "clicks":
            raise BadInput("this model ranks and predicts no tokens", hint="`argosy export MODEL OUT` makes a bundle of it")
        if self.config.scored:
            hint = "lm.classify(texts) returns the probability of each class, lm.rewards(texts) scores"
            raise BadInput("this model scores sequences: it predicts no tokens", hint=hint)
        if not self.config.causal:
            hint = "`argosy serve FOLDER` answers /v1/embeddings; in Python, lm.embed(texts) returns vectors"
            raise BadInput("this model is an encoder: it predicts no tokens", hint=hint)

    def check_ids(self, ids: Any, length: int) -> None:
        """Checks token ids, and that the context has room for a length.

        Raises:
            BadInput: ids outside the vocabulary, a length beyond the context.
        """
        ids = np.asarray(ids)
        if ids.size and (ids.min() < 0 or ids.max() >= self.config.vocab):
            wrong = int(ids[(ids < 0) | (ids >= self.config.vocab)][0])
            raise BadInput(f"token id {wrong} is outside the model's vocabulary of {self.config.vocab}")
        if length > self.config.context:
            raise BadInput(f"{plural(length, 'token', 'is', 'are')} more than the model's context of {self.config.context}")
