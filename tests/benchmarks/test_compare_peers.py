"""The comparison with other engines: arithmetic, files, processes. No peer runs here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize
from models.harness import ModelBench
from patience import wait_until

Module = Callable[[str], Any]

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class FakeWorker:
    """Takes a second for a prompt, and `step` for every token after the first."""

    def __init__(self, step: float) -> None:
        self.pid, self._step = 0, step
        self.asked: list[tuple[int, int]] = []

    def generate(self, prompts: list[list[int]], max_tokens: int) -> float:
        self.asked.append((len(prompts), max_tokens))
        return 1 + self._step * (max_tokens - 1)


@pytest.fixture
def contest(
    benchmark_module: Module, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Any, dict[str, FakeWorker]]]:
    peers = benchmark_module("compare_peers")
    monkeypatch.setattr(peers, "_prompts", lambda _: ([[1], [2], [3]], [5, 6, 7] * 30))
    monkeypatch.setattr(peers.time, "sleep", lambda _: None)

    def make(busy: list[float], **options: Any) -> tuple[Any, dict[str, FakeWorker]]:
        class Others:
            def __init__(self, _: object) -> None:
                pass

            def cores(self) -> float:
                return busy.pop(0) if busy else 0.0

        monkeypatch.setattr(peers, "OtherWork", Others)
        args = Namespace(cases=peers.CASES, with_neighbour=False, any_load=False)
        args.max_tokens, args.prefill_tokens = 11, 50
        vars(args).update(options)
        workers = {"atom-8": FakeWorker(0.1), "llama.cpp-8": FakeWorker(0.2)}
        return peers.Contest(args, workers, FakeWorker(0.0)), workers

    return make


def test_speeds_of_a_round(contest: Any) -> None:
    made, workers = contest([])
    made.round()
    ours = made.found.speeds["atom-8"]
    assert ours["decode-1"] == [pytest.approx(10)]
    assert ours["decode-8"] == [pytest.approx(80)]
    assert ours["prefill"] == [50]
    assert workers["atom-8"].asked == [(1, 1), (1, 11), (8, 1), (8, 11), (1, 1)]
    assert len(made.found.bandwidth) == 4
    assert {name: len(around) for name, around in made.found.beside.items()} == {
        "atom-8": 1,
        "llama.cpp-8": 1,
    }


def test_the_first_runs_are_not_counted(contest: Any) -> None:
    made, workers = contest([], cases=("decode-1",))
    made.warm_up()
    assert all(worker.asked == [(1, 1), (1, 11)] for worker in workers.values())
    assert made.found.rounds == 0
    assert made.found.speeds["atom-8"]["decode-1"] == []


def test_disturbed_runs_are_thrown_away(contest: Any) -> None:
    made, _ = contest([0.5, 0.0, *[0.2] * 4], cases=("decode-1",))
    made.round()
    found = {name: speeds["decode-1"] for name, speeds in made.found.speeds.items()}
    assert found == {"llama.cpp-8": [pytest.approx(5)], "atom-8": [None]}
    assert made.found.discarded == 5
    made, workers = contest([], cases=("decode-1",))
    workers["atom-8"]._step = -0.01
    made.round()
    assert made.found.speeds["atom-8"]["decode-1"] == [None]
    made, _ = contest([0.5] * 2, cases=("decode-1",), any_load=True)
    made.round()
    assert made.found.discarded == 0


def test_the_table(benchmark_module: Module) -> None:
    """Ratios are those of single rounds, to the peer with the best median."""
    peers = benchmark_module("compare_peers")
    speeds = {
        "atom-8": [90.0, 100.0, 300.0, 50.0],
        "llama.cpp-8": [50.0, 60.0, 70.0, 10.0],
        "openvino-8": [100.0, 80.0, 100.0, None],
        "transformers-16": [400.0] * 4,
    }
    found = peers.Found(
        {name: {"decode-1": values, "prefill": [None] * 4} for name, values in speeds.items()},
        kept={"atom-8": [0.9, 0.7, 0.8]},
        beside={"atom-8": [1e4, 1e4, 4e4, 1e4]},
    )
    chosen = [peers.PEERS[name] for name in speeds]
    chosen[0] = replace(chosen[0], token_bytes=80)
    rows = peers.rows(found, chosen, ["decode-1", "prefill"])
    assert rows[0]["ratios"] == {"decode-1": (1.25, 0.9, 3)}
    assert rows[0]["share"] == (pytest.approx(0.66), pytest.approx(0.4), pytest.approx(0.8))
    report = {"cases": ["decode-1", "prefill"], "results": rows, "rounds": 4, "discarded": 2}
    text = peers.to_markdown({**report, "environment": {"cpu": "some"}})
    assert "| atom-8 | 8 | 95.0 (1.25x, 0.90 to 3.00) |  | 0.80 | 0.66 (0.40 to 0.80) |" in text
    assert "| openvino-8 | 8 | 100.0 |  |  |  |" in text
    assert "2 runs were thrown away" in text


def test_a_worker_answers_and_fails(benchmark_module: Module, tmp_path: Path) -> None:
    """The bandwidth probe, which needs no environment; then an engine without its model."""
    process = benchmark_module("_peer_process")
    with process.Worker.start(process.PROBE, tmp_path, 1) as worker:
        assert worker.generate([[0]], 1) > 0
    missing = process.Peer("gone", "atom", 16, lambda home: home / "gone", {"speculates": False})
    with pytest.raises(RuntimeError, match="gone: it ended with status 1"):
        process.Worker.start(missing, tmp_path, 1)


def test_an_engine_that_crashes_starts_otherwise(
    benchmark_module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = benchmark_module("_peer_process")
    program = tmp_path / "program.py"
    program.write_text(
        "import json, os, sys\n"
        "if json.loads(sys.argv[2])['extra_buffers']: os.abort()\n"
        "print(json.dumps({'versions': {'a': '1'}}), flush=True)\n"
        "sys.stdin.read()\n"
    )
    monkeypatch.setattr(process, "_PROGRAM", program)
    monkeypatch.setattr(process, "ENVIRONMENTS", {})
    with process.Worker.start(process.PEERS["llama.cpp-8"], tmp_path, 1) as worker:
        assert worker.options == {"extra_buffers": False}
        assert worker.versions == {"a": "1"}


@pytest.mark.parametrize(("name", "kind"), [("bf16", "BF16"), ("q8_0", "Q8_0")])
def test_numbers_of_a_file_are_rounded(
    benchmark_module: Module, tmp_path: Path, name: str, kind: str
) -> None:
    matrix = np.linspace(-1, 1, 64 * 4, dtype=np.float32).reshape(4, 64)
    writer = GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_uint32("llama.block_count", 1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_tensor("blk.0.ffn_up.weight", matrix)
    writer.add_tensor("norm.weight", matrix[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    benchmark_module("_peer_setup").write_gguf(tmp_path / "a.gguf", tmp_path / "b.gguf", name)
    read = GGUFReader(tmp_path / "b.gguf")
    assert read.fields["llama.block_count"].contents() == 1
    assert read.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    up, norm = sorted(read.tensors, key=lambda tensor: str(tensor.name))
    assert up.tensor_type is GGMLQuantizationType[kind]
    np.testing.assert_allclose(dequantize(up.data, up.tensor_type), matrix, atol=0.01)
    np.testing.assert_array_equal(norm.data, matrix[0])


def test_a_hybrid_file_is_the_checkpoint(
    benchmark_module: Module,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    byte_level_tokenizer: transformers.PreTrainedTokenizerFast,
) -> None:
    """But for the rounding of matrices, and with another tokenizer than the embedded one."""
    hybrid = benchmark_module("_hybrid_gguf")
    byte_level_tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(hybrid, "GGUFReader", lambda _: Namespace(fields={}))
    monkeypatch.setattr(hybrid, "_KIND", GGMLQuantizationType.F32)
    config = transformers.Qwen3NextConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        num_experts=3,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
        tie_word_embeddings=True,
    )
    monkeypatch.setattr(hybrid, "SHAPES", {hybrid._SHAPE: lambda: config})
    hybrid.write_hybrid_gguf(tmp_path / "a.gguf")
    torch.manual_seed(0)
    reference = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tokens = [5, 100, 7, 7, 250, 31]
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    bench = ModelBench(tmp_path / "a.gguf", num_blocks=4, tokenizer=str(tmp_path))
    torch.testing.assert_close(bench.run(tokens, [5, 1]), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", ["llama-1b", "qwen3-4b", "qwen3-30b-a3b"])
def test_random_files(
    benchmark_module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    """Weights of each type have the usual size, and both engines are compared on the file."""
    random = benchmark_module("random_gguf")
    monkeypatch.setattr(random, "GGUFReader", lambda _: Namespace(fields={}))
    monkeypatch.setattr(random, "_VOCABULARY", 64)
    small = replace(random.SHAPES[shape], hidden=256, heads=2, kv_heads=1, head=128, wide=256)
    small = replace(small, experts=min(small.experts, 2), used=min(small.used, 1))
    monkeypatch.setattr(random, "SHAPES", {shape: small})
    for kind in random.TYPES:
        random.main([shape, kind, str(tmp_path / f"{kind}.gguf"), "--layers", "2"])
        tensors = GGUFReader(tmp_path / f"{kind}.gguf").tensors
        spreads = {t.name: dequantize(t.data, t.tensor_type).std() for t in tensors}
        assert len(spreads) == 20 + (4 if small.normed else 0) + (2 if small.experts else 0)
        assert all("norm" in name or 0.01 < size < 0.04 for name, size in spreads.items()), spreads
    ours, theirs = benchmark_module("_peer_process").peers_on(tmp_path / "q4_k_m.gguf")
    assert (ours.name, theirs.name) == ("atom-q4_k_m", "llama.cpp-q4_k_m")
    assert ours.is_rival(theirs)
    assert 4 < ours.bits < 8
    assert ours.model(tmp_path) == tmp_path / "q4_k_m.gguf"
    other, _ = benchmark_module("_peer_process").peers_on(tmp_path / "q4_0.gguf")
    assert not other.is_rival(theirs)
    # The embedding is the output's as well; of two experts one is used.
    sizes = {str(tensor.name): int(tensor.n_bytes) for tensor in tensors}
    idle = sum(size for name, size in sizes.items() if "_exps" in name) // 2
    reads = benchmark_module("_peer_process").peers_on(tmp_path / f"{kind}.gguf")[0].token_bytes
    assert reads == sum(sizes.values()) - idle


def test_hybrids_are_compared_with_each_other(benchmark_module: Module) -> None:
    peers = benchmark_module("_peer_process").PEERS
    assert peers["atom-hybrid-int8"].is_rival(peers["llama.cpp-hybrid"])
    assert peers["atom-8"].is_rival(peers["llama.cpp-8"])
    assert not peers["atom-8"].is_rival(peers["llama.cpp-hybrid"])
    assert peers["atom-hybrid-int8"].options == {"activations": "int8", "speculates": False}
    assert not any("hybrid" in name for name in benchmark_module("compare_peers").USUAL)


def test_folders_and_a_vllm_that_compiles_nothing(benchmark_module: Module) -> None:
    process = benchmark_module("_peer_process")
    ours, theirs = process.peers_in(Path("a/1b"))
    assert (ours.name, theirs.name) == ("atom-1b", "vllm-1b")
    assert ours.is_rival(theirs)
    assert not process.PEERS["atom-16"].is_rival(theirs)
    assert process.PEERS["atom-16"].is_rival(process.PEERS["vllm-16-eager"])
    eager = {name: process.PEERS[name].options for name in ("vllm-16", "vllm-16-eager")}
    assert eager == {"vllm-16": {"eager": False}, "vllm-16-eager": {"eager": True}}
    assert theirs.options == eager["vllm-16"]
    assert "vllm-16-eager" not in benchmark_module("compare_peers").USUAL


def test_workers_tell_how_threads_wait_and_hide_our_modules(
    benchmark_module: Module, tmp_path: Path
) -> None:
    """transformers takes whatever is called `kernels` for a library."""
    folder = Path(benchmark_module("_peer_worker").__file__).parent
    assert (folder / "kernels.py").exists()
    program = f"""
import importlib.util, sys
sys.path.insert(0, {str(folder)!r})
import _peer_worker

def engine(options):
    assert importlib.util.find_spec("kernels") is None
    return lambda prompts, max_tokens: None

_peer_worker.ENGINES["fake"] = engine, ()
_peer_worker.main("fake", "{{}}")
"""
    variables = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, input="", cwd=tmp_path, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    versions = json.loads(done.stdout)["versions"]
    assert versions["OMP_WAIT_POLICY"] == "passive"


def test_setup_keeps_what_is_there(
    benchmark_module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = benchmark_module("_peer_setup")
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(setup, "_run", lambda *command, **_: commands.append(command))
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "ov_int8").mkdir()
    (tmp_path / "ov_int8" / "openvino_model.bin").touch()
    setup.set_up(tmp_path, ["openvino"], {"openvino": ["openvino-genai==1"]})
    made, installed, removed, *exports = commands
    assert made[-1] == str(tmp_path / "venv_ov")
    assert installed[-1] == "openvino-genai==1"
    assert "torchvision" in removed
    assert [command[-1] for command in exports] == [
        str(tmp_path / "ov_fp16"),
        str(tmp_path / "ov_int4"),
    ]


@pytest.mark.parametrize("threads", [1, 3])
def test_all_of_the_memory_is_read(benchmark_module: Module, threads: int) -> None:
    reads = benchmark_module("_reads")
    memory = reads.Memory(threads, 10_000)
    assert 10_000 <= memory.num_bytes < 10_000 + threads * 256
    assert memory.num_bytes % threads == 0
    assert memory.read() > 0
    (start, count), *rest = memory._parts
    memory._parts = [(start, count - 32), *rest]
    with pytest.raises(RuntimeError, match="not all"):
        memory.read()


@linux
def test_work_of_what_a_process_started(benchmark_module: Module) -> None:
    quiet = benchmark_module("_quiet")
    program = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'while True: pass'])"
    with psutil.Popen([sys.executable, "-c", program]) as parent:
        wait_until(lambda: len(parent.children()) == 1)
        (child,) = parent.children()
        try:
            all_but_us, all_but_them = quiet.OtherWork(()), quiet.OtherWork((parent.pid,))
            begun = child.cpu_times().user
            wait_until(lambda: child.cpu_times().user > begun + 0.3)
            assert all_but_us._others() - all_but_us._start > 0.25 + (
                all_but_them._others() - all_but_them._start
            )
        finally:
            child.kill()


@linux
def test_work_of_others(benchmark_module: Module) -> None:
    quiet = benchmark_module("_quiet")
    with quiet.neighbour() as pid:
        all_but_us, all_but_both = quiet.OtherWork(()), quiet.OtherWork((pid,))
        process = psutil.Process(pid)
        begun = process.cpu_times().user
        wait_until(lambda: process.cpu_times().user > begun + 0.3)
        assert all_but_us.cores() > all_but_both.cores()
    assert not Path(f"/proc/{pid}").exists()


def test_options(benchmark_module: Module, capsys: pytest.CaptureFixture[str]) -> None:
    parse = benchmark_module("compare_peers").parse_args
    args = parse(["setup", "--home", "x", "--packages", "openvino", "a", "b"])
    assert args.packages == {"openvino": ["a", "b"]}
    with pytest.raises(SystemExit):
        parse(["run", "--home", "x", "--gguf", "a.gguf", "--only", "atom-4"])
    with pytest.raises(SystemExit):
        parse(["setup", "--home", "x", "--packages", "vllm-gpu", "a"])
    assert (
        "the peers are transformers, llama.cpp, llama.cpp-avx2, openvino, vllm"
        in capsys.readouterr().err
    )
    assert json.dumps(parse(["run", "--home", "x"]).only)
