"""Readers of results: from rows to tables, plots and comparisons. They run no model."""
