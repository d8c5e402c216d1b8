"""Training methods, one file each, and drafter.py for what DFlash and DSpark share: a batch in, a loss out."""
