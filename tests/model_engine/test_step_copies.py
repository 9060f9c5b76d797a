"""What crosses between host and device in a decode step, counted on a CPU as if it were one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
import torch
from spec_decode import engines
from spec_decode.engines import PROMPTS, create_engine
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedTokenizerFast

from atom import LLM, SamplingParams
from atom.batch import LaunchedStep, ScheduledBatch
from atom.model_engine.worker import Worker

NUM_SEQS = 4
TO_DEVICE = (torch.tensor, torch.as_tensor, torch.from_numpy)
TO_HOST = (torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.item)


class Crossings:
    """Counts of a step.

    Attributes:
        to_device: sends of the staging buffer, and tensors made of numbers of the host.
        to_host: tensors read by the host.
        shapes: of all tensors that were made.
    """

    def __init__(self) -> None:
        self.to_device: Counter[str] = Counter()
        self.to_host: Counter[str] = Counter()
        self.shapes: Counter[tuple[int, ...]] = Counter()


class Calls(TorchFunctionMode):
    """Copies that a call makes by itself."""

    def __init__(self, seen: Crossings) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in TO_DEVICE:
            self._seen.to_device[func.__name__] += 1
        if func in TO_HOST:
            self._seen.to_host[func.__name__] += 1
        return func(*args, **(kwargs or {}))


class Kernels(TorchDispatchMode):
    """What reaches a kernel: the send, numbers asked for, and the tensors that are made."""

    def __init__(self, seen: Crossings, host: torch.Tensor) -> None:
        super().__init__()
        self._seen = seen
        self._host = host.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._seen.to_device["send"] += args[1].untyped_storage().data_ptr() == self._host
        if func is torch.ops.aten._local_scalar_dense.default:
            self._seen.to_host["number"] += 1
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self._seen.shapes[tuple(result.shape)] += 1
        return result


def decode_step(engine: LLM, params: list[SamplingParams]) -> tuple[Crossings, ScheduledBatch]:
    """A step in which every sequence decodes."""
    executor = engine.engine.core.executor
    assert isinstance(executor, Worker)
    for i, (prompt, own) in enumerate(zip(PROMPTS, params, strict=False)):
        engine.engine.add_request(str(i), prompt, own)
    seen = Crossings()
    counted: list[ScheduledBatch] = []
    launch = executor.launch

    def counting(batch: ScheduledBatch) -> LaunchedStep:
        if counted or any(s.start == 0 for s in batch.sequences):
            return launch(batch)
        counted.append(batch)
        with Calls(seen), Kernels(seen, executor.inputs.staging.host):
            launched = launch(batch)
            output = launched.collect()
        return msgspec.structs.replace(launched, collect=lambda: output)

    executor.launch = counting  # type: ignore[method-assign]
    try:
        while not counted:
            engine.engine.step()
    finally:
        executor.launch = launch  # type: ignore[method-assign]
    for i in range(len(params)):
        engine.engine.abort(str(i))
    return seen, counted[0]


@pytest.fixture(scope="module", params=["none", "suffix", "eagle3", "overlap"])
def engine(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    byte_level_tokenizer: PreTrainedTokenizerFast,
) -> LLM:
    folder = tmp_path_factory.mktemp("copies")
    # Without experts, which on a CPU are grouped by the host.
    target = engines.write_target("llama", folder / "target", byte_level_tokenizer)
    options: dict[str, Any] = {"method": request.param, "num_speculative_tokens": 3}
    if request.param == "none":
        options = {}
    if request.param in ("eagle3", "overlap"):
        draft = engines.write_draft("mha", folder / "draft", len(byte_level_tokenizer))
        options |= {"method": "eagle3", "draft_model": str(draft)}
    if request.param == "overlap":
        options["overlap"] = True
    # Op by op: in a recorded step torch makes nothing.
    return create_engine(target, enforce_eager=True, **options)


def all_with(**params: Any) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=20, ignore_eos=True, **params) for _ in range(NUM_SEQS)]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 0.8, "seed": 1, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.8, "seed": 1, "repetition_penalty": 1.2, "logit_bias": {5: 1.0}},
        {"temperature": 0.0, "logprobs": 2, "min_tokens": 9, "stop_token_ids": [7]},
    ],
    ids=["greedy", "sampled", "filtered", "edited", "logprobs"],
)
def test_one_copy_there_and_one_back(engine: LLM, params: dict[str, Any]) -> None:
    seen, batch = decode_step(engine, all_with(**params))
    assert len(batch.sequences) == NUM_SEQS
    assert dict(seen.to_device) == {"send": 1}
    assert dict(seen.to_host) == {"cpu": 1}


WISHES: list[dict[str, Any]] = [
    {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"logit_bias": {3: 2.0, 9: -1.0}},
    {"min_tokens": 12, "stop_token_ids": [7, 8]},
]


@pytest.mark.parametrize("wish", WISHES, ids=["penalties", "bias", "bans"])
def test_one_request_costs_its_own_rows(engine: LLM, wish: dict[str, Any]) -> None:
    """Tensors of [rows, vocabulary] are those of a step in which nobody has wishes."""
    plain = all_with(temperature=0.0)
    wishing = [
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos="min_tokens" not in wish, **wish),
        *plain[1:],
    ]
    vocab_size = engine.engine.core.limits.vocab_size
    made = []
    for params in (plain, wishing):
        seen, batch = decode_step(engine, params)
        rows = sum(1 + s.num_drafts for s in batch.sequences)
        assert seen.shapes[rows, vocab_size] > 0
        made.append(seen.shapes[rows, vocab_size])
    assert made[0] == made[1]


def test_crossings_are_noticed() -> None:
    """The tests above would see what they count."""
    seen, host = Crossings(), torch.zeros(4)
    device = torch.zeros(4)
    with Calls(seen), Kernels(seen, host):
        device[:2].copy_(host[:2])
        device.copy_(device.clone())
        torch.tensor([1])
        int(device[0])
        device.cpu()
        device.tolist()
    assert dict(seen.to_device) == {"send": 1, "tensor": 1}
    assert dict(seen.to_host) == {"number": 1, "cpu": 1, "tolist": 1}
