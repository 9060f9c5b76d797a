"""What a line of the op table is made of: paths of functions in `kernels`, found when needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from atom.model_ops.kernels.native import bindings as native
from atom.model_ops.kernels.triton import support as triton
from atom.model_ops.registry import PLAIN, Implementation, OpQuery, always

# Why no kernel of a folder can run; checked before any of its modules is imported.
_FOLDERS: Mapping[str, Callable[[OpQuery], str | None]] = {
    "aiter": always,  # each adapter says which entry points it requires
    "flash_mla": always,
    "gluon": triton.refuses_gluon,
    "native": native.refuses,
    "torch": always,
    "triton": triton.refuses,
}


def kernel(
    function: str,
    refuses: str | None = None,
    layout: str = PLAIN,
    prepare: str | None = None,
    note: Callable[[OpQuery], str] = lambda _: "",
    dequantises: bool = False,
    batch_invariant: bool = False,
    takes_rounded: str | None = None,
    takes_plain: bool = False,
    takes_mixed: bool = False,
    into: str | None = None,
    staging: str | None = None,
) -> Implementation:
    """One implementation. Nothing that it names is imported before it is needed.

    Args:
        function: `folder.module:function` in `kernels`; the folder is the implementation's name.
        refuses: path of a function that returns why `function` cannot run, or None if it can. None
            if the folder's check suffices.
        layout: of the KV cache.
        prepare: path of the function that converts weights once after loading.
        note: what the choice costs, or why it is one.
        dequantises: whether `prepare` dequantises the weights, which the note says then.
        batch_invariant: whether the bits of a row do not depend on its batch.
        takes_rounded: path of a function that says whether a norm may round the inputs, as prepared
            weights say; None if it may not.
        takes_plain: whether one expert may be unquantised, as `plain` of prepared weights.
        takes_mixed: whether both matrices of experts may have formats of their own.
        into: path of the function that writes its result to one more argument; None without one.
        staging: path of the function that gives memory which a sum over the ranks reads without a
            copy; None without one.
    """
    folder = function.partition(".")[0]

    def supports(query: OpQuery) -> str | None:
        reason = _FOLDERS[folder](query)
        if reason is None and refuses is not None:
            reason = find(refuses)(query)
        return reason

    load_prepare = None if prepare is None else lambda: find(prepare)
    if dequantises:
        note = partial(_dequantised, note)
    return Implementation(
        folder,
        supports,
        lambda: find(function),
        layout,
        load_prepare,
        note,
        dequantises,
        batch_invariant,
        lambda query: takes_rounded is not None and find(takes_rounded)(query),
        takes_plain,
        takes_mixed,
        None if into is None else lambda: find(into),
        None if staging is None else lambda: find(staging),
    )


invariant = partial(kernel, batch_invariant=True)


def _dequantised(note: Callable[[OpQuery], str], query: OpQuery) -> str:
    cost = f"dequantised when loaded: {query.dtype.itemsize} bytes a weight"
    return "; ".join(filter(None, (cost, note(query))))


def one_by_one(_: OpQuery) -> str:
    return "its parts one by one, each as this table says"


def unrounded(_: OpQuery) -> str:
    return "the norm alone: products round their inputs"


def wide_product(query: OpQuery) -> str:
    return find("torch.linear:refuses_logits")(query) or ""


def find(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(f"atom.model_ops.kernels.{module}"), name)
