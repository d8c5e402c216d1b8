"""The inside of the sandbox: code that runs in the contained process, in an isolated Python without site-packages.

This package (and ``eval/__init__``) imports only the standard library. The outside, which starts these processes, is
``sandbox.py`` and ``judge.py``.
"""
