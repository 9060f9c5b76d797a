"""Families by transformers' modelling code: logits and tokens equal to transformers' own."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import checkpoints
from models.checkpoints import Checkpoint, edit_config, prompt
from models.harness import ModelBench, load_model, split
from models.transformers_families import EXPERTS, FAMILIES, OFTEN, write_family
from ranks import run_ranks
from spec_decode import engines
from spec_decode.engines import create_engine, generate
from transformers import (
    ArceeConfig,
    ArceeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from atom import SamplingParams
from atom.config import ConfigError, ModelOptions
from atom.kv_cache.base import KVCachePlan
from atom.model_engine.start_up import kv_memory
from atom.model_loader.source import resolve_model
from atom.model_ops.layer_context import LayerContext
from atom.models.registry import choose_implementation
from atom.models.transformers.attention import PlainAttention
from atom.models.transformers.check import check_model
from atom.models.transformers.model import TransformersForCausalLM
from atom.platform import cpu_platform

TOLERANCE = 1e-4
LENGTH = 30
NEW_TOKENS = 10
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
# Of the families, those that our decoder computes.
OURS = ("cwm", "internlm3", "seed_oss")
# The others run every night.
ENGINES = ("olmo3",)


def families(often: tuple[str, ...] | list[str]) -> list[object]:
    """Those of a commit, and those of the night."""
    assert set(often) <= set(FAMILIES)
    return [
        pytest.param(name, marks=() if name in often else pytest.mark.slow) for name in FAMILIES
    ]


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", families(OFTEN))
def test_logits_in_every_split(name: str, tmp_path: Path) -> None:
    checkpoint = write_family(name, tmp_path)
    bench = ModelBench(tmp_path)
    assert isinstance(bench.model, TransformersForCausalLM)
    tokens = prompt(LENGTH)
    expected = checkpoint.logits(tokens)
    assert_close(bench.run(tokens, [LENGTH], "whole"), expected)
    others = {str(seed): prompt(12 + 5 * seed, seed) for seed in (1, 2)}
    pieces = {key: split(ids, [6 * int(key), 3, 5]) for key, ids in others.items()}
    pieces["chunked"] = split(tokens, [11, 7, 1])
    found = bench.run_beside(pieces)
    assert_close(found["chunked"], expected)
    for key, ids in others.items():
        assert_close(found[key], checkpoint.logits(ids))


@pytest.mark.parametrize("name", families(ENGINES))
def test_greedy_tokens(
    name: str,
    tmp_path: Path,
    byte_level_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In a batch, after a prefix hit, preempted, and with an Eagle3 draft; the log says why no
    step is recorded.
    """
    size = len(byte_level_tokenizer)
    checkpoint = write_family(name, tmp_path / "target", vocab_size=size)
    byte_level_tokenizer.save_pretrained(checkpoint.folder)
    shared = prompt(20)
    prompts = [[*shared, *prompt(n, seed=n)] for n in (1, 6, 15)]
    expected = [greedy(checkpoint, token_ids) for token_ids in prompts]
    with monkeypatch.context() as patch, caplog.at_level(logging.INFO, logger="atom"):
        patch.setattr(kv_memory, "plan_kv_cache", lambda *_: KVCachePlan(16, 0))
        engine = create_engine(checkpoint.folder, max_model_len=60)
    reason = engine.engine.core.executor.parts.model.op_by_op
    assert (reason is None) == (name in OURS)
    assert reason is None or f"run op by op: {reason}" in caplog.text
    assert generate(engine, GREEDY, prompts) == expected
    assert engine.engine.core.stats.num_preemptions > 0
    again = engine.generate(prompts[1:], GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in again] == expected[1:]
    assert any(output.num_cached_tokens for output in again)
    speculating = create_engine(
        checkpoint.folder,
        method="eagle3",
        draft_model=str(engines.write_draft("mha", tmp_path / "draft", size)),
        num_speculative_tokens=2,
    )
    assert generate(speculating, GREEDY, prompts) == expected


def greedy(checkpoint: Checkpoint, token_ids: list[int]) -> list[int]:
    tokens = list(token_ids)
    for _ in range(NEW_TOKENS):
        tokens.append(int(torch.argmax(checkpoint.logits(tokens)[-1])))
    return tokens[len(token_ids) :]


@pytest.mark.parametrize("name", ["arcee", "cwm", "olmo3", "opt"])
def test_two_ranks(name: str, tmp_path: Path) -> None:
    """Halves of layers, by its own code and by our decoder, layers whose rows are gathered, and
    layers without a plan.
    """
    checkpoint = write_family(name, tmp_path)
    tokens = prompt(LENGTH)
    if name == "opt":
        with pytest.raises(ConfigError, match="no plan to split it over ranks"):
            run_ranks(2, lambda g: ModelBench(tmp_path, group=g))
        return
    found = run_ranks(2, lambda g: ModelBench(tmp_path, group=g).run(tokens, [23, 1]))
    assert_close(found[0], checkpoint.logits(tokens))


def test_quantised_when_loaded(tmp_path: Path) -> None:
    checkpoint = write_family("arcee", tmp_path)
    tokens = prompt(LENGTH)
    bench = ModelBench(tmp_path, quantization="int8")
    found, expected = bench.run(tokens, [LENGTH]), checkpoint.logits(tokens)
    assert 0 < (found - expected).abs().median() < 0.1 * expected.std()


def test_quantised_experts_are_refused(tmp_path: Path) -> None:
    write_family("olmoe", tmp_path)
    with pytest.raises(ConfigError, match=r"OlmoeForCausalLM.*quantised experts"):
        load_model(tmp_path, 32, quantization="int8")


@pytest.mark.parametrize("name", ["arcee", "cwm"])  # by its own code, and by our decoder
def test_hidden_states_between_layers(name: str, tmp_path: Path) -> None:
    checkpoint = write_family(name, tmp_path)
    bench = ModelBench(tmp_path)
    bench.model.set_aux_layer_ids((2, 0, 3))
    tokens = prompt(12)
    bench.run(tokens, [len(tokens)])
    assert bench.output is not None
    found, expected = bench.output.aux_hidden_states, checkpoint.hidden_states(tokens)
    assert_close(found[0], expected[2])
    assert_close(found[1], expected[0])
    normed = checkpoint.reference.model.norm(found[2])
    assert_close(normed, expected[3])


def on_meta(
    config: PretrainedConfig, model_class: type[PreTrainedModel] | None = None
) -> TransformersForCausalLM:
    """A model without memory, which is tried like any other."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
    context = LayerContext.create(torch.float32, 32, cpu_platform())
    context = replace(context, device=torch.device("meta"))
    return TransformersForCausalLM(config, context, model_class or getattr(transformers, name))


@pytest.mark.parametrize(
    ("name", "count", "reason"),
    [
        ("cwm", 3, None),
        ("internlm3", 3, None),
        ("seed_oss", 3, None),
        ("arcee", 3, "layer 0 has 0 of the expected 1 MLPs that gate by silu"),
        # Norms of queries and keys; neighbours that are rotated; biases, and no plain names.
        ("olmo3", 0, "its layers are not all given the same"),
        ("helium", 0, "layer 0 has 0 of the expected 1 attentions that only rotate"),
        ("gpt_neox", 0, "no list of layers between an embedding and an RMS norm"),
        ("hyperclovax", 3, "layer 0 has 4 of the expected 2 RMS norms"),
        ("mellum", 0, "its cosines and sines depend on more than positions"),
        ("olmo", 0, "no list of layers between an embedding and an RMS norm"),  # cuts off queries
    ],
)
def test_what_computes_the_same_is_ours(name: str, count: int, reason: str | None) -> None:
    fields = {**checkpoints.DENSE, **EXPERTS, **FAMILIES[name]}
    model = on_meta(CONFIG_MAPPING[name](**fields))
    assert sum(isinstance(module, PlainAttention) for module in model.modules()) == count
    assert (model.op_by_op is None) == (reason is None)
    assert reason is None or reason in str(model.op_by_op)


class ScaledLayer(LlamaForCausalLM):
    """Multiplies what leaves its second layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.layers[1].register_forward_hook(lambda _, __, out: out * 1.01)


class ScaledInPlace(LlamaForCausalLM):
    """Multiplies what enters its second layer where it lies."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.layers[1].register_forward_pre_hook(lambda _, args: (args[0].mul_(2),))


class ScaledByBuffer(LlamaForCausalLM):
    """Multiplies what leaves its second layer by what only a checkpoint says."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        layer = self.model.layers[1]
        layer.register_buffer("factor", torch.ones(1))
        layer.register_forward_hook(lambda _, __, out: out * layer.factor)


class LearntRotation(LlamaForCausalLM):
    """Rotates by what only a checkpoint says."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.rotary_emb._non_persistent_buffers_set.discard("inv_freq")


class CutOff(LlamaForCausalLM):
    """Cuts off large numbers that leave its second layer, or all below 0."""

    least, most = -65000.0, 65000.0

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        bounds = self.least, self.most
        self.model.layers[1].register_forward_hook(lambda _, __, out: out.clamp(*bounds))


class CutBelow(CutOff):
    least, most = 0.0, float("inf")


class ScaledBeyond(LlamaForCausalLM):
    """Multiplies what leaves its second layer at positions beyond thousands."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.layers[1].register_forward_hook(
            lambda _, __, given, out: out * _beyond(given), with_kwargs=True
        )


class ScaledQueries(LlamaForCausalLM):
    """Multiplies queries of its second layer at positions beyond thousands."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.layers[1].self_attn.register_forward_pre_hook(
            lambda _, __, given: ((), {**given, "position_embeddings": _scaled(given)}),
            with_kwargs=True,
        )


def _scaled(given: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    return tuple(x * _beyond(given) for x in given["position_embeddings"])


def _beyond(given: dict[str, Any]) -> torch.Tensor:
    return 1.0 + (given["position_ids"][..., None] // 4096)


class BoundLayer(LlamaForCausalLM):
    """Reaches the parts of a layer by another way than their names."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        layer = self.model.layers[1]
        layer.forward = layer.forward


class ScaledEmbedding(LlamaForCausalLM):
    """Multiplies what enters the first layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.layers[0].register_forward_pre_hook(lambda _, args: (args[0] * 2, *args[1:]))


class ScaledOutput(LlamaForCausalLM):
    """Multiplies what leaves the last norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.register_forward_hook(
            lambda _, __, out: type(out)(last_hidden_state=out.last_hidden_state * 2)
        )


class TurnsFaster(LlamaForCausalLM):
    """Rotates by twice the positions from the second on."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        rotary = self.model.rotary_emb
        own = rotary.forward
        rotary.forward = lambda x, position_ids: own(x, position_ids * x.shape[-1])


class ScaledLogits(LlamaForCausalLM):
    """Multiplies logits."""

    def forward(self, *args: Any, **others: Any) -> Any:
        out = super().forward(*args, **others)
        out.logits = out.logits * 2
        return out


@pytest.mark.parametrize(
    ("model_class", "reason"),
    [
        (LlamaForCausalLM, None),
        (ScaledLayer, "layer 1 does more than add attention and MLP of norms to its input"),
        (ScaledInPlace, "layer 1 does more"),
        (ScaledByBuffer, "layer 1 has further parts: its own numbers"),
        (LearntRotation, "cosines and sines depend on numbers of the checkpoint"),
        (CutOff, "layer 1 does more"),
        (CutBelow, "layer 1 does more"),
        (ScaledBeyond, "layer 1 does more"),
        (ScaledQueries, "layer 1 has 0 of the expected 1 attentions"),
        (BoundLayer, "layer 1 cannot be tried"),
        (ScaledEmbedding, "layer 0 does more"),
        (ScaledOutput, "it does more than run its layers one after another"),
        (TurnsFaster, "cosines and sines are not those of the given positions"),
        (ScaledLogits, "the head of ScaledLogits is needed"),
    ],
)
def test_a_model_that_does_more_keeps_its_code(
    model_class: type[PreTrainedModel], reason: str | None
) -> None:
    model = on_meta(LlamaConfig(**checkpoints.DENSE), model_class)
    assert (model.op_by_op is None) == (reason is None)
    assert reason is None or reason in str(model.op_by_op)


class Shifting(ArceeForCausalLM):
    """Adds the hidden state of the token before: a state beside keys and values."""

    def __init__(self, config: ArceeConfig) -> None:
        super().__init__(config)
        self.model.layers[1].register_forward_hook(lambda _, __, out: out + out.roll(1, dims=1))


def test_a_state_beside_keys_and_values_shows() -> None:
    config = ArceeConfig(**checkpoints.DENSE)
    check_model(ArceeForCausalLM, config)
    with pytest.raises(ConfigError, match=r"Shifting of transformers.*computes other logits"):
        check_model(Shifting, config)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("bloom", r"attention is code of its own .* \(no _supports_attention_backend"),
        ("diffllama", "layer 0 attends more than once"),
        ("doge", "masks of its own"),
        ("falcon", "_supports_attention_backend"),
        ("lfm3", "layers of type conv"),
        ("llama4_text", "layers of type chunked_attention"),
        ("mamba", "keeps a state"),
        ("minimax", "layers of type linear_attention"),
        ("nemotron", "do not pass arguments on to their attention"),
        ("roberta", "attend to tokens behind"),
        ("stablelm", "_supports_attention_backend"),
        ("xmod", r"computes no text with it \(ValueError: Input language unknown"),
    ],
)
def test_what_would_differ_is_refused_by_name(model_type: str, message: str) -> None:
    fields = {"head_dim": 128, "num_key_value_heads": 8} if model_type == "nemotron" else {}
    config = CONFIG_MAPPING[model_type](**fields)
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    with pytest.raises(ConfigError, match=message) as caught:
        check_model(getattr(transformers, name), config)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        # Of the published configurations, what makes them large.
        (
            "dbrx",
            {
                "d_model": 6144,
                "n_heads": 48,
                "n_layers": 40,
                "vocab_size": 100352,
                "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 5e5},
                "ffn_config": {
                    "hidden_size": 6144,
                    "ffn_hidden_size": 10752,
                    "moe_num_experts": 16,
                    "moe_top_k": 4,
                },
            },
        ),
        pytest.param("longcat_flash", {}, marks=pytest.mark.slow),
    ],
)
def test_large_models_are_tried(model_type: str, fields: dict[str, Any]) -> None:
    """And built, without memory."""
    config = CONFIG_MAPPING[model_type](**fields)
    check_model(getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]), config)
    on_meta(config)


def test_a_rotation_that_follows_the_longest_text_is_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    config = ArceeConfig(**checkpoints.DENSE, rope_parameters=rope)
    with pytest.raises(ConfigError, match=r"rotation \(dynamic\)"):
        check_model(ArceeForCausalLM, config)


def test_who_computes_a_model() -> None:
    native = choose_implementation(["LlamaForCausalLM"], "llama")
    assert (native.kind, native.name) == ("atom", "LlamaForCausalLM")
    wanted = choose_implementation(["LlamaForCausalLM"], "llama", "transformers")
    assert (wanted.kind, wanted.why) == ("transformers", "as --model-impl says")
    foreign = choose_implementation(["InternLM3ForCausalLM"], "internlm3")
    assert (foreign.kind, foreign.name) == ("transformers", "LlamaForCausalLM")
    with pytest.raises(ConfigError, match="ArceeForCausalLM is not supported"):
        choose_implementation(["ArceeForCausalLM"], "arcee", "atom")
    with pytest.raises(ConfigError, match="no such causal language model"):
        choose_implementation(["LlamaForSequenceClassification"], "llama", "transformers")
    with pytest.raises(ConfigError, match=r"ArceeForCausalLM is not supported \(type llama\)"):
        choose_implementation(["ArceeForCausalLM"], "llama")


def test_code_of_a_checkpoint_does_not_run(tmp_path: Path) -> None:
    write_family("arcee", tmp_path)
    ran = tmp_path / "ran"
    (tmp_path / "modeling.py").write_text(f"open({str(ran)!r}, 'w')")
    auto_map = {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}
    edit_config(tmp_path, auto_map=auto_map)
    load_model(tmp_path, 32)  # transformers' own class of that name
    edit_config(tmp_path, model_type="unheard", architectures=["UnheardForCausalLM"])
    with pytest.raises(ConfigError, match="UnheardForCausalLM is not supported"):
        resolve_model(ModelOptions(model=str(tmp_path)))
    assert not ran.exists()


def test_the_same_tokens_as_natively_and_the_log_says_why(
    tmp_path: Path, byte_level_tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = checkpoints.llama(tmp_path, vocab_size=len(byte_level_tokenizer))
    byte_level_tokenizer.save_pretrained(checkpoint.folder)
    prompts = [prompt(9), prompt(21)]
    native = generate(create_engine(tmp_path), GREEDY, prompts)
    with caplog.at_level(logging.INFO, logger="atom"):
        engine = create_engine(tmp_path, model_impl="transformers")
    assert generate(engine, GREEDY, prompts) == native
    lines = [record.message for record in caplog.records]
    assert any("LlamaForCausalLM of transformers' modelling code, as --mod" in m for m in lines)
    assert any("LlamaForCausalLM: tries found that its layers compute" in m for m in lines)
    assert not any("run op by op" in m for m in lines)
