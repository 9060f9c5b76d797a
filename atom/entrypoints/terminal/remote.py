"""A model behind an OpenAI-compatible server, for `atom chat --url`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

from atom.entrypoints.terminal.talk import Message, Piece, Settings

# Between two pieces of an answer; a long queue or a long prompt may take this.
TIMEOUT_SECONDS = 600.0


class RemoteModel:
    """Chats by HTTP; ATOM's servers also say how many tokens each forward gave."""

    def __init__(self, url: str, api_key: str | None, name: str | None) -> None:
        """Args:
            url: of the server, with or without `/v1`.
            name: of the model; the server's first when None.

        Raises:
            RuntimeError: when no server answers there, or it has no model.
        """
        base = url.rstrip("/")
        self._http = httpx.Client(
            base_url=base if base.endswith("/v1") else f"{base}/v1",
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(TIMEOUT_SECONDS, connect=10.0),
        )
        try:
            response = self._http.get("models")
            _raise_for_status(response)
            names = [str(model["id"]) for model in response.json()["data"]]
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise RuntimeError(f"no server answers at {url}: {error}") from error
        except (json.JSONDecodeError, LookupError, TypeError) as error:
            raise RuntimeError(f"{url} is no OpenAI-compatible server") from error
        if not names or (name is not None and name not in names):
            raise RuntimeError(f"{url} has no model {name or ''}; it has {', '.join(names)}")
        self.name = name or names[0]

    def default(self, name: str) -> str:
        del name
        return "the server's"

    def stream(self, messages: Sequence[Message], settings: Settings) -> Iterator[Piece]:
        body = {
            **{name: value for name, value in settings.items() if value is not None},
            "model": self.name,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True, "include_speculation": True},
        }
        try:
            with self._http.stream("POST", "chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                _raise_for_status(response)
                yield from _pieces(response)
        except httpx.HTTPError as error:
            raise RuntimeError(f"the connection was lost: {error}") from error


def _pieces(response: httpx.Response) -> Iterator[Piece]:
    """The answer; of a server that does not tell tokens by forward, their number comes last."""
    num_tokens = num_forwards = 0
    drafted = False
    reason: str | None = None
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line[len("data:") :].strip()
        if data == "[DONE]":
            return
        chunk: dict[str, Any] = json.loads(data)
        if "error" in chunk:
            raise RuntimeError(str(chunk["error"]["message"]))
        for choice in chunk.get("choices", ()):
            steps = choice.get("speculation", {}).get("steps", ())
            count = sum(len(step["tokens"]) for step in steps)
            num_tokens += count
            num_forwards += len(steps)
            drafted = drafted or any("num_drafts" in step for step in steps)
            reason = choice["finish_reason"] or reason
            delta = choice["delta"]
            text = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
            per_forward = num_tokens / num_forwards if drafted else None
            yield Piece(text, count, reason, per_forward)
        if usage := chunk.get("usage"):
            per_forward = num_tokens / num_forwards if drafted else None
            yield Piece("", usage["completion_tokens"] - num_tokens, reason, per_forward)
            num_tokens = usage["completion_tokens"]
    raise RuntimeError("the connection ended before the answer did")


def _raise_for_status(response: httpx.Response) -> None:
    """Raises:
    ValueError: when the request was wrong.
    RuntimeError: when the server failed, or wants another key.
    """
    if response.status_code == 200:
        return
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = f"the server answered {response.status_code}"
    if response.status_code == 401:
        raise RuntimeError(f"{message}; give --api-key, or set ATOM_API_KEY")
    raise (ValueError if 400 <= response.status_code < 500 else RuntimeError)(message)
