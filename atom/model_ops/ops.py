"""Every op and its implementations, best first."""

from __future__ import annotations

from atom.model_ops.kernels.torch import attention, elementwise, linear
from atom.model_ops.registry import Implementation, always

OPS: dict[str, tuple[Implementation, ...]] = {
    "linear": (Implementation("torch", always, linear.load),),
    "rms_norm": (Implementation("torch", always, lambda: elementwise.rms_norm),),
    "add_rms_norm": (Implementation("torch", always, lambda: elementwise.add_rms_norm),),
    "silu_and_mul": (Implementation("torch", always, lambda: elementwise.silu_and_mul),),
    "rope": (Implementation("torch", always, lambda: elementwise.rope),),
    "kv_cache_write": (Implementation("torch", always, lambda: attention.kv_cache_write),),
    "paged_attention": (Implementation("torch", always, attention.load),),
}
