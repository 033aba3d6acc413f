"""Writes responses of /v1/messages: content blocks, and their stream events."""

import json
from collections.abc import Sequence
from typing import Any

from argosy.infer.prompt_logprobs import PromptScores
from argosy.serve.anthropic.blocks import tool_use_block
from argosy.serve.response.choice import ChoicePiece, CompletionChoice
from argosy.serve.response.parsing import CompletionParts, CompletionReader
from argosy.serve.response.writer import Documents, GenerationJob
from argosy.serve.service import Service
from argosy.web.errors import ApiError

PING = {"type": "ping"}
DELTAS = {"thinking": "thinking_delta", "text": "text_delta"}


class MessageWriter:
    """Writes one response."""

    prefix, named = "msg_", True

    def __init__(self, service: Service):
        self.service = service
        self.scores: Sequence[PromptScores] = ()
        # Number of blocks started in the stream, and type of the open one.
        self._begun = 0
        self._open: str | None = None

    def whole(self, job: GenerationJob) -> dict[str, Any]:
        return self._document(job, content_blocks(job.readers[0])) | stop_reason(job) | {"usage": usage(job)}

    def opening(self, job: GenerationJob) -> Documents:
        # The number of cached tokens is known only with the first token; message_delta reports it.
        document = self._document(job, []) | {"stop_reason": None, "stop_sequence": None, "usage": usage(job)}
        return [{"type": "message_start", "message": document}, PING]

    def step(self, job: GenerationJob, place: int, piece: ChoicePiece, parts: CompletionParts) -> Documents:
        events = self._add_text("thinking", parts.thought) if parts.thought else []
        events += self._add_text("text", parts.text) if parts.text else []
        if piece.finish is not None:
            events += self._stopped()
            for call in parts.calls:
                events += self._called(tool_use_block(call))
        return events

    def closing(self, job: GenerationJob) -> Documents:
        return [{"type": "message_delta", "delta": stop_reason(job), "usage": usage(job)}, {"type": "message_stop"}]

    def failure(self, job: GenerationJob, error: ApiError) -> dict[str, Any]:
        return error.anthropic()

    def _document(self, job: GenerationJob, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": job.id, "type": "message", "role": "assistant", "model": job.model, "content": content}

    def _add_text(self, kind: str, text: str) -> list[dict[str, Any]]:
        events = []
        if self._open != kind:
            events = [*self._stopped(), self._started(empty_block(kind))]
            self._open = kind
        return [*events, self._delta({"type": DELTAS[kind], kind: text})]

    def _called(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        text = json.dumps(block["input"], ensure_ascii=False)
        started = self._started(block | {"input": {}})
        return [started, self._delta({"type": "input_json_delta", "partial_json": text}), self._stop()]

    def _stopped(self) -> list[dict[str, Any]]:
        """Ends the open block, if any. Reasoning ends with an empty signature, because nothing verifies it."""
        kind, self._open = self._open, None
        signed = [self._delta({"type": "signature_delta", "signature": ""})] if kind == "thinking" else []
        return [*signed, self._stop()] if kind else []

    def _started(self, block: dict[str, Any]) -> dict[str, Any]:
        self._begun += 1
        return {"type": "content_block_start", "index": self._begun - 1, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._begun - 1, "delta": delta}

    def _stop(self) -> dict[str, Any]:
        return {"type": "content_block_stop", "index": self._begun - 1}


def empty_block(kind: str) -> dict[str, Any]:
    """An empty thinking or text block."""
    return {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})


def content_blocks(reader: CompletionReader) -> list[dict[str, Any]]:
    """The content blocks of a whole completion."""
    blocks = [empty_block(kind) | {kind: text} for kind, text in (("thinking", reader.thought), ("text", reader.text)) if text]
    return [*blocks, *map(tool_use_block, reader.calls)]


def stop_reason(job: GenerationJob) -> dict[str, Any]:
    """The fields that say why the completion ended. `blocked`, for which Anthropic's API has no value, is reported as `refusal`, and
    `repetition` as `max_tokens`."""
    choice: CompletionChoice = job.choices[0]
    stop = choice.stop_reason if choice.stop_reason in job.fields.stop else None
    # In Anthropic's API, only `max_tokens` says that a completion was cut short.
    cut = dict.fromkeys(("length", "repetition", "abort"), "max_tokens")
    reason = (cut | {"blocked": "refusal"}).get(choice.finish or "", "end_turn")
    if job.readers[0].calls and choice.finish == "stop":
        reason = "tool_use"
    return {"stop_reason": "stop_sequence" if stop is not None else reason, "stop_sequence": stop}


def usage(job: GenerationJob) -> dict[str, Any]:
    """The token counts so far. As in Anthropic's API, `input_tokens` excludes cached tokens."""
    counts = job.counts()
    return {
        "input_tokens": counts.prompt - counts.cached,
        "cache_read_input_tokens": counts.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": counts.completion,
    }
