"""What every benchmark shares: prompts, statistics, and where the numbers were made.

The programs of `benchmarks/` use it, too.
"""

from __future__ import annotations

import datetime
import gzip
import json
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from atom.processors import default_num_threads
from atom.version import __version__ as atom_version

PERCENTILES = (50, 95, 99)
_PACKAGES = ("torch", "transformers")

DEFAULT_CONVERSATIONS = [
    [{"role": "user", "content": text}]
    for text in (
        "What is the capital of France, and what is it known for?",
        "Write a Python function that returns the n-th Fibonacci number.",
        "Explain to a child why the sky is blue.",
        "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips "
        "in May. How many clips did Natalia sell altogether in April and May?",
        "Give me three tips for learning a new language.",
        "Translate into German: the weather is beautiful today.",
        "Write a short poem about the sea.",
        "What is the difference between a list and a tuple in Python?",
    )
]


# Where the text is, in the order they are looked for when no field is named.
_FIELDS = ("messages", "question", "turns", "prompt")


def read_conversations(path: Path | None, field: str | None) -> list[list[dict[str, Any]]]:
    """Conversations of a JSONL file (or .jsonl.gz), or the built-in ones when there is none.

    The field holds OpenAI messages, the text of a user message, or a list of texts, of which
    the first is taken (the turns of MT-Bench). Without a name it is the first there is of
    `messages`, `question`, `turns` and `prompt`.

    Raises:
        ValueError: naming the line that is none of these.
    """
    if path is None:
        return DEFAULT_CONVERSATIONS
    found = [
        _conversation(line, field, f"{path}:{number}")
        for number, line in enumerate(read_text(path).splitlines(), 1)
        if line.strip()
    ]
    if not found:
        raise ValueError(f"{path} holds no prompts")
    return found


def read_text(path: Path) -> str:
    """The content of a text file or of a compressed one (.gz).

    Raises:
        ValueError: when it cannot be read.
    """
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def _conversation(line: str, field: str | None, where: str) -> list[dict[str, Any]]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if field is None and isinstance(record, dict):
        field = next((name for name in _FIELDS if name in record), None)
    value = record.get(field) if isinstance(record, dict) else None
    if isinstance(value, list) and value and isinstance(value[0], str):
        value = value[0]
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, list) and value and all(isinstance(m, dict) for m in value):
        return value
    known = ", ".join(record) if isinstance(record, dict) else type(record).__name__
    looked = f"field {field!r} holds" if field else f"{', '.join(_FIELDS)} hold"
    raise ValueError(
        f"{where}: {looked} neither messages nor text (there is: {known}); name another field"
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` percent lie, interpolated linearly."""
    ordered = sorted(values)
    place = share / 100 * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarise(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, median, p95 and p99; None when there is nothing to summarise."""
    if not values:
        return None
    named = {f"p{share}": percentile(values, share) for share in PERCENTILES}
    return {"mean": statistics.fmean(values), "median": named.pop("p50"), **named}


def environment() -> dict[str, Any]:
    """Machine, versions, date and command of this run."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": _command(sys.argv),
        "cpu": _cpu_name(),
        "cpus": default_num_threads(),
        "gpu": _gpu_name(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "atom": atom_version,
        **{package: _version(package) for package in _PACKAGES},
        "commit": _commit(),
    }


def environment_markdown(facts: Mapping[str, Any]) -> str:
    """The facts as a list."""
    return "\n".join(f"- {name}: {value}" for name, value in facts.items() if value is not None)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def write_json(path: Path | None, report: Mapping[str, Any]) -> None:
    """Write the report, making its folder; nothing without a path."""
    write_text(path, json.dumps(report, indent=2) + "\n")


def write_text(path: Path | None, text: str) -> None:
    """Write a file, making its folder; nothing without a path."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path}", file=sys.stderr)


def _command(argv: Sequence[str]) -> str:
    """The command line without the value of --api-key: reports are published."""
    shown = []
    for before, argument in zip(("", *argv), argv, strict=False):
        secret = before == "--api-key" or argument.startswith("--api-key=")
        shown.append("--api-key=..." if secret else argument)
    command = shlex.join(a for a in shown if a != "--api-key")
    return f"python {command}" if argv[0].endswith(".py") else command


def _cpu_name() -> str:
    """With the numbers of family and model where there are any: a virtual machine's name may be of
    a whole brand.
    """
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        first = ""  # not Linux
    pairs = (line.partition(":") for line in first.splitlines())
    fields = {key.strip(): value.strip() for key, _, value in pairs}
    name = fields.get("model name") or platform.processor() or platform.machine()
    if not {"cpu family", "model"} <= fields.keys():
        return name
    return f"{name} (family {fields['cpu family']}, model {fields['model']})"


def _gpu_name() -> str | None:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Of the checkout that this runs from; None for an installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
