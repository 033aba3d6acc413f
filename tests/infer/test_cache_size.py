"""The size of a cache: as large as the room allows, and no larger."""

import jax.numpy as jnp
import pytest

from argosy.infer.memory import Needs, needs_of
from argosy.infer.settings import EngineSettings
from argosy.models import FAMILIES
from argosy.models.parts.stack import Unroll


def needs(family: str, example: str, window: int | None = None) -> Needs:
    change = {} if window is None else {"window": window}
    config = FAMILIES[family].examples()[example].model_copy(update=change)
    return needs_of(config.build(Unroll()).layers.holds(), EngineSettings(page=4, budget=32, beside=32), jnp.float32, 640)


@pytest.mark.parametrize("sequences", [1.3, 1.9, 2.5, 7.2])
@pytest.mark.parametrize("family, example, window", [("gemma", "3", 24), ("llama", "plain", None)])
def test_pools_take_nearly_all_of_the_room_and_never_more(family: str, example: str, window: int | None, sequences: float):
    """Prompts have pages of windows beside those of decoding sequences, up to two of them: so bytes do not grow in one line."""
    one = needs(family, example, window)
    assert bool(one.windows) == (window is not None)
    room = 1.0 * one.bytes(None, one.extent(99, int(sequences * one.pages)))
    found = one.bytes(None, one.fitting(99, room, None))
    assert 0.97 * room <= found <= room
