"""Block drafters: what is trained is what a dense reference computes from the exported file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import checkpoints
from safetensors.torch import load_file
from spec_decode.block_reference import BlockReference, Meaning

from atom.config import ModelOptions
from atom.model_loader.drafts.block import load_block_draft
from atom.model_loader.drafts.folder import DraftTarget
from atom.model_loader.source import resolve_model
from atom.model_loader.weights import load_weights
from atom.model_ops.layer_context import LayerContext
from atom.models.registry import create_model
from atom.platform import cpu_platform
from atom_train.checkpoint import Progress, TrainingCheckpoint
from atom_train.data.batches import BatchBuilder
from atom_train.data.dataset import Example
from atom_train.data.target_probs import TargetProbabilities
from atom_train.export import export_draft
from atom_train.kinds import BlockKind
from atom_train.networks.initialise import LinearGuess
from atom_train.target_parts import TargetParts

HIDDEN, VOCAB, KNOWN, BLOCK, MASK, AUX = 32, 64, 24, 3, 7, (1, 2, 3)
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 48,
}


class RandomFeatures:
    aux_layer_ids = AUX

    def features(self, examples: list[Example]) -> list[torch.Tensor]:
        shape = (len(AUX) + 1) * HIDDEN
        return [
            torch.randn(len(e) - 1, shape, generator=torch.Generator().manual_seed(e.index))
            for e in examples
        ]


def example(index: int, length: int, prompt: int) -> Example:
    ids = torch.tensor(checkpoints.prompt(length, seed=index), dtype=torch.int32) % VOCAB
    return Example(index, ids, torch.arange(length) >= prompt)


@pytest.fixture
def kind(tmp_path: Path) -> BlockKind:
    checkpoints.llama(tmp_path / "target", **SIZES)
    source = resolve_model(ModelOptions(str(tmp_path / "target")))
    config = source.hf_config.get_text_config()
    return BlockKind(config, num_layers=2, markov_rank=6, block_size=BLOCK)


@torch.no_grad()
def test_training_equals_the_reference(kind: BlockKind, tmp_path: Path) -> None:
    """Every draft of every anchor, after the text's tokens."""
    source = resolve_model(ModelOptions(str(tmp_path / "target")))
    context = LayerContext.create(torch.float32, 128, cpu_platform())
    target = create_model(source.hf_config, context)
    load_weights(target, target.weight_mapping, source, ModelOptions())
    generator = torch.Generator().manual_seed(7)
    whitening = torch.randn(3 * HIDDEN, 3 * HIDDEN, generator=generator) / 8
    embedding = target.token_embedding.weight.data
    raw = kind.config(KNOWN, AUX, MASK)
    draft = kind.network(raw, embedding, whitening, 64)
    for weight in draft.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight.copy_(noise * 0.2 if weight.dim() > 1 else 1 + 0.3 * noise)
    vocabulary = torch.randperm(VOCAB, generator=generator)[:KNOWN].sort().values
    weights = {f"weight.{n}": w.data for n, w in draft.named_parameters()}
    checkpoint = TrainingCheckpoint(
        raw, {}, Progress(), vocabulary, {**weights, "whitening": whitening}
    )
    export_draft(checkpoint, tmp_path / "draft", torch.float32)
    loaded_for = DraftTarget(target, source, context, ModelOptions())
    served = load_block_draft(str(tmp_path / "draft"), loaded_for, "dspark")
    assert served.aux_layer_ids == AUX
    assert served.config.max_drafts == BLOCK

    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    layer = raw["transformer_layer_config"]
    meaning = Meaning(anchored=True, markov="vanilla")
    reference = BlockReference(layer, meaning, tensors, embedding, embedding, BLOCK, MASK)
    features = RandomFeatures()
    probabilities = TargetProbabilities(torch.randn(VOCAB, HIDDEN), vocabulary)
    builder = BatchBuilder(features, probabilities, BLOCK, 5, torch.device("cpu"))
    examples = [example(0, 11, 4), example(1, 8, 2)]
    batch = builder.build(examples)
    logits = torch.stack([r @ draft.output_head().T for r in draft.unroll(batch, BLOCK)])
    compared = 0
    for column, row in enumerate(batch.active.tolist()):
        text = examples[int(batch.texts[row])]
        at, ids = int(batch.positions[row]), text.token_ids.tolist()
        aux = features.features([text])[0][: at + 1, : 3 * HIDDEN].split(HIDDEN, dim=1)
        states = reference.block(list(aux), ids[at + 1])
        for j in range(BLOCK):
            if batch.valid[j, column]:
                unary = states[j] @ reference.head.T
                expected, _ = reference.path(unary, states[j], ids[at + 1 + j], None)
                torch.testing.assert_close(logits[j, column].double(), expected, atol=2e-4, rtol=0)
                assert int(batch.answer_ids[j, column]) == ids[at + 2 + j]
                compared += 1
    assert compared == int(batch.valid.sum()) > 20


def test_the_first_guess_is_near_the_least_squares(kind: BlockKind) -> None:
    """The first draft follows the newest state and the anchor before anything is learnt."""
    generator = torch.Generator().manual_seed(3)
    maps = [torch.randn(HIDDEN, n, generator=generator) for n in (3 * HIDDEN, HIDDEN)]
    embedding, head = (torch.randn(n, HIDDEN, generator=generator) for n in (VOCAB, VOCAB))
    text = example(5, 200, 3)
    aux = torch.randn(len(text) - 1, 3 * HIDDEN, generator=generator)
    anchors = torch.nn.functional.rms_norm(embedding[text.token_ids.long()], (HIDDEN,))
    # The state after an anchor, from the aux states before it and the anchor.
    final = torch.zeros(len(text) - 1, HIDDEN)
    final[1:] = aux[:-1] @ maps[0].T + 3 * anchors[1:-1] @ maps[1].T
    final /= final.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6
    guess = LinearGuess(3 * HIDDEN, HIDDEN)
    guess.add(aux[:-1], embedding[text.token_ids[1:-1].long()], final[1:])
    full = BlockKind(kind.target, 1, HIDDEN, BLOCK)
    draft = full.network(full.config(VOCAB, AUX, MASK), embedding * 0.01, torch.eye(96), 256)
    parts = TargetParts(embedding, head, torch.ones(HIDDEN), None, AUX)
    full.initialise(draft, guess, parts, head, generator)

    class Known(RandomFeatures):
        def features(self, examples: list[Example]) -> list[torch.Tensor]:
            return [torch.cat((aux, final), dim=1) for _ in examples]

    probabilities = TargetProbabilities(head, torch.arange(VOCAB))
    builder = BatchBuilder(Known(), probabilities, BLOCK, 5, torch.device("cpu"))
    batch = builder.build([Example(0, text.token_ids, text.mask)])
    first = draft.unroll(batch, BLOCK)[0] @ draft.output_head().T
    right = first.argmax(-1) == batch.target_ids[batch.targets[0], 0]
    assert float(right[batch.valid[0]].float().mean()) > 0.3, "chance is 1 in 64"
