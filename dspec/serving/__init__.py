"""Serving many requests at once: what a step costs, and how much of each draft is worth verifying."""
