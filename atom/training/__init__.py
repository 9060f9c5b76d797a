"""Training an Eagle3 draft: the programs behind `python -m atom.training`.

`synthesize` lets the target answer prompts; `train` fits a draft to what it wrote; `export`
writes the draft in the public checkpoint format; `evaluate` measures it in the real engine.
"""
