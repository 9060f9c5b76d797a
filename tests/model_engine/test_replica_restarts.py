from __future__ import annotations

from atom.model_engine.replicas.replica_set import DELAYS, WINDOW_SECONDS, RestartPolicy


def test_restarts_wait_longer_and_longer_and_then_end() -> None:
    policy = RestartPolicy()
    assert [policy.failed(10.0 * i) for i in range(6)] == [1, 2, 5, 10, 30, None]


def test_old_failures_are_forgiven() -> None:
    policy = RestartPolicy()
    for i in range(20):
        assert policy.failed(i * WINDOW_SECONDS / 4) == DELAYS[min(i, 3)]
