"""A torch some of whose modules wait until they are needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from atom import torch_start

ROOT = Path(__file__).parents[1]

PROGRAM = """
import sys
from atom import torch_start
torch_start.begin()
import torch
from torch import nn
waiting = ("torch._refs", "torch._prims", "torch.export.exported_program", "torch.ao.quantization")
assert not [name for name in waiting if name in sys.modules]
assert float(nn.Linear(3, 2)(torch.ones(3)).sum().detach().isfinite())
where = torch.empty(3, device="meta")
choose = lambda: torch.where(where > 0, where, where)
try:
    choose()
    raise SystemExit("these functions did not wait")
except NotImplementedError:
    pass
assert torch_start.with_meta_functions(choose).shape == (3,)
assert "torch._refs" in sys.modules
assert not torch_start.complete()
def lacks():
    calls.append(1)
    raise NotImplementedError("what is not there")
calls = []
try:
    torch_start.with_meta_functions(lacks)
except NotImplementedError as error:
    assert (str(error), calls) == ("what is not there", [1])
from torch.quantization import QuantStub
assert QuantStub is torch.ao.quantization.QuantStub
assert torch.export.Dim.__module__ == "torch.export.dynamic_shapes"
assert type(torch.export) is type(sys)
"""

LATER = """
import sys
from atom import torch_start
torch_start.begin()
import torch
from torch import nn
waiting = [sys.modules[name] for name in sorted(torch_start._WAITING) if name in sys.modules]
assert len(waiting) == len(torch_start._WAITING)
assert all(type(module) is torch_start._WaitingModule for module in waiting)
if sys.argv[1] == "parts":
    from torch.optim.lr_scheduler import LambdaLR
    from torch.utils.data.distributed import DistributedSampler
    from torch.distributions.normal import Normal
    from torch.nn.quantized.dynamic import Linear
from torch.utils.data import DataLoader, TensorDataset
layer = nn.Linear(3, 2)
optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
if sys.argv[1] == "parts":
    LambdaLR(optimizer, lambda step: 1.0)
    assert torch.optim.lr_scheduler.LambdaLR is LambdaLR
    assert torch.distributions.Normal is Normal
before = layer.weight.detach().clone()
for (x,) in DataLoader(TensorDataset(torch.ones(4, 3)), batch_size=2):
    layer(x).sum().backward()
    optimizer.step()
assert not torch.equal(layer.weight, before)
assert torch.distributions.Normal(torch.tensor(0.0), 1.0).sample().isfinite()
with torch.profiler.profile() as profile:
    torch.ones(3).sum()
assert profile.key_averages()
assert torch.signal.windows.hann(4).shape == (4,)
assert torch.masked.sum(torch.ones(2, 3)).item() == 6
assert torch.nn.quantized.FloatFunctional().add(torch.ones(1), torch.ones(1)).item() == 2
from unittest import mock
assert mock.Mock(return_value=3)() == 3
"""

COMPILED = """
import sys
from atom import torch_start
torch_start.begin()
import torch
assert "torch._refs" not in sys.modules
import {0}
assert "torch._refs" in sys.modules
torch.where(*torch.empty(3, 2, device="meta").bool())
"""


def test_modules_wait_until_they_are_needed() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, check=True)


@pytest.mark.parametrize("first", ["names", "parts"])
def test_what_waited_works_when_it_is_asked_for(first: str) -> None:
    """By its own names, and where a module within it is imported first."""
    subprocess.run([sys.executable, "-c", LATER, first], cwd=ROOT, check=True)


def test_what_is_written_for_all_of_torch_brings_it() -> None:
    program = COMPILED.format("torch._functorch.aot_autograd")
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_where_torch_is_there_nothing_waits() -> None:
    assert torch.__version__
    before = list(sys.meta_path)
    torch_start.begin()
    assert sys.meta_path == before
    assert not torch_start.complete()


def test_whether_torch_is_for_gpus() -> None:
    has_toolkit = torch.version.cuda is not None or torch.version.hip is not None
    assert torch_start.is_for_gpus() is has_toolkit


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", False),
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", True),
        ("cuda = None\nhip = '7.0'", True),
        ("nothing that is known", True),
    ],
)
def test_versions_of_torch(
    lines: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(lines)
    monkeypatch.setattr(torch_start, "_folder", lambda: tmp_path)
    assert torch_start.is_for_gpus() is expected
    monkeypatch.setattr(torch_start, "_folder", lambda: tmp_path / "nowhere")
    assert torch_start.is_for_gpus()
