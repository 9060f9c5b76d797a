"""The speeds that are wanted of a GPU, what was reached, and where the time goes otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from _decode_report import details_markdown as step_details
from _decode_report import named as named_step
from _kernel_report import details_markdown as kernel_details
from _kernel_report import named as named_kernel
from _kernel_sizes import (
    ChoiceSizes,
    ExpertSizes,
    HeadSizes,
    LatentSizes,
    ProductSizes,
)
from _product_loads import FORMATS

Row = dict[str, Any]
Parts = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Subjects:
    """Which rows of the parts the goals are about.

    Attributes:
        shape, kimi: of whole steps.
        context: of their prompts, and of the batch with long ones.
        long: batch size and context of long prompts.
        heads, latents: of one layer.
        case: batch size and context of one layer.
        cache: as it is stored.
        product, experts: with quantised weights, at the batch size of `case`.
        prompt: tokens of a whole one.
        choice: of tokens with both filters, at the batch size of `case`.
    """

    shape: str = "8b"
    kimi: str = "kimi"
    context: int = 1024
    long: tuple[int, int] = (64, 8000)
    heads: str = str(HeadSizes())
    latents: str = str(LatentSizes())
    case: tuple[int, int] = (64, 8192)
    cache: str = "bfloat16"
    product: str = str(ProductSizes(14336, 4096))
    experts: str = str(ExpertSizes())
    prompt: int = 8192
    choice: str = str(ChoiceSizes(top_k=50, top_p=0.9))


REAL = Subjects()


_SHARES = ("copy", "bound", "share")


@dataclass(frozen=True)
class Goal:
    """Attributes:
    unit: `copy` (a share of the copy bandwidth), `bound` (of what a copy and a large product
        allow), `share`, `us`, `s` or `x` (a ratio).
    limit: at least so much of a share, at most so much of anything else.
    reached: None when it was not measured.
    why: it was not.
    where: Markdown on where the time goes.
    """

    name: str
    unit: str
    limit: float
    reached: float | None = None
    why: str = ""
    where: str = ""

    @property
    def is_met(self) -> bool:
        if self.reached is None:
            return False
        if self.unit in _SHARES:
            return self.reached >= self.limit
        return self.reached <= self.limit

    @property
    def is_missed(self) -> bool:
        return self.reached is not None and not self.is_met

    def shown(self, value: float) -> str:
        if self.unit == "copy":
            return f"{100 * value:.0f} % of copy"
        if self.unit == "bound":
            return f"{100 * value:.0f} % of the bound"
        if self.unit == "share":
            return f"{100 * value:.0f} %"
        if self.unit == "us":
            return f"{1e6 * value:.0f} us"
        return f"{value:.1f} s" if self.unit == "s" else f"{value:.2f} x"

    @property
    def wanted(self) -> str:
        bound = "at least" if self.unit in _SHARES else "at most"
        return f"{bound} {self.shown(self.limit)}"

    @property
    def outcome(self) -> str:
        if self.reached is None:
            return f"not measured: {self.why}"
        return self.shown(self.reached) + ("" if self.is_met else ", MISSED")


def goals(parts: Parts, about: Subjects = REAL) -> list[Goal]:
    """All goals, measured or not."""
    one = {"shape": about.shape, "by": "atom", "batch": 1, "context": about.context}
    batch, context = about.long
    long = {"shape": about.shape, "by": "atom", "k": 0, "batch": batch, "context": context}
    return [
        _step(parts, "decode step, batch 1", 0.85, {**one, "k": 0}),
        _step(parts, f"decode step, batch {batch}, context {context}", 0.75, long),
        _kernel(parts, "paged_attention", about.heads, 1, 0.80, about),
        _kernel(parts, "mla_decode", about.latents, 1, 0.75, about),
        _kernel(parts, "mla_decode", about.latents, 4, 0.65, about),
        *_bounded(parts, about),
        _gap(parts),
        _drafts(parts, one),
        _start(parts, about.kimi),
        _on_graphs(parts),
        _sum(parts),
    ]


def _step(parts: Parts, name: str, share: float, fields: Row) -> Goal:
    goal = f"{name}, {fields['shape']}"
    rows = _rows(parts, ("steps",), fields)
    if not rows:
        return Goal(goal, "copy", share, why=_why(parts, "steps", fields))
    return Goal(goal, "copy", share, rows[0]["of_copy"], where=_steps_where(parts, rows))


def _kernel(parts: Parts, op: str, sizes: str, queries: int, share: float, about: Subjects) -> Goal:
    batch, context = about.case
    fields = {"op": op, "sizes": sizes, "cache": about.cache, "batch": batch}
    fields |= {"context": context, "queries": queries}
    name = f"{op}, {about.cache}, batch {batch}, context {context}, k = {queries - 1}"
    rows = _rows(parts, ("kernels",), fields)
    rows = [row for row in rows if row["implementation"] != "torch"]
    if not rows:
        return Goal(name, "copy", share, why=_why(parts, "kernels", fields))
    best = max(rows, key=lambda row: float(row["of_copy"]))
    where = f"{named_kernel(best)}:\n\n{kernel_details(best)}"
    return Goal(name, "copy", share, best["of_copy"], where=where)


def _bounded(parts: Parts, about: Subjects) -> list[Goal]:
    """Quantised weights, a prompt, and filters."""
    rows = {"batch": about.case[0]}
    found = []
    for op, sizes, share in (("quant_linear", about.product, 0.6),
                             ("quant_experts", about.experts, 0.6)):  # fmt: skip
        for name, form in FORMATS.items():
            fields = {"op": op, "sizes": f"{sizes}, {form}", **rows}
            found.append(_bound(parts, f"{op}, {name}, batch {about.case[0]}", share, fields))
    prompt = {"op": "mla_prefill", "sizes": about.latents, "cache": about.cache, "batch": 1}
    prompt |= {"context": about.prompt, "queries": about.prompt}
    found.append(_bound(parts, f"mla_prefill, prompt of {about.prompt}", 0.5, prompt))
    filters = {"op": "choose_tokens", "sizes": about.choice, **rows}
    name = f"choose_tokens, {about.choice}, batch {about.case[0]}"
    return [*found, _bound(parts, name, 0.25, filters)]


def _bound(parts: Parts, name: str, share: float, fields: Row) -> Goal:
    rows = _rows(parts, ("other-kernels",), fields)
    rows = [row for row in rows if row["implementation"] != "torch"]
    if not rows:
        return Goal(name, "bound", share, why=_why(parts, "other-kernels", fields))
    best = max(rows, key=lambda row: float(row["of_bound"]))
    where = f"{named_kernel(best)}:\n\n{kernel_details(best)}"
    return Goal(name, "bound", share, best["of_bound"], where=where)


def _gap(parts: Parts) -> Goal:
    """The longest of all engines' median gaps."""
    return _worst(parts, "gap between steps on the device, all engines", "us", 100e-6,
                  "gap_seconds", max)  # fmt: skip


def _on_graphs(parts: Parts) -> Goal:
    return _worst(parts, "decode steps on graphs, all engines", "share", 1.0, "replayed", min)


def _worst(
    parts: Parts, name: str, unit: str, limit: float, field: str, worst: Callable[..., Row]
) -> Goal:
    graphed = _rows(parts, ("steps", "kimi"), {"by": "atom", "mode": "graph"})
    rows = [row for row in graphed if row[field] is not None]
    if not rows and graphed:
        return Goal(name, unit, limit, why=f"no trace: {graphed[0].get('no_trace')}")
    if not rows:
        return Goal(name, unit, limit, why=_why(parts, "steps", {"by": "atom", "mode": "graph"}))
    row = worst(rows, key=lambda row: float(row[field]))
    return Goal(name, unit, limit, row[field], where=_steps_where(parts, [row]))


def _drafts(parts: Parts, one: Row) -> Goal:
    """A step with three drafts over one without."""
    name = f"a step with Eagle3 k = 3 over one without, batch 1, {one['shape']}"
    pair = [_rows(parts, ("steps",), {**one, "k": k}) for k in (0, 3)]
    for k, rows in zip((0, 3), pair, strict=True):
        if not rows:
            return Goal(name, "x", 1.25, why=_why(parts, "steps", {**one, "k": k}))
    (plain, *_), (drafted, *_) = pair
    where = _steps_where(parts, [plain, drafted])
    return Goal(name, "x", 1.25, drafted["seconds"] / plain["seconds"], where=where)


def _start(parts: Parts, shape: str) -> Goal:
    name = f"start with graphs, {shape}"
    report = parts.get("start", {}).get("report") or {}
    rows = [row for row in report.get("starts", ()) if row["shape"] == shape]
    if not rows:
        return Goal(name, "s", 60, why=_why(parts, "start", {"shape": shape}))
    row = rows[0]
    where = (
        f"{row['graphs']} graphs of {row['layers']} layers were captured in "
        f"{row['capture_seconds']:.1f} s; Triton compiled {row['compiled']} kernels."
    )
    return Goal(name, "s", 60, row["seconds"], where=where)


def _sum(parts: Parts) -> Goal:
    """Of one row, as in a decode step; any implementation that runs."""
    fields = {"op": "all_reduce_add_rms_norm", "rows": 1}
    name = "sum of one row over the ranks, with residual and norm"
    rows = _rows(parts, ("ranks",), fields)
    if not rows:
        return Goal(name, "us", 12e-6, why=_why(parts, "ranks", fields))
    best = min(rows, key=lambda row: float(row["seconds"]))
    every = [f"- {row['implementation']}: {1e6 * row['seconds']:.1f} us" for row in rows]
    return Goal(name, "us", 12e-6, best["seconds"], where="\n".join(every))


def _rows(parts: Parts, names: Sequence[str], fields: Row) -> list[Row]:
    reports = [parts.get(name, {}).get("report") for name in names]
    rows = [row for report in reports if report for row in report["results"]]
    return [row for row in rows if all(row.get(key) == value for key, value in fields.items())]


def _why(parts: Parts, part: str, fields: Row) -> str:
    """Why no row of a part is about `fields`."""
    if part not in parts:
        return f"the part {part} has not run"
    report = parts[part].get("report")
    if not report:
        return f"the part {part} has no report ({parts[part].get('why') or 'see its output'})"
    for row in report["left_out"]:
        if all(row.get(key, value) == value for key, value in fields.items()):
            return str(row["why"])
    if report["faults"]:
        return f"the part {part} failed: {report['faults'][0]}"
    return f"the part {part} did not run it"


def _steps_where(parts: Parts, rows: Sequence[Row]) -> str:
    """Where the time of these rows goes."""
    texts = []
    for row in rows:
        speeds = [
            report["copy_bytes_per_s"]
            for part in parts.values()
            if (report := part.get("report")) and row in report.get("results", ())
        ]
        texts.append(f"{named_step(row)}:\n\n{step_details(row, speeds[0])}")
    return "\n\n".join(texts)
