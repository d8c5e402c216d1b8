"""The sandbox for model-written programs, the judge of their results, and functions that may hang, in processes."""
