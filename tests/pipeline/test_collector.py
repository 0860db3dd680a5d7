"""The cycle collector rests while a plan is made, and is afterwards as it was."""

import gc

import pytest

from fuseplan.support.gc_pause import collector_at_rest


def test_the_collector_is_afterwards_as_it_was():
    @collector_at_rest()
    def inner():
        assert not gc.isenabled()

    @collector_at_rest()
    def failing():
        inner()
        assert not gc.isenabled()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert gc.isenabled()
    gc.disable()
    try:
        inner()
        assert not gc.isenabled()
    finally:
        gc.enable()
