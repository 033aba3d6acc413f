"""Computes the conditions of prompts with text encoders such as CLIP and T5, as the pipelines of diffusers do.

    Flux       text: hidden states of T5                            pooled: CLIP's pooled vector
    SD         text: hidden states of CLIP. XL: those of both CLIPs before the last layer; pooled: the second one's pooled vector
    SD3        text: hidden states of both CLIPs before the last layer, joined along the width, then those of T5 as further tokens
               pooled: both pooled vectors of CLIP
    Wan        text: hidden states of UMT5, zeros for padding
    others     text: hidden states of any encoder, zeros for padding      pooled: their mean

Texts are padded to one length. Padding is attended to like words, as in the training of these models, except for Wan and others, whose
encoders mask it. Longer texts are truncated, with a warning.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.core.progress import Say
from argosy.data.framing import unescape_text
from argosy.data.tokenizers.config import read_config
from argosy.data.tokenizers.learned import LearnedTokens
from argosy.infer.denoise.finite import check_finite
from argosy.models.blocks.clip import text_states, unet_conditions
from argosy.models.diffusion.base import Conditions
from argosy.models.parts.weight import merge, split

# The parameter name of the token embedding in every text encoder.
EMBEDDING = "embed.w"


# The outputs of a text encoder, by name. hidden: [B T D] the hidden states of all tokens. penultimate: [B T D] those before the last
# layer (CLIP only). pooled: [B D] one vector for each text (CLIP only). mask: [B T] the attention mask, 0 for padding.
TextStates = dict[str, Array]


class PromptTokens:
    """Converts texts to the token ids that a text encoder reads, padded to one length. Learned tokens (textual inversion) have ids
    after those of the vocabulary.

    Args:
        config: the settings of the encoder.
        tokenizer: the tokenizer.
        length: number of tokens that every text is padded or truncated to.
        name: the name of the encoder in messages.
        say: called with a warning if a text is truncated.
        learned: the number of embeddings of each learned token, by the token's name.

    learned: the ids of each learned token's embeddings, by the token's name in lower case.
    learned_tokens: finds learned tokens in texts.
    frame: the special tokens before and after each text.
    pad: the id of the padding token.
    pads_left: whether padding is before the text. Always false.

    Raises:
        BadInput: a learned token is in the vocabulary already, or a special token of the tokenizer is not one token.
    """

    pads_left = False

    def __init__(
        self, config: Any, tokenizer: Any, length: int, name: str, say: Say | None = None, learned: Mapping[str, int] | None = None
    ):
        self.tokenizer, self.length, self.name, self.say = tokenizer, length, name, say
        learned_ids: dict[str, list[int]] = {}
        at = config.vocab
        for token, rows in (learned or {}).items():
            if tokenizer.id_of(token) is not None:
                what = f"the learned token {token!r} is in the vocabulary of {name} already"
                raise BadInput(what, hint="another name, such as <cat-toy>: of a file with emb_params, that of the file")
            learned_ids[token] = list(range(at, at := at + rows))
        self.learned_tokens = LearnedTokens(learned_ids)
        self.learned = {token.lower(): ids for token, ids in learned_ids.items()}
        first, last = (self._special(role) for role in config.framing)
        self.frame, pad = (first, last), self._special("pad_token")
        self.pad = pad[0] if pad else (last[0] if last else 0)

    def ids(self, texts: Sequence[str]) -> Int[np.ndarray, "B T"]:
        """The ids of texts, with special tokens around them, padded to one length. As in transformers, the name of a special token in a
        text becomes that token. For example, the padding token of OpenCLIP is an exclamation mark."""
        return self.padded(texts)[0]

    def affixes(self) -> tuple[str, str]:
        """The texts that are put before and after each prompt. Always empty."""
        return "", ""

    def cut(self, texts: Sequence[str]) -> int:
        """The number of texts that are truncated."""
        room = self.length - sum(map(len, self.frame))
        return sum(len(ids) > room for ids in self.encoded(texts))

    def padded(self, texts: Sequence[str]) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B T"]]:
        """The ids of texts, and their attention mask (1: a token, 0: padding)."""
        first, last = self.frame
        out = np.full((len(texts), self.length), self.pad, np.int32)
        words = np.zeros_like(out)
        room = self.length - len(first) - len(last)
        for row, ids in enumerate(self.encoded(texts)):
            if len(ids) > room and self.say is not None:
                lost = self._decoded(ids[room:])
                self.say(f"{self.name} reads {plural(self.length, 'token')}; a prompt loses its end: {lost!r}")
            whole = [*first, *ids[:room], *last]
            out[row, : len(whole)], words[row, : len(whole)] = whole, 1
        return out, words

    def encoded(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special tokens around it. Learned tokens are found within words too, as added tokens in
        transformers."""
        return self.learned_tokens.encode(self.tokenizer, texts)

    def _decoded(self, ids: Sequence[int]) -> str:
        """Decodes ids to text. Learned tokens become their names, after the other text."""
        of = {rows[0]: token for token, rows in self.learned.items()}
        rest = {row for rows in self.learned.values() for row in rows}
        named = [of[i] for i in ids if i in of]
        return " ".join([self.tokenizer.decode([i for i in ids if i not in rest]), *named]).strip()

    def _special(self, role: str | None) -> list[int]:
        if role is None or not (text := self.tokenizer.special.get(role)):
            return []
        ids = self.tokenizer.encode(text, special=True)
        if len(ids) != 1:
            raise BadInput(f"the {role} of the tokenizer of {self.name}, {text!r}, is not one token")
        return ids


class PromptReader(PromptTokens):
    """Runs a text encoder with its tokenizer.

    Args:
        module: the module of the encoder, such as CLIP or T5.
        learned: the embeddings [n D] of each learned token, which replace the token's name in a text (textual inversion).

    module: the encoder as it was given.
    full_module: the encoder with the learned embeddings after those of its vocabulary.
    """

    def __init__(
        self,
        module: Any,
        tokenizer: Any,
        length: int,
        name: str,
        say: Say | None = None,
        learned: Mapping[str, Float[np.ndarray, "n D"]] | None = None,
    ):
        learned = learned or {}
        super().__init__(module.config, tokenizer, length, name, say, {token: len(rows) for token, rows in learned.items()})
        self.module = self.full_module = module
        graph, self._leaves = split(module)
        if learned:
            # Only this program uses the longer table. The module itself is not changed.
            table = self._leaves[EMBEDDING]
            rows = np.concatenate(list(learned.values()))
            self._leaves = self._leaves | {EMBEDDING: jnp.concatenate([table, jnp.asarray(rows, table.dtype)])}
            self.full_module = merge(graph, self._leaves)
        self._program = _states(graph, module.dtype)

    def states(self, texts: Sequence[str], *, masked: bool = False) -> TextStates:
        """Runs the encoder on texts.

        Args:
            masked: whether padding is masked; if not, it is attended to like words.

        Raises:
            ArgosyError: the encoder's outputs are not finite.
        """
        unique = list(dict.fromkeys(texts))
        rows = 1 << (len(unique) - 1).bit_length()
        tokens, words = self.padded([*unique, *[""] * (rows - len(unique))])
        found = self._program(self._leaves, jnp.asarray(tokens), words if masked else np.ones_like(words))
        check_finite(self.name, found)
        order = jnp.asarray([unique.index(text) for text in texts])
        return jax.tree.map(lambda a: a[order], found | {"mask": jnp.asarray(words)})

    def computed(self, model: Any, tokens: Int[Array, "B T"], segments: Int[Array, "B T"]) -> TextStates:
        """As `encoder_states`, for a module of this encoder with other weights."""
        return encoder_states(model, tokens, segments)


@lru_cache(maxsize=16)
def _states(graph: Any, dtype: Any) -> Callable[..., TextStates]:
    def states(leaves: Any, tokens: Int[Array, "B T"], segments: Int[Array, "B T"]) -> TextStates:
        model = merge(graph, leaves)
        model.dtype = dtype
        return encoder_states(model, tokens, segments)

    return jax.jit(states)


def encoder_states(model: Any, tokens: Int[Array, "B T"], segments: Int[Array, "B T"]) -> TextStates:
    """Runs a text encoder on token ids. The result has no `mask`.

    Args:
        segments: the attention mask; 0 for tokens that are masked.
    """
    attend = model.config.attend(segments)
    return text_states(model, tokens, attend) if hasattr(model, "states") else {"hidden": model.hidden(tokens, attend)[0]}


@runtime_checkable
class TextReader(Protocol):
    """The interface of a text encoder with its tokenizer: `PromptReader` or `chat_prompts.ChatReader`."""

    module: Any
    full_module: Any
    tokenizer: Any
    length: int
    learned: dict[str, list[int]]
    learned_tokens: LearnedTokens
    frame: tuple[list[int], list[int]]
    pad: int
    pads_left: bool

    def affixes(self) -> tuple[str, str]: ...
    def states(self, texts: Sequence[str], *, masked: bool = False) -> TextStates: ...
    def computed(self, model: Any, tokens: Array, segments: Array) -> TextStates: ...


class EncoderPrompts:
    """Converts prompts to conditions with one or several text encoders, each with its tokenizer.

    readers: the encoders.
    masked: whether padding is masked; if not, it is attended to like words.
    unescapes: whether `data.framing.unescape_text` is applied to texts.
    """

    masked, unescapes = False, False

    def __init__(self, readers: Sequence[TextReader]):
        self.readers = tuple(readers)

    @property
    def learned_tokens(self) -> list[str]:
        """The names of the learned tokens of all encoders, in lower case."""
        return list(dict.fromkeys(token for reader in self.readers for token in reader.learned))

    def encode(self, texts: Sequence[str]) -> Conditions:
        plain = [unescape_text(text) for text in texts] if self.unescapes else texts
        return self.conditions([reader.states(plain, masked=self.masked) for reader in self.readers])

    def null(self, count: int) -> Conditions:
        return self.encode([""] * count)

    def conditions(self, states: Sequence[TextStates]) -> Conditions:
        """Combines the outputs of each encoder to conditions."""
        raise NotImplementedError


class FluxPrompts(EncoderPrompts):
    """Prompts of Flux: the pooled vector of CLIP, which is the first encoder, and the hidden states of T5."""

    def conditions(self, states: Sequence[TextStates]) -> Conditions:
        clip, t5 = states
        return Conditions(text=_float32(t5["hidden"]), pooled=_float32(clip["pooled"]))


class SD3Prompts(EncoderPrompts):
    """Prompts of Stable Diffusion 3.

    Args:
        readers: the two encoders of CLIP, and optionally T5. Without T5 its states are zeros.
        width: the width of the denoiser's text states.
        length: number of tokens of T5.
    """

    def __init__(self, readers: Sequence[TextReader], width: int, length: int):
        super().__init__(readers)
        self.width, self.length = width, length

    def conditions(self, states: Sequence[TextStates]) -> Conditions:
        clips, t5 = states[:2], states[2:]
        side = jnp.concatenate([_float32(one["penultimate"]) for one in clips], -1)
        side = jnp.pad(side, ((0, 0), (0, 0), (0, self.width - side.shape[-1])))
        below = _float32(t5[0]["hidden"]) if t5 else jnp.zeros((len(side), self.length, self.width), jnp.float32)
        pooled = jnp.concatenate([_float32(one["pooled"]) for one in clips], -1)
        return Conditions(text=jnp.concatenate([side, below], 1), pooled=pooled)


class SDPrompts(EncoderPrompts):
    """Prompts of Stable Diffusion 1 and 2, with one CLIP, and XL, with two (`unet_conditions`).

    Args:
        zeros: whether the conditions without a prompt are zeros, as in the training of XL's base model; if not, those of an empty text.
    """

    def __init__(self, readers: Sequence[TextReader], zeros: bool = False):
        super().__init__(readers)
        self.zeros = zeros

    def conditions(self, states: Sequence[TextStates]) -> Conditions:
        text, pooled = unet_conditions(states)
        return Conditions(text=text, pooled=pooled)

    def null(self, count: int) -> Conditions:
        found = super().null(count)
        return Conditions(*jax.tree.map(jnp.zeros_like, tuple(found))) if self.zeros else found


class TextPrompts(EncoderPrompts):
    """Prompts of any text encoder: the hidden states of all tokens, zeros for padding, and their mean over the tokens of the text."""

    masked = True

    def conditions(self, states: Sequence[TextStates]) -> Conditions:
        mask = states[0]["mask"].astype(jnp.float32)[..., None]
        text = _float32(states[0]["hidden"]) * mask
        return Conditions(text=text, pooled=text.sum(1) / jnp.maximum(mask.sum(1), 1))


class WanPrompts(EncoderPrompts):
    """Prompts of Wan: the hidden states of UMT5, zeros for padding, which the denoiser attends to. As in diffusers' pipeline, HTML
    entities (`&amp;`) are decoded, and runs of white space become one space. The repairs of `ftfy` are not made."""

    masked, unescapes = True, True

    def conditions(self, states: Sequence[TextStates]) -> Conditions:
        return Conditions(text=_float32(states[0]["hidden"]) * states[0]["mask"].astype(jnp.float32)[..., None])


def _float32(a: Float[Array, "..."]) -> Float[Array, "..."]:
    return a.astype(jnp.float32)


def prompt_length(tokenizer: Path, context: int) -> int:
    """The number of tokens of a prompt: the `model_max_length` of a tokenizer's folder, and at most the encoder's context."""
    said = read_config(tokenizer).raw.get("model_max_length")
    return min(int(said), context) if isinstance(said, int | float) and said > 0 else context
