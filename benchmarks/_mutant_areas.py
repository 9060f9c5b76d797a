"""What is mutated, and the tests that are tried against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_CHECKS = ("check_integrity", "check_published", "check_references", "check_that")


@dataclass(frozen=True)
class Area:
    """A part of the core, or of what checks it.

    Attributes:
        sources: globs of its files.
        tests: globs of the tests nearest to it, below `tests/`; those of all areas that run a
            mutant's line are tried against it.
        checks: whether it has what checks the state of these files; other areas have the rest.
    """

    name: str
    sources: Sequence[str]
    tests: Sequence[str]
    checks: bool = False

    def has(self, function: str) -> bool:
        """Whether a function of its files belongs to it."""
        return (function.rpartition(".")[2] in _CHECKS) == self.checks

    def files(self, tree: Path) -> list[str]:
        """Its files, relative to the tree."""
        return sorted(
            str(path.relative_to(tree))
            for pattern in self.sources
            for path in tree.glob(pattern)
            if path.name != "__init__.py"
        )

    def test_files(self, tree: Path) -> list[str]:
        """The test files whose runs of its lines are known."""
        found = [test for p in self.tests for test in sorted((tree / "tests").glob(p))]
        return [str(test.relative_to(tree)) for test in dict.fromkeys(found)]


AREAS = (
    Area(
        "scheduler",
        [
            "atom/model_engine/scheduler.py",
            "atom/model_engine/sequence.py",
            # But for the prefix cache and the manager of blocks, which are the pool's.
            "atom/model_engine/scheduling/[!kp]*.py",
            "atom/model_engine/scheduling/planned_batch.py",
        ],
        [
            "model_engine/test_scheduler*.py",
            "model_engine/test_overlap*.py",
            "model_engine/test_failed_steps.py",
            "model_engine/test_admission.py",
            "model_engine/test_state_checkpoints.py",
            "model_engine/test_recorded_steps.py",
            "model_engine/test_own_failures.py",
            "model_engine/test_async_engine.py",
        ],
    ),
    Area(
        "block pool",
        [
            "atom/model_engine/block_pool.py",
            "atom/model_engine/scheduling/prefix_cache.py",
            "atom/model_engine/scheduling/kv_cache_manager.py",
            "atom/kv_cache/block_tables.py",
            "atom/kv_cache/paged.py",
        ],
        [
            "model_engine/test_block_pool.py",
            "kv_cache/test_*.py",
        ],
    ),
    Area(
        "verification",
        [
            "atom/sampling/sampler.py",
            "atom/sampling/rows.py",
            "atom/sampling/plan.py",
            "atom/sampling/token_counts.py",
            "atom/sampling/edits.py",
            "atom/sampling/synthetic.py",
            "atom/model_ops/kernels/torch/speculation.py",
            "atom/model_ops/kernels/torch/sampling.py",
        ],
        [
            "sampling/test_*.py",
            "model_ops/test_step_ops.py",
            "model_ops/test_draft_choice.py",
            "model_ops/test_native_sampling.py",
            "spec_decode/test_synthetic_acceptance.py",
            "spec_decode/test_lossless.py",
            "spec_decode/test_ragged_lengths.py",
            "entrypoints/test_offline_api.py",
        ],
    ),
    Area(
        "drafts",
        [
            "atom/spec_decode/grammar.py",
            "atom/spec_decode/suffix_*.py",
            "atom/spec_decode/eagle3_draft_builder.py",
            "atom/spec_decode/proposers/*.py",
            "atom/model_engine/step/carried.py",
        ],
        [
            "spec_decode/test_chain.py",
            "spec_decode/test_grammar_drafts.py",
            "spec_decode/test_suffix_*.py",
            "spec_decode/test_eagle3*.py",
            "spec_decode/test_parallel_eagle.py",
            "spec_decode/test_block*.py",
            "spec_decode/test_mtp.py",
            "spec_decode/test_draft_*.py",
            "spec_decode/test_methods.py",
            "spec_decode/test_prompt_drafts.py",
            "spec_decode/test_rest.py",
            "spec_decode/test_switched_off.py",
        ],
    ),
    Area(
        "grammars",
        [
            "atom/structured_output/*.py",
            "atom/structured_output/schema/*.py",
            "atom/model_engine/grammar_queue.py",
            "atom/model_engine/compiled_grammars.py",
        ],
        [
            "structured_output/test_*.py",
            "entrypoints/chat/test_structured_output.py",
        ],
    ),
    Area(
        "parsers",
        ["atom/entrypoints/parsing/*.py", "atom/entrypoints/parsing/*/*.py", "atom/text/*.py"],
        [
            "text/test_*.py",
            "entrypoints/parsing/test_*.py",
            "entrypoints/chat/test_chat_tools.py",
            "entrypoints/chat/test_translated_tools.py",
            "entrypoints/chat/test_parser_detection.py",
        ],
    ),
    Area(
        "auth",
        [
            "atom/entrypoints/http/auth.py",
            "atom/entrypoints/http/body.py",
            "atom/entrypoints/http/edge.py",
            "atom/entrypoints/http/json_budget.py",
            "atom/entrypoints/http/connection.py",
            "atom/entrypoints/http/root_path.py",
            "atom/entrypoints/http/unknown_fields.py",
        ],
        [
            "entrypoints/http/test_auth.py",
            "entrypoints/http/test_byte_fuzz.py",
            "entrypoints/http/test_connection.py",
            "entrypoints/http/test_limits.py",
            "entrypoints/http/test_unknown_fields.py",
            "entrypoints/server/test_api_key_file.py",
            "entrypoints/server/test_openai_parts.py",
            "entrypoints/server/test_listening.py",
            "entrypoints/server/test_openai_life.py",
            "entrypoints/openai/test_openai_errors.py",
        ],
    ),
    Area(
        "loaders",
        [
            "atom/model_loader/safetensors/reader.py",
            "atom/model_loader/read_files.py",
            "atom/model_loader/weights.py",
            "atom/model_loader/layers.py",
            "atom/model_loader/source.py",
            "atom/model_loader/gguf/*.py",
            "atom/model_loader/tokenizers/*.py",
            "atom/models/config/check.py",
            "atom/models/config/file.py",
        ],
        [
            "model_loader/test_*.py",
            "models/test_config_check.py",
            "models/test_models_page.py",
            "fuzz/test_greedy_templates.py",
        ],
    ),
    Area("canary", ["atom/kv_cache/canary.py"], ["kv_cache/test_canary*.py"]),
    Area(
        "integrity",
        [
            "atom/model_engine/block_pool.py",
            "atom/model_engine/scheduler.py",
            "atom/model_engine/scheduling/prefix_cache.py",
            "atom/model_engine/scheduling/window_pool.py",
        ],
        [
            "model_engine/test_block_pool.py",
            "model_engine/test_scheduler_releases.py",
            "model_engine/test_scheduler_windows.py",
        ],
        checks=True,
    ),
    Area(
        "chaos",
        [
            "benchmarks/_chaos/answers.py",
            "benchmarks/_chaos/lab.py",
            "benchmarks/_chaos/watch.py",
        ],
        ["benchmarks/test_chaos.py"],
    ),
)
