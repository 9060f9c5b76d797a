"""`atom flight`: the last steps of an engine that died."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from atom.command_line.parser import CommandLine
from atom.environment import cache_dir
from atom.model_engine.replicas.flight_recorder import Flight, StepRecord, read_flight

_COLUMNS = "before    took ms  tokens  seqs  new  drafts  accepted  running  waiting  blocks  what"


def main(argv: Sequence[str] | None = None, *, prog: str = "atom flight") -> int:
    """Returns 0, or 1 when there is no such file."""
    args = create_parser(prog).parse_args(argv)
    try:
        path = Path(args.file) if args.file else _newest()
        print(f"{path}\n{describe(read_flight(path), args.last)}")
    except (OSError, msgspec.MsgspecError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def create_parser(prog: str = "atom flight") -> CommandLine:
    parser = CommandLine(
        prog=prog,
        description="Show the last steps of an engine that died, from the file that the log names.",
    )
    parser.add_positional("file", "the same as --file")
    parser.add_argument("--file", help="what to show; the newest when omitted")
    parser.add_argument("--last", type=int, default=30, help="steps to show (default: %(default)s)")
    return parser


def describe(flight: Flight, last: int) -> str:
    """The death, and a line for each of the last steps, newest at the end."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(flight.at))
    lines = [f"ATOM {flight.version}, engine process {flight.pid}, {when}: {flight.reason}"]
    if flight.running is None:
        lines.append("no step was known to run")
    else:
        tokens, seconds = flight.running
        lines.append(f"a step of {tokens} tokens had run for {seconds:.1f} s at the last heartbeat")
    steps = flight.steps[max(len(flight.steps) - max(last, 0), 0) :]
    lines.append(f"the last {len(steps)} of {len(flight.steps)} steps, {flight.num_blocks} blocks")
    if steps:
        lines.append(_COLUMNS)
    return "\n".join([*lines, *(_line(step, flight.at) for step in steps)])


def _line(step: StepRecord, end: float) -> str:
    said = {
        "prompts beside": step.is_mixed,
        "replayed": step.is_replayed,
        f"{step.num_preempted} preempted": step.num_preempted,
        f"{step.num_refused} refused": step.num_refused,
        f"{step.num_ended} ended": step.num_ended,
    }
    numbers = (
        f"{end - step.at:7.2f} s  {1000 * step.seconds:7.1f}  {step.num_tokens:6}"
        f"  {step.num_outputs:4}  {step.num_new_tokens:3}  {step.num_drafts:6}"
        f"  {step.num_accepted:8}  {step.num_running:7}  {step.num_waiting:7}"
        f"  {step.num_used_blocks:6}"
    )
    return f"{numbers}  {', '.join(text for text, holds in said.items() if holds)}".rstrip()


def _newest() -> Path:
    folder = cache_dir() / "flights"
    files = sorted(folder.glob("*.json"))
    if not files:
        raise FileNotFoundError(f"no engine has died: {folder} holds no file")
    return files[-1]
