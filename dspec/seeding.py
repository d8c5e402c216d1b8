"""Seeds derived from the root seed."""

import hashlib


def prompt_seed(seed: int, prompt_id: str) -> int:
    """A seed for one prompt that depends on nothing but its id and the root seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{prompt_id}".encode()).digest()[:6], "big")
