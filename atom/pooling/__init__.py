"""Models that embed or score texts instead of generating: no KV cache, no decode, no drafts."""
