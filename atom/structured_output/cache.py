"""Compiled grammars, remembered."""

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
# Of grammars together; a JSON schema's takes 8 MB with 49k tokens and 22 MB with 128k.
DEFAULT_CAPACITY_BYTES = 256 << 20


class Compiler(Protocol):
    """Compiles aside."""

    def submit(self, wanted: StructuredOutput) -> Future[Grammar]:
        """The grammar, once it is compiled; fails with GrammarError when it cannot be.

        Cancelling the future ends the compiling where that is possible.
        """

    def shutdown(self) -> None: ...


class GrammarCache:
    """Compiles each grammar once while it is in use, and keeps the recently used ones.

    Args:
        capacity: how many grammars are kept for those who may want them again.
        capacity_bytes: how much those may take; the latest one is kept in any case.
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
        # Grammars become ready, and the cache full, in other threads.
        self._lock = threading.RLock()
        self._recent: OrderedDict[StructuredOutput, Future[Grammar]] = OrderedDict()
        # Also those that are not recent, for as long as someone holds them.
        self._known: WeakValueDictionary[StructuredOutput, Future[Grammar]] = WeakValueDictionary()

    @property
    def num_bytes(self) -> int:
        """What the kept grammars take; those that are only in use are not among them."""
        with self._lock:
            return sum(_num_bytes(future) for future in self._recent.values())

    def submit(self, wanted: StructuredOutput) -> Future[Grammar]:
        """The grammar, once it is compiled. A grammar stays known while its future is held."""
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
        """The grammar, waiting for it.

        Raises:
            GrammarError: when it cannot be compiled.
        """
        return self.submit(wanted).result()

    def abandon(self, wanted: StructuredOutput) -> None:
        """End the compiling of a grammar that nobody waits for any more, if it is not done."""
        with self._lock:
            future = self._known.get(wanted)
            if future is None or not future.cancel():
                return
            self._recent.pop(wanted, None)
            del self._known[wanted]

    def shutdown(self) -> None:
        self._compiler.shutdown()

    def _settle(self, wanted: StructuredOutput, future: Future[Grammar]) -> None:
        """Take note of how compiling ended; what was stopped may be tried again."""
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
    """What a grammar takes; nothing before it is there."""
    if not future.done() or future.cancelled() or future.exception() is not None:
        return 0
    return future.result().num_bytes
