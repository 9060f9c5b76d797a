"""Command lines of other engines: a flag of theirs becomes ours, is dropped, or is refused."""

from __future__ import annotations

import logging
import re
import shlex
from pathlib import Path
from typing import NoReturn

import pytest

from atom.command_line.foreign_command_line import as_ours
from atom.command_line.foreign_flags import BY_NAME, FOREIGN_FLAGS, Fate, Takes
from atom.command_line.parser import CommandLine
from atom.config import EngineConfig
from atom.entrypoints.openai_server import create_parser, read_options
from atom.entrypoints.terminal import chat, run
from atom.entrypoints.terminal.settings import given_settings
from atom.model_engine.arg_utils import engine_config

CAPFD = pytest.CaptureFixture[str]
CAPLOG = pytest.LogCaptureFixture

# Lines of vllm-project/recipes (8959cf64): models/moonshotai/Kimi-K2.5.yaml and Kimi-K2.6.yaml,
# moonshotai/Kimi-K2.5.md.
RECIPES = (
    """moonshotai/Kimi-K2.5 --host 0.0.0.0 --port 8000 --trust-remote-code --tensor-parallel-size 8
    --tool-call-parser kimi_k2 --enable-auto-tool-choice --reasoning-parser kimi_k2
    --mm-encoder-tp-mode data""",
    """moonshotai/Kimi-K2.5 --tensor-parallel-size 8 --trust-remote-code --mm-encoder-tp-mode data
    --moe-backend flydsl --compilation-config '{"pass_config": {"fuse_allreduce_rms": false}}'""",
    """amd/Kimi-K2.5-MXFP4 --port 8000 --tensor-parallel-size 4 --gpu-memory-utilization 0.85
    --max-model-len 9472 --kv-cache-dtype fp8 --block-size 16 --max-num-batched-tokens 16384
    --max-num-seqs 512 --async-scheduling --trust-remote-code --no-enable-prefix-caching
    --mm-encoder-tp-mode data""",
    """nvidia/Kimi-K2.5-NVFP4 -tp 4 --mm-encoder-tp-mode data
    --compilation_config.pass_config.fuse_allreduce_rms true --tool-call-parser kimi_k2
    --reasoning-parser kimi_k2 --enable-auto-tool-choice --trust-remote-code""",
    """moonshotai/Kimi-K2.5 -tp 8 --mm-encoder-tp-mode data --tool-call-parser kimi_k2
    --reasoning-parser kimi_k2 --enable-auto-tool-choice --block-size=1 --mm-encoder-tp-mode data
    --mm-processor-cache-gb 0 --mm-processor-cache-type shm --trust-remote-code""",
    """moonshotai/Kimi-K2.5 --tensor-parallel-size 8 --language-model-only --speculative-config
    '{"model":"lightseekorg/kimi-k2.5-eagle3-mla","method":"eagle3","num_speculative_tokens":3}'
    --trust-remote-code""",
    """moonshotai/Kimi-K2.6 --tensor-parallel-size 8 --trust_remote_code --tool_call_parser kimi_k2
    --speculative_config '{"model": "lightseekorg/kimi-k2.6-eagle3-mla", "method": "eagle3",
    "num_speculative_tokens": 3}' --compilation_config '{"cudagraph_mode": "FULL_DECODE_ONLY"}'
    --all2all-backend flashinfer_nvlink_one_sided""",
    """nvidia/Kimi-K2.6-NVFP4 --tensor-parallel-size 4 --trust-remote-code --kv-cache-dtype fp8
    --block-size 64 --gpu-memory-utilization 0.90 --attention-backend TOKENSPEED_MLA
    --attention-config '{"use_prefill_query_quantization":true}'
    --compilation-config '{"cudagraph_mode":"FULL_AND_PIECEWISE","custom_ops":["all"]}'
    --max-cudagraph-capture-size 2048 --speculative-config '{"method":"eagle3",
    "model":"lightseekorg/kimi-k2.6-eagle3-mla","num_speculative_tokens":4}'""",
)


def engine(line: str) -> EngineConfig:
    config, _ = read_options(create_parser().parse_args(shlex.split(line)))
    return config


@pytest.mark.parametrize("line", RECIPES)
def test_published_commands_for_kimi_start(line: str, caplog: CAPLOG) -> None:
    config, server = read_options(create_parser().parse_args(shlex.split(line)))
    assert config.model.model == line.split()[0]
    assert config.model.trust_remote_code
    ranks = re.search(r"(?:-tp|--tensor-parallel-size) (\d)", line)
    assert ranks is not None
    assert config.parallel.tensor_parallel_size == int(ranks[1])
    assert server.tool_call_parser == ("kimi_k2" if "kimi_k2" in line else "auto")
    if "eagle3" in line:
        assert config.speculative is not None
        assert config.speculative.method == "eagle3"
        assert config.speculative.model == re.search(r'"(lightseekorg/[^"]+)"', line)[1]  # type: ignore[index]
    # What is dropped is told, once each.
    dropped = {word for word in line.split() if word.split("=")[0] in BY_NAME}
    dropped = {word for word in dropped if BY_NAME[word].fate is Fate.NEEDLESS}
    for flag in dropped:
        assert f"{flag} (vLLM) has no effect: " in caplog.text


def test_what_names_the_same_is_taken() -> None:
    config = engine(
        "--model-path m --tp 2 --context-length 8k --max-running-requests 7 --disable-radix-cache "
        "--disable-cuda-graph --speculative-algorithm EAGLE3 --speculative-draft-model-path d "
        "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
    )
    assert (config.model.model, config.model.max_model_len) == ("m", 8000)
    assert (config.parallel.tensor_parallel_size, config.scheduler.max_num_seqs) == (2, 7)
    assert not config.cache.enable_prefix_caching
    assert config.graphs.enforce_eager
    assert config.speculative is not None
    assert (config.speculative.method, config.speculative.model) == ("eagle3", "d")
    assert config.speculative.num_speculative_tokens == 3
    config = engine("-m x.gguf -c 4096 -t 3 -np 4 -ngl 99 --jinja -fa on -cb --mlock")
    assert (config.model.model, config.model.max_model_len) == ("x.gguf", 4096)
    assert (config.parallel.num_threads, config.scheduler.max_num_seqs) == (3, 4)
    assert engine("-c 0").model.max_model_len is None
    config = engine(
        "--model m --kv_cache_dtype fp8 -tp 4 --server-port 9000 --level 3 --enable-tbo prefill "
        "--cudagraph-capture-sizes [1,2,4] --enable_prefix_caching --method mtp "
        "--num-speculative-tokens 1 --enable-tbo"
    )
    assert config.graphs.capture_sizes == (1, 2, 4)
    config = engine("--no_enable_prefix_caching --no-disable-cuda-graph --no-async-scheduling")
    assert (config.cache.enable_prefix_caching, config.scheduler.overlap) == (False, False)
    assert engine("--no-disable-radix-cache").cache.enable_prefix_caching
    assert engine("--language-model-only").model.limit_mm_per_prompt == {"image": 0}
    assert engine("--no-language-model-only").model.limit_mm_per_prompt is None
    args = create_parser().parse_args(["--allowed-origins", '["http://a", "http://b"]'])
    assert args.cors_allow_origin == ["http://a", "http://b"]


@pytest.mark.parametrize(
    "words",
    [
        ["--method", "ngram", "--num-speculative-tokens", "3"],
        [
            "--speculative-config",
            '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}',
        ],
    ],
)
def test_ngram_is_the_suffix_lookup(words: list[str], caplog: CAPLOG) -> None:
    config, _ = read_options(create_parser().parse_args(words))
    assert config.speculative is not None
    assert config.speculative.method == "suffix"
    assert "there is no method ngram; method suffix stands in for it" in caplog.text
    assert ("prompt_lookup_max of speculative_config has no effect" in caplog.text) == (
        "prompt_lookup_max" in words[1]
    )
    given = engine_config(speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    assert given.speculative is not None
    assert given.speculative.method == "suffix"


def test_formats_of_checkpoints_are_told_by_the_checkpoints(caplog: CAPLOG) -> None:
    for name in ("compressed-tensors", "modelopt_fp4", "awq_marlin", "quark"):
        assert engine(f"--quantization {name}").model.quantization == "auto"
        assert engine_config(quantization=name).model.quantization == "auto"
        assert f"there is no quantization {name}; quantization auto stands in" in caplog.text
    assert engine("--quantization fp8").model.quantization == "fp8"
    assert engine("--load-format fastsafetensors").model.load_format == "safetensors"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--pipeline-parallel-size 2", "--pipeline-parallel-size (vLLM): missing here: --tensor"),
        ("-pp=2", "-pp (vLLM): missing here"),
        ("--mem-fraction-static 0.8", "(SGLang): --gpu-memory-utilization is near it"),
        ("--enable-lora", "--enable-lora (vLLM): adapters (LoRA) are missing here"),
        ("--enable_dp_attention", "--enable_dp_attention (SGLang): --data-parallel-size D"),
        ("-ngl 20", "-ngl (llama.cpp): all layers are on the GPU, or all on the CPU"),
        ("--temp 0.5", "--temp (llama.cpp) is --temperature, which is not for this program"),
        ("--max-tokens 5", "--max-tokens (llama.cpp): each request says its max_tokens"),
        ("--top_p 1", "--top_p (llama.cpp): requests say it; --override-generation-config"),
        ("--online_quant_config {}", "(ROCm ATOM): --quantization quantises"),
        ("--kv-transfer-config {}x", "missing here: KV caches are neither moved"),
        ("--speculative-config.method eagle3", "--speculative-config takes its keys as one object"),
        ("-sc.method=eagle3", """takes its keys as one object, '{"method": ...}'"""),
        ("--no-jinja", "--no-jinja (llama.cpp): chat templates are Jinja's always"),
        ("--model-path", "argument --model: expected one argument"),
        ("--model-path --tp 2", "argument --model: expected one argument"),
        ("--xyzzy", "unknown option --xyzzy"),
    ],
)
def test_what_is_missing_is_one_line(line: str, said: str, capfd: CAPFD) -> None:
    with pytest.raises(SystemExit, match="2"):
        create_parser().parse_args(shlex.split(line))
    first, *more = capfd.readouterr().err.splitlines()
    assert first.startswith("error: ")
    assert said in first
    assert "did you mean" not in first
    assert len(more) == 1


class Refused(Exception):
    pass


def refuse(message: str) -> NoReturn:
    raise Refused(message)


@pytest.fixture(scope="module")
def known() -> set[str]:
    """The flags of all programs."""
    programs = (create_parser(), run.create_parser(), chat.create_parser())
    return {flag for program in programs for flag in program._option_string_actions}


@pytest.mark.parametrize("fate", Fate)
def test_every_flag_of_the_table_is_answered(fate: Fate, known: set[str], caplog: CAPLOG) -> None:
    """With ours, with a warning, or with an error that names it: never as an unknown option."""
    for name, entry in BY_NAME.items():
        if entry.fate is not fate:
            continue
        value = [] if entry.takes is Takes.NOTHING else ["3"]
        snake = f"--{name[2:].replace('-', '_')}" if name.startswith("--") else name
        for flag in {name, snake}:
            line = [flag, *value, "--seed", "1"]
            if fate is Fate.REFUSED:
                said = re.escape(f"{flag} ({entry.engine}): {entry.says}")
                with pytest.raises(Refused, match=f"^{said}$"):
                    as_ours(line, known - {name, snake}, refuse)
                continue
            caplog.clear()
            first, *rest = as_ours(line, known, refuse)
            if fate is Fate.SAME:
                assert entry.says.partition("=")[0] in known
                assert first == "=".join([entry.says, *value])
                assert rest == ["--seed", "1"]
            else:
                assert [first, *rest] == ["--seed", "1"]
                assert f"{flag} ({entry.engine}) has no effect: {entry.says}" in caplog.text
        for harmless in entry.harmless:
            assert as_ours([f"{name}={harmless}"], known - {name}, refuse) == []


def test_the_table_says_each_flag_once_and_none_of_ours() -> None:
    names = [name for flag in FOREIGN_FLAGS for name in flag.names]
    assert sorted({name for name in names if names.count(name) > 1}) == []
    assert sorted(set(names) & set(create_parser()._option_string_actions)) == []


def test_flags_of_answers_are_those_of_llama_cpp_too() -> None:
    args = run.create_parser().parse_args(
        shlex.split("hello -n 64 --temp 0.2 --repeat-penalty 1.1 -s 3 -m x -sys brief")
    )
    assert (args.prompt, args.model, args.system) == ("hello", "x", "brief")
    wanted = {"max_tokens": 64, "temperature": 0.2, "repetition_penalty": 1.1, "seed": 3}
    assert given_settings(args) == wanted
    assert given_settings(run.create_parser().parse_args(["hello", "-n", "-1"])) == {}


def test_files_may_hold_them(tmp_path: Path, caplog: CAPLOG, capfd: CAPFD) -> None:
    path = tmp_path / "vllm.yaml"
    path.write_text(
        "model: m\ncontext-length: 4096\nmm_encoder_tp_mode: data\nasync-scheduling: true\n"
        "compilation-config: {cudagraph_mode: FULL}\nenable-lora: false\n"
        "allowed-origins: [a, b]\n"
    )
    args = create_parser().parse_args(["--config", str(path)])
    assert (args.model, args.max_model_len, args.overlap) == ("m", "4096", True)
    assert args.cors_allow_origin == ["a", "b"]
    assert "--mm-encoder-tp-mode (vLLM) has no effect" in caplog.text
    path.write_text("enable-lora: true\n")
    with pytest.raises(SystemExit, match="2"):
        create_parser().parse_args(["--config", str(path)])
    assert "--enable-lora (vLLM): adapters" in capfd.readouterr().err


def test_programs_without_an_engine_know_none_of_them(capfd: CAPFD, caplog: CAPLOG) -> None:
    caplog.set_level(logging.WARNING)
    with pytest.raises(SystemExit, match="2"):
        CommandLine(prog="x").parse_args(["--jinja"])
    assert "unknown option --jinja" in capfd.readouterr().err
