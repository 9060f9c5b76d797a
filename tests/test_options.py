"""One field makes an option: flag, keyword argument, JSON, help, checks and what is sent."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from atom.config import (
    CacheOptions,
    ConfigError,
    EngineConfig,
    SpeculativeOptions,
    parse_bytes,
)
from atom.model_engine.arg_utils import add_engine_flags, engine_config, engine_options
from atom.options.fields import Options, add_flags, build, given_flags, option, options_of


@dataclass(frozen=True)
class MoreCache(CacheOptions):
    swap_space: int | None = option(
        None, "host memory for blocks, such as 4GiB", parse=parse_bytes, at_least=1
    )


@dataclass(frozen=True)
class MoreSpeculation(SpeculativeOptions):
    order: str = option(
        "depth", "how a tree is grown", name="speculative_order", choices=("depth", "breadth")
    )


@dataclass(frozen=True)
class MoreConfig(EngineConfig):
    """The engine's options, one more in a group and one more in the speculation."""

    cache: MoreCache = field(default_factory=MoreCache)
    speculative: MoreSpeculation | None = option(  # noqa: RUF009
        None, "the speculation options as one JSON object", name="speculative_config"
    )


NGRAM = {"method": "suffix", "num_speculative_tokens": 2}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    add_flags(made.add_argument_group("engine"), MoreConfig)
    return made


def from_flags(*flags: str) -> MoreConfig:
    return build(MoreConfig, given_flags(parser().parse_args(flags), MoreConfig))


def test_a_field_is_an_option_everywhere() -> None:
    by_keyword = build(MoreConfig, {**NGRAM, "swap_space": "4GiB", "speculative_order": "breadth"})
    assert by_keyword.cache.swap_space == 4 * 2**30
    assert by_keyword.speculative is not None
    assert by_keyword.speculative.order == "breadth"
    flags = "--method suffix --num-speculative-tokens 2"
    for swap, order in (
        ("--swap-space", "--speculative-order"),
        ("--swap_space", "--speculative_order"),
    ):
        line = (*flags.split(), swap, "4GiB", order, "breadth")
        assert from_flags(*line) == by_keyword
    text = '{"method": "suffix", "num_speculative_tokens": 2, "order": "breadth"}'
    assert from_flags("--swap-space", "4GiB", "--speculative-config", text) == by_keyword
    given = {**NGRAM, "order": "breadth"}
    assert build(MoreConfig, {"swap_space": 4 * 2**30, "speculative_config": given}) == by_keyword
    sent = msgspec.msgpack.encode(by_keyword)
    assert msgspec.msgpack.decode(sent, type=MoreConfig) == by_keyword
    shown = " ".join(parser().format_help().split())
    assert "--swap-space SWAP_SPACE, --swap_space SWAP_SPACE host memory for blocks" in shown
    assert "{depth,breadth} how a tree is grown (default: depth)" in shown


def test_a_field_checks_what_it_declares() -> None:
    with pytest.raises(ConfigError, match="swap_space must be an integer of at least 1, got 0"):
        build(MoreConfig, {"swap_space": 0})
    with pytest.raises(ConfigError, match="expected a size such as 2GiB"):
        from_flags("--swap-space", "much")
    with pytest.raises(ConfigError, match="order must be one of depth, breadth; got 'x'"):
        build(MoreConfig, {**NGRAM, "speculative_order": "x"})
    with pytest.raises(ConfigError, match="--speculative-order has no effect without --method"):
        build(MoreConfig, {"speculative_order": "breadth"})
    with pytest.raises(TypeError, match=r"unknown option\(s\) swap; known: .*swap_space"):
        build(MoreConfig, {"swap": 1})


def test_defaults_say_nothing() -> None:
    """A switch that is off needs no method, and no flag is every default."""
    assert from_flags() == from_flags("--no-speculative-lookup") == MoreConfig()
    assert given_flags(parser().parse_args([]), MoreConfig) == {}
    off = {"speculative_lookup": False}
    assert given_flags(parser().parse_args(["--no-speculative-lookup"]), MoreConfig) == off
    for option_of in options_of(MoreConfig):
        assert build(MoreConfig, {option_of.name: option_of.default}) == MoreConfig()


def test_gpus_have_defaults_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes(*line: str) -> tuple[int, int, int]:
        flags = argparse.ArgumentParser()
        add_engine_flags(flags)
        config = engine_config(**engine_options(flags.parse_args(line)))
        scheduler = config.scheduler
        return config.cache.block_size, scheduler.max_num_batched_tokens, scheduler.max_num_seqs

    monkeypatch.setattr("atom.platform.num_gpus", lambda: 0)
    assert sizes() == (16, 2048, 64)
    monkeypatch.setattr("atom.platform.num_gpus", lambda: 1)
    assert sizes() == (64, 8192, 256)
    assert sizes("--device", "cpu") == (16, 2048, 64)
    # What is given counts, also where it is the default elsewhere.
    assert sizes("--block-size", "16", "--max-num-seqs", "64") == (16, 8192, 64)
    assert engine_config(block_size=None, max_num_seqs=64).scheduler.max_num_seqs == 64
    # A step has no more sequences than tokens.
    assert sizes("--max-num-batched-tokens", "128") == (64, 128, 128)
    with pytest.raises(ConfigError, match="max_num_seqs"):
        sizes("--max-num-batched-tokens", "128", "--max-num-seqs", "129")


def test_names_are_told_apart() -> None:
    names = [each.name for each in options_of(EngineConfig)]
    assert len(names) == len(set(names))
    assert {"model", "draft_model", "cudagraph_capture_sizes", "speculative_config"} <= set(names)


@dataclass(frozen=True)
class Sample(Options):
    names: tuple[str, ...] = option((), "names", name="name", alias="names", parse=tuple)
    share: float = option(0.5, "a share")
    is_on: bool = option(True, "a switch")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], Sample()),
        (["--name", "a", "b", "--names", "c"], Sample(names=("a", "b", "c"))),
        (["--share", "0.25", "--no-is-on"], Sample(share=0.25, is_on=False)),
        (["--no-is_on"], Sample(is_on=False)),
    ],
)
def test_kinds_of_flags(flags: list[str], expected: Sample) -> None:
    made = argparse.ArgumentParser()
    add_flags(made, Sample)
    assert build(Sample, given_flags(made.parse_args(flags), Sample)) == expected


@pytest.mark.parametrize("value", ["yes", 2, None])
def test_switches_are_booleans(value: Any) -> None:
    with pytest.raises(ConfigError, match="is_on must be true or false, got"):
        Sample(is_on=value)
