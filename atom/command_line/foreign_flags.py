"""Flags of other engines, and what each is here: a table that command lines and the docs read.

A flag is not in the table when ours has its name and means the same. Read from ROCm ATOM's
`atom/model_engine/arg_utils.py` and `atom/entrypoints/openai/api_server.py` (ffdf3bb5), SGLang's
`server_args.py` (001067ff), llama.cpp's `tools/server/README.md` (00dc8057), and vLLM's arguments
of `vllm serve` and its recipes (vllm-project/recipes 8959cf64).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

VLLM, SGLANG, ROCM, LLAMA = "vLLM", "SGLang", "ROCm ATOM", "llama.cpp"


class Takes(Enum):
    """How many words that follow a flag belong to it."""

    NOTHING = "nothing"
    ONE = "one"
    AT_MOST_ONE = "at most one"
    SEVERAL = "several"


class Fate(Enum):
    """What becomes of a flag."""

    SAME = "accepted"
    NEEDLESS = "accepted, without effect"
    REFUSED = "refused"


@dataclass(frozen=True)
class ForeignFlag:
    """A flag of other engines.

    Attributes:
        names: its spellings, in kebab case.
        engine: whose it is.
        says: for `SAME` our flag, or `FLAG=VALUE` for a switch; else one phrase: why it is not
            needed, or what is missing and what to do.
        harmless: values that ask for what happens here anyway, and are accepted.
    """

    names: tuple[str, ...]
    engine: str
    fate: Fate
    says: str
    takes: Takes = Takes.ONE
    harmless: tuple[str, ...] = ()


def _same(
    engine: str,
    names: str,
    ours: str,
    takes: Takes = Takes.ONE,
    harmless: tuple[str, ...] = (),
) -> ForeignFlag:
    return ForeignFlag(tuple(names.split()), engine, Fate.SAME, ours, takes, harmless)


def _needless(engine: str, says: str, names: str, takes: Takes = Takes.ONE) -> list[ForeignFlag]:
    return [ForeignFlag((name,), engine, Fate.NEEDLESS, says, takes) for name in names.split()]


def _refused(
    engine: str,
    says: str,
    names: str,
    takes: Takes = Takes.ONE,
    harmless: tuple[str, ...] = (),
) -> list[ForeignFlag]:
    return [
        ForeignFlag((name,), engine, Fate.REFUSED, says, takes, harmless) for name in names.split()
    ]


_NOTHING, _SEVERAL = Takes.NOTHING, Takes.SEVERAL
_IMAGES = (
    "images are read as the checkpoint's processor says (--limit-mm-per-prompt, --mm-cache-memory)"
)
_KERNELS = "kernels are chosen by what the machine has (--show-ops tells), and nothing is compiled"
_GRAPHS = "steps are recorded as graphs by themselves; --cudagraph-capture-sizes has their sizes"
_LOGS = "--log-level says what the log holds, and /metrics has the rest at any time"
_ORDER = "requests wait in the order of their priority and arrival, and long prompts are cut"
_GRAMMARS = "one library enforces schemas and grammars; what it cannot enforce is refused"
_STATES = "--state-slots says how many states of hybrid models are kept for prefix caching"
_LOADING = "--safetensors-load-strategy says how weights are read; the rest needs no choice"
_EXPERTS = "missing here: experts are neither moved nor copied to even out their load"
_OFFLOAD = "missing here: KV caches are kept on the device alone"
_TRANSFER = "missing here: KV caches are neither moved to the host nor sent to other engines"
_SPLIT = "missing here: --tensor-parallel-size and --data-parallel-size share the work of GPUs"
_ADAPTERS = "adapters (LoRA) are missing here: merge them into a checkpoint"
_EMBEDDINGS = (
    "a model's files say whether it generates, embeds or scores; --task does, where they leave it "
    "open"
)
_MACHINES = (
    "one command starts all engines of a machine (--data-parallel-size); --nnodes, --node-rank "
    "and --master-addr spread one engine over machines"
)
_CONFIG = "the checkpoint's config.json is read as it is: change it there"
_SPLIT_LAYERS = (
    "all layers are on the GPU, or all on the CPU with --device cpu: leave it out, or choose"
)

_VLLM = [
    _same(VLLM, "-sc", "--speculative-config"),
    _same(VLLM, "--spec-method", "--method"),
    _same(VLLM, "--spec-model --speculative-model", "--draft-model"),
    _same(VLLM, "--spec-tokens", "--num-speculative-tokens"),
    _same(VLLM, "--allowed-origins", "--cors-allow-origin", _SEVERAL),
    _same(VLLM, "--allowed-media-domains", "--allowed-media-hosts", _SEVERAL),
    _same(VLLM, "--language-model-only", "--limit-mm-per-prompt=image=0", _NOTHING),
    _same(VLLM, "--kv-cache-memory-bytes", "--kv-cache-memory"),
    _same(VLLM, "--async-scheduling", "--overlap", _NOTHING),
    _same(VLLM, "--no-async-scheduling", "--no-overlap", _NOTHING),
    _same(VLLM, "--speculative-draft-tensor-parallel-size", "--draft-tensor-parallel-size"),
    *_needless(
        VLLM,
        _IMAGES,
        "--mm-encoder-tp-mode --mm-processor-cache-type --mm-processor-cache-gb --media-io-kwargs "
        "--mm-processor-kwargs --mm-shm-cache-max-object-size-mb --mm-encoder-attn-backend "
        "--video-pruning-rate",
    ),
    *_needless(
        VLLM,
        _IMAGES,
        "--skip-mm-profiling --interleave-mm-strings --disable-mm-preprocessor-cache "
        "--disable-chunked-mm-input",
        _NOTHING,
    ),
    *_needless(
        VLLM,
        _KERNELS,
        "--compilation-config -cc -O --optimization-level --attention-backend --attention-config "
        "--moe-backend --all2all-backend --kernel-config",
    ),
    *_needless(
        VLLM,
        _KERNELS,
        "--disable-custom-all-reduce --disable-cascade-attn --enable-flashinfer-autotune "
        "--enable-dbo --use-v2-block-manager -O0 -O1 -O2 -O3",
        _NOTHING,
    ),
    *_needless(VLLM, _GRAPHS, "--max-cudagraph-capture-size --max-seq-len-to-capture"),
    *_needless(
        VLLM,
        _LOGS,
        "--disable-log-requests --disable-log-stats --enable-log-outputs "
        "--disable-uvicorn-access-log --enable-server-load-tracking",
        _NOTHING,
    ),
    *_needless(
        VLLM,
        _LOGS,
        "--uvicorn-log-level --max-log-len --disable-access-log-for-endpoints",
    ),
    *_needless(
        VLLM,
        "traces have a span for each request (--otlp-traces-endpoint), and no others",
        "--collect-detailed-traces",
    ),
    *_needless(
        VLLM,
        _ORDER,
        "--scheduling-policy --num-scheduler-steps --max-num-partial-prefills "
        "--max-long-partial-prefills --preemption-mode "
        "--num-lookahead-slots --scheduler-delay-factor --stream-interval",
    ),
    *_needless(VLLM, _GRAMMARS, "--guided-decoding-backend --structured-outputs-config"),
    *_needless(
        VLLM,
        _LOADING,
        "--model-loader-extra-config --ignore-patterns --max-parallel-loading-workers",
    ),
    *_needless(VLLM, _LOADING, "--use-tqdm-on-load", _NOTHING),
    *_needless(VLLM, "one process answers HTTP", "--api-server-count -asc"),
    *_needless(VLLM, "one process answers HTTP", "--disable-frontend-multiprocessing", _NOTHING),
    *_needless(VLLM, "answers name their requests always", "--enable-request-id-headers", _NOTHING),
    *_needless(VLLM, "usage tells it always", "--enable-prompt-tokens-details", _NOTHING),
    *_needless(VLLM, "nothing is swapped: sequences are computed again", "--swap-space"),
    *_needless(VLLM, _OFFLOAD, "--kv-offloading-size --kv-offloading-backend"),
    *_needless(VLLM, _OFFLOAD, "--disable-hybrid-kv-cache-manager", _NOTHING),
    *_needless(VLLM, _EXPERTS, "--eplb-config --num-redundant-experts --eplb-window-size"),
    *_needless(VLLM, _EXPERTS, "--enable-eplb", _NOTHING),
    *_needless(
        VLLM, "missing here: the engine has no routes to sleep", "--enable-sleep-mode", _NOTHING
    ),
    *_needless(
        VLLM,
        "the lookup (method suffix) chooses the lengths that it matches",
        "--ngram-prompt-lookup-max --ngram-prompt-lookup-min",
    ),
    *_refused(VLLM, _TRANSFER, "--kv-transfer-config", harmless=("{}",)),
    *_refused(VLLM, "weights stay on the device", "--cpu-offload-gb", harmless=("0", "0.0")),
    *_refused(VLLM, "--kv-cache-memory has the cache's size in bytes", "--num-gpu-blocks-override"),
    *_refused(
        VLLM,
        _SPLIT,
        "--pipeline-parallel-size -pp --decode-context-parallel-size -dcp "
        "--prefill-context-parallel-size -pcp",
        harmless=("1",),
    ),
    *_refused(
        VLLM,
        _MACHINES,
        "--data-parallel-rank --data-parallel-address --data-parallel-rpc-port "
        "--data-parallel-size-local --data-parallel-start-rank -dpr -dpa -dpp -dpl",
    ),
    *_refused(VLLM, _MACHINES, "--data-parallel-backend", harmless=("mp",)),
    *_refused(VLLM, _MACHINES, "--headless --data-parallel-hybrid-lb", _NOTHING),
    *_refused(VLLM, _ADAPTERS, "--enable-lora --enable-prompt-adapter", _NOTHING),
    *_refused(VLLM, _ADAPTERS, "--lora-modules", _SEVERAL),
    *_refused(VLLM, _ADAPTERS, "--max-loras --max-lora-rank --max-cpu-loras --lora-dtype"),
    *_refused(
        VLLM,
        _EMBEDDINGS,
        "--runner --convert",
        harmless=("auto", "generate", "none"),
    ),
    *_refused(VLLM, _CONFIG, "--hf-overrides", harmless=("{}",)),
    *_refused(VLLM, _CONFIG, "--rope-scaling --rope-theta --hf-config-path"),
    *_refused(VLLM, _CONFIG, "--config-format", harmless=("auto", "hf")),
    *_refused(
        VLLM,
        "the checkpoint's own tokenizer is read; --tokenizer names another",
        "--tokenizer-mode",
        harmless=("auto", "hf"),
    ),
    *_refused(VLLM, "--revision is of model and tokenizer", "--tokenizer-revision --code-revision"),
    *_refused(VLLM, "the server needs texts", "--skip-tokenizer-init", _NOTHING),
    *_refused(VLLM, "set HF_HOME to the folder of downloads", "--download-dir"),
    *_refused(VLLM, "set HF_TOKEN", "--hf-token"),
    *_refused(
        VLLM,
        "requests say chat_template_kwargs themselves",
        "--default-chat-template-kwargs",
        harmless=("{}",),
    ),
    *_refused(
        VLLM,
        "contents reach the template in the form that it reads",
        "--chat-template-content-format",
        harmless=("auto",),
    ),
    *_refused(VLLM, "answers have the role assistant", "--response-role", harmless=("assistant",)),
    *_refused(
        VLLM,
        "requests ask for it: stream_options.include_usage",
        "--enable-force-include-usage",
        _NOTHING,
    ),
    *_refused(VLLM, "parsers are part of the package", "--tool-parser-plugin"),
    *_refused(VLLM, "there are no middlewares; a proxy has their place", "--middleware"),
    *_refused(VLLM, "the server calls no tools", "--tool-server"),
    *_refused(
        VLLM,
        "clients must have a certificate where --ssl-ca-certs is given, and only there",
        "--ssl-cert-reqs",
        harmless=("0",),
    ),
    *_refused(VLLM, "weights do not change while the engine runs", "--weight-transfer-config"),
    *_needless(VLLM, _KERNELS, "--linear-backend --dcp-comm-backend --mamba-backend"),
    *_needless(VLLM, _STATES, "--mamba-cache-mode"),
    *_needless(VLLM, "there are no plugins that would read it", "--additional-config"),
    *_refused(
        VLLM,
        "parsers are part of the package",
        "--reasoning-parser-plugin --tool-call-parser-plugin",
    ),
    *_refused(VLLM, "functions are for LLM alone (logits_processors)", "--logits-processors"),
    *_refused(VLLM, "thinking has no budget here", "--reasoning-config"),
    *_refused(VLLM, "models read and write text alone here", "--omni", _NOTHING),
]

_SGLANG = [
    _same(SGLANG, "--model-path", "--model"),
    _same(SGLANG, "--tokenizer-path", "--tokenizer"),
    _same(SGLANG, "--tp --tp-size", "--tensor-parallel-size"),
    _same(SGLANG, "--dp --dp-size", "--data-parallel-size"),
    _same(SGLANG, "--context-length", "--max-model-len"),
    _same(SGLANG, "--max-running-requests", "--max-num-seqs"),
    _same(SGLANG, "--chunked-prefill-size", "--max-num-batched-tokens"),
    _same(SGLANG, "--page-size", "--block-size"),
    _same(SGLANG, "--random-seed", "--seed"),
    _same(SGLANG, "--mamba-ssm-dtype", "--mamba-ssm-cache-dtype"),
    _same(SGLANG, "--max-queued-requests", "--max-waiting-requests"),
    _same(SGLANG, "--fastapi-root-path", "--root-path"),
    _same(SGLANG, "--disable-radix-cache", "--no-enable-prefix-caching", _NOTHING),
    _same(SGLANG, "--disable-cuda-graph", "--enforce-eager", _NOTHING),
    _same(SGLANG, "--disable-overlap-schedule", "--no-overlap", _NOTHING),
    _same(SGLANG, "--cuda-graph-bs --cuda-graph-bs-decode", "--cudagraph-capture-sizes", _SEVERAL),
    _same(SGLANG, "--speculative-algorithm --speculative-algo", "--method"),
    _same(SGLANG, "--speculative-draft-model-path --speculative-draft-model", "--draft-model"),
    _same(SGLANG, "--speculative-num-steps", "--num-speculative-tokens"),
    *_needless(
        SGLANG,
        "it counts the token before the drafts, too; --num-speculative-tokens has the drafts alone",
        "--speculative-num-draft-tokens",
    ),
    *_refused(SGLANG, "drafts are chains, not trees", "--speculative-eagle-topk", harmless=("1",)),
    *_refused(
        SGLANG,
        "--gpu-memory-utilization is near it: the share that activations are part of, too",
        "--mem-fraction-static",
    ),
    *_refused(SGLANG, "--kv-cache-memory has the cache's size in bytes", "--max-total-tokens"),
    *_refused(
        SGLANG, _SPLIT, "--pp --pp-size --dcp-size --attn-cp-size --moe-dp-size", harmless=("1",)
    ),
    *_refused(
        SGLANG,
        "--enable-expert-parallel spreads experts over all GPUs",
        "--ep --ep-size --expert-parallel-size",
        harmless=("1",),
    ),
    *_refused(
        SGLANG,
        "--data-parallel-size D --enable-expert-parallel are D groups that share the experts",
        "--enable-dp-attention",
        _NOTHING,
    ),
    *_refused(SGLANG, "--master-addr HOST and --master-port PORT", "--dist-init-addr"),
    *_refused(SGLANG, "HIP_VISIBLE_DEVICES names the GPUs", "--base-gpu-id", harmless=("0",)),
    *_refused(
        SGLANG,
        _TRANSFER,
        "--disaggregation-mode",
        harmless=("null",),
    ),
    *_refused(SGLANG, _ADAPTERS, "--lora-paths", _SEVERAL),
    *_refused(SGLANG, _EMBEDDINGS, "--is-embedding", _NOTHING),
    *_refused(SGLANG, _CONFIG, "--json-model-override-args", harmless=("{}",)),
    *_refused(
        SGLANG,
        "functions of requests are for LLM alone (logits_processors)",
        "--enable-custom-logit-processor",
        _NOTHING,
    ),
    *_refused(SGLANG, "hidden states are not returned", "--enable-return-hidden-states", _NOTHING),
    *_needless(SGLANG, _IMAGES, "--mm-attention-backend"),
    *_needless(SGLANG, _IMAGES, "--enable-multimodal --keep-mm-feature-on-device", _NOTHING),
    *_needless(
        SGLANG,
        _KERNELS,
        "--prefill-attention-backend --decode-attention-backend --sampling-backend --deepep-mode "
        "--moe-runner-backend --moe-a2a-backend --torch-compile-max-bs --fp8-gemm-backend",
    ),
    *_needless(
        SGLANG,
        _KERNELS,
        "--enable-torch-compile --enable-aiter-allreduce-fusion "
        "--enable-flashinfer-allreduce-fusion --disable-cuda-graph-padding",
        _NOTHING,
    ),
    *_needless(SGLANG, _GRAPHS, "--cuda-graph-max-bs"),
    *_needless(SGLANG, _GRAMMARS, "--grammar-backend"),
    *_needless(SGLANG, _LOGS, "--enable-metrics --log-requests --show-time-cost", _NOTHING),
    *_needless(SGLANG, _LOGS, "--log-requests-level --decode-log-interval --log-level-http"),
    *_needless(
        SGLANG,
        _ORDER,
        "--schedule-policy --schedule-conservativeness --max-prefill-tokens --load-balance-method",
    ),
    *_needless(SGLANG, _ORDER, "--enable-mixed-chunk", _NOTHING),
    *_needless(SGLANG, _OFFLOAD, "--hicache-ratio --hicache-size"),
    *_needless(SGLANG, _OFFLOAD, "--enable-hierarchical-cache", _NOTHING),
    *_needless(SGLANG, _EXPERTS, "--ep-num-redundant-experts"),
    *_needless(SGLANG, _LOADING, "--weight-loader-disable-mmap", _NOTHING),
    *_needless(SGLANG, "the start warms up what there is", "--skip-server-warmup", _NOTHING),
    *_needless(SGLANG, "a rank that is lost is noticed (docs/scaling.md)", "--watchdog-timeout"),
    *_needless(
        SGLANG,
        "requests with a lower priority value always go first",
        "--enable-priority-scheduling --schedule-low-priority-values-first",
        _NOTHING,
    ),
    *_needless(
        SGLANG,
        _GRAPHS,
        "--cuda-graph-config --cuda-graph-backend-decode --cuda-graph-backend-prefill "
        "--cuda-graph-max-bs-decode --cuda-graph-max-bs-prefill",
    ),
    *_needless(SGLANG, "usage tells it always", "--enable-cache-report", _NOTHING),
    *_refused(
        SGLANG,
        "--generation-config none is what openai means",
        "--sampling-defaults",
        harmless=("model",),
    ),
    *_refused(SGLANG, "prompts that are too long are refused", "--allow-auto-truncate", _NOTHING),
    *_refused(
        SGLANG,
        "requests ask for it: stream_options.include_usage",
        "--stream-response-default-include-usage",
        _NOTHING,
    ),
    *_refused(SGLANG, _SPLIT, "--enable-prefill-cp", _NOTHING),
    *_needless(
        SGLANG,
        "the blocks of layers with windows are counted by themselves",
        "--swa-full-tokens-ratio",
    ),
    *_needless(SGLANG, _KERNELS, "--disable-shared-experts-fusion", _NOTHING),
    *_refused(
        SGLANG,
        _TRANSFER,
        "--disaggregation-transfer-backend --disaggregation-bootstrap-port "
        "--disaggregation-ib-device",
    ),
    *_refused(SGLANG, "the server speaks HTTP alone", "--grpc-mode --smg-grpc-mode", _NOTHING),
    *_refused(SGLANG, "the server speaks HTTP alone", "--grpc-port"),
]

_ROCM = [
    _same(ROCM, "--server-port", "--port"),
    _same(
        ROCM,
        "--spec-decode-acceptance-length",
        "--speculative-synthetic-acceptance-length",
    ),
    *_refused(ROCM, "give --load-format dummy", "--load-dummy", Takes.AT_MOST_ONE),
    *_refused(ROCM, "--quantization quantises when weights are loaded", "--online-quant-config"),
    *_refused(
        ROCM,
        "--speculative-synthetic-acceptance-length has it as a length",
        "--spec-decode-acceptance-rate",
    ),
    *_refused(ROCM, "it changes answers", "--fake-eplb", _NOTHING),
    *_needless(ROCM, _KERNELS, "--level --attn-prefill-chunk-size --index-cache-dtype"),
    *_needless(ROCM, _KERNELS, "--enable-tbo", Takes.AT_MOST_ONE),
    *_needless(ROCM, _KERNELS, "--mark-trace --enable-rapidserve --disagg-constrained", _NOTHING),
    *_needless(ROCM, _GRAPHS, "--cudagraph-mode"),
    *_needless(ROCM, "--speculative-adaptive chooses the number of drafts", "--dspark-config"),
    *_needless(ROCM, _ORDER, "--dp-load-balance --disagg-prefill-max-num-seqs"),
    *_needless(ROCM, _EXPERTS, "--eplb-enable", _NOTHING),
    *_needless(ROCM, "there is no context parallel", "--dcp-config"),
    *_needless(ROCM, _STATES, "--state-checkpoint-interval-tokens"),
    *_needless(ROCM, _LOGS, "--request-log --torch-profiler-dir"),
    *_needless(ROCM, "idle connections are kept", "--timeout-keep-alive"),
]

_LLAMA = [
    _same(LLAMA, "-m", "--model"),
    _same(LLAMA, "-a --alias", "--served-model-name"),
    _same(LLAMA, "-c --ctx-size", "--max-model-len", harmless=("0",)),
    _same(LLAMA, "-t --threads", "--num-threads", harmless=("-1",)),
    _same(LLAMA, "-np --parallel", "--max-num-seqs", harmless=("-1",)),
    _same(LLAMA, "-ub --ubatch-size", "--max-num-batched-tokens"),
    _same(LLAMA, "--chat-template-file", "--chat-template"),
    _same(LLAMA, "--no-webui", "--no-ui", _NOTHING),
    _same(LLAMA, "--draft --draft-n --draft-max", "--num-speculative-tokens"),
    _same(LLAMA, "-n --predict --n-predict", "--max-tokens", harmless=("-1", "-2")),
    _same(LLAMA, "--temp", "--temperature"),
    _same(LLAMA, "--repeat-penalty", "--repetition-penalty"),
    _same(LLAMA, "-sys --system-prompt", "--system"),
    _same(LLAMA, "-s", "--seed", harmless=("-1",)),
    *_needless(LLAMA, "--max-num-batched-tokens has the tokens of a step", "-b --batch-size"),
    *_needless(LLAMA, "all threads work in every step", "-tb --threads-batch"),
    *_needless(LLAMA, _KERNELS, "-fa --flash-attn", Takes.AT_MOST_ONE),
    *_needless(
        LLAMA,
        "batches are continuous, templates are Jinja's, and /metrics is there always",
        "-cb --cont-batching --jinja --metrics --slots --props",
        _NOTHING,
    ),
    *_needless(LLAMA, _LOADING, "--mlock --no-mmap --mmap --no-repack --check-tensors", _NOTHING),
    *_needless(LLAMA, _LOADING, "--numa --load-mode -lm --fit -fit"),
    *_needless(LLAMA, _LOGS, "--log-file --log-colors -lv --verbosity"),
    *_needless(
        LLAMA, _LOGS, "--log-disable --log-prefix --log-timestamps --perf --no-perf", _NOTHING
    ),
    *_needless(LLAMA, "drafts are always verified in full", "--draft-min --draft-p-min"),
    *_refused(
        LLAMA,
        _SPLIT_LAYERS,
        "-ngl --gpu-layers --n-gpu-layers",
        harmless=("all", "auto", "-1", "99", "999"),
    ),
    *_refused(LLAMA, _SPLIT_LAYERS, "-ncmoe --n-cpu-moe -ot --override-tensor"),
    *_refused(LLAMA, _SPLIT_LAYERS, "-cmoe --cpu-moe", _NOTHING),
    *_refused(LLAMA, _SPLIT, "-sm --split-mode", harmless=("none",)),
    *_refused(LLAMA, _SPLIT, "-ts --tensor-split --rpc"),
    *_refused(LLAMA, "HIP_VISIBLE_DEVICES names the GPUs", "-mg --main-gpu -dev"),
    *_refused(
        LLAMA,
        "--kv-cache-dtype is of keys and values",
        "-ctk --cache-type-k -ctv --cache-type-v",
    ),
    *_refused(
        LLAMA,
        "GGUF files are read from a path: give it as the model",
        "-hf --hf-repo -hff --hf-file -mu --model-url -dr --docker-repo",
    ),
    *_refused(
        LLAMA,
        "--method draft_model --draft-model MODEL drafts with a whole language model",
        "-md --model-draft --spec-draft-model",
    ),
    *_refused(LLAMA, "--method names how drafts are made", "--spec-type"),
    *_refused(LLAMA, _ADAPTERS, "--lora --lora-scaled --control-vector"),
    *_refused(LLAMA, _EMBEDDINGS, "--embedding --embeddings --reranking --rerank", _NOTHING),
    *_refused(LLAMA, "pooled as the checkpoint's modules.json says", "--pooling"),
    *_refused(LLAMA, _IMAGES, "--mmproj -mm --mmproj-url"),
    *_refused(LLAMA, _CONFIG, "--rope-freq-base --rope-freq-scale --rope-scale --override-kv"),
    *_refused(
        LLAMA,
        "--reasoning-parser says how reasoning is marked",
        "--reasoning-format",
        harmless=("auto",),
    ),
    *_refused(LLAMA, "requests say chat_template_kwargs themselves", "--chat-template-kwargs"),
    *_refused(
        LLAMA, "--ssl-keyfile and --ssl-certfile name them", "--ssl-key-file --ssl-cert-file"
    ),
    *_refused(
        LLAMA,
        "such samplers are missing here",
        "--mirostat --dry-multiplier --xtc-probability --typical --typical-p --top-nsigma "
        "--dynatemp-range --samplers",
    ),
    *_needless(LLAMA, _OFFLOAD, "-cram --cache-ram"),
    *_needless(LLAMA, "prefixes are found by themselves", "--cache-reuse"),
    *_needless(LLAMA, "one process answers HTTP", "--threads-http"),
    *_needless(LLAMA, "the start warms up what there is", "--warmup --no-warmup", _NOTHING),
    *_refused(LLAMA, "requests say skip_special_tokens: false", "-sp --special", _NOTHING),
    *_refused(LLAMA, "chat templates are Jinja's always", "--no-jinja", _NOTHING),
    *_refused(LLAMA, "answers end where the context ends", "--context-shift", _NOTHING),
    *_refused(
        LLAMA,
        "requests say it: response_format, or structured_outputs",
        "--grammar --grammar-file -j --json-schema -jf --json-schema-file",
    ),
    *_refused(LLAMA, "thinking has no budget here", "--reasoning-budget", harmless=("-1",)),
    *_refused(LLAMA, "--cors-allow-origin takes them one by one", "--cors-origins"),
    _same(LLAMA, "--webui", "--ui", _NOTHING),
    _same(LLAMA, "--cache-prompt", "--enable-prefix-caching", _NOTHING),
    _same(LLAMA, "--no-cache-prompt", "--no-enable-prefix-caching", _NOTHING),
    _same(LLAMA, "-r --reverse-prompt", "--stop"),
]

# The server's requests say these themselves; in other programs they are flags of ours.
_SAMPLING = [
    *_refused(LLAMA, "each request says its max_tokens", "--max-tokens"),
    *_refused(
        LLAMA,
        "requests say it; --override-generation-config '{\"temperature\": 0.6}' has what applies "
        "where they do not",
        "--temperature --top-p --top-k --min-p --presence-penalty --frequency-penalty "
        "--repetition-penalty",
    ),
]

FOREIGN_FLAGS = (*_VLLM, *_SGLANG, *_ROCM, *_LLAMA, *_SAMPLING)
BY_NAME: Mapping[str, ForeignFlag] = {
    name: flag for flag in reversed(FOREIGN_FLAGS) for name in flag.names
}
