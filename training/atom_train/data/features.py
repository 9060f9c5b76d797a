"""The target's hidden states that a draft reads, stored by synthesis or computed."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Protocol

import torch
from safetensors import safe_open

from atom.config import EngineConfig
from atom.messages import EngineRequest
from atom.model_engine.engine_core import EngineCore
from atom.model_engine.worker import Worker
from atom.sampling_params import SamplingParams
from atom_train.data.dataset import Dataset, Example
from atom_train.data.prompts import DataError
from atom_train.data.recorder import FeatureRecorder


class FeatureSource(Protocol):
    """Provides the features of texts.

    Attributes:
        aux_layer_ids: boundary ids of the aux states.
    """

    aux_layer_ids: tuple[int, ...]

    def features(self, examples: Sequence[Example]) -> list[torch.Tensor]:
        """For each text [n - 1, (A + 1) * hidden]: aux states, then the final one."""
        ...


class StoredFeatures:
    """Features written by `synthesize --keep-features`, read from the shards one text at a time."""

    def __init__(self, dataset: Dataset) -> None:
        assert dataset.aux_layer_ids is not None
        self.aux_layer_ids = dataset.aux_layer_ids
        self._dataset = dataset

    def features(self, examples: Sequence[Example]) -> list[torch.Tensor]:
        found = []
        for example in examples:
            place = self._dataset.places[example.index]
            with safe_open(place.shard, framework="pt") as file:
                found.append(file.get_slice("features")[place.first : place.last])
        return found


class TargetFeatures:
    """Computes features by running the target in this process, with the engine's classes."""

    def __init__(self, config: EngineConfig, aux_layer_ids: tuple[int, ...]) -> None:
        self.aux_layer_ids = aux_layer_ids
        self._recorder = FeatureRecorder(aux_layer_ids)
        # All training workers share one engine.
        self._lock = threading.Lock()
        # Tokens from the prefix cache are not computed and give no features.
        cache = dataclasses.replace(config.cache, enable_prefix_caching=False)
        config = dataclasses.replace(config, cache=cache, speculative=None)
        self._core = EngineCore(config, Worker(config, proposer_factory=lambda *_: self._recorder))

    def features(self, examples: Sequence[Example]) -> list[torch.Tensor]:
        with self._lock:
            return self._compute(examples)

    def _compute(self, examples: Sequence[Example]) -> list[torch.Tensor]:
        params = SamplingParams(max_tokens=1, temperature=0.0)
        limit = self._core.limits.max_model_len
        for number, example in enumerate(examples):
            if len(example) > limit:
                raise DataError(
                    f"text {example.index} has {len(example)} tokens, the target's context is "
                    f"{limit}"
                )
            ids = example.token_ids[:-1].tolist()
            self._core.add_request(
                EngineRequest(id=str(number), prompt_token_ids=ids, params=params, seed=0)
            )
        while self._core.has_work:
            self._core.step().check()
        return [self._recorder.take(str(i), len(e) - 1) for i, e in enumerate(examples)]
