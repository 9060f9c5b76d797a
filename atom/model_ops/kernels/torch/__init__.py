"""Plain torch: the reference that runs everywhere."""
