"""Qwen3-Coder, Qwen3-Next and Qwen 3.5: a tag for the function and one for each parameter.

Source: the checkpoints' chat templates. Values are plain text, typed by the tool's schema.
"""

from __future__ import annotations

from atom.entrypoints.parsing.calls.call_grammar import CallGrammar, tagged
from atom.entrypoints.parsing.calls.function_tags import FunctionTags
from atom.entrypoints.parsing.calls.parameter_grammar import ParameterGrammar
from atom.entrypoints.parsing.calls.parameter_tags import Lines
from atom.entrypoints.parsing.text_stream import Emit
from atom.structured_output.tags import Format, literal, sequence, token

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


def _parameter(name: Format, kind: str, value: Format) -> Format:
    del kind
    return sequence(
        literal(PARAMETER), name, literal(">\n"), value, literal(f"\n{PARAMETER_END}\n")
    )


_PARAMETERS = ParameterGrammar(_parameter, (PARAMETER_END, CLOSE))


def _call(name: str, arguments: Format) -> Format:
    line = literal("\n")
    parameters = _PARAMETERS.of(arguments) or sequence({**arguments, "style": "qwen_xml"}, line)
    head = sequence(line, token(FUNCTION), literal(f"{name}>\n"))
    return tagged(OPEN, sequence(head, parameters, token(FUNCTION_END), line), CLOSE)


class Qwen3Coder(FunctionTags):
    """Models sometimes leave `<tool_call>` out."""

    template_texts = (("<function=", "<parameter="),)
    model_types = ("qwen3_next",)
    grammar = CallGrammar(_call, separator="\n", section=None, takes_json=False)
    markers = (OPEN, CLOSE, FUNCTION, FUNCTION_END)
    opening = frozenset({OPEN, FUNCTION})
    section = (OPEN, CLOSE)
    function = FUNCTION
    function_end = FUNCTION_END
    parameter = PARAMETER
    parameter_end = PARAMETER_END

    def value(self, emit: Emit) -> Emit:
        return Lines(emit).feed
