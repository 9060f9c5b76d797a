"""The memory that a KV cache may take."""

from __future__ import annotations

import pytest

from atom.kv_cache import memory
from atom.kv_cache.base import KVCacheMemoryError
from atom.kv_cache.memory import check_room
from atom.platform import Platform

CPU = Platform("cpu", "avx2", False)


def test_a_pool_that_a_cpu_could_not_fill_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory_bytes", lambda _: 4 << 30)
    check_room(4 << 30, CPU, 1)
    check_room(5 << 30, Platform("cuda", "sm90", True), 1)
    with pytest.raises(KVCacheMemoryError, match=r"5\.0 GiB and 4\.0 GiB are free; lower --kv"):
        check_room(5 << 30, CPU, 1)
    with pytest.raises(KVCacheMemoryError, match=r"4\.0 GiB and 2\.0 GiB are free"):
        check_room(4 << 30, CPU, 2)
