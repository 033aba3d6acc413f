"""Writes responses of /v1/responses: output items, and their stream events."""

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from argosy.infer.prompt_logprobs import PromptScores
from argosy.serve.openai.response_store import ResponseStore, StoredResponse
from argosy.serve.response.choice import ChoicePiece, ScoredToken, TokenNames
from argosy.serve.response.parsing import CompletionParts
from argosy.serve.response.writer import Documents, GenerationJob
from argosy.serve.service import Service
from argosy.web.errors import ApiError

# Item type -> type of its content part, and prefix of its text events.
PARTS = {"reasoning": ("reasoning_text", "reasoning_text"), "message": ("output_text", "output_text")}
IDS = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_"}


class ResponseWriter:
    """Writes one response.

    Args:
        fields: the fields of the request, which the response repeats.
        messages: the conversation before the completion, without the instructions.
        store: the store in which to keep the response; None: it is not kept.
    """

    prefix, named = "resp_", True

    def __init__(
        self, service: Service, fields: Mapping[str, Any], messages: Sequence[dict[str, Any]], store: ResponseStore | None
    ):
        self.service, self.fields, self.messages, self.store = service, fields, messages, store
        self.scores: Sequence[PromptScores] = ()
        self.names = TokenNames(service.lm.tokenizer, False)
        self.output: list[dict[str, Any]] = []
        self._sent = 0
        # Whether the last item is incomplete; whether log-probabilities are requested; and tokens with these that no event has sent
        # yet.
        self._open = False
        self._scores = "message.output_text.logprobs" in fields["include"]
        self._waiting: list[ScoredToken] = []

    # ---------------------------------------------------------------- documents

    def whole(self, job: GenerationJob) -> dict[str, Any]:
        reader, finish = job.readers[0], job.choices[0].finish
        self._items(CompletionParts(reader.thought, reader.text, reader.calls, reader.tokens), finish)
        return self._finished(job)

    def opening(self, job: GenerationJob) -> Documents:
        started = self.document(job, "in_progress")
        return [self._event(f"response.{name}", response=started) for name in ("created", "in_progress")]

    def step(self, job: GenerationJob, place: int, piece: ChoicePiece, parts: CompletionParts) -> Documents:
        return self._items(parts, piece.finish)

    def closing(self, job: GenerationJob) -> Documents:
        document = self._finished(job)
        return [self._event(f"response.{document['status']}", response=document)]

    def failure(self, job: GenerationJob, error: ApiError) -> dict[str, Any]:
        return self._event("response.failed", response=self.failed(job, error))

    def failed(self, job: GenerationJob, error: ApiError) -> dict[str, Any]:
        """The response to a request that failed while running."""
        return self.document(job, "failed") | {"error": {"code": "server_error", "message": error.message}}

    def _finished(self, job: GenerationJob) -> dict[str, Any]:
        """The final response with its usage. It is put into the store, if there is one."""
        finish, counts = job.choices[0].finish, job.counts()
        cut = {"length": "incomplete", "repetition": "incomplete", "abort": "cancelled"}
        status = (cut | {"blocked": "failed"}).get(finish or "", "completed")
        document = self.document(job, status)
        document["usage"] = {
            "input_tokens": counts.prompt,
            "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
            "output_tokens": counts.completion,
            "output_tokens_details": {"reasoning_tokens": counts.thinking},
            "total_tokens": counts.prompt + counts.completion,
        }
        if status == "completed":
            document["completed_at"] = int(time.time())
        elif status == "incomplete":
            document["incomplete_details"] = {"reason": "max_output_tokens"}
        elif status == "failed":
            problem = "the format and the request's other fields together allow no further token"
            document["error"] = {"code": "server_error", "message": problem}
        if self.store is not None:
            reader = job.readers[0]
            message: dict[str, Any] = {"role": "assistant", "content": reader.text}
            message |= {"reasoning": reader.thought} if reader.thought else {}
            message |= {"tool_calls": reader.calls} if reader.calls else {}
            self.store.put(StoredResponse(document, [*self.messages, message]))
        return document

    def document(self, job: GenerationJob, status: str) -> dict[str, Any]:
        """The response so far, as a JSON object."""
        fields, defaults = self.fields, self.service.defaults
        return {
            "id": job.id, "object": "response", "created_at": job.created, "status": status, "error": None,
            "incomplete_details": None, "model": job.model, "output": list(self.output), "usage": None,
            "background": fields["background"], "instructions": fields["instructions"],
            "max_output_tokens": fields["max_output_tokens"], "max_tool_calls": None, "metadata": fields["metadata"],
            "parallel_tool_calls": fields["parallel_tool_calls"], "previous_response_id": fields["previous_response_id"],
            "reasoning": fields["reasoning"], "service_tier": "default", "store": self.store is not None,
            "temperature": _field(fields, "temperature", defaults), "top_p": _field(fields, "top_p", {"top_p": 1.0} | defaults),
            "text": {"format": fields["text"]["format"] or {"type": "text"}}, "tool_choice": fields["tool_choice"] or "auto",
            "tools": fields["tools"], "top_logprobs": fields["top_logprobs"] or 0, "truncation": "disabled",
        }  # fmt: skip

    # ---------------------------------------------------------------- items

    def _items(self, parts: CompletionParts, finish: str | None) -> Documents:
        """Adds new parts of the completion to the output. Returns their stream events."""
        events = self._add_text("reasoning", parts.thought) if parts.thought else []
        self._waiting += parts.tokens if self._scores else ()
        if parts.text:
            events += self._add_text("message", parts.text)
        if finish is None:
            return events
        if not (self.output or parts.calls):
            # An empty answer is an empty message.
            events += self._start("message")
        events += self._end("incomplete" if finish == "length" else "completed")
        for call in parts.calls:
            events += self._called(call)
        return events

    def _add_text(self, kind: str, text: str) -> list[dict[str, Any]]:
        """Adds text to a reasoning item or a message."""
        events = []
        if not self._open or self.output[-1]["type"] != kind:
            events += [*self._end("completed"), *self._start(kind)]
        part = self.output[-1]["content"][0]
        part["text"] += text
        more = {}
        if kind == "message":
            more = {"logprobs": [self._scored(scored) for scored in self._waiting]}
            part["logprobs"] += more["logprobs"]
            self._waiting = []
        return [*events, self._of_part(f"{PARTS[kind][1]}.delta", delta=text, **more)]

    def _start(self, kind: str) -> list[dict[str, Any]]:
        item: dict[str, Any] = {"id": _new(IDS[kind]), "type": kind, "status": "in_progress"}
        item |= {"role": "assistant"} if kind == "message" else {"summary": []}
        more = {"annotations": [], "logprobs": []} if kind == "message" else {}
        part: dict[str, Any] = {"type": PARTS[kind][0], "text": ""} | more
        self.output.append(item | {"content": [part]})
        self._open = True
        added = self._event(
            "response.output_item.added", output_index=len(self.output) - 1, item=item | {"content": []}
        )
        return [added, self._of_part("content_part.added", part=dict(part))]

    def _end(self, status: str) -> list[dict[str, Any]]:
        """Completes the open item, if any."""
        if not self._open:
            return []
        item, self._open = self.output[-1], False
        item["status"] = status
        part, more = item["content"][0], {}
        if item["type"] == "message":
            # The end token has no text, and so no delta.
            part["logprobs"] += [self._scored(scored) for scored in self._waiting]
            more, self._waiting = {"logprobs": part["logprobs"]}, []
        return [
            self._of_part(f"{PARTS[item['type']][1]}.done", text=part["text"], **more),
            self._of_part("content_part.done", part=part),
            self._event("response.output_item.done", output_index=len(self.output) - 1, item=item),
        ]

    def _called(self, call: Mapping[str, Any]) -> list[dict[str, Any]]:
        function = call["function"]
        names = {"call_id": call["id"], "name": function["name"]}
        item = {"id": _new(IDS["function_call"]), "type": "function_call", "status": "completed"} | names
        self.output.append(item | {"arguments": function["arguments"]})
        place = {"item_id": item["id"], "output_index": len(self.output) - 1}
        started, arguments = item | {"status": "in_progress", "arguments": ""}, function["arguments"]
        return [
            self._event("response.output_item.added", output_index=place["output_index"], item=started),
            self._event("response.function_call_arguments.delta", **place, delta=arguments),
            self._event("response.function_call_arguments.done", **place, name=function["name"], arguments=arguments),
            self._event("response.output_item.done", output_index=place["output_index"], item=self.output[-1]),
        ]

    def _of_part(self, name: str, /, **more: Any) -> dict[str, Any]:
        """An event about the content part of the last item."""
        place = {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1, "content_index": 0}
        return self._event(f"response.{name}", **place, **more)

    def _event(self, name: str, /, **more: Any) -> dict[str, Any]:
        self._sent += 1
        return {"type": name, "sequence_number": self._sent - 1, **more}

    def _scored(self, scored: ScoredToken) -> dict[str, Any]:
        top = [self._token_logprob(*both) for both in scored.likeliest]
        return self._token_logprob(scored.token, scored.logprob) | {"top_logprobs": top}

    def _token_logprob(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.names(token), "logprob": logprob, "bytes": list(self.names.bytes(token))}


def _field(fields: Mapping[str, Any], name: str, defaults: Mapping[str, Any]) -> Any:
    return defaults.get(name) if fields[name] is None else fields[name]


def _new(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"
