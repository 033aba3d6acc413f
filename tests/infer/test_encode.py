"""A prompt begins with one beginning-of-sequence token where the model was trained with one, as text and as conversation."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from argosy.core.errors import BadInput
from argosy.data.tokenizers.load import load_tokenizer
from argosy.infer.lm import LM

BOS = 1
TEMPLATE = "{{ bos_token }} {% for m in messages %}{{ m.content }} {% endfor %}"


def lm_of(folder: Path, **config_fields: object) -> LM:
    words = {"<unk>": 0, "<s>": BOS, "</s>": 2, "a": 3, "b": 4}
    library = Library(WordLevel(words, unk_token="<unk>"))
    library.pre_tokenizer = Whitespace()
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True} | config_fields
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return LM(None, None, load_tokenizer(folder))


def test_text_gets_one(tmp_path: Path):
    assert lm_of(tmp_path).encode("a b") == [BOS, 3, 4]


def test_text_gets_none_where_the_model_had_none(tmp_path: Path):
    assert lm_of(tmp_path, add_bos_token=False).encode("a b") == [3, 4]


def test_ids_are_taken_as_they_are(tmp_path: Path):
    assert lm_of(tmp_path).encode([3, 4]) == [3, 4]


@pytest.mark.parametrize("adds", [True, False])
def test_a_conversation_has_what_its_template_writes_and_no_second_one(tmp_path: Path, adds: bool):
    lm = lm_of(tmp_path, add_bos_token=adds, chat_template=TEMPLATE)
    assert lm.chat_prompt([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]) == [BOS, 3, 4]


def test_a_model_without_a_template_says_so(tmp_path: Path):
    with pytest.raises(BadInput, match="no chat template"):
        lm_of(tmp_path).chat_prompt([{"role": "user", "content": "a"}])
