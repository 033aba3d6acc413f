"""Presets against what their publishers count, and against config.json of the Hub and back."""

import pytest

from argosy.models.parts.weight import abstract, parameter_count
from argosy.run.settings.recipe_files import preset_config, presets

# Parameters as the Hub's safetensors index of each model counts them; of experts, what the paper says are active, in billions.
PUBLISHED = {
    "bert-base": 109_482_240,
    "deepseek2-lite-16b": 15_706_484_224,
    "deepseek3.2-671b": 685_355_329_792 - 2 * 129_280 * 7168,  # without the copies of embedding and head
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952,
    "gpt2": 124_439_808,
    "llama2-7b": 6_738_415_616,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "llama4-17b-16e": 108_641_793_536 - 871_932_416,        # without the vision tower
    "llama4-17b-128e": 401_583_781_376 - 871_932_416,
    "minilm-l6": 22_713_216,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-nemo-12b": 12_247_782_400,
    "mixtral-8x7b": 46_702_792_704,
    "phi3-mini-4k": 3_821_079_552,
    "phi4-14b": 14_659_507_200,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    # Denoisers as diffusers 0.42.1 builds them; of Stable Diffusion 3 also the grid of positions, which lies in its files as a buffer.
    "dit-xl-2": 675_129_632 - 256 * 1152,                   # the paper's, without its table of positions
    "flux1-dev": 11_901_408_320,
    "flux1-schnell": 11_891_178_560,
    "flux2-dev": 32_223_281_152,
    "flux2-klein-4b": 3_875_544_576,
    "sd1.5": 859_520_964,
    "sd2.1": 865_910_724,
    "sd3-medium": 2_028_328_000 + 192**2 * 1536,
    "sd3.5-large": 8_056_627_520 + 192**2 * 2432,
    "sd3.5-medium": 2_243_171_520 + 384**2 * 1536,
    "sdxl": 2_567_463_684,
    "wan2.1-t2v-1.3b": 1_418_996_800,
    "wan2.1-t2v-14b": 14_288_491_584,
    "z-image": 6_154_908_736,
}
ACTIVE = {
    "mixtral-8x7b": 12.9,        # arXiv:2401.04088
    "deepseek2-236b": 21,        # arXiv:2405.04434
    "deepseek3-671b": 37,        # arXiv:2412.19437
    "qwen3-30b-a3b": 3.3,        # arXiv:2505.09388
    "qwen3-235b-a22b": 22,
    "llama4-17b-16e": 17,        # Meta 2025
    "llama4-17b-128e": 17,
    "kimi-k2-1t": 32,            # arXiv:2507.20534
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_published(name):
    assert preset_config(name).parameters() == PUBLISHED[name]


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_those_published(name):
    """Embeddings counted or not, papers differ: within 5 %."""
    assert preset_config(name).parameters(active=True) / 1e9 == pytest.approx(ACTIVE[name], rel=0.05)


# By default every sixth one: those of a family differ in sizes.
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if i % 6 else ()) for i, n in enumerate(presets())])
def test_every_preset_is_what_it_counts_and_can_be_written_for_the_hub(name):
    config = preset_config(name)
    assert parameter_count(abstract(config.build())) == config.parameters()
    assert type(config).from_hub(config.to_hub()).resolved().parameters() == config.parameters()
