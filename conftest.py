"""Fixtures that several test packages share."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest


def _claim_processors() -> None:
    """Tests run in several processes: each gets processors of its own, and so do its children.

    Before torch is imported, which counts them. Threads of two pools on the same processors wait
    for each other at every barrier.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None or not hasattr(os, "sched_setaffinity"):
        return
    count = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    share = sorted(os.sched_getaffinity(0))[int(worker.removeprefix("gw")) :: count]
    if share:
        os.sched_setaffinity(0, share)


_claim_processors()

# Of NVIDIA's GPUs, also below Windows, and of AMD's.
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")

if TYPE_CHECKING:
    from spec_decode.engines import Folders
    from transformers import PreTrainedTokenizerFast


def _has_gpu() -> bool:
    """Whether torch has one; it is only imported where there is a driver for one."""
    if not any(map(os.path.exists, _DRIVERS)):
        return False
    import torch

    return torch.cuda.is_available()


if not _has_gpu():
    # Triton reads it when a kernel is decorated, and transformers imports triton: it has to be
    # there before any test module. Engines on a CPU prefer native and torch kernels as ever.
    os.environ["TRITON_INTERPRET"] = "1"

if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    # How long an example takes says nothing but how busy the machine is.
    settings.register_profile(
        "any machine",
        settings.default,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("any machine")

ROOT = Path(__file__).parent
BENCHMARKS = ROOT / "benchmarks"

_MOST_WORKERS = 8

_TRAINING_TEXT = (
    "The quick brown fox jumps over the lazy dog while the engine streams tokens.",
    "A language model answers questions, one token after another, and then it stops.",
    "Käse, naïve café, Straße, Ελληνικά, русский текст, 日本語の文章, 한국어, emoji 😀🚀.",
    "def add(a, b):\n    return a + b  # 12345 + 67890",
)

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run the tests marked slow")
    parser.addoption("--run-network", action="store_true", help="also run those marked network")
    parser.addoption(
        "--gsm8k", help="GSM8K's test.jsonl, for the slow tests that ask its questions"
    )
    parser.addoption(
        "--update-aot-baseline",
        action="store_true",
        help="write what the compiled kernels use to tests/model_ops/kernels/aot_baseline.json",
    )


def pytest_collection_finish() -> None:
    """What was imported for all tests stays: no search for garbage need visit it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """A process for each processor, up to what memory allows; a GPU is not shared."""
    return 1 if _has_gpu() else min(os.cpu_count() or 1, _MOST_WORKERS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip, with the reason, what this machine or this command line leaves out."""
    reasons = {}
    if not config.getoption("--run-slow"):
        reasons["slow"] = "takes minutes; use --run-slow"
    if not config.getoption("--run-network"):
        reasons["network"] = "needs a model hub; use --run-network"
    if any("gpu" in item.keywords for item in items) and not _has_gpu():
        reasons["gpu"] = "needs a CUDA or ROCm device"
    if _find_chromium() is None:
        reasons["browser"] = "needs Chromium (apt install chromium)"
    if shutil.which("npm") is None:
        reasons["node"] = "needs Node and npm"
    for item in items:
        for marker in item.iter_markers():
            if marker.name in reasons:
                item.add_marker(pytest.mark.skip(reason=reasons[marker.name]))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """What the compile lane compiled; a process that distributes tests loads no conftest below."""
    if importlib.util.find_spec("triton") is None:
        terminalreporter.write_line(
            "kernels: LEFT OUT, triton is not installed (there is none for this platform?)"
        )
    reports = [one for many in terminalreporter.stats.values() for one in many]
    tests = [one for one in reports if isinstance(one, pytest.TestReport)]
    compiled = [value for one in tests for name, value in one.user_properties if name == "compiled"]
    if compiled:
        sys.path.append(str(ROOT / "tests" / "model_ops" / "kernels"))
        import aot_report

        line = aot_report.report(compiled, config.getoption("--update-aot-baseline"))
        terminalreporter.write_line(f"kernels: {line}")


def _find_chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Nothing collects garbage meanwhile: with what other tests left, that takes long."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session")
def chromium() -> str:
    """The system's Chromium or Chrome."""
    found = _find_chromium()
    assert found is not None
    return found


def create_byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """A ByteLevel BPE tokenizer of about 330 tokens with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    fast.chat_template = _CHAT_TEMPLATE
    return fast


@pytest.fixture(scope="session")
def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    return create_byte_level_tokenizer()


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Folders:
    """Targets and drafts of a module."""
    from spec_decode.engines import Folders

    return Folders(tmp_path_factory.mktemp("folders"), byte_level_tokenizer)


@pytest.fixture(scope="session")
def tiny_llama_dir(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Path:
    """A random float32 Llama checkpoint of two layers, its tokenizer beside it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(byte_level_tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        # Wide enough that neighbouring logits differ by far more than rounding errors.
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=byte_level_tokenizer.bos_token_id,
        eos_token_id=byte_level_tokenizer.eos_token_id,
        pad_token_id=byte_level_tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(torch.float32)
    folder = tmp_path_factory.mktemp("tiny-llama")
    model.save_pretrained(folder)
    byte_level_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def endless_llama_dir(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Path:
    """The tiny checkpoint for requests of `endless.ENDLESS_TOKENS`."""
    from endless import write_endless

    return write_endless(tiny_llama_dir, tmp_path_factory.mktemp("endless") / "model")


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a file of benchmarks/ by its name, which a folder of tests may have, too."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load(name: str) -> Any:
        found = sys.modules.get(name)
        if found is not None and found.__spec__.origin != str(BENCHMARKS / f"{name}.py"):
            monkeypatch.delitem(sys.modules, name)
        return importlib.import_module(name)

    return load
