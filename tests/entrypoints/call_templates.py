"""Templates of our own that write calls of the history as those of the families do.

Each writes the same answer as the chat template of the checkpoints; other turns are `[role]text`.
"""

from __future__ import annotations


def _template(head: str, answer: str, tools: str = "") -> str:
    return (
        tools + "{%- for m in messages -%}{%- if m.role == 'assistant' -%}"
        "{{- HEAD -}}"
        + answer
        + "{%- else -%}{{- '[' ~ m.role ~ ']' ~ m.content ~ '\\n' -}}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- HEAD -}}{%- endif -%}"
    ).replace("HEAD", repr(head))


_TOOLS = "{%- for tool in tools or [] -%}{{- tool | tojson ~ '\\n' -}}{%- endfor -%}"
_EACH = "{%- for call in m.tool_calls or [] -%}{%- set f = call.function -%}"
_ARGUMENTS = "{%- for key, value in f.arguments.items() -%}"
_END = "{%- endfor -%}"
# Strings as they are, others in JSON; as Python spells them; and containers alone in JSON.
_JSON = "(value if value is string else value | tojson)"
_PYTHON = "(value | string)"
_MIXED = "(value | string if value is string or value is not iterable else value | tojson)"

_QWEN = (
    "{%- if m.content -%}{{- m.content ~ '\\n\\n' -}}{%- endif -%}"
    + _EACH
    + "{%- if not loop.first -%}{{- '\\n' -}}{%- endif -%}"
    + "{{- '<tool_call>\\n<function=' ~ f.name ~ '>\\n' -}}"
    + _ARGUMENTS
    + "{{- '<parameter=' ~ key ~ '>\\n' ~ VALUE ~ '\\n</parameter>\\n' -}}"
    + _END
    + "{{- '</function>\\n</tool_call>' -}}"
    + _END
)
_THOUGHTS = "{{- m.reasoning_content ~ '</think>' -}}"

TEMPLATES: dict[str, str] = {
    "qwen3_coder_first": _template(
        "<|im_start|>assistant\n", _QWEN.replace("VALUE", _PYTHON), _TOOLS
    ),
    "qwen3_coder": _template("<|im_start|>assistant\n", _QWEN.replace("VALUE", _MIXED), _TOOLS),
    "qwen3_5": _template(
        "<|im_start|>assistant\n<think>\n",
        "{{- m.reasoning_content ~ '\\n</think>\\n\\n' -}}" + _QWEN.replace("VALUE", _MIXED),
        _TOOLS,
    ),
    "glm45": _template(
        "<|assistant|>",
        "{{- '\\n<think>' ~ m.reasoning_content ~ '</think>' -}}"
        "{%- if m.content -%}{{- '\\n' ~ m.content -}}{%- endif -%}"
        + _EACH
        + "{{- '\\n<tool_call>' ~ f.name ~ '\\n' -}}"
        + _ARGUMENTS
        + "{{- '<arg_key>' ~ key ~ '</arg_key>\\n<arg_value>' -}}{{- "
        + _JSON
        + " -}}{{- '</arg_value>\\n' -}}"
        + _END
        + "{{- '</tool_call>' -}}"
        + _END,
        _TOOLS,
    ),
    "glm47": _template(
        "<|assistant|><think>",
        _THOUGHTS
        + "{{- m.content -}}"
        + _EACH
        + "{{- '<tool_call>' ~ f.name -}}"
        + _ARGUMENTS
        + "{{- '<arg_key>' ~ key -}}</arg_key><arg_value>{{- "
        + _JSON
        + " -}}{{- '</arg_value>' -}}"
        + _END
        + "{{- '</tool_call>' -}}"
        + _END,
        _TOOLS,
    ),
    "minimax_m2": _template(
        "]~b]ai\n<think>\n",
        "{{- m.reasoning_content ~ '\\n</think>\\n\\n' ~ m.content -}}"
        "{%- if m.tool_calls -%}{{- '\\n<minimax:tool_call>\\n' -}}"
        + _EACH
        + "{{- '<invoke name=\"' ~ f.name ~ '\">\\n' -}}"
        + _ARGUMENTS
        + "{{- '<parameter name=\"' ~ key ~ '\">' ~ "
        + _JSON
        + " ~ '</parameter>\\n' -}}"
        + _END
        + "{{- '</invoke>\\n' -}}"
        + _END
        + "{{- '</minimax:tool_call>' -}}{%- endif -%}",
        _TOOLS,
    ),
    "gpt_oss": _template(
        "<|start|>assistant",
        "{%- if m.tool_calls -%}"
        "{%- if m.content and m.thinking -%}{{- raise_exception('one of both') -}}{%- endif -%}"
        "{%- if m.content or m.thinking -%}"
        "{{- '<|channel|>analysis<|message|>' ~ (m.content or m.thinking) ~ '<|end|>' -}}"
        "{{- '<|start|>assistant' -}}{%- endif -%}"
        "{%- set f = m.tool_calls[0].function -%}"
        "{{- ' to=functions.' ~ f.name ~ '<|channel|>commentary json<|message|>' -}}"
        "{{- f.arguments | tojson ~ '<|call|>' -}}"
        "{%- else -%}{{- '<|channel|>final<|message|>' ~ m.content ~ '<|end|>' -}}{%- endif -%}",
        "{%- for tool in tools or [] -%}"
        "{{- '// ' + tool.function.description + '\\ntype ' + tool.function.name -}}"
        "{%- endfor -%}",
    ),
    "kimi_k3": _template(
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>',
        "{{- m.reasoning_content ~ '<|close|>think<|sep|><|open|>response<|sep|>' -}}"
        "{{- m.content ~ '<|close|>response<|sep|>' -}}"
        "{%- if m.tool_calls -%}{{- '<|open|>tools<|sep|>' -}}"
        + _EACH
        + "{{- '<|open|>call tool=\"' ~ f.name ~ '\" index=\"' ~ loop.index ~ '\"<|sep|>' -}}"
        + "{%- if f.arguments is string -%}{{- '<|open|>json type=\"object\"<|sep|>' -}}"
        "{{- f.arguments ~ '<|close|>json<|sep|>' -}}{%- else -%}"
        + _ARGUMENTS
        + "{{- '<|open|>argument key=\"' ~ key ~ '\" type=\"' -}}"
        "{%- if value is string -%}string{%- elif value is boolean -%}boolean"
        "{%- elif value is none -%}null{%- elif value is number -%}number"
        "{%- elif value is mapping -%}object{%- else -%}array{%- endif -%}"
        "{{- '\"<|sep|>' ~ "
        + _JSON
        + " ~ '<|close|>argument<|sep|>' -}}"
        + _END
        + "{%- endif -%}{{- '<|close|>call<|sep|>' -}}"
        + _END
        + "{{- '<|close|>tools<|sep|>' -}}{%- endif -%}{{- '<|close|>message<|sep|>' -}}",
        _TOOLS,
    ),
    "kimi_k2": _template(
        "<|im_assistant|>assistant<|im_middle|><think>",
        _THOUGHTS
        + "{{- m.content -}}{%- if m.tool_calls -%}{{- '<|tool_calls_section_begin|>' -}}"
        + _EACH
        + "{{- '<|tool_call_begin|>' ~ call.id ~ '<|tool_call_argument_begin|>' -}}"
        "{{- f.arguments if f.arguments is string else f.arguments | tojson -}}"
        "{{- '<|tool_call_end|>' -}}" + _END + "{{- '<|tool_calls_section_end|>' -}}{%- endif -%}",
        _TOOLS,
    ),
}
