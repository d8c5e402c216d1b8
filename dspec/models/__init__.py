"""Targets, drafts, their heads, caches and checkpoint formats."""
