"""Ranks meet at rank 0's store, and are refused with what is wrong."""

from __future__ import annotations

import contextlib
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch.distributed as dist
from patience import PATIENCE_SECONDS, wait_until
from ranks import run_threads

from atom.config import ConfigError
from atom.distributed import rendezvous, store
from atom.distributed.launch import RankStartError
from atom.distributed.rank_environment import RankEnvironment, launched_rank
from atom.distributed.rendezvous import RankCard, meet, meet_as_first, refuse, refuse_all
from atom.model_engine.arg_utils import engine_config
from atom.model_engine.processes import own_card as own_cards
from atom.model_engine.processes.own_card import own_card

HERE = RankEnvironment(0, 2, 0)


class Meeting:
    """A store on this machine, and every rank's way to it."""

    def __init__(self) -> None:
        listener = store.listen(HERE)
        self.port = listener.getsockname()[1]
        self.server = store.host_store(listener)

    def store(self, rank: int) -> dist.Store:
        if rank == 0:
            return store.scope(self.server, HERE)
        there = replace(HERE, rank=rank, world_size=8, master_port=self.port)
        return store.scope(store.reach_store(there, PATIENCE_SECONDS), there)

    def run(
        self,
        cards: list[RankCard],
        first_s: float = PATIENCE_SECONDS,
        first_waits_for: Callable[[], object] = lambda: None,
    ) -> list[list[RankCard] | str]:
        """What each card's rank gets to know: all cards, or the error.

        Args:
            first_s: how long rank 0 waits for the others.
            first_waits_for: called by rank 0 before it waits for them.
        """

        def come(index: int) -> list[RankCard] | str:
            card = cards[index]
            try:
                if card.rank == 0:
                    self.store(0).set("world", str(card.world_size))
                    first_waits_for()
                    return meet_as_first(self.store(0), card, timeout_s=first_s)
                return meet(self.store(card.rank), card, timeout_s=PATIENCE_SECONDS)
            except (ConfigError, RankStartError) as error:
                return f"{type(error).__name__}: {error}"

        return run_threads(len(cards), come)


@pytest.fixture
def meeting() -> Meeting:
    return Meeting()


def card(rank: int, world_size: int = 2, host: str = "one", **common: dict[str, str]) -> RankCard:
    return RankCard(rank, world_size, host, 100 + rank, "machine", **common)


def test_every_rank_gets_all_cards(meeting: Meeting) -> None:
    cards = [card(rank, 3) for rank in range(3)]
    assert meeting.run(cards) == [cards] * 3


def test_what_differs_is_told_to_all(meeting: Meeting) -> None:
    cards = [
        card(0, 3, flags={"--dtype": "auto", "--seed": "1"}, checkpoint={"a": "5 bytes"}),
        card(1, 3, flags={"--dtype": "auto", "--seed": "1"}, checkpoint={"a": "5 bytes"}),
        card(2, 3, "two", flags={"--dtype": "float16", "--seed": "1"}, checkpoint={}),
    ]
    message = (
        "ConfigError: the ranks cannot work together: --dtype is auto on ranks 0, 1 (one) but "
        "float16 on rank 2 (two); a is 5 bytes on ranks 0, 1 (one) but absent on rank 2 (two)"
    )
    assert meeting.run(cards) == [message] * 3


def test_another_world_size_is_refused(meeting: Meeting) -> None:
    for message in meeting.run([card(0, 2), card(1, 4)]):
        assert "rank 0 expects 2 ranks" in message
        assert "rank 1 (host one, pid 101) was started as one of 4" in message


def test_missing_ranks_are_named(meeting: Meeting) -> None:
    cards = [card(0, 4), card(2, 4), card(2, 4, "twin")]
    store = meeting.store(0)
    first, *others = meeting.run(
        cards, 0.5, lambda: wait_until(lambda: store.check(["card/2", "duplicate/1"]))
    )
    assert "ranks 1, 3 of 4 did not come in 0.5 s" in first
    assert "here are rank 0 (host one, pid 100), rank 2" in first
    assert "refused, because their ranks were taken, were rank 2" in first
    assert sorted("there is a rank 2" in other for other in others) == [False, True]


def test_rank_0_says_whom_it_waits_for(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "_SAY_SECONDS", 0.0)
    caplog.set_level("INFO", "atom")
    meeting.run([card(0, 3), card(1, 3)], first_s=0.2)
    assert "waiting for ranks 1, 2 of 3 to come, for 0 s" in caplog.text
    assert "waiting for rank 2 of 3 to come, for 0 s" in caplog.text


def test_who_comes_late_is_refused_and_the_engine_goes_on(meeting: Meeting) -> None:
    cards = [card(0), card(1)]
    assert meeting.run(cards) == [cards] * 2
    late = replace_host(cards[1], "late")
    with pytest.raises(ConfigError, match=r"there is a rank 1 \(host one, pid 101\) already"):
        meet(meeting.store(1), late, timeout_s=PATIENCE_SECONDS)
    with pytest.raises(ConfigError, match="expects 2 ranks"):
        meet(meeting.store(3), card(3, 4), timeout_s=PATIENCE_SECONDS)
    meeting.server.set("still", "there")
    assert meeting.store(1).check(["card/1"])


def replace_host(card: RankCard, host: str) -> RankCard:
    return msgspec.structs.replace(card, host=host)


def test_a_rank_that_refuses_itself_ends_all(meeting: Meeting) -> None:
    refuse(meeting.store(1), "rank 1: there is no such model")
    with pytest.raises(ConfigError, match="rank 1: there is no such model"):
        meet_as_first(meeting.store(0), card(0, 3), timeout_s=PATIENCE_SECONDS)
    with pytest.raises(ConfigError, match="rank 1: there is no such model"):
        meet(meeting.store(2), card(2, 3), timeout_s=PATIENCE_SECONDS)


def test_why_rank_0_fails_before_the_meeting_is_told(meeting: Meeting) -> None:
    meeting.store(0).set("world", "2")
    refuse_all(meeting.store(0), "the draft does not fit", 2)
    with pytest.raises(ConfigError, match="the draft does not fit"):
        meet(meeting.store(1), card(1), timeout_s=PATIENCE_SECONDS)


def test_a_rank_that_dies_is_reported_at_once(meeting: Meeting) -> None:
    def check() -> None:
        raise RankStartError("rank 1 was killed")

    with pytest.raises(RankStartError, match="rank 1 was killed"):
        meet_as_first(meeting.store(0), card(0), check)


def test_rank_0_that_is_not_there() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and nobody listens
        port = silent.getsockname()[1]
        there = replace(HERE, rank=1, master_port=port)
        message = f"does not reach rank 0 at 127.0.0.1:{port} in 0.3 s"
        with pytest.raises(RankStartError, match=message):
            store.reach_store(there, 0.3)


def test_two_engines_on_one_port(meeting: Meeting) -> None:
    with pytest.raises(ConfigError, match=f"port {meeting.port} .* is in use.*--master-port"):
        store.listen(replace(HERE, master_port=meeting.port))


def test_only_the_address_named_listens(meeting: Meeting) -> None:
    listener = store.listen(HERE)
    assert listener.getsockname()[0] == "127.0.0.1"
    listener.close()
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.2", meeting.port), timeout=1),
    ):
        pytest.fail("the store listens beyond its address")


def test_an_address_of_another_machine() -> None:
    with pytest.raises(ConfigError, match=r"198\.51\.100\.1 is no address of this machine"):
        store.listen(replace(HERE, master_addr="198.51.100.1"))


def test_a_name_that_others_know_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(ConfigError, match=r"node1 is 127\.0\.1\.1 on this machine"):
        store.listen(replace(HERE, master_addr="node1", spans_machines=True))


TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "1234",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NNODES": "2"}


def test_torchrun() -> None:
    expected = RankEnvironment(5, 8, 1, "node1", 1234, True, True, 2)
    assert launched_rank(TORCHRUN) == expected
    assert launched_rank({**SLURM, **TORCHRUN}) == expected


def test_slurm() -> None:
    expected = RankEnvironment(5, 8, 1, "node1", 29500, spans_machines=True)
    assert launched_rank({**SLURM, "MASTER_ADDR": "node1"}) == expected
    assert launched_rank(SLURM) is None
    alone = {**SLURM, "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "MASTER_ADDR": "node1"}
    assert launched_rank(alone) is None


def test_nobody_launched_this() -> None:
    assert launched_rank({}) is None
    assert launched_rank({"MASTER_ADDR": "node1", "LOCAL_RANK": "0"}) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"LOCAL_RANK": None}, "RANK=5, WORLD_SIZE=8, MASTER_ADDR=node1 .* LOCAL_RANK is not set"),
        ({"RANK": "8"}, "RANK=8 must be less than WORLD_SIZE=8"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT .* number from 0, got 'http'"),
    ],
)
def test_a_wrong_environment(change: dict[str, str | None], message: str) -> None:
    variables = {name: value for name, value in (TORCHRUN | change).items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        launched_rank(variables)


def test_a_card_tells_apart_what_must_be_the_same(
    tmp_path: Path, tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = tiny_llama_dir
    same, other = (Path(shutil.copytree(one, tmp_path / name)) for name in ("same", "other"))
    weights = other / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"model.norm", b"model.morn", 1))
    (other / "config.json").write_text(
        (other / "config.json").read_text().replace('"hidden_act"', '"hidden_art"')
    )

    def card_of(folder: Path, **options: object) -> RankCard:
        return own_card(engine_config(model=str(folder), device="cpu", **options), 0, 0, 2)

    assert rendezvous.differences([card_of(one), card_of(same)]) == []
    found = " ".join(rendezvous.differences([card_of(one), card_of(other)]))
    assert "model.safetensors is" in found
    assert "hidden_art of config.json is absent" in found
    one_card = card_of(one)
    monkeypatch.setenv("ATOM_OP_RMS_NORM", "torch")
    monkeypatch.setenv("AITER_LOG_LEVEL", "INFO")  # of which nothing follows
    monkeypatch.setattr(own_cards, "version", lambda _: "3.6.0")
    found = rendezvous.differences([one_card, card_of(same)])
    monkeypatch.undo()
    host = f"rank 0 ({socket.gethostname()})"
    assert f"ATOM_OP_RMS_NORM is absent on {host} but torch on {host}" in found
    triton = [said for said in found if said.startswith("the version of triton is ")]
    assert triton
    assert " but 3.6.0 " in triton[0]
    flags = rendezvous.differences([card_of(one), card_of(same, max_num_seqs=8, num_threads=1)])
    host = socket.gethostname()
    assert flags == [f"--max-num-seqs is 64 on rank 0 ({host}) but 8 on rank 0 ({host})"]
