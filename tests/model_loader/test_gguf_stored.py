"""A converted folder that lost something, as when a machine goes down, is converted again."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from patience import wait_until

from atom.config import ModelOptions
from atom.model_loader.checkpoint import list_tensors
from atom.model_loader.errors import WeightError
from atom.model_loader.gguf import stored
from atom.model_loader.gguf.stored import check_stored
from atom.model_loader.locate import converted_before
from atom.model_loader.source import resolve_model

WriteTiny = Callable[..., Path]
WEIGHTS = "model.safetensors"


@pytest.fixture
def boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Says in which boot of the machine the test is."""
    path = tmp_path / "boot_id"
    path.write_text("first\n")
    monkeypatch.setattr(stored, "_BOOT", path)
    return path


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Inodes that were brought to the disk, in order; none before `goes_on` is set."""
    synced, goes_on = [], threading.Event()

    def sync(file: int) -> None:
        assert goes_on.wait(60)
        synced.append(os.fstat(file).st_ino)

    monkeypatch.setattr(stored, "_storing", set())
    monkeypatch.setattr(stored.os, "fsync", sync)
    monkeypatch.setattr(stored, "goes_on", goes_on, raising=False)
    yield synced
    goes_on.set()


def is_on_disk(folder: Path) -> bool:
    return bool(stored._read(folder).on_disk)


def test_a_folder_is_used_before_it_is_on_disk(
    write_tiny: WriteTiny, boot: Path, disk: list[int]
) -> None:
    options = ModelOptions(str(write_tiny()))
    folder = resolve_model(options).path
    files = {path.stat().st_ino for path in folder.iterdir() if path.name != "stored.json"}
    assert converted_before(options) == folder
    assert not is_on_disk(folder)
    stored.goes_on.set()  # type: ignore[attr-defined]
    wait_until(lambda: is_on_disk(folder))
    assert {*disk} == files | {folder.stat().st_ino}
    assert disk[-1] == folder.stat().st_ino
    boot.write_text("second\n")
    assert converted_before(options) == folder


def test_what_was_not_on_disk_when_the_machine_went_down_is_converted_again(
    write_tiny: WriteTiny, boot: Path, disk: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    options = ModelOptions(str(write_tiny()))
    folder = resolve_model(options).path
    weights = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(bytes(len(weights)))
    boot.write_text("second\n")
    assert converted_before(options) is None
    assert resolve_model(options).path == folder
    assert (folder / WEIGHTS).read_bytes() == weights
    assert "converted again: the machine went down before its files were on disk" in caplog.text
    assert not disk


@pytest.mark.usefixtures("boot", "disk")
@pytest.mark.parametrize("note", [b"", bytes(80), b'{"on_disk":1}', None])
def test_a_note_that_says_nothing(write_tiny: WriteTiny, note: bytes | None) -> None:
    options = ModelOptions(str(write_tiny()))
    folder = resolve_model(options).path
    if note is None:
        (folder / "stored.json").unlink()
    else:
        (folder / "stored.json").write_bytes(note)
    assert converted_before(options) is None
    resolve_model(options)
    check_stored(folder)


def test_where_boots_have_no_names_a_folder_is_on_disk_first(
    write_tiny: WriteTiny, boot: Path, disk: list[int]
) -> None:
    boot.unlink()
    stored.goes_on.set()  # type: ignore[attr-defined]
    folder = resolve_model(ModelOptions(str(write_tiny()))).path
    assert (folder / WEIGHTS).stat().st_ino in disk
    assert is_on_disk(folder)


@pytest.mark.usefixtures("boot")
def test_a_disk_that_fails(write_tiny: WriteTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is no disk that a folder is on."""
    failed = threading.Event()

    def fails(_: int) -> None:
        failed.set()
        raise OSError("the disk has gone")

    monkeypatch.setattr(stored.os, "fsync", fails)
    folder = resolve_model(ModelOptions(str(write_tiny()))).path
    assert failed.wait(60)
    assert not is_on_disk(folder)
    assert msgspec.json.decode((folder / "stored.json").read_bytes())["boot"] == "first"


@pytest.mark.parametrize("name", [WEIGHTS, "config.json", "tokenizer.json"])
@pytest.mark.parametrize("cut", [lambda path: os.truncate(path, 100), Path.unlink])
def test_a_file_that_was_cut_is_converted_again(
    write_tiny: WriteTiny,
    caplog: pytest.LogCaptureFixture,
    name: str,
    cut: Callable[[Path], None],
) -> None:
    options = ModelOptions(str(write_tiny()))
    folder = resolve_model(options).path
    content = (folder / name).read_bytes()
    cut(folder / name)
    assert resolve_model(options).path == folder
    assert (folder / name).read_bytes() == content
    assert f"converted again: {name} has " in caplog.text


def test_what_was_damaged_later_is_converted_again_once_it_is_removed(
    write_tiny: WriteTiny,
) -> None:
    """As its message says; a start does not read all bytes to find that."""
    options = ModelOptions(str(write_tiny()))
    weights = resolve_model(options).path / WEIGHTS
    content = weights.read_bytes()
    weights.write_bytes(bytes(len(content)))
    with pytest.raises(WeightError, match=r"damaged .*; one in the cache of converted files is"):
        list_tensors(weights.parent)
    weights.unlink()
    resolve_model(options)
    assert weights.read_bytes() == content
