"""The role that runs a whole program as `__main__`, with its own output and exit code."""

import sys
import types
from typing import Any


def main(payload: dict[str, Any]) -> None:
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = ["program"]
    try:
        exec(compile(payload["program"], "program", "exec"), module.__dict__)
    except Exception:
        import traceback

        traceback.print_exc()
        sys.exit(1)
