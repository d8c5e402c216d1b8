"""Evaluation of speculative drafters: benchmarks, metrics and plots."""
