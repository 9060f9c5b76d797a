"""GLM 4.7, 4.7-Flash and 5: the tags of GLM 4.5 without line feeds between them.

Source: the checkpoints' chat templates. What reads GLM 4.5's calls reads these.
"""

from __future__ import annotations

from atom.entrypoints.parsing.calls.call_grammar import CallGrammar
from atom.entrypoints.parsing.tool_parsers.glm45 import Glm45, glm_call


class Glm47(Glm45):
    template_texts = (("<arg_key>", "</arg_key><arg_value>"),)
    model_types = ()
    grammar = CallGrammar(glm_call(""), separator="", section=None, takes_json=False)
