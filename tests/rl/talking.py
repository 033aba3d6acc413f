"""What tests of environments share: a table over a small model, and an engine whose tokens are written by hand."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from laws.families import CASES, noisy_model

from argosy.data.encoding import Encoding
from argosy.data.order import Order
from argosy.data.rows.prompts import Prompts
from argosy.data.sources import SourceRecord
from argosy.data.tokenizers.byte import ByteTokenizer
from argosy.data.tokenizers.config import TokenizerConfig
from argosy.infer.engine.engine import Engine
from argosy.infer.engine.request import Event
from argosy.infer.lm import LM
from argosy.infer.settings import EngineSettings
from argosy.models.parts.stack import Unroll
from argosy.rl.environments.settings import CustomEnvironment, open_table
from argosy.rl.rollouts.episodes.trajectories import EpisodeSetup

CASE = CASES["llama-plain"].model_copy(update={"vocab": 258, "context": 256})
EOS, BOS = 257, 256
CHAT = (
    "{% for m in messages %}<bos>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)


def language_model(template: str = CHAT) -> LM:
    tokenizer = ByteTokenizer(TokenizerConfig(templates={"default": template}))
    return LM(CASE, noisy_model(CASE, Unroll()), tokenizer, engine_settings=EngineSettings(slots=8, page=4))


def prompts(lm: LM, questions: Sequence[Any], **columns: Sequence[Any]) -> Prompts:
    records = []
    for i, question in enumerate(questions):
        content = {"prompt": question} if isinstance(question, str) else {"messages": question}
        records.append(SourceRecord(where=f"line {i}", **content, columns={name: items[i] for name, items in columns.items()}))
    return Prompts(records, Encoding(lm.tokenizer), Order(len(records), None), {"source": "test"})


def table(folder: Path, code: str, questions: Prompts, name: str = "Own", **settings: Any) -> EpisodeSetup:
    """A table of the class `Own` of this code. `Turn` is imported, and so are a few modules."""
    path = folder / "own.py"
    path.write_text("import os, random, time\nfrom argosy.rl.environment import Turn\n" + textwrap.dedent(code))
    return open_table(CustomEnvironment(of=f"{path}:{name}", **settings), questions, None)


def ids(text: str) -> list[int]:
    """A text as bytes; `<eos>` and `<bos>` are those tokens."""
    return ByteTokenizer().encode(text, special=True)


@dataclass
class Scripted(Engine):
    """In place of an engine: each request of a row gets the next of its texts, a token a step. requests: what was asked."""

    texts: Mapping[int, Sequence[str]]
    requests: list[Any] = field(default_factory=list)
    running: dict[int, list[int]] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=dict)

    def reset_prefix_cache(self, *, running: bool = False) -> bool:
        return not running

    @property
    def busy(self) -> bool:
        return bool(self.running)

    def add(self, request: Any) -> int:
        turn = self.asked[request.row] = self.asked.get(request.row, -1) + 1
        self.requests.append(request)
        self.running[len(self.requests)] = ids(self.texts[request.row][turn])[: request.max_tokens]
        return len(self.requests)

    def end(self, number: int) -> bool:
        return self.running.pop(number, None) is not None

    def step(self) -> list[Event]:
        events = []
        for number, remaining in list(self.running.items()):
            token = remaining.pop(0)
            reason = "stop" if token in self.requests[number - 1].stop_tokens else None if remaining else "length"
            events.append(Event(number, token, -1.0, reason, -0.5))
            if reason:
                del self.running[number]
        return events
