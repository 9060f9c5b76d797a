"""Buffers outputs for a slow reader by merging deltas."""

from __future__ import annotations

import asyncio

from atom.outputs import CompletionOutput, RequestOutput


class Mailbox:
    """The outputs of one request that its reader has not taken yet, merged into one.

    `was_read`: whether its reader has taken any.
    """

    def __init__(self) -> None:
        self.was_read = False
        self._changed = asyncio.Event()
        self._pending: RequestOutput | None = None
        self._error: Exception | None = None

    def put(self, output: RequestOutput) -> None:
        """Add a delta; the mailbox takes ownership and may modify it."""
        if self._pending is None:
            self._pending = output
        else:
            merge(self._pending, output)
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """End the request with an error, unless its final output is already here."""
        self._error = error
        self._changed.set()

    def discard(self) -> None:
        """Forget what the reader has not taken."""
        self._pending = None
        self._changed.clear()

    async def take(self) -> RequestOutput:
        """Wait for an output and return all that arrived, merged.

        Raises:
            Exception: the one given to `fail`.
        """
        await self._changed.wait()
        self._changed.clear()
        output, self._pending = self._pending, None
        if self._error is not None and (output is None or not output.finished):
            raise self._error
        assert output is not None
        self.was_read = True
        return output


def merge(earlier: RequestOutput, later: RequestOutput) -> None:
    """Append a request's later delta to an earlier one."""
    completions = {completion.index: completion for completion in earlier.outputs}
    for completion in later.outputs:
        if completion.index in completions:
            _append(completions[completion.index], completion)
        else:
            completions[completion.index] = completion
    earlier.outputs = [completions[index] for index in sorted(completions)]
    earlier.finished = later.finished
    if later.prompt_logprobs is not None:
        earlier.prompt_logprobs = later.prompt_logprobs
    earlier.num_cached_tokens = later.num_cached_tokens
    earlier.spec_decode = later.spec_decode


def _append(earlier: CompletionOutput, later: CompletionOutput) -> None:
    earlier.text += later.text
    earlier.token_ids += later.token_ids
    earlier.steps += later.steps
    if earlier.logprobs is not None and later.logprobs is not None:
        earlier.logprobs += later.logprobs
    earlier.cumulative_logprob = later.cumulative_logprob
    earlier.finish_reason = later.finish_reason
    earlier.stop_reason = later.stop_reason
