"""Training methods, one file each, and drafter.py for what two share: a batch in, a loss out."""
