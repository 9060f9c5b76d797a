"""A rehearsal as text: what to read before the GPUs are rented."""

from __future__ import annotations

from collections.abc import Sequence

from atom.plan.rehearsal.rehearse import Rehearsed

# Of Python and torch for one launch, without the driver, as it was measured on 2 shared cores of
# an AMD EPYC; a graph is two passes.
_LAUNCH_SECONDS = 33e-6
_PASSES_OF_GRAPH = 2
# To compile a Triton kernel ahead of time, on one such core.
_LEAST_COMPILE, _MOST_COMPILE = 0.3, 1.5


def format_rehearsal(found: Rehearsed, disk_bandwidth: float) -> str:
    """Args:
    disk_bandwidth: bytes/s at which weights are read, all ranks together.
    """
    sections = [
        _heading(found),
        _memory(found),
        _ranks(found),
        ["kernels of rank 0, and why no better ones run:", *_indent(found.ops.splitlines())],
        _decoding(found),
        _start(found, disk_bandwidth),
        [_verdict(found)],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections)


def _heading(found: Rehearsed) -> list[str]:
    gpu, parallel = found.gpu, found.config.parallel
    libraries = ", ".join(sorted(found.installed)) or "no library beside torch and Triton"
    return [
        f"{found.config.model.model} on {parallel.tensor_parallel_size} x {gpu.name} ({gpu.arch}, "
        f"{_gb(gpu.memory)} each), as if with {libraries}",
        "a rehearsal: models without data, no kernel ran and no time was measured",
    ]


def _memory(found: Rehearsed) -> list[str]:
    memory, scheduler = found.memory, found.config.scheduler
    share = found.config.cache.gpu_memory_utilization
    told = "--gpu-memory-utilization" if share is not None else "the default share"
    drafts = found.decoding.num_drafts
    graphs = found.graphs
    count = graphs.layers + graphs.choices + graphs.drafts
    tokens = memory.num_blocks * found.config.cache.block_size
    rows = [
        ("weights", memory.weights, "as the kernels read them"),
        ("draft", memory.draft, "what it does not share with the target"),
        ("buffers", memory.buffers, ""),
        (
            "largest steps",
            memory.steps,
            f"{scheduler.max_num_batched_tokens} tokens, {scheduler.max_num_seqs} sequences of up "
            f"to {found.context_len} tokens, {drafts} drafts each; fragments not counted",
        ),
        (
            "graphs",
            memory.graphs,
            f"{count}: {graphs.layers} of the layers, {graphs.choices} of choices, "
            f"{graphs.drafts} of drafts",
        ),
        ("runtime", memory.runtime, "assumed: driver, code, libraries"),
        (
            "KV cache",
            memory.kv_cache,
            f"{tokens} tokens, {tokens / found.context_len:.1f} contexts of the longest; "
            f"{memory.block / found.config.cache.block_size / 1024:.1f} KiB a token",
        ),
    ]
    lines = [f"memory of a GPU, of which {_gb(memory.room)} may be used ({told}):"]
    lines += [f"  {name:<14}{_gb(size):>9}  {note}".rstrip() for name, size, note in rows]
    if memory.shortfall is not None:
        lines.append(f"  DOES NOT FIT: {memory.shortfall}")
    return lines


def _ranks(found: Rehearsed) -> list[str]:
    lines = [f"ranks: {found.num_ranks} built, and all run the same kernels for what they share"]
    if found.differing:
        lines = ["RANKS DIFFER, and would wait for each other for ever or compute other numbers:"]
        lines += _indent(found.differing)
    if found.missing:
        lines += ["MISSING, and it changes what runs:", *_indent(found.missing)]
    return lines


def _decoding(found: Rehearsed) -> list[str]:
    decoding, gpu = found.decoding, found.gpu
    counts = decoding.launches.by_library
    listed = ", ".join(f"{library} {count}" for library, count in counts.most_common())
    read = decoding.bytes_read + decoding.draft_bytes_read
    lines = [
        f"decode step of one sequence with {decoding.num_drafts} drafts: "
        f"{decoding.launches.total} launches ({listed}); aiter's as read in its source",
        f"  weights read by a GPU: {_gb(decoding.bytes_read)} of the target",
    ]
    if decoding.num_drafts:
        lines[-1] += (
            f", {_gb(decoding.draft_bytes_read)} of the draft in {decoding.num_drafts} passes"
        )
    lines.append(
        f"  at least {1e3 * read / gpu.bandwidth:.2f} ms at the stated {gpu.bandwidth / 1e12:.2f} "
        f"TB/s: an estimate, without KV cache, sums over ranks, launches and waits"
    )
    return lines


def _start(found: Rehearsed, disk_bandwidth: float) -> list[str]:
    graphs = found.graphs
    launches = graphs.layers * graphs.layers_launches
    launches += (graphs.choices + graphs.drafts) * graphs.others_launches
    capture = launches * _PASSES_OF_GRAPH * _LAUNCH_SECONDS
    read = found.stored / disk_bandwidth
    kernels = found.kernels
    lines = [
        "a start, estimated (add imports, and what the warm-up runs):",
        f"  weights        {_duration(read):>9}  {_gb(found.stored)} stored, at "
        f"{disk_bandwidth / 1e9:g} GB/s (--disk-gb-s)",
    ]
    if graphs.layers:
        lines.append(
            f"  graphs         {_duration(capture):>9}  at most, {_LAUNCH_SECONDS * 1e6:.0f} us of "
            f"the host a launch, as measured on 2 cores of an EPYC; the driver's time not counted"
        )
    lines.append(
        f"  first start    {_duration(kernels * _LEAST_COMPILE):>9}  or more: {kernels} kernels of "
        f"Triton in these steps alone, {_LEAST_COMPILE:g} to {_MOST_COMPILE:g} s each; kept later"
    )
    if "aiter" in found.installed:
        lines.append(
            "                            aiter's modules that were not built before: minutes to "
            "tens of minutes, once"
        )
    return lines


def _verdict(found: Rehearsed) -> str:
    if found.is_ready:
        return "ready: it fits, the ranks agree, and nothing that was to be installed is missing"
    reasons = []
    if found.memory.shortfall is not None:
        reasons.append("it does not fit")
    if found.differing:
        reasons.append("the ranks differ")
    if found.missing:
        reasons.append("libraries are missing")
    return f"NOT READY: {', '.join(reasons)}"


def _indent(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"
