"""What is mutated, and the tests nearest to each file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Area:
    """A part of the core.

    Attributes:
        sources: globs of its files, below `atom/`.
        tests: globs of the tests that any of its mutants has to pass, below `tests/`; those that
            mirror its file come before them.
    """

    name: str
    sources: Sequence[str]
    tests: Sequence[str]

    def files(self, tree: Path) -> list[str]:
        """Its files, relative to the tree."""
        return sorted(
            str(path.relative_to(tree))
            for pattern in self.sources
            for path in (tree / "atom").glob(pattern)
            if path.name != "__init__.py"
        )

    def tests_of(self, tree: Path, source: str) -> list[str]:
        """The test files for a mutant of a file, the nearest first."""
        path = Path(source).relative_to("atom")
        rooms = [path.parent, *path.parent.parents]
        mirrored = [
            test
            for room in rooms
            for test in sorted((tree / "tests" / room).glob(f"test_{path.stem}*.py"))
        ]
        others = [test for p in self.tests for test in sorted((tree / "tests").glob(p))]
        return [str(t.relative_to(tree)) for t in dict.fromkeys([*mirrored, *others])]


AREAS = (
    Area(
        "scheduler",
        ["model_engine/scheduler.py", "model_engine/sequence.py", "model_engine/scheduling/*.py"],
        [
            "model_engine/test_scheduler*.py",
            "model_engine/test_overlap_properties.py",
            "model_engine/test_failed_steps.py",
        ],
    ),
    Area(
        "block pool",
        [
            "model_engine/block_pool.py",
            "model_engine/scheduling/prefix_cache.py",
            "model_engine/scheduling/kv_cache_manager.py",
            "kv_cache/block_tables.py",
            "kv_cache/paged.py",
        ],
        [
            "model_engine/test_block_pool.py",
            "kv_cache/test_*.py",
            "model_engine/test_scheduler*.py",
        ],
    ),
    Area(
        "verification",
        [
            "sampling/sampler.py",
            "sampling/rows.py",
            "sampling/plan.py",
            "sampling/token_counts.py",
            "sampling/edits.py",
            "sampling/synthetic.py",
            "model_ops/kernels/torch/speculation.py",
            "model_ops/kernels/torch/sampling.py",
        ],
        [
            "sampling/test_*.py",
            "model_ops/test_step_ops.py",
            "model_ops/test_draft_choice.py",
            "model_ops/test_native_sampling.py",
            "spec_decode/test_synthetic_acceptance.py",
            "spec_decode/test_lossless.py",
        ],
    ),
    Area(
        "drafts",
        [
            "spec_decode/grammar.py",
            "spec_decode/suffix_*.py",
            "spec_decode/eagle3_draft_builder.py",
            "spec_decode/proposers/*.py",
            "model_engine/step/carried_rows.py",
        ],
        [
            "spec_decode/test_chain.py",
            "spec_decode/test_grammar_drafts.py",
            "spec_decode/test_suffix_*.py",
            "spec_decode/test_eagle3_in_engine.py",
            "spec_decode/test_parallel_eagle.py",
            "spec_decode/test_block_in_engine.py",
            "spec_decode/test_mtp.py",
        ],
    ),
    Area(
        "grammars",
        [
            "structured_output/*.py",
            "structured_output/schema/*.py",
            "model_engine/grammar_queue.py",
            "model_engine/compiled_grammars.py",
        ],
        [
            "structured_output/test_params.py",
            "structured_output/test_plain.py",
            "structured_output/test_json_schema.py",
            "structured_output/test_patterns.py",
            "structured_output/test_white_space.py",
            "structured_output/test_xgrammar_backend.py",
            "structured_output/test_forced_texts.py",
            "structured_output/test_in_engine.py",
        ],
    ),
    Area(
        "parsers",
        ["entrypoints/parsing/*.py", "entrypoints/parsing/*/*.py", "text/*.py"],
        [
            "text/test_*.py",
            "entrypoints/parsing/test_output_parser.py",
            "entrypoints/parsing/test_call_formats.py",
            "entrypoints/parsing/test_call_templates.py",
            "entrypoints/parsing/test_kimi_calls.py",
            "entrypoints/parsing/test_tool_grammar.py",
            "entrypoints/parsing/test_typescript_tools.py",
        ],
    ),
    Area(
        "auth",
        [
            "entrypoints/http/auth.py",
            "entrypoints/http/body.py",
            "entrypoints/http/edge.py",
            "entrypoints/http/json_budget.py",
            "entrypoints/http/connection.py",
            "entrypoints/http/root_path.py",
            "entrypoints/http/unknown_fields.py",
        ],
        [
            "entrypoints/http/test_connection.py",
            "entrypoints/http/test_limits.py",
            "entrypoints/http/test_unknown_fields.py",
            "entrypoints/server/test_openai_parts.py",
            "entrypoints/server/test_listening.py",
            "entrypoints/server/test_openai_life.py",
        ],
    ),
    Area(
        "loaders",
        [
            "model_loader/safetensors_reader.py",
            "model_loader/read_files.py",
            "model_loader/weights.py",
            "model_loader/layers.py",
            "model_loader/source.py",
            "model_loader/gguf/*.py",
            "model_loader/tokenizers/*.py",
            "models/config/check.py",
            "models/config/file.py",
        ],
        [
            "model_loader/test_safetensors_reader.py",
            "model_loader/test_lying_checkpoints.py",
            "model_loader/test_partial_reads.py",
            "model_loader/test_gguf_*.py",
            "model_loader/test_*tokenizer.py",
            "model_loader/test_source.py",
            "model_loader/test_weights.py",
        ],
    ),
)
