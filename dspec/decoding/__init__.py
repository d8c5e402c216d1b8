"""Decoders behind one protocol, one file an algorithm."""
