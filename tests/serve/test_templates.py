"""What a client may say about the template of a chat: the prompt is what transformers renders, on both routes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from serve.conftest import TEMPLATE, inside, serving

from argosy.data.tokenizers.byte import ByteTokenizer
from argosy.data.tokenizers.config import TokenizerConfig
from argosy.infer.lm import LM
from argosy.serve.app import App

Ask = Callable[..., httpx.Response]
HI = [{"role": "user", "content": "hi"}]
BEGUN = [*HI, {"role": "assistant", "content": "It is "}]


def prompts(ask: Ask, **body: Any) -> str:
    """The prompt that both routes make of a body."""
    found = ask("POST", "/tokenize", json={"messages": HI} | body)
    assert found.status_code == 200, found.text
    answer = ask("POST", "/v1/chat/completions", json={"messages": HI, "max_tokens": 1, "return_token_ids": True} | body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["prompt_token_ids"] == found.json()["tokens"]
    return ByteTokenizer().decode(found.json()["tokens"], skip_special=False)


@pytest.mark.parametrize(
    "body, prompt",
    [
        ({}, "<user>hi<assistant>"),
        ({"add_generation_prompt": False}, "<user>hi"),
        ({"messages": BEGUN, "add_generation_prompt": False}, "<user>hi<assistant>It is "),
        ({"messages": BEGUN, "add_generation_prompt": False, "continue_final_message": True}, "<user>hi<assistant>It is "),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "<user>hi!<assistant>"),
        ({"chat_template_kwargs": {"enable_thinking": True, "unread": 1}}, "<user>hi<assistant>"),
        ({"documents": [{"title": "a", "text": "b"}, {"title": "c"}]}, "<user>hi(a)(c)<assistant>"),
        ({"documents": []}, "<user>hi<assistant>"),
        ({"add_special_tokens": False}, "<user>hi<assistant>"),
    ],
)
def test_options_make_the_prompt(ask: Ask, body: dict[str, Any], prompt: str):
    assert prompts(ask, **body) == prompt


def asking(service: Any) -> Ask:
    return lambda method, path, **how: inside(App(service).asgi, lambda client: client.request(method, path, **how))


def test_a_continued_message_ends_where_its_text_ends(lm: LM):
    """The default template of the tests writes nothing behind a message; this one does."""
    with serving(lm, templates=True) as service:
        ask = asking(service)
        body: dict[str, Any] = {"messages": BEGUN, "add_generation_prompt": False}
        body["chat_template"] = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
        assert prompts(ask, **body) == "[user]hi[end][assistant]It is [end]"
        assert prompts(ask, **body, continue_final_message=True) == "[user]hi[end][assistant]It is "
        body["chat_template"] = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[end]{% endfor %}"
        assert prompts(ask, **body, continue_final_message=True) == "[user]hi[end][assistant]It is"
        # What such a template does wrong is answered as it is for the model's own.
        for template in ("{{ ''.__class__.__mro__ }}", "{% for", "{{ raise_exception('no') }}"):
            answer = ask("POST", "/tokenize", json={"messages": HI, "chat_template": template})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


def test_the_first_token_comes_before_a_chat_if_asked(lm: LM):
    """As for a text, where the tokenizer adds one; a template mostly writes it itself."""
    tokenizer = ByteTokenizer(TokenizerConfig(templates={"default": TEMPLATE}, adds_bos=True))
    with serving(replace(lm, tokenizer=tokenizer)) as service:
        ask = asking(service)
        assert prompts(ask) == "<user>hi<assistant>"
        with_first = ask("POST", "/tokenize", json={"messages": HI, "add_special_tokens": True}).json()["tokens"]
        assert with_first == [tokenizer.bos, *b"<user>hi<assistant>"]
        for more, expected in ({}, [tokenizer.bos, *b"hi"]), ({"add_special_tokens": False}, [*b"hi"]):
            assert ask("POST", "/tokenize", json={"prompt": "hi"} | more).json()["tokens"] == expected


def test_clients_can_read_the_special_tokens_and_the_template(lm: LM):
    """What lm-evaluation-harness asks for before it tokenizes over HTTP."""
    tokenizer = ByteTokenizer(TokenizerConfig(roles={"eos_token": "<eos>"}, templates={"default": TEMPLATE}))
    with serving(replace(lm, tokenizer=tokenizer)) as service:
        found = asking(service)("GET", "/tokenizer_info").json()
        assert found == {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": False, "chat_template": TEMPLATE}
    with serving(replace(lm, tokenizer=None)) as service:
        assert asking(service)("GET", "/tokenizer_info").status_code == 404
