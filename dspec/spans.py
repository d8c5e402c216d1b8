"""Where a decoder's time goes: spans that cost next to nothing unless a Profile is active.

One Profile at a time; nested spans are recorded under paths such as "verify/attention".
"""

import time
from types import TracebackType

import torch


class Profile:
    """Sums the seconds of each span while active; synchronises the device at both ends of every span."""

    _active: "Profile | None" = None

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self.path: list[str] = []
        self._cuda = device.type == "cuda"

    def now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def __enter__(self) -> "Profile":
        Profile._active = self
        return self

    def __exit__(self, *unused: object) -> None:
        Profile._active = None


class span:  # noqa: N801  used as a statement
    """`with span("verify"): ...`"""

    __slots__ = ("name", "profile", "start")

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        self.profile = Profile._active
        if self.profile is not None:
            self.profile.path.append(self.name)
            self.start = self.profile.now()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.profile is not None:
            path = "/".join(self.profile.path)
            self.profile.seconds[path] = self.profile.seconds.get(path, 0.0) + self.profile.now() - self.start
            self.profile.path.pop()
