"""Nested configs by dotted path."""

from typing import Any


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of a nested config by dotted path; an empty section is a leaf."""
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    parts = (flat(inner, f"{prefix}.{name}" if prefix else str(name)) for name, inner in value.items())
    return {path: leaf for part in parts for path, leaf in part.items()}
