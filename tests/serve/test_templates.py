"""What a client may say about the template of a chat: the prompt is what transformers renders, on both routes."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest
from serve.conftest import TEMPLATE, inside, serving

from argosy.data.chat import template
from argosy.data.tokenizers.byte import ByteTokenizer
from argosy.data.tokenizers.config import TokenizerConfig
from argosy.infer.lm import LM
from argosy.serve.app import App

Ask = Callable[..., httpx.Response]
HI = [{"role": "user", "content": "hi"}]
BEGUN = [*HI, {"role": "assistant", "content": "It is "}]


def prompts(ask: Ask, **body: Any) -> str:
    """The prompt that both routes make of a body."""
    tokenized = ask("POST", "/tokenize", json={"messages": HI} | body)
    assert tokenized.status_code == 200, tokenized.text
    answer = ask("POST", "/v1/chat/completions", json={"messages": HI, "max_tokens": 1, "return_token_ids": True} | body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["prompt_token_ids"] == tokenized.json()["tokens"]
    return ByteTokenizer().decode(tokenized.json()["tokens"], skip_special=False)


@pytest.mark.parametrize(
    "body, prompt",
    [
        ({}, "<user>hi<assistant>"),
        ({"add_generation_prompt": False}, "<user>hi"),
        ({"messages": BEGUN, "add_generation_prompt": False}, "<user>hi<assistant>It is "),
        ({"messages": BEGUN, "add_generation_prompt": False, "continue_final_message": True}, "<user>hi<assistant>It is "),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "<user>hi!<assistant>"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "<user>hi<assistant>"),
        ({"documents": [{"title": "a", "text": "b"}, {"title": "c"}]}, "<user>hi(a)(c)<assistant>"),
        ({"documents": []}, "<user>hi<assistant>"),
        ({"add_special_tokens": False}, "<user>hi<assistant>"),
    ],
)
def test_options_make_the_prompt(ask: Ask, body: dict[str, Any], prompt: str):
    assert prompts(ask, **body) == prompt


def asking(service: Any) -> Ask:
    return lambda method, path, **kwargs: inside(App(service).asgi, lambda client: client.request(method, path, **kwargs))


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
        info = asking(service)("GET", "/tokenizer_info").json()
        assert info == {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": False, "chat_template": TEMPLATE}
    with serving(replace(lm, tokenizer=None)) as service:
        assert asking(service)("GET", "/tokenizer_info").status_code == 404


# As Qwen 2.5's: no role but these, one system message at the beginning, and no tools.
STRICT = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] or (m.role == 'system' and loop.first) %}<{{ m.role }}>"
    "{{ m.content }}</>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "hi", "parameters": {"type": "object", "properties": {}}}}
ROUTES = ("/tokenize", "/v1/chat/completions", "/v1/messages/count_tokens", "/v1/messages", "/v1/responses")


@pytest.fixture(scope="module")
def strict(lm: LM) -> Iterator[Ask]:
    tokenizer = ByteTokenizer(TokenizerConfig(templates={"default": STRICT}))
    with serving(LM(lm.config, lm.module, tokenizer)) as service:
        yield asking(service)


def body_of(path: str, messages: list[dict[str, Any]], tools: bool = False) -> dict[str, Any]:
    """A request to any route that renders conversations."""
    body: dict[str, Any] = {"input" if path.endswith("responses") else "messages": messages}
    if path == "/v1/messages":
        body["max_tokens"] = 1
    if tools:
        flat = {"/v1/responses": {"type": "function", **TOOL["function"]}}
        anthropic = {"name": "hi", "input_schema": {"type": "object", "properties": {}}}
        body["tools"] = [flat.get(path) or (anthropic if "/messages" in path else TOOL)]
    return body


@pytest.mark.parametrize("path", ROUTES)
def test_what_a_template_leaves_out_is_refused_on_every_route(strict: Ask, path: str):
    answer = strict("POST", path, json=body_of(path, HI, tools=True))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "the chat template of this model leaves out the tool `hi`"
    answer = strict("POST", path, json=body_of(path, [*HI, {"role": "system", "content": "hi"}, *HI]))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "the chat template of this model leaves out a message of role `system`"


def test_a_refusal_names_the_field_of_its_route(strict: Ask):
    for path in ("/v1/chat/completions", "/v1/responses"):
        assert strict("POST", path, json=body_of(path, HI, tools=True)).json()["error"]["param"] == "tools"
    later = [*HI, {"role": "system", "content": "hi"}, *HI]
    params = [strict("POST", p, json=body_of(p, later)).json()["error"]["param"] for p in ("/tokenize", "/v1/responses")]
    assert params == ["messages", "input"]
    answer = strict("POST", "/tokenize", json={"messages": HI, "documents": [{"text": "b"}]})
    assert answer.json()["error"]["param"] == "documents"
    answer = strict("POST", "/tokenize", json={"messages": HI, "chat_template_kwargs": {"enable_thinking": False}})
    assert "does not read `enable_thinking`" in answer.json()["error"]["message"]


def test_a_developers_message_is_in_the_prompt(strict: Ask):
    developer = [{"role": "developer", "content": "be brief"}, *HI]
    assert prompts(strict, messages=developer) == "<system>be brief</><user>hi</><assistant>"
    both = [{"role": "system", "content": "be kind"}, *developer]
    assert prompts(strict, messages=both) == "<system>be kind\n\nbe brief</><user>hi</><assistant>"


def test_an_answer_continues_the_assistants_last_message(strict: Ask):
    """As Anthropic's API documents it; OpenAI's open a new message."""
    begun = [*HI, {"role": "assistant", "content": [{"type": "text", "text": "It is"}]}]
    counted = strict("POST", "/v1/messages/count_tokens", json={"messages": begun}).json()["input_tokens"]
    assert counted == len("<user>hi</><assistant>It is")
    answer = strict("POST", "/v1/messages", json={"messages": begun, "max_tokens": 1}).json()
    assert answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"] == counted
    opened = strict("POST", "/v1/messages/count_tokens", json={"messages": [*begun, *HI]}).json()["input_tokens"]
    assert opened == len("<user>hi</><assistant>It is</><user>hi</><assistant>")
    call = {"type": "tool_use", "id": "a", "name": "hi", "input": {}}
    refused = strict("POST", "/v1/messages", json={"messages": [*HI, {"role": "assistant", "content": [call]}], "max_tokens": 1})
    assert refused.status_code == 400
    assert "its result is missing" in refused.json()["error"]["message"]


@pytest.mark.parametrize("from_model", [True, False], ids=["the model's", "the client's"])
def test_a_slow_template_delays_nobody_else(lm: LM, from_model: bool, monkeypatch: pytest.MonkeyPatch):
    """Here a conversation is rendered until the others have been answered: those with the model's template while three of it take
    their time, or however many with a template of their own."""
    answered, renders = threading.Event(), template.all_rendered

    def slowly(jobs: Sequence[template.RenderJob], *rest: Any) -> Any:
        if jobs[0].messages[0]["content"] == "slow":
            assert answered.wait(60), "the others wait"
        return renders(jobs, *rest)

    monkeypatch.setattr(template, "all_rendered", slowly)

    async def go(client: httpx.AsyncClient) -> None:
        async def send(content: str) -> int:
            body: dict[str, Any] = {"messages": [{"role": "user", "content": content}]}
            if content == "slow" and not from_model:
                body["chat_template"] = TEMPLATE
            return (await client.post("/tokenize", json=body)).status_code

        slow = [asyncio.create_task(send("slow")) for _ in range(3 if from_model else 6)]
        await asyncio.sleep(0.05)
        assert await asyncio.gather(*(send("quick") for _ in range(4))) == [200] * 4
        assert not any(task.done() for task in slow)
        answered.set()
        assert await asyncio.gather(*slow) == [200] * len(slow)

    with serving(lm, templates=True) as service:
        inside(App(service).asgi, go)
