"""Changes of the core that no test need notice, with the reasons."""

from __future__ import annotations

_FALSE = "callers only ask whether it is true, which None is as little as false"
_COST = "how much of the cache is looked at in a step"
_HASH = "a hash of a byte or bit more or fewer tells the same texts apart"
_NO_CHAIN = "it is what one of 2**64 texts has in the place of 0, which no test can find"

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
        "StepTablesInPlace.select",
        "self._held = wanted",
        "pass",
    ): "it saves a copy of what is there already",
    (
        "model_engine/sequence.py",
        "Sequence.cut_for_states",
        "start < end < start + count",
        "(start <= end < start + count)",
    ): "an end is taken out by the step that reaches it, so none is where a step starts",
    ("kv_cache/canary.py", "", "16", "(17)"): _COST,
    ("kv_cache/canary.py", "", "16", "(15)"): _COST,
    ("kv_cache/canary.py", "", "8", "(9)"): _COST,
    ("kv_cache/canary.py", "", "8", "(7)"): _COST,
    ("kv_cache/canary.py", "", "0", "(1)"): "another seed chooses other slots, as many",
    ("kv_cache/canary.py", "", "0", "(-1)"): "another seed chooses other slots, as many",
    ("kv_cache/canary.py", "_watch", "8", "(9)"): _HASH,
    ("kv_cache/canary.py", "_watch", "8", "(7)"): _HASH,
    ("kv_cache/canary.py", "KVCanary._digests", "8", "(9)"): _HASH,
    ("kv_cache/canary.py", "KVCanary._digests", "8", "(7)"): _HASH,
    (
        "kv_cache/canary.py",
        "KVCanary._digests",
        "0",
        "(-1)",
    ): "all parts of a cache are on the same device",
    (
        "kv_cache/canary.py",
        "KVCanary._check_block",
        "1",
        "(2)",
    ): "what follows from a wrong read in the same sequence is not told",
    ("kv_cache/canary.py", "_chain", "64", "(63)"): _HASH,
    ("kv_cache/canary.py", "_chain", "1", "(2)"): _NO_CHAIN,
    ("kv_cache/canary.py", "_chain", "1", "(0)"): _NO_CHAIN,
    (
        "kv_cache/canary.py",
        "_chain",
        "hash((before, token)) % (1 << 64) or 1",
        "(hash((before, token)) % (1 << 64))",
    ): _NO_CHAIN,
    (
        "model_loader/weights.py",
        "_read",
        "os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)",
        "pass",
    ): "advice to the system, which reads the file no sooner than it likes",
    (
        "model_ops/kernels/torch/sampling.py",
        "",
        "17",
        "(18)",
    ): "the size of a chunk, on which no result depends",
    (
        "sampling/synthetic.py",
        "SyntheticAcceptance.counts",
        "(bits >> np.uint64(11)) < np.uint64(self._share * 2**53)",
        "(bits >> np.uint64(11) <= np.uint64(self._share * 2 ** 53))",
    ): "a probability that is larger by 2**-53",
    (
        "entrypoints/http/connection.py",
        "BoundedProtocol._stop_watching",
        "self._unread = None",
        "pass",
    ): "to cancel a timer once more does nothing",
    (
        "spec_decode/grammar.py",
        "_Walker.offer",
        "0",
        "(-1)",
    ): "one token is asked for, so the first is the last",
    (
        "spec_decode/grammar.py",
        "",
        "8",
        "(9)",
    ): "how much text is foreseen; the drafts made of it are cut to what is asked for",
    ("structured_output/schema/disjoint.py", "_exclude", "return False", "return None"): _FALSE,
    (
        "model_engine/scheduling/windows.py",
        "WindowedKVCacheManager.free",
        "0",
        "(-1)",
    ): "a sequence that runs again restarts first, which makes its window empty",
    (
        "sampling/sampler.py",
        "Sampler.lay_out",
        "self._synthetic is not None and layout.most",
        "(self._synthetic is not None)",
    ): "without drafts none is accepted, whatever their share",
    (
        "structured_output/schema/patterns.py",
        "_Parser._class",
        "0",
        "(1)",
    ): "both ends of a range of one character are the same",
    (
        "entrypoints/parsing/deltas.py",
        "",
        "True",
        "(False)",
    ): "nothing writes to it, as the type checker sees, or asks whether it may",
    (
        "entrypoints/parsing/calls/parameter_schemas.py",
        "ParameterSchemas.types",
        "0",
        "(-1)",
    ): "one level more of schemas is looked through, of as many as nobody writes",
    (
        "entrypoints/http/json_budget.py",
        "",
        "16",
        "(15)",
    ): "the size of a slice, on which no count depends",
}


def reason_of(path: str, function: str, before: str, after: str) -> str | None:
    """Why nothing that could be seen depends on a change; None where a test is missing."""
    key = (path.removeprefix("atom/"), function, _line(before), _line(after))
    return _REASONS.get(key)


def _line(text: str) -> str:
    return " ".join(text.split())
