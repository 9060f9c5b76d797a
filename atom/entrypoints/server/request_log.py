"""A line of the log for each prompt that was answered: who, how much, how long; never texts."""

from __future__ import annotations

import logging
from typing import Any

from atom.logs import FIELDS
from atom.text.observer import FinishedRequest, NullObserver

logger = logging.getLogger("atom.requests")


class RequestLog(NullObserver):
    """Says it of every request that ends."""

    def on_request_finished(self, request: FinishedRequest) -> None:
        times = request.metrics
        fields: dict[str, Any] = {
            "request_id": request.caller.request_id,
            "api_key": request.caller.key,
            "finish_reason": request.finish_reason,
            "prompt_tokens": request.num_prompt_tokens,
            "cached_tokens": request.num_cached_tokens,
            "completion_tokens": request.num_output_tokens,
            "queue_seconds": _between(times.arrival_time, times.first_scheduled_time),
            "first_token_seconds": _between(times.arrival_time, times.first_token_time),
            "seconds": _between(times.arrival_time, times.finished_time),
            "preemptions": times.num_preemptions,
        }
        logger.info("a request ended", extra={FIELDS: fields})


def _between(start: float, end: float | None) -> float | None:
    return None if end is None else round(end - start, 6)
