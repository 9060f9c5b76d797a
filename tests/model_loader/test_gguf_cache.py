"""What converted files may take: the oldest go, and never one that is in use."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import tiny_model
from patience import wait_until

from atom.config import ConfigError, ModelOptions
from atom.environment import cache_dir, cache_limit
from atom.model_loader.gguf import cache as gguf_cache
from atom.model_loader.gguf import locks
from atom.model_loader.gguf.cache import make_room, use
from atom.model_loader.gguf.convert import converted_folder
from atom.model_loader.gguf.file import read_gguf
from atom.model_loader.locate import likely_files
from atom.model_loader.source import resolve_model

WriteTiny = Callable[..., Path]

_USE = """
import sys
from pathlib import Path
from atom.model_loader.gguf.cache import use
use(Path(sys.argv[1]))
print("in use", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folders(cache: Path) -> list[Path]:
    """Three folders of 1000 bytes, the first used longest ago."""
    cache.mkdir(parents=True)
    made = [cache / name for name in ("c", "a", "b")]
    for age, folder in enumerate(made):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes(1000))
        os.utime(folder, (age, age))
    return made


def left(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.is_dir())


def test_a_folder_that_is_only_read_is_used(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, opens = folders[0], os.open

    def only_reads(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & (os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opens(path, flags, mode)

    def refuses(_: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    gguf_cache._lock_file(folder).touch()
    monkeypatch.setattr(gguf_cache, "_in_use", {})
    with monkeypatch.context() as patch:
        patch.setattr(gguf_cache.os, "open", only_reads)
        patch.setattr(gguf_cache.os, "utime", refuses)
        use(folder)
    make_room(folder.parent, 0, 0)
    assert left(folder.parent) == [folder.name]
    os.close(gguf_cache._in_use[folder])


@pytest.mark.parametrize("refused", [errno.EROFS, errno.EACCES])
def test_a_folder_without_a_lock_for_this_user_is_used(
    folders: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refused: int,
) -> None:
    """Its files are copied then, since others may change them."""
    opens = os.open

    def no_lock(path: Path, flags: int, mode: int = 0o777) -> int:
        if refused == errno.EACCES or flags & os.O_CREAT:
            raise OSError(refused, os.strerror(refused))
        return opens(path, flags, mode)

    with monkeypatch.context() as patch:
        patch.setattr(gguf_cache.os, "open", no_lock)
        use(folders[0])
    assert os.strerror(refused) in caplog.text
    assert not gguf_cache.is_in_use(folders[0])


def test_a_cache_that_may_not_be_entered_is_named(
    write_tiny: WriteTiny, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny()
    opens, is_file, mkdir = Path.open, Path.is_file, Path.mkdir

    def refusing(call: Callable[..., Any]) -> Callable[..., Any]:
        def refused(self: Path, *arguments: Any, **named: Any) -> Any:
            if cache in (self, *self.parents):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
            return call(self, *arguments, **named)

        return refused

    for name, call in (("open", opens), ("is_file", is_file), ("mkdir", mkdir)):
        monkeypatch.setattr(Path, name, refusing(call))
    assert likely_files(ModelOptions(str(path))) == [path]
    with pytest.raises(ConfigError, match=r"Permission denied.*; set ATOM_CACHE"):
        resolve_model(ModelOptions(str(path)))


@pytest.mark.usefixtures("folders")
def test_the_oldest_go(cache: Path) -> None:
    make_room(cache, 1000, 4000)
    assert left(cache) == ["a", "b", "c"]
    make_room(cache, 1000, 3999)
    assert left(cache) == ["a", "b"]
    make_room(cache, 0, 1000)
    assert left(cache) == ["b"]
    make_room(cache, 10**9, 1000)
    assert left(cache) == []


def test_using_one_makes_it_the_newest(
    folders: list[Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_cache, "_in_use", {})
    use(folders[0])
    assert folders[0].stat().st_mtime > folders[2].stat().st_mtime
    for descriptor in gguf_cache._in_use.values():
        os.close(descriptor)  # as if the process had ended
    make_room(cache, 0, 2000)
    assert left(cache) == ["b", "c"]


def test_what_a_live_process_uses_stays(folders: list[Path], cache: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", _USE, str(folders[0])],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as user:
        assert user.stdout is not None
        assert user.stdout.readline() == "in use\n"
        make_room(cache, 0, 0)
        assert left(cache) == ["c"]
        user.kill()
        user.wait()
        make_room(cache, 0, 0)
        assert left(cache) == []


@pytest.mark.usefixtures("folders")
def test_nothing_goes_where_there_are_no_locks(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError("this file system has no locks")

    monkeypatch.setattr(gguf_cache.fcntl, "flock", no_locks)
    make_room(cache, 0, 0)
    assert left(cache) == ["a", "b", "c"]


@pytest.mark.usefixtures("folders")
def test_converting_makes_room(
    cache: Path, write_tiny: WriteTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOM_CACHE_LIMIT", "1MB")
    folder = converted_folder(read_gguf(write_tiny()), torch.float32, with_tokenizer=False)
    assert left(cache) == [folder.name]
    # The next one does not fit either, and the first is in use.
    path = write_tiny(tiny_model(vocab_size=96), changes={"tokenizer.ggml.tokens": None})
    second = converted_folder(read_gguf(path), torch.float32, with_tokenizer=False)
    assert left(cache) == sorted([folder.name, second.name])


def test_a_folder_leaves_nothing(
    cache: Path, write_tiny: WriteTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock, and notes of files that were converted to it, go with it; others stay."""
    monkeypatch.setattr(gguf_cache, "_in_use", {})
    path = write_tiny()
    of_bits = resolve_model(ModelOptions(str(path))).path
    after_one = sorted(cache.iterdir())
    resolve_model(ModelOptions(str(path), dtype="float16"))
    for descriptor in gguf_cache._in_use.values():
        os.close(descriptor)  # as if the process had ended
    os.utime(of_bits)
    kept = gguf_cache._num_bytes(of_bits)
    make_room(cache, 0, kept)
    assert sorted(cache.iterdir()) == after_one
    make_room(cache, 0, 0)
    assert not list(cache.iterdir())


def test_a_lock_that_was_removed_meanwhile_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waited for it, or opened it before, must not hold one that nobody else finds."""
    folder = tmp_path / "folder"
    path = gguf_cache._lock_file(folder)
    remover = locks.lock(path, locks.ALONE)
    flock, opened = locks.fcntl.flock, []

    def counted(descriptor: int, how: int) -> None:
        opened.append(descriptor)
        flock(descriptor, how)

    monkeypatch.setattr(locks.fcntl, "flock", counted)
    with ThreadPoolExecutor(2) as pool:
        shared = pool.submit(gguf_cache._share_lock, folder)
        alone = pool.submit(locks.lock, path, locks.ALONE)
        wait_until(lambda: len(opened) == 2)
        locks.remove(path, remover)
        for future in as_completed([shared, alone]):
            descriptor = future.result()
            assert descriptor is not None
            assert locks.is_at(path, descriptor)
            with pytest.raises(BlockingIOError):
                locks.lock(path, locks.ALONE | locks.AT_ONCE)
            os.close(descriptor)


def test_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATOM_CACHE_LIMIT", raising=False)
    assert cache_limit() == 50 * 2**30
    monkeypatch.setenv("ATOM_CACHE_LIMIT", "20GB")
    assert cache_limit() == 20 * 10**9
    monkeypatch.setenv("ATOM_CACHE_LIMIT", "much")
    with pytest.raises(ConfigError, match=r"\$ATOM_CACHE_LIMIT: expected a size"):
        cache_limit()


def test_a_user_without_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("ATOM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "expanduser", refuse)
    with pytest.raises(ConfigError, match="set HOME, or ATOM_CACHE"):
        cache_dir()
