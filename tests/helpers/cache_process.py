"""What each of several processes does to one cache, in a file that is quickly imported."""

from __future__ import annotations

from pathlib import Path

from costmodel.devices import TEST_DEVICE
from costmodel.graph import Graph
from fuseplan.planners import Budget, get_planner
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.search import cache_sqlite
from fuseplan.search.cache import SolutionCache, using_cache
from fuseplan.search.cache_sqlite import Disk
from tests.helpers.graphs import GraphBuilder


def chain(
    rows: int = 64, op: str = "exp", dtype: str = "float32", before: int = 0, result: bool = False
) -> Graph:
    """An operation, a reduction of its rows, and their product; ``before`` others stand apart."""
    b = GraphBuilder()
    for _ in range(before):
        b.opaque(b.input((8,)), shape=(8,))
    apart = list(range(1, 2 * before, 2))
    x = b.input((rows, 128), dtype)
    y = b.elementwise(x, op=op)
    z = b.elementwise(y, b.broadcast(b.reduce(y, (1,)), (rows, 128), (0,)), op="mul")
    return b.build(*apart, z, *([y] if result else []))


def work(path: Path, own: int, count: int) -> None:
    """Write entries of its own, and some that all write; plan and remember that."""
    # On a slow disk another process's transaction can take longer than a planning waits.
    cache_sqlite.WAIT_S = 60.0
    said: list[str] = []
    disk = Disk(path, said.append)
    for k in range(count):
        disk.write({f"{own} {k}".encode(): f"{own}", f"all {k}".encode(): f"{own}"})
        read = disk.read([f"{own} {j}".encode() for j in range(k + 1)])
        assert len(read) == k + 1, (k, said)
    g = chain()
    with using_cache(SolutionCache(disk)):
        get_planner("solver")(g, Scheduler(g, TEST_DEVICE), Budget())
    assert not said, said
