"""`LM`: a language model with its tokenizer, as `argosy.load` returns it. It also draws the samples during training, and is what
`argosy generate` and the tests use.
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
    """A language model.

    config: the model's settings.
    module: the module with the weights.
    tokenizer: the tokenizer; None: prompts are token ids only.
    generation: the contents of its generation_config.json.
    hub: the contents of the config.json that it was loaded with.
    companions: the folder with its small files, such as the tokenizer's.
    dtypes: the type of each stored tensor, by per-layer name.
    origin: the quantized blocks of the GGUF file that the weights were read from; None: read from another file.
    merged: the adapters that `merge(keep=True)` merged, with the unmerged weights.
    say: called with the current operation, such as `compiling for 512 tokens`, if it takes longer than a second; None: silent.
    engine_settings: settings of the engine under `generate`, `stream`, `chat` and `beam_search`. Its KV cache grows with the requests,
        up to `slots` sequences of `context` tokens.
    draft: the draft model, if `engine_settings` asks for one.
    exporter: the function that writes the model as a bundle; `argosy.load` sets it.
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
        """The number of weights that are kept in the quantized blocks of their GGUF file (`argosy.load(FILE, blocks=True)`)."""
        return count_in_blocks(split(self.module)[1])[0]

    # ---------------------------------------------------------------- numbers

    def logits(self, tokens: Any) -> np.ndarray:
        """The logits at every token of whole sequences, with causal attention: [B T] ints (or [T]) -> [B T V] float32.

        Raises:
            BadInput: ids are outside the vocabulary, a sequence is longer than the model's context, or the model predicts no tokens.
        """
        self.check_predicts()
        ids = token_ids(tokens)
        ids = ids[None] if ids.ndim == 1 else ids
        self.check_ids(ids.ravel(), ids.shape[1])
        return self.sequences().logits(ids)

    def score(self, texts: Sequence[Prompt], *, batch: int = BATCH, adapter: str | None = None) -> list[np.ndarray]:
        """The log-probability of each token of these texts, given the tokens before it; float32, natural logarithm.

        A text of n ids has n - 1 log-probabilities, because no token is before the first. The ids are those of `encode`. If the
        tokenizer adds a beginning-of-sequence token, this is the first id, and every token of the text has a log-probability.

        Args:
            texts: texts, or lists of token ids, which are used as they are.
            batch: tokens of one forward pass, padding included. Texts of similar length share a pass.
            adapter: the name of a loaded adapter; None: the model alone.

        Raises:
            BadInput: a text is given without a tokenizer, ids are outside the vocabulary, a text has more tokens than the context, the
                model predicts no tokens, or there is no such adapter.
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
        """Completes each prompt. At most `engine_settings.slots` prompts are completed at a time, and the others wait.

        Args:
            prompts: texts, or lists of token ids, which are used as they are.
            max_tokens: the most tokens of each completion.
            stop: strings that end a completion; they are not part of it.
            stop_tokens: token ids that end a completion, in addition to the model's end-of-sequence tokens.
            ignore_eos: whether to continue after the model's end-of-sequence tokens.
            seed: a whole number of up to 64 bits, or several, such as (run seed, step). Each prompt has its own random stream, derived
                from the seed and the prompt's index. So a completion depends (up to rounding) only on its prompt, settings, seed and
                index, not on the other prompts. Streams of different (seed, index) have nothing in common.
            top: number of likeliest tokens to return with each token, at most 20.
            structured: a format that every completion must match, by the names of vLLM's `structured_outputs`: {"json": schema},
                {"regex": ...}, {"choice": [...]}, {"grammar": Lark or GBNF} or {"json_object": True}. A schema may be a pydantic class.
                See `infer.tools.grammar.read_structure`. A completion that `max_tokens` cuts short is the beginning of a match.
            repetition: the repetition that ends a completion, such as `argosy.infer.sampling.repetition.Repetition(longest=20,
                count=4)`.
            adapter: the name of a loaded adapter (`load_adapter`); None: the model alone.
            sampling: the settings of `infer.sampling.sample.Sampling`: temperature, top_k, top_p, min_p, penalties, logit_bias and so
                on. `bad_words` may also have texts.

        Raises:
            BadInput: a text is given without a tokenizer, ids are outside the vocabulary, a prompt leaves no room in the context, the
                seed has more than 64 bits, the model predicts no tokens, a schema or grammar is wrong or not supported, or there is no
                such adapter.
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
        """Yields the completion to one prompt while it is generated, in pieces of whole characters. Arguments are those of
        `generate`."""
        for piece in self.pieces([prompt], max_tokens, **how):
            if piece.text:
                yield piece.text

    def pieces(self, prompts: Sequence[Prompt], max_tokens: int = 64, **how: Any) -> CompletionStream:
        """As `generate`, step by step: iterating over the result yields the text that each step adds. At the end its `completions` is
        what `generate` returns."""
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
            length_penalty: scores are log-probabilities divided by the number of tokens to this power. Values above 0 favor long
                completions.
            stop_tokens, ignore_eos, adapter: as in `generate`.

        Raises:
            BadInput: as `generate`, or `beam_width` is out of range.
        """
        return beam_search(self, prompts, max_tokens, beam_width, length_penalty, stop_tokens, ignore_eos, adapter)

    def chat(self, messages: Sequence[Mapping[str, Any]], max_tokens: int = 256, **how: Any) -> Completion:
        """Completes a conversation, rendered with the model's chat template.

        Args:
            messages: dictionaries with "role" and "content", as in the OpenAI API.
            max_tokens: the most tokens of the completion.
            how: further arguments of `generate`.

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
        """Returns the token ids of a conversation, rendered with the model's chat template.

        Args:
            messages: dictionaries with "role" and "content", as in the OpenAI API.
            tools: JSON descriptions of functions, for templates that list them.
            template: a Jinja template to use in place of the model's. Both are rendered in a process with limits.
            add_generation_prompt: whether to end with the tokens that open a completion.
            continue_final_message: whether to end with the content of the last message, so that a completion continues it. Needs
                `add_generation_prompt=False`.
            add_special_tokens: whether to put the beginning-of-sequence token in front, if the tokenizer adds one. Most templates write
                it themselves.
            variables: variables of the template, such as `documents` or `enable_thinking`. A template ignores those that it does not
                read.

        Raises:
            BadInput: there is no tokenizer or no template, the template refuses these messages, or the last one cannot be continued.
            Omitted: the template leaves out a message, a tool or the documents.
        """
        generation = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        return chat_ids(self.tokenizer, messages, tools, template, variables, generation, add_special_tokens)

    # ---------------------------------------------------------------- vectors

    def embed(self, texts: Sequence[Prompt], normalize: bool | None = None, **how: Any) -> np.ndarray:
        """Returns one embedding per text, [texts D] float32, pooled as the files of the model's folder say (`infer.embed`).

        Args:
            texts: texts, or lists of token ids.
            normalize: whether to scale embeddings to length 1; None: as the model's folder says.
            how: prompt_name, prompt, pooling and batch, as in `infer.embed.embed`.

        Raises:
            BadInput: the model is not an encoder, there is no tokenizer, ids are outside the vocabulary, or the folder asks for a step
                that is not built.
        """
        return embed(self, texts, normalize, **how)

    def rewards(self, conversations: Sequence[Any], *, batch: int = BATCH) -> np.ndarray:
        """Returns a reward model's score of each conversation, read at its last token: [n] float32, or [n Z] if the head has Z > 1
        outputs.

        Args:
            conversations: each is a list of messages, which the chat template renders; a text of prompt and completion, to which the
                end-of-sequence token is added as in training; or a list of token ids, used as they are.
            batch: tokens of one forward pass, padding included.

        Raises:
            BadInput: the model has no score head, or as `chat_prompt` and `score`.
        """
        return rewards(self, conversations, batch)

    def classify(self, texts: Sequence[TextOrPair], *, batch: int = BATCH) -> list[dict[str, float]]:
        """Returns the probability of each class, by the class's name, for each text or pair of texts. For a regression model it is the
        predicted number.

        Args:
            batch: tokens of one forward pass, padding included.

        Raises:
            BadInput: the model has no score head or no tokenizer.
        """
        return classify(self, texts, batch)

    # ---------------------------------------------------------------- adapters

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters that are loaded."""
        return list(self._held.loaded)

    def load_adapter(self, name: str, folder: str | Path, *, replace: bool = False) -> None:
        """Loads a PEFT folder as an adapter, for the argument `adapter` of `generate`, `stream`, `chat`, `score` and `beam_search`.

        The model's weights are not changed, and completions under different adapters, or none, may run at the same time. How many
        adapters can be loaded, and their highest rank, is an argument of `argosy.load`:
        `engine={"lora": {"enabled": True, "adapters": 2, "rank": 16}}`.

        Args:
            name: the adapter's name.
            replace: whether a loaded adapter of this name may be replaced.

        Raises:
            BadInput: adapters are not enabled, the adapter does not fit the model or the highest rank, the name is taken, or as many
                adapters are loaded as may be. Nothing is changed then.
            Unsupported: it has more than low-rank factors (DoRA, biases).
        """
        self.check_predicts()
        self._held.load_adapter(self._parts, name, folder, replace=replace)

    def unload_adapter(self, name: str) -> None:
        """Unloads an adapter. Completions that run under it finish with it.

        Raises:
            BadInput: no adapter of this name is loaded.
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
        """Quantizes weights in place. Returns the names of the quantized contractions, at least one.

        Args:
            rules: a preset of `argosy quantize`, such as "w4"; a YAML file of rules; or a list of rules: `argosy.adapt.rules.Rule`s,
                mappings with their fields, or `qwix.QuantizationRule`s.
            method: the rounding method, as in `argosy quantize`: nearest, mse, gptq, awq or smoothquant; or a settings object of
                `argosy.adapt.methods.settings`, such as `GPTQ(damping=0.1)`.
            data: calibration data: a file or another source as in `data.source`, a list of texts, or a mapping of data settings such
                as {"source": "texts.jsonl", "sequence": 256}.
            samples: number of sequences of calibration data.

        Raises:
            UserError: there is no such preset, file or method, a rule matches nothing, a weight is quantized already or has an
                adapter, or there is too little data. The model is not changed then.
        """
        options: Any = {"method": method, "data": data, "samples": samples}
        names = quantize_in_place(self.module, self.config, self.tokenizer, as_rules(rules), **options)
        self.forget()
        return names

    def merge(self, *, keep: bool = False) -> list[str]:
        """Merges the module's adapters into its weights in place, in the weights' type. Returns the names of the contractions that had
        an adapter.

        Args:
            keep: whether to keep the unmerged weights in memory, for `unmerge`.

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
            BadInput: no unmerged weights were kept.
        """
        if not self.merged:
            raise BadInput("no merged adapters were kept", hint="lm.merge(keep=True)")
        names, self.merged = unmerge(self.module, self.merged), {}
        return names

    def save(self, folder: str | Path, format: Literal["hub", "argosy", "peft"] = "hub", dtype: Any = None) -> None:
        """Writes model and tokenizer as a Hub folder or an Argosy checkpoint, or only the adapters as a PEFT folder (`format="peft"`).

        Args:
            dtype: the type of the written weights, as in `argosy.checkpoint.save.save_model`.
        """
        from argosy.checkpoint.save import save_model

        save_model(self, Path(folder), format, dtype)

    def export(self, folder: str | Path, **how: Any) -> Any:
        """Writes the model as a bundle, which runs without the model's source code (`argosy export`). Returns the bundle's manifest.

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
        """The forward pass over whole sequences, for the module in its current state, including surgery and changed weights."""
        return self._held.sequences(self._parts, self.say)

    def engine(self, lengths: Sequence[int]) -> Engine:
        """The engine, with room for sequences of these lengths (tokens of prompt and completion)."""
        return self._held.engine(self._parts, lengths, self.say)

    @property
    def longest(self) -> int:
        """The most tokens of prompt and completion together in `generate`."""
        return self._parts.longest

    @property
    def _parts(self) -> EngineParts:
        return EngineParts(self.module, self.engine_settings, None if self.draft is None else self.draft.module, self.origin)

    def forget(self) -> None:
        """Frees the engine, with its KV cache and its compiled programs. The next completions build another one."""
        self._held.forget()

    def reset_prefix_cache(self) -> None:
        """Clears the prefix cache, so that completions do not depend on earlier ones. A prompt that is found there is computed in other
        chunks, which changes rounding."""
        self._held.reset_prefix_cache()

    def sleep(self) -> None:
        """Frees the KV cache, but keeps the compiled programs, so that the next completions compile nothing."""
        self._held.sleep()

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt. Ids of a text begin with the beginning-of-sequence token, if the tokenizer adds one."""
        if not isinstance(prompt, str):
            return token_ids(prompt).tolist()
        if self.tokenizer is None:
            hint = "in Python token ids do: argosy.load(MODEL).generate([[1, 2, 3]])"
            raise BadInput("this model came without a tokenizer", hint=hint)
        ids = self.tokenizer.encode(prompt)
        return [self.tokenizer.bos, *ids] if self.tokenizer.adds_bos else ids

    def grammar(self, structured: Mapping[str, Any]) -> Grammar:
        """Compiles the format that completions must match, for `generate(structured=)`. The 32 latest grammars are cached, so it may be
        called for each completion.

        Args:
            structured: as in `generate`.

        Raises:
            BadInput: there is no tokenizer, or a schema or grammar is wrong or not supported.
        """
        return self.grammars().get(read_structure(structured))

    def grammars(self) -> Grammars:
        """The compiler of grammars over this model's tokens.

        Raises:
            BadInput: there is no tokenizer, or it is not supported.
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
            BadInput: the model is an encoder, scores sequences, or ranks items.
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
        """Checks token ids against the vocabulary, and a length in tokens against the context.

        Raises:
            BadInput: ids are outside the vocabulary, or the length is beyond the context.
        """
        ids = np.asarray(ids)
        if ids.size and (ids.min() < 0 or ids.max() >= self.config.vocab):
            wrong = int(ids[(ids < 0) | (ids >= self.config.vocab)][0])
            raise BadInput(f"token id {wrong} is outside the model's vocabulary of {self.config.vocab}")
        if length > self.config.context:
            raise BadInput(f"{plural(length, 'token', 'is', 'are')} more than the model's context of {self.config.context}")
