"""The embedded corpus: seeded text, its tokenizer and its scorers, so that everything runs without downloads."""
