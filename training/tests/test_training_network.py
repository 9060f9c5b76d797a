"""The network that is trained computes what the network that is served computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import checkpoints
from spec_decode import draft_bench
from spec_decode.draft_bench import DraftBench

from atom.config import ModelOptions
from atom.model_loader.source import resolve_model
from atom.model_loader.weights import load_weights
from atom.model_ops.layer_context import LayerContext
from atom.models.eagle3.config import Eagle3Config
from atom.models.registry import create_model
from atom.platform import cpu_platform
from atom_train.checkpoint import Progress, TrainingCheckpoint
from atom_train.data.batches import BatchBuilder
from atom_train.data.dataset import Example
from atom_train.data.target_probs import TargetProbabilities
from atom_train.export import export_draft
from atom_train.networks.network import TrainingDraft

DEPTH = 4
HIDDEN, VOCAB = draft_bench.HIDDEN, draft_bench.VOCAB


class RandomFeatures:
    aux_layer_ids = (2, 4, 5)

    def __init__(self) -> None:
        self.made: dict[int, torch.Tensor] = {}

    def features(self, examples: list[Example]) -> list[torch.Tensor]:
        for example in examples:
            generator = torch.Generator().manual_seed(example.index)
            shape = (len(example) - 1, 4 * HIDDEN)
            self.made[example.index] = torch.randn(shape, generator=generator)
        return [self.made[example.index] for example in examples]


def example(index: int, length: int, prompt: int) -> Example:
    ids = torch.tensor(checkpoints.prompt(length, seed=index), dtype=torch.int32)
    return Example(index, ids, torch.arange(length) >= prompt)


@pytest.mark.parametrize("kind", ["mha", "gqa", "mla"])
@torch.no_grad()
def test_training_equals_serving(kind: str, tmp_path: Path) -> None:
    """Every step of every row, from an exported checkpoint in the serving classes."""
    raw: dict[str, Any] = dict(draft_bench.MLA if kind == "mla" else draft_bench.MHA)
    if kind == "gqa":
        raw["num_key_value_heads"] = 2
    checkpoints.llama(
        tmp_path / "target", hidden_size=HIDDEN, vocab_size=VOCAB, num_hidden_layers=8
    )
    source = resolve_model(ModelOptions(str(tmp_path / "target")))
    context = LayerContext.create(torch.float32, 128, cpu_platform())
    target = create_model(source.hf_config, context)
    load_weights(target, target.weight_mapping, source, ModelOptions())

    generator = torch.Generator().manual_seed(7)
    whitening = torch.randn(3 * HIDDEN, 3 * HIDDEN, generator=generator) / 8
    embedding = target.token_embedding.weight.data
    draft = TrainingDraft(Eagle3Config.from_dict(raw), embedding, whitening, 64)
    for weight in draft.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight.copy_(noise * 0.2 if weight.dim() > 1 else 1 + 0.3 * noise)
    vocabulary = torch.randperm(VOCAB, generator=generator)[: raw["draft_vocab_size"]].sort().values
    weights = {f"weight.{n}": w.data for n, w in draft.named_parameters()}
    checkpoint = TrainingCheckpoint(
        raw, {}, Progress(), vocabulary, {**weights, "whitening": whitening}
    )
    export_draft(checkpoint, tmp_path / "draft", torch.float32)
    served = draft_bench.load(tmp_path / "draft", target, source)

    features = RandomFeatures()
    head = torch.randn(len(vocabulary), HIDDEN, generator=generator)
    known = TargetProbabilities(head, torch.arange(len(vocabulary)))
    builder = BatchBuilder(features, known, DEPTH, 5, torch.device("cpu"))
    examples = [example(0, 17, 5), example(1, 9, 3), example(2, 12, 1)]
    batch = builder.build(examples)
    trained = draft.unroll(batch, DEPTH)
    logits = torch.stack([draft.lm_head(hidden) for hidden in trained])

    compared = 0
    for text in examples:
        rows = (batch.texts[batch.active] == text.index).nonzero()[:, 0].tolist()
        ids = text.token_ids.tolist()
        for row in rows:
            start = int(batch.positions[batch.active[row]])
            bench = DraftBench(served)
            aux = features.made[text.index][: start + 1, : 3 * HIDDEN]
            hidden = served.fuse(tuple(aux.split(HIDDEN, dim=1)))
            at, fed = 0, ids[1 : start + 2]
            for j in range(DEPTH):
                if not batch.valid[j, row]:
                    break
                post, fed_back = bench.forward({"s": (at, fed, hidden)})["s"]
                torch.testing.assert_close(
                    logits[j, row], served.compute_logits(post[-1:])[0], atol=2e-4, rtol=2e-4
                )
                compared += 1
                assert int(batch.answer_ids[j, row]) == ids[start + 2 + j]
                at, hidden = at + len(fed), fed_back[-1:]
                fed = [ids[start + 2 + j]]
    assert compared == int(batch.valid.sum()) > 60
    torch.testing.assert_close(served.to_target_ids(torch.arange(len(vocabulary))), vocabulary)


def test_targets_are_the_distribution_after_the_row() -> None:
    features = RandomFeatures()
    head = torch.randn(20, HIDDEN)
    target = TargetProbabilities(head, torch.arange(20))
    builder = BatchBuilder(features, target, 3, 20, torch.device("cpu"))
    text = example(3, 10, 4)
    batch = builder.build([text])
    assert batch.active.tolist() == [3, 4, 5, 6, 7]
    final = features.made[3][:, -HIDDEN:]
    for j in range(3):
        for q, row in enumerate(batch.active.tolist()):
            assert bool(batch.valid[j, q]) == (row + 2 + j < len(text))
            if batch.valid[j, q]:
                place = batch.targets[j, q]
                probs = torch.zeros(20).scatter(
                    0, batch.target_ids[place], batch.target_probs[place]
                )
                expected = (head @ final[row + 1 + j]).softmax(0)
                torch.testing.assert_close(probs, expected, atol=2e-3, rtol=0)
