"""Plain torch: the reference implementation, which runs everywhere."""
