"""The cache: plans are the same with and without it, and nothing that happens to it is an error."""

import dataclasses
import json
import multiprocessing
import os
import random
import sqlite3
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import fuseplan
from costmodel.calibrate import described_cpu
from costmodel.devices import TEST_DEVICE, get_device
from fuseplan import Constraints
from fuseplan.cli import app
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.plan.constraints import Apart, Resolved
from fuseplan.plan.fusion_plan import Case
from fuseplan.plan.notes import NoteKind, note, worded
from fuseplan.plan.options import Features
from fuseplan.planners import Budget, get_planner
from fuseplan.schedule.pricing import PriceBook
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.schedule.structure import Signatures
from fuseplan.search import cache, cache_sqlite
from fuseplan.search import component_cache as remembered
from fuseplan.search.cache import Entry, SolutionCache, using_cache
from fuseplan.search.cache_sqlite import Disk
from fuseplan.search.grouping import decompose
from fuseplan.search.must_fuse import plan_constrained
from fuseplan.support.work import Limit
from fuseplan.workloads import get_workload
from tests.helpers.cache_process import chain, work
from tests.helpers.small_graphs import Bytes, graph, graphs
from tests.planners.test_planners import SOLVE, layers, programs

pytestmark = pytest.mark.one_python

CPU = described_cpu()


class Known(Bytes):
    """``Bytes`` that says what its prices follow from."""

    def cache_key(self, nodes, signatures):
        return f"{self.max_nodes} {self.max_made} {self.foresees}\n{signatures.text(nodes)}"


def plain(plan):
    """Without how it was found."""
    return dataclasses.replace(plan, stats=dataclasses.replace(plan.stats, seconds=(), remembered=0))


def norm(x, scale, w):
    normed = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale
    return jax.nn.silu(normed @ w)


def norm_plan(rows=128, device="h200", **options):
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((rows, 256), (256,), (256, 384))]
    return fuseplan.make_plan(norm, device=device, **options)(*shapes)


def keys_of(g, pricing=None, **budget):
    """The keys of a graph's components of several operations."""
    parts = decompose(g, PriceBook(g, pricing or Scheduler(g, TEST_DEVICE)))
    found = (
        remembered.solution_key(space, "solver", Budget(**budget), None)
        for space in parts.spaces
        if space.n > 1
    )
    return list(found)


WORKLOADS = ("cross_entropy_grad", "adam_update", "causal_attention_grad")


@pytest.mark.parametrize("device", [get_device("h200"), get_device("tpu_v5e"), CPU], ids=lambda d: d.name)
def test_a_remembered_plan_is_the_plan(device):
    shared = SolutionCache()
    for name in WORKLOADS[device is CPU :]:
        f, args = get_workload(name).build("float32", small=device is not CPU)
        plan = fuseplan.make_plan(f, device=device)
        with using_cache(SolutionCache()):
            first, again = plan(*args), plan(*args)
        with using_cache(shared):  # which knows of other workloads
            third = plan(*args)
        assert first.stats.remembered < again.stats.remembered
        # The program with a peer's copies is planned after the one without, and has components of it. So has
        # an attention's as traced on a CPU, which is planned after that with products exchanged.
        assert first.stats.remembered == 0 or first.graph.origins or device is CPU
        assert plain(first) == plain(again) == plain(third)
        assert first.status == "OPTIMAL"


SHARED = SolutionCache(max_entries=300)


def both(plan):
    """Plan without a cache, with one of many plans, and once more with that."""
    with using_cache(SolutionCache()):
        fresh = plan()
    with using_cache(SHARED):
        return fresh, plan(), plan()


@settings(max_examples=60)
@given(programs(), st.sampled_from([1, 4, 20_000]))
def test_random_programs_are_planned_the_same(g, max_groups):
    budget = Budget(max_groups=max_groups)
    fresh, second, third = both(lambda: SOLVE(g, Scheduler(g, TEST_DEVICE), budget))
    assert plain(fresh) == plain(second) == plain(third)
    assert third.stats.remembered == len(keys_of(g))


@settings(max_examples=80)
@given(graphs(), st.sampled_from([99, 3]), st.sampled_from([99, 2]), st.booleans())
def test_graphs_whose_groups_wait_for_each_other_are_planned_the_same(g, max_nodes, max_made, foresees):
    fresh, *others = both(lambda: SOLVE(g, Known(g, max_nodes, max_made, foresees=foresees), Budget()))
    assert all(plain(fresh) == plain(other) for other in others)


def test_what_is_solved_jointly_is_the_same():
    # The smallest graph whose best groups wait for each other.
    g = graph("eeooee", [[], [], [0], [1], [0, 3], [1, 2]])
    with using_cache(SolutionCache()):
        first, again = (SOLVE(g, Known(g), Budget()) for _ in range(2))
    assert plain(first) == plain(again)
    assert again.stats.remembered == 0  # their columns are needed, and found anew


@settings(max_examples=60)
@given(programs(), st.data())
def test_constraints_are_obeyed_with_a_cache_too(g, data):
    nodes = st.sets(st.integers(0, len(g.nodes) - 1), min_size=1, max_size=3).map(lambda s: tuple(sorted(s)))
    apart = data.draw(st.lists(st.tuples(nodes, st.none() | nodes), max_size=2))
    limits = Resolved(
        tuple(Apart(f"never_fuse {a} {b}", a, b) for a, b in apart),
        max_group_size=data.draw(st.sampled_from([None, None, 2])),
        max_kernel_args=data.draw(st.sampled_from([None, None, 3])),
    )

    def plan():
        return plan_constrained(limits, get_planner("solver"), g, Scheduler(g, TEST_DEVICE), Budget())

    fresh, *others = both(plan)
    assert all(plain(fresh) == plain(other) for other in others)


def test_a_change_of_one_part_leaves_the_others_remembered():
    def f(x, y):
        return jax.nn.softmax(x), jax.nn.gelu(y)

    def shapes(rows):
        return jax.ShapeDtypeStruct((rows, 256), "float32"), jax.ShapeDtypeStruct((64, 64), "float32")

    plan = fuseplan.make_plan(f, device="h200")
    first = plan(*shapes(64))
    assert first.stats.distinct_components == 2
    assert plan(*shapes(128)).stats.remembered == 1
    apart = fuseplan.make_plan(f, device="h200", constraints=Constraints(never_fuse=[("exp", "div")]))
    assert apart(*shapes(64)).stats.remembered == 1
    assert "; 2 of 2 parts remembered" in " ".join(plan(*shapes(64)).summary().split())
    assert "remembered" not in first.summary()


def test_the_key_is_that_of_the_problem_wherever_it_stands():
    assert keys_of(chain()) == keys_of(chain(before=3)) == keys_of(chain())
    renamed = dataclasses.replace(chain(), nodes=tuple(
        dataclasses.replace(n, source="elsewhere.py:7 (g)") for n in chain().nodes
    ))  # fmt: skip
    assert keys_of(renamed) == keys_of(chain())


def test_what_matters_changes_the_key(monkeypatch):
    g = chain()
    (key,) = keys_of(g)
    others = {
        "shape": keys_of(chain(rows=128)),
        "operation": keys_of(chain(op="tanh")),
        "dtype": keys_of(chain(dtype="bfloat16")),
        "needed outside": keys_of(chain(result=True)),
        "max_groups": keys_of(g, max_groups=7),
    }
    parts = decompose(g, PriceBook(g, Scheduler(g, TEST_DEVICE)))
    others["planner"] = [remembered.solution_key(parts.spaces[0], "other", Budget(), None)]
    # With all rates that may be absent, so that one more or less is in the range of each field.
    rates = ("private_cache_bytes_per_s", "fresh_bytes_per_s", "reduction_per_s")
    complete = dataclasses.replace(TEST_DEVICE, **dict.fromkeys(rates, 10**12))
    others["rates"] = keys_of(g, Scheduler(g, complete))
    for field in dataclasses.fields(TEST_DEVICE):
        if field.type == "int":
            device = dataclasses.replace(complete, **{field.name: getattr(complete, field.name) + 1})
            others[field.name] = keys_of(g, Scheduler(g, device))
    others["feature"] = keys_of(g, Scheduler(g, TEST_DEVICE, features=Features(prologues=False)))

    class Other(Scheduler):
        pass

    others["scheduler"] = keys_of(g, Other(g, TEST_DEVICE))
    for name, value in (
        ("signature", 5),
        ("temporaries", 1),
        ("backends", ("triton", "xla")),
        ("bitcast", True),
    ):
        changed = (dataclasses.replace(g.nodes[0], **{name: value}), *g.nodes[1:])
        others[name] = keys_of(dataclasses.replace(g, nodes=changed))
    monkeypatch.setattr("fuseplan.schedule.structure.possible_prologues", lambda g: (True,) * len(g.nodes))
    others["prologues"] = keys_of(g)
    assert [name for name, found in others.items() if key in found] == []
    found = [k for keys in others.values() for k in keys]
    assert len(found) == len(set(found)) == len(others)


def test_what_constraints_say_of_a_component_changes_its_key():
    g = chain()
    asked = []

    def spy(atoms_graph, pricing, budget):
        asked.append(keys_of(atoms_graph, pricing))
        return SOLVE(atoms_graph, pricing, budget)

    given = [
        Resolved(),
        Resolved(max_group_size=2),
        Resolved(max_group_size=3),
        Resolved(max_kernel_args=2),
        Resolved((Apart("one", (0,), (1,)),)),
        Resolved((Apart("one", (1,), (0,)),)),
        Resolved((Apart("another", (0,), (1,)),)),
        Resolved((Apart("one", (0,), None),)),
        Resolved((Apart("one", (0,), (1,)), Apart("two", (1,), (3,)))),
    ]
    for limits in given:
        plan_constrained(limits, spy, g, Scheduler(g, TEST_DEVICE), Budget())
    assert asked[0] == keys_of(g)
    found = [key for keys in asked for key in keys]
    assert len(set(found)) == len(found) > 5


def test_masks_from_outside_of_a_component_are_part_of_its_key():
    def cache_keys(window):
        def f(x):
            rows, columns = (jax.lax.broadcasted_iota("int32", x.shape, d) for d in (0, 1))
            return jnp.where(rows >= columns + window, jnp.exp(x), 0.0).sum(1)

        lowered = lower(trace(f, jax.ShapeDtypeStruct((64, 64), "float32")))
        graph = lowered.graph
        inside = tuple(n.id for n in graph.nodes if n.op in ("exp", "select_n", "reduce_sum"))
        assert len(inside) == 3
        signatures = Signatures(graph)
        return [
            s.cache_key(inside, signatures) for s in (Scheduler(graph, CPU, lowered), Scheduler(graph, CPU))
        ]

    (masked, blind), (other, same) = cache_keys(0), cache_keys(5)
    assert masked != other
    assert blind == same
    assert masked != blind


def test_a_pricing_that_does_not_say_what_it_follows_from_is_not_remembered():
    g = layers(2)
    with using_cache(SolutionCache()) as m:
        assert SOLVE(g, Bytes(g), Budget()).stats.remembered == 0
        assert SOLVE(g, Bytes(g), Budget()).stats.remembered == 0
        assert len(m) == 0


def test_what_the_deadline_ended_is_not_remembered(monkeypatch):
    g = chain()
    with using_cache(SolutionCache()) as m:
        SOLVE(g, Scheduler(g, TEST_DEVICE), Budget(deadline_s=0))
        SOLVE(g, Scheduler(g, TEST_DEVICE), Budget(deadline_s=1e-9))
        assert len(m) == 0
        best = SOLVE(g, Scheduler(g, TEST_DEVICE), Budget())
        assert len(m) == 1
        # What is known is known in no time, but heuristics that were asked for are what is given.
        assert SOLVE(g, Scheduler(g, TEST_DEVICE), Budget(deadline_s=1e-9)).status == best.status == "OPTIMAL"
        assert SOLVE(g, Scheduler(g, TEST_DEVICE), Budget(deadline_s=0)).stats.remembered == 0


@pytest.fixture(params=["memory", "disk"])
def disk_or_memory(request, tmp_path):
    """What gives a cache that has all that the one before was given."""
    shared = SolutionCache()
    path = tmp_path / "cache.sqlite3"
    return (lambda: shared) if request.param == "memory" else lambda: SolutionCache(Disk(path, cache.note))


def test_that_the_heuristics_lose_is_remembered(disk_or_memory, monkeypatch):
    f, args = get_workload("lstm_cell").build(small=True)
    with using_cache(disk_or_memory()):
        first = fuseplan.make_plan(f, device="h200")(*args)
    assert (first.status, first.stats.certified) == ("OPTIMAL", "")

    def fail(*_):
        raise AssertionError("a heuristic is asked again")

    monkeypatch.setattr("fuseplan.search.heuristic_plans.heuristic_groups", fail)
    with using_cache(disk_or_memory()):
        assert plain(fuseplan.make_plan(f, device="h200")(*args)) == plain(first)


def test_what_a_missing_solver_ended_is_not_remembered(monkeypatch):
    def missing(*args):
        raise ImportError("no module named ortools")

    g = chain()
    monkeypatch.setattr("fuseplan.search.column_pricing.Relaxation", missing)
    monkeypatch.setattr(Scheduler, "floor", lambda self, nodes: 0)
    with using_cache(SolutionCache()) as m, pytest.warns(fuseplan.FuseplanWarning):
        SOLVE(g, Scheduler(g, TEST_DEVICE), Budget())
    assert len(m) == 0


def test_a_note_names_the_operation_of_the_graph_at_hand(monkeypatch):
    monkeypatch.setattr(Scheduler, "floor", lambda self, nodes: 0)
    monkeypatch.setattr(Scheduler, "partial_floor", lambda self, members: None)  # two groups are no proof
    with using_cache(SolutionCache()) as m:
        for before, expected in ((0, "(n0)"), (3, "(n3)")):
            g = chain(before=before)
            plan = SOLVE(g, Scheduler(g, TEST_DEVICE), Budget(max_groups=2))
            assert (plan.status, plan.stats.remembered) == ("FEASIBLE", before and 1)
            assert [expected in note for note in worded(plan.notes, g)] == [True]
        assert len(m) == 1


def test_a_solution_does_not_depend_on_a_limit_that_was_far_away():
    little = Entry((1,), (1, 1, 1), 1, True, work=7, left=96)
    assert little.may_be_found_with(96)
    assert little.may_be_found_with(10_000)
    assert not little.may_be_found_with(95)
    much = Entry((1,), (1, 1, 1), 1, True, work=40, left=64)
    assert much.may_be_found_with(64)
    assert not much.may_be_found_with(10_000)
    assert Entry.from_json(much.to_json()) == much


def test_a_solution_that_a_limit_cut_short_is_found_with_that_limit_only():
    cut = note(NoteKind.SEARCH_CUT, limit=Limit.WORK)
    nothing_left = Entry((1,), (1, 1, 1), 0, False, note=cut, work=0, left=0)
    assert nothing_left.may_be_found_with(0)
    assert not nothing_left.may_be_found_with(10_000)


def test_an_entry_with_cases_is_read_as_it_was_written():
    cases = (Case(((0, 1),), (), (3, 0)), Case((), ((0, 1),), (1, 2)))
    entry = Entry((1, 2), (3, 1, 2), 3, True, cases=cases)
    assert Entry.from_json(entry.to_json()) == entry


def test_the_least_recently_used_go_first():
    m = SolutionCache(max_entries=2)
    entries = {bytes([k]): Entry((1,), (1, 1, 1), 1, True) for k in range(3)}
    for k in (0, 1):
        m.keep({bytes([k]): entries[bytes([k])]})
    m.recall([b"\0"])
    m.keep({b"\2": entries[b"\2"]})
    assert set(m.recall(entries)) == {b"\0", b"\2"}
    assert len(m) == 2


def test_no_more_than_so_many_are_kept_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_sqlite, "MAX_ENTRIES", 20)
    disk = Disk(tmp_path / "cache")
    for k in range(30):
        disk.write({bytes([k]): "{}"})
    assert 10 <= disk.count() <= 20


# On disk.


@pytest.fixture
def disk(tmp_path):
    """A file with one solution, and what was said about it since."""
    said = []
    made = Disk(tmp_path / "folder" / "cache.sqlite3", said.append)
    made.said = said
    planned(made)
    assert made.count() == 1
    assert said == []
    return made


def planned(disk):
    """Plan in what might be another process: nothing is in memory."""
    g = chain()
    with using_cache(SolutionCache(disk)):
        return SOLVE(g, Scheduler(g, TEST_DEVICE), Budget())


def assert_recovers(disk):
    """Planning is not disturbed, and the next planning finds what this one has written."""
    with using_cache(SolutionCache()):
        expected = plain(planned(None))
    damaged = planned(disk)
    assert (plain(damaged), damaged.stats.remembered) == (expected, 0)
    after = planned(disk)
    assert (plain(after), after.stats.remembered) == (expected, 1)


def rewrite(disk, change):
    """Change the entry, with a checksum that fits."""
    with sqlite3.connect(disk.path) as db:
        ((key, text),) = db.execute("SELECT key, text FROM solved").fetchall()
        new = change(json.loads(text))
        data = (new if isinstance(new, str) else json.dumps(new)).encode()
        db.execute("UPDATE solved SET text = ?, checksum = ?", (data, cache_sqlite.checksum_of(key, data)))
    db.close()


def execute(disk, statement):
    db = sqlite3.connect(disk.path, isolation_level=None)
    db.execute(statement)
    db.close()


def test_a_solution_is_found_on_disk(disk):
    assert planned(disk).stats.remembered == 1
    assert disk.size_bytes() > 0
    assert disk.clear()
    assert (disk.count(), disk.size_bytes()) == (0, 0)
    assert planned(disk).stats.remembered == 0


@pytest.mark.parametrize("keep", [0, 1, 50, 100, 2000, 5000, 8191])
def test_a_truncated_file_is_begun_anew(disk, keep):
    disk.path.write_bytes(disk.path.read_bytes()[:keep])
    assert_recovers(disk)


@pytest.mark.parametrize("start", [0, 16, 100, 4096])
def test_garbage_is_set_aside(disk, start):
    data = disk.path.read_bytes()
    disk.path.write_bytes(data[:start] + b"\xa5" * (len(data) - start))
    assert_recovers(disk)
    assert disk.said


def test_another_layout_is_set_aside(disk):
    execute(disk, "PRAGMA user_version = 99")
    assert_recovers(disk)
    assert disk.path.with_name(disk.path.name + ".broken").exists()
    assert "layout 99" in disk.said[0]


def test_a_file_of_another_program_is_set_aside(disk):
    execute(disk, "DROP TABLE solved")
    assert_recovers(disk)


@pytest.mark.parametrize("column", ["text", "checksum", "key"])
def test_a_wrong_checksum_is_no_entry(disk, column):
    execute(disk, f"UPDATE solved SET {column} = substr({column}, 2) || x'00'")
    assert_recovers(disk)


def note_data(**changes):
    """A note of an entry, with some of its fields changed."""
    return note(NoteKind.CYCLIC, node=0, count=4).to_data() | changes


WRONG = {
    "not JSON": lambda entry: "{",
    "not an object": lambda entry: [1],
    "nothing": lambda entry: {},
    "no masks": lambda entry: entry | {"groups": [1]},
    "no mask": lambda entry: entry | {"groups": ["zz"]},
    "an incomplete cover": lambda entry: entry | {"groups": entry["groups"][1:]},
    "twice": lambda entry: entry | {"groups": entry["groups"] * 2},
    "overlapping": lambda entry: entry | {"groups": [*entry["groups"], "1"]},
    "outside": lambda entry: entry | {"groups": [*entry["groups"], "100"]},
    "negative": lambda entry: entry | {"groups": ["-1"]},
    "empty": lambda entry: entry | {"groups": [*entry["groups"], "0"]},
    "other groups": lambda entry: entry | {"groups": ["1", "2", "4", "8"]},
    "a cycle": lambda entry: entry | {"groups": ["9", "6"]},
    "another cost": lambda entry: entry | {"objectives": [1, 2, 3]},
    "a bound above": lambda entry: entry | {"bound_ps": entry["objectives"][0] + 1},
    "a bound below": lambda entry: entry | {"bound_ps": 0},
    "a number for truth": lambda entry: entry | {"optimal": 1},
    "duals of others": lambda entry: entry | {"duals": [1]},
    "a float": lambda entry: entry | {"duals": [0.5] * 4},
    "a text for a note": lambda entry: entry | {"note": "late"},
    "a note of no kind": lambda entry: entry | {"note": note_data(kind="OLD")},
    "a note without its figure": lambda entry: entry | {"note": note_data(figures={})},
    "a note of no whole node": lambda entry: entry | {"note": note_data(node=0.5)},
    "a note elsewhere": lambda entry: entry | {"note": note_data(node=100)},
    "refusals elsewhere": lambda entry: entry | {"refusals": [["100", "a", "b"]]},
    "refusals without reason": lambda entry: entry | {"refusals": [["1", "a"]]},
    "no candidates": lambda entry: entry | {"candidates": 0},
    "a case of others": lambda entry: entry | {"cases": [[[], [], [1]]]},
    "a case of a node elsewhere": lambda entry: entry | {"cases": [[[[0, 100]], [], [0] * 4]]},
    "a case without prices": lambda entry: entry | {"cases": [[[], []]]},
    "a case of a pair of three": lambda entry: entry | {"cases": [[[[0, 1, 2]], [], [0] * 4]]},
    "deep": lambda entry: "[" * 100_000,
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_solution_is_replaced(disk, name):
    rewrite(disk, WRONG[name])
    assert_recovers(disk)


def test_another_program_finds_nothing(disk, monkeypatch):
    monkeypatch.setattr(cache, "program_digest", lambda: b"other sources")
    assert planned(disk).stats.remembered == 0
    assert disk.count() == 2


def test_without_sources_nothing_is_read_or_written(disk, monkeypatch):
    monkeypatch.setattr(cache, "program_digest", cache.program_digest.__wrapped__)
    for nowhere in (None, type("Spec", (), {"submodule_search_locations": ["/nowhere"]})):
        monkeypatch.setattr(cache.importlib.util, "find_spec", lambda name, spec=nowhere: spec)
        assert cache.program_digest() is None
        assert planned(disk).stats.remembered == 0
    assert disk.count() == 1


def test_any_flipped_byte_is_survived(disk):
    data = disk.path.read_bytes()
    rng = random.Random(0)
    with using_cache(SolutionCache()):
        expected = plain(planned(None))
    for _ in range(25):
        damaged = bytearray(data)
        for _ in range(rng.choice([1, 4, 64])):
            # Most of the pages are empty: aim at what is not.
            damaged[rng.choice([k for k, byte in enumerate(data) if byte])] = rng.randrange(256)
        disk.clear()
        disk.path.write_bytes(damaged)
        assert plain(planned(disk)) == expected
        assert plain(planned(disk)) == expected


def test_the_digest_of_the_program_is_quick_and_stable():
    cache.program_digest.cache_clear()
    started = time.process_time()
    first = cache.program_digest()
    assert time.process_time() - started < 0.2
    cache.program_digest.cache_clear()
    assert cache.program_digest() == first


def test_a_locked_file_costs_only_the_entry(disk, monkeypatch):
    monkeypatch.setattr(cache_sqlite, "WAIT_S", 0.01)
    db = sqlite3.connect(disk.path, isolation_level=None)
    db.execute("PRAGMA locking_mode = EXCLUSIVE")
    db.execute("BEGIN EXCLUSIVE")
    try:
        assert planned(disk).status == "OPTIMAL"
        disk.write({b"key": "text"})
        assert disk.count() in (0, 1)
        assert any("locked" in text for text in disk.said)
    finally:
        db.close()
    assert planned(disk).stats.remembered == 1


def test_a_folder_that_cannot_be_written_costs_only_the_entry(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder" / "cache").mkdir(parents=True)
    for path in (tmp_path / "file" / "cache", tmp_path / "folder" / "cache", tmp_path / "a\0b"):
        said = []
        disk = Disk(path, said.append)
        assert planned(disk).status == "OPTIMAL"
        assert said
        assert (disk.count(), disk.read([b"key"])) == (0, {})
    monkeypatch.setattr(cache_sqlite, "_create", full)
    disk = Disk(tmp_path / "new")
    assert planned(disk).status == planned(disk).status == "OPTIMAL"


def full(db):
    raise sqlite3.OperationalError("database or disk is full")


def test_a_read_only_file_is_read(disk):
    disk.path.chmod(0o400)
    disk.path.parent.chmod(0o500)
    try:
        plan = planned(disk)
        assert plan.status == "OPTIMAL"
        if os.geteuid() == 0:  # who may write all the same
            assert plan.stats.remembered == 1
    finally:
        disk.path.parent.chmod(0o700)


def test_two_processes_at_once(tmp_path):
    path, count = tmp_path / "cache", 30
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=(path, own, count)) for own in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    disk = Disk(path)
    assert disk.count() == 3 * count + 1
    # Keys are the same in every process.
    assert planned(disk).stats.remembered == 1


def test_a_file_that_another_process_is_creating_is_not_damaged(tmp_path, monkeypatch):
    """The other one creates the table while this one asks what the file holds."""
    path, said, statements = tmp_path / "cache", [], []
    connect = sqlite3.connect

    def interrupted(*args, **kwargs):
        db = connect(*args, **kwargs)

        def tell(statement):
            statements.append(statement)
            if len(statements) == 2:
                monkeypatch.undo()
                Disk(path, said.append).write({b"theirs": "1"})

        db.set_trace_callback(tell)
        return db

    monkeypatch.setattr(sqlite3, "connect", interrupted)
    Disk(path, said.append).write({b"ours": "2"})
    assert len(statements) > 2
    assert Disk(path, said.append).read([b"ours", b"theirs"]) == {b"ours": "2", b"theirs": "1"}
    assert not said


# Settings and command.


@pytest.fixture
def by_environment(tmp_path, monkeypatch):
    """The cache that the environment asks for, in a cache folder of its own."""
    cache._memory.clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with using_cache(None):
        yield monkeypatch
    cache._memory.clear()


def test_on_disk_only_what_is_asked_for(by_environment, tmp_path):
    assert norm_plan().stats.remembered == 0
    assert norm_plan().stats.remembered == 1
    assert not (tmp_path / "cache").exists()
    by_environment.setenv("FUSEPLAN_CACHE", "0")
    assert norm_plan().stats.remembered == 0
    assert cache.current() is None
    for setting, folder in (
        ("1", tmp_path / "cache" / "fuseplan"),
        (str(tmp_path / "own"), tmp_path / "own"),
    ):
        by_environment.setenv("FUSEPLAN_CACHE", setting)
        cache._memory.clear()
        assert norm_plan().stats.remembered == 0
        assert [path.name for path in folder.iterdir()] == [f"solutions-{cache.SCHEMA}.sqlite3"]
        cache._memory.clear()
        assert norm_plan().stats.remembered == 1


def test_it_says_why_it_is_of_no_use_only_when_asked(by_environment, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    by_environment.setenv("FUSEPLAN_CACHE", str(tmp_path / "file"))
    norm_plan()
    assert capsys.readouterr().err == ""
    by_environment.setenv("FUSEPLAN_DEBUG", "1")
    norm_plan(rows=64)
    assert "cache: " in capsys.readouterr().err


def test_the_command_shows_and_clears(by_environment, tmp_path):
    def run(*args):
        result = CliRunner().invoke(app, ["cache", *args])
        assert result.exit_code == 0, result.output
        return result.stdout

    assert "no: FUSEPLAN_CACHE=1" in run()
    by_environment.setenv("FUSEPLAN_CACHE", "1")
    norm_plan()
    shown = json.loads(run("--json"))
    assert shown["used"] is True
    assert shown["entries"] == 1
    assert shown["size_bytes"] > 0
    assert Path(shown["file"]).parent == tmp_path / "cache" / "fuseplan"
    assert "entries  1, " in run()
    assert "entries  0, 0 B" in run("--clear")
    assert not Path(shown["file"]).exists()
