"""What is taken, in which turn it runs, and when a refused request may come again."""

from __future__ import annotations

import contextlib

import pytest
from model_engine.scheduler_harness import Bench

from atom.messages import EngineRequest
from atom.model_engine.admission import (
    Admission,
    AdmissionLimits,
    ClientFullError,
    QueueFullError,
    Ticket,
)
from atom.sampling_params import SamplingParams


class Frontend:
    """Requests of several clients, by a clock that the test sets."""

    def __init__(self, **limits: int) -> None:
        self.now = 1000.0
        self.admission = Admission(AdmissionLimits(**limits), lambda: self.now)
        self._open: dict[Ticket, contextlib.ExitStack] = {}

    def enter(self, client: str = "", n: int = 1, tokens: int = 10, waiting: int = 0) -> Ticket:
        stack = contextlib.ExitStack()
        ticket = stack.enter_context(self.admission.admit(client, n, tokens, waiting))
        self._open[ticket] = stack
        return ticket

    def leave(self, ticket: Ticket, output_tokens: int = 0) -> None:
        ticket.num_output_tokens += output_tokens
        self._open.pop(ticket).close()

    def refused(self, **request: object) -> QueueFullError:
        with pytest.raises(QueueFullError) as raised:
            self.enter(**request)  # type: ignore[arg-type]
        return raised.value


def test_prompts_that_wait_are_bounded_by_their_tokens() -> None:
    frontend = Frontend(max_waiting_tokens=100)
    first = frontend.enter(tokens=500)  # where none waits, any prompt is taken
    assert "500 tokens are waiting" in str(frontend.refused(tokens=1))
    frontend.admission.begin(first)
    frontend.admission.begin(first)
    second = frontend.enter(tokens=60)
    assert "60 tokens are waiting and 41" in str(frontend.refused(tokens=41))
    third = frontend.enter(tokens=40)
    for ticket in (first, second, third):
        frontend.leave(ticket)
    assert frontend.admission.num_waiting_tokens == 0


def test_sequences_of_one_key_are_bounded() -> None:
    frontend = Frontend(max_requests_per_key=3)
    mine = frontend.enter("a", n=2)
    error = frontend.refused(client="a", n=2)
    assert isinstance(error, ClientFullError)
    assert "2 sequences of this API key" in str(error)
    frontend.enter("a")
    frontend.enter("b", n=3)
    assert isinstance(frontend.refused(client="a"), ClientFullError)
    frontend.leave(mine)
    frontend.enter("a", n=2)


def test_a_refused_client_may_come_when_there_is_room_at_the_rate_of_late() -> None:
    frontend = Frontend(max_waiting_requests=4)
    running = [frontend.enter() for _ in range(6)]
    frontend.now += 7.5
    # Nothing has ended in 7.5 s, so another 7.5 s are the best guess.
    assert frontend.refused(waiting=4).retry_after == 8
    for ticket in running[:3]:
        frontend.leave(ticket)
    frontend.now += 7.5  # 3 in 15 s
    assert frontend.refused(waiting=4).retry_after == 5
    assert frontend.refused(waiting=4, n=3).retry_after == 15
    for ticket in running[3:]:
        frontend.leave(ticket)
    # What an idle hour says of the rate is nothing.
    frontend.now += 3600
    running = [frontend.enter() for _ in range(6)]
    frontend.now += 1
    frontend.leave(running[0])
    assert frontend.refused(waiting=4).retry_after == 1


def test_the_wait_of_a_key_is_measured_by_its_own_requests() -> None:
    frontend = Frontend(max_requests_per_key=2)
    mine, mine_too = frontend.enter("a"), frontend.enter("a")
    for _ in range(8):
        frontend.leave(frontend.enter("b"))
    frontend.now += 10
    frontend.leave(mine)
    frontend.now += 10
    frontend.enter("a")
    assert frontend.refused(client="a").retry_after == 20
    frontend.leave(mine_too)
    frontend.enter("a")
    assert frontend.refused(client="a", n=2).retry_after == 20


def test_the_rate_is_that_of_the_last_ends() -> None:
    frontend = Frontend(max_waiting_requests=1)
    frontend.enter()
    for _ in range(300):  # a second each
        frontend.now += 1
        frontend.leave(frontend.enter())
    for _ in range(200):  # ten a second
        frontend.now += 0.1
        frontend.leave(frontend.enter())
    assert frontend.refused(n=50).retry_after == 5


def test_clients_take_turns_by_tokens() -> None:
    """Whoever comes second does not wait for all that the first has sent."""
    frontend = Frontend()
    many = [frontend.enter("many", tokens=100) for _ in range(10)]
    frontend.admission.begin(many[0])
    few = [frontend.enter("few", tokens=200) for _ in range(3)]
    named = [("many", t) for t in many] + [("few", t) for t in few]
    order = [name for name, _ in sorted(named, key=lambda pair: pair[1].turn)]
    assert order[:7] == ["many", "few", "many", "many", "few", "many", "many"]
    assert [t.turn for t in many] == sorted(t.turn for t in many), "one client's come in order"


def test_answers_count_as_well() -> None:
    frontend = Frontend()
    talker, quiet = frontend.enter("talks"), frontend.enter("quiet")
    for ticket in (talker, quiet):
        frontend.admission.begin(ticket)
    frontend.leave(talker, output_tokens=500)
    frontend.leave(quiet, output_tokens=5)
    assert frontend.enter("talks").turn - frontend.enter("quiet").turn == 495


def test_a_client_that_rested_saves_nothing_up() -> None:
    frontend = Frontend()
    for _ in range(50):
        ticket = frontend.enter("busy", tokens=100)
        frontend.admission.begin(ticket)
        frontend.leave(ticket)
    rested = frontend.enter("rested", tokens=100)
    assert abs(rested.turn - frontend.enter("busy").turn) <= 100


def test_the_scheduler_follows_priority_then_turn_then_arrival() -> None:
    bench = Bench(max_num_seqs=1)
    for name, priority, turn in [("d", 0, 9), ("c", 0, 5), ("e", 1, 0), ("b", 0, 5), ("a", -1, 7)]:
        bench.scheduler.add(
            EngineRequest(
                id=name,
                prompt_token_ids=[1, 2, 3],
                params=SamplingParams(max_tokens=1, ignore_eos=True),
                seed=0,
                priority=priority,
                turn=turn,
            )
        )
    assert list(bench.run()) == ["a", "c", "b", "d", "e"]
