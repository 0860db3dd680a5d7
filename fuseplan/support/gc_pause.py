"""Python's cycle collector, and when it may rest."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Within it, or in a function it decorates, no cycles are looked for.

    A planner makes hundreds of thousands of small objects that stay, and the collector would
    walk all that are alive, JAX's too, whenever there are a quarter more: 0.13 s a time, and more
    than half of what lowering a GPT-2 of 24 layers takes. When it starts again, it takes what was made
    meanwhile for old, or it would walk all of it at once.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # else the caller's frozen objects would thaw
                gc.freeze()
                gc.unfreeze()
            gc.enable()
