"""The native CPU kernels beside torch's: whole forward passes of a small Llama.

Both models hold the same random weights and run in turn, so that a busy machine slows both.
Each case is one step of so many tokens for so many sequences, from the embedding to the
logits of every token that would be sampled.

python benchmarks/cpu_kernels.py
python benchmarks/cpu_kernels.py --dtype float32 --threads 1 --cases decode-1 verify-4
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from _report import environment, environment_markdown, markdown_table, write_json
from transformers import LlamaConfig

from atom.kv_cache.builders import attention_layers
from atom.model_ops.attention_mha import Attention
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.metadata import AttentionMetadata, KVCacheTensor, ModelInput
from atom.model_ops.ops import OPS
from atom.model_ops.registry import OpTable
from atom.models.base import CausalLM
from atom.models.registry import create_model

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Case:
    """One step of `sequences` with `queries` tokens each, the last at position `context - 1`."""

    sequences: int
    queries: int
    context: int


CASES = {
    "decode-1": Case(1, 1, 300),
    "verify-2": Case(1, 2, 300),
    "verify-4": Case(1, 4, 300),
    "verify-8": Case(1, 8, 300),
    "verify-16": Case(1, 16, 300),
    "decode-8": Case(8, 1, 300),
    "verify-4-of-8": Case(8, 4, 300),
    "decode-1-at-4096": Case(1, 1, 4096),
    "decode-8-at-4096": Case(8, 1, 4096),
    "prefill-128": Case(1, 128, 128),
    "prefill-512": Case(1, 512, 512),
    "prefill-2048": Case(1, 2048, 2048),
}


def smollm2(layers: int) -> LlamaConfig:
    """The shapes of SmolLM2-135M."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )


def build(config: LlamaConfig, dtype: torch.dtype, kernels: str) -> CausalLM:
    """A model whose ops run `kernels`; those that have no such implementation run torch."""
    context = LayerContext.create(dtype, config.max_position_embeddings)
    if kernels != "native":
        chosen = {
            op: tuple(i for i in implementations if i.name == kernels)
            for op, implementations in OPS.items()
        }
        context = replace(context, ops=OpTable(context.ops.platform, chosen))
    model = create_model(config, context)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return model


def bind_cache(model: CausalLM, num_blocks: int, dtype: torch.dtype) -> None:
    for layer in attention_layers(model).values():
        assert isinstance(layer, Attention)
        shape = (num_blocks, BLOCK_SIZE, layer.num_kv_heads, layer.head_dim)
        layer.bind_kv_cache(
            KVCacheTensor(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype))
        )


def model_input(case: Case, num_blocks: int) -> ModelInput:
    """Sequences over shuffled blocks."""
    per_sequence = -(-case.context // BLOCK_SIZE)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1))
    tables = order[: case.sequences * per_sequence].view(case.sequences, per_sequence).int()
    positions = torch.arange(case.context - case.queries, case.context)
    slots = tables[:, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    lens = [case.queries] * case.sequences
    attention = AttentionMetadata(
        slot_mapping=slots.flatten(),
        block_tables=tables,
        block_counts=torch.full((case.sequences,), per_sequence, dtype=torch.int32),
        context_lens=torch.full((case.sequences,), case.context, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, *accumulate(lens)], dtype=torch.int32),
        max_seqlen_q=case.queries,
        max_context_len=case.context,
        query_lens_cpu=tuple(lens),
        context_lens_cpu=(case.context,) * case.sequences,
    )
    rows = torch.arange(case.sequences * case.queries)
    return ModelInput(rows % 1000, positions.repeat(case.sequences), attention)


def step(model: CausalLM, given: ModelInput) -> torch.Tensor:
    """A prompt needs the logits of its last token, a verification those of all."""
    hidden = model(given).hidden_states
    queries = given.attention.max_seqlen_q
    return model.compute_logits(hidden if queries <= 16 else hidden[queries - 1 :: queries])


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(models: dict[str, CausalLM], case: Case, blocks: int, rounds: int) -> dict[str, float]:
    """Milliseconds by kernels, and `ratio`, the median of torch's time over ours by round."""
    given = model_input(case, blocks)
    times: dict[str, list[float]] = {name: [] for name in models}
    for model in models.values():
        step(model, given)
    for _ in range(rounds):
        for name, model in models.items():
            times[name].append(seconds(partial(step, model, given)) * 1e3)
    result = {name: statistics.median(values) for name, values in times.items()}
    if len(models) == 2:
        ratios = [t / n for t, n in zip(times["torch"], times["native"], strict=True)]
        result["ratio"] = statistics.median(ratios)
    return result


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--kernels", nargs="+", default=["native", "torch"])
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path, help="also write the report here")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    cases = {name: CASES[name] for name in args.cases}
    blocks = max(c.sequences * -(-c.context // BLOCK_SIZE) for c in cases.values())
    models = {name: build(smollm2(args.layers), dtype, name) for name in args.kernels}
    for model in models.values():
        bind_cache(model, blocks, dtype)
    results: dict[str, dict[str, float]] = {}
    with torch.inference_mode():
        for name, case in cases.items():
            rounds = args.rounds if case.queries <= 16 else -(-args.rounds // 4)
            results[name] = measure(models, case, blocks, rounds)
    columns = [*models, "ratio"] if len(models) == 2 else list(models)
    header = ["case", *(c if c == "ratio" else f"{c} ms" for c in columns)]
    rows = [[name, *(f"{found[c]:.2f}" for c in columns)] for name, found in results.items()]
    facts = environment() | {"dtype": args.dtype, "threads": args.threads}
    print(environment_markdown(facts), markdown_table(header, rows), sep="\n\n")
    write_json(args.json, {"environment": facts, "milliseconds": results})


if __name__ == "__main__":
    main()
