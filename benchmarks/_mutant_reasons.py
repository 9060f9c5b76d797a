"""Changes of the core that no test need notice, with the reasons."""

from __future__ import annotations

# By file below `atom/`, function, what is changed, and into what.
_REASONS: dict[tuple[str, str, str, str], str] = {
    (
        "model_engine/scheduler.py",
        "Scheduler._schedule_running",
        "plan.budget > 0",
        "(plan.budget >= 0)",
    ): "one token of the budget is left for each later sequence, so it is never used up before",
    (
        "model_engine/scheduling/kv_cache_manager.py",
        "KVCacheManager.grow",
        "held * self._pool.block_size >= num_tokens + self._num_reserved",
        "(held * self._pool.block_size > num_tokens + self._num_reserved)",
    ): "a short way: otherwise no block is missing, and the answer is the same",
    (
        "kv_cache/block_tables.py",
        "StepTables.select",
        "self._held = wanted",
        "pass",
    ): "it saves a copy of what is there already",
    (
        "model_engine/sequence.py",
        "Sequence.cut_for_states",
        "start < end < start + count",
        "(start <= end < start + count)",
    ): "an end is taken out by the step that reaches it, so none is where a step starts",
}


def reason_of(path: str, function: str, before: str, after: str) -> str | None:
    """Why nothing that could be seen depends on a change; None where a test is missing."""
    key = (path.removeprefix("atom/"), function, _line(before), _line(after))
    return _REASONS.get(key)


def _line(text: str) -> str:
    return " ".join(text.split())
