"""Data: modules, chat format, packing and the embedded corpus."""
