"""What acceptance.py lets take turns: engines in this process, or servers."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import httpx
from _prometheus import drafts_between, scrape_spec_decode

from atom.model_engine.arg_utils import EngineOptions, speculation_of
from atom.sampling_params import SamplingParams
from atom.stats import SpecDecodeStats, total

if TYPE_CHECKING:
    from atom.outputs import RequestOutput

Conversation = list[dict[str, Any]]

# With the space before it, so that equal words are equal texts.
_WORD = re.compile(r"\s*\S+|\s+")


@dataclass(frozen=True)
class Sampling:
    """How one prompt is answered."""

    temperature: float
    seed: int
    max_tokens: int
    top_p: float = 1.0


@dataclass(frozen=True)
class Batch:
    """Answers to prompts that were sent together.

    Attributes:
        texts: one per prompt, as units that bigrams are counted in: token ids where they are
            known, else words.
        num_tokens: generated, per prompt.
        seconds: from sending to the last answer.
        decode_seconds: from the first token to the last; None where it cannot be seen.
        drafts: verified meanwhile.
    """

    texts: list[list[Any]]
    num_tokens: list[int]
    seconds: float
    decode_seconds: float | None
    drafts: SpecDecodeStats | None


class Arm(Protocol):
    """One way to answer; `unit` names what its texts consist of."""

    name: str
    unit: str

    def answer(self, prompts: Sequence[Conversation], sampling: Sequence[Sampling]) -> Batch:
        """Answer prompts, all at once."""

    def close(self) -> None:
        """Give everything back."""


class OfflineArm:
    """An engine in this process."""

    unit = "tokens"

    def __init__(self, name: str, options: EngineOptions) -> None:
        from atom import LLM

        self.name = name
        self._llm = LLM(**options, no_speculation=not speculation_of(options))

    def answer(self, prompts: Sequence[Conversation], sampling: Sequence[Sampling]) -> Batch:
        token_ids = [self._llm.render_chat(prompt) for prompt in prompts]
        params = [SamplingParams(**dataclasses.asdict(s)) for s in sampling]
        start = time.monotonic()
        outputs = self._llm.generate(token_ids, params, use_tqdm=False)
        seconds = time.monotonic() - start
        texts = [output.outputs[0].token_ids for output in outputs]
        return Batch(
            texts=texts,
            num_tokens=[len(text) for text in texts],
            seconds=seconds,
            decode_seconds=_decode_seconds(outputs),
            drafts=total(o.spec_decode for o in outputs if o.spec_decode is not None),
        )

    def close(self) -> None:
        self._llm.shutdown()


def _decode_seconds(outputs: Sequence[RequestOutput]) -> float:
    first = [output.metrics.first_token_time for output in outputs]
    last = [output.metrics.last_token_time for output in outputs]
    return max(t for t in last if t is not None) - min(t for t in first if t is not None)


class ServerArm:
    """An OpenAI-compatible server that nobody else uses meanwhile.

    Acceptance is what its /metrics counted between sending and the last answer.

    Raises:
        ConnectionError: when there is no such server.
    """

    unit = "words"

    def __init__(self, name: str, base_url: str, api_key: str | None, timeout: float) -> None:
        self.name = name
        url = base_url.rstrip("/")
        self._metrics_url = url.removesuffix("/v1") + "/metrics"
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=url + "/", headers=headers, timeout=timeout)
        try:
            listed = self._http.get("models").raise_for_status().json()
            self._model = listed["data"][0]["id"]
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            self._http.close()
            raise ConnectionError(f"no model at {url}/models: {error!r}") from error

    def answer(self, prompts: Sequence[Conversation], sampling: Sequence[Sampling]) -> Batch:
        before = self._drafts()
        start = time.monotonic()
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(self._chat, prompts, sampling))
        seconds = time.monotonic() - start
        return Batch(
            texts=[_WORD.findall(text) for text, _ in answers],
            num_tokens=[number for _, number in answers],
            seconds=seconds,
            decode_seconds=None,
            drafts=drafts_between(before, self._drafts()),
        )

    def _drafts(self) -> SpecDecodeStats | None:
        try:
            return scrape_spec_decode(self._http, self._metrics_url)
        except httpx.HTTPStatusError:
            return None  # a server without metrics

    def _chat(self, messages: Conversation, sampling: Sampling) -> tuple[str, int]:
        body = {"model": self._model, "messages": messages, **dataclasses.asdict(sampling)}
        response = self._http.post("chat/completions", json=body)
        if response.status_code != 200:
            raise ConnectionError(f"HTTP {response.status_code}: {response.text[:300]}")
        answer = response.json()
        text = answer["choices"][0]["message"]["content"] or ""
        return text, answer["usage"]["completion_tokens"]

    def close(self) -> None:
        self._http.close()
