"""Starting from what another run, or another house, made: in the other layout, on another mesh, or not at all."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from campaign_kill import SMALL
from helpers import relative, shared, stories_model

import argosy
from argosy.checkpoint.open import open_model
from argosy.checkpoint.step.layout import STATE
from argosy.checkpoint.step.load import load_item
from argosy.core.errors import BadInput, Damaged, SettingsError, UserError
from argosy.core.storage import Store
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.stack.addresses import from_layers, to_layers
from argosy.models.parts.weight import split
from argosy.observe.metrics import by_step, read
from argosy.run.settings.compose import compose
from argosy.run.settings.run import Run
from argosy.run.start.initial import relaid
from argosy.run.start.preflight import checked_settings
from argosy.weights.hub.writer import save_folder

LAYERS = "model.layers=2"  # so that scan has something to stack
WORDS = [*SMALL, LAYERS, "checkpoint.every=4"]
ROUNDING = 1e-5  # scan and unroll, or one mesh and another


def fit(run: Path, *words: str) -> dict[int, float]:
    argosy.fit("tiny", *WORDS, f"dir={run}", *words)
    return by_step(read(Store(run)), "loss")


def near(a: dict[int, float], b: dict[int, float]) -> bool:
    return a.keys() == b.keys() and relative(list(a.values()), list(b.values())) < ROUNDING


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of a run."""
    run = tmp_path_factory.mktemp("initial") / "source"
    fit(run, "steps=4", "execution.run=unroll")
    return run


@pytest.fixture(scope="module")
def first(source: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    """The loss of the first batch under its weights."""
    return fit(tmp_path_factory.mktemp("initial") / "first", "steps=1", f"init.weights={source}")[1]


@pytest.mark.slow
def test_weights_change_the_first_loss(source: Path, first: float):
    random = by_step(read(Store(source)), "loss")[1]
    assert abs(first - random) > 1e-3


@pytest.mark.slow
def test_weights_in_the_other_layout_give_the_same_loss(source: Path, first: float, tmp_path: Path):
    scanned = fit(tmp_path / "run", "steps=1", f"init.weights={source}", "execution.run=scan")
    assert relative([scanned[1]], [first]) < ROUNDING


@pytest.mark.slow
def test_weights_from_one_step_and_from_a_hub_folder_are_the_same(source: Path, first: float, tmp_path: Path):
    step = source / "checkpoints" / "4"
    stored = open_model(step)
    save_folder(tmp_path / "hub", stored.config, stored.weights)
    for name, model in (("a", step), ("b", tmp_path / "hub")):
        assert fit(tmp_path / name, "steps=1", f"init.weights={model}") == {1: first}


OTHERS = [w for w in WORDS if not w.startswith("model.")]  # nothing said of the model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("run", "init.weights={}"),
        pytest.param("hub", "model={}", marks=pytest.mark.slow),
        pytest.param("hub", "init.weights={}", marks=pytest.mark.slow),
        pytest.param("run", "model={}", marks=pytest.mark.slow),
    ],
)
def test_a_folder_brings_its_sizes(source: Path, first: float, tmp_path: Path, word: str, kind: str):
    folder = source
    if kind == "hub":
        folder, stored = tmp_path / "hub", open_model(source)
        save_folder(folder, stored.config, stored.weights)
    run = tmp_path / "run"
    argosy.fit("tiny", *OTHERS, "steps=1", word.format(folder), f"dir={run}")
    assert by_step(read(Store(run)), "loss") == {1: first}
    assert open_model(run).config.width == 16
    shutil.rmtree(folder) if kind == "hub" else None
    assert argosy.fit(str(run), "steps=2").step == 2, "a run that has begun needs the folder no more"


def test_a_preset_named_after_a_folder_keeps_nothing_of_the_folder(source: Path, tmp_path: Path):
    recipe = tmp_path / "mine.yml"
    recipe.write_text(f"extends: tiny\nmodel: {source}\ndata:\n  sequence: 16\n")
    assert compose(Run, recipe, []).value.init.weights == str(source)
    plain, from_folder = (compose(Run, r, ["model=llama3.2-1b", "data.sequence=16"]).value for r in ("tiny", recipe))
    assert from_folder.init.weights is None
    assert from_folder.data.tokenizer == plain.data.tokenizer
    assert from_folder.model == plain.model


def test_what_is_reported_of_the_model_beside_a_folder_counts(source: Path, tmp_path: Path):
    with pytest.raises(BadInput, match=r"is another model") as caught:
        argosy.fit("tiny", *OTHERS, "steps=1", f"init.weights={source}", "model.ffn=48", f"dir={tmp_path / 'run'}")
    assert "model.ffn is 32 there, 48 here" in str(caught.value)


@pytest.mark.slow
def test_a_resumed_run_does_not_start_again_from_init(source: Path, tmp_path: Path):
    words = [f"init.weights={source}", f"dir={tmp_path / 'run'}"]
    begun = fit(tmp_path / "run", "steps=2", *words)
    resumed = fit(tmp_path / "run", "steps=4", *words)
    assert {step: resumed[step] for step in begun} == begun
    assert list(resumed) == [1, 2, 3, 4]
    again = open_model(tmp_path / "run" / "checkpoints" / "4").weights
    start = open_model(source).weights
    assert any(not np.array_equal(again.read(n), start.read(n)) for n in start.names)


@pytest.fixture(scope="module")
def went_on(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses from its state, in its own layout and mesh. Data begins anew, so they are not those of the source."""
    return fit(tmp_path_factory.mktemp("initial") / "same", "steps=7", f"init.state={source}", "execution.run=unroll")


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["execution.run=scan"], id="the other layout", marks=pytest.mark.slow),
        pytest.param(["mesh.data=2", "mesh.fsdp=4"], id="another mesh", marks=pytest.mark.slow),
    ],
)
def test_a_state_brings_optimizer_and_step(source: Path, went_on: dict[int, float], tmp_path: Path, words: list[str]):
    other = fit(tmp_path / "other", "steps=7", f"init.state={source}", *words)
    assert list(went_on) == [5, 6, 7], "the step came along"
    assert near(other, went_on)


@pytest.mark.slow
def test_without_the_optimizers_memory_the_third_loss_is_another(
    source: Path, went_on: dict[int, float], tmp_path: Path
):
    without = fit(tmp_path / "without", "steps=3", f"init.weights={source}")
    assert abs(without[3] - went_on[7]) / went_on[7] > 10 * ROUNDING


def test_an_optimizer_survives_there_and_back(source: Path):
    """Arrays under other addresses, and back: every one, bit for bit."""
    config = open_model(source).config
    unrolled, scanned = config.build(Unroll()), config.build(Scan())
    arrays = load_item(source / "checkpoints" / "4", STATE)
    there = relaid(arrays, unrolled, scanned)
    assert any(".layers.block." in name for name in there)
    assert not any(".layers.0." in name for name in there)
    back = relaid(there, scanned, unrolled)
    assert back.keys() == arrays.keys()
    assert all(np.array_equal(back[name], arrays[name]) for name in arrays)


def test_optimizer_arrays_go_where_their_weights_go(source: Path):
    config = open_model(source).config
    unrolled, scanned = config.build(Unroll()), config.build(Scan())
    rng = np.random.default_rng(0)
    weights = {a: rng.standard_normal(v.shape).astype(np.float32) for a, v in split(unrolled)[1].items()}
    mirrored = relaid({f"optimizer.0.mu.{a}": w for a, w in weights.items()}, unrolled, scanned)
    expected = from_layers(scanned, to_layers(unrolled, weights))
    assert {n.removeprefix("optimizer.0.mu.") for n in mirrored} == set(expected)
    assert all(np.array_equal(mirrored[f"optimizer.0.mu.{a}"], w) for a, w in expected.items())


@pytest.mark.parametrize("init", ["weights", "state"])
def test_another_model_is_refused_with_its_differences(source: Path, tmp_path: Path, init: str):
    with pytest.raises(BadInput, match="is another model") as caught:
        fit(tmp_path / "run", "steps=6", f"init.{init}={source}", "model.ffn=48", "model.layers=1")
    assert "model.ffn is 32 there, 48 here" in str(caught.value)
    assert "model.layers is 2 there, 1 here" in str(caught.value)
    words = {"ffn": 48, "layers": 1, "width": 32, "heads": 4, "kv_heads": 4, "vocab": 128}
    with pytest.raises(BadInput, match="is another model") as caught:
        fit(tmp_path / "run", "steps=6", f"init.{init}={source}", *(f"model.{key}={value}" for key, value in words.items()))
    assert all(f"model.{key} is " in str(caught.value) for key in words)
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i}", "completion": f" {i + 1}"}) + "\n" for i in range(8)))
    return file


def finetune(run: Path, chats: Path, *words: str) -> dict[int, float]:
    """A run that names no model, unless the words do."""
    settings = [word for word in OTHERS if not word.startswith("data.source")]
    argosy.fit("sft", *settings, "data.held_out=0", f"data.source={chats}", f"dir={run}", *words)
    return by_step(read(Store(run)), "loss")


@pytest.fixture(scope="module")
def begun_run(chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of a model of bytes, with the generation settings of the model it began from."""
    run = tmp_path_factory.mktemp("initial") / "begun"
    fit(run, "steps=2", f"data.source={chats}", "data.tokenizer=byte", "data.held_out=0", "model.vocab=512", "optimizer=adamw")
    (run / "tokenizer" / "generation_config.json").write_text('{"temperature": 0.25}')
    return run


def test_a_state_brings_its_model_and_tokenizer(begun_run: Path, chats: Path):
    """Whoever names no model, or names the same one, gets the model and the tokenizer of the state."""
    words = [f"data.source={chats}", "data.sequence=16", f"init.state={begun_run}"]
    alone = compose(Run, "sft", words).value
    assert alone.model == open_model(begun_run).config
    assert alone.data.tokenizer == str(begun_run)
    assert compose(Run, "sft", [*words, f"model={begun_run}"]).value == alone, "a state includes weights"
    both = compose(Run, "sft", [*words, "model=argosy-1m"]).value
    assert (both.model.preset, both.data.tokenizer) == ("argosy-1m", str(begun_run))


@pytest.mark.slow
def test_a_recipe_without_a_model_goes_on_from_a_state(begun_run: Path, chats: Path, tmp_path: Path):
    run = tmp_path / "run"
    assert list(finetune(run, chats, f"init.state={begun_run}", "steps=4")) == [3, 4]
    assert json.loads((run / "tokenizer" / "generation_config.json").read_text()) == {"temperature": 0.25}


def test_a_later_start_replaces_an_earlier_one(begun_run: Path, chats: Path, tmp_path: Path):
    recipe, data = tmp_path / "mine.yml", f"data: {{source: {chats}, sequence: 16}}\n"
    recipe.write_text(f"extends: sft\ninit: {{weights: {begun_run}}}\n{data}")
    went_on = compose(Run, recipe, [f"init.state={begun_run}"]).value
    assert (went_on.init.weights, went_on.init.state) == (None, str(begun_run))
    recipe.write_text(f"extends: sft\ninit: {{state: {begun_run}}}\n{data}")
    for words in ([f"init.weights={begun_run}"], [f"model={begun_run}"]):
        anew = compose(Run, recipe, words).value
        assert (anew.init.weights, anew.init.state) == (str(begun_run), None)


def test_a_state_of_another_tokenizer_is_refused(begun_run: Path, chats: Path, tmp_path: Path):
    pieces = f"data.tokenizer={shared('models/stories260k')}"
    with pytest.raises(BadInput, match="another tokenizer") as caught:
        finetune(tmp_path / "run", chats, f"init.state={begun_run}", "steps=6", pieces)
    assert "init.state brings its own" in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_state_that_is_not_there_is_the_mistake():
    with pytest.raises(SettingsError) as caught:
        checked_settings("sft", ["init.state=gone"])
    assert [problem.what for problem in caught.value.problems] == ["no such run: `gone`", "`sft` needs `data.source`"]


@pytest.mark.slow
def test_the_state_of_adapters_is_refused(begun_run: Path, chats: Path, tmp_path: Path):
    lora, settings = tmp_path / "lora", [f"model={begun_run}", "steps=1", "adapter=lora", "adapter.rank=2"]
    finetune(lora, chats, *settings)
    with pytest.raises(BadInput, match="trained adapters") as caught:
        finetune(tmp_path / "run", chats, f"init.state={lora}", "steps=2")
    assert f"init.weights={lora}" in str(caught.value)
    with pytest.raises(BadInput, match="other settings") as caught:
        finetune(lora, chats, *settings, "seed=3")
    assert f"init.weights={lora} dir=NEW" in str(caught.value)


def test_another_optimizer_is_refused(source: Path, tmp_path: Path):
    with pytest.raises(BadInput, match="another optimizer") as caught:
        fit(tmp_path / "run", "steps=6", f"init.state={source}", "optimizer=lion")
    assert "init.weights" in str(caught.value)


def test_both_at_once_is_a_mistake(source: Path, tmp_path: Path):
    with pytest.raises(UserError, match="both set"):
        fit(tmp_path / "run", "steps=6", f"init.state={source}", f"init.weights={source}")


@pytest.mark.slow
def test_a_damaged_source_is_walked_back_and_left_alone(source: Path, tmp_path: Path):
    run = Path(shutil.copytree(source, tmp_path / "source"))
    shutil.copytree(run / "checkpoints" / "4", run / "checkpoints" / "8")
    (run / "checkpoints" / "8" / "meta.json").write_text("{")
    assert list(fit(tmp_path / "run", "steps=5", f"init.state={run}")) == [5]
    assert sorted(d.name for d in (run / "checkpoints").iterdir()) == ["4", "8"]
    with pytest.raises(Damaged, match=r"meta\.json"):
        fit(tmp_path / "other", "steps=9", f"init.state={run / 'checkpoints' / '8'}")




def test_weights_of_another_tokenizer_are_trained_only_with_consent(tmp_path: Path, chats: Path):
    """Ids that mean other words train a model to nonsense, and the loss falls all the same."""
    words = [f"model={stories_model()}", "steps=1", "data.sequence=64"]
    with pytest.raises(BadInput, match=r"trained with another tokenizer than data\.tokenizer = byte") as caught:
        finetune(tmp_path / "run", chats, *words, "data.tokenizer=byte")
    assert "leave data.tokenizer out" in str(caught.value)
    assert "init.tokenizer_mismatch=allow" in str(caught.value)
    assert not (tmp_path / "run").exists()
    for name, more in (("other", ["data.tokenizer=byte", "init.tokenizer_mismatch=allow"]), ("own", [])):
        finetune(tmp_path / name, chats, *words, *more)
        assert ("another tokenizer" in (tmp_path / name / "log.txt").read_text()) == (name == "other")


def test_a_model_that_brings_no_tokenizer_is_no_model_of_a_much_smaller_one(tmp_path: Path, chats: Path):
    """No model pads its vocabulary by more than a few percent."""
    lm = argosy.load(stories_model())
    lm.tokenizer = None
    lm.save(tmp_path / "bare", format="hub")
    for file in (tmp_path / "bare").glob("tokenizer*"):
        file.unlink()
    words = [f"model={tmp_path / 'bare'}", "data.tokenizer=byte", "steps=1", "data.sequence=64"]
    with pytest.raises(BadInput, match=r"the tokenizer makes 258 of the 512 ids of .*, which brings none"):
        finetune(tmp_path / "run", chats, *words)
    finetune(tmp_path / "run", chats, *words[:1], f"data.tokenizer={stories_model()}", *words[2:])


def test_the_same_tokens_from_another_file_are_the_same_tokenizer():
    """A GGUF file's tokenizer and the SentencePiece model that it was made from have other bytes, and the same ids."""
    from argosy.data.tokenizers.load import load_tokenizer
    from argosy.data.tokenizers.matched import same_tokens

    pieces, gguf = load_tokenizer(stories_model()), load_tokenizer(shared("gguf/stories260K-f32.gguf"))
    assert same_tokens(pieces, gguf)
    assert same_tokens(pieces, pieces)
    assert not same_tokens(pieces, load_tokenizer("byte"))
