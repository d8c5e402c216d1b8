"""Decoders, one file per algorithm; their common protocol is in loop.py."""
