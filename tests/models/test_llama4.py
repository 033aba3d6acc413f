"""Llama 4: released folders, lists of layers that are built and that are not, what layers do to queries and keys."""


import jax.numpy as jnp
import numpy as np
import pytest
from golden_weights import write_model
from helpers import relative
from models.test_parity import GOLDENS

import argosy
from argosy.core.errors import BadInput
from argosy.models.parts.attention.attend import Contiguous, Packed
from argosy.models.parts.attention.heads import rotate_heads, scale_queries
from argosy.models.parts.weight import put, split
from argosy.models.settings import Llama3Scaling, Reach, Rope, Temper, Yarn
from argosy.run.settings.recipe_files import preset_config
from argosy.weights.hub.config import config_from

TEXT = {        # what the files of both released models say in `text_config`
    "_attn_implementation_autoset": True,
    "attention_bias": False,
    "attention_chunk_size": 8192,
    "attention_dropout": 0.0,
    "attn_scale": 0.1,
    "attn_temperature_tuning": 4,
    "bos_token_id": 200000,
    "eos_token_id": [200001, 200007, 200008],
    "floor_scale": 8192,
    "for_llm_compressor": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "model_type": "llama4_text",
    "no_rope_layers": [],
    "num_attention_heads": 40,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "output_router_logits": False,
    "pad_token_id": 200018,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 202048,
}
SCALING = {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
RELEASED = {
    "llama4-17b-16e": {
        "interleave_moe_layer_step": 1,
        "max_position_embeddings": 10485760,
        "num_local_experts": 16,
        "rope_scaling": SCALING | {"rope_type": "llama3"},
        "use_qk_norm": True,
    },
    "llama4-17b-128e": {
        "interleave_moe_layer_step": 2,
        "max_position_embeddings": 1048576,
        "moe_layers": list(range(1, 48, 2)),
        "num_local_experts": 128,
        "rope_scaling": None,
        "use_qk_norm": False,
    },
}


@pytest.mark.parametrize("name", RELEASED)
def test_the_published_config_is_the_preset(name):
    config = {"model_type": "llama4", "text_config": TEXT | RELEASED[name], "vision_config": {"hidden_size": 1408}}
    preset = preset_config(name).resolved()
    even = preset.moe.model_copy(update={"balance": 0.0})       # it is off where output_router_logits is
    assert config_from(config, "").resolved() == preset.model_copy(update={"preset": None, "moe": even})


SMALL = TEXT | {"hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 8, "head_dim": 4, "num_local_experts": 4}
CHUNK, WHOLE = "chunked_attention", "full_attention"


@pytest.mark.parametrize(
    ("changes", "spans", "fed"),
    [       # what transformers 5 makes of the same file
        ({}, "LLLGLL", "EEEEEE"),
        ({"no_rope_layer_interval": 2, "interleave_moe_layer_step": 3}, "LGLGLG", "DDEDDE"),
        ({"no_rope_layers": [0, 1, 1, 0, 0, 1, 1, 1], "moe_layers": [0, 4, 5, 9]}, "GLLGGL", "EDDDEE"),
        ({"no_rope_layers": [1] * 6, "layer_types": [CHUNK] * 6, "moe_layers": [5]}, "LLLLLL", "DDDDDE"),
        ({"no_rope_layers": [0] * 6, "layer_types": [WHOLE] * 6}, "GGGGGG", "EEEEEE"),
    ],
)
def test_which_layers_turn_and_which_have_experts(changes, spans, fed):
    config = config_from(SMALL | changes, "")
    for form in (config, config_from(config.to_hub(), "")):
        assert form.spans == spans
        assert "".join("E" if kind == "experts" else "D" for kind in form.kinds) == fed


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"layer_types": [WHOLE] * 6}, "the same 6 layers"),        # layers that turn and see everything
        ({"layer_types": [CHUNK] * 6}, "the same 6 layers"),        # a layer that does not turn and sees its chunk
        ({"no_rope_layers": [1, 0]}, "the same 6 layers"),
        ({"no_rope_layer_interval": 0}, "does not describe a model"),
        ({"moe_layers": []}, "none of 6 layers"),
        ({"interleave_moe_layer_step": 7}, "none of 6 layers"),
        ({"attention_chunk_size": None}, "window"),
        ({"swiglu_limit": 7.0}, "swiglu_limit"),
    ],
)
def test_what_is_not_built_is_refused(changes, match):
    with pytest.raises(BadInput, match=match):
        config_from(SMALL | changes, "")


@pytest.mark.parametrize(
    ("changed", "of"),
    [
        ({"temper": None}, "interleaved"),
        pytest.param({"qk_norm": True}, "interleaved", marks=pytest.mark.slow),
        pytest.param({"qk_norm": False}, "plain", marks=pytest.mark.slow),
        pytest.param({"window": 8}, "plain", marks=pytest.mark.slow),
        pytest.param({"rope": Rope(base=5e3, pairs="interleaved")}, "plain", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_option_is_in_the_goldens_figures(tmp_path, changed, of):
    """A golden that an option does not move proves nothing of it."""
    name = f"llama4-{of}"
    lm, golden = argosy.load(write_model(GOLDENS / name, tmp_path / name)), dict(np.load(GOLDENS / name / "golden.npz"))
    config = lm.config.model_copy(update=changed)
    module = config.build()
    put(module, split(lm.module)[1])
    assert relative(argosy.LM(config, module).logits(golden["tokens"]), golden["logits"]) > 1e-3


def test_queries_grow_by_steps():
    """At the positions of their own sequences, wherever these lie."""
    q = jnp.ones((2, 9, 3, 4))
    each = Reach(temper=Temper(floor=3, scale=0.5))
    segments = jnp.asarray([[1] * 9, [1, 1, 1, 1, 1, 2, 2, 2, 0]], jnp.int32)
    expected = 1 + 0.5 * np.log1p(np.floor((np.asarray([[*range(9)], [0, 1, 2, 3, 4, 0, 1, 2, 0]]) + 1) / 3))
    np.testing.assert_allclose(scale_queries(q, each, Packed(segments))[:, :, 0, 0], expected, rtol=1e-6)
    far = jnp.asarray([[10_485_758], [10_485_759]], jnp.int32)
    grown = scale_queries(q[:, :1], Reach(temper=Temper()), Contiguous(far, far > 0))[:, 0, 0, 0]
    np.testing.assert_allclose(grown, 1 + 0.1 * np.log1p([1279, 1280]), rtol=1e-6)


def test_heads_are_normalised_after_they_turn():
    """YaRN's factor on cosine and sine is normalised away."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 3, 8)), jnp.float32)
    rope = Rope(pairs="interleaved", scaling=Yarn(factor=8, original=16, attention=3.0))
    y = rotate_heads(x, Reach(7, rope, unit=1e-12), Packed(jnp.ones((2, 5), jnp.int32)))
    np.testing.assert_allclose((np.asarray(y) ** 2).mean(-1), 1, rtol=1e-5)


def test_a_ramp_of_no_width_is_a_step():
    """Scout's: pairs that turn more than once over the original context are kept, the others divided."""
    plain = Rope(base=5e5).frequencies(128)[0]
    scaled = Rope(base=5e5, scaling=Llama3Scaling(factor=16, low=1, high=1)).frequencies(128)[0]
    is_kept = plain * 8192 / (2 * np.pi) > 1
    assert 0 < is_kept.sum() < 64
    np.testing.assert_allclose(scaled, np.where(is_kept, plain, plain / 16), rtol=1e-12)
