"""The router against a model of caches that hold all that was computed."""

from __future__ import annotations

import heapq
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.model_engine.replicas import router
from atom.model_engine.replicas.router import Router

BLOCK = 16


def send(routes: Router, prompt: list[int], loads: dict[int, int], salt: str = "") -> int:
    hashes = routes.hashes(prompt, salt)
    chosen = routes.choose(hashes, len(prompt), loads)
    routes.record(chosen, hashes)
    return chosen


def prompt_of(number: int, size: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(1000) for _ in range(size)]


@pytest.mark.parametrize("clients", [4, 8, 32])
def test_a_repeated_prefix_goes_where_it_is(clients: int) -> None:
    """Closed-loop clients, answers of random length, 20 prefixes asked for 10 times each."""
    rng = random.Random(clients)
    routes, loads = Router(2, BLOCK, 10_000), {0: 0, 1: 0}
    asked = [number for number in range(20) for _ in range(10)]
    rng.shuffle(asked)
    running: list[tuple[float, int]] = []
    computed: dict[int, set[int]] = {}
    now, found, repeated, most_apart = 0.0, 0, 0, 0
    for number in asked:
        if len(running) == clients:
            now, ended = heapq.heappop(running)
            loads[ended] -= 1
        question = [rng.randrange(1000) for _ in range(20)]
        chosen = send(routes, prompt_of(number, 128) + question, loads)
        loads[chosen] += 1
        heapq.heappush(running, (now + rng.expovariate(1), chosen))
        if number in computed:
            repeated += 1
            found += chosen in computed[number]
        computed.setdefault(number, set()).add(chosen)
        least = min(loads.values())
        most_apart = max(
            most_apart,
            max(loads.values()) - max(least + router.MOST_EXCESS, least * router.MOST_RATIO),
        )
    assert found / repeated >= 0.95
    assert most_apart <= 1


def test_a_prefix_of_all_prompts_does_not_keep_them_together() -> None:
    for shared, most in ((48, 1), (1000, router.MOST_EXCESS + 1)):
        routes, loads = Router(2, BLOCK, 1000), {0: 0, 1: 0}
        for number in range(40):
            loads[send(routes, prompt_of(0, shared) + prompt_of(number, 60), loads)] += 1
            assert abs(loads[0] - loads[1]) <= most
        assert loads == {0: 20, 1: 20}


def test_a_short_prompt_that_is_mostly_known() -> None:
    routes = Router(2, BLOCK, 1000)
    chosen = send(routes, prompt_of(1, 40), {0: 0, 1: 0})
    loads = {chosen: 2, 1 - chosen: 0}
    assert send(routes, prompt_of(1, 40), loads) == chosen
    assert send(routes, prompt_of(1, 40), {chosen: 5, 1 - chosen: 0}) == 1 - chosen


def test_salts_are_apart() -> None:
    routes = Router(2, BLOCK, 1000)
    chosen = send(routes, prompt_of(1, 200), {0: 0, 1: 0}, "a")
    loads = {chosen: 1, 1 - chosen: 0}
    assert send(routes, prompt_of(1, 200), loads, "b") == 1 - chosen
    assert send(routes, prompt_of(1, 200), loads, "a") == chosen


def test_ties_rotate_and_what_is_gone_is_forgotten() -> None:
    routes, idle = Router(3, BLOCK, 8), {0: 0, 1: 0, 2: 0}
    assert [send(routes, [1], idle) for _ in range(4)] == [0, 1, 2, 0]
    chosen = send(routes, prompt_of(1, 100), idle)
    assert all(send(routes, prompt_of(1, 100), idle) == chosen for _ in range(5))
    others = {index: 0 for index in idle if index != chosen}
    assert send(routes, prompt_of(1, 100), others) in others
    routes.forget(chosen)
    assert send(routes, prompt_of(1, 100), idle) != chosen


def test_no_more_is_remembered_than_the_cache_holds() -> None:
    """The head of a prompt outlives its tail, and a prompt that is asked for again the others."""
    routes = Router(1, BLOCK, 8)
    long, other = routes.hashes(prompt_of(1, 200), ""), routes.hashes(prompt_of(2, 65), "")
    assert len(long) == 12
    routes.record(0, long)
    assert routes._num_known(0, long) == 8
    routes.record(0, other)
    assert (routes._num_known(0, long), routes._num_known(0, other)) == (4, 4)
    assert len(routes._known[0]) == 8
    assert Router(2, BLOCK, 0).hashes(prompt_of(1, 200), "") == []


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 120)), min_size=1, max_size=30),
    st.lists(st.integers(0, 50), min_size=1, max_size=4),
)
def test_every_choice_follows_the_rule(sent: list[tuple[int, int]], numbers: list[int]) -> None:
    """Whatever was sent before: a candidate, within the bound or the least loaded."""
    routes, loads = Router(len(numbers), BLOCK, 64), dict(enumerate(numbers))
    for number, size in sent:
        prompt = prompt_of(number, size)
        hashes = routes.hashes(prompt, "")
        known = {index: routes._num_known(index, hashes) for index in loads}
        chosen, least = send(routes, prompt, loads), min(loads.values())
        bound = max(least + router.MOST_EXCESS, least * router.MOST_RATIO)
        matters = max(known.values()) * BLOCK >= min(router.MIN_PREFIX_TOKENS, size / 2)
        holders = [index for index in loads if known[index] == max(known.values())]
        if matters and min(loads[index] for index in holders) <= bound:
            assert chosen in holders
            assert loads[chosen] == min(loads[index] for index in holders)
        else:
            assert loads[chosen] == least
