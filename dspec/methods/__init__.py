"""Training methods, one file each: a batch in, a loss out."""
