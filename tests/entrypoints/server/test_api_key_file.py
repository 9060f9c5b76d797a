"""Keys that come from files, and stay out of flags and messages."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from atom.entrypoints.server_options import OptionError, ServerOptions


def _options(*flags: str) -> ServerOptions:
    parser = argparse.ArgumentParser()
    ServerOptions.add_cli_args(parser)
    return ServerOptions.from_cli_args(parser.parse_args(flags))


def test_each_line_is_a_key_beside_those_of_the_flag(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("# of the team\none\n\n  two \r\n", encoding="utf-8")
    second.write_text("drei-é", encoding="utf-8")
    flags = ("--api-key-file", str(first), str(second))
    assert _options(*flags).api_keys == ("one", "two", "drei-é")
    assert _options(*flags, "--api-key", "flag").api_keys == ("flag", "one", "two", "drei-é")


def test_a_file_goes_before_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n")
    monkeypatch.setenv("ATOM_API_KEY", "env")
    assert _options("--api-key-file", str(file)).api_keys == ("one",)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        (b"", "has no key"),
        (b"# only\n\n", "has no key"),
        (b"secret\xff", "not UTF-8"),
    ],
)
def test_a_file_without_keys_ends_the_start(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    """An empty file would otherwise leave the server open."""
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(OptionError, match=reason) as raised:
        _options("--api-key-file", str(file))
    assert "secret" not in str(raised.value)
