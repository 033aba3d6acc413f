"""What an assistant said, in every golden template: each masked token is its word, and each of its words is masked."""

import json
import re
from datetime import datetime
from pathlib import Path

import pytest
from helpers import default, shared
from test_chat import NAMES, SPECIAL

from argosy.core.errors import BadInput
from argosy.data.chat import template as chat
from argosy.data.chat.mask import encode_with_mask, render_with_mask
from argosy.data.chat.template import render
from argosy.data.tokenizers.config import TokenizerConfig
from argosy.data.tokenizers.fast import FastTokenizer
from argosy.data.tokenizers.load import Tokenizer, load_tokenizer

NOW = datetime(2025, 1, 2, 3, 4, 5)
HI = [{"role": "user", "content": "hi"}]
TALK = [
    {"role": "user", "content": "Name a colour."},
    {"role": "assistant", "content": "Blue: <b>\u00e9</b>"},
    {"role": "user", "content": "Another?"},
    {"role": "assistant", "content": "Red it is."},
]
ENDS = {  # what ends a turn, and the last one, as the vendors publish it
    "google-gemma-2-2b-it": ["<end_of_turn>"] * 2,
    "google-gemma-4-31B-it": ["<turn|>"] * 2,
    "meta-llama-Llama-3.1-8B-Instruct": ["<|eot_id|>"] * 2,
    "meta-llama-Llama-3.2-3B-Instruct": ["<|eot_id|>"] * 2,
    "mistralai-Mistral-Nemo-Instruct-2407": ["<EOS>"] * 2,
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ["<｜end▁of▁sentence｜>"] * 2,
    "openai-gpt-oss-120b": ["<|end|>", "<|return|>"],
}
BEFORE = {  # what a model writes itself before its words
    "openai-gpt-oss-120b": ["<|channel|>final<|message|>"] * 2,
    "Qwen-Qwen3-0.6B": ["", "<think>\n\n</think>\n\n"],
    "Qwen3.5-4B": ["", "\n</think>\n\n"],  # its prompt has opened the thought
}
REFUSED = {  # what templates say of an assistant that begins: alone, and after a system message
    "google-gemma-2-2b-it": ["Conversation roles must alternate", "System role not supported"],
    "mistralai-Mistral-Nemo-Instruct-2407": ["After the optional system message, conversation roles must alternate"] * 2,
}
MARKED = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{%- generation -%}{{ m.content }}<EOS>"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"


@pytest.fixture(scope="module", autouse=True)
def end_child():
    yield
    chat.CHILD.close()


def template_of(name: str) -> str:
    return shared(f"chat_templates/{name}.jinja").read_text()


def tokenizer_for(template: str, *special: str) -> Tokenizer:
    """A real vocabulary with special tokens of its own in addition."""
    content = json.loads(shared("tokenizers/smollm2/tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    names = {token["content"] for token in content["added_tokens"]}
    for name in dict.fromkeys(special):
        if name not in names:
            content["added_tokens"].append({"id": 49_152 + len(content["added_tokens"]), "content": name} | flags)
    return FastTokenizer(
        json.dumps(content), TokenizerConfig(dict(SPECIAL), templates={"default": template}), Path("tokenizer.json")
    )


def masked_runs(tokenizer: Tokenizer, messages, **options) -> list[str]:
    """The decoded runs of masked tokens."""
    ids, mask = encode_with_mask(tokenizer, messages, now=NOW, **options)
    assert len(ids) == len(mask)
    runs: list[list[int]] = []
    for place, token in enumerate(ids):
        if mask[place] and (not place or not mask[place - 1]):
            runs.append([])
        if mask[place]:
            runs[-1].append(token)
    return [tokenizer.decode(run, skip_special=False) for run in runs]


@pytest.mark.parametrize("name", default(*NAMES[::3], of=NAMES))
def test_masked_tokens_are_the_assistants_words_and_the_end_of_its_turn(name):
    ends, before = ENDS.get(name, ["<|im_end|>"] * 2), BEFORE.get(name, ["", ""])
    marks = {*ends, *re.findall(r"<\|[a-z_]+\|>", template_of(name)), *SPECIAL.values()}
    tokenizer = tokenizer_for(template_of(name), *marks)
    words = [message["content"] for message in TALK if message["role"] == "assistant"]
    assert masked_runs(tokenizer, TALK) == [first + word + end for first, word, end in zip(before, words, ends)]
    ids, mask = encode_with_mask(tokenizer, TALK, now=NOW)
    text = render(template_of(name), TALK, SPECIAL, now=NOW)
    assert tokenizer.decode(ids, skip_special=False) == text
    prompt = render(template_of(name), TALK[:1], SPECIAL, add_generation_prompt=True, now=NOW)
    prompt_ids = tokenizer.encode(prompt, special=True)
    if text.startswith(prompt):
        assert ids[: mask.index(True)] == prompt_ids
    if tokenizer.encode(text, special=True)[: len(prompt_ids)] == prompt_ids:
        assert ids == tokenizer.encode(text, special=True)


@pytest.mark.parametrize("first", [[], [{"role": "system", "content": "Be kind."}]], ids=["alone", "after a system message"])
@pytest.mark.parametrize("name", NAMES)
def test_an_assistant_may_begin_the_conversation(name, first):
    """Templates that render it are never asked to render nothing, which many of them fail at, and a default system prompt that they
    write before the first message is no word of the assistant."""
    words = ["hello1", "fine2"]
    said_by = [("assistant", "hello1"), ("user", "how?"), ("assistant", "fine2")]
    messages = [*first, *({"role": role, "content": word} for role, word in said_by)]
    marks = {*ENDS.get(name, ["<|im_end|>"] * 2), *re.findall(r"<\|[a-z_]+\|>", template_of(name)), *SPECIAL.values()}
    tokenizer = tokenizer_for(template_of(name), *marks)
    if refused := REFUSED.get(name, [None, None])[len(first)]:
        with pytest.raises(BadInput, match=f"the chat template refuses these messages: {refused}"):
            encode_with_mask(tokenizer, messages, now=NOW)
        return
    ends, before = ENDS.get(name, ["<|im_end|>"] * 2), BEFORE.get(name, ["", ""])
    assert masked_runs(tokenizer, messages) == [first + word + end for first, word, end in zip(before, words, ends)]


def test_a_template_without_a_header_of_answers_learns_the_first_words_alone():
    template = "SYSTEM {% for m in messages %}[{{ m.role }}]{{ m.content }}<EOS>{% endfor %}"
    messages = [{"role": "assistant", "content": "hello1"}, *HI]
    text, spans = render_with_mask(template, messages, SPECIAL, ends=["<EOS>"])
    assert [text[start:stop] for start, stop in spans] == ["hello1<EOS>"]


def test_a_first_answer_under_another_header_than_that_of_questions_is_refused():
    """The prompt opens an answer by one header, the history writes another: what they share is no header."""
    template = (
        "{% for m in messages %}<|im_start|>{{ 'bot' if m.role == 'assistant' else m.role }}\n{{ m.content }}<EOS>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(BadInput, match="message 0"):
        render_with_mask(template, [{"role": "assistant", "content": "hello1"}, *HI], SPECIAL, ends=["<EOS>"])


@pytest.mark.parametrize("name", [name for name in NAMES if name != "google-gemma-2-2b-it"])  # it knows no system role
def test_a_system_message_changes_nothing(name):
    """Mistral moves it to the last turn of the user: the past is rewritten, and the turns are found all the same."""
    messages = [{"role": "system", "content": "Be brief."}, *TALK]
    text, spans = render_with_mask(template_of(name), messages, SPECIAL, ends=ENDS.get(name, ["<|im_end|>"]), now=NOW)
    assert len(spans) == 2
    for (start, stop), word in zip(spans, ("Blue: <b>é</b>", "Red it is.")):
        assert word in text[start:stop]
        assert "Another?" not in text[start:stop]


@pytest.mark.parametrize(("name", "call"), [
    ("Qwen-Qwen2.5-7B-Instruct", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>'),
    ("Qwen-Qwen3-0.6B", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>'),
    ("meta-llama-Llama-3.1-8B-Instruct", '{"name": "get_weather", "parameters": {"city": "Paris"}}<|eot_id|>'),
    ("openai-gpt-oss-120b", ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>'),
    ("mistralai-Mistral-Nemo-Instruct-2407",
     '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "abc123def"}]<EOS>'),
])  # fmt: skip
def test_calls_of_tools_are_the_assistants_too(name, call):
    conversation = json.loads(shared("chat_templates/golden.json").read_text())["conversations"]["tool_result"]
    ends = ["<|im_end|>", "<|eot_id|>", "<|call|>", "<EOS>"]
    text, spans = render_with_mask(
        template_of(name), conversation["messages"], SPECIAL, ends=ends, tools=conversation["tools"], now=NOW
    )
    assert [text[start:stop] for start, stop in spans] == [call]


@pytest.mark.parametrize("name", ["google-gemma-4-31B-it", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"])
def test_where_a_turn_cannot_be_found_the_template_is_named(name):
    """A call without words after a prompt that offers thoughts: neither comparison shows where it begins."""
    conversation = json.loads(shared("chat_templates/golden.json").read_text())["conversations"]["tool_result"]
    with pytest.raises(BadInput, match=re.escape(name)) as caught:
        render_with_mask(template_of(name), conversation["messages"], SPECIAL, name=name, tools=conversation["tools"], now=NOW)
    assert "message 1" in str(caught.value)
    assert "{% generation %}" in str(caught.value.hint)


# ---- templates that say it themselves


def test_marks_of_the_template_count():
    messages = [*HI, {"role": "assistant", "content": "yö 🎉"}, *HI, {"role": "assistant", "content": ""}]
    text, spans = render_with_mask(MARKED, messages, SPECIAL)
    assert text == "[user]hi[assistant]yö 🎉<EOS>[user]hi[assistant]<EOS>" == render(MARKED, messages, SPECIAL)
    assert [text[start:stop] for start, stop in spans] == ["yö 🎉<EOS>", "<EOS>"]
    assert render_with_mask(MARKED, HI, SPECIAL) == ("[user]hi", [])


def test_a_word_in_a_comment_is_no_mark():
    """SmolLM3 has the word in a comment, and no tags."""
    template = "{# generation prompt #}" + PLAIN
    _, spans = render_with_mask(template, TALK, SPECIAL)
    assert len(spans) == 2


# ---- tokens at the edges


def test_a_token_that_holds_prompt_and_answer_is_cut():
    """`: B` would be joined: the prompt ends with the colon, and is encoded alone when the model is asked."""
    tokenizer = tokenizer_for(PLAIN)
    assert masked_runs(tokenizer, TALK) == [" Blue: <b>é</b>\n\n", " Red it is.\n\n"]
    glued = PLAIN.replace("{{ m.role }}: {{", "{{ m.role }}:{{").replace("\n\n", "")
    messages = [*HI, {"role": "assistant", "content": "//x"}]
    ids, mask = encode_with_mask(tokenizer_for(glued), messages)
    assert tokenizer.decode([token for token, is_masked in zip(ids, mask) if is_masked]) == "//x"
    whole = tokenizer.encode(render(glued, messages, SPECIAL))
    assert tokenizer.encode("://")[0] in whole  # the joined token, were it not cut
    assert ids != whole


@pytest.mark.parametrize("name", ["byte", "stories260k", "bert_uncased"])
def test_masks_on_other_kinds_of_tokenizers(name):
    spec = {"byte": "byte", "stories260k": "models/stories260k", "bert_uncased": "tokenizers/bert_uncased_vocab.txt"}[
        name
    ]
    tokenizer = load_tokenizer(spec if name == "byte" else shared(spec))
    tokenizer.chat_templates = {
        "default": "{% for m in messages %}{{ m.role }}\n{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant\n{% endif %}"
    }
    messages = [*HI, {"role": "assistant", "content": "once upon"}, *HI, {"role": "assistant", "content": "a time"}]
    assert [text.strip() for text in masked_runs(tokenizer, messages)] == ["once upon", "a time"]


def test_blanks_swallowed_by_a_special_token_cut_nothing():
    """Phi 3 strips what follows its special tokens: the line after the end of a turn belongs to the token."""
    tokenizer = tokenizer_for(
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    content = json.loads(tokenizer._text)
    for place, name in enumerate(("<|end|>", "<|assistant|>", "<|user|>")):
        token = {"id": 49_152 + place, "content": name, "special": True, "rstrip": True}
        content["added_tokens"].append(dict.fromkeys(("single_word", "lstrip", "normalized"), False) | token)
    tokenizer = FastTokenizer(json.dumps(content), tokenizer.config, Path("tokenizer.json"))
    assert masked_runs(tokenizer, TALK) == ["Blue: <b>é</b><|end|>", "Red it is.<|end|>"]
    ids, _ = encode_with_mask(tokenizer, TALK)
    assert ids == tokenizer.encode(render(tokenizer.chat_templates["default"], TALK, SPECIAL), special=True)


def test_a_mask_of_nothing_is_an_error():
    with pytest.raises(BadInput, match="assistant"):
        encode_with_mask(tokenizer_for(PLAIN), HI)
    with pytest.raises(BadInput, match="no chat template"):
        encode_with_mask(load_tokenizer("byte"), TALK)
