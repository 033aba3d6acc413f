"""What of Qwen3-Next no golden and no law asks: how its config.json tells which layers recur, and what it refuses."""

import json
from pathlib import Path

import pytest

from argosy.core.errors import ArgosyError, BadInput, Unsupported
from argosy.models.qwen3_next import Qwen3NextConfig
from argosy.models.settings import Rope

GOLDEN = Path(__file__).parents[1] / "goldens" / "models" / "qwen3-next-plain" / "config.json"


def read(**differs) -> Qwen3NextConfig:
    """The golden's config.json with other values; None drops a key."""
    config = json.loads(GOLDEN.read_text(encoding="utf-8")) | differs
    return Qwen3NextConfig.from_hub({key: value for key, value in config.items() if value is not None})


@pytest.mark.parametrize(
    ("differs", "spans"),
    [
        ({"layer_types": None}, "RRRG"),
        ({"layer_types": None, "full_attention_interval": 2}, "RGRG"),
        ({"full_attention_interval": 2}, "RRRG"),
        ({"layer_types": ["full_attention"] + ["linear_attention"] * 3}, "GRRR"),
        ({"layer_types": ["linear_attention"] * 4}, "RRRR"),
        ({"layer_types": ["full_attention"] * 4}, "GGGG"),
    ],
)
def test_which_layers_recur(differs: dict, spans: str):
    """By name where there are names, else every so many attends; written so that it is read again."""
    config = read(**differs)
    assert config.spans == spans
    assert Qwen3NextConfig.from_hub(config.to_hub()).resolved() == config.resolved()


@pytest.mark.parametrize(
    "differs", [{"layer_types": ["sliding_attention"] * 4}, {"layer_types": ["full_attention"] * 3}]
)
def test_other_layers_are_refused(differs: dict):
    with pytest.raises(BadInput):
        read(**differs)


@pytest.mark.parametrize(
    ("differs", "dense"),
    [
        ({"decoder_sparse_step": 2}, (0, 2)),
        ({"mlp_only_layers": [3]}, (3,)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, (0, 1, 2, 3)),
    ],
)
def test_which_layers_are_dense(differs: dict, dense: tuple[int, ...]):
    assert read(**differs).dense == dense


def test_a_whole_head_that_turns_is_written_so():
    """A config.json that says nothing means a quarter."""
    assert read(rope_parameters=None, partial_rotary_factor=None).rope.part == 0.25
    config = read().model_copy(update={"rope": Rope(part=1.0)})
    assert Qwen3NextConfig.from_hub(config.to_hub()).rope.part == 1.0


def test_what_the_hub_cannot_say_is_not_written():
    config = read()
    with pytest.raises(Unsupported, match="moe"):
        config.model_copy(update={"moe": config.moe.model_copy(update={"shared_gate": False})}).to_hub()


@pytest.mark.parametrize(
    "differs",
    [{"pattern": "RL"}, {"pattern": ""}, {"window": 7}, {"dense": [4]}, {"kv_heads": 5}, {"rope": {"part": 0.3}}],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused(differs: dict):
    with pytest.raises((ArgosyError, ValueError), match=next(iter(differs)) + "|rotary"):
        Qwen3NextConfig.model_validate(read().model_dump() | differs)
