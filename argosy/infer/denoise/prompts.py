"""Conditions of prompts by text encoders: CLIP's, T5's and any other, as each pipeline of diffusers reads them.

    Flux       text: T5's states                                    pooled: CLIP's vector of the text
    SD         text: CLIP's states (XL: those of both CLIPs before the last layer, and the second one's vector)
    SD3        text: CLIP's states before the last layer, side by side, then T5's below them       pooled: both vectors of CLIP
    Wan        text: UMT5's states, zeros for padding
    others     text: states of any encoder, zeros for padding   pooled: their mean

Texts are padded to one length, and padding is read like words: so these models were trained; but for Wan and the others, whose encoders
leave it out. A longer text loses its end, which is said.
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

# Address of the table of tokens in every text encoder.
EMBEDDING = "embed.w"


# {hidden, penultimate, pooled, mask}: states of all tokens; those before the last layer and one vector for each text, of CLIP alone; 1
# where a token is no padding.
TextStates = dict[str, Array]


class PromptTokens:
    """Texts to the ids that a text encoder reads, padded to one length. Learned tokens have the ids after those of the vocabulary.

    Args:
        config: of the encoder.
        tokenizer: of its vocabulary.
        length: tokens that every text is padded or cut to.
        name: what error messages call the encoder.
        say: called with what a text lost.
        learned: the number of rows of each learned token.

    learned: the ids of each learned token's rows, by its name in lower case.
    learned_tokens: the same by the names as they are written.
    frame: ids before and after each text.
    pad: the id of padding.
    pads_left: whether padding stands before the text: never.

    Raises:
        BadInput: a learned token is in the vocabulary already, or a special token of the tokenizer is none.
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
        """The ids of texts, with the special tokens around them, padded to one length. As in transformers, the name of a special token
        in a text is that token: the padding of OpenCLIP is an exclamation mark."""
        return self.padded(texts)[0]

    def affixes(self) -> tuple[str, str]:
        """The text before and after each text: none."""
        return "", ""

    def cut(self, texts: Sequence[str]) -> int:
        """How many texts are longer than what is read of one."""
        room = self.length - sum(map(len, self.frame))
        return sum(len(ids) > room for ids in self.encoded(texts))

    def padded(self, texts: Sequence[str]) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B T"]]:
        """The ids of texts, and 1 where they are no padding."""
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
        """The ids of each text alone. Learned tokens part it, as added tokens do in transformers, within words too."""
        return self.learned_tokens.encode(self.tokenizer, texts)

    def _decoded(self, ids: Sequence[int]) -> str:
        """The text of ids, the names of learned tokens among them."""
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
    """A text encoder and its tokenizer: texts to states.

    Args:
        module: of CLIP or T5.
        learned: [n D] rows of each learned token, which stand where its name is in a text (textual inversion).

    full_module: the encoder with these rows behind those of its vocabulary.
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
            # The table of this program alone: the module stays as its folder has it.
            table = self._leaves[EMBEDDING]
            rows = np.concatenate(list(learned.values()))
            self._leaves = self._leaves | {EMBEDDING: jnp.concatenate([table, jnp.asarray(rows, table.dtype)])}
            self.full_module = merge(graph, self._leaves)
        self._program = _states(graph, module.dtype)

    def states(self, texts: Sequence[str], *, masked: bool = False) -> TextStates:
        """What the encoder makes of texts.

        Args:
            masked: padding is not attended to, and `mask` says where it is not; else it is read like words.

        Raises:
            ArgosyError: it is not finite.
        """
        unique = list(dict.fromkeys(texts))
        rows = 1 << (len(unique) - 1).bit_length()
        tokens, words = self.padded([*unique, *[""] * (rows - len(unique))])
        found = self._program(self._leaves, jnp.asarray(tokens), words if masked else np.ones_like(words))
        check_finite(self.name, found)
        order = jnp.asarray([unique.index(text) for text in texts])
        return jax.tree.map(lambda a: a[order], found | {"mask": jnp.asarray(words)})

    def computed(self, model: Any, tokens: Int[Array, "B T"], segments: Int[Array, "B T"]) -> TextStates:
        """`encoder_states`, of the encoder with other weights."""
        return encoder_states(model, tokens, segments)


@lru_cache(maxsize=16)
def _states(graph: Any, dtype: Any) -> Callable[..., TextStates]:
    def states(leaves: Any, tokens: Int[Array, "B T"], segments: Int[Array, "B T"]) -> TextStates:
        model = merge(graph, leaves)
        model.dtype = dtype
        return encoder_states(model, tokens, segments)

    return jax.jit(states)


def encoder_states(model: Any, tokens: Int[Array, "B T"], segments: Int[Array, "B T"]) -> TextStates:
    """What a text encoder makes of tokens, without `mask`.

    Args:
        segments: 0 for tokens that are not attended to.
    """
    attend = model.config.attend(segments)
    return text_states(model, tokens, attend) if hasattr(model, "states") else {"hidden": model.hidden(tokens, attend)[0]}


@runtime_checkable
class TextReader(Protocol):
    """A text encoder with its tokenizer: `PromptReader`, or `chat_prompts.ChatReader`."""

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
    """Prompts that text encoders read, each with a tokenizer.

    readers: the encoders.
    masked: whether padding is not attended to; else it is read like words.
    unescapes: whether texts are read as `data.framing.unescape_text` gives them.
    """

    masked, unescapes = False, False

    def __init__(self, readers: Sequence[TextReader]):
        self.readers = tuple(readers)

    @property
    def learned_tokens(self) -> list[str]:
        """The tokens that stand for learned embeddings, in lower case."""
        return list(dict.fromkeys(token for reader in self.readers for token in reader.learned))

    def encode(self, texts: Sequence[str]) -> Conditions:
        plain = [unescape_text(text) for text in texts] if self.unescapes else texts
        return self.conditions([reader.states(plain, masked=self.masked) for reader in self.readers])

    def null(self, count: int) -> Conditions:
        return self.encode([""] * count)

    def conditions(self, states: Sequence[TextStates]) -> Conditions:
        """The conditions of what each encoder makes of the texts."""
        raise NotImplementedError


class FluxPrompts(EncoderPrompts):
    """Prompts of Flux: the vector of CLIP, which is the first encoder, and states of T5."""

    def conditions(self, states: Sequence[TextStates]) -> Conditions:
        clip, t5 = states
        return Conditions(text=_float32(t5["hidden"]), pooled=_float32(clip["pooled"]))


class SD3Prompts(EncoderPrompts):
    """Prompts of Stable Diffusion 3.

    Args:
        readers: the two encoders of CLIP, and T5 or not: the model then runs on zeros.
        width: of the denoiser's text states.
        length: tokens of T5.
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
    """Prompts of Stable Diffusion 1 and 2, by one CLIP, and XL, by two (`unet_conditions`).

    Args:
        zeros: whether guidance leads away from zeros where there is no negative prompt, as the base model of XL was trained.
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
    """Prompts of any text encoder: its states of all tokens, zeros for padding, and their mean over the tokens of the text."""

    masked = True

    def conditions(self, states: Sequence[TextStates]) -> Conditions:
        mask = states[0]["mask"].astype(jnp.float32)[..., None]
        text = _float32(states[0]["hidden"]) * mask
        return Conditions(text=text, pooled=text.sum(1) / jnp.maximum(mask.sum(1), 1))


class WanPrompts(EncoderPrompts):
    """Prompts of Wan: the states of UMT5, zeros for padding, which the denoiser reads. As its pipeline does, names of characters
    (`&amp;`) become the characters, and white space one blank; what `ftfy` mends there is left as it is."""

    masked, unescapes = True, True

    def conditions(self, states: Sequence[TextStates]) -> Conditions:
        return Conditions(text=_float32(states[0]["hidden"]) * states[0]["mask"].astype(jnp.float32)[..., None])


def _float32(a: Float[Array, "..."]) -> Float[Array, "..."]:
    return a.astype(jnp.float32)


def prompt_length(tokenizer: Path, context: int) -> int:
    """The tokens of a prompt: as many as the folder of a tokenizer says, and at most those of the encoder."""
    said = read_config(tokenizer).raw.get("model_max_length")
    return min(int(said), context) if isinstance(said, int | float) and said > 0 else context
