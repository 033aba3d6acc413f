"""Computes the conditions of prompts with language models. A prompt is a message of a conversation, and the denoiser reads the hidden
states of some layers.

    Z-Image                 text: the states before the last layer, of the conversation's tokens without padding
    Flux.2 dev and klein    text: the states of three layers, joined along the width, including those of padding

Longer conversations are truncated, with a warning. Padding is after the tokens, or before them if the tokenizer says so. No token
attends to padding, and padding attends to the tokens before it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.core.progress import Say
from argosy.data.chat.template import choose_template, render
from argosy.data.tokenizers.learned import LearnedTokens
from argosy.infer.denoise.finite import check_finite
from argosy.infer.denoise.prompts import EncoderPrompts, TextStates
from argosy.models.diffusion.base import Conditions
from argosy.models.parts.attention.attend import HEADS, Packed, meet
from argosy.models.parts.stack.watch import OUTPUT, WatchedAttend
from argosy.models.parts.weight import merge, split
from argosy.ops.attention import Score, See

# Prompts that test whether a template leaves prompts unchanged.
PROBES = ("a1b2c3", "two  words,\nand {{ more }} <b>", "", " \n blanks around \n ")


@dataclass(frozen=True)
class PaddedTexts(Packed):
    """An attention strategy for padded texts. Each token attends to the tokens up to it, except padding (`segments` is the attention
    mask). Padding before the first token gets zeros. Positions count padding, as transformers does with a mask."""

    @property
    def positions(self) -> Int[Array, "B T"]:
        return jnp.broadcast_to(jnp.arange(self.segments.shape[1], dtype=jnp.int32), self.segments.shape)

    def __call__(self, q: Array, entries: Any, cache: Any, read: Any = HEADS, *, score: Score) -> Any:
        see = See(self.positions, self.positions, jnp.ones_like(self.segments), self.segments)
        y = meet(q, entries, read, score, see, self.absorb)
        # As PyTorch's attention, where nothing is attended to.
        return jnp.where(jnp.cumsum(self.segments, 1)[..., None, None] > 0, y, 0), cache


jax.tree_util.register_dataclass(PaddedTexts, ["segments", "angles"], ["absorb"])


class ChatReader:
    """Runs a language model as text encoder, with its tokenizer and its chat template.

    Args:
        module: the module of the language model.
        tokenizer: the tokenizer, with a chat template.
        length: number of tokens that every conversation is padded or truncated to.
        layers: the layers whose outputs are read, counted from 1; 0 is the embedding. They are joined along the width.
        name: the name of the encoder in messages.
        variables: variables of the template, such as `enable_thinking`.
        say: called with a warning if a conversation is truncated.
        system: the system message before the prompt. With it, contents of messages are lists of parts, as templates of vision models
            expect, and no generation prompt is added. None: there is none.
        pads_left: whether padding is before the tokens.

    frame: the special tokens before and after each conversation. Always empty.
    learned: learned tokens. Always empty.
    pad: the id of the padding token.

    Raises:
        BadInput: the tokenizer has no chat template, or the model has fewer layers.
    """

    frame: tuple[list[int], list[int]] = ([], [])

    def __init__(
        self,
        module: Any,
        tokenizer: Any,
        length: int,
        layers: Sequence[int],
        name: str,
        variables: Mapping[str, Any],
        say: Say | None = None,
        *,
        system: str | None = None,
        pads_left: bool = False,
    ):
        self.module = self.full_module = module
        self.tokenizer, self.length, self.name, self.say = tokenizer, length, name, say
        self.system, self.pads_left = system, pads_left
        self.variables, self._template = variables, choose_template(tokenizer.chat_templates)
        if wrong := [i for i in layers if not 0 <= i <= module.config.layers]:
            raise BadInput(f"{name}: layer {wrong[0]} is read, and it has {plural(module.config.layers, 'layer')}")
        pad = tokenizer.special.get("pad_token")
        self.pad = tokenizer.encode(pad, special=True)[0] if pad else 0
        self.learned: dict[str, list[int]] = {}
        self.learned_tokens = LearnedTokens({})
        graph, self._leaves = split(module)
        self.layers = tuple(layers)
        self._program = _layer_states(graph, module.dtype, self.layers)

    def tokens(self, texts: Sequence[str]) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B T"]]:
        """The token ids of the conversations of prompts, and their attention mask (1: a token, 0: padding)."""
        out, words = (np.full((len(texts), self.length), fill, np.int32) for fill in (self.pad, 0))
        for row, ids in enumerate(self.tokenizer.encode_many([self._conversation(text) for text in texts], special=True)):
            if len(ids) > self.length and self.say is not None:
                lost = self.tokenizer.decode(ids[self.length :])
                self.say(f"{self.name} reads {plural(self.length, 'token')}; a prompt loses its end: {lost!r}")
            ids = ids[: self.length]
            place = slice(self.length - len(ids), None) if self.pads_left else slice(len(ids))
            out[row, place], words[row, place] = ids, 1
        return out, words

    def affixes(self) -> tuple[str, str]:
        """The text that the template puts before and after each prompt.

        Raises:
            BadInput: the template changes the text of prompts.
        """
        before, _, after = self._conversation(PROBES[0]).partition(PROBES[0])
        if changed := [text for text in PROBES if self._conversation(text) != before + text + after]:
            raise BadInput(f"{self.name}: the chat template does more with a prompt than to stand around it: {changed[0]!r}")
        return before, after

    def _conversation(self, text: str) -> str:
        special, answers = self.tokenizer.special, self.system is None
        return render(self._template, self._messages(text), special, add_generation_prompt=answers, **self.variables)

    def _messages(self, text: str) -> list[dict[str, Any]]:
        if self.system is None:
            return [{"role": "user", "content": text}]
        said = (("system", self.system), ("user", text))
        return [{"role": role, "content": [{"type": "text", "text": part}]} for role, part in said]

    def states(self, texts: Sequence[str], *, masked: bool = True) -> TextStates:
        """Runs the model on prompts. Returns the joined states of the layers as `hidden` (float32), and the attention mask as `mask`.

        Args:
            masked: ignored, because padding is always masked.

        Raises:
            BadInput: the template refuses a prompt.
            ArgosyError: the states are not finite.
        """
        unique = list(dict.fromkeys(texts))
        rows = 1 << (len(unique) - 1).bit_length()
        tokens, words = self.tokens([*unique, *[""] * (rows - len(unique))])
        found = self._program(self._leaves, jnp.asarray(tokens), jnp.asarray(words))
        check_finite(self.name, found)
        order = np.array([unique.index(text) for text in texts])
        return {"hidden": found[order], "mask": jnp.asarray(words[order])}

    def computed(self, model: Any, tokens: Int[Array, "B T"], segments: Int[Array, "B T"]) -> TextStates:
        """As `joined_layer_states`, for a module of this model with other weights."""
        return {"hidden": joined_layer_states(model, tokens, segments, self.layers)}


@lru_cache(maxsize=16)
def _layer_states(graph: Any, dtype: Any, layers: tuple[int, ...]) -> Callable[..., Float[Array, "B T E"]]:
    def states(leaves: Any, tokens: Int[Array, "B T"], words: Int[Array, "B T"]) -> Float[Array, "B T E"]:
        model = merge(graph, leaves)
        model.dtype = dtype
        return joined_layer_states(model, tokens, words, layers)

    return jax.jit(states)


def joined_layer_states(
    model: Any, tokens: Int[Array, "B T"], words: Int[Array, "B T"], layers: Sequence[int]
) -> Float[Array, "B T E"]:
    """The outputs of some layers of a language model, joined along the width, in float32.

    Args:
        words: the attention mask.
        layers: the layers, counted from 1; 0 is the embedding.
    """
    attend = PaddedTexts(words)
    _, _, aux = model.hidden(tokens, WatchedAttend(attend, outputs=True))
    told, _ = model.layers.layer_aux(aux)
    found = [model.embedded(tokens, attend) if i == 0 else told[i - 1][OUTPUT] for i in layers]
    return jnp.concatenate(found, -1).astype(jnp.float32)


class ZImagePrompts(EncoderPrompts):
    """Prompts of Z-Image: the hidden states of Qwen 3 before its last layer, and the attention mask."""

    masked = True

    def conditions(self, states: Sequence[TextStates]) -> Conditions:
        return Conditions(text=states[0]["hidden"], text_mask=states[0]["mask"])


class Flux2Prompts(EncoderPrompts):
    """Prompts of Flux.2: the hidden states of three layers of Mistral Small 3 (dev) or Qwen 3 (klein), including those of padding."""

    masked = True

    def conditions(self, states: Sequence[TextStates]) -> Conditions:
        return Conditions(text=states[0]["hidden"])
