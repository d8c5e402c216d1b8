"""Decoders behind one protocol, one file per algorithm."""
