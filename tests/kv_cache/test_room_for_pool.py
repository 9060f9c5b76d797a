"""The memory that a KV cache may take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from atom import LLM, platform
from atom.kv_cache import memory
from atom.kv_cache.base import KVCacheMemoryError
from atom.kv_cache.memory import check_room
from atom.platform import Platform, free_memory_bytes

CPU = Platform("cpu", "avx2", False)


def test_a_pool_that_a_cpu_could_not_fill_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory_bytes", lambda _: 4 << 30)
    check_room(4 << 30, CPU, 1)
    check_room(5 << 30, Platform("cuda", "sm90", True), 1)
    with pytest.raises(KVCacheMemoryError, match=r"5\.0 GiB and 4\.0 GiB are free; lower --kv"):
        check_room(5 << 30, CPU, 1)
    with pytest.raises(KVCacheMemoryError, match=r"4\.0 GiB and 2\.0 GiB are free"):
        check_room(4 << 30, CPU, 2)


def test_files_that_a_container_has_read_leave_its_memory_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (
        ("memory.max", "8000\n"),
        ("memory.current", "7500\n"),
        (
            "memory.stat",
            "anon 900\nfile 6600\nactive_file 600\ninactive_file 6000\nfile_mapped 700\n",
        ),
    ):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(platform, "_CGROUP", tmp_path)
    assert free_memory_bytes(CPU) == 8000 - 900 - 700, "what is mapped is in use"
    (tmp_path / "memory.current").write_text("20000\n")
    assert free_memory_bytes(CPU) == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory_bytes(CPU) > 8000


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's memory is measured")
def test_a_size_that_was_asked_for_is_refused(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_memory_bytes", lambda _: 1 << 10)
    with pytest.raises(KVCacheMemoryError, match="GiB are free; lower --kv-cache-memory"):
        LLM(str(tiny_llama_dir), max_model_len=32, kv_cache_memory="1MiB")
    monkeypatch.undo()
    LLM(str(tiny_llama_dir), max_model_len=32, kv_cache_memory="1MiB")
