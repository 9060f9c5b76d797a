"""Compiled grammars, made in threads and remembered."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from weakref import WeakValueDictionary

from atom.structured_output.base import Grammar, GrammarBackend
from atom.structured_output.params import StructuredOutput

DEFAULT_CAPACITY = 128
_NUM_THREADS = 2


class GrammarCache:
    """Compiles each grammar once while it is in use, and keeps the recently used ones.

    Belongs to one thread, but for the compiling.

    Args:
        create_backend: makes the backend, in a thread, when the first grammar is wanted.
        capacity: how many grammars nobody uses are kept.
    """

    def __init__(
        self, create_backend: Callable[[], GrammarBackend], capacity: int = DEFAULT_CAPACITY
    ) -> None:
        self._create_backend = create_backend
        self._capacity = capacity
        self._backend: GrammarBackend | None = None
        self._lock = threading.Lock()
        # Starts no thread before its first task.
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        self._recent: OrderedDict[StructuredOutput, Future[Grammar]] = OrderedDict()
        # Also those that are not recent, for as long as someone holds them.
        self._known: WeakValueDictionary[StructuredOutput, Future[Grammar]] = WeakValueDictionary()

    def submit(self, wanted: StructuredOutput) -> Future[Grammar]:
        """The grammar, once it is compiled. A grammar stays known while its future is held."""
        future = self._known.get(wanted)
        if future is None:
            future = self._known[wanted] = self._pool.submit(self._compile, wanted)
        self._recent[wanted] = future
        self._recent.move_to_end(wanted)
        if len(self._recent) > self._capacity:
            self._recent.popitem(last=False)
        return future

    def get(self, wanted: StructuredOutput) -> Grammar:
        """The grammar, waiting for it.

        Raises:
            GrammarError: when it cannot be compiled.
        """
        return self.submit(wanted).result()

    def shutdown(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, wanted: StructuredOutput) -> Grammar:
        with self._lock:
            if self._backend is None:
                self._backend = self._create_backend()
        return self._backend.compile(wanted)
