"""A cache of compiled grammars."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future
from functools import partial
from typing import Protocol
from weakref import WeakValueDictionary

from atom.structured_output.base import CompileStoppedError, Grammar
from atom.structured_output.params import StructuredOutput

DEFAULT_CAPACITY = 128
# For all grammars; that of a JSON schema takes 8 MB with 49k tokens and 22 MB with 128k.
DEFAULT_CAPACITY_BYTES = 256 << 20


class Compiler(Protocol):
    """Compiles grammars in the background."""

    def submit(self, wanted: StructuredOutput) -> Future[Grammar]:
        """The future grammar; fails with GrammarError when it cannot be compiled.

        Cancelling the future stops the compilation if possible.
        """

    def shutdown(self) -> None: ...


class GrammarCache:
    """Compiles each grammar once while it is in use, and keeps the recently used ones.

    Args:
        capacity: how many recent grammars to keep.
        capacity_bytes: their total size; the latest one is kept in any case.
    """

    def __init__(
        self,
        compiler: Compiler,
        capacity: int = DEFAULT_CAPACITY,
        capacity_bytes: int = DEFAULT_CAPACITY_BYTES,
    ) -> None:
        self._compiler = compiler
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        # Futures complete in other threads, which may then evict.
        self._lock = threading.RLock()
        self._recent: OrderedDict[StructuredOutput, Future[Grammar]] = OrderedDict()
        # All grammars that are recent or in use.
        self._known: WeakValueDictionary[StructuredOutput, Future[Grammar]] = WeakValueDictionary()

    @property
    def num_bytes(self) -> int:
        """Size of the recent grammars, without those that are only in use."""
        with self._lock:
            return sum(_num_bytes(future) for future in self._recent.values())

    def submit(self, wanted: StructuredOutput) -> Future[Grammar]:
        """The future grammar. It stays in the cache while its future is referenced."""
        with self._lock:
            future = self._known.get(wanted)
            is_new = future is None
            if future is None:
                future = self._known[wanted] = self._compiler.submit(wanted)
            self._recent[wanted] = future
            self._recent.move_to_end(wanted)
        if is_new:
            future.add_done_callback(partial(self._settle, wanted))
        self._evict()
        return future

    def get(self, wanted: StructuredOutput) -> Grammar:
        """The grammar; waits for it.

        Raises:
            GrammarError: when it cannot be compiled.
        """
        return self.submit(wanted).result()

    def abandon(self, wanted: StructuredOutput) -> None:
        """Cancel the compilation of a grammar, unless it is done."""
        with self._lock:
            future = self._known.get(wanted)
            if future is None or not future.cancel():
                return
            self._recent.pop(wanted, None)
            del self._known[wanted]

    def shutdown(self) -> None:
        self._compiler.shutdown()

    def _settle(self, wanted: StructuredOutput, future: Future[Grammar]) -> None:
        """Handle the end of a compilation; if it was stopped, a later request may retry."""
        if future.cancelled():
            return
        with self._lock:
            stopped = isinstance(future.exception(), CompileStoppedError)
            if stopped and self._known.get(wanted) is future:
                self._recent.pop(wanted, None)
                del self._known[wanted]
        self._evict()

    def _evict(self) -> None:
        with self._lock:
            while len(self._recent) > 1 and self._is_over_capacity():
                self._recent.popitem(last=False)

    def _is_over_capacity(self) -> bool:
        return len(self._recent) > self._capacity or self.num_bytes > self._capacity_bytes


def _num_bytes(future: Future[Grammar]) -> int:
    """The size of a grammar; 0 until it is compiled."""
    if not future.done() or future.cancelled() or future.exception() is not None:
        return 0
    return future.result().num_bytes
