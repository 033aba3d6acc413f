"""Sentence embeddings, by an encoder or by a language model: `lm.embed(texts)`.

The configuration files of sentence-transformers beside the weights define the steps (`weights.hub.sentence_steps`). Without them an
embedding is the mean over all tokens, not normalized. A language model embeds texts if it has these files (Qwen3-Embedding,
E5-Mistral). Its hidden states are read after the final norm, usually at the last token, which attends to all others.

Texts are processed in batches sorted by length, to reduce padding; programs are compiled once for each bucket of lengths. This
module knows nothing of weight files or families.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Float

from argosy.core.errors import BadInput
from argosy.core.progress import Say, telling
from argosy.core.sequences import common_length
from argosy.data.framing import frame_of
from argosy.infer.completions import Prompt
from argosy.infer.forward.sequences import length_bucket
from argosy.models.parts.texts import text_vectors
from argosy.models.parts.weight import merge
from argosy.weights.hub.sentence_steps import POOLINGS, EmbeddingSteps, read_steps

if TYPE_CHECKING:
    from argosy.infer.lm import LM


def embed(
    lm: "LM",
    texts: Sequence[Prompt],
    normalize: bool | None = None,
    *,
    prompt_name: str | None = None,
    prompt: str | None = None,
    pooling: str | None = None,
    batch: int = 32,
) -> np.ndarray:
    """Returns one embedding per text, [texts D] float32. Defaults come from the configuration in the model's folder.

    Args:
        texts: strings; or lists of token ids, which are used as they are and must include [CLS] and [SEP]. Strings longer than the
            longest sequence are truncated.
        normalize: whether to scale embeddings to length 1; None: the folder's default.
        prompt_name: name of a prompt in the folder's configuration, which is put before each string; None: the folder's default.
        prompt: text to put before each string in place of a named prompt; "": nothing.
        pooling: mean, cls, max or last: how token vectors become one; None: the folder's default.
        batch: number of texts in one forward pass.

    Raises:
        BadInput: the model embeds no texts, a string is given without a tokenizer, ids are outside the vocabulary, or the folder asks
            for a step that is not built.
    """
    if isinstance(texts, str):
        raise BadInput("embed takes a list of texts, not one text", hint="embed([text])")
    if any(isinstance(text, int | np.integer) for text in texts):
        raise BadInput("embed takes a list of texts, not one list of token ids", hint="embed([ids])")
    if pooling not in (None, *POOLINGS):
        raise BadInput(f"pooling `{pooling}` is not built", hint=f"one of {', '.join(POOLINGS)}")
    if batch < 1:
        raise BadInput(f"batch = {batch}", hint="at least 1")
    if prompt is not None and prompt_name is not None:
        raise BadInput("prompt and prompt_name", hint="one of them")
    encoder = SentenceEncoder(lm, pooling)
    if (prompt or prompt_name is not None) and not all(isinstance(text, str) for text in texts):
        raise BadInput("a prompt before token ids, which are used as they are", hint="strings, or ids that begin with the prompt's")
    rows = encoder.ids(texts, encoder.context, prompt=encoder.steps.prompt_named(prompt_name) if prompt is None else prompt)
    out = np.zeros((len(rows), lm.config.embedding_width), np.float32)
    # The longest texts come first, so that a text that does not fit into memory fails at once.
    order = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
    for at in range(0, len(order), batch):
        places = order[at : at + batch]
        out[places] = encoder.pooled([rows[row] for row in places])
    return encoder.finished(out, normalize)


class TextTokens(list[int]):
    """The token ids of a text.

    prompt: number of ids at the beginning that belong to the prompt, and are not pooled.
    """

    def __init__(self, ids: Iterable[int], prompt: int = 0):
        super().__init__(ids)
        self.prompt = prompt


class SentenceEncoder:
    """The steps of embedding texts with one model: `ids` converts texts to token ids, `pooled` computes pooled vectors from these, and
    `finished` truncates and normalizes the vectors. The weights are those at the time of construction.

    Args:
        pooling: the pooling to use in place of the folder's.
        say: called with the name of the program that is being compiled, if compiling takes longer than a second.

    Raises:
        BadInput: the model embeds no texts, or its folder asks for a step that is not built.
    """

    def __init__(self, lm: "LM", pooling: str | None = None, say: Say | None = None):
        if pooling is None or lm.config.scored:
            check_embeds(lm)
        self.lm, self.say = lm, say
        self.steps = embedding_steps(lm, pooling)
        self.context = min(self.steps.tokens or lm.config.context, lm.config.context)
        self._model = model = lm.sequences()
        self._program = _pooled(model.graph, lm.module.dtype, self.steps.pooling)
        self._weights = model.weights()
        self.shapes: set[tuple[int, ...]] = set()

    def ids(
        self, texts: Sequence[Prompt], most: int | None = None, *, special: bool = True, prompt: str | None = None
    ) -> list[list[int]]:
        """The token ids of each text, between [CLS] and [SEP]. Texts that are token ids already are returned unchanged.

        Args:
            most: the most tokens of a sequence. Longer texts are truncated before their [SEP]. None: no limit.
            special: whether to put [CLS] before each text and [SEP] after it.
            prompt: text to put before each text; None: the folder's default.

        Raises:
            BadInput: there is no tokenizer, or it lacks these special tokens; or a text has no ids, ids outside the vocabulary, or more
                ids than the context.
        """
        rows = [[] if isinstance(text, str) else self.lm.encode(text) for text in texts]
        strings = [i for i, text in enumerate(texts) if isinstance(text, str)]
        if strings:
            first, last = frame_tokens(self.lm)
            prompt = self.steps.prompt if prompt is None else prompt
            # Whitespace around prompt and text is stripped, as in sentence-transformers.
            whole = [prompt, *((prompt + str(texts[i])).strip() for i in strings)]
            before, *encoded = self.lm.tokenizer.encode_many([t.lower() if self.steps.lower else t for t in whole])
            first, last = (first, last) if special else ([], [])
            leaves_out = bool(prompt) and not self.steps.include_prompt
            for i, ids in zip(strings, encoded, strict=True):
                cut = ids if most is None else ids[: max(most - len(first) - len(last), 0)]
                # A token that spans the end of the prompt and the beginning of the text is pooled.
                prompt_length = common_length(before, ids) if leaves_out else 0
                if prompt_length and prompt_length >= len(cut) and (len(cut) < len(ids) or not last):
                    raise BadInput("a text of which nothing is left beside its prompt", hint="a longer text, or a shorter prompt")
                rows[i] = TextTokens([*first, *cut, *last], len(first) + prompt_length if prompt_length else 0)
        for row in rows:
            if not row:
                raise BadInput("a text without tokens", hint="a sequence has at least its [CLS]")
            self.lm.check_ids(row, 0 if most is None else len(row))
        return rows

    def pooled(self, rows: Sequence[Sequence[int]], shape: tuple[int, int] | None = None) -> Float[np.ndarray, "N D"]:
        """Computes the pooled vectors of sequences in one forward pass.

        Args:
            rows: the token ids of each sequence, as `ids` returns them.
            shape: (rows, tokens) to pad to; None: the next power of two, and the next length that programs are compiled for.
        """
        longest = max(map(len, rows))
        shape = shape or (row_bucket(len(rows)), max(longest, min(length_bucket(longest), self.lm.config.context)))
        tokens = np.zeros(shape, np.int32)
        segments = np.zeros_like(tokens)
        for row, ids in enumerate(rows):
            tokens[row, : len(ids)], segments[row, : len(ids)] = ids, 1
        inputs: list[np.ndarray] = [tokens, segments]
        if not self.steps.include_prompt:
            after = np.zeros((shape[0], 1), np.int32)
            after[: len(rows), 0] = [getattr(ids, "prompt", 0) for ids in rows]
            inputs.append(after)
        if shape in self.shapes:
            return self._run(inputs)[: len(rows)]
        with telling(self.say, f"compiling {shape[0]} x {shape[1]} tokens"):
            vectors = self._run(inputs)[: len(rows)]
        self.shapes.add(shape)
        return vectors

    def _run(self, inputs: Sequence[np.ndarray]) -> Float[np.ndarray, "B D"]:
        with self._model.on_mesh():
            return np.asarray(self._program(self._weights, *inputs))

    def finished(
        self, vectors: Float[np.ndarray, "N D"], normalize: bool | None = None, dimensions: int | None = None
    ) -> Float[np.ndarray, "N d"]:
        """Truncates pooled vectors to their first dimensions, and then normalizes them.

        Args:
            normalize: whether to scale vectors to length 1; None: the folder's default.
            dimensions: number of dimensions to keep; None: all.
        """
        vectors = vectors[:, :dimensions]
        scaled = self.steps.normalize if normalize is None else normalize
        return unit_vectors(vectors) if scaled else vectors


def unit_vectors(vectors: Float[np.ndarray, "N D"]) -> Float[np.ndarray, "N D"]:
    """Scales vectors to length 1."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def frame_tokens(lm: "LM") -> tuple[list[int], list[int]]:
    """The special tokens that are put before a text and after it, such as [CLS] and [SEP]. A list is empty if the family has none
    there.

    Raises:
        BadInput: there is no tokenizer, or it lacks these tokens.
    """
    if lm.tokenizer is None:
        raise BadInput("this model came without a tokenizer", hint="give token ids")
    if lm.config.causal:
        frame = frame_of(lm.tokenizer)
        return list(frame.first), list(frame.last)
    framing: list[list[int]] = []
    for role in lm.config.framing:
        ids = [] if role is None else lm.tokenizer.encode(lm.tokenizer.special.get(role, ""), special=True)
        if len(ids) != (role is not None):
            raise BadInput(f"the tokenizer has no {role}", hint="give token ids")
        framing.append(ids)
    return framing[0], framing[1]


def embedding_steps(lm: "LM", pooling: str | None = None) -> EmbeddingSteps:
    """The embedding steps of a model, from its folder's files, or else from its family's defaults. Arguments and errors are those of
    `read_steps`."""
    default = lm.config.pooling
    return EmbeddingSteps(pooling or default) if lm.companions is None else read_steps(lm.companions, pooling, default)


def embeds(lm: "LM") -> bool:
    """Whether a model embeds texts. It does if it is an encoder, or a language model with the files of sentence-transformers."""
    listed = lm.companions is not None and (lm.companions / "modules.json").is_file()
    return lm.config.inputs == "tokens" and not lm.config.scored and (not lm.config.causal or listed)


def check_embeds(lm: "LM") -> None:
    """Checks that a model embeds texts.

    Raises:
        BadInput: the model does not.
    """
    if lm.config.inputs != "tokens":
        hint = "`embed` of argosy.load(FOLDER) gives its vectors; tasks=images clip=FOLDER compares drawn images with captions"
        raise BadInput("this model is no encoder of sentences", hint=hint)
    if not lm.config.causal or embeds(lm):
        return
    hint = "its folder has no modules.json of sentence-transformers; lm.embed(texts, pooling=\"last\") reads it all the same"
    raise BadInput("this model predicts tokens and is not an encoder", hint=hint)


# ---------------------------------------------------------------- numbers


def row_bucket(rows: int) -> int:
    """The number of rows that programs are compiled for: the smallest power of two that is at least `rows`."""
    return 1 << (rows - 1).bit_length()


@lru_cache(maxsize=16)
def _pooled(graph: Any, dtype: Any, pooling: str) -> Any:
    """(weights, tokens [B T], attention mask [B T]) -> [B D]; compiled once for each model and shape. A fourth argument [B 1] is the
    number of each row's first tokens that are not pooled."""

    def pooled(weights: Any, tokens: Any, segments: Any, after: Any = None) -> Any:
        model = merge(graph, weights)
        model.dtype = dtype
        return text_vectors(model, tokens, segments, pooling, after=after)[0][:, 0]

    return jax.jit(pooled)
