"""llama.cpp's greedy answers to texts, in a process whose Python has llama-cpp-python.

Reads one line, `{"model": PATH, "texts": [...], "max_tokens": n, "num_top": k, "num_tokens": n,
"wide_cache": bool}`, and writes a line for each text: `{"prompt": [token, ...], "tokens": [token,
...], "top": [[[token, logit], ...], ...]}` with the k largest logits before each token of the
answer. Answers go on past end tokens; with `max_tokens` 0 nothing but the vocabulary is read. Texts
get the BOS token that the file asks for, and special tokens are read in them. `num_tokens` is the
longest prompt with its answer; the KV cache is float16, or float32 if it is wide.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


class Model:
    """Attributes:
    size: tokens of the vocabulary.
    """

    def __init__(self, path: str, vocab_only: bool) -> None:
        import llama_cpp as ll

        self._ll = ll
        # The library keeps only its address.
        self._quiet = ll.llama_log_callback(lambda *_: None)
        ll.llama_log_set(self._quiet, None)
        ll.llama_backend_init()
        params = ll.llama_model_default_params()
        # Weights are multiplied as the file has them, whatever the processor.
        params.use_extra_bufts = False
        params.vocab_only = vocab_only
        self._model = ll.llama_model_load_from_file(path.encode(), params)
        if self._model is None:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._vocabulary = ll.llama_model_get_vocab(self._model)
        self.size = ll.llama_vocab_n_tokens(self._vocabulary)

    def open(self, num_tokens: int, wide_cache: bool) -> None:
        """Make room for answers."""
        ll = self._ll
        of = ll.llama_context_default_params()
        of.n_ctx = of.n_batch = num_tokens
        if wide_cache:
            of.type_k = of.type_v = ll.GGML_TYPE_F32
        of.n_threads = of.n_threads_batch = len(os.sched_getaffinity(0))
        self._context = ll.llama_init_from_model(self._model, of)
        self._batch = ll.llama_batch_init(num_tokens, 0, 1)

    def tokenize(self, text: str) -> list[int]:
        raw = text.encode()
        room = (self._ll.llama_token * (len(raw) + 2))()
        count = self._ll.llama_tokenize(
            self._vocabulary, raw, len(raw), room, len(room), True, True
        )
        return list(room[:count])

    def forget(self) -> None:
        self._ll.llama_memory_clear(self._ll.llama_get_memory(self._context), True)

    def logits(self, tokens: list[int], start: int) -> Any:
        """The last token's, after tokens whose first has the position `start`."""
        import numpy as np

        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, start + i
            batch.logits[i] = i == len(tokens) - 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        if self._ll.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        row = self._ll.llama_get_logits_ith(self._context, len(tokens) - 1)
        return np.ctypeslib.as_array(row, shape=(self.size,))

    def answer(self, text: str, max_tokens: int, num_top: int) -> dict[str, Any]:
        prompt = self.tokenize(text)
        if not max_tokens:
            return {"prompt": prompt}
        self.forget()
        tokens: list[int] = []
        tops = []
        while len(tokens) < max_tokens:
            new = tokens[-1:] or prompt
            logits = self.logits(new, len(prompt) + len(tokens) - len(new) if tokens else 0)
            best = logits.argpartition(-num_top)[-num_top:]
            top = sorted(((int(i), float(logits[i])) for i in best), key=lambda pair: -pair[1])
            tops.append(top)
            tokens.append(top[0][0])
        return {"prompt": prompt, "tokens": tokens, "top": tops}


def main() -> None:
    # The library prints to the standard output, which is kept for answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    request = json.loads(sys.stdin.readline())
    model = Model(request["model"], vocab_only=not request["max_tokens"])
    if request["max_tokens"]:
        model.open(request["num_tokens"], request["wide_cache"])
    for text in request["texts"]:
        answer = model.answer(text, request["max_tokens"], request["num_top"])
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
