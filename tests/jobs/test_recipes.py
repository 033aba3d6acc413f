"""Recipes of named models: each composes for the models it is for, with every adapter, and keeps the figures of its source."""

from typing import Any

import pytest

from argosy.jobs.plan.training import PlanSettings, plan
from argosy.run.settings.compose import compose
from argosy.run.settings.recipe_files import CONFIGS, about, recipes
from argosy.run.settings.run import Run

# Of each recipe: the presets that it is for, and settings of its source.
NAMED: dict[str, tuple[list[str], dict[str, Any]]] = {
    "sft-smollm2": (
        ["smollm2-135m", "smollm2-360m", "smollm2-1.7b"],
        {"optimizer.learning_rate": 1e-3, "data.batch": 128, "data.sequence": 8192, "data.epochs": 2, "schedule.warmup": 0.1},
    ),
    "dpo-smollm2": (
        ["smollm2-135m", "smollm2-360m", "smollm2-1.7b"],
        {"optimizer.learning_rate": 1e-6, "objective.beta": 0.5, "data.batch": 256, "data.epochs": 2},
    ),
    "sft-llama3.2": (["llama3.2-1b", "llama3.2-3b"], {"optimizer.learning_rate": 2e-5, "data.batch": 64, "data.epochs": 3}),
    "dpo-llama3.2": (
        ["llama3.2-1b", "llama3.2-3b"],
        {"optimizer.learning_rate": 5e-7, "objective.beta": 5, "objective.losses.sigmoid_norm": 1, "data.batch": 256},
    ),
    "sft-qwen3": (
        ["qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b"],
        {"optimizer.learning_rate": 2e-5, "data.batch": 32, "data.epochs": 1},
    ),
    "grpo-qwen3": (
        ["qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b"],
        {"optimizer.learning_rate": 3e-6, "objective.kl": 0.08, "rollout.completions": 4, "adapter.rank": 64, "optimizer.clip": 0.1},
    ),
    "sft-gemma3": (["gemma3-1b", "gemma3-4b"], {"optimizer.learning_rate": 2e-5, "data.batch": 8, "optimizer.clip": None}),
    "grpo-gemma3": (
        ["gemma3-1b", "gemma3-4b"],
        {"optimizer.learning_rate": 5e-6, "rollout.completions": 4, "adapter.rank": 8, "adapter.alpha": 8, "optimizer.b2": 0.99},
    ),
    "sft-gpt-oss": (
        ["gpt-oss-20b"],
        {"optimizer.learning_rate": 2e-4, "adapter.rank": 32, "adapter.alpha": 64, "data.batch": 16, "schedule.final": 0.1},
    ),
}
# Of each pre-training recipe: presets, settings of its source, tokens in all, FLOPs by its comment, and the device it names there.
PRETRAINED: dict[str, tuple[list[str], dict[str, Any], float, float, str]] = {
    "pretrain-gpt2": (
        ["gpt2"], {"optimizer.learning_rate": 6e-4, "schedule.final": 0.1, "optimizer.b2": 0.95}, 295e9, 2.4e20, "h100-8"
    ),
    "pretrain-tinyllama": (["tinyllama-1.1b"], {"optimizer.learning_rate": 4e-4, "schedule.warmup": 2000}, 3e12, 2.0e22, "v5p-32"),
    "pretrain-smollm2": (["smollm2-1.7b"], {"optimizer.learning_rate": 5e-4, "schedule.decay": 0.1}, 11e12, 1.2e23, "v5p-128"),
    "pretrain-olmo2": (
        ["olmo2-7b", "olmo2-13b", "olmo2-32b"], {"optimizer.learning_rate": 3e-4, "objective.z_loss": 1e-5}, 5e12, 2.2e23, "v5p-128"
    ),
    "pretrain-llama2": (
        ["llama2-7b", "llama2-13b", "llama2-70b"], {"optimizer.learning_rate": 3e-4, "optimizer.eps": 1e-5}, 2e12, 8.6e22, "v5p-128"
    ),
    "pretrain-deepseek2": (
        ["deepseek2-lite-16b"], {"optimizer.learning_rate": 4.2e-4, "model.moe.balance": 0.001}, 5.7e12, 9.4e22, "v5p-256"
    ),
}  # fmt: skip
# With `adapter=lora`: rank, alpha and learning rate.
ADAPTED = {"sft-llama3.2": (64, 128, 3e-4), "sft-qwen3": (8, 16, 3e-4), "sft-gemma3": (64, 128, 2e-5), "sft-smollm2": (16, 32, 2e-4)}


def compose_run(recipe: str, model: str, *words: str) -> Run:
    setting_words = [f"model={model}", "init.weights=FOLDER", "data.source=FILE.jsonl", "data.tokenizer=byte"]
    if recipe.startswith("grpo"):
        setting_words.append("reward=FILE.py:FUNCTION")
    return compose(Run, recipe, [*setting_words, *words]).value


@pytest.mark.parametrize("recipe", NAMED)
def test_a_named_model_gets_the_figures_of_the_source(recipe: str):
    models, figures = NAMED[recipe]
    for model in models:
        run = compose_run(recipe, model)
        assert run.model.preset == model
        assert_figures(run, figures)


def assert_figures(run: Run, figures: dict[str, Any]) -> None:
    for key, value in figures.items():
        node: Any = run
        for name in key.split("."):
            node = node[name] if isinstance(node, dict) else getattr(node, name)
        assert node == value, key


@pytest.mark.parametrize("recipe", PRETRAINED)
def test_pretraining_takes_the_tokens_of_its_source_and_fits_where_it_says(recipe: str):
    models, figures, tokens, flops, device = PRETRAINED[recipe]
    for model in models:
        # The first is the recipe's own, with the settings that go with it.
        words = [] if model == models[0] else [f"model={model}"]
        run = compose(Run, recipe, [*words, "data.source=FILE.jsonl", "data.tokenizer=byte"]).value
        assert run.model.preset == model
        assert_figures(run, figures)
        assert run.steps * run.data.batch * run.data.sequence == pytest.approx(tokens, rel=0.01)
    document = plan(recipe, ["data.source=synthetic"], PlanSettings(device=device, compile=False), lambda _: None)
    assert document["fits"]
    assert document["flops_per_step"] * run.steps == pytest.approx(flops, rel=0.05)
    text = (CONFIGS / "recipes" / f"{recipe}.yml").read_text(encoding="utf-8")
    assert f"device={device}" in text.replace("\n# ", " ")
    assert f"{flops:.1e}".replace("e+", "e") in text


@pytest.mark.parametrize("recipe", [name for name in NAMED if name.startswith(("sft", "dpo"))])
@pytest.mark.parametrize("kind", ["lora", "dora", "qlora"])
def test_every_adapter_goes_with_it(recipe: str, kind: str):
    run = compose_run(recipe, NAMED[recipe][0][0], f"adapter={kind}")
    if recipe in ADAPTED:
        rank, alpha, rate = ADAPTED[recipe]
        assert (run.adapter.rank, run.adapter.alpha, run.optimizer.learning_rate) == (rank, alpha, rate)
    assert compose_run(recipe, NAMED[recipe][0][0], f"adapter={kind}", "adapter.rank=3").adapter.rank == 3


@pytest.mark.parametrize("recipe", [*NAMED, *PRETRAINED])
def test_every_recipe_names_its_source(recipe: str):
    """The first two lines: what it is, and the public repository or paper that its figures are from."""
    lines = (CONFIGS / "recipes" / f"{recipe}.yml").read_text(encoding="utf-8").splitlines()
    assert about(recipe).endswith("."), recipe
    owners = ("huggingface/", "pytorch/", "google/", "unslothai/", "karpathy/", "allenai/", "deepseek-ai/")
    assert any(word in lines[1] for word in (*owners, "arXiv:"))


def test_every_recipe_of_a_named_model_is_here():
    """And no other begins as one of these."""
    assert {name for name in recipes() if "-" in name and name not in ("bench-31m", "two-tower")} == {*NAMED, *PRETRAINED}
