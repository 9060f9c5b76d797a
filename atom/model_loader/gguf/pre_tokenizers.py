"""The pre-tokenizers that GGUF files name: how a text is split before merges.

Sources: the `tokenizer.json` of the models behind the names, and llama.cpp's `llama-vocab.cpp` for
`default` and for which names are the same. Where llama.cpp approximates a published expression
(classes of letters in `gpt-4o` and its kin, NFC), the published one is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORTENED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3_SPLIT = (
    _SHORTENED + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(ending: str, digits: str, marks: str, excluded: str = "") -> str:
    """Words with their capitals in front.

    Args:
        ending: of a word.
        digits: repetition of digits.
        marks: what may follow punctuation.
        excluded: of letters.
    """
    word = r"[^\r\n\p{L}\p{N}]?"
    upper, lower = f"[{_UPPER}{excluded}]", f"[{_LOWER}{excluded}]"
    return (
        rf"{word}{upper}*{lower}+{ending}|{word}{upper}+{lower}*{ending}|\p{{N}}{digits}|"
        rf" ?[^\s\p{{L}}\p{{N}}]+[{marks}]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


@dataclass(frozen=True)
class PreTokenizer:
    """Attributes:
    splits: regular expressions, each applied to the pieces of the one before.
    nfc: whether to normalise the text to NFC first.
    ignore_merges: whether a word that is a token itself skips the merges.
    adds_bos: default if the file does not say.
    """

    splits: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


# Letters of DeepSeek's first tokenizers.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    "\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3_SPLIT = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_GPT2 = PreTokenizer((_GPT2_SPLIT,))
_GPT2_DIGITS = PreTokenizer((r"\p{N}", _GPT2_SPLIT))
_LLAMA3 = PreTokenizer((_LLAMA3_SPLIT,), ignore_merges=True, adds_bos=True)
_CL100K = PreTokenizer((_LLAMA3_SPLIT,))
_QWEN2 = PreTokenizer((_LLAMA3_SPLIT.replace("{1,3}", ""),), nfc=True)
# Marks belong to their letters.
_QWEN35_SPLIT = _QWEN2.splits[0].replace(r"?\p{L}+", r"?[\p{L}\p{M}]+")
_QWEN35_SPLIT = _QWEN35_SPLIT.replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_O200K = PreTokenizer((_cased(_SHORTENED + "?", "{1,3}", r"\r\n/"),))

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": _GPT2,
    "smollm": _GPT2_DIGITS,
    "refact": _GPT2_DIGITS,
    "command-r": PreTokenizer(_GPT2_DIGITS.splits, nfc=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": _CL100K,
    "smaug-bpe": _CL100K,
    "chatglm-bpe": _CL100K,
    "glm4": PreTokenizer((_LLAMA3_SPLIT,), ignore_merges=True),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": PreTokenizer((_QWEN35_SPLIT,), nfc=True),
    "gpt-4o": _O200K,
    "minimax-m2": _O200K,
    "tekken": PreTokenizer((_cased("", "", r"\r\n/"),), ignore_merges=True, adds_bos=True),
    "kimi-k2": PreTokenizer(
        (r"\p{Han}+|" + _cased(_SHORTENED + "?", "{1,3}", r"\r\n", r"&&[^\p{Han}]"),)
    ),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", _KANA, _DEEPSEEK3_SPLIT)),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _CJK,
            r"\p{N}",
        )
    ),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"),
    ),
    "default": PreTokenizer(
        (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", "[0-9][0-9][0-9]"),
    ),
}
