"""Multi-token prediction layers against a dense reading of them, and in the engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from model_ops.batches import Part, attention_metadata
from models import checkpoints
from models.families import write_family
from models.harness import load_model, split
from quantised.packing import Packed, quantised
from quantised.test_gptq import pack
from spec_decode import engines
from spec_decode.engines import create_engine, generate, params
from spec_decode.mtp_reference import (
    GroupedMTP,
    ReferenceMTP,
    SharedChoiceMTP,
    SparseMTP,
    add_mtp_layers,
    remove_tensors,
)
from transformers import PreTrainedTokenizerFast

from atom import SamplingParams
from atom.config import ConfigError, ModelOptions
from atom.kv_cache.builders import attention_layers, bind_kv_caches
from atom.kv_cache.paged import PagedCache
from atom.model_loader.drafts.mtp import load_mtp
from atom.model_loader.errors import WeightError
from atom.model_loader.source import resolve_model
from atom.model_ops.attention.metadata import (
    DRAFT_CHOICE,
    AttentionMetadata,
    ModelInput,
    SamplingMetadata,
)
from atom.model_ops.kernels.torch.sampling import choose_tokens
from atom.model_ops.layer_context import LayerContext
from atom.models.layers.mtp import PredictionLayers
from atom.platform import cpu_platform

CPU = torch.device("cpu")
TEXT = "language_model."


def write(folder: Path, count: int, own: tuple[str, ...] = (), **overrides: object) -> Path:
    checkpoints.deepseek_v3(folder, num_nextn_predict_layers=count, **overrides)
    add_mtp_layers(folder, own=own)
    return folder


def load(folder: Path) -> PredictionLayers:
    options = ModelOptions(model=str(folder))
    context = LayerContext.create(torch.float32, 128, cpu_platform())
    return load_mtp(load_model(folder, 128), resolve_model(options), context, options)


class MTPBench:
    """Prediction layers with their cache; every sequence has 8 blocks, far apart."""

    def __init__(self, mtp: PredictionLayers, block_size: int = 4) -> None:
        self.mtp = mtp
        self.block_size = block_size
        cache = PagedCache(attention_layers(mtp), block_size, torch.float32, CPU)
        cache.allocate_kv_cache_tensors(32)
        bind_kv_caches(mtp, [cache])
        self._names: list[str] = []
        self._choice: AttentionMetadata | None = None

    @torch.inference_mode()
    def forward(
        self, step: int, name: str, start: int, tokens: list[int], hidden: torch.Tensor
    ) -> torch.Tensor:
        """Drafts behind the first one have its choice of tokens, if it left one."""
        if name not in self._names:
            self._names.append(name)
        number = self._names.index(name)
        blocks = [(7 * i + 3 + number) % 32 for i in range(0, 32, 4)]
        part = Part(len(tokens), start, blocks)
        metadata = attention_metadata([part], self.block_size, CPU)
        if step and self._choice is not None:
            metadata.leave(DRAFT_CHOICE, self._choice)
        positions = torch.arange(start, start + len(tokens))
        states = self.mtp(step, ModelInput(torch.tensor(tokens), positions, metadata), hidden)
        if not step and (choice := metadata.draft_choice) is not None:
            self._choice = choice.of_queries(torch.tensor([len(tokens) - 1]))
        return states

    def propose(
        self, name: str, sizes: list[int], tokens: list[int], hidden: torch.Tensor, k: int
    ) -> tuple[list[int], torch.Tensor]:
        """Rows in chunks of the given sizes, then k - 1 single steps."""
        start = 0
        for chunk in split(tokens, sizes):
            end = start + len(chunk)
            state = self.forward(0, name, start, chunk, hidden[start:end])[-1:]
            start = end
        drafts, states = [], [state]
        for step in range(k):
            drafts.append(int(self.mtp.compute_logits(step, states[-1]).argmax()))
            if step < k - 1:
                at = len(tokens) + step
                states.append(self.forward(step + 1, name, at, drafts[-1:], states[-1]))
        return drafts, torch.cat(states)


@pytest.fixture
def rows() -> Callable[[int], tuple[list[int], torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)

    def rows(count: int) -> tuple[list[int], torch.Tensor]:
        return checkpoints.prompt(count), torch.randn(count, 48, generator=generator)

    return rows


@pytest.mark.parametrize("own", [(), ("embed_tokens", "shared_head.head")], ids=["shared", "own"])
@pytest.mark.parametrize("count", [1, 2])
def test_network_equals_reference(count: int, own: tuple[str, ...], tmp_path: Path, rows) -> None:
    write(tmp_path, count, own)
    bench, reference = MTPBench(load(tmp_path)), ReferenceMTP(tmp_path)
    has = {"embed_tokens", "shared_head.head"} & {
        name.removesuffix(".weight").split(".", 3)[3] for name, _ in bench.mtp.named_parameters()
    }
    assert has == set(own)
    tokens, hidden = rows(11)
    for layer in range(count):
        got = bench.forward(layer, f"prefill {layer}", 0, tokens, hidden)
        torch.testing.assert_close(
            got, reference.forward(layer, tokens, hidden), atol=1e-4, rtol=1e-4
        )
    expected = reference.propose(tokens, hidden, 4)
    for name, sizes in {"whole": [11], "chunked": [4, 3, 1], "single": [1]}.items():
        drafts, states = bench.propose(name, sizes, tokens, hidden, 4)
        assert drafts == expected[0]
        torch.testing.assert_close(states, expected[1], atol=1e-4, rtol=1e-4)


INT4 = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 16,
    "sym": True,
    "dynamic": {r"-:.*self_attn": {}},
}


@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "quantised"])
def test_layers_stored_otherwise_than_the_config_says(is_plain: bool, tmp_path: Path, rows) -> None:
    folder = write(tmp_path / "plain", 1)

    def pack_mlps(module: str, out: int, columns: int) -> Packed | None:
        is_kept = ".mlp." not in module or module.endswith(".gate")
        return None if is_kept or (is_plain and "layers.3." in module) else pack(out, columns, INT4)

    stored, dense = quantised(folder, INT4, pack_mlps)
    tokens, hidden = rows(7)
    (drafts, states), (expected, numbers) = (
        MTPBench(load(path)).propose("seq", [7], tokens, hidden, 3) for path in (stored, dense)
    )
    assert drafts == expected
    torch.testing.assert_close(states, numbers, atol=1e-4, rtol=1e-4)


def test_kimi_names(tmp_path: Path, rows) -> None:
    checkpoints.kimi_k25(tmp_path, num_nextn_predict_layers=1)
    add_mtp_layers(tmp_path, TEXT)
    tokens, hidden = rows(7)
    expected = ReferenceMTP(tmp_path, TEXT).propose(tokens, hidden, 3)
    drafts, states = MTPBench(load(tmp_path)).propose("seq", [7], tokens, hidden, 3)
    assert drafts == expected[0]
    torch.testing.assert_close(states, expected[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "dense"), [("glm4_moe", GroupedMTP), ("glm4_moe_lite", ReferenceMTP)]
)
def test_glm(name: str, dense: type[ReferenceMTP], tmp_path: Path, rows) -> None:
    write_family(name, tmp_path, num_nextn_predict_layers=1)
    add_mtp_layers(tmp_path)
    tokens, hidden = rows(7)
    expected = dense(tmp_path).propose(tokens, hidden, 3)
    drafts, states = MTPBench(load(tmp_path)).propose("seq", [5, 1], tokens, hidden, 3)
    assert drafts == expected[0]
    torch.testing.assert_close(states, expected[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_layers_with_an_indexer_choose_themselves(name: str, tmp_path: Path, rows) -> None:
    write_family(name, tmp_path)
    add_mtp_layers(tmp_path)
    tokens, hidden = rows(25)
    expected = SparseMTP(tmp_path).propose(tokens, hidden, 3)
    drafts, states = MTPBench(load(tmp_path)).propose("seq", [15, 4, 1], tokens, hidden, 3)
    assert drafts == expected[0]
    torch.testing.assert_close(states, expected[1], atol=1e-4, rtol=1e-4)
    dense, _ = ReferenceMTP(tmp_path).propose(tokens, hidden, 3)
    assert drafts != dense


def test_drafts_attend_to_what_the_first_one_chose(tmp_path: Path, rows) -> None:
    write_family("glm_moe_dsa", tmp_path, index_share_for_mtp_iteration=True)
    add_mtp_layers(tmp_path)
    tokens, hidden = rows(25)
    expected = SharedChoiceMTP(tmp_path).propose(tokens, hidden, 4)
    drafts, states = MTPBench(load(tmp_path)).propose("seq", [15, 4, 1], tokens, hidden, 4)
    assert drafts == expected[0]
    torch.testing.assert_close(states, expected[1], atol=1e-4, rtol=1e-4)
    _, others = SparseMTP(tmp_path).propose(tokens, hidden, 4)
    assert (states[1:] - others[1:]).abs().max() > 0.01


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_writing_the_cache_alone_writes_the_keys_of_an_indexer(
    name: str, tmp_path: Path, rows
) -> None:
    write_family(name, tmp_path)
    add_mtp_layers(tmp_path)
    tokens, hidden = rows(25)
    mtp = load(tmp_path)
    whole = MTPBench(mtp).forward(0, "seq", 0, tokens, hidden)
    bench = MTPBench(mtp)
    blocks = [(7 * i + 3) % 32 for i in range(0, 32, 4)]
    metadata = attention_metadata([Part(20, 0, blocks)], 4, CPU)
    with torch.inference_mode():
        rows = ModelInput(torch.tensor(tokens[:20]), torch.arange(20), metadata)
        mtp.write_kv(rows, hidden[:20])
    found = bench.forward(0, "seq", 20, tokens[20:], hidden[20:])
    torch.testing.assert_close(found, whole[20:])


def test_absent_embedding_and_head_are_the_targets(tmp_path: Path) -> None:
    write(tmp_path, 1)
    remove_tensors(tmp_path, "3.embed_tokens.weight", "shared_head.head.weight")
    names = [name for name, _ in load(tmp_path).named_parameters()]
    assert not [name for name in names if "embed_tokens" in name or "head.head" in name]


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    write(tmp_path, 2)
    remove_tensors(tmp_path, "4.eh_proj.weight", "3.mlp.experts.5.up_proj.weight")
    with pytest.raises(WeightError, match=r"layers\.3\.mlp.*5\.up_proj.*layers\.4\.eh_proj"):
        load(tmp_path)


def test_a_model_without_prediction_layers_is_refused(tmp_path: Path) -> None:
    checkpoints.deepseek_v3(tmp_path / "none", num_nextn_predict_layers=0)
    with pytest.raises(ConfigError, match="num_nextn_predict_layers=0"):
        load(tmp_path / "none")
    checkpoints.deepseek_v3(tmp_path / "saved without", num_nextn_predict_layers=1)
    with pytest.raises(ConfigError, match=r"num_nextn_predict_layers=1.*model\.layers\.3"):
        load(tmp_path / "saved without")
    checkpoints.llama(tmp_path / "llama")
    with pytest.raises(ConfigError, match="LlamaForCausalLM"):
        load(tmp_path / "llama")


PROMPTS = [checkpoints.prompt(n, seed=n) for n in (1, 4, 9, 16, 23)] + [checkpoints.prompt(5) * 4]
NEW_TOKENS = 12
SAMPLING = [
    params("greedy", max_tokens=NEW_TOKENS),
    params("warm", max_tokens=NEW_TOKENS, temperature=0.8),
]


def race(sampling: SamplingParams, logits: torch.Tensor, position: int) -> int:
    """The token that wins where the target samples."""
    place = SamplingMetadata(
        temperature=torch.tensor([sampling.temperature]),
        seeds=torch.tensor([sampling.seed or 0]),
        positions=torch.tensor([position]),
    )
    return int(choose_tokens(logits, place))


@pytest.mark.parametrize(("count", "k"), [(1, 1), (1, 4), (2, 3)])
def test_speculation_in_the_engine(
    count: int,
    k: int,
    tmp_path: Path,
    byte_level_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tokens are those without it, and the drafts those of the dense reading."""
    byte_level_tokenizer.save_pretrained(tmp_path)
    vocab_size = len(byte_level_tokenizer)
    target = checkpoints.deepseek_v3(
        tmp_path, vocab_size=vocab_size, num_nextn_predict_layers=count
    )
    add_mtp_layers(tmp_path)
    plain = create_engine(tmp_path)
    with engines.drafts_recorded(monkeypatch) as recorders:
        # Steps too small for all prompts at once.
        fast = create_engine(
            tmp_path, method="mtp", num_speculative_tokens=k, max_num_batched_tokens=24
        )
    reference = ReferenceMTP(tmp_path)
    drafts = recorders[0]
    for sampling in SAMPLING:
        drafts.clear()
        assert generate(fast, sampling, PROMPTS) == generate(plain, sampling, PROMPTS)
        for history in list(drafts)[::8]:
            (prompt,) = (p for p in PROMPTS if list(history[: len(p)]) == p)
            # The scheduler keeps no blocks for drafts past the last token, and verifies none.
            room = max(len(prompt) + NEW_TOKENS - len(history) - 1, 0)
            hidden = target.hidden_states(list(history))[-1][:-1]
            expected, _ = reference.propose(list(history[1:]), hidden, k, partial(race, sampling))
            assert drafts[history][:room] == expected[:room]
    assert fast.engine.core.stats.spec_decode.num_drafts > 0
