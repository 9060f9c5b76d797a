"""What the files of a checkpoint say and is not done is refused by name, before it is computed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pooling_checkpoints as checkpoints
import pytest
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel

from atom import LLM
from atom.config import ConfigError, ModelOptions
from atom.entrypoints.server.pooling_app import refuse_generation_options
from atom.entrypoints.server_options import OptionError, ServerOptions
from atom.model_engine.arg_utils import engine_config
from atom.model_loader.errors import WeightError
from atom.model_loader.source import resolve_model
from atom.pooling.recipe import read_recipe
from atom.pooling.source import pooling_source

SIZES = {"vocab_size": 19, "max_position_embeddings": 102, "pad_token_id": 0}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    config = BertConfig(**checkpoints.SIZES, **SIZES)
    tokenizer = checkpoints.word_tokenizer(with_types=True)
    checkpoints.write_model(folder, BertModel, config, tokenizer)
    checkpoints.write_modules(folder, checkpoints.MEAN)
    return folder


@pytest.fixture
def bert(saved: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    for path in saved.rglob("*"):
        if path.is_file():
            copy = tmp_path / path.relative_to(saved)
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(path.read_bytes())
    return tmp_path


def _dense(folder: Path, **changes: Any) -> None:
    checkpoints.write_modules(folder, checkpoints.MEAN, others=("Dense",))
    settings = {
        "in_features": 48,
        "out_features": 8,
        "bias": True,
        "activation_function": "torch.nn.modules.linear.Identity",
        **changes,
    }
    checkpoints.write_json(folder / "2_Dense" / "config.json", settings)


def _pooling(**settings: Any) -> Callable[[Path], None]:
    return lambda folder: checkpoints.write_modules(folder, settings)


RECIPES: dict[str, tuple[Callable[[Path], None], str]] = {
    "prompts left out": (
        _pooling(**checkpoints.MEAN, include_prompt=False),
        "include_prompt is false",
    ),
    "unknown mode": (_pooling(pooling_mode="attention"), "attention is not done here"),
    "unknown flag": (
        _pooling(pooling_mode_cls_token=True, pooling_mode_sum=True),
        "pooling_mode_sum is not done here",
    ),
    "no mode": (_pooling(word_embedding_dimension=48), "names no pooling_mode"),
    "unknown module": (
        lambda folder: checkpoints.write_modules(folder, checkpoints.MEAN, others=("CNN",)),
        "the module CNN is not done here",
    ),
    "code of its own": (
        lambda folder: checkpoints.write_modules(folder, checkpoints.MEAN, prefix="custom_st."),
        "custom_st.Transformer is code of the checkpoint's own",
    ),
    "activation": (
        lambda folder: _dense(folder, activation_function="torch.nn.modules.activation.GELU"),
        "GELU' is not done here",
    ),
    "another input": (
        lambda folder: _dense(folder, module_input_name="token_embeddings"),
        "module_input_name='token_embeddings' is not done here",
    ),
    "model elsewhere": (
        lambda folder: checkpoints.write_json(
            folder / "modules.json",
            [{"path": "0_Transformer", "type": "sentence_transformers.models.Transformer"}],
        ),
        "should begin with a Transformer in the folder itself",
    ),
    "outside": (
        lambda folder: checkpoints.write_json(
            folder / "modules.json",
            [{"path": "../other", "type": "sentence_transformers.models.Transformer"}],
        ),
        "is not within the checkpoint",
    ),
}


@pytest.mark.parametrize("case", RECIPES)
def test_recipes_that_are_refused(case: str, tmp_path: Path) -> None:
    write, message = RECIPES[case]
    write(tmp_path)
    with pytest.raises(ConfigError, match=message):
        read_recipe(tmp_path)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("sentence_bert_config", {"strip_accents": True}, "strip_accents is not known here"),
        ("sentence_bert_config", {"max_seq_length": 0}, "should be a positive integer, got 0"),
        (
            "sentence_bert_config",
            {
                "transformer_task": "feature-extraction",
                "modality_config": {
                    "text": {"method": "forward", "method_output_name": "pooler_output"}
                },
                "module_output_name": "sentence_embedding",
            },
            "'pooler_output'} of texts as 'sentence_embedding' is not done",
        ),
        ("config_sentence_transformers", {"model_type": "CrossEncoder"}, "CrossEncoder with a Poo"),
        ("config_sentence_transformers", {"truncate_dim": 8}, "truncate_dim is not done here"),
        (
            "config_sentence_transformers",
            {"similarity_fn_name": "euclidean"},
            "cosine and dot are",
        ),
        ("config_sentence_transformers", {"model_type": "SparseEncoder"}, "'SparseEncoder' is not"),
        (
            "config_sentence_transformers",
            {"default_prompt_name": "query"},
            "there is no prompt 'query'",
        ),
        ("config_sentence_transformers", {"prompts": {"query": 3}}, "should be texts by name"),
    ],
)
def test_other_files_of_sentence_transformers(
    bert: Path, name: str, settings: dict[str, Any], message: str
) -> None:
    checkpoints.write_json(bert / f"{name}.json", settings)
    with pytest.raises(ConfigError, match=message):
        checkpoints.create_engine(bert)


def test_kernels_of_a_hub(bert: Path) -> None:
    config = json.loads((bert / "config.json").read_text())
    named = {**config, "attn_implementation": "somebody/kernels"}
    checkpoints.write_json(bert / "config.json", named)
    with pytest.raises(ConfigError, match="attn_implementation='somebody/kernels' is not done"):
        checkpoints.create_engine(bert)


def test_a_linear_layer_of_another_size(bert: Path) -> None:
    _dense(bert, in_features=24)
    save_file({}, bert / "2_Dense" / "model.safetensors")
    with pytest.raises(WeightError, match=r"should hold linear.weight \[8, 24\]"):
        checkpoints.create_engine(bert)


def test_weights_that_are_missing_or_not_finite(bert: Path) -> None:
    path = bert / "model.safetensors"
    tensors = load_file(path)
    name = "encoder.layer.1.output.dense.weight"
    save_file({key: value for key, value in tensors.items() if key != name}, path)
    with pytest.raises(WeightError, match=f"lacks tensors: {name}"):
        checkpoints.create_engine(bert)
    tensors[name][3, 3] = float("nan")
    save_file(tensors, path)
    with pytest.raises(WeightError, match="1 of 3072 values are NaN or infinite"):
        checkpoints.create_engine(bert)
    path.unlink()
    (bert / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"holds no \*.safetensors files"):
        checkpoints.create_engine(bert)


def test_a_longer_context_than_the_model_has(bert: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len=103: the model has 102 positions"):
        checkpoints.create_engine(bert, max_model_len=103)


def test_adapters_and_quantised_weights(bert: Path) -> None:
    checkpoints.write_json(bert / "adapter_config.json", {})
    with pytest.raises(ConfigError, match="is an adapter"):
        checkpoints.create_engine(bert)
    config = json.loads((bert / "config.json").read_text())
    checkpoints.write_json(bert / "config.json", {**config, "quantization_config": {"a": 1}})
    with pytest.raises(ConfigError, match="are not read quantised"):
        checkpoints.create_engine(bert)


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype is"),
        ({"enable_prefix_caching": False, "seed": 1}, "--enable-prefix-caching, --seed are"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size is"),
        ({"method": "suffix", "num_speculative_tokens": 2}, "--method"),
        ({"quantization": "int8"}, "--quantization is"),
        ({"max_logprobs": 5}, "--max-logprobs is"),
    ],
)
def test_options_of_generation(bert: Path, options: dict[str, Any], flags: str) -> None:
    with pytest.raises(ConfigError, match=flags):
        pooling_source(engine_config(model=str(bert), device="cpu", **options))


def test_options_of_chats() -> None:
    refuse_generation_options(ServerOptions(ui=False, given_api_keys=("a",)), "m")
    with pytest.raises(OptionError, match="--tool-call-parser is for models that generate"):
        refuse_generation_options(ServerOptions(tool_call_parser="hermes"), "m")


def test_what_files_leave_open(bert: Path, tiny_llama_dir: Path) -> None:
    """An encoder without modules.json, and a task that the files do not bear out."""
    with pytest.raises(
        ConfigError, match="is a model to embed texts, which the server and LLM run"
    ):
        resolve_model(ModelOptions(model=str(bert)))
    with pytest.raises(ConfigError, match="is an embedding model, whose scores are cosines"):
        checkpoints.create_engine(bert, task="score")
    (bert / "modules.json").unlink()
    assert pooling_source(engine_config(model=str(bert))) is None
    with pytest.raises(ConfigError, match=r"BertModel is not supported.* An encoder embeds texts"):
        resolve_model(ModelOptions(model=str(bert)))
    llama = str(tiny_llama_dir)
    with pytest.raises(ConfigError, match=r"has no modules.json with a Pooling"):
        pooling_source(engine_config(model=llama, task="embed"))
    with pytest.raises(ConfigError, match="is_matryoshka is of embedding models"):
        resolve_model(ModelOptions(model=llama, is_matryoshka=True))
    with pytest.raises(ConfigError, match="the embedded one generates"):
        pooling_source(engine_config(task="embed"))


def test_llm_of_another_kind(bert: Path, tiny_llama_dir: Path) -> None:
    with LLM(str(bert), device="cpu") as llm:
        with pytest.raises(ValueError, match=r"embeds texts, and generates none: call embed"):
            llm.generate("the fox")
        with pytest.raises(ValueError, match=r"prompts\[0\] is empty"):
            llm.embed("")
    generates = LLM(str(tiny_llama_dir), dtype="float32", kv_cache_memory="1MiB", device="cpu")
    with generates as llm, pytest.raises(ValueError, match="generates text, and neither embeds"):
        llm.embed("the fox")
