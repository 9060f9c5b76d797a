"""What an agent that works on code asks for and answers, made up but repetitive in the usual way.

Sessions share a project: its files, the frames of tool calls, the form of test reports. Each step
is a request of its own, whose prompt holds the steps before it. Names, numbers, the change that is
asked for and the prose are drawn at random, so part of every answer is new.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

_NOUNS = [
    "order",
    "invoice",
    "customer",
    "ledger",
    "parcel",
    "refund",
    "account",
    "coupon",
    "shipment",
    "basket",
    "session",
    "profile",
    "payment",
    "warehouse",
    "supplier",
    "catalogue",
    "ticket",
    "voucher",
    "discount",
    "tariff",
    "receipt",
    "contract",
]
_VERBS = [
    "load",
    "store",
    "check",
    "merge",
    "split",
    "rank",
    "count",
    "filter",
    "round",
    "cancel",
    "export",
    "import",
]
_FIELDS = [
    "amount",
    "status",
    "created",
    "owner",
    "total",
    "weight",
    "region",
    "currency",
    "priority",
    "version",
]
_REASONS = (
    "the {0} can be missing when a {1} is imported",
    "a {1} without a {0} must not be counted twice",
    "rounding the {0} too early loses cents on a large {1}",
    "two workers may {2} the same {1} at once",
    "the {0} of an old {1} is text, not a number",
)
_STEPS_PER_SESSION = 10


@dataclass(frozen=True)
class Step:
    """One request: what the model reads, and what it answers."""

    prompt: str
    output: str


@dataclass
class _Project:
    """Files by path, each a list of functions."""

    files: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def draw(cls, rng: Random) -> _Project:
        project = cls()
        for noun in rng.sample(_NOUNS, 12):
            functions = [_function(rng, verb, noun) for verb in rng.sample(_VERBS, 4)]
            project.files[f"src/{noun}.py"] = functions
        return project


def _function(rng: Random, verb: str, noun: str) -> str:
    own, other = rng.sample(_FIELDS, 2)
    limit = rng.randrange(10, 9000)
    return (
        f"def {verb}_{noun}(rows, limit={limit}):\n"
        f'    """{verb.capitalize()} every {noun} by its {own}."""\n'
        f"    result = []\n"
        f"    for row in rows:\n"
        f"        if row.{own} is None or row.{other} > limit:\n"
        f"            continue\n"
        f"        result.append(({noun!r}, row.{own}, row.{other}))\n"
        f"    return result\n"
    )


def _changed(rng: Random, function: str) -> str:
    """The function with one line changed and one new."""
    lines = function.splitlines(keepends=True)
    own = rng.choice(_FIELDS)
    lines[4] = f"        if row.{own} is None or row.{own} < {rng.randrange(100)}:\n"
    lines.insert(6, f"        # {_reason(rng)}\n")
    return "".join(lines)


def _reason(rng: Random) -> str:
    return rng.choice(_REASONS).format(*(rng.choice(w) for w in (_FIELDS, _NOUNS, _VERBS)))


def _call(tool: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def _report(rng: Random, path: str, functions: list[str]) -> str:
    """What the tests print."""
    names = [function.split("(")[0].removeprefix("def ") for function in functions]
    lines = [f"============ test session starts: {path} ============"]
    lines += [
        f"tests/test_{name}.py::test_{name}_{case} {rng.choice(('PASSED', 'PASSED', 'FAILED'))} "
        f"[{rng.randrange(2, 900)} ms]"
        for name in names
        for case in ("empty", "limit", "order")
    ]
    failed = sum("FAILED" in line for line in lines)
    return "\n".join([*lines, f"==== {failed} failed, {len(lines) - 1 - failed} passed ===="])


def _session(rng: Random, project: _Project, number: int) -> Iterator[Step]:
    """Read, change, test and report, until the steps are used up."""
    task = f"Task {number}: take care that {_reason(rng)}."
    text = f"You maintain a small shop system. Use the tools.\n\n{task}\n\n"
    path, what, state = "", 0, "read"
    for _ in range(_STEPS_PER_SESSION):
        answer = ""
        if state == "read":
            path = rng.choice(sorted(project.files))
            answer = f"I will look at {path}, since {_reason(rng)}.\n{_call('read', path=path)}"
            result, state = "".join(project.files[path]), "change"
        elif state == "change":
            what = rng.randrange(len(project.files[path]))
            old = project.files[path][what]
            new = _changed(rng, _function(rng, *_names(old)) if rng.random() < 0.1 else old)
            answer = (
                f"The problem is that {_reason(rng)}. I replace the function.\n"
                f"{_call('replace', path=path, old=old, new=new)}"
            )
            result, state = json.dumps({"path": path, "status": "written"}), "test"
            if rng.random() < 0.3:
                project.files[path][what] = new
        elif state == "test":
            answer = f"Now the tests.\n{_call('test', path=path)}"
            result, state = _report(rng, path, project.files[path]), "tell"
        else:
            failed = [line for line in result.splitlines() if "FAILED" in line]
            shown = "\n".join(failed[:4]) or "Nothing failed."
            answer = f"The tests of {path} say:\n{shown}\nThis is because {_reason(rng)}."
            result, state = "Go on.", rng.choice(("read", "change"))
        yield Step(text + "assistant: ", answer)
        text += f"assistant: {answer}\ntool: {result}\n"


def _names(function: str) -> tuple[str, str]:
    verb, _, noun = function.split("(")[0].removeprefix("def ").partition("_")
    return verb, noun


def agent_trace(num_requests: int, seed: int = 0) -> list[Step]:
    """The same for the same seed; sessions run in turns of eight, as an agent's users do."""
    rng = Random(seed)
    project = _Project.draw(rng)
    steps: list[Step] = []
    number = 0
    while len(steps) < num_requests:
        sessions = [_session(rng, project, number + i) for i in range(8)]
        number += 8
        for turn in zip(*sessions, strict=True):
            steps += turn
    return steps[:num_requests]
