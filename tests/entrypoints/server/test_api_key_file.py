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


def test_keys_have_names(tmp_path: Path) -> None:
    """`NAME: KEY`; several keys may have one name, and a colon within a key names nothing."""
    file = tmp_path / "keys"
    file.write_text("alice: one\nalice:  two-é\nbare\nx:y\n a b: c\n", encoding="utf-8")
    options = _options("--api-key", "flag", "--api-key-file", str(file))
    named = {each.key: each.name for each in options.named_api_keys}
    assert named == {
        "flag": "key-1",
        "one": "alice",
        "two-é": "alice",
        "bare": "key-4",
        "x:y": "key-5",
        "a b: c": "key-6",
    }
    assert options.api_keys == tuple(named)
    shown = repr(options)
    assert "alice" in shown
    assert not any(key in shown for key in ("one'", "two-é", "bare", "flag", "x:y"))


def test_no_key_has_two_names(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice: secret\nbob: secret\n")
    with pytest.raises(OptionError, match="give one key twice") as raised:
        _options("--api-key-file", str(file))
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("flag", ["--metrics-per-api-key", "--max-requests-per-key=2"])
def test_what_is_of_keys_needs_some(flag: str) -> None:
    with pytest.raises(OptionError, match="needs --api-key"):
        _options(flag)
    _options(flag, "--api-key", "one")


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
