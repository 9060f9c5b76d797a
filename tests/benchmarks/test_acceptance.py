"""acceptance.py: what it reads, how it counts, and whole runs on a tiny model and on servers."""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stub_server

from atom.bench.report import read_conversations
from atom.entrypoints.http.metrics import ServerMetrics
from atom.messages import EngineStats
from atom.stats import SpecDecodeStats

Import = Callable[[str], Any]


@pytest.fixture
def acceptance(benchmark_module: Import) -> Any:
    return benchmark_module("acceptance")


def test_a_run_on_a_tiny_model(acceptance: Any, tiny_llama_dir: Path, tmp_path: Path) -> None:
    """In float32 every arm gives the text of the first, and the counts agree with each other."""
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(f'{{"question": "again and again {i}"}}\n' for i in range(4)))
    code = tmp_path / "code.jsonl.gz"
    code.write_bytes(gzip.compress(b'{"task": 1, "prompt": "def f(x):"}\n'))
    output = tmp_path / "report"
    model = ["--model", str(tiny_llama_dir), "--dtype", "float32", "--num-threads", "1"]
    model += ["--kv-cache-memory", "4MB", "--max-model-len", "256"]
    status = acceptance.main(
        [
            *model,
            *("--prompts", f"q={questions}", f"code={code}:prompt", "--limit", "3"),
            *("--method", "suffix", "--num-speculative-tokens", "1", "3", "--max-tokens", "24"),
            *("--temperature", "0", "0.7", "--batch-size", "1", "2", "--require-same"),
            *("--arm", 'wide={"method": "suffix", "num_speculative_tokens": 5}'),
            *("--output-dir", str(output)),
        ]
    )
    assert status == 0
    report = json.loads((output / "acceptance.json").read_text())
    results = report["results"]
    arms = ["off", "k=1", "k=3", "wide"]
    groups = [(n, t, b) for n in ("q", "code") for t in (0, 0.7) for b in (1, 2)]
    expected = [(*group, arm) for group in groups for arm in arms]
    found = [(r["prompts"], r["temperature"], r["batch_size"], r["arm"]) for r in results]
    assert found == expected
    for r in results:
        assert r["num_prompts"] == r["same_texts"] == (3 if r["prompts"] == "q" else 1)
        assert sum(r["distribution"]) == r["verified_steps"]
        accepted = sum(i * n for i, n in enumerate(r["distribution"]))
        if r["arm"] == "off":
            assert r["verified_steps"] == 0
            assert r["tokens_per_forward"] == r["speedup"] == 1
        else:
            assert r["verified_steps"] > 0
            assert r["tokens_per_forward"] == pytest.approx(1 + accepted / r["verified_steps"])
            positions = sum(r["acceptance_per_position"]) * r["verified_steps"]
            assert positions == pytest.approx(accepted)
        assert r["tokens_per_s"] > 0
        assert 0 <= r["repeated_bigrams"] <= 1
    assert "| q | 0.7 | 2 | k=3 |" in (output / "acceptance.md").read_text()
    assert (output / "acceptance.png").read_bytes().startswith(b"\x89PNG")


def test_servers(acceptance: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Acceptance is what each server's /metrics counted, whatever the prefix."""
    with stub_server.serving() as first, stub_server.serving("vllm") as second:
        urls = [f"off={first.url}/v1", f"on={second.url}/v1"]
        status = acceptance.main(
            ["--base-url", *urls, "--limit", "2", "--max-tokens", "9", "--batch-size", "2"]
        )
        warm_up, *bodies = second.bodies
    assert status == 0
    assert warm_up["max_tokens"] == 4
    assert {(b["model"], b["max_tokens"], b["temperature"]) for b in bodies} == {("stub", 9, 0)}
    assert {b["seed"] for b in bodies} == {0, 1}
    line = next(line for line in capsys.readouterr().out.splitlines() if "batch 2, on" in line)
    assert "2.20 tokens per forward" in line
    assert "2/2 texts the same" in line


def test_a_server_that_is_not_there(acceptance: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        acceptance.main(["--base-url", "http://127.0.0.1:1/v1"])
    assert "no model at http://127.0.0.1:1/v1/models" in capsys.readouterr().err


def test_speeds_are_compared_chunk_by_chunk(acceptance: Any, benchmark_module: Import) -> None:
    batch = benchmark_module("_arms").Batch

    def record(seconds: list[float], text: list[int]) -> Any:
        drafts = SpecDecodeStats(num_drafts=4, num_draft_tokens=8, accepted_counts=[1, 2, 1])
        return acceptance.Record([batch([text], [11], s, s / 2, drafts) for s in seconds])

    slow, fast = record([1.0, 2.0, 4.0], [1, 2, 1, 2]), record([0.5, 2.0, 1.0], [1, 2, 1, 3])
    adaptive = record([0.5, 2.0, 4.5], [1, 2, 1, 2])
    off, on, judged = acceptance.evaluate(
        {"off": slow, "k=2": fast, "k=2 adaptive": adaptive}, "tokens"
    )
    assert (off["speedup"], on["speedup"], on["decode_speedup"]) == (1, 2, 2)
    assert on["tokens_per_s"] == 11
    assert on["total_tokens_per_s"] == pytest.approx(33 / 3.5)
    assert (on["same_texts"], judged["same_texts"]) == (0, 3)
    assert off["repeated_bigrams"] == pytest.approx(1 / 3)
    assert on["tokens_per_forward"] == 2
    assert on["acceptance_per_position"] == [0.75, 0.25]
    assert judged["against_better"] == pytest.approx(3.5 / 7)
    assert "against_better" not in on


def test_arms(acceptance: Any) -> None:
    parse = acceptance.create_parser().parse_args
    flags = ["--model", "m", "--method", "eagle3", "--draft-model", "d"]
    arms = acceptance.plan_arms(parse([*flags, "--num-speculative-tokens", "1", "2"]))
    assert {name: given.get("num_speculative_tokens") for name, given in arms.items()} == {
        "off": None,
        "k=1": 1,
        "k=2": 2,
    }
    assert arms["off"] == {"model": "m", "enable_prefix_caching": False}
    arms = acceptance.plan_arms(parse([*flags, "--lookup", "--adaptive"]))
    assert list(arms) == ["off", "k=3", "k=3 lookup", "k=3 adaptive", "k=3 lookup adaptive"]
    last = arms["k=3 lookup adaptive"]
    assert last["speculative_lookup"]
    assert last["speculative_adaptive"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "m"], "nothing to compare"),
        (["--model", "m", "--arm", 'x={"metod": 1}'], "unknown engine argument(s) metod"),
        (["--arm", "x=1"], "expected NAME={json object}"),
        (["--arm", "x={"], "Expecting property name"),
        (["--prompts", "gsm8k"], "expected NAME=PATH"),
        (["--base-url", "http://h/v1", "--model", "m"], "--model is for engines"),
        (["--base-url", "http://h/v1", "--lookup"], "--lookup is for engines"),
        (["--api-key", "k"], "--api-key is for servers"),
        (["--model", "m", "--lookup"], "need a --method"),
        (["--model", "m", "--speculative-config", "{}"], "as an arm"),
        (["--batch-size", "0"], "must be at least 1"),
        (["--model", "m", "--arm", 'x={"method": "suffix"}'], "needs num_speculative_tokens"),
        (["--prompts", "x=/no/such/file"], "cannot read /no/such/file"),
    ],
)
def test_what_is_refused(
    acceptance: Any, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        acceptance.main(flags)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_options_with_colons(acceptance: Any, tmp_path: Path) -> None:
    odd = tmp_path / "a:b.jsonl"
    odd.touch()
    assert acceptance.parse_prompts(f"x={odd}") == ("x", odd, None)
    assert acceptance.parse_prompts("x=some.jsonl:text") == ("x", Path("some.jsonl"), "text")
    assert acceptance.parse_server("http://h:1/v1?a=b") == ("server", "http://h:1/v1?a=b")
    assert acceptance.parse_server("k3=http://h:1/v1") == ("k3", "http://h:1/v1")
    with pytest.raises(argparse.ArgumentTypeError):
        acceptance.parse_arm('off={"method": "suffix"}')


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"question": "Q", "answer": "A"}, "Q"),
        ({"question_id": 81, "turns": ["T", "U"]}, "T"),
        ({"task_id": "HumanEval/0", "prompt": "def f():"}, "def f():"),
        ({"messages": [{"role": "user", "content": "M"}], "prompt": "P"}, "M"),
    ],
)
def test_fields_are_found(tmp_path: Path, record: dict[str, Any], text: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(record))
    found = read_conversations(path, None)
    assert found == [[{"role": "user", "content": text}]]


def test_bad_prompts_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"question": "Q"}\n{"text": "T"}\n')
    with pytest.raises(ValueError, match=r"prompts.jsonl:2: messages, question, .*there is: text"):
        read_conversations(path, None)
    bad = tmp_path / "prompts.jsonl.gz"
    bad.write_bytes(b"no gzip")
    with pytest.raises(ValueError, match="cannot read"):
        read_conversations(bad, None)


def test_our_own_metrics_are_read_back(benchmark_module: Import) -> None:
    prometheus = benchmark_module("_prometheus")
    stats = SpecDecodeStats(num_drafts=10, num_draft_tokens=30, accepted_counts=[4, 3, 2, 1])
    text, _ = ServerMetrics().expose(EngineStats(spec_decode=stats))
    assert prometheus.parse_spec_decode(text.decode()) == stats
    assert prometheus.parse_spec_decode(ServerMetrics().expose(EngineStats())[0].decode()) is None
    earlier = SpecDecodeStats(num_drafts=1, num_draft_tokens=3, accepted_counts=[0, 1])
    between = prometheus.drafts_between(earlier, stats)
    assert between.accepted_counts == [4, 2, 2, 1]
    assert prometheus.drafts_between(None, stats) == stats
    assert prometheus.drafts_between(earlier, None) is None
