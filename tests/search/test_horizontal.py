"""Packs: small kernels that no more than a scalar ties together, as one."""

import random
import re
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import fuseplan
from costmodel.devices import TEST_DEVICE, get_device
from fuseplan import Kernel, Plan
from fuseplan.plan.notes import limit_reached
from fuseplan.plan.options import Features
from fuseplan.planners.solver import plan_groups
from fuseplan.schedule import shared_operands
from fuseplan.schedule.packs import Line, PackCapacity
from fuseplan.schedule.pricing import PriceBook
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.search.horizontal import with_packs
from fuseplan.support.errors import InvalidPlanError
from fuseplan.support.work import Limit, Work, unlimited
from fuseplan.verify.plan import check_plan
from fuseplan.verify.report import REFUTED, VERIFIED, verify_plan
from fuseplan.workloads.stress import STRESS
from tests.helpers.graphs import TPU, GraphBuilder
from tests.helpers.hub_graphs import brute_force, hub_program, planned

pytestmark = pytest.mark.one_python

DEVICES = [TEST_DEVICE, TPU, *map(get_device, ("h200", "tpu_v5e", "tpu_v4"))]


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_no_packs_of_the_pieces_are_faster(device):
    """Of 1,800 such programs, which take four minutes, none was."""
    packed = 0
    for seed in range(20):
        plan = check_plan(planned(hub_program(seed), device))
        assert plan.status == "OPTIMAL"
        if not plan.proof.packs:
            continue
        assert plan.objective_ps == brute_force(plan)
        assert verify_plan(plan).status == VERIFIED
        packed += plan.proof.bound_ps < plan.proof.bound_without_packs_ps
    assert packed > 5


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_floor_and_room_of_packs(device):
    """No pack is faster than its floor, nor does one fit for which there is no room."""
    if device.sequential_grid:
        device = replace(device, onchip_bytes=300_000)
    room_ends = 0
    for seed in range(12):
        graph, pieces, flat = untied(seed)
        scheduler = Scheduler(graph, device)
        kernels = [scheduler.in_one_tile(nodes) for nodes in pieces]
        small = [k for k, kernel in enumerate(kernels) if isinstance(kernel, Kernel)]
        line = Line(graph, device, [pieces[k] for k in small])
        room = PackCapacity(graph, device, [kernels[k].spec for k in small])
        fitted = True
        for end in range(1, len(small) + 1):
            kernel = scheduler.in_one_tile(line.nodes(0, end))
            fits = isinstance(kernel, Kernel)
            assert fitted or not fits, "what does not fit does not fit with more in it"
            assert room.holds(0, end) or not fits
            fitted, room_ends = fits, room_ends + (not room.holds(0, end))
            if fits:
                assert line.least_ps(0, end) <= kernel.cost.time_ps
                assert line.hbm_bytes(0, end) <= kernel.cost.hbm_bytes
                if flat:  # nothing is padded: the floor is what it takes
                    assert line.least_ps(0, end) == kernel.cost.time_ps
            other = scheduler.price(line.nodes(0, end)) if end > 1 else None
            if isinstance(other, Kernel):
                assert max(other.spec.grid, default=1) == 1, "a pack has one tile in any case"
                assert line.least_ps(0, end) <= other.cost.time_ps
    assert room_ends


def untied(seed):
    """Elementwise chains and sums on arrays of their own, tied by nothing."""
    rng = random.Random(seed)
    flat = rng.random() < 0.5
    b, results, chains = GraphBuilder(), [], []
    for _ in range(rng.randint(3, 24)):
        shape = rng.choice(
            [(256,), (1024,), (8, 128)] if flat else [(100,), (768,), (3000,), (300, 70), (9000,)]
        )
        chains.append(b.input(shape, rng.choice(("float32", "bfloat16"))))
    for _ in range(rng.randint(1, 4)):  # in turns, so that many are alive at once
        chains = [b.elementwise(x, op=rng.choice(("exp", "neg", "tanh"))) for x in chains]
    for x in chains:
        results.append(
            b.reduce(x, (len(b.shape(x)) - 1,)) if rng.random() < 0.5 else b.elementwise(x, op="abs")
        )
    graph = b.build(*results)
    maker = {v: node.id for node in graph.nodes for v in node.outputs}
    pieces = []
    for v in results:
        nodes = []
        while v in maker:
            nodes.append(maker[v])
            (v,) = graph.nodes[maker[v]].inputs
        pieces.append(tuple(sorted(nodes)))
    return graph, pieces, flat


def test_what_is_slow_on_one_core_may_be_free_beside_others():
    """So there is no size from which a piece could not gain: another resource is what bounds the pack."""
    b = GraphBuilder()
    arrays = [b.reduce(b.elementwise(b.input((8192,)), op="neg"), (0,)) for _ in range(30)]
    x = b.input((8192,))
    for _ in range(20):
        x = b.elementwise(x, op="tanh")
    graph = b.build(*arrays, x)
    pieces = [(2 * i, 2 * i + 1) for i in range(30)] + [tuple(range(60, 80))]
    scheduler = Scheduler(graph, TEST_DEVICE)
    slow, others = pieces[-1], tuple(n for nodes in pieces[:-1] for n in nodes)
    alone = scheduler.price(slow).cost.time_ps
    assert Line(graph, TEST_DEVICE, [slow]).busy_ps(0, 1) > 3 * alone
    assert (
        scheduler.in_one_tile((*others, *slow)).cost.time_ps
        < scheduler.in_one_tile(others).cost.time_ps + alone
    )


@pytest.fixture(scope="module")
def adam():
    f, args = STRESS["adam_100"].build("float32", small=True)
    return fuseplan.make_plan(f, device="h200")(*args)


def test_an_optimizer_step_of_small_arrays_is_a_kernel_a_side(adam):
    assert (len(adam.kernels), adam.status) == (2, "OPTIMAL")
    assert "14 kernels that a scalar ties together are packed into 2" in adam.notes
    assert Plan.from_json(adam.to_json()) == adam
    assert adam.verify().status == VERIFIED
    told = str(adam.explain(adam.kernels[0].spec.nodes[0], adam.kernels[1].spec.nodes[0]))
    assert "across a scalar, that is packs alone" in told


def damaged(plan, change):
    """``plan`` with ``change`` made to its first line of pieces, and as optimal as that claims."""
    line, *others = plan.proof.packs
    proof = replace(plan.proof, packs=(tuple(change(list(line))), *others))
    return replace(plan, proof=proof, bound_ps=min(proof.bound_ps, plan.objective_ps), status="FEASIBLE")


def paying(pieces, k, more_ps):
    pieces[k] = replace(pieces[k], share_ps=pieces[k].share_ps + more_ps)
    return pieces


DAMAGES = {
    "less than the": lambda pieces: paying(pieces, -1, 1),
    "pays": lambda pieces: paying(pieces, 0, 10**9),
    "ps alone, not": lambda pieces: [replace(pieces[0], alone_ps=pieces[0].alone_ps + 1), *pieces[1:]],
    "hold one operation": lambda pieces: [*pieces, pieces[0]],
    "share no scalar": lambda pieces: pieces[:1],
    "that is none": lambda pieces: [
        replace(pieces[-1], kernels=(tuple(sorted(sum(pieces[-1].kernels + pieces[-2].kernels, ()))),)),
        *pieces[:-2],
    ],
    "that are not there": lambda pieces: [replace(pieces[0], kernels=((0, 10**6),)), *pieces[1:]],
    "not there": lambda pieces: [replace(pieces[0], kernels=()), *pieces[1:]],
    "in no order": lambda pieces: [replace(pieces[0], kernels=((1, 0),)), *pieces[1:]],
    "which another makes": lambda pieces: pieces[::-1],
}


@pytest.mark.parametrize("reason", DAMAGES)
def test_a_false_proof_is_refuted(adam, reason):
    found = verify_plan(damaged(adam, DAMAGES[reason]))
    assert found.status == REFUTED
    assert re.search(reason, found.reason)


def test_what_others_write_for_the_first_piece_it_takes_in():
    """No two others fit one kernel, if that may have one result only; with the first they do."""
    b = GraphBuilder()
    norms = [b.reduce(b.elementwise(b.input((n,)), op="square"), (0,)) for n in (8, 16, 32, 64, 128)]
    total = norms[0]
    for norm in norms[1:]:
        total = b.elementwise(total, norm)
    graph, features = b.build(total), Features(several_results=False)
    scheduler = Scheduler(graph, TEST_DEVICE, features=features)
    found = with_packs(graph, scheduler, plan_groups(graph, scheduler), unlimited())
    plan = Plan(
        graph, TEST_DEVICE, "solver", found.kernels,
        status=found.status, bound_ps=found.bound_ps, proof=found.proof, features=features,
    )  # fmt: skip
    assert (len(plan.kernels), plan.status, plan.verify().status) == (1, "OPTIMAL", VERIFIED)
    (line,) = found.proof.packs
    pieces = Line(graph, TEST_DEVICE, [piece.nodes for piece in line])
    assert not isinstance(scheduler.in_one_tile(pieces.nodes(1, 3)), Kernel)
    # Of the first two no pack is faster than their shares, of more each is.
    two_ps = scheduler.in_one_tile(pieces.nodes(0, 2)).cost.time_ps
    shares = [two_ps - line[1].alone_ps, *(piece.alone_ps for piece in line[1:])]

    def change(pieces):
        return [replace(piece, share_ps=share) for piece, share in zip(pieces, shares, strict=True)]

    assert "a pack of 3 pieces" in verify_plan(damaged(plan, change)).reason


def test_pieces_are_of_kernels_that_can_run():
    """Two that wait for each other may take less than any that a plan has."""
    b = GraphBuilder()
    scale, results = b.input(()), []
    for n in (8, 16, 32, 64, 128):
        y = b.elementwise(b.input((n,)), b.broadcast(scale, (n,), ()), op="mul")
        results.append(b.elementwise(y, b.elementwise(y, op="exp"), op="add"))
    plan = check_plan(planned(b.build(*results), TEST_DEVICE))
    (mul, exp, add) = plan.proof.packs[0][0].nodes[1:]

    def change(pieces):
        kernels = ((*pieces[0].nodes[:1], mul, add), (exp,))
        book = PriceBook(plan.graph, Scheduler(plan.graph, TEST_DEVICE))
        alone_ps = sum(book.price(nodes).time_ps for nodes in kernels)
        return [replace(pieces[0], kernels=kernels, alone_ps=alone_ps), *pieces[1:]]

    assert "wait for each other" in verify_plan(damaged(plan, change)).reason


def step(xs, rate):
    """All that its arrays have in common is ``rate``."""
    return [x - rate * jnp.tanh(x) for x in xs]


ARGS = ([jax.ShapeDtypeStruct((n,), "float32") for n in (100, 100, 200, 300, 300)], jnp.float32(0.1))


def test_a_pack_needs_a_hub(monkeypatch):
    plan = check_plan(fuseplan.make_plan(step, device="h200")(*ARGS))
    monkeypatch.setattr(shared_operands, "MAX_PORTS", 99)
    with pytest.raises(InvalidPlanError, match="nothing ties"):
        check_plan(plan)


def test_where_time_is_short_what_is_known_stands(monkeypatch):
    graph = hub_program(0)
    scheduler = Scheduler(graph, TEST_DEVICE)
    once = plan_groups(graph, scheduler)
    best = with_packs(graph, scheduler, once, unlimited())
    looks = iter([0.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(looks, 2.0))
    late = with_packs(graph, scheduler, once, replace(unlimited(), expires_at=1.0))
    assert late.bound_ps <= best.bound_ps < late.time_ps
    assert (best.status, late.status) == ("OPTIMAL", "FEASIBLE")
    nothing = with_packs(graph, scheduler, once, Work(0))
    assert nothing.kernels == once.kernels
    assert [limit_reached(plan.notes) for plan in (best, late, nothing)] == [
        None,
        Limit.DEADLINE,
        Limit.WORK,
    ]


def test_constraints_keep_packs_away():
    f, args = STRESS["adam_100"].build("float32", small=True)
    limits = fuseplan.Constraints(max_group_size=50)
    plan = fuseplan.make_plan(f, device="h200", constraints=limits)(*args)
    assert plan.proof.packs == ()
    assert any("were not searched" in note for note in plan.notes)


def test_a_remembered_plan_is_packed_alike():
    plans = [fuseplan.make_plan(step, device="h200")(*ARGS) for _ in range(2)]
    assert plans[0].kernels == plans[1].kernels
    assert len(plans[0].kernels) == 1
    assert plans[1].verify().status == VERIFIED
