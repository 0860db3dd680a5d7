"""Where the seconds of a planning go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any


class Clock:
    """Wall-clock seconds by stage."""

    def __init__(self, trace_s: float = 0.0) -> None:
        self.seconds: dict[str, float] = {"trace": trace_s} if trace_s else {}

    def add(self, laps: Iterable[tuple[str, float]]) -> None:
        for stage, seconds in laps:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    def time(self, stage: str, step: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = step()
        self.add([(stage, time.perf_counter() - started)])
        return result
