"""How many programs of a compiled kernel a compute unit runs side by side.

Sources: LLVM, AMDGPU subtargets (registers in groups of 8, shared memory in groups of 512 or 1280
bytes); NVIDIA, occupancy calculator for compute capability 9.0.
"""

from __future__ import annotations

# Bytes of shared memory of a compute unit, and of the groups that it is allocated in.
_AMD_SHARED = {"gfx942": (65536, 512), "gfx950": (163840, 1280)}
_AMD_WAVES, _SIMDS = 32, 4
_NVIDIA_WARPS, _NVIDIA_PROGRAMS = 64, 32


def amd(arch: str, registers: int, warps: int, shared: int) -> dict[str, int]:
    """512 vector registers of a lane on each SIMD, which has at most 8 wavefronts."""
    per_simd = min(_AMD_WAVES // _SIMDS, 512 // _rounded(max(registers, 1), 8))
    programs = per_simd * _SIMDS // warps
    if shared:
        size, group = _AMD_SHARED[arch]
        programs = min(programs, size // _rounded(shared, group))
    return _counts(programs, warps, _AMD_WAVES)


def nvidia(registers: int, warps: int, shared: int) -> dict[str, int]:
    """16384 registers on each of four parts of a unit, and 228 KiB of shared memory, of which every
    program has 1 KiB.
    """
    by_registers = 16384 // (_rounded(max(registers, 1), 8) * 32) * 4 // warps
    by_shared = 233472 // (_rounded(shared, 128) + 1024)
    programs = min(by_registers, by_shared, _NVIDIA_WARPS // warps, _NVIDIA_PROGRAMS)
    return _counts(programs, warps, _NVIDIA_WARPS)


def _counts(programs: int, warps: int, most: int) -> dict[str, int]:
    return {"programs": programs, "occupancy_percent": 100 * programs * warps // most}


def _rounded(size: int, group: int) -> int:
    return -(-size // group) * group
