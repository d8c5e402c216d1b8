"""The embedded corpus: generated text, its tokenizer and scorers, so that all runs without downloads."""
