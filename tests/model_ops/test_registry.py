"""The table of operations: order, reasons, overrides."""

from __future__ import annotations

import pytest
import torch

from atom.model_ops.op_table.ops import OPS
from atom.model_ops.registry import Implementation, OpQuery, OpTable, OpUnavailableError, always
from atom.platform import Platform, cpu_platform

MI300X = Platform("rocm", "gfx942", True)
MI250X = Platform("rocm", "gfx90a", True)
H200 = Platform("cuda", "sm90", True)


def named(name: str, reason: str | None = None) -> Implementation:
    return Implementation(name, lambda _: reason, lambda: name)


EVERY = tuple(named(name) for name in ("torch", "triton", "aiter", "native", "gluon"))


@pytest.mark.parametrize(
    ("platform", "best"),
    [(cpu_platform(), "native"), (MI300X, "aiter"), (MI250X, "triton"), (H200, "triton")],
)
def test_the_platform_decides_the_order(platform: Platform, best: str) -> None:
    assert OpTable(platform, {"op": EVERY}).resolve("op", torch.bfloat16) == best


def test_every_better_one_that_was_passed_over_has_a_reason() -> None:
    entries = (named("torch"), named("aiter", "no such entry point"), named("gluon", "wrong shape"))
    table = OpTable(MI300X, {"op": entries})
    assert table.resolve("op", torch.bfloat16, head_dim=64) == "torch"
    assert table.describe().splitlines() == [
        "op  runs   its cost, and better ones passed over",
        "op  torch  not aiter: no such entry point",
        "           not gluon: wrong shape",
    ]


def test_the_table_tells_decisions_of_an_op_apart() -> None:
    def supports(query: OpQuery) -> str | None:
        return "too small" if query.shape["size"] < 4 else None

    table = OpTable(H200, {"op": (Implementation("triton", supports, object), named("torch"))})
    for size, width in ((2, 1), (8, 1), (3, 1), (9, 1)):
        table.resolve("op", torch.bfloat16, size=size, width=width)
    assert table.describe().splitlines() == [
        "op  runs    where     its cost, and better ones passed over",
        "op  torch   size=2,3  not triton: too small",
        "op  triton  size=8,9",
    ]


def test_storage_and_shape_reach_the_implementation() -> None:
    asked: list[OpQuery] = []

    def supports(query: OpQuery) -> None:
        asked.append(query)

    table = OpTable(H200, {"op": (Implementation("triton", supports, object),)})
    first = table.resolve("op", torch.bfloat16, torch.float8_e4m3fn, num_blocks=3)
    assert table.resolve("op", torch.bfloat16, torch.float8_e4m3fn, num_blocks=3) is first
    assert asked == [OpQuery(H200, torch.bfloat16, {"num_blocks": 3}, torch.float8_e4m3fn)]


def test_an_override_is_honoured_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = (named("torch"), named("triton"), named("aiter", "not installed"))
    monkeypatch.setenv("ATOM_OP_SOME_OP", "torch")
    table = OpTable(MI300X, {"some_op": entries})
    assert table.resolve("some_op", torch.bfloat16) == "torch"
    assert "not triton: ATOM_OP_SOME_OP=torch" in table.describe()
    for wanted, reason in (("aiter", "not installed"), ("cuda", "it has aiter, triton, torch")):
        monkeypatch.setenv("ATOM_OP_SOME_OP", wanted)
        with pytest.raises(OpUnavailableError, match=reason):
            OpTable(MI300X, {"some_op": entries}).resolve("some_op", torch.bfloat16)


def test_the_summary_counts_ops_by_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_OP_SECOND", "torch")
    both = (named("torch"), named("triton"))
    table = OpTable(MI300X, {"first": both, "second": both, "third": both})
    for op in ("first", "second", "third"):
        table.resolve(op, torch.bfloat16)
    table.resolve("first", torch.float16)
    assert table.summary() == "rocm (gfx942); kernels: triton 2, torch 1"


def test_an_implementation_of_another_platform_is_no_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ATOM_OP_OP", "aiter")
    with pytest.raises(OpUnavailableError, match="cuda \\(sm90\\) has no such implementation"):
        OpTable(H200, {"op": (Implementation("aiter", always, object), named("torch"))}).resolve(
            "op", torch.bfloat16
        )


def invariant(name: str) -> Implementation:
    return Implementation(name, always, lambda: f"invariant {name}", batch_invariant=True)


def test_what_is_not_batch_invariant_is_passed_over() -> None:
    def never(_: OpQuery) -> None:
        raise AssertionError("asked although it is no choice")

    entries = (named("torch"), Implementation("aiter", never, object), invariant("triton"))
    table = OpTable(MI300X, {"op": entries}, batch_invariant=True)
    assert table.resolve("op", torch.bfloat16) == "invariant triton"
    assert table.resolve_weights("op", torch.bfloat16, None).name == "triton"
    assert table.resolve_together(("op",), torch.bfloat16, torch.bfloat16) == ("invariant triton",)
    assert "not aiter: not batch-invariant" in table.describe()
    both = (named("triton"), invariant("triton"))  # two lines of one name
    assert OpTable(H200, {"op": both}, True).resolve("op", torch.bfloat16) == "invariant triton"
    assert OpTable(H200, {"op": both}).resolve("op", torch.bfloat16) == "triton"


def test_an_op_without_a_batch_invariant_implementation_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = OpTable(H200, {"some_op": (named("torch"), named("triton"))}, batch_invariant=True)
    with pytest.raises(
        OpUnavailableError,
        match=r"no batch-invariant implementation of some_op .* triton: not batch-invariant; "
        r"torch: not batch-invariant",
    ):
        table.resolve("some_op", torch.bfloat16)
    monkeypatch.setenv("ATOM_OP_SOME_OP", "torch")
    entries = (named("torch"), invariant("triton"))
    with pytest.raises(OpUnavailableError, match="torch: not batch-invariant"):
        OpTable(H200, {"some_op": entries}, True).resolve("some_op", torch.bfloat16)


def test_every_op_runs_everywhere_on_torch() -> None:
    for op, entries in OPS.items():
        assert "torch" in {entry.name for entry in entries}, op
