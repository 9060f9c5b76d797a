"""Speculative decoding: proposers, lookup and draft lengths."""
