"""A checkpoint that says given texts, and an Eagle3 draft that knows them too.

The weights are constructed. A token's embedding is a random direction; the target's first layer
has one kind of attention head, which looks at the token before; so the last hidden state holds
the last two tokens, and the output head names the token that follows them. The draft's one layer
turns the hidden state of two tokens and one more token into that of the last two: it is always
right, so that every step yields k + 1 tokens. Pairs of tokens are unique across all texts.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|im_end|>"
THINK = "<think>"
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if thinking %}<think>{% endif %}"
)

SIZE = 256
HEADS = 2
HALF = 127  # dimensions of one token's direction; dimension 0 is constant
ROPE_THETA = 10.0
SHARPNESS = 8.0


class ScriptWriter:
    """Splits texts into tokens of which no pair comes twice.

    Args:
        markers: texts that are special tokens.
    """

    def __init__(self, markers: Sequence[str], seed: int = 0) -> None:
        self.markers = list(dict.fromkeys([*markers, THINK, "</think>"]))
        self.keys: list[str] = []
        self.fills: list[str] = []
        self.pieces: dict[str, None] = {}
        self.scripts: list[list[str]] = []
        self._pairs: set[tuple[str, str]] = set()
        self._random = random.Random(seed)

    def add(
        self, text: str, *, thinks: bool = False, size: int | None = None, first: int = 0
    ) -> str:
        """Make the model answer a text; returns the message that asks for it.

        Args:
            size: of the tokens between markers, in bytes; any when left out.
            first: size of the first of them, if it is another.
        """
        key = f"<|script_{len(self.keys)}|>"
        self.keys.append(key)
        tokens = [byte_chars(b"q"), key, *([THINK] if thinks else [])]
        self._pairs.update(pairwise(tokens))
        pattern = "(" + "|".join(map(re.escape, self.markers)) + ")"
        for part in filter(None, re.split(pattern, text)):
            if part in self.markers:
                pieces = iter([part])
            elif size is None:
                pieces = self._split(part.encode())
            else:
                pieces = self._cut(part.encode(), size, first or size)
            for piece in pieces:
                self._append(tokens, piece)
        self._append(tokens, END)
        self.scripts.append(tokens)
        return "q" + key

    def _append(self, tokens: list[str], token: str) -> None:
        if (tokens[-1], token) in self._pairs:
            self.fills.append(f"<|fill_{len(self.fills)}|>")
            tokens.append(self.fills[-1])
            self._pairs.add((tokens[-2], tokens[-1]))
        self._pairs.add((tokens[-1], token))
        tokens.append(token)

    def _split(self, data: bytes) -> Iterator[str]:
        """Pieces that are new, cut anywhere, also within characters; else single bytes."""
        text = byte_chars(data)
        while text:
            sizes = self._random.sample(range(4, 17), 13)
            new = (text[:size] for size in sizes if text[:size] not in self.pieces)
            piece = next(new, text[0])
            if len(piece) > 1:
                self.pieces[piece] = None
            yield piece
            text = text[len(piece) :]

    def _cut(self, data: bytes, size: int, first: int) -> Iterator[str]:
        text = byte_chars(data)
        for start in (0, *range(first, len(text), size)):
            piece = text[start : start + size] if start else text[:first]
            if len(piece) > 1:
                self.pieces[piece] = None
            yield piece


def byte_chars(data: bytes) -> str:
    """Bytes as ByteLevel tokens spell them."""
    table = _byte_table()
    return "".join(table[byte] for byte in data)


def _byte_table() -> list[str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def write_tokenizer(writer: ScriptWriter, folder: Path) -> PreTrainedTokenizerFast:
    vocabulary = {piece: i for i, piece in enumerate([*_byte_table(), *writer.pieces])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = [END, *writer.keys, *writer.fills, *writer.markers]
    inner.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, pad_token=END)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def write_models(writer: ScriptWriter, folder: Path) -> tuple[Path, Path]:
    """Folders of the target and its draft."""
    target, draft = folder / "target", folder / "draft"
    tokenizer = write_tokenizer(writer, target)
    _write_target(script_ids(writer, tokenizer), len(tokenizer), tokenizer.eos_token_id, target)
    write_draft(draft, draft_config(len(tokenizer)), draft_tensors())
    return target, draft


def script_ids(writer: ScriptWriter, tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    return [tokenizer.convert_tokens_to_ids(tokens) for tokens in writer.scripts]


def draw_directions(vocab_size: int) -> torch.Tensor:
    """[vocab, HALF] of each token."""
    directions = torch.randn(vocab_size, HALF, generator=torch.Generator().manual_seed(0))
    return directions / directions.norm(dim=1, keepdim=True)


def _write_target(scripts: list[list[int]], vocab_size: int, eos: int, folder: Path) -> None:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=SIZE,
        intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=eos,
    )
    directions = draw_directions(vocab_size)
    model = LlamaForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        embedding = model.model.embed_tokens.weight
        embedding[:, 0] = 1
        embedding[:, 1 : HALF + 1] = directions
        attention = model.model.layers[0].self_attn
        norm = math.sqrt(SIZE / 2)  # what the layer's norm multiplies an embedding by
        attention.q_proj.weight[:, 0] = looking_back(1).repeat(HEADS) / norm
        attention.k_proj.weight[:, 0] = looking_back(0).repeat(HEADS) / norm
        attention.v_proj.weight.copy_(shift() / norm)
        attention.o_proj.weight.copy_(torch.eye(SIZE))
        teach(model.lm_head.weight, directions, scripts)
    model.save_pretrained(folder)


def teach(head: torch.Tensor, directions: torch.Tensor, scripts: list[list[int]]) -> None:
    """Make the head name what follows each pair of tokens, far ahead of all others."""
    triples = [t for s in scripts for t in zip(s, s[1:], s[2:], strict=False)]
    before, last, following = torch.tensor(triples).unbind(1)
    pairs = torch.zeros(len(triples), SIZE)
    pairs[:, 1 : HALF + 1] = directions[last]
    pairs[:, HALF + 1 : 2 * HALF + 1] = directions[before]
    head.index_add_(0, following, 20 * pairs)
    for _ in range(50):  # tokens that follow many pairs are too loud elsewhere
        logits = pairs @ head.T
        right = logits.gather(1, following[:, None]).squeeze(1)
        loudest, wrong = logits.scatter(1, following[:, None], -math.inf).max(dim=1)
        bad = right - loudest < 10
        if not bad.any():
            return
        head.index_add_(0, following[bad], 5 * pairs[bad])
        head.index_add_(0, wrong[bad], -5 * pairs[bad])
    raise AssertionError(f"{int(bad.sum())} pairs cannot be told apart")


def draft_config(vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": SIZE,
        "intermediate_size": 16,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "rms_norm_eps": 1e-6,
        "rope_theta": ROPE_THETA,
        "vocab_size": vocab_size,
        "draft_vocab_size": vocab_size,
        "max_position_embeddings": 4096,
        "norm_before_residual": True,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
            "use_aux_hidden_state": True,
        },
    }


def draft_tensors() -> dict[str, torch.Tensor]:
    """Of a draft whose attention's projections have the width of heads."""
    embedded, hidden = math.sqrt(SIZE / 2), math.sqrt(SIZE / 3)  # what the norms multiply by
    identity, zero = torch.eye(SIZE), torch.zeros(SIZE, SIZE)
    only_constant = torch.zeros(SIZE, 2 * SIZE)
    only_constant[:, 0] = looking_back(0).repeat(HEADS) / embedded
    kept = identity.clone()
    kept[HALF + 1 :] = 0
    tensors = {
        "fc": torch.cat((zero, identity, zero), dim=1),
        "norm": torch.ones(SIZE),
        "midlayer.input_layernorm": torch.ones(SIZE),
        "midlayer.hidden_norm": torch.ones(SIZE),
        "midlayer.post_attention_layernorm": torch.ones(SIZE),
        "midlayer.self_attn.q_proj": only_constant,
        "midlayer.self_attn.k_proj": only_constant.clone(),
        # The residual is taken away; the last token comes in, the one before moves on.
        "midlayer.self_attn.v_proj": torch.cat(
            (kept / embedded, shift() / hidden - identity), dim=1
        ),
        "midlayer.self_attn.o_proj": identity,
        "midlayer.mlp.gate_proj": torch.zeros(16, SIZE),
        "midlayer.mlp.up_proj": torch.zeros(16, SIZE),
        "midlayer.mlp.down_proj": torch.zeros(SIZE, 16),
    }
    return {f"{name}.weight": tensor for name, tensor in tensors.items()}


def write_draft(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )


def shift() -> torch.Tensor:
    """Moves the last token's direction to the place of the one before."""
    matrix = torch.zeros(SIZE, SIZE)
    for i in range(1, HALF + 1):
        matrix[HALF + i, i] = 1
    return matrix


def looking_back(distance: int, dim: int = SIZE // HEADS) -> torch.Tensor:
    """[dim] of a head's queries for keys of distance 0 that match best so many positions before."""
    angles = distance * ROPE_THETA ** (-torch.arange(0, dim, 2) / dim)
    return SHARPNESS * torch.cat((torch.cos(angles), -torch.sin(angles)))
