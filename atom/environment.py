"""The environment variables that the package reads, and no other file reads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from atom.config import ConfigError, parse_bytes

DEFAULT_CACHE_LIMIT = "50GiB"
# By these, libraries and this package choose kernels, or how a kernel or a sum computes.
_KERNEL_PREFIXES = ("ATOM_OP_", "AITER_", "FLYDSL_", "TRITON_", "MXFP4_", "TOPK_", "OPUS_")
_KERNEL_VARIABLES = (
    *("ATOM_CPU_ARCH", "GPU_ARCHS", "CU_NUM", "ENABLE_CK", "HSA_OVERRIDE_GFX_VERSION"),
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_LAUNCH_MODE", "RCCL_MSCCL_ENABLE", "RCCL_MSCCLPP_ENABLE"),
    *("NVIDIA_TF32_OVERRIDE", "PYTORCH_TUNABLEOP_ENABLED", "TORCH_BLAS_PREFER_HIPBLASLT"),
)
# Of those with a prefix these only say where files are or what is printed, or aiter sets them.
_OTHER_WORDS = ("_DIR", "_PATH", "_LOG", "_DEBUG", "_DUMP", "_PRINT", "VERBOSE", "_WORKER")
_OTHER_VARIABLES = ("AITER_GPU_ARCHS", "AITER_REBUILD", "TRITON_CACHE_MANAGER")
_RANK_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"),
    *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NNODES"),
)


def cache_dir() -> Path:
    """Where converted checkpoints and compiled kernels are kept: `$ATOM_CACHE`, else the user's
    cache folder.

    Raises:
        ConfigError: when there is none, as for a user that the system does not know.
    """
    configured = os.environ.get("ATOM_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(configured).expanduser() if configured else Path(base).expanduser() / "atom"
    except RuntimeError as error:
        raise ConfigError(
            "this user has no home folder to keep files in: set HOME, or ATOM_CACHE to a folder"
        ) from error


def history_file() -> Path:
    """Lines that were typed in the terminal's chat."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "atom" / "chat_history"


def cache_limit() -> int:
    """`$ATOM_CACHE_LIMIT`, such as 20GiB: bytes that converted checkpoints may take.

    Raises:
        ConfigError: when it is no size.
    """
    given = os.environ.get("ATOM_CACHE_LIMIT")
    try:
        return parse_bytes(given or DEFAULT_CACHE_LIMIT)
    except ConfigError as error:
        raise ConfigError(f"$ATOM_CACHE_LIMIT: {error}") from error


def api_key_from_environment() -> str | None:
    """`$ATOM_API_KEY`: the server's key when `--api-key` is not given."""
    return os.environ.get("ATOM_API_KEY") or None


def cxx_compiler() -> str | None:
    """`$CXX`: the C++ compiler of the CPU kernels, when the usual names do not find it."""
    return os.environ.get("CXX") or None


def cpu_arch() -> str:
    """`$ATOM_CPU_ARCH`: the processor that the CPU kernels are compiled for, by its name in the
    compiler, such as `haswell`; this machine's by default.
    """
    return os.environ.get("ATOM_CPU_ARCH") or "native"


def omp_num_threads() -> int | None:
    """`$OMP_NUM_THREADS`, OpenMP's own variable: the most threads that a lone engine takes on a
    CPU; None when it is unset or no number.
    """
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return max(int(first), 1) if first.isdecimal() else None


def triton_is_interpreted() -> bool:
    """`$TRITON_INTERPRET`, Triton's own variable, which it reads when a kernel is defined."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def op_override(op: str) -> str | None:
    """`$ATOM_OP_<NAME>`: the implementation that the user wants for one op."""
    return os.environ.get(f"ATOM_OP_{op.upper()}") or None


def kernel_variables() -> dict[str, str]:
    """The variables that choose kernels, as far as they are set: all ranks need the same."""
    return {name: os.environ[name] for name in sorted(os.environ) if _chooses_kernels(name)}


def _chooses_kernels(name: str) -> bool:
    if not os.environ[name] or name in _OTHER_VARIABLES:
        return False
    if name in _KERNEL_VARIABLES or name.startswith("ATOM_OP_"):
        return True
    return name.startswith(_KERNEL_PREFIXES) and not any(word in name for word in _OTHER_WORDS)


def aiter_jit_dir() -> str | None:
    """`$AITER_JIT_DIR`, aiter's own: where it keeps modules, if not in its package."""
    return os.environ.get("AITER_JIT_DIR") or None


def aiter_build_dir() -> Path:
    """Where aiter builds kernels from templates: below `$AITER_ROOT_DIR`, its own variable."""
    root = os.environ.get("AITER_ROOT_DIR") or f"{os.environ.get('HOME', '')}/.aiter"
    return Path(root) / "build"


def has_flydsl_cache_dir() -> bool:
    """Whether `$FLYDSL_RUNTIME_CACHE_DIR` says where FlyDSL keeps the kernels that it compiles."""
    return "FLYDSL_RUNTIME_CACHE_DIR" in os.environ


def rank_variables() -> dict[str, str]:
    """What a launcher says to each of the processes that it starts, as far as it is set."""
    return {name: os.environ[name] for name in _RANK_VARIABLES if os.environ.get(name)}


def environment_with(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's environment for a child, changed by `variables`."""
    return {**os.environ, **variables}


def set_default(name: str, value: str) -> None:
    """Set a variable that a library of this process reads, unless the user has."""
    os.environ.setdefault(name, value)


def keep_kernels() -> None:
    """Have Triton and torch's compiler keep their kernels in `cache_dir`, where they outlive a
    restart, unless the user says where.

    Raises:
        ConfigError: when there is no such folder.
    """
    for name, folder in (("TRITON_CACHE_DIR", "triton"), ("TORCHINDUCTOR_CACHE_DIR", "inductor")):
        if name not in os.environ:
            set_default(name, str(cache_dir() / folder))


def device_variables() -> dict[str, str]:
    """The variables that limit the devices that this process sees, such as CUDA_VISIBLE_DEVICES."""
    return {name: value for name, value in os.environ.items() if name.endswith("VISIBLE_DEVICES")}


def set_variables(variables: Mapping[str, str]) -> None:
    """Set variables that libraries of this process read later."""
    os.environ.update(variables)


def visible_devices(is_rocm: bool) -> list[str] | None:
    """The GPUs that `$HIP_VISIBLE_DEVICES` or `$CUDA_VISIBLE_DEVICES` names; None for all."""
    own = os.environ.get("HIP_VISIBLE_DEVICES") if is_rocm else None
    given = own if own is not None else os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if given is None else [name.strip() for name in given.split(",") if name.strip()]
