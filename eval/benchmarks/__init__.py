"""One small file a benchmark: prompts, and a score for each answer."""
