"""The inside of the sandbox: what runs in the contained process itself, in an isolated Python without site-packages.

Nothing in this package (nor ``eval/__init__``) imports more than the standard library. The outside, which starts these
processes, is ``sandbox.py`` and ``judge.py``.
"""
