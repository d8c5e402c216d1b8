"""The role that detects which layers this machine supports, by applying each one in a child that then exits."""

import json
import os
from typing import Any

from eval.sandbox.contain import kernel, landlock, launcher, seccomp


def main(payload: dict[str, Any]) -> None:
    print(json.dumps([layer for layer in ("namespaces", "landlock", "seccomp") if _works(layer, payload)]))


def _works(layer: str, payload: dict[str, Any]) -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            _apply(layer, payload)
        except BaseException:  # the child must end here, whatever happens
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def _apply(layer: str, payload: dict[str, Any]) -> None:
    if layer == "namespaces":
        launcher.enter_namespaces({**payload, "layers": ["namespaces"]})
        if os.fork() == 0:  # process 1, without which the namespace is unusable
            os._exit(0)
        os.wait()
    elif layer == "landlock":
        landlock.restrict(read=["/usr"], write=[])
    else:
        kernel.drop_privileges()
        seccomp.install(threads=True)
