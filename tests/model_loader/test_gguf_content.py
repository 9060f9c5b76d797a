"""Files are told apart by their content, and none is converted that changes meanwhile."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import wait_until

from atom.config import ConfigError, ModelOptions
from atom.entrypoints.offline.start import start_llm
from atom.model_loader import ahead
from atom.model_loader.errors import WeightError
from atom.model_loader.gguf import content, locks
from atom.model_loader.gguf import convert as gguf_convert
from atom.model_loader.gguf.cache import recall, wishes_of
from atom.model_loader.gguf.content import content_key, files_identity, hash_ahead
from atom.model_loader.gguf.convert import converted_folder
from atom.model_loader.gguf.file import read_gguf
from atom.model_loader.source import resolve_model

WriteTiny = Callable[..., Path]


def key_of(path: Path, cache: Path, num_threads: int) -> str:
    return content_key([path], files_identity([path]), cache, num_threads)


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    cache.mkdir(parents=True)
    monkeypatch.setattr(content, "_PIECE_BYTES", 64)
    monkeypatch.setattr(content, "_READ_BYTES", 16)


@pytest.mark.usefixtures("pieces")
def test_each_byte_and_its_place_counts(tmp_path: Path, cache: Path) -> None:
    path, keys = tmp_path / "file", set()
    values = bytes(range(200))
    changed = [values[:i] + b"\xff" + values[i + 1 :] for i in range(200)]
    swapped = values[64:128] + values[:64] + values[128:]
    for i, each in enumerate([values, *changed, swapped, values[:-1], values + b"\0"]):
        path.write_bytes(each)
        os.utime(path, ns=(0, i))
        keys.add(key_of(path, cache, 3))
    assert len(keys) == 204
    digests = [hashlib.sha256(values[i : i + 64]).digest() for i in range(0, 200, 64)]
    path.write_bytes(values)
    whole = hashlib.sha256((200).to_bytes(8, "little") + b"".join(digests))
    assert key_of(path, cache, 1) == whole.hexdigest()[:32]


@pytest.mark.usefixtures("pieces")
def test_the_ends_of_files_count(tmp_path: Path, cache: Path) -> None:
    """Of a split model, also where both lie between pieces."""
    values, keys = bytes(range(192)), set()
    paths = [tmp_path / "first", tmp_path / "second"]
    for cut in (0, 32, 64, 128, 192):
        for path, part in zip(paths, (values[:cut], values[cut:]), strict=True):
            path.write_bytes(part)
        keys.add(content_key(paths, files_identity(paths), cache, 1))
    assert len(keys) == 5


@pytest.mark.usefixtures("pieces")
def test_one_of_several_processes_hashes(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, hashed = tmp_path / "file", []
    path.write_bytes(bytes(100))
    identity = files_identity([path])
    monkeypatch.setattr(content, "_digest", lambda *of: hashed.append(of))
    held = cache / f".{identity}.hashing"
    other = locks.lock(held, locks.ALONE)
    hash_ahead([path], cache, 1)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(content_key, [path], identity, cache, 1)
        wait_until(lambda: "another process is reading the same files" in caplog.text)
        content.write_note(content._note(identity, cache), "f" * 32)
        locks.remove(held, other)
        assert asked.result() == "f" * 32
    assert not hashed
    assert list(cache.iterdir()) == [content._note(identity, cache)]


@pytest.mark.usefixtures("pieces")
def test_a_file_system_may_give_less_than_is_asked_for(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(io.FileIO):
        def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
            return super().readinto(buffer[:3])

    path = tmp_path / "file"
    path.write_bytes(bytes(range(200)))
    key = key_of(path, cache, 1)
    os.utime(path, ns=(0, 0))  # it was not hashed yet
    opens = Path.open

    def slowly(self: Path, *arguments: Any, **named: Any) -> Any:
        return Slow(self) if self == path else opens(self, *arguments, **named)

    monkeypatch.setattr(Path, "open", slowly)
    assert key_of(path, cache, 1) == key


@pytest.mark.usefixtures("pieces")
def test_a_note_that_is_empty_is_none(tmp_path: Path, cache: Path) -> None:
    """As a machine may leave it that loses power."""
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    key = key_of(path, cache, 1)
    (note,) = cache.iterdir()
    note.write_bytes(b"")
    hash_ahead([path], cache, 1)
    assert key_of(path, cache, 1) == key == note.read_text()


@pytest.mark.usefixtures("pieces")
def test_a_key_is_noted_only_of_what_stays(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    digest = content._digest

    def grows(*piece: object) -> bytes:
        path.write_bytes(bytes(101))
        return digest(*piece)

    with monkeypatch.context() as patch:
        patch.setattr(content, "_digest", grows)
        with pytest.raises(WeightError, match="was changed while it was read"):
            key_of(path, cache, 2)
    assert not list(cache.iterdir())
    key_of(path, cache, 2)
    assert len(list(cache.iterdir())) == 1


@pytest.mark.usefixtures("pieces")
def test_after_ctrl_c_nothing_is_hashed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, goes_on = tmp_path / "file", threading.Event()
    path.write_bytes(bytes(1000))

    def interrupted(_: Path, start: int) -> bytes:
        if start == 0:
            raise KeyboardInterrupt
        goes_on.wait()
        return b""

    monkeypatch.setattr(content, "_digest", interrupted)
    hashing = content._Hashing([path], 1)
    late = threading.Timer(30, goes_on.set)
    late.start()
    with pytest.raises(KeyboardInterrupt):
        hashing.key()
    assert not goes_on.is_set()
    assert hashing._files[-1][1][-1].cancelled()
    late.cancel()
    goes_on.set()


def _change(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"\1")


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("change", [_change, _cut, Path.unlink])
@pytest.mark.parametrize("when", ["read_gguf", "content_key", "_write_folder", "write_tokenizer"])
def test_a_file_that_changes_is_not_converted(
    write_tiny: WriteTiny,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
    change: Callable[[Path], None],
) -> None:
    """Its header, its key and its tensors are of one state, or there is no folder."""
    path = write_tiny()
    copy = Path(shutil.copy(path, path.with_name("copy.gguf")))

    def touch() -> None:
        change(path)

    def after(*arguments: object) -> object:
        found = step(*arguments)
        touch()
        return found

    file = read_gguf(path)
    if when == "read_gguf":
        touch()
    else:
        step = getattr(gguf_convert, when)
        monkeypatch.setattr(gguf_convert, when, after)
    with pytest.raises(WeightError, match="was changed while it was read"):
        converted_folder(file, torch.float32, with_tokenizer=True)
    assert not [each for each in cache.iterdir() if each.is_dir()]
    monkeypatch.undo()
    monkeypatch.setenv("ATOM_CACHE", str(cache.parent))
    assert converted_folder(read_gguf(copy), torch.float32, with_tokenizer=True).is_dir()


def test_a_file_that_was_replaced_is_not_taken_for_the_converted_one(
    write_tiny: WriteTiny, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, options = write_tiny(), ModelOptions(str(write_tiny()))

    def replaces(*arguments: object, **named: object) -> Path:
        folder = converted_folder(*arguments, **named)  # type: ignore[arg-type]
        _change(path)
        return folder

    with monkeypatch.context() as patch:
        patch.setattr(gguf_convert, "converted_folder", replaces)
        first = resolve_model(options).path
    assert recall(path, wishes_of(options), cache) is None
    assert resolve_model(options).path != first


def test_a_cache_without_room_for_notes_is_used(
    write_tiny: WriteTiny, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a file that has a converted folder under another name, and no note."""
    path = write_tiny()
    folder = resolve_model(ModelOptions(str(path))).path
    before = sorted(cache.iterdir())

    def is_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    copy = Path(shutil.copy(path, path.with_name("copy.gguf")))
    with monkeypatch.context() as patch:
        patch.setattr(content.os, "replace", is_full)
        assert resolve_model(ModelOptions(str(copy))).path == folder
    assert sorted(cache.iterdir()) == before


def test_a_note_of_a_folder_that_is_empty_is_none(write_tiny: WriteTiny, cache: Path) -> None:
    options = ModelOptions(str(write_tiny()))
    folder = resolve_model(options).path
    (note,) = cache.glob(".*.folder")
    note.write_bytes(b"")
    assert ahead.likely_files(options) == [Path(str(options.model))]
    assert resolve_model(options).path == folder
    assert note.read_bytes()


def test_what_is_hashed_ahead_is_hashed_once(
    write_tiny: WriteTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, hashed = write_tiny(), []
    digest = content._digest
    monkeypatch.setattr(content, "_digest", lambda *of: hashed.append(of) or digest(*of))
    options = ModelOptions(str(path))
    assert ahead.likely_files(options) == [path]
    ahead.begin_files([path, path])
    source = resolve_model(options)
    assert hashed == [(path, 0)]
    assert not content._ahead
    assert ahead.likely_files(options) == []  # no weights are packed in its folder yet
    (source.path / "0.packed").touch()
    assert ahead.likely_files(options) == [source.path / "0.packed"]
    ahead.begin_files([path])
    assert not content._ahead


def test_options_that_are_refused_end_what_is_hashed_ahead(
    write_tiny: WriteTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ordinary exit of a program would wait for all of a large file."""
    ended: list[content._Hashing] = []
    monkeypatch.setattr(content._Hashing, "cancel", lambda self: ended.append(self))
    with pytest.raises(ConfigError, match="load_format is safetensors"):
        start_llm({"model": str(write_tiny()), "load_format": "safetensors"})
    assert len(ended) == 1
    assert not content._ahead
    ended[0]._pool.shutdown()


def test_a_file_that_is_refused_is_not_hashed_on(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOM_CACHE", str(cache.parent))
    path = tmp_path / "none.gguf"
    path.write_bytes(b"none")
    hash_ahead([path], cache, 1)
    assert content._ahead
    with pytest.raises(WeightError):
        resolve_model(ModelOptions(str(path)))
    assert not content._ahead
    hash_ahead([tmp_path / "absent.gguf"], cache, 1)
    assert not content._ahead
