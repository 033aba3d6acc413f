"""A model in the form that Tunix calls: the same logits, for padded rows and for several sequences a row. `bench/tunix_cpu.py`
trains it."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import LOGIT_ROUNDING, relative
from laws.families import CASES, noisy_model, tokens_of

from argosy.adapt.lora import LoRA
from argosy.adapt.surgery import swap
from argosy.adapt.tunix import ForTunix, segments_of
from argosy.core.errors import BadInput, Unsupported
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.stack.addresses import layer_addresses
from argosy.models.parts.weight import fill

CONFIG = CASES["llama-plain"]


def causal(seen: Any) -> Any:
    """The mask that Tunix's `make_causal_attn_mask` makes of what is not padding."""
    length = seen.shape[1]
    return jnp.asarray(seen)[:, None, :] & jnp.tril(jnp.ones((length, length), bool))


@pytest.mark.slow
@pytest.mark.parametrize("run", [Unroll(), pytest.param(Scan(), marks=pytest.mark.slow)], ids=["unroll", "scan"])
def test_the_logits_are_those_of_the_model(run: Any):
    """Rows of one sequence, padded behind and before; the padding's own logits mean nothing."""
    model = noisy_model(CONFIG, run)
    theirs = ForTunix(SimpleNamespace(config=CONFIG, module=model))
    tokens = tokens_of(CONFIG, 3, 12)
    seen = np.ones((3, 12), bool)
    seen[1, 7:], seen[2, :5] = False, False
    logits, cache = theirs(tokens, jnp.zeros_like(tokens), None, causal(seen))
    assert cache is None
    for row, some in enumerate(seen):
        alone = model(tokens[row : row + 1, some], CONFIG.attend(jnp.ones((1, some.sum()), jnp.int32)))[0]
        assert relative(logits[row, some], alone[0]) < LOGIT_ROUNDING
    np.testing.assert_array_equal(theirs(tokens)[0], model(tokens, CONFIG.attend(jnp.ones_like(tokens)))[0])


def test_sequences_of_a_row_are_found_in_the_mask():
    segments = jnp.array([[1, 1, 1, 2, 2, 3, 0, 0], [1, 2, 2, 2, 2, 2, 2, 2], [0, 0, 1, 1, 0, 0, 2, 0]])
    mask = causal(np.ones((3, 8), bool)) & (segments[:, :, None] == segments[:, None]) & (segments[:, None] > 0)
    np.testing.assert_array_equal(segments_of(mask), segments)


@pytest.mark.slow
def test_adapters_alone_get_gradients_by_their_type():
    """As Tunix takes them: with respect to `nnx.LoRAParam` where there is one."""
    model = noisy_model(CONFIG, Unroll())
    swap(model, r"layers\..*\.attn\.[qv]", lambda of: LoRA(of, 2, 2.0))
    fill(model, jax.random.key(0), addresses=layer_addresses(model))
    theirs = ForTunix(SimpleNamespace(config=CONFIG, module=model))
    grads = nnx.grad(lambda m: jnp.sum(m(tokens_of(CONFIG, 1, 4))[0] ** 2), argnums=nnx.DiffState(0, nnx.LoRAParam))(theirs)
    leaves = nnx.to_flat_state(grads)
    assert len(leaves) == 2 * 2 * CONFIG.layers
    assert all(path[0] == "module" and path[-1] in ("a", "b") for path, _ in leaves)


def test_what_tunix_cannot_have_is_refused():
    theirs = ForTunix(SimpleNamespace(config=CONFIG, module=noisy_model(CONFIG, Unroll())))
    with pytest.raises(Unsupported, match="cache"):
        theirs(tokens_of(CONFIG, 1, 4), None, {"layer_0": 1})
    with pytest.raises(BadInput, match="predict tokens"):
        ForTunix(SimpleNamespace(config=CONFIG.model_copy(update={"scores": 1}), module=None))
