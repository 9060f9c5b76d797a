"""What weights can be quantised to when they are loaded."""

ONLINE_QUANTIZATIONS = ("fp8", "int8", "int4", "mxfp4")
QUANTIZATIONS = ("auto", "none", *ONLINE_QUANTIZATIONS)
