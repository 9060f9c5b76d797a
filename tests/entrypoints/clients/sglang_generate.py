"""Usage: sglang_generate.py URL. The client of SGLang's serving benchmark, native API."""

import argparse
import asyncio
import importlib.util
import sys
import types
from unittest.mock import MagicMock

# The benchmark alone: the engine's modules need GPU libraries, and this client does not need them.
package = types.ModuleType("sglang")
package.__path__ = list(importlib.util.find_spec("sglang").submodule_search_locations)
sys.modules["sglang"] = package
for name in (
    "benchmark.datasets",
    "benchmark.datasets.mooncake",
    "srt",
    "srt.disaggregation",
    "srt.disaggregation.utils",
    "srt.utils",
    "srt.utils.network",
):
    sys.modules[f"sglang.{name}"] = MagicMock()

from sglang.benchmark import serving  # noqa: E402

serving.set_global_args(
    argparse.Namespace(
        backend="sglang",
        cache_report=False,
        disable_ignore_eos=False,
        disable_stream=False,
        header=None,
        logprob_start_len=-1,
        return_logprob=False,
        return_routed_experts=False,
        temperature=0.0,
        token_ids_logprob=None,
        top_logprobs_num=0,
        top_p=1.0,
    )
)


def ask(prompt: str | list[int]) -> serving.RequestFuncInput:
    return serving.RequestFuncInput(
        prompt=prompt,
        api_url=f"{sys.argv[1]}/generate",
        prompt_len=3,
        output_len=8,
        model="model",
        lora_name="",
        image_data=None,
        extra_request_body={},
    )


for prompt in ("Name a colour.", [50, 26, 21]):
    output = asyncio.run(serving.async_request_sglang_generate(ask(prompt)))
    assert output.success, output.error
    assert output.output_len == 8
    assert output.generated_text
