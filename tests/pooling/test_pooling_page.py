"""The table of `docs/embeddings.md` is what the tests compare."""

from __future__ import annotations

from pathlib import Path

from pooling_checkpoints import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "embeddings.md"
_KNOWN = {
    "bert": "all-MiniLM, BGE, E5, GTE, Snowflake Arctic",
    "roberta": "all-distilroberta and other RoBERTa",
    "xlm-roberta": "multilingual E5",
    "mpnet": "all-mpnet-base",
    "modernbert": "GTE-ModernBERT, ModernBERT-embed",
    "qwen3": "Qwen3-Embedding",
    "gemma3": "EmbeddingGemma",
    "llama": "decoders with a modules.json",
}


def rows() -> list[str]:
    lines = ["| family | tested as | such as |", "|---|---|---|"]
    for name, known in _KNOWN.items():
        of_family = [f for key, f in FAMILIES.items() if key.partition("-")[0] == name]
        of_family = of_family or [FAMILIES[name]]
        classes = ", ".join(f"`{family[0]}`" for family in of_family)
        lines.append(f"| {name} | {classes} | {known} |")
    return lines


def test_the_table_is_current() -> None:
    table = "\n".join(rows())
    assert table in PAGE.read_text(encoding="utf-8"), f"docs/embeddings.md must have\n{table}"
