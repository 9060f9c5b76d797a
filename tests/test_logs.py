"""Lines of the log as text and as JSON."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from atom import logs


def _record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    record = logging.LogRecord("atom.x", logging.WARNING, "f.py", 1, message, args, None)
    record.created, record.msecs = 1_700_000_000.25, 250.0
    vars(record)[logs.FIELDS] = extra
    return record


def test_a_json_line_is_one_object() -> None:
    line = logs.JsonFormatter("engine 1").format(_record("two\nlines of %s", "é", status=200))
    assert "\n" not in line
    assert json.loads(line) == {
        "timestamp": "2023-11-14T22:13:20.250Z",
        "level": "WARNING",
        "logger": "atom.x",
        "message": "two\nlines of é",
        "process": "engine 1",
        "status": 200,
    }


def test_a_request_names_itself() -> None:
    token = logs.request_id.set("r-1")
    try:
        assert json.loads(logs.JsonFormatter().format(_record("a")))["request_id"] == "r-1"
        text = logs.TextFormatter("100%").format(_record("a", status=200, none=None))
        assert text.endswith("WARNING [100%] atom.x: a request_id=r-1 status=200")
    finally:
        logs.request_id.reset(token)
    assert "request_id" not in json.loads(logs.JsonFormatter().format(_record("a")))


def test_an_exception_stays_on_its_line() -> None:
    record = _record("failed")
    try:
        raise ValueError("why")
    except ValueError:
        record.exc_info = sys.exc_info()
    line = json.loads(logs.JsonFormatter().format(record))
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("ValueError: why")


@pytest.mark.parametrize("format", logs.FORMATS)
def test_processes_that_are_started_are_told(format: str) -> None:
    """What `settings` says makes another process's lines alike, under its own name."""
    program = (
        "import logging; from atom import logs\n"
        f"logs.set_up({format!r}, process='rank 3', level='DEBUG')\n"
        "level, name = logs.settings()\n"
        "logs.use_format('text'); logs.use_format(name)\n"
        "logging.getLogger('atom').warning('%s %s', level, name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    (line,) = done.stderr.splitlines()
    if format == "json":
        said = json.loads(line)
        assert (said["message"], said["process"]) == ("10 json", "rank 3")
    else:
        assert line.endswith("WARNING [rank 3] atom: 10 text")
