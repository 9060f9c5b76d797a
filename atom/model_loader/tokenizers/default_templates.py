"""Chat templates of models that come without one, since their own code renders their chats."""

from __future__ import annotations

from collections.abc import Mapping

# XTML: tags of special tokens and text. Options of the whole chat stand first, those of the answer
# last. Results of tools follow the calls in their order, by the ids of these, or else by place.
# Source: Kimi-K3's report, appendix F, and renderings of its `encoding_k3.py` by others.
_KIMI_K3 = r"""
{%- macro attribute(name, value) -%}
{{- ' ' ~ name ~ '="' ~ (value | string | replace('&', '&amp;') | replace('"', '&quot;')) ~ '"' -}}
{%- endmacro -%}
{%- macro begin(role, name=none) -%}
{{- '<|open|>message' ~ attribute('role', role) -}}
{%- if name -%}{{- attribute('name', name) -}}{%- endif -%}
{{- '<|sep|>' -}}
{%- endmacro -%}
{%- macro tell(kind, text) -%}
{{- '<|open|>message role="system" type="' ~ kind ~ '"<|sep|>' ~ text -}}
{{- '<|close|>message<|sep|><|end_of_msg|>' -}}
{%- endmacro -%}
{%- macro kind_of(value) -%}
{%- if value is string -%}string{%- elif value is boolean -%}boolean{%- elif value is none -%}null
{%- elif value is number -%}number{%- elif value is mapping -%}object{%- else -%}array{%- endif -%}
{%- endmacro -%}
{%- set end = '<|close|>message<|sep|><|end_of_msg|>' -%}
{%- set asked = reasoning_effort if reasoning_effort is defined else none -%}
{%- set thinks = thinking if thinking is defined
    else enable_thinking if enable_thinking is defined else asked != 'none' -%}
{%- if tools -%}
{{- tell('tool-declare', '# Tools\nHere are the available tools, described in JSONSchema.\n\n'
    '```json\n' ~ (tools | tojson(separators=(',', ':'), sort_keys=true)) ~ '\n```') -}}
{%- endif -%}
{%- if thinks -%}
{%- set effort = thinking_effort if thinking_effort is defined and thinking_effort
    else asked if asked in ('low', 'high', 'max') else 'max' -%}
{%- if effort not in ('low', 'high', 'max') -%}
{{- raise_exception('thinking_effort is ' ~ effort ~ '; it can be low, high or max') -}}
{%- endif -%}
{{- tell('thinking-effort', '`thinking_effort` guides on how much to think in your thinking '
    'channel (not including the response channel), supported values include `low`, `medium`, '
    '`high`, and `max`.\nNow the system is invoked with `thinking_effort=' ~ effort ~ '`.') -}}
{%- endif -%}
{%- set state = namespace(calls=[], results=[], place=0) -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{- begin('assistant', m.name) -}}
{%- if thinks -%}
{{- '<|open|>think<|sep|>' -}}
{%- if m.reasoning_content and m.reasoning_content | trim -%}
{{- m.reasoning_content -}}
{%- endif -%}
{{- '<|close|>think<|sep|>' -}}
{%- endif -%}
{{- '<|open|>response<|sep|>' ~ (m.content or '') ~ '<|close|>response<|sep|>' -}}
{%- if m.tool_calls -%}
{{- '<|open|>tools<|sep|>' -}}
{%- for call in m.tool_calls -%}
{%- set f = call.function -%}
{{- '<|open|>call' ~ attribute('tool', f.name) ~ attribute('index', loop.index) ~ '<|sep|>' -}}
{%- if f.arguments is string -%}
{{- '<|open|>json type="object"<|sep|>' ~ f.arguments ~ '<|close|>json<|sep|>' -}}
{%- else -%}
{%- for key, value in (f.arguments or {}).items() -%}
{{- '<|open|>argument' ~ attribute('key', key) ~ attribute('type', kind_of(value)) ~ '<|sep|>' -}}
{{- (value if value is string else value | tojson) ~ '<|close|>argument<|sep|>' -}}
{%- endfor -%}
{%- endif -%}
{{- '<|close|>call<|sep|>' -}}
{%- endfor -%}
{{- '<|close|>tools<|sep|>' -}}
{%- endif -%}
{{- end -}}
{%- set state.calls = m.tool_calls or [] -%}
{%- set state.results = [] -%}
{%- elif m.role == 'tool' -%}
{%- set state.results = state.results + [m] -%}
{%- if loop.last or messages[loop.index].role != 'tool' -%}
{%- set results = state.results -%}
{%- if results | length > state.calls | length -%}
{{- raise_exception('there are more results of tools than calls before them') -}}
{%- endif -%}
{%- set ids = state.calls | map(attribute='id') | list -%}
{%- for call in state.calls -%}
{%- set place = loop.index -%}
{%- for r in results -%}
{%- set id = r.tool_call_id if r.tool_call_id is defined else none -%}
{%- set named = id if id in ids else none -%}
{%- if (named == call.id if named is not none else loop.index == place) -%}
{{- '<|open|>message role="tool"' ~ attribute('tool', call.function.name) -}}
{{- attribute('index', place) ~ '<|sep|>' ~ (r.content or '') ~ end -}}
{%- endif -%}
{%- endfor -%}
{%- endfor -%}
{%- endif -%}
{%- else -%}
{{- begin(m.role, m.name) ~ (m.content or '') ~ end -}}
{%- endif -%}
{%- endfor -%}
{%- if tool_choice is defined and tool_choice == 'required' -%}
{{- tell('tool-choice', 'The system is invoked with `tool_choice=required`.\n'
    'You MUST call tools in the next message.') -}}
{%- elif tool_choice is defined and tool_choice == 'none' -%}
{{- tell('tool-choice', 'The system is invoked with `tool_choice=none`.\n'
    'You MUST NOT call any tools in the next message.') -}}
{%- endif -%}
{%- if add_generation_prompt -%}
{{- begin('assistant') ~ ('<|open|>think<|sep|>' if thinks else '<|open|>response<|sep|>') -}}
{%- endif -%}
"""

# By the type of the model.
DEFAULT_TEMPLATES: Mapping[str, str] = {"kimi_k3": _KIMI_K3.strip("\n")}
