"""MiniMax M2 to M2.7: `<invoke>` tags for calls, all in one section.

Source: the checkpoints' chat templates. Values are plain text, typed by the tool's schema.
"""

from __future__ import annotations

from atom.entrypoints.parsing.calls.call_grammar import CallGrammar
from atom.entrypoints.parsing.calls.function_tags import FunctionTags
from atom.entrypoints.parsing.calls.parameter_grammar import ParameterGrammar
from atom.structured_output.tags import Format, literal, sequence

PARAMETER, END = "<parameter name=", "</parameter>"
SECTION = ("<minimax:tool_call>", "</minimax:tool_call>")


def _parameter(name: Format, kind: str, value: Format) -> Format:
    del kind
    return sequence(literal(f'{PARAMETER}"'), name, literal('">'), value, literal(f"{END}\n"))


_PARAMETERS = ParameterGrammar(_parameter, (END, SECTION[1]))


def _call(name: str, arguments: Format) -> Format:
    # The parameters of the library's style bring the white space before the tag that follows.
    parameters = _PARAMETERS.of(arguments) or {**arguments, "style": "minimax_xml"}
    return sequence(literal(f'<invoke name="{name}">\n'), parameters, literal("</invoke>\n"))


class MiniMaxM2(FunctionTags):
    template_texts = (("<minimax:tool_call>", "<invoke name="),)
    model_types = ("minimax_m2",)
    grammar = CallGrammar(
        _call, separator="", section=SECTION, head=literal("\n"), takes_json=False
    )
    markers = SECTION
    opening = frozenset({SECTION[0]})
    section = SECTION
    function = "<invoke name="
    function_end = "</invoke>"
    parameter = PARAMETER
    parameter_end = END
