"""One small file per benchmark: prompts, and a score for each answer."""
