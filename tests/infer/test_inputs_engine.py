"""Images in the engine, by a toy tower: its vectors stand in place of prompt tokens, in every way that the engine computes a prompt.

What the engine gives is held against the model itself, over the whole sequence with the same vectors.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from argosy.core.errors import BadInput
from argosy.infer import settings as how
from argosy.infer.engine.engine import Engine
from argosy.infer.engine.pages import PageKey, page_hashes
from argosy.infer.engine.prompt_inputs import PromptInputs
from argosy.infer.engine.request import Event, Request
from argosy.infer.settings import EngineSettings
from argosy.models import FAMILIES
from argosy.models.llama import LlamaConfig
from argosy.models.parts.attention.attend import Packed
from argosy.models.parts.einsum import Einsum
from argosy.models.parts.inputs import Inputs, Overlay
from argosy.models.parts.stack import Unroll
from argosy.models.parts.stack.addresses import layer_addresses
from argosy.models.parts.weight import fill
from argosy.models.settings import Rope

PLACE = 7  # the id at which a vector of the tower stands
SIZES: dict[str, Any] = {"vocab": 31, "width": 24, "layers": 3, "ffn": 40, "heads": 2, "kv_heads": 1, "context": 96}
CONFIG = LlamaConfig(**SIZES, rope=Rope(sections=(2, 3, 1)))
# A prompt of 50 tokens is computed in two steps; 13 pages of 8 tokens do not hold three such sequences.
TIGHT = EngineSettings(slots=3, page=8, context=80, pages=13, budget=32, budget_decoding=32)


class Tower(nnx.Module):
    """Patches [B P I] to vectors [B P D]."""

    def __init__(self, numbers: int, width: int):
        self.proj = Einsum("BTI,ID->BTD", {"I": numbers, "D": width}, legend=(("I", "patch"),))

    def __call__(self, patches: Any) -> Any:
        return jnp.tanh(self.proj(patches))


def fill_module(module: Any, seed: int) -> Any:
    fill(module, jax.random.key(seed), addresses=layer_addresses(module))
    return module


MODEL, TOWER = fill_module(CONFIG.build(Unroll()), 1), fill_module(Tower(5, CONFIG.width), 2)


def vectors_of(image: int, patches: int) -> np.ndarray:
    pixels = np.random.default_rng(image).normal(size=(1, patches, 5))
    return np.asarray(TOWER(jnp.asarray(pixels, jnp.float32)))[0]


def with_image(image: int, *, text: int = 0, length: int = 50, at: int = 19, rows: int = 2, axes: int = 3, most: int = 10) -> Request:
    """A prompt with one image of `rows` x 2 patches; equal `text` gives equal ids. Positions as Qwen2-VL counts them."""
    ids, patches = np.random.default_rng(100 + text).integers(8, CONFIG.vocab, length), rows * 2
    ids[at : at + patches] = PLACE
    positions = np.repeat(np.arange(length)[:, None], 3, 1)
    grid = np.stack(np.meshgrid([0], range(rows), range(2), indexing="ij"), -1).reshape(-1, 3)
    positions[at : at + patches] = at + grid
    positions[at + patches :] += at + grid.max() + 1 - (at + patches)
    inputs = PromptInputs(np.arange(at, at + patches), vectors_of(image, patches), positions if axes else None)
    return Request(ids.tolist(), most, top=20, inputs=inputs)


def assert_is_the_model(request: Request, events: list[Event], model: Any = MODEL) -> list[int]:
    """Asserts that each token is the model's own choice, with its log-probabilities; returns the tokens."""
    completion = [event.token for event in events if event.token is not None]
    assert len(completion) == request.max_tokens
    ids, inputs = [*request.tokens, *completion], request.inputs
    values, where = np.zeros((len(ids), model.config.width), np.float32), np.zeros(len(ids), bool)
    positions = None
    if inputs is not None:
        where[inputs.places], values[inputs.places] = True, inputs.embeddings
        if inputs.positions is not None:
            behind = inputs.positions.max() + 1 + np.arange(len(completion))
            positions = jnp.asarray(np.concatenate([inputs.positions, np.repeat(behind[:, None], 3, 1)])[None], jnp.int32)
    tokens = Inputs(jnp.asarray([ids], jnp.int32), Overlay(jnp.asarray(values[None]), jnp.asarray(where[None])), positions)
    logits = model(tokens, Packed(jnp.ones((1, len(ids)), jnp.int32)))[0][0]
    want = np.asarray(jax.nn.log_softmax(logits, -1))[len(request.tokens) - 1 : -1]
    for row, event in zip(want, events, strict=True):
        assert event.token == row.argmax()
        for token, logprob in event.top:
            assert abs(row[token] - logprob) < 1e-4
    return completion


def test_chunks_preemption_and_equal_ids_with_other_images():
    engine = Engine(MODEL, TIGHT)
    requests = [with_image(image, text=0) for image in (0, 1)] + [with_image(2, text=1, at=28, rows=3), Request([3, 4, 5], 10, top=20)]
    completions = [assert_is_the_model(*pair) for pair in zip(requests, engine.generate(requests), strict=True)]
    assert engine.scheduler.preemptions > 0
    assert completions[0] != completions[1], "the images decide"


WAYS = {
    "several steps": {"steps": 4},
    "n-grams": {"speculative": how.NGram(tokens=3)},
    "draft model": {"speculative": how.DraftModel(model="itself", tokens=2)},
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", WAYS.values(), ids=WAYS)
def test_other_ways_to_decode(changes: dict[str, Any]):
    engine = Engine(MODEL, TIGHT.model_copy(update={"pages": 30, **changes}), draft=MODEL)
    requests = [with_image(0), with_image(1, text=1, rows=3), Request([3, 4, 5], 10, top=20)]
    for pair in zip(requests, engine.generate(requests), strict=True):
        assert_is_the_model(*pair)


@pytest.mark.parametrize("axes", [0, 3])
def test_equal_images_share_pages_and_others_do_not(axes: int):
    engine = Engine(MODEL, TIGHT.model_copy(update={"pages": 40}))
    first = with_image(0, axes=axes)
    completion = assert_is_the_model(first, engine.generate([first])[0])
    for image, reused in ((0, 49), (1, 16)):
        request = with_image(image, axes=axes)
        events = engine.generate([request])[0]
        assert_is_the_model(request, events)
        assert events[0].reused == reused, "all but the last token, and the two pages before the image"
    # The next turn of the chat finds the completion too.
    assert first.inputs is not None
    after, positions = [9, 10, 11, 12], None
    longer = [*first.tokens, *completion, *after]
    if first.inputs.positions is not None:
        behind = first.inputs.positions.max() + 1 + np.arange(len(longer) - len(first.tokens))
        positions = np.concatenate([first.inputs.positions, np.repeat(behind[:, None], 3, 1)])
    request = Request(longer, 5, top=20, inputs=PromptInputs(first.inputs.places, first.inputs.embeddings, positions))
    events = engine.generate([request])[0]
    assert_is_the_model(request, events)
    assert events[0].reused == 56, "7 of the pages that 59 computed tokens fill"


def test_a_prompt_that_ends_with_its_image_is_never_copied():
    engine = Engine(MODEL, TIGHT.model_copy(update={"pages": 40}))
    for length in (24, 25):
        for _ in range(2):
            request = with_image(0, length=length, at=length - 4)
            assert_is_the_model(request, engine.generate([request])[0])


def test_positions_are_part_of_a_page():
    """The same text at other positions has other keys."""
    engine = Engine(MODEL, TIGHT.model_copy(update={"pages": 40}))
    text = np.random.default_rng(0).integers(8, 31, 30)
    spread = np.repeat(np.arange(30)[:, None], 3, 1) * [2, 1, 1]
    for positions in (None, spread, np.repeat(np.arange(30)[:, None], 3, 1)):
        request = Request(text.tolist(), 8, top=20, inputs=PromptInputs(embeddings=np.zeros((0, 24)), positions=positions))
        events = engine.generate([request])[0]
        assert_is_the_model(request, events)
        assert (events[0].reused > 8) == (positions is not None and positions is not spread), "places are what text has anyway"


def test_digests_do_not_depend_on_where_a_prompt_ends():
    """Two sequences with equal tokens, vectors and positions have equal pages, however much of them was the prompt."""
    request = with_image(0)
    assert request.inputs is not None
    assert request.inputs.positions is not None
    positions = request.inputs.positions
    short = PromptInputs(request.inputs.places, request.inputs.embeddings, positions[:40])
    hashes = [page_hashes(request.tokens, 8, PageKey("", inputs.digests(8))) for inputs in (request.inputs, short)]
    assert hashes[0] == hashes[1]
    shifted = PromptInputs(request.inputs.places, request.inputs.embeddings, np.concatenate([positions[:40], positions[40:] + 1]))
    assert page_hashes(request.tokens, 8, PageKey("", shifted.digests(8)))[:5] == hashes[0][:5]
    assert page_hashes(request.tokens, 8, PageKey("", shifted.digests(8)))[5] != hashes[0][5]


def test_text_pays_nothing():
    """After a warm-up images compile what embeds tokens, and text compiles nothing: neither before images nor beside them."""
    engine = Engine(MODEL, TIGHT.model_copy(update={"slots": 1}))
    engine.warm_up()
    layers = engine.runner.forward.layers._runs[0][2]
    before, count = engine.stats.compilations, layers.compilations
    text = Request(list(range(8, 20)), 4)
    engine.generate([text])
    assert engine.stats.compilations == before
    request = with_image(0)
    assert_is_the_model(request, engine.generate([request])[0])
    assert engine.stats.compilations > before
    assert layers.compilations == count, "layers are those of text"
    before = engine.stats.compilations
    engine.generate([text])
    assert engine.stats.compilations == before


def test_what_does_not_fit_is_refused():
    engine = Engine(MODEL, TIGHT)
    vectors = np.zeros((2, CONFIG.width), np.float32)
    at = np.repeat(np.arange(3)[:, None], 3, 1)
    for inputs, message in (
        (PromptInputs(np.array([1, 3]), vectors), "places that do not ascend from 0 to 2"),
        (PromptInputs(np.array([1, 1]), vectors), "places that do not ascend"),
        (PromptInputs(np.array([1]), vectors), "for 1 tokens of a model of width 24"),
        (PromptInputs(np.array([0, 1]), vectors[:, 1:]), "model of width 24"),
        (PromptInputs(positions=at[:2]), "prompt of 3 tokens"),
        (PromptInputs(positions=at[:, :2]), "positions of 2 axes"),
    ):
        with pytest.raises(BadInput, match=message):
            engine.add(Request([1, 2, 3], 4, inputs=inputs))
    plain = fill_module(LlamaConfig(**SIZES).build(Unroll()), 1)
    with pytest.raises(BadInput, match="positions of 3 axes"):
        Engine(plain, TIGHT).add(Request([1, 2, 3], 4, inputs=PromptInputs(positions=at)))
    assert not engine.busy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "example", "changes"),
    [("qwen3_next", "plain", {}), ("gemma", "3", {}), ("deepseek", "3", {"speculative": how.MTP()})],
    ids=["states", "windows", "latents and multi-token prediction"],
)
def test_images_in_other_layers(family: str, example: str, changes: dict[str, Any]):
    examples = FAMILIES[family].examples()
    config = examples[example].model_copy(update={"vocab": 31})
    model = fill_module(config.build(Unroll()), 1)
    engine = Engine(model, TIGHT.model_copy(update={"pages": 30, **changes}))
    ids, places = np.random.default_rng(0).integers(8, 31, 40), np.arange(10, 14)
    requests = []
    for image in (0, 1):
        vectors = np.random.default_rng(image).normal(size=(4, config.width)).astype(np.float32)
        requests.append(Request(ids.tolist(), 6, top=20, inputs=PromptInputs(places, vectors)))
    for request, events in zip(requests, engine.generate(requests), strict=True):
        assert_is_the_model(request, events, model)
