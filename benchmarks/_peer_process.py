"""The engines of compare_peers.py, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from _peer_setup import ENVIRONMENTS, HYBRID
from gguf import GGUFReader

from atom.model_loader.locate import embedded_model

_PROGRAM = Path(__file__).with_name("_peer_worker.py")
# So that an engine computes as on a processor whose newest instructions are AVX2's.
_TORCH_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
_AVX2 = {"transformers": _TORCH_AVX2, "atom": {**_TORCH_AVX2, "ATOM_CPU_ARCH": "haswell"}}


@dataclass(frozen=True)
class Peer:
    """Attributes:
    engine: of `_peer_worker.ENGINES`.
    bits: of its weights.
    model: its path, given the home folder; None is the embedded one.
    options: of the engine besides.
    fallback: those with which it starts when it crashes with `options`.
    family: what else it can be compared with.
    token_bytes: of weights that a token of one sequence reads, where that is counted.
    """

    name: str
    engine: str
    bits: int
    model: Callable[[Path], Path | None]
    options: dict[str, Any]
    fallback: dict[str, Any] | None = None
    family: str = "smollm2"
    token_bytes: int | None = None

    def is_rival(self, other: Peer) -> bool:
        """Whether the other is of another project, with as many bits of the same model."""
        same = (self.bits, self.family) == (other.bits, other.family)
        return same and self.engine != other.engine


def _ours(bits: int, model: str | None, **options: Any) -> list[Peer]:
    def path(home: Path) -> Path | None:
        return None if model is None else home / model

    return [
        Peer(f"atom-{bits}{suffix}", "atom", bits, path, {**options, "speculates": bool(suffix)})
        for suffix in ("", "-drafts")
    ]


def _theirs(engine: str, bits: int, file: str, **options: Any) -> Peer:
    return Peer(f"{engine}-{bits}", engine, bits, lambda home: home / file, options)


def _hybrid(**options: Any) -> Peer:
    """The file of random weights, with the inputs of products in so many bits as by default, or as
    `activations` says.
    """
    name = "-".join(("atom-hybrid", *options.values()))
    given = {**options, "speculates": False}
    return Peer(name, "atom", 8, lambda home: home / HYBRID, given, family="hybrid")


def _llama_cpp(bits: int, model: Callable[[Path], Path]) -> Peer:
    """Its AMX kernels, which read weights from buffers of their own, crash where it was compiled
    without `_tile_config.h`.
    """
    with_amx, without = {"extra_buffers": True}, {"extra_buffers": False}
    return Peer(f"llama.cpp-{bits}", "llama.cpp", bits, model, with_amx, without)


def peers_on(file: Path) -> list[Peer]:
    """This engine and llama.cpp with their default settings on a GGUF file."""
    reader = GGUFReader(file)
    num_bytes = sum(int(tensor.n_bytes) for tensor in reader.tensors)
    bits = round(8 * num_bytes / sum(int(tensor.n_elements) for tensor in reader.tensors))
    theirs = _llama_cpp(bits, lambda _: file)
    ours = Peer("", "atom", bits, lambda _: file, {"speculates": False})
    about: dict[str, Any] = {"family": file.name, "token_bytes": token_bytes(reader)}
    return [replace(peer, name=f"{peer.engine}-{file.stem}", **about) for peer in (ours, theirs)]


def peers_in(folder: Path) -> list[Peer]:
    """This engine and vLLM, both as by default, in bfloat16 on a folder of a checkpoint."""
    options = {"atom": {"speculates": False}, "vllm": {"eager": False}}
    return [
        Peer(f"{engine}-{folder.name}", engine, 16, lambda _: folder, given, family=folder.name)
        for engine, given in options.items()
    ]


def token_bytes(reader: GGUFReader) -> int:
    """Of the weights that one token needs: of experts those that are used, and of an embedding that
    is not the output's as well, nothing.
    """
    names = {tensor.name for tensor in reader.tensors}
    keys = {key.partition(".")[2]: field for key, field in reader.fields.items()}
    used = 1.0
    if "expert_count" in keys:
        used = keys["expert_used_count"].contents() / keys["expert_count"].contents()
    shares = {tensor.name: used if "_exps." in tensor.name else 1.0 for tensor in reader.tensors}
    if "output.weight" in names:
        shares["token_embd.weight"] = 0.0
    return round(sum(shares[tensor.name] * int(tensor.n_bytes) for tensor in reader.tensors))


_ALL = [
    *_ours(16, "smollm2"),
    *_ours(8, "smollm2", quantization="int8"),
    *_ours(4, None),
    _theirs("transformers", 16, "smollm2"),
    _theirs("vllm", 16, "smollm2", eager=False),
    _llama_cpp(16, lambda home: home / "smollm2-bf16.gguf"),
    _llama_cpp(8, lambda home: home / "smollm2-q8_0.gguf"),
    _llama_cpp(4, lambda _: embedded_model()),
    _theirs("openvino", 16, "ov_fp16"),
    _theirs("openvino", 8, "ov_int8"),
    _theirs("openvino", 4, "ov_int4"),
]
_THEIRS = replace(
    _llama_cpp(8, lambda home: home / HYBRID), name="llama.cpp-hybrid", family="hybrid"
)
# Without the first start of many minutes.
_EAGER_VLLM = replace(_theirs("vllm", 16, "smollm2", eager=True), name="vllm-16-eager")
USUAL = [peer.name for peer in _ALL]
_BY_NAME = (_hybrid(), _hybrid(activations="int8"), _THEIRS, _EAGER_VLLM)
PEERS = {peer.name: peer for peer in (*_ALL, *_BY_NAME)}
# Reads memory and computes nothing.
PROBE = Peer("bandwidth", "bandwidth", 0, lambda _: None, {})


class Worker:
    """A running engine.

    Attributes:
        options: with which it started.
        threads: with how many.
    """

    def __init__(
        self, peer: Peer, process: subprocess.Popen[str], options: dict[str, Any], threads: int
    ) -> None:
        self.peer, self.options, self.threads, self._process = peer, options, threads, process
        self.versions: dict[str, str] = self._answer()["versions"]

    @classmethod
    def start(cls, peer: Peer, home: Path, threads: int, *, avx2: bool = False) -> Worker:
        """Start it and wait until its model is loaded.

        Args:
            avx2: without newer instructions; OpenVINO and vLLM are not kept from them.

        Raises:
            RuntimeError: when it ends instead.
        """
        try:
            return cls._started(peer, peer.options, home, threads, avx2)
        except RuntimeError as error:
            if peer.fallback is None:
                raise
            print(f"{error}; once more with {peer.fallback}", file=sys.stderr, flush=True)
            return cls._started(peer, peer.fallback, home, threads, avx2)

    @classmethod
    def _started(
        cls, peer: Peer, given: dict[str, Any], home: Path, threads: int, avx2: bool
    ) -> Worker:
        environment = ENVIRONMENTS.get(peer.engine)
        if avx2:
            environment = ENVIRONMENTS.get(f"{peer.engine}-avx2", environment)
        python = sys.executable if environment is None else str(environment.python(home))
        model = peer.model(home)
        options = {**given, "num_threads": threads, "model": model and str(model)}
        command = [python, str(_PROGRAM), peer.engine, json.dumps(options)]
        variables = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        if environment is not None and environment.preloaded is not None:
            variables["LD_PRELOAD"] = str(home / environment.folder / environment.preloaded)
        if avx2:
            variables |= _AVX2.get(peer.engine, {})
        print(f"starting {peer.name} ...", file=sys.stderr, flush=True)
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
        )
        return cls(peer, process, given, threads)

    @property
    def pid(self) -> int:
        return self._process.pid

    def generate(self, prompts: list[list[int]], max_tokens: int) -> float:
        """Seconds that `max_tokens` tokens for every prompt take.

        Raises:
            RuntimeError: when the engine fails.
        """
        assert self._process.stdin is not None
        request = {"prompts": prompts, "max_tokens": max_tokens}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._end()}
        if "error" in answer:
            raise RuntimeError(f"{self.peer.name}: {answer['error']}")
        return answer

    def _end(self) -> str:
        return f"it ended with status {self._process.wait()}"

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
