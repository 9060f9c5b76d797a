"""From images to what a family's encoder takes, as its published processor computes it."""
