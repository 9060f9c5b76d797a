"""The answers of `/v1/responses`: chat's stream as output items and their events."""

from __future__ import annotations

from typing import Any

from atom.entrypoints.chat.generation import Usage
from atom.entrypoints.chat.translation import Block, Event, Translation
from atom.entrypoints.http.errors import ApiError

ITEM_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


class ResponseTranslation(Translation):
    """A response and its events (OpenAI's Responses API, `response.*`).

    Args:
        fields: what the response says of its request, `id` among it.
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__()
        self._fields = fields
        self._sequence_number = 0
        self._usage: dict[str, Any] | None = None

    def start(self, usage: Usage) -> list[Event]:
        del usage
        response = self._response("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def whole(self) -> dict[str, Any]:
        if self.finish_reason == "length":
            details = {"reason": "max_output_tokens"}
            return {**self._response("incomplete"), "incomplete_details": details}
        # The API has no reason for a model that ended within a call.
        return self._response("incomplete" if self.ends_in_call else "completed")

    def fail(self, error: ApiError) -> list[Event]:
        said = {"code": "server_error", "message": error.message}
        failed = {**self._response("failed"), "error": said}
        return [self._event("response.failed", response=failed)]

    def _finished(self, usage: Usage, num_reasoning_tokens: int) -> list[Event]:
        self._usage = _response_usage(usage, num_reasoning_tokens)
        response = self.whole()
        return [self._event(f"response.{response['status']}", response=response)]

    def _block_opened(self, block: Block) -> list[Event]:
        item = self._item(block, "in_progress")
        added = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return [added]
        return [added, self._part_event("response.content_part.added", block, part=_part(block))]

    def _block_grown(self, block: Block, piece: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        if block.kind == "call":
            name = "response.function_call_arguments.delta"
            return [self._item_event(name, block, delta=piece)]
        if block.kind == "reasoning":
            return [self._part_event("response.reasoning_text.delta", block, delta=piece)]
        spelled = [_logprob(row) for row in logprobs]
        name = "response.output_text.delta"
        return [self._part_event(name, block, delta=piece, logprobs=spelled)]

    def _block_closed(self, block: Block) -> list[Event]:
        item = self._item(block, "completed" if block.complete else "incomplete")
        done = {"output_index": block.index, "item": item}
        if block.kind == "call":
            name = "response.function_call_arguments.done"
            said = [self._item_event(name, block, name=block.name, arguments=block.text)]
        elif block.kind == "reasoning":
            said = [self._part_event("response.reasoning_text.done", block, text=block.text)]
        else:
            logprobs = [_logprob(row) for row in block.logprobs]
            name = "response.output_text.done"
            said = [self._part_event(name, block, text=block.text, logprobs=logprobs)]
        if block.kind != "call":
            said.append(self._part_event("response.content_part.done", block, part=_part(block)))
        return [*said, self._event("response.output_item.done", **done)]

    def _response(self, status: str) -> dict[str, Any]:
        """The response as far as it is known; items only once it has ended."""
        items: list[dict[str, Any]] = []
        if status != "in_progress":
            items = [
                self._item(block, "completed" if block.complete else "incomplete")
                for block in self.blocks
            ]
        return {**self._fields, "status": status, "output": items, "usage": self._usage}

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(block), "status": status}
        if block.kind == "call":
            item |= {"type": "function_call", "call_id": block.call_id, "name": block.name}
            return {**item, "arguments": block.text}
        content = [] if status == "in_progress" else [_part(block)]
        if block.kind == "reasoning":
            item |= {"type": "reasoning", "summary": [], "encrypted_content": None}
        else:
            item |= {"type": "message", "role": "assistant"}
        return {**item, "content": content}

    def _item_id(self, block: Block) -> str:
        _, _, unique = self._fields["id"].partition("_")
        return f"{ITEM_PREFIXES[block.kind]}_{unique}{block.index:04d}"

    def _event(self, kind: str, /, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return event

    def _item_event(self, kind: str, block: Block, /, **fields: Any) -> Event:
        where = {"output_index": block.index, "item_id": self._item_id(block)}
        return self._event(kind, **where, **fields)

    def _part_event(self, kind: str, block: Block, /, **fields: Any) -> Event:
        return self._item_event(kind, block, content_index=0, **fields)


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    logprobs = [_logprob(row) for row in block.logprobs]
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}


def _logprob(row: dict[str, Any]) -> dict[str, Any]:
    """Chat's spelling of a token's logprobs; the fields are the same."""
    return {name: row[name] for name in ("token", "logprob", "bytes", "top_logprobs")}


def _response_usage(usage: Usage, num_reasoning_tokens: int) -> dict[str, Any]:
    counts = usage.as_dict()
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": counts["total_tokens"],
    }
