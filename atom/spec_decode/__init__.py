"""Speculative decoding: proposers and verification."""
