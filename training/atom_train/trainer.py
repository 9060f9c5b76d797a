"""The training loop: batches, losses, optimiser steps, log, checkpoints."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from atom_train.checkpoint import (
    Progress,
    TrainingCheckpoint,
    optimizer_tensors,
    restore_optimizer,
    save_checkpoint,
)
from atom_train.data.batches import BatchBuilder, batches_from, plan_epoch
from atom_train.data.dataset import Example
from atom_train.data.held_out import HeldOut
from atom_train.data.target_probs import TargetProbabilities
from atom_train.networks.layers import TrainedDraft, TrainingBatch
from atom_train.networks.loss import DraftLoss
from atom_train.options import TrainOptions

LOG = "log.jsonl"
# Settings that do not affect the result; a resumed run may change them.
_FREE_SETTINGS = frozenset({"log_every", "save_every"})


@dataclass(frozen=True)
class StepResult:
    """The result of one batch of an optimiser step.

    Attributes:
        gradients: in the order of the trained weights.
        losses, hits, counts: sums over the rows of each draft step.
    """

    gradients: tuple[torch.Tensor, ...]
    losses: list[float]
    hits: list[int]
    counts: list[int]


class Window:
    """Sums since the last line of the log."""

    def __init__(self, depth: int) -> None:
        self.losses, self.hits, self.counts = [0.0] * depth, [0] * depth, [0] * depth

    def add(self, result: StepResult) -> None:
        for j in range(len(self.counts)):
            self.losses[j] += result.losses[j]
            self.hits[j] += result.hits[j]
            self.counts[j] += result.counts[j]

    def means(self) -> dict[str, list[float]]:
        counts = [max(count, 1) for count in self.counts]
        return {
            "loss": [round(x / n, 5) for x, n in zip(self.losses, counts, strict=True)],
            "hits": [round(x / n, 4) for x, n in zip(self.hits, counts, strict=True)],
        }


class Trainer:
    """Trains a draft.

    Args:
        target: the distributions to learn, over the draft's vocabulary.
        folder: for the log and the checkpoints.
        workers: batches of a step that are computed concurrently, each in a thread.
        data_settings: further settings that a resumed run must share.
    """

    def __init__(
        self,
        draft: TrainedDraft,
        draft_config: dict[str, Any],
        target: TargetProbabilities,
        builder: BatchBuilder,
        options: TrainOptions,
        folder: Path,
        device: torch.device,
        workers: int = 1,
        on_log: Callable[[dict[str, Any]], None] = lambda line: None,
        data_settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._draft = draft
        self._draft_config = draft_config
        self._target = target
        self._builder = builder
        self._options = options
        self._folder = folder
        self._device = device
        self._workers = workers
        self._on_log = on_log
        self._settings = {**asdict(options), **(data_settings or {})}
        self._loss = DraftLoss(len(target.vocabulary), options.num_negatives, options.l1_weight)
        self._trained = [
            (name, weight)
            for name, weight in draft.named_parameters()
            if options.lr_head > 0 or not name.startswith("lm_head")
        ]
        rates = {"fc.weight": options.lr_fc, "lm_head.weight": options.lr_head}
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [weight], "peak": rates.get(name, options.lr)}
                for name, weight in self._trained
            ],
            lr=0.0,
            betas=(0.9, 0.99),
            weight_decay=0.0,
            fused=True,
        )
        self._progress = Progress()

    def restore(self, checkpoint: TrainingCheckpoint) -> None:
        """Continue from a checkpoint of the same run.

        Raises:
            ValueError: when the settings differ.
        """
        mine = {k: v for k, v in self._settings.items() if k not in _FREE_SETTINGS}
        changed = sorted(k for k, v in mine.items() if checkpoint.settings.get(k) != v)
        if changed:
            raise ValueError(
                f"the checkpoint was trained with other values of {', '.join(changed)}; give the "
                f"same ones to resume, or another --output"
            )
        self._draft.load_state_dict(checkpoint.weights(), strict=False)
        restore_optimizer(self._optimizer, self._draft, checkpoint)
        self._progress = checkpoint.progress
        _truncate_log(self._folder / LOG, checkpoint.progress.step)

    def run(self, examples: Sequence[Example], held_out: Sequence[Example]) -> TrainingCheckpoint:
        """Train to the end; the last checkpoint is saved and returned."""
        options = self._options
        batches_per_epoch = len(plan_epoch(examples, options.rows_per_batch, options.seed, 0))
        total = max(1, round(options.epochs * batches_per_epoch / options.accumulate))
        progress = self._progress
        batches = batches_from(
            examples, options.rows_per_batch, options.seed, progress.epoch, progress.place
        )
        measure = HeldOut(
            held_out, self._builder.build, self._unroll, self._draft.output_head, self._target
        )
        window, started, start_rows = Window(options.depth), time.monotonic(), progress.rows
        with ThreadPoolExecutor(self._workers) as pool:
            while self._progress.step < total:
                rate = self._set_rate(total)
                results = self._step(pool, batches)
                for result in results:
                    window.add(result)
                step = self._progress.step
                if step % options.log_every and step < total:
                    continue
                seconds = time.monotonic() - started
                speed = (self._progress.rows - start_rows) / seconds
                line: dict[str, Any] = {
                    "step": step,
                    "of": total,
                    "rows": self._progress.rows,
                    "rate": rate,
                }
                line |= {**window.means(), "rows_per_second": round(speed, 1)}
                window = Window(options.depth)
                if step % options.save_every == 0 or step == total:
                    line["held_out"] = measure.measure()
                    checkpoint = self._checkpoint()
                    save_checkpoint(self._folder, checkpoint)
                self._log(line)
        return self._checkpoint()

    def _set_rate(self, total: int) -> float:
        """Set the learning rates for this step; returns their share of the peak: warm-up, then
        decay to 0.
        """
        done = self._progress.step / total
        rate = min(1.0, (self._progress.step + 1) / max(1.0, self._options.warmup * total))
        rate *= 1 - done
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["peak"]
        return round(rate, 5)

    def _step(
        self, pool: ThreadPoolExecutor, batches: Iterator[tuple[int, int, list[Example]]]
    ) -> list[StepResult]:
        chosen = list(itertools.islice(batches, self._options.accumulate))
        progress, n = self._progress, len(chosen)
        results = list(
            pool.map(
                lambda item: self._compute(item[1][2], progress.step * n + item[0]),
                enumerate(chosen),
            )
        )
        rows = sum(result.counts[0] for result in results)
        # Summed in the order of the batches, so that the result is deterministic.
        gradients = [
            torch.stack(parts).sum(0) if n > 1 else parts[0]
            for parts in zip(*(result.gradients for result in results), strict=True)
        ]
        for (_, weight), gradient in zip(self._trained, gradients, strict=True):
            weight.grad = gradient.div_(max(rows, 1))
        weights = [weight for _, weight in self._trained]
        norm = torch.nn.utils.clip_grad_norm_(weights, self._options.clip)
        if not math.isfinite(float(norm)):
            raise ValueError(f"the gradients of step {progress.step} are not finite; lower --lr")
        self._optimizer.step()
        epoch, place, _ = chosen[-1]
        self._progress = Progress(progress.step + 1, epoch, place + 1, progress.rows + rows)
        return results

    def _compute(self, examples: Sequence[Example], number: int) -> StepResult:
        options = self._options
        batch = self._builder.build(examples)
        generator = torch.Generator().manual_seed(options.seed * 1_000_003 + number)
        candidates = self._loss.candidates(batch.target_ids, batch.target_probs, generator)
        outcomes = self._unroll(batch)
        with self._autocast():
            losses, hits = self._losses(batch, outcomes, candidates)
        total = torch.stack([options.step_decay**j * loss for j, loss in enumerate(losses)]).sum()
        gradients = torch.autograd.grad(total, [weight for _, weight in self._trained])
        counts = batch.valid.sum(1).tolist()
        return StepResult(gradients, [float(x.detach()) for x in losses], hits, counts)

    def _losses(
        self,
        batch: TrainingBatch,
        outcomes: Sequence[torch.Tensor],
        candidates: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[list[torch.Tensor], list[int]]:
        losses, hits = [], []
        head = self._draft.output_head()
        for j, hidden in enumerate(outcomes):
            rows, valid = batch.targets[j], batch.valid[j]
            rows = rows[valid]
            loss, hit = self._loss(
                hidden[valid] / batch.temperatures[valid][:, None],
                head,
                batch.target_ids[rows],
                batch.target_probs[rows],
                candidates,
            )
            losses.append(loss)
            hits.append(int(hit.sum()))
        return losses, hits

    def _unroll(self, batch: TrainingBatch) -> list[torch.Tensor]:
        with self._autocast():
            return self._draft.unroll(batch, self._options.depth)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._options.dtype == "float32":
            return nullcontext()
        return torch.autocast(self._device.type, torch.bfloat16)

    def _checkpoint(self) -> TrainingCheckpoint:
        tensors = {f"weight.{n}": t.data for n, t in self._draft.named_parameters()}
        if self._draft.whitening is not None:
            tensors["whitening"] = self._draft.whitening
        tensors |= optimizer_tensors(self._optimizer, self._draft)
        return TrainingCheckpoint(
            self._draft_config,
            self._settings,
            self._progress,
            self._target.vocabulary,
            tensors,
        )

    def _log(self, line: dict[str, Any]) -> None:
        with (self._folder / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._on_log(line)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log, without an incomplete last one."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def _truncate_log(path: Path, step: int) -> None:
    """Remove lines that a killed run logged after its last checkpoint."""
    kept = [line for line in read_log(path) if line["step"] <= step]
    path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
