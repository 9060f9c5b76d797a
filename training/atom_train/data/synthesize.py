"""`synthesize`: generate the target's answers to prompts as training data."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from atom.bench.repetition import repeated_bigram_share
from atom.messages import EngineRequest, SequenceOutput
from atom.model_engine.engine_core import EngineCore
from atom.sampling_params import SamplingParams
from atom_train.data.dataset import Example, Manifest, draw_seed, draw_temperature, write_shard
from atom_train.data.prompts import ChatTemplate, DataError, Prompt
from atom_train.data.recorder import FeatureRecorder
from atom_train.data.repetition import LoopDetector

# Shorter user turns and answers are dropped.
_MIN_TURN_TOKENS = 5
_MIN_ANSWER_TOKENS = 8


@dataclass(frozen=True)
class SynthesisOptions:
    """Attributes:
    max_new_tokens: limit of an answer.
    max_turn_tokens: limit of a user turn that the target writes.
    temperatures: one is drawn for each answer; 0 is greedy.
    turn_temperature, turn_min_p: sampling of user turns.
    max_repetition: answers with a larger share of repeated bigrams are dropped.
    max_tokens, max_seconds: stop after so many trained tokens, or after this time.
    shard_tokens: tokens per shard.
    """

    max_new_tokens: int = 200
    max_turn_tokens: int = 80
    temperatures: tuple[float, ...] = (1.0, 1.0, 0.7, 0.0)
    top_p: float = 1.0
    turn_temperature: float = 1.0
    turn_min_p: float = 0.1
    max_repetition: float = 0.6
    max_tokens: int | None = None
    max_seconds: float | None = None
    shard_tokens: int = 65536
    seed: int = 0


@dataclass
class _Text:
    """A text being generated."""

    prompt: Prompt
    prompt_ids: list[int]
    writes_turn: bool
    trained_from: int
    output_ids: list[int] = field(default_factory=list)
    loops: LoopDetector = field(default_factory=LoopDetector)


class Synthesizer:
    """Runs the engine on a list of prompts and writes shards as they fill up.

    Args:
        core: the engine; `recorder` is its proposer when features are kept.
        max_live: concurrent sequences in the engine.
    """

    def __init__(
        self,
        core: EngineCore,
        template: ChatTemplate,
        options: SynthesisOptions,
        folder: Path,
        manifest: Manifest,
        recorder: FeatureRecorder | None,
        max_live: int,
    ) -> None:
        self._core = core
        self._template = template
        self._options = options
        self._folder = folder
        self._manifest = manifest
        self._recorder = recorder
        self._max_live = max_live
        self._live: dict[str, _Text] = {}
        self._finished: list[Example] = []
        self._dropped: list[int] = []

    def run(self, prompts: Sequence[Prompt]) -> None:
        """Answer all prompts, or as many as the limits allow."""
        try:
            self._run(prompts)
        finally:
            self._core.abort(list(self._live))
            self.flush()

    def _run(self, prompts: Sequence[Prompt]) -> None:
        options, queue = self._options, iter(prompts)
        deadline = math.inf
        if options.max_seconds is not None:
            deadline = time.monotonic() + options.max_seconds
        with tqdm(
            total=options.max_tokens, unit="tok", desc="kept", mininterval=2, disable=None
        ) as bar:
            while time.monotonic() < deadline:
                kept = self._kept_tokens()
                bar.update(kept - bar.n)
                if options.max_tokens is not None and kept >= options.max_tokens:
                    return
                while len(self._live) < self._max_live and (prompt := next(queue, None)):
                    self._start(prompt)
                if not self._live:
                    return
                report = self._core.step()
                report.check()
                for output in report.outputs:
                    self._advance(output)
                if sum(map(len, self._finished)) >= options.shard_tokens:
                    self.flush()

    def flush(self) -> None:
        """Write all finished texts; a killed run loses only what was not flushed."""
        manifest = self._manifest
        if self._finished:
            name = f"shard-{len(manifest.shards):05d}.safetensors"
            write_shard(self._folder / name, self._finished)
            manifest.shards.append(name)
            manifest.add("texts", len(self._finished))
            manifest.add("tokens", sum(map(len, self._finished)))
            manifest.add("trained_tokens", sum(int(e.mask.sum()) for e in self._finished))
        manifest.dropped += self._dropped
        self._finished, self._dropped = [], []
        manifest.write(self._folder)

    def _kept_tokens(self) -> int:
        flushed = self._manifest.counts.get("trained_tokens", 0)
        return flushed + sum(int(example.mask.sum()) for example in self._finished)

    def _start(self, prompt: Prompt) -> None:
        if prompt.conversation is None:
            prefix = self._template.user_prefix
            self._submit(f"{prompt.index}-turn", _Text(prompt, prefix, True, len(prefix)))
            return
        ids = self._template.render(prompt.conversation)
        self._submit(str(prompt.index), _Text(prompt, ids, False, len(ids)))

    def _submit(self, request_id: str, text: _Text) -> None:
        options = self._options
        seed, _ = draw_seed(options.seed, request_id)
        if text.writes_turn:
            params = SamplingParams(
                temperature=options.turn_temperature,
                min_p=options.turn_min_p,
                max_tokens=options.max_turn_tokens,
            )
        else:
            params = SamplingParams(
                temperature=draw_temperature(options.seed, text.prompt.index, options.temperatures),
                top_p=options.top_p,
                max_tokens=options.max_new_tokens,
            )
        room = self._core.limits.max_model_len - len(text.prompt_ids)
        if room < options.max_new_tokens:
            raise DataError(
                f"prompt {text.prompt.index} has {len(text.prompt_ids)} tokens: with "
                f"{options.max_new_tokens} new ones it exceeds the context of "
                f"{self._core.limits.max_model_len}; shorten it or lower --max-new-tokens"
            )
        self._core.add_request(
            EngineRequest(id=request_id, prompt_token_ids=text.prompt_ids, params=params, seed=seed)
        )
        self._live[request_id] = text

    def _advance(self, output: SequenceOutput) -> None:
        text = self._live[output.id]
        text.output_ids += output.token_ids
        self._manifest.add("generated_tokens", len(output.token_ids))
        looping = not text.writes_turn and text.loops.feed(output.token_ids)
        if output.finish_reason is None and not looping:
            return
        if output.finish_reason is None:
            self._core.abort([output.id])
            self._manifest.add("stopped_loops")
        del self._live[output.id]
        if text.writes_turn:
            self._answer_turn(output.id, text)
        else:
            self._finish(output.id, text)

    def _answer_turn(self, request_id: str, text: _Text) -> None:
        """The user turn is complete: generate its answer."""
        if self._recorder is not None:
            self._recorder.forget(request_id)
        content = self._template.decode(text.output_ids)
        if len(text.output_ids) < _MIN_TURN_TOKENS or not content:
            self._drop(text, "dropped_short_turns")
            return
        ids = self._template.render([{"role": "user", "content": content}])
        # The turn was generated by the target, so it is trained as well.
        trained_from = _common_prefix(ids, text.prompt_ids)
        if len(ids) > self._core.limits.max_model_len - self._options.max_new_tokens:
            self._drop(text, "dropped_long_turns")
            return
        self._submit(str(text.prompt.index), _Text(text.prompt, ids, False, max(trained_from, 1)))

    def _finish(self, request_id: str, text: _Text) -> None:
        features = None
        ids = text.prompt_ids + text.output_ids
        if self._recorder is not None:
            features = self._recorder.take(request_id, len(ids) - 1)
        if len(text.output_ids) < _MIN_ANSWER_TOKENS:
            self._drop(text, "dropped_short")
            return
        share = repeated_bigram_share(text.output_ids)
        self._manifest.add("repeated_bigrams_percent_sum", round(100 * share))
        self._manifest.add("answers")
        if share > self._options.max_repetition:
            self._drop(text, "dropped_repetitive")
            return
        mask = torch.zeros(len(ids), dtype=torch.bool)
        mask[text.trained_from :] = True
        tokens = torch.tensor(ids, dtype=torch.int32)
        start = len(text.prompt_ids)
        self._finished.append(
            Example(text.prompt.index, tokens, mask, features, answer_start=start)
        )

    def _drop(self, text: _Text, reason: str) -> None:
        self._manifest.add(reason)
        self._dropped.append(text.prompt.index)


def _common_prefix(ids: Sequence[int], prefix: Sequence[int]) -> int:
    """Length of the common prefix of `ids` and `prefix`."""
    count = 0
    while count < min(len(ids), len(prefix)) and ids[count] == prefix[count]:
        count += 1
    return count


def open_folder(folder: Path, settings: dict[str, Any], aux: list[int] | None) -> Manifest:
    """The manifest of a new folder, or of a run to resume.

    Raises:
        DataError: when the folder was created with other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        manifest = Manifest(settings, aux)
        manifest.write(folder)
        return manifest
    manifest = Manifest.read(folder)
    changed = sorted(
        key
        for key in {*settings, *manifest.settings}
        if settings.get(key) != manifest.settings.get(key)
    )
    if changed or manifest.aux_layer_ids != aux:
        raise DataError(
            f"{folder} was begun with other settings ({', '.join(changed) or 'aux layer ids'}); "
            f"give the same ones to resume, or another folder"
        )
    return manifest
