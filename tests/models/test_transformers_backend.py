"""Families by transformers' modelling code: logits and tokens equal to transformers' own."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import transformers
from models import checkpoints
from models.checkpoints import Checkpoint, edit_config, prompt
from models.harness import ModelBench, load_model, split
from models.transformers_families import FAMILIES, OFTEN, write_family
from ranks import run_ranks
from spec_decode import engines
from spec_decode.engines import create_engine, generate
from transformers import ArceeConfig, ArceeForCausalLM, PreTrainedTokenizerFast

from atom import SamplingParams
from atom.config import ConfigError, ModelOptions
from atom.kv_cache.base import KVCachePlan
from atom.model_engine.start_up import kv_memory
from atom.model_loader.source import resolve_model
from atom.models.registry import choose_implementation
from atom.models.transformers.attention import PlainAttention
from atom.models.transformers.check import check_model
from atom.models.transformers.model import TransformersForCausalLM

TOLERANCE = 1e-4
LENGTH = 30
NEW_TOKENS = 10
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
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
    found: dict[str, list[torch.Tensor]] = {key: [] for key in pieces}
    while any(pieces.values()):
        batch = {key: left.pop(0) for key, left in pieces.items() if left}
        for key, logits in bench.step(batch).items():
            found[key].append(logits)
    assert_close(torch.cat(found["chunked"]), expected)
    for key, ids in others.items():
        assert_close(torch.cat(found[key]), checkpoint.logits(ids))


@pytest.mark.parametrize("name", families(ENGINES))
def test_greedy_tokens(
    name: str,
    tmp_path: Path,
    byte_level_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a batch, after a prefix hit, preempted, and with an Eagle3 draft."""
    size = len(byte_level_tokenizer)
    checkpoint = write_family(name, tmp_path / "target", vocab_size=size)
    byte_level_tokenizer.save_pretrained(checkpoint.folder)
    shared = prompt(20)
    prompts = [[*shared, *prompt(n, seed=n)] for n in (1, 6, 15)]
    expected = [greedy(checkpoint, token_ids) for token_ids in prompts]
    with monkeypatch.context() as patch:
        patch.setattr(kv_memory, "plan_kv_cache", lambda *_: KVCachePlan(16, 0))
        engine = create_engine(checkpoint.folder, max_model_len=60)
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


@pytest.mark.parametrize("name", ["arcee", "olmo3", "opt"])
def test_two_ranks(name: str, tmp_path: Path) -> None:
    """Halves of layers, layers whose rows are gathered, and layers without a plan."""
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


def test_hidden_states_between_layers(tmp_path: Path) -> None:
    checkpoint = write_family("arcee", tmp_path)
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


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("arcee", 3),
        # Norms of queries and keys; neighbours that are rotated; biases, and no plain names.
        *[("olmo3", 0), ("helium", 0), ("gpt_neox", 0)],
    ],
)
def test_attention_that_only_rotates_is_ours(name: str, count: int, tmp_path: Path) -> None:
    write_family(name, tmp_path)
    model = load_model(tmp_path, 32)
    assert sum(isinstance(module, PlainAttention) for module in model.modules()) == count


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
        ("bloom", "_supports_attention_backend"),
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
        ("xmod", "a small copy cannot be tried"),
    ],
)
def test_what_would_differ_is_refused_by_name(model_type: str, message: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    fields = {"head_dim": 128, "num_key_value_heads": 8} if model_type == "nemotron" else {}
    config = CONFIG_MAPPING[model_type](**fields)
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    with pytest.raises(ConfigError, match=message) as caught:
        check_model(getattr(transformers, name), config)
    assert name in str(caught.value)


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
    assert any("run op by op: transformers' modelling code calls" in m for m in lines)
