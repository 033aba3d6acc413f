"""Learned embeddings (textual inversion): a small pipeline against what diffusers draws with them, the verb, and mistakes."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from golden_weights import write_pipeline
from PIL import Image
from safetensors.numpy import load_file, save_file

import argosy
from argosy.core.errors import BadInput
from argosy.export.prompts import BundledPrompts
from argosy.export.steps import tokenized_prompts
from argosy.jobs.images import GenerateImages, generate_images

GOLDEN = Path(__file__).parents[2] / "goldens" / "images" / "pipeline-sd"
FILE = GOLDEN / "learned_embeds.safetensors"
XL = GOLDEN.parent / "pipeline-sdxl"
PROMPTS = ["a <snow-fox> in the snow", "fox,<snow-fox>!"]
TOLERANCE = 5e-5  # of the brightest pixel


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_pipeline(GOLDEN, tmp_path_factory.mktemp("learned") / "sd")


@pytest.fixture(scope="module")
def pipe(folder):
    return argosy.load(folder, embeddings=FILE)


def test_it_draws_what_diffusers_draws(folder, pipe):
    golden = dict(np.load(GOLDEN / "golden.npz"))
    arguments = {"steps": 3, "guidance": 4.0, "size": (48, 32), "latents": golden["latents"], "output": "float"}
    learned = pipe.images(PROMPTS, **arguments)
    assert np.abs(learned - golden["out_learned"]).max() < TOLERANCE
    assert np.abs(learned - argosy.load(folder).images(PROMPTS, **arguments)).max() > 0.02, (
        "without them, the name is spelled by letters"
    )


@pytest.fixture(scope="module")
def xl(tmp_path_factory) -> Path:
    return write_pipeline(XL, tmp_path_factory.mktemp("learned") / "xl")


def test_both_encoders_of_xl_read_their_rows(xl, tmp_path):
    golden, file = dict(np.load(XL / "golden.npz")), XL / "learned_embeds.safetensors"
    arguments = {"steps": 3, "guidance": 4.0, "size": (48, 32), "latents": golden["latents"], "output": "float"}
    learned = argosy.load(xl, embeddings=file).images(PROMPTS, **arguments)
    assert np.abs(learned - golden["out_learned"]).max() < TOLERANCE
    # diffusers' script for XL writes the rows of the first encoder alone, whose name the second then spells.
    rows = load_file(file)
    save_file({"<snow-fox>": rows["clip_l"]}, tmp_path / "learned_embeds.safetensors")
    alone = argosy.load(xl, embeddings=tmp_path).prompts
    assert [len(reader.learned) for reader in alone.readers] == [1, 0]
    # Without metadata, the token is the name of the file.
    save_file(rows, tmp_path / "snow.safetensors")
    assert argosy.load(xl, embeddings=tmp_path / "snow.safetensors").prompts.learned_tokens == ["snow"]


def test_a_token_of_the_vocabulary_is_refused_as_in_diffusers(folder, tmp_path):
    save_file({"aa": load_file(FILE)["<snow-fox>"]}, tmp_path / "learned_embeds.safetensors")
    with pytest.raises(BadInput, match="'aa' is in the vocabulary of text_encoder already"):
        argosy.load(folder, embeddings=tmp_path)


@pytest.mark.parametrize(("token", "text"), [("<s1>", "a <ſ1> cat"), ("<İ>", "a <İ> cat"), ("<S1>", "a <s1> cat")])
def test_letters_that_match_those_of_another_case_name_the_token(folder, tmp_path, token, text):
    save_file({token: load_file(FILE)["<snow-fox>"][:1]}, tmp_path / "learned_embeds.safetensors")
    reader = argosy.load(folder, embeddings=tmp_path).prompts.readers[0]
    assert 90 in reader.encoded([text])[0]


def test_bundles_read_tokens_as_the_pipeline(folder, tmp_path):
    """In any case and within words; by the ids that stand in the manifest."""
    save_file({"<Snow-Fox>": load_file(FILE)["<snow-fox>"]}, tmp_path / "learned_embeds.safetensors")
    prompts = argosy.load(folder, embeddings=tmp_path).prompts
    (step, _), (reader,) = BundledPrompts(prompts, True).steps, prompts.readers
    step = type(step).model_validate_json(step.model_dump_json())
    texts = ["a <snow-fox> in the snow", "infra<SNOW-FOX>red", "nothing of it"]
    found = tokenized_prompts(step, lambda folder: reader.tokenizer, texts)
    ids, mask = reader.padded(texts)
    assert (ids >= 90).any()
    np.testing.assert_array_equal(found["prompt_ids"], ids)
    np.testing.assert_array_equal(found["prompt_mask"], mask)


def test_a_token_stands_within_words_as_added_tokens_do(folder, tmp_path):
    """transformers 5.23: with the added token `red`, `infrared redness` is i n f r a [red] [red] n e s s</w>."""
    save_file({"emb_params": load_file(FILE)["<snow-fox>"][:1]}, tmp_path / "red.safetensors")
    reader = argosy.load(folder, embeddings=tmp_path / "red.safetensors").prompts.readers[0]
    (ids,) = reader.encoded(["infrared redness"])
    names = ["i", "n", "f", "r", "a</w>", 90, 90, "n", "e", "s", "s</w>"]
    assert ids == [name if isinstance(name, int) else reader.tokenizer.id_of(name) for name in names]


def test_a_token_stands_for_its_rows(pipe):
    reader = pipe.prompts.readers[0]
    vocab = reader.module.config.vocab
    (ids,) = reader.ids(["a <Snow-Fox><snow-fox> fox"])
    learned = [vocab, vocab + 1]
    plain = {text: list(reader.tokenizer.encode(text)) for text in ("a", "fox")}
    assert list(ids[1 : ids.tolist().index(89)]) == [*plain["a"], *learned, *learned, *plain["fox"]]
    assert reader.module.embed.shape[0] == vocab, "the module stays as its folder has it"


def test_a_prompt_that_loses_a_learned_token_says_so(folder):
    messages: list[str] = []
    pipe = argosy.load(folder, embeddings=FILE)
    pipe.prompts.readers[0].say = messages.append
    pipe.prompts.readers[0].ids(["a red fox in the snow " * 4 + "<snow-fox>"])
    assert "<snow-fox>" in messages[0]


def test_a_token_that_neither_prompt_names_is_said(folder):
    """Learned embeddings of what to lead away from stand in the negative prompt alone."""
    messages: list[str] = []
    pipe, arguments = argosy.load(folder, embeddings=FILE), {"steps": 1, "size": (16, 16)}
    pipe.say = messages.append
    pipe.images("a fox", negative="<Snow-Fox>", **arguments)
    assert not [text for text in messages if "learned" in text]
    pipe.images("a snow-fox", negative="snow", **arguments)
    assert [text for text in messages if "no prompt names <snow-fox>" in text]


def test_files_of_other_programs_and_folders(folder, tmp_path):
    rows = load_file(FILE)["<snow-fox>"]
    save_file({"emb_params": rows}, tmp_path / "snow.safetensors")
    save_file({"<one>": rows[0]}, tmp_path / "learned_embeds.safetensors")
    reader = argosy.load(folder, embeddings=[tmp_path / "snow.safetensors", tmp_path]).prompts.readers[0]
    vocab = reader.module.config.vocab
    assert list(reader.ids(["snow <one>"])[0][1:4]) == [vocab, vocab + 1, vocab + 2]


@pytest.mark.slow
def test_the_verb_draws_with_them(folder, pipe, tmp_path):
    words = {"image": str(tmp_path / "out.png"), "size": "32x48", "steps": 1, "embeddings": str(FILE)}
    generate_images(str(folder), PROMPTS[0], GenerateImages(**words))
    with Image.open(tmp_path / "out.png") as file:
        pixels = np.array(file)
    assert np.abs(pixels.astype(int) - pipe.images(PROMPTS[0], size=(48, 32), steps=1)[0]).max() <= 1


def test_mistakes_are_named(folder, tmp_path):
    rows = load_file(FILE)["<snow-fox>"]
    files = {
        "two": ({"a": rows, "b": rows}, "has 2 tensors"),
        "wide": ({"a": rows[:, :5].copy()}, r"rows of \[2, 5\], and the text encoder reads rows of 28"),
        "xl": ({"clip_l": rows, "clip_g": rows}, "of Stable Diffusion XL, with rows for two encoders, and this pipeline has one"),
    }
    for name, (tensors, problem) in files.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
        with pytest.raises(BadInput, match=problem):
            argosy.load(folder, embeddings=tmp_path / f"{name}.safetensors")
    with pytest.raises(BadInput, match="in another file too"):
        argosy.load(folder, embeddings=[FILE, FILE])
    with pytest.raises(BadInput, match="there is no such file"):
        argosy.load(folder, embeddings=tmp_path / "none.safetensors")
    shutil.copyfile(FILE, tmp_path / "learned.bin")
    with pytest.raises(BadInput, match=r"is no \.safetensors file"):
        argosy.load(folder, embeddings=tmp_path / "learned.bin")
    flux = write_pipeline(GOLDEN.parent / "pipeline-flux", tmp_path / "flux")
    with pytest.raises(BadInput, match="FluxPipeline are not built"):
        argosy.load(flux, embeddings=FILE)
