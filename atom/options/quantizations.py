"""What weights can be quantised to when they are loaded, and formats they are stored in."""

ONLINE_QUANTIZATIONS = ("fp8", "int8", "int4", "mxfp4")
QUANTIZATIONS = ("auto", "none", *ONLINE_QUANTIZATIONS)

# What other engines call the formats of checkpoints, which are told by the checkpoints here.
STORED_QUANTIZATIONS = (
    *("compressed-tensors", "awq", "awq_marlin", "gptq", "gptq_marlin", "gguf"),
    *("modelopt", "modelopt_fp8", "modelopt_fp4", "quark"),
)
