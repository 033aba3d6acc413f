"""config.json of both generations, what is not said, what is not understood."""

import pytest

from argosy.core.errors import BadInput, Unsupported
from argosy.models.llama import LlamaConfig
from argosy.models.parts.rope import Linear, Llama3, Yarn

BASE = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def test_what_transformers_takes_where_nothing_is_said():
    llama = LlamaConfig.from_hub(BASE)
    assert (llama.norm_eps, llama.context, llama.K, llama.H, llama.rope.base) == (1e-6, 2048, 4, 8, 10_000)
    assert not llama.tied
    mistral = LlamaConfig.from_hub(BASE | {"model_type": "mistral", "num_attention_heads": 16})
    assert (mistral.norm_eps, mistral.K, mistral.window) == (1e-6, 8, 4096)


def test_a_window_said_to_be_none_is_none_and_llama_never_has_one():
    assert (
        LlamaConfig.from_hub(BASE | {"model_type": "mistral", "num_key_value_heads": 4, "sliding_window": None}).window
        is None
    )
    assert LlamaConfig.from_hub(BASE | {"sliding_window": 7}).window is None


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"rope_theta": 5e5}, (5e5, None)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, (5e5, None)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, (1e4, Linear(factor=2))),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 32.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            (5e5, Llama3(factor=32)),
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            (1e4, Yarn(factor=4, original=64)),
        ),
    ],
)
def test_rope_of_both_generations(said, expected):
    rope = LlamaConfig.from_hub(BASE | said).rope
    assert (rope.base, rope.scaling) == expected
    again = LlamaConfig.from_hub(LlamaConfig.from_hub(BASE | said).to_hub())
    assert again.rope == rope


@pytest.mark.parametrize(
    ("said", "match"),
    [
        ({"logit_softcapping": 30.0}, "logit_softcapping"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2, "strange": 1}}, "strange"),
        ({"partial_rotary_factor": 0.5}, "partial"),
    ],
)
def test_what_would_change_the_numbers_is_refused(said, match):
    with pytest.raises(BadInput, match=match):
        LlamaConfig.from_hub(BASE | said)


def test_both_a_window_and_biases_cannot_be_said_on_the_hub():
    config = LlamaConfig.from_hub(BASE | {"attention_bias": True}).model_copy(update={"window": 5})
    with pytest.raises(Unsupported):
        config.to_hub()
