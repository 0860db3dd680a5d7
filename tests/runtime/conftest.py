"""Fixtures of the tests of calls."""

import jax
import pytest


@pytest.fixture
def compilations():
    """Counts the programs that the backend compiles."""
    seen = []

    def listen(event, *_, **__):
        if "backend_compile" in event:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)
