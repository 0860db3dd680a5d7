"""``check_plan`` accepts what the planners make, and refuses every mutation of it for the
right reason."""

from dataclasses import replace

import pytest

from costmodel.devices import TEST_DEVICE
from costmodel.graph import DimRole, make_graph
from costmodel.kernel import Access, Axis, AxisRole
from fuseplan import Kernel, Plan
from fuseplan.plan.options import Features
from fuseplan.planners import Budget, get_planner, planner_names
from fuseplan.schedule.layout import whole_array_spec
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.support.errors import InvalidPlanError
from fuseplan.verify.plan import check_plan
from tests.helpers.graphs import GraphBuilder


def softmax_into_matmul(copies=1):
    b = GraphBuilder()
    results = []
    for _ in range(copies):
        x, w = b.input((64, 128)), b.input((128, 64))
        top = b.broadcast(b.reduce(x, (1,), op="reduce_max"), (64, 128), (0,))
        exp = b.elementwise(b.elementwise(x, top, op="sub"), op="exp")
        total = b.broadcast(b.reduce(exp, (1,)), (64, 128), (0,))
        y = b.elementwise(exp, total, op="div")
        results += [b.elementwise(b.matmul(y, w), op="tanh"), b.reduce(y, (1,))]
    return b.build(*results)


def make(name="solver", graph=None):
    graph = graph or softmax_into_matmul()
    apart = Features(loop_nests=False)  # Else each softmax is one kernel with its product.
    grouping = get_planner(name)(graph, Scheduler(graph, TEST_DEVICE, features=apart), Budget())
    return Plan(graph, TEST_DEVICE, name, grouping.kernels, (), grouping.status, grouping.bound_ps)


def with_kernel(plan, k, spec):
    """``plan`` with another spec for kernel ``k``; its cost is kept."""
    kernels = list(plan.kernels)
    kernels[k] = replace(kernels[k], spec=spec)
    return replace(plan, kernels=tuple(kernels))


@pytest.mark.parametrize("name", planner_names(of_graphs=True))
def test_plans_of_every_planner_are_accepted(name):
    plan = make(name)
    assert check_plan(plan) is plan


def fused(plan):
    """The kernel of most nodes, whose axes are tiled; of equal ones the last, which is checked
    by comparison with the first."""
    k = max(range(len(plan.kernels)), key=lambda k: (len(plan.kernels[k].spec.nodes), k))
    assert plan.kernels[k].spec.axes
    return k, plan.kernels[k].spec


def drop_a_kernel(plan):
    return replace(plan, kernels=plan.kernels[1:])


def repeat_a_kernel(plan):
    return replace(plan, kernels=plan.kernels + plan.kernels[:1])


def unknown_node(plan):
    k, spec = fused(plan)
    return with_kernel(plan, k, replace(spec, nodes=(*spec.nodes, 99)))


def descending_nodes(plan):
    k, spec = fused(plan)
    return with_kernel(plan, k, replace(spec, nodes=spec.nodes[::-1]))


def reverse_order(plan):
    return replace(plan, kernels=plan.kernels[::-1])


def skip_a_read(plan):
    k, spec = fused(plan)
    return with_kernel(plan, k, replace(spec, reads=spec.reads[1:]))


def skip_a_write(plan):
    k, spec = fused(plan)
    return with_kernel(plan, k, replace(spec, writes=spec.writes[1:]))


def write_an_inner_value(plan):
    k, spec = fused(plan)
    inner = plan.graph.nodes[spec.nodes[0]].outputs[0]
    return with_kernel(plan, k, replace(spec, writes=(*spec.writes, Access(inner, spec.writes[0].axes))))


def read_a_block_twice(plan):
    k, spec = fused(plan)
    return with_kernel(plan, k, replace(spec, reads=spec.reads * 2))


def swap_the_axes_of_a_read(plan):
    k, spec = fused(plan)
    first = spec.reads[0]
    return with_kernel(plan, k, replace(spec, reads=(Access(first.value, first.axes[::-1]), *spec.reads[1:])))


def another_size(plan):
    k, spec = fused(plan)
    axes = (replace(spec.axes[0], size=spec.axes[0].size * 2), *spec.axes[1:])
    return with_kernel(plan, k, replace(spec, axes=axes))


def cut_the_reduced_axis(plan):
    k, spec = fused(plan)
    axes = tuple(Axis(a.size, AxisRole.PARALLEL, max(a.tile // 2, 1)) for a in spec.axes)
    return with_kernel(plan, k, replace(spec, axes=axes))


def partly_resident(plan):
    k, spec = fused(plan)
    axes = tuple(replace(a, tile=1) if a.role == AxisRole.RESIDENT else a for a in spec.axes)
    return with_kernel(plan, k, replace(spec, axes=axes))


def too_large_a_tile(plan):
    k, spec = fused(plan)
    axes = tuple(replace(a, tile=a.size * 1024) if a.role == AxisRole.PARALLEL else a for a in spec.axes)
    return with_kernel(plan, k, replace(spec, axes=axes))


def understate_the_cost(plan):
    k, spec = fused(plan)
    cost = plan.kernels[k].cost
    cheaper = Kernel(spec, replace(cost, memory_ps=cost.memory_ps - 1))
    return replace(plan, kernels=(*plan.kernels[:k], cheaper, *plan.kernels[k + 1 :]))


def read_the_array_of_an_equal_kernel(plan):
    k, spec = fused(plan)
    others = [other.spec for other in plan.kernels if len(other.spec.nodes) == len(spec.nodes)]
    first = spec.reads[0]
    value = first.value + 1 if len(others) == 1 else others[0].reads[0].value
    return with_kernel(plan, k, replace(spec, reads=(Access(value, first.axes), *spec.reads[1:])))


def bound_above_the_plan(plan):
    return replace(plan, bound_ps=plan.objective_ps + 1)


def optimal_without_a_bound(plan):
    return replace(plan, status="OPTIMAL", bound_ps=plan.objective_ps - 1)


def invented_status(plan):
    return replace(plan, status="BEST")


MUTATIONS = [
    (drop_a_kernel, "computed by no kernel"),
    (repeat_a_kernel, "by more than one kernel"),
    (unknown_node, r"nodes \[99\], but the graph has \d+ nodes"),
    (descending_nodes, "ascending order"),
    (reverse_order, "makes only later"),
    (skip_a_read, r"kernel \d+ .* reads .* expected v\d+"),
    (skip_a_write, r"kernel \d+ .* writes"),
    (write_an_inner_value, r"kernel \d+ .* writes"),
    (read_a_block_twice, "reads one block twice"),
    (swap_the_axes_of_a_read, "does not read the blocks"),
    (another_size, "do not make up its extent"),
    (cut_the_reduced_axis, "combined, but it is cut in tiles"),
    (partly_resident, "resident in tiles of 1"),
    (too_large_a_tile, "bytes on chip"),
    (understate_the_cost, "claims"),
    (read_the_array_of_an_equal_kernel, r"kernel \d+ .* reads v\d+, expected v\d+"),
    (bound_above_the_plan, "exceeds the plan's own"),
    (optimal_without_a_bound, "needs a bound that equals it"),
    (invented_status, "got 'BEST'"),
]


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize(("mutate", "message"), MUTATIONS, ids=[m.__name__ for m, _ in MUTATIONS])
def test_every_mutation_is_refused(mutate, message, copies):
    with pytest.raises(InvalidPlanError, match=message):
        check_plan(mutate(make(graph=softmax_into_matmul(copies))))


def test_equal_kernels_are_checked_once(monkeypatch):
    checked = []
    monkeypatch.setattr("fuseplan.verify.plan.check_kernel", lambda plan, k, *_: checked.append(k))
    once, twice = make(), make(graph=softmax_into_matmul(2))
    check_plan(once)
    n_once = len(checked)
    check_plan(twice)
    assert len(twice.kernels) == 2 * len(once.kernels)
    assert len(checked) == 2 * n_once <= 2 * len(once.kernels)


def whole(graph, *groups):
    """A plan of kernels left to XLA whole, each with its true cost."""
    scheduler = Scheduler(graph, TEST_DEVICE)
    single = scheduler.price((0,))
    kernels = tuple(
        scheduler.price(g) if len(g) == 1 else Kernel(whole_array_spec(graph, g), single.cost) for g in groups
    )
    return Plan(graph, TEST_DEVICE, "by hand", kernels)


def test_groups_must_be_connected_and_convex():
    b = GraphBuilder()
    x = b.input((8, 8))
    first = b.elementwise(x, op="exp")
    other = b.elementwise(b.input((8, 8)), op="tanh")
    last = b.elementwise(b.matmul(first, x), first)
    graph = b.build(last, other)
    with pytest.raises(InvalidPlanError, match=r"kernel 0 .*is not connected: nothing ties \[1\]"):
        check_plan(whole(graph, (0, 1), (2,), (3,)))
    with pytest.raises(InvalidPlanError, match=r"kernel 0 .*is not convex"):
        check_plan(whole(graph, (0, 3), (2,), (1,)))


def test_opaque_operations_are_alone():
    b = GraphBuilder()
    y = b.opaque(b.input((8,)), shape=(8,))
    graph = b.build(b.elementwise(y, op="exp"))
    with pytest.raises(InvalidPlanError, match="holds sort, which must be alone"):
        check_plan(whole(graph, (0, 1)))


def test_side_effects_are_alone_and_in_order():
    b = GraphBuilder()
    x = b.input((8,))
    b.elementwise(x, op="print")
    b.elementwise(x, op="print")
    y = b.elementwise(x, op="exp")
    graph = b.build(y)
    nodes = tuple(replace(n, effects=n.op == "print") for n in graph.nodes)
    graph = make_graph(graph.values, nodes, graph.inputs, graph.outputs)
    assert check_plan(whole(graph, (0,), (1,), (2,)))
    with pytest.raises(InvalidPlanError, match="side effects that must come before n1's"):
        check_plan(whole(graph, (1,), (0,), (2,)))
    with pytest.raises(InvalidPlanError, match="side effects and must be alone"):
        check_plan(whole(graph, (0, 2), (1,)))


def test_tiles_that_write_the_same_block():
    b = GraphBuilder()
    x, row = b.input((64, 128)), b.input((128,))
    e = b.elementwise(row, op="exp")
    graph = b.build(b.elementwise(x, b.broadcast(e, (64, 128), (1,))), e)
    kernel = Scheduler(graph, TEST_DEVICE).price((0, 1, 2))
    plan = Plan(graph, TEST_DEVICE, "by hand", (kernel,))
    assert check_plan(plan)
    rows = next(i for i, a in enumerate(kernel.spec.axes) if a.size == 64)
    axes = tuple(Axis(64, AxisRole.PARALLEL, 8) if i == rows else a for i, a in enumerate(kernel.spec.axes))
    with pytest.raises(InvalidPlanError, match="tiles of an axis that does not index it"):
        check_plan(with_kernel(plan, 0, replace(kernel.spec, axes=axes)))


def prologue():
    """tanh(x) @ w as one kernel, its axes tiled."""
    b = GraphBuilder()
    graph = b.build(b.matmul(b.elementwise(b.input((256, 512)), op="tanh"), b.input((512, 256))))
    return Plan(graph, TEST_DEVICE, "by hand", (Scheduler(graph, TEST_DEVICE).price((0, 1)),))


def test_an_operand_made_in_the_loop_stays_there():
    plan = prologue()
    assert check_plan(plan)
    graph, spec = plan.graph, plan.kernels[0].spec
    assert spec.streamed is not None
    tanh = graph.nodes[0].outputs[0]
    also_result = make_graph(graph.values, graph.nodes, graph.inputs, (tanh, *graph.outputs))
    depth = Access(tanh, spec.node_axes[0])
    # One tile of columns, so that no two tiles write it: the loop would, step by step.
    axes = tuple(replace(a, tile=a.size) if a.role == AxisRole.PARALLEL else a for a in spec.axes)
    wrong = replace(spec, axes=axes, writes=(depth, *spec.writes))
    with pytest.raises(InvalidPlanError, match="writes v1 from inside its loop over an axis of 512"):
        check_plan(with_kernel(replace(plan, graph=also_result), 0, wrong))


def test_the_loop_is_walked_once():
    b = GraphBuilder()
    x = b.input((64, 128))
    total = b.broadcast(b.reduce(x, (1,)), (64, 128), (0,))
    graph = b.build(b.reduce(b.elementwise(x, total, op="div"), (1,)))
    kernel = Scheduler(graph, TEST_DEVICE).price((0, 1, 2, 3))
    plan = Plan(graph, TEST_DEVICE, "by hand", (kernel,))
    assert check_plan(plan)
    axes = tuple(
        replace(a, role=AxisRole.STREAMED, tile=64) if a.size == 128 else a for a in kernel.spec.axes
    )
    with pytest.raises(InvalidPlanError, match="walks the streamed axis again"):
        check_plan(with_kernel(plan, 0, replace(kernel.spec, axes=axes)))


def test_the_reduced_axis_of_these_plans_is_reduced():
    # The mutations above need one.
    assert any(DimRole.REDUCED in n.roles for n in softmax_into_matmul().nodes)
