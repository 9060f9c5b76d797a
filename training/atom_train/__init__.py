"""Training of draft models: the programs behind `python -m atom_train`.

`synthesize` generates the target's answers to prompts; `train` trains a draft on them; `export`
writes the draft in the public checkpoint format; `evaluate` measures it in the engine.
"""

__version__ = "0.1.0"
