"""This engine beside llama.cpp, OpenVINO GenAI, transformers and vLLM, on one CPU and in turns.

python benchmarks/compare_peers.py setup --home DIR        # 20 minutes and 10 GB
python benchmarks/compare_peers.py run --home DIR --seconds 900 --with-neighbour
python benchmarks/compare_peers.py run --home DIR --only atom-4 llama.cpp-4 --prompts gsm8k.jsonl
python benchmarks/compare_peers.py run --home DIR --only atom-hybrid llama.cpp-hybrid
python benchmarks/compare_peers.py run --home DIR --gguf A.gguf B.gguf  # ours and llama.cpp
python benchmarks/compare_peers.py run --home DIR --folder A            # ours and vLLM

`setup` makes an environment for each peer and exports the embedded model for it. `run` starts one
process an engine; they take turns on the same tokens, a bandwidth probe between. Decode speed is
the tokens after the first over the time beyond that of a first token alone. Medians are printed,
and for ratios within a round their range. Of GGUF files the share of the bandwidth is, too: a
token's bytes of weights times `decode-1`, over what the probe read just before and just after.
A run is thrown away when other processes took more than a tenth of a processor. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from _cpu_facts import cpu_features
from _peer_process import PEERS, PROBE, USUAL, Worker, peers_in, peers_on
from _peer_report import Found, rows, to_markdown
from _peer_setup import ENVIRONMENTS, set_up
from _quiet import OtherWork, neighbour

from atom.bench.report import environment, read_conversations, read_text, write_json, write_text

CASES = ("decode-1", "decode-8", "prefill")
_MOST_FOREIGN_CORES = 0.1
_ATTEMPTS = 4
_BANDWIDTH_READS = 5
_BYTES_OF_A_READ = 1 << 29
_WITH_AVX2 = "AVX2 alone, but for OpenVINO and vLLM"


class Contest:
    """All engines, started; `found` grows round by round."""

    def __init__(self, args: argparse.Namespace, workers: dict[str, Worker], probe: Worker) -> None:
        self._args, self._workers, self._probe = args, workers, probe
        self._chats, self._text = _prompts(args)
        self.found = Found({name: {case: [] for case in CASES} for name in workers})

    def report(self) -> dict[str, Any]:
        """What was found until now, and where."""
        found, peers = self.found, [worker.peer for worker in self._workers.values()]
        versions: dict[str, str] = {}
        for worker in self._workers.values():
            versions |= {f"{worker.peer.engine}: {k}": v for k, v in worker.versions.items()}
            if worker.peer.fallback is not None and worker.options == worker.peer.fallback:
                versions[worker.peer.name] = f"crashed, so with {worker.options}"
        low, *_, high = sorted(found.bandwidth)
        middle = statistics.median(found.bandwidth)
        facts = environment() | versions | {
            "threads": self._probe.threads,
            "features": _WITH_AVX2 if self._args.avx2 else cpu_features(),
            "read bandwidth": f"{middle / 1e9:.1f} GB/s ({low / 1e9:.1f} to {high / 1e9:.1f})",
        }  # fmt: skip
        return {
            "environment": facts,
            "cases": list(self._args.cases),
            "rounds": found.rounds,
            "discarded": found.discarded,
            "results": rows(found, peers, self._args.cases),
            "speeds": found.speeds,
            "kept": found.kept,
            "beside": found.beside,
        }

    def warm_up(self) -> None:
        """Every engine once, not counted: what is compiled, recorded and learnt at first."""
        for name, worker in self._workers.items():
            for case in self.found.speeds[name]:
                if case in self._args.cases:
                    self._speed(worker, case, 0)

    def round(self) -> None:
        """Every engine once; the prompts change from round to round."""
        number = self.found.rounds
        cases = [case for case in CASES if case in self._args.cases]
        order = list(self._workers)
        for name in order if number % 2 else reversed(order):
            before = self._bandwidth()
            for case in cases:
                self.found.speeds[name][case].append(self._clean(name, case, number))
                if case == "decode-1":
                    around = (before + self._bandwidth()) / 2
                    self.found.beside.setdefault(name, []).append(around)
            if self._args.with_neighbour:
                self._beside_neighbour(name, number)
        self.found.rounds += 1

    def _bandwidth(self) -> float:
        seconds = self._probe.generate([[0]], _BANDWIDTH_READS)
        self.found.bandwidth.append(_BANDWIDTH_READS * _BYTES_OF_A_READ / seconds)
        return self.found.bandwidth[-1]

    def _beside_neighbour(self, name: str, number: int) -> None:
        with neighbour() as pid:
            slow = self._clean(name, "decode-1", number, pid)
        fast = self._clean(name, "decode-1", number)
        if slow and fast:
            self.found.kept.setdefault(name, []).append(slow / fast)

    def _clean(self, name: str, case: str, number: int, *known: int) -> float | None:
        """Tokens/s of a run that nobody disturbed; None when every attempt was disturbed."""
        worker = self._workers[name]
        for _ in range(_ATTEMPTS):
            others = OtherWork((worker.pid, *known))
            speed = self._speed(worker, case, number)
            is_quiet = others.cores() <= _MOST_FOREIGN_CORES or self._args.any_load
            # A disturbed run for the first token may take longer than one for all of them.
            if is_quiet and speed > 0:
                return speed
            self.found.discarded += 1
            time.sleep(1)
        return None

    def _speed(self, worker: Worker, case: str, number: int) -> float:
        if case == "prefill":
            # Another beginning in each round, so that nothing could have been cached.
            start = 37 * number % len(self._text)
            prompt = (self._text[start:] + self._text[:start])[: self._args.prefill_tokens]
            return len(prompt) / worker.generate([prompt], 1)
        count = 1 if case == "decode-1" else 8
        chats = [self._chats[(number * count + i) % len(self._chats)] for i in range(count)]
        to_first = worker.generate(chats, 1)
        tokens: int = self._args.max_tokens
        rest = worker.generate(chats, tokens) - to_first
        return count * (tokens - 1) / rest


def _prompts(args: argparse.Namespace) -> tuple[list[list[int]], list[int]]:
    """Chats, and a long text, as tokens."""
    from atom.config import ModelOptions
    from atom.model_loader.read_files import read_tokenizer
    from atom.model_loader.source import resolve_model

    folder = args.home / "smollm2"
    if args.gguf is not None:
        folder = resolve_model(ModelOptions(model=str(args.gguf[0]))).path
    elif args.folder is not None:
        (folder, *_) = args.folder
    tokenizer = read_tokenizer(folder, trust_remote_code=False)
    chats = [
        tokenizer.encode(
            tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True)
        )[: args.chat_tokens]
        for c in read_conversations(args.prompts, None)
    ]
    text = tokenizer.encode(read_text(Path(__file__)))
    return chats, text * -(-args.prefill_tokens // len(text))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    setup = commands.add_parser("setup", help="make the peers' environments and models")
    usual = [name for name in ENVIRONMENTS if not name.endswith("-avx2")]
    setup.add_argument("--only", nargs="+", choices=ENVIRONMENTS, default=usual)
    setup.add_argument(
        "--packages", nargs="+", action="append", default=[], metavar=("ENGINE", "PACKAGE"),
        help="what pip installs for one peer, such as: --packages openvino torch==2.13.0 "
        "openvino-genai 'optimum-intel[openvino]'",
    )  # fmt: skip
    run = commands.add_parser("run", help="measure")
    which = run.add_mutually_exclusive_group()
    which.add_argument(
        "--only", nargs="+", choices=PEERS, default=USUAL,
        help="all on the embedded model; vLLM that compiles nothing, and those on a hybrid model "
        "with random weights, only by name",
    )  # fmt: skip
    which.add_argument(
        "--gguf", type=Path, nargs="+", metavar="FILE",
        help="ours and llama.cpp on each of these files, of one tokenizer",
    )  # fmt: skip
    which.add_argument(
        "--folder", type=Path, nargs="+",
        help="ours and vLLM, which compiles for minutes, in bfloat16 on each of these checkpoints, "
        "of one tokenizer",
    )  # fmt: skip
    run.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    run.add_argument("--seconds", type=float, default=600, help="begin no round later (600)")
    run.add_argument(
        "--prompts", type=Path, help="JSONL with questions; a few of ours when omitted"
    )
    run.add_argument("--max-tokens", type=int, default=64, help="of an answer (64)")
    run.add_argument("--chat-tokens", type=int, help="of a chat, at most; all when omitted")
    run.add_argument("--prefill-tokens", type=int, default=512, help="(512)")
    run.add_argument("--num-threads", type=int, help="of every engine; all processors when omitted")
    run.add_argument("--with-neighbour", action="store_true", help="also beside a busy process")
    run.add_argument(
        "--avx2", action="store_true",
        help="as on a processor with AVX2 and nothing newer: ours and transformers by their "
        "settings, llama.cpp as `setup --only llama.cpp-avx2` compiled it; the others as they are",
    )  # fmt: skip
    run.add_argument("--any-load", action="store_true", help="a rehearsal: throw no run away")
    run.add_argument("--output-json", type=Path)
    run.add_argument("--output-md", type=Path)
    for command in (setup, run):
        command.add_argument("--home", type=Path, required=True, help="folder of the peers")
    args = parser.parse_args(argv)
    if args.command == "setup":
        if unknown := [name for name, *_ in args.packages if name not in ENVIRONMENTS]:
            parser.error(f"--packages {unknown[0]}: the peers are {', '.join(ENVIRONMENTS)}")
        args.packages = {name: packages for name, *packages in args.packages}
    return args


@contextlib.contextmanager
def started(args: argparse.Namespace) -> Iterator[Contest]:
    """All engines, loaded and warm."""
    from atom.processors import default_num_threads

    threads = args.num_threads or default_num_threads()
    if args.gguf is not None:
        peers = [peer for file in args.gguf for peer in peers_on(file)]
    elif args.folder is not None:
        peers = [peer for folder in args.folder for peer in peers_in(folder)]
    else:
        peers = [PEERS[name] for name in args.only]
    with contextlib.ExitStack() as stack:
        probe = stack.enter_context(Worker.start(PROBE, args.home, threads))
        workers = {
            peer.name: stack.enter_context(Worker.start(peer, args.home, threads, avx2=args.avx2))
            for peer in peers
        }
        contest = Contest(args, workers, probe)
        contest.warm_up()
        yield contest


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure until the time is over, one round at least; the report."""
    with started(args) as contest:
        began = time.monotonic()
        while not contest.found.rounds or time.monotonic() - began < args.seconds:
            contest.round()
            print(f"round {contest.found.rounds} done", file=sys.stderr, flush=True)
        return contest.report()


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.command == "setup":
        set_up(args.home, args.only, args.packages)
        return 0
    report = run(args)
    markdown = to_markdown(report)
    print(markdown)
    write_text(args.output_md, markdown + "\n")
    write_json(args.output_json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
