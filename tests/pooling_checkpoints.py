"""Tiny random checkpoints that embed or score, written by transformers, and how they are read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from atom.model_engine.arg_utils import engine_config
from atom.pooling.engine import PoolingEngine
from atom.pooling.source import pooling_source

WORDS = (
    *("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"),
    *("while", "seven", "wizards", "brew", "warm", "beer"),
)
TEXTS = (
    "the quick brown fox",
    "a dog",
    "seven wizards brew warm beer while a lazy dog jumps over the brown fox " * 3,
    "beer",
    "over over over the fox",
)
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    # Wide enough that inputs differ by far more than rounding.
    "initializer_range": 0.3,
}
# Of encoders; those of RoBERTa count positions from behind the padding's.
_WORDS = {"vocab_size": 19, "max_position_embeddings": 102, "pad_token_id": 0}
_DECODER = {
    "vocab_size": 270,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}
_MODERN = {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
# By name: the class that is saved, its config's, fields, and the mode of pooling.
FAMILIES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "bert": ("BertModel", "BertConfig", _WORDS, "mean_tokens"),
    "bert-masked": ("BertForMaskedLM", "BertConfig", _WORDS, "mean_tokens"),
    "roberta": ("RobertaModel", "RobertaConfig", _WORDS, "cls_token"),
    "xlm-roberta": ("XLMRobertaModel", "XLMRobertaConfig", _WORDS, "mean_tokens"),
    "mpnet": ("MPNetModel", "MPNetConfig", _WORDS, "mean_tokens"),
    "modernbert": (
        "ModernBertModel",
        "ModernBertConfig",
        {**_WORDS, **_MODERN, "local_attention": 8, "global_attn_every_n_layers": 2},
        "cls_token",
    ),
    "qwen3": ("Qwen3Model", "Qwen3Config", {**_DECODER, "head_dim": 16}, "lasttoken"),
    "qwen3-causal": ("Qwen3ForCausalLM", "Qwen3Config", {**_DECODER, "head_dim": 16}, "lasttoken"),
    "gemma3": (
        "Gemma3TextModel",
        "Gemma3TextConfig",
        {
            **_DECODER,
            "head_dim": 16,
            "sliding_window": 16,
            "use_bidirectional_attention": True,
            "query_pre_attn_scalar": 16,
        },
        "mean_tokens",
    ),
    "llama": ("LlamaModel", "LlamaConfig", _DECODER, "weightedmean_tokens"),
}
MEAN = {"pooling_mode_mean_tokens": True}
# Of a text, one of a pair, and both.
_SPECIAL = ("<pad>", "[CLS]", "[SEP]", "[UNK]")


def word_tokenizer(with_types: bool) -> PreTrainedTokenizerFast:
    """A word is a token; texts and pairs are framed as BERT's are."""
    vocabulary = {token: number for number, token in enumerate((*_SPECIAL, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    # As published files have it; it has no say here.
    tokenizer.enable_truncation(max_length=8)
    tokenizer.enable_padding(length=8)
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        model_input_names=names if with_types else names[::2],
        model_max_length=100,
    )


def qwen_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, with yes and no and Qwen3's markers as tokens, and an end token behind each text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=270,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["yes no " * 50], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>",
        pair="$A $B <|endoftext|>",
        special_tokens=[("<|endoftext|>", 0)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def write_modules(
    folder: Path,
    pooling: Mapping[str, Any],
    others: Sequence[str] = ("Normalize",),
    prefix: str = "sentence_transformers.models.",
) -> None:
    """A modules.json of Transformer, Pooling and others."""
    kinds = ["Transformer", "Pooling", *others]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"{prefix}{kind}"}
        for i, kind in enumerate(kinds)
    ]
    write_json(folder / "modules.json", modules)
    write_json(folder / "1_Pooling" / "config.json", pooling)


def write_model(
    folder: Path, kind: type[PreTrainedModel], config: PretrainedConfig, tokenizer: Any
) -> Path:
    """Save a random model, whose norms and biases are random, too."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(config).float().eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                low = 0.5 if name.endswith("weight") else -0.5
                torch.nn.init.uniform_(parameter, low, low + 1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def reference_hidden(folder: Path, factory: Any, text: str) -> torch.Tensor:
    """transformers' hidden states [T, hidden] of one text alone."""
    model = factory.from_pretrained(folder, dtype=torch.float32).eval()
    encoded = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    with torch.inference_mode():
        hidden: torch.Tensor = model(**encoded).last_hidden_state[0]
    return hidden


def create_engine(folder: Path, **options: Any) -> PoolingEngine:
    config = engine_config(model=str(folder), device="cpu", num_threads=1, **options)
    source = pooling_source(config)
    assert source is not None
    return PoolingEngine(config, source)
