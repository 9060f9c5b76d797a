"""What people type: errors that come first, other spellings, flags in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atom.command_line.parser import did_you_mean
from atom.config import EngineConfig
from atom.entrypoints.openai_server import create_parser, main
from atom.entrypoints.server_options import ServerOptions
from atom.examples.simple_inference import main as demo
from atom.model_engine.arg_utils import engine_config, engine_options

CAPFD = pytest.CaptureFixture[str]


def engine(*flags: str) -> EngineConfig:
    return engine_config(**engine_options(create_parser().parse_args(flags)))


def server(*flags: str) -> ServerOptions:
    return ServerOptions.from_cli_args(create_parser().parse_args(flags))


def test_the_mode_for_equal_bits_has_the_names_that_others_have_for_it() -> None:
    assert not engine().batch_invariant
    for flag in ("--batch-invariant", "--batch_invariant", "--enable-deterministic-inference"):
        assert engine(flag).batch_invariant
    # Sums over the ranks are part of a row.
    assert engine("--batch-invariant").sums_in_order
    assert engine("-tp", "2", "--deterministic-collectives").sums_in_order
    assert not engine("-tp", "2").sums_in_order


def test_dashes_make_no_flags_alike() -> None:
    assert did_you_mean("--bogus", ["--uds"]) == ""
    assert did_you_mean("--prot", ["--uds", "--port"]) == "; did you mean --port?"


@pytest.mark.parametrize(
    ("flags", "first"),
    [
        (["--dtpe", "x"], "error: unknown option --dtpe; did you mean --dtype?"),
        (["--max-model-length=4"], "unknown option --max-model-length; did you mean --max-m"),
        (
            ["--enforce-eager", "True"],
            "error: --enforce-eager takes no value, got True: --enforce-eager alone is true, "
            "--no-enforce-eager false",
        ),
        (["m", "--show-ops", "false"], "--show-ops alone is true, leaving it out false"),
        (["--xyzzy"], "error: unknown option --xyzzy"),
        (["a", "b"], "error: unknown argument b"),
        (["a", "--model", "b"], "error: MODEL is given twice: a and --model b"),
        (["--dtype", "int3"], "error: argument --dtype: invalid choice: 'int3'"),
        (["--max-model-len", "8q"], "error: max_model_len: expected a number such as 4096"),
        (["--max-model-len", "1"], "error: max_model_len must be an integer of at least 2"),
        (["--kv-cache-dtype", "fp8_e5m2"], "invalid choice: 'fp8_e5m2'"),
        (["--master-port", "9"], "error: master_port has no effect on a single rank"),
        (
            ["--distributed-executor-backend", "ray"],
            "error: distributed_executor_backend has no effect on a single rank",
        ),
        (["-tp", "0"], "error: tensor_parallel_size must be an integer of at least 1"),
        (["--uds", "s", "--port", "1"], "error: --uds is instead of --host and --port"),
        (["--root-path", "llm"], "error: --root-path must be a path such as /llm"),
        (["--root-path", "/llm/"], "error: --root-path must be a path such as /llm"),
    ],
)
def test_the_error_comes_first_and_a_short_hint_after(
    flags: list[str], first: str, capfd: CAPFD
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(flags)
    lines = capfd.readouterr().err.splitlines()
    assert first in lines[0]
    assert lines[0].startswith("error: ")
    assert lines[1:] == ["python -m atom.entrypoints.openai_server --help lists the options"]


@pytest.mark.parametrize("run", [main, demo])
def test_help_tells_the_defaults(run: Any, capfd: CAPFD) -> None:
    with pytest.raises(SystemExit, match="0"):
        run(["--help"])
    text = capfd.readouterr().out
    assert "--max-model-len" in text
    assert "(default: auto)" in text


@pytest.mark.parametrize("run", [main, demo])
def test_a_device_that_is_not_there_is_one_line(run: Any, capfd: CAPFD) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a device")
    assert run(["--device", "cuda", "--show-ops"]) != 0
    err = capfd.readouterr().err
    assert err.startswith("error: device is cuda, and torch ")
    assert "Traceback" not in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("half", "float16"),
        ("fp16", "float16"),
        ("bf16", "bfloat16"),
        ("fp32", "float32"),
        ("float", "float32"),
        ("bfloat16", "bfloat16"),
    ],
)
def test_types_have_several_names(typed: str, meant: str) -> None:
    assert engine("--dtype", typed).model.dtype == meant
    assert engine_config(dtype=typed).model.dtype == meant


def test_other_spellings() -> None:
    assert engine("--kv-cache-dtype", "fp8_e4m3").cache.kv_cache_dtype == "fp8"
    assert engine("--kv-cache-dtype", "bfloat16").cache.kv_cache_dtype == "bf16"
    assert engine("-tp", "1").parallel.tensor_parallel_size == 1
    assert engine("some/model").model.model == "some/model"
    assert engine("some/model", "--dtype", "half").model.model == "some/model"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("4096", 4096), ("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("1m", 10**6), ("1M", 2**20)],
)
def test_lengths(typed: str, meant: int) -> None:
    assert engine("--max-model-len", typed).model.max_model_len == meant
    assert engine_config(max_model_len=typed).model.max_model_len == meant


class TestFile:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        return tmp_path / "atom.yaml"

    def test_flags_in_a_file(self, file: Path) -> None:
        file.write_text(
            "model: some/model\ndtype: half\nmax_model_len: 8K\nenable-prefix-caching: false\n"
            "enforce-eager: true\nport: 9000\napi-key: [a, b]\nseed: null\n"
            "speculative-config: {method: suffix, num_speculative_tokens: 2}\n"
        )
        config = engine("--config", str(file))
        assert (config.model.model, config.model.dtype) == ("some/model", "float16")
        assert config.model.max_model_len == 8192
        assert not config.cache.enable_prefix_caching
        assert config.graphs.enforce_eager
        assert config.speculative is not None
        assert config.speculative.method == "suffix"
        options = server("--config", str(file))
        assert (options.port, options.api_keys) == (9000, ("a", "b"))

    def test_the_command_line_goes_before_it(self, file: Path) -> None:
        file.write_text("model: some/model\ndtype: half\nseed: 3\napi-key: [a, b]\n")
        flags = ("other/model", "--config", str(file), "--dtype", "auto", "--api-key", "c")
        config = engine(*flags)
        assert (config.model.model, config.model.dtype, config.seed) == ("other/model", "auto", 3)
        assert server(*flags).api_keys == ("c",)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("dtpe: half", "unknown option dtpe; did you mean dtype?"),
            ("config: other.yaml", "unknown option config"),
            ("help: true", "unknown option help"),
            ("positional_model: x", "unknown option positional_model"),
            ("dtype: int3", "argument --dtype: invalid choice: 'int3'"),
            ("dtype: [half]", "dtype takes one value, got ['half']"),
            ("seed: true", "seed takes one value, got True"),
            ("enforce-eager: 3", "enforce-eager should be true or false, got 3"),
            ("- dtype", "should hold flags and their values, one a line"),
            ("dtype: [", "cannot read"),
        ],
    )
    def test_what_is_wrong_in_it_is_named(
        self, file: Path, text: str, message: str, capfd: CAPFD
    ) -> None:
        file.write_text(text)
        with pytest.raises(SystemExit):
            create_parser().parse_args(["--config", str(file)])
        first = capfd.readouterr().err.splitlines()[0]
        assert first.startswith("error: ")
        assert message in first

    def test_a_missing_one(self, file: Path, capfd: CAPFD) -> None:
        with pytest.raises(SystemExit):
            create_parser().parse_args(["--config", str(file)])
        assert f"error: --config: cannot read {file}" in capfd.readouterr().err


def test_help_is_grouped() -> None:
    text = create_parser().format_help()
    assert "\nserver:\n" in text
    assert "--block-size" in text.partition("\nmemory for keys and values:\n")[2]
    assert "[MODEL]" in text
