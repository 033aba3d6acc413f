"""config.json of both generations, what is not said, what is not understood."""

from typing import Any

import pytest

from argosy.core.errors import BadInput, Unsupported
from argosy.models.hub.config import write_rope
from argosy.models.llama import LlamaConfig
from argosy.models.settings import LinearScaling, Llama3Scaling, Yarn
from argosy.weights.hub.config import config_from

BASE = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def test_what_transformers_takes_where_nothing_is_reported():
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
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, (1e4, LinearScaling(factor=2))),
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
            (5e5, Llama3Scaling(factor=32)),
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
        # As model cards ask for: a scaling by hand beside what transformers 5 has written. It wins, as it does there.
        (
            {
                "rope_theta": 5e5,
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
                "rope_scaling": {"rope_type": "linear", "factor": 4},
            },
            (5e5, LinearScaling(factor=4)),
        ),
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            },
            (1e4, Yarn(factor=4, original=64)),
        ),
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
                "rope_scaling": {"rope_type": "linear", "factor": 4, "rope_theta": 5e5},
            },
            (5e5, LinearScaling(factor=4)),
        ),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rope_scaling": None}, (5e5, None)),
    ],
)
def test_rope_of_both_generations(said, expected):
    rope = LlamaConfig.from_hub(BASE | said).rope
    assert (rope.base, rope.scaling) == expected
    again = LlamaConfig.from_hub(LlamaConfig.from_hub(BASE | said).to_hub())
    assert again.rope == rope
    written = write_rope(rope)
    for generation in ("rope_parameters", "rope_scaling"):
        alone = {key: value for key, value in written.items() if key in ("rope_theta", generation)}
        assert LlamaConfig.from_hub(BASE | alone).rope == rope


@pytest.mark.parametrize(
    ("said", "match"),
    [
        ({"logit_softcapping": 30.0}, "logit_softcapping"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2, "strange": 1}}, "strange"),
        ({"partial_rotary_factor": 0.5}, "partial"),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rope_scaling": {"rope_type": "linear", "factor": 4}},
            "`rope_scaling` replaces `rope_parameters`, and with it rope_theta",
        ),
    ],
)
def test_what_would_change_the_numbers_is_refused(said, match):
    with pytest.raises(BadInput, match=match):
        LlamaConfig.from_hub(BASE | said)


def test_a_scaling_beside_parameters_by_type_of_layer_is_that_of_full_attention():
    plain = {"rope_type": "default"}
    both = {"full_attention": plain | {"rope_theta": 1e6}, "sliding_attention": plain | {"rope_theta": 1e4}}
    said = BASE | GROUPS | {"model_type": "gemma3_text", "rope_parameters": both}
    said |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    config: Any = config_from(said, "")
    assert (config.rope.base, config.rope.scaling) == (1e6, LinearScaling(factor=8))
    assert (config.local_rope.base, config.local_rope.scaling) == (1e4, None)


def test_both_a_window_and_biases_cannot_be_written_for_the_hub():
    config = LlamaConfig.from_hub(BASE | {"attention_bias": True}).model_copy(update={"window": 5})
    with pytest.raises(Unsupported):
        config.to_hub()


GROUPS = {"num_key_value_heads": 2, "rms_norm_eps": 1e-6}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    "said",
    [
        {"model_type": "gemma2", "sliding_window_size": 4096, "cache_implementation": "hybrid"},  # google/gemma-2-9b-it
        {"model_type": "qwen2", "use_mrope": False},  # Qwen/Qwen2.5-7B
        {"model_type": "phi3", "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False},  # Phi-4-mini
    ],
)
def test_keys_of_released_files_that_change_nothing(said):
    plain = BASE | GROUPS | {"model_type": said["model_type"]}
    assert config_from(BASE | GROUPS | said, "").resolved() == config_from(plain, "").resolved()
    wrong = {key: 7 for key in said if key in ("use_mrope", "full_attn_mod", "interpolate_factor", "lm_head_bias")}
    for key, value in wrong.items():
        with pytest.raises(BadInput, match=key):
            config_from(BASE | GROUPS | said | {key: value}, "")


@pytest.mark.parametrize(
    ("said", "spans"),
    [  # what transformers 5 makes of the same file
        ({"model_type": "qwen2_moe"}, "LGLGLG"),
        ({"model_type": "qwen2_moe", "max_window_layers": 3}, "LGLGGG"),
        ({"model_type": "qwen3", "max_window_layers": 2}, "GGLLLL"),
        ({"model_type": "qwen3_moe", "max_window_layers": 3}, "LLLLLL"),
    ],
)
def test_which_layers_of_qwen_have_windows(said, spans):
    experts = MOE if "moe" in said["model_type"] else {}
    experts = experts | ({"shared_expert_intermediate_size": 16} if said["model_type"] == "qwen2_moe" else {})
    windows = {"use_sliding_window": True, "sliding_window": 7, "num_hidden_layers": 6}
    config = config_from(BASE | GROUPS | experts | windows | said, "")
    assert config.spans == spans
    assert config_from(config.to_hub(), "").spans == spans


def test_sizes_beyond_reason_are_refused_before_anything_is_built():
    text = BASE | GROUPS | {"model_type": "gemma3_text", "num_hidden_layers": 10**9}
    with pytest.raises(BadInput, match="num_hidden_layers"):
        config_from({"model_type": "gemma3", "text_config": text}, "")
    with pytest.raises(BadInput, match="experts in each"):
        config_from(BASE | GROUPS | {"model_type": "mixtral", "num_local_experts": 10**9}, "")


@pytest.mark.parametrize("kind", ["gemma3", "llama4"])
@pytest.mark.parametrize("text", [None, [], "none"])
def test_a_model_with_towers_tells_of_its_text_model(kind, text):
    told = {"model_type": kind} | ({} if text == "none" else {"text_config": text})
    with pytest.raises(BadInput, match="without a `text_config`"):
        config_from(told, "config.json")


def test_the_rest_of_many_problems_is_counted():
    with pytest.raises(BadInput, match="and 4 more"):
        config_from({"model_type": "llama"} | {f"strange_{i}": 1 for i in range(12)}, "config.json")
