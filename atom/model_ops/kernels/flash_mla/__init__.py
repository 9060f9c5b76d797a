"""The adapter to DeepSeek's FlashMLA kernels, as those to aiter's are in `kernels.aiter`."""
