"""Benchmarks and reports: every decoder on the same prompts, one table."""
