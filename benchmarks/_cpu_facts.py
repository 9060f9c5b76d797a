"""What a processor has for arithmetic with few bits."""

from __future__ import annotations

from pathlib import Path

_X86 = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
_ARM = ("asimd", "asimddp", "i8mm", "bf16", "sve")


def cpu_features() -> str:
    """Those of /proc/cpuinfo that matter here; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    lines = [line for line in text.splitlines() if line.startswith(("flags", "Features"))]
    there = set(lines[0].split()) if lines else set()
    return " ".join(name for name in (*_X86, *_ARM) if name in there)
