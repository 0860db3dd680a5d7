"""What is read from an optimized HLO module, on modules and kernels made by hand."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.graph import make_graph
from fuseplan.planners.hlo import module
from fuseplan.planners.hlo.attribution import place_nodes
from fuseplan.planners.hlo.kernels import HloKernel, read_kernels
from fuseplan.planners.hlo.module import Computation, Instruction, Module, Shape, read_module
from tests.helpers.graphs import GraphBuilder
from tests.helpers.small_graphs import graphs

ENTRY = 0


def text(number, value):
    return bytes([number << 3 | 2, len(value)]) + value


def test_fields_of_a_message():
    packed = text(3, bytes([1, 0x80, 0x01]))
    message = module.fields(
        packed + bytes([3 << 3, 7]) + bytes([1 << 3 | 5, 0, 0, 0, 0]) + text(2, b"\x08\x05")
    )
    assert list(module.integers(message, 3)) == [1, 128, 7]
    assert [module.integer(m, 1) for m in module.messages(message, 2)] == [5]
    assert 1 not in message, "a number of fixed width"
    assert module.text(message, 9) == ""
    assert module.integer(message, 9) == 0


@pytest.mark.parametrize("data", [b"\x80", text(1, b"abc")[:-1], bytes([1 << 3 | 3])])
def test_what_is_no_message(data):
    with pytest.raises(ValueError, match=r"message ends|no wire type"):
        module.fields(data)


class Program:
    """Computations by hand: 64 elements of float32 an array unless said otherwise."""

    def __init__(self):
        self.computations = {ENTRY: Computation({}, -1)}
        self.count = 0

    def add(self, opcode, *operands, node=None, size=64, within=ENTRY, called=(), **more):
        self.count += 1
        shape = more.pop("shape", Shape(4 * size))
        nodes = frozenset() if node is None else frozenset({node})
        settings = {"index": 0, "target": ""} | more
        one = Instruction(
            self.count, f"{opcode}.{self.count}", opcode, shape, nodes, operands, called, **settings
        )
        old = self.computations.setdefault(within, Computation({}, -1))
        self.computations[within] = Computation({**old.instructions, one.id: one}, one.id, old.users)
        for operand in dict.fromkeys(operands):
            old.users.setdefault(operand, []).append(one)
        return one.id

    def kernels(self):
        return read_kernels(Module(self.computations, ENTRY))


def test_each_operand_is_read_once_and_each_result_written_once():
    p = Program()
    x = p.add("parameter")
    inner = p.add("parameter", within=1)
    p.add("multiply", inner, inner, node=3, within=1)
    fused = p.add("fusion", x, x, called=(1,), node=3)
    y = p.add("bitcast", fused)
    p.add("tuple", y, p.add("sort", y, node=4))
    first, second = p.kernels()
    assert (first.read_bytes, first.write_bytes, first.moved_bytes) == (256, 256, 512)
    assert (first.computes, second.computes, second.after) == ({3}, {4}, (0,))


def test_of_what_is_sliced_only_that_is_read():
    p = Program()
    x = p.add("parameter", size=1000)
    inner = p.add("parameter", size=1000, within=1)
    named = p.add("bitcast", inner, size=1000, within=1)
    p.add("add", p.add("slice", named, size=10, within=1), p.add("slice", named, size=10, within=1), size=10,
          within=1)  # fmt: skip
    p.add("fusion", x, size=10, called=(1,))
    p.add("gather", x, p.add("parameter", size=5, index=1), size=5)
    p.add("negate", x, size=1000)
    assert [k.read_bytes for k in p.kernels()] == [80, 40, 4000]


@pytest.mark.parametrize("opcode", ["dynamic-update-slice", "scatter"])
def test_what_is_updated_in_place_costs_the_updates(opcode):
    p = Program()
    x, y = p.add("parameter", size=1000), p.add("parameter", size=8, index=1)
    where = p.add("constant", size=1)
    rest = {"dynamic-update-slice": (y, where), "scatter": (where, y)}[opcode]
    p.add(opcode, x, *rest, size=1000)
    # Of what is made in the same kernel, all is written.
    a, b = p.add("parameter", size=1000, within=1), p.add("parameter", size=8, index=1, within=1)
    i = p.add("constant", size=1, within=1)
    made = p.add("exponential", a, size=1000, within=1)
    p.add(opcode, made, *{"dynamic-update-slice": (b, i), "scatter": (i, b)}[opcode], size=1000, within=1)
    p.add("fusion", x, y, size=1000, called=(1,))
    in_place, whole = p.kernels()
    assert in_place.write_bytes == 32
    assert in_place.read_bytes <= 32 + 4 + 32
    assert (whole.read_bytes, whole.write_bytes) == (4032, 4000)


def test_copies_onto_the_chip_are_their_readers():
    p = Program()
    x = p.add("parameter")
    vmem = Shape(256, on_chip=True)
    start = p.add("copy-start", x, shape=Shape(0, False, (vmem, Shape(256), Shape(4))))
    done = p.add("copy-done", start, shape=vmem)
    p.add("slice", p.add("parameter", within=1), shape=vmem, within=1)
    part = p.add("async-done", p.add("async-start", x, called=(1,), shape=vmem), shape=vmem)
    p.add("exponential", p.add("add", done, part, shape=vmem, node=0), node=1)
    add, exp = p.kernels()
    assert (add.read_bytes, add.write_bytes, add.on_chip_bytes, add.after) == (512, 256, 768, ())
    assert (exp.read_bytes, exp.write_bytes, exp.on_chip_bytes, exp.after) == (256, 256, 256, (0,))


def test_other_copies_are_kernels():
    p = Program()
    x = p.add("parameter")
    start = p.add("copy-start", x, shape=Shape(0, False, (Shape(256), Shape(256), Shape(4))))
    p.add("copy", p.add("copy-done", start), shape=Shape(256, on_chip=True))
    assert [(k.read_bytes, k.write_bytes) for k in p.kernels()] == [(256, 256), (256, 256)]


def test_a_workspace_is_nobodys_result():
    p = Program()
    x = p.add("parameter")
    both = p.add("custom-call", x, shape=Shape(0, False, (Shape(256), Shape(2**22))))
    p.add("get-tuple-element", both)
    assert [k.write_bytes for k in p.kernels()] == [256]


def test_calls_are_what_they_call():
    p = Program()
    x = p.add("parameter")
    inner = p.add("parameter", within=1)
    p.add("sort", p.add("negate", inner, node=0, within=1), node=1, within=1)
    p.add("exponential", p.add("call", p.add("abs", x, node=2), called=(1,)), node=3)
    assert [(sorted(k.computes), k.after) for k in p.kernels()] == [
        ([2], ()), ([0], (0,)), ([1], (1,)), ([3], (2,)),
    ]  # fmt: skip


def test_where_data_are_only_arranged_nothing_is_computed():
    p = Program()
    x = p.add("parameter")
    copied = p.add("copy", p.add("dot", p.add("transpose", x, node=0), node=0), node=0)
    p.add("transpose", copied, node=1)
    assert [sorted(k.computes) for k in p.kernels()] == [[], [0], [], [1]]
    assert [sorted(k.touches) for k in p.kernels()] == [[0], [0], [0], [1]]


def test_a_reducer_may_be_anothers():
    p = Program()
    x = p.add("parameter")
    p.add("add", p.add("parameter", within=1), p.add("parameter", index=1, within=1), node=7, within=1)
    p.add("reduce", x, p.add("constant"), size=1, node=2, called=(1,))
    assert [k.touches for k in p.kernels()] == [{2}]


def test_a_module_in_bytes():
    layout = text(5, bytes([8 << 3, 1]))
    shape = text(3, bytes([2 << 3, 21, 3 << 3, 5, 3 << 3, 3]) + layout)  # s4[5,3]{S(1)}
    name = text(7, text(2, b"jit(f)/fuseplan.node.12/exp"))
    one = text(1, b"p") + text(2, b"parameter") + shape + bytes([9 << 3, 1, 35 << 3 & 0x7F | 0x80, 2, 4])
    two = text(1, b"e") + text(2, b"exponential") + name + bytes([0x98, 2, 5, 0xA0, 2, 4])
    sequence = text(1, bytes([1 << 3, 9]) + text(2, text(1, bytes([5, 4]))))
    module = text(3, text(2, one) + text(2, two) + bytes([5 << 3, 9, 6 << 3, 5])) + bytes([6 << 3, 9])
    entry = read_module(module + text(7, sequence)).computations[9]
    assert list(entry.instructions) == [5, 4], "in the order of the schedule"
    assert entry.instructions[4].shape == Shape(8, on_chip=True)
    assert entry.instructions[4].index == 1
    assert (entry.instructions[5].nodes, entry.instructions[5].operands, entry.root) == ({12}, (4,), 5)


# --- where nodes are computed ------------------------------------------------------------------


def kernel(*computes, touches=(), after=(), read=10_000):
    nodes = frozenset(computes)
    return HloKernel("k", nodes, nodes | frozenset(touches), read, 100, 0, after)


def placed(graph, *kernels):
    """For each node the kernels that compute it, the one that writes it, and each kernel's host."""
    found = place_nodes(graph, kernels)
    places = [[k for k, _ in several] for several in found.places]
    return places, [k for k, _ in found.source], [None if h is None else h[0] for h in found.hosts]


def chain(n):
    b = GraphBuilder()
    x = b.input((8, 8))
    for _ in range(n):
        x = b.elementwise(x)
    return b.build(x)


def test_nodes_lie_where_they_show():
    places, source, hosts = placed(chain(3), kernel(0, 1), kernel(2, after=(0,)))
    assert places == [[0], [0], [1]]
    assert (source, hosts) == ([0, 0, 1], [0, 1])


def test_what_each_reader_computes_for_itself():
    b = GraphBuilder()
    shared = b.elementwise(b.input((8, 8)))
    graph = b.build(b.elementwise(shared), b.elementwise(shared))
    assert placed(graph, kernel(0, 1), kernel(0, 2))[0] == [[0, 1], [0], [1]]
    # One that only reads it finds it where it was computed.
    places, source, _ = placed(graph, kernel(0, 1), kernel(2))
    assert (places, source[0]) == ([[0], [0], [1]], 0)


def test_steps_are_counted_with_whoever_reads_enough():
    b = GraphBuilder()
    summed = b.reduce(b.elementwise(b.input((64, 64)), op="exp"), (1,))
    graph = b.build(b.elementwise(summed, op="log"))
    # Partial sums are no operation's, so what makes them has the sum, and writes nothing larger.
    steps = kernel(0, 1), kernel(1, after=(0,), read=512), kernel(2, after=(1,), read=256)
    assert placed(graph, *steps) == ([[0], [0], [2]], [0, 0, 2], [0, 0, 2])
    # The last step may be part of what comes next.
    assert placed(graph, steps[0], kernel(1, 2, after=(0,), read=512)) == ([[0], [0], [1]], [0, 0, 1], [0, 1])
    # An inverse is a step too, which comes before.
    b = GraphBuilder()
    x, row = b.input((64, 64)), b.broadcast(b.input((64,)), (64, 64), (0,))
    quotient = b.build(b.elementwise(x, row, op="div"))
    places, _, hosts = placed(quotient, kernel(1, read=256), kernel(1, after=(0,), read=16_640))
    assert (places[1], hosts) == ([1], [1, 1])


def test_what_shows_nowhere_lies_with_who_needs_it_first():
    assert placed(chain(3), kernel(0), kernel(2))[0] == [[0], [1], [1]]
    assert placed(chain(3), kernel(0), kernel(1))[0] == [[0], [1], [1]], "a result with what it is made of"
    assert placed(chain(2), kernel())[0] == [[-1], [-1]], "before all kernels, if nothing is known"


def test_no_kernel_waits_for_a_later_one():
    # The compiler's word for it: the second node in an earlier kernel than the first.
    places, source, _ = placed(chain(2), kernel(1), kernel(0))
    assert (places, source) == ([[0], [0]], [0, 0])


def test_what_is_no_kernels_is_alone():
    b = GraphBuilder()
    barrier = b.opaque(b.elementwise(b.input((8, 8))), shape=(8, 8))
    graph = b.build(b.elementwise(barrier))
    found = place_nodes(graph, [kernel(0, 2)])
    # One kernel cannot be on both sides: what comes before is computed before.
    assert found.places == (((-1, 3),), ((0, 1),), ((0, 3),))
    # If XLA has a kernel for it, that is it.
    assert placed(graph, kernel(0), kernel(1), kernel(2))[0] == [[0], [1], [2]]


def test_side_effects_keep_their_order():
    b = GraphBuilder()
    x = b.elementwise(b.input((8, 8)))
    first, second = (b.opaque(x, shape=(8, 8), op="print") for _ in range(2))
    graph = b.build(x, first, second)
    nodes = [replace(node, effects=node.op == "print") for node in graph.nodes]
    graph = make_graph(graph.values, nodes, graph.inputs, graph.outputs)
    for shows in ([kernel(0), kernel(2), kernel(1)], [kernel(1), kernel(2), kernel(0)], [kernel()]):
        (x_place,), (first_place,), (second_place,) = place_nodes(graph, shows).places
        assert x_place < first_place < second_place
        assert (first_place[1], second_place[1]) == (1, 2)


def test_a_product_is_computed_once():
    b = GraphBuilder()
    product = b.matmul(b.input((8, 8)), b.input((8, 8)))
    graph = b.build(b.elementwise(product), b.elementwise(product))
    assert placed(graph, kernel(0, 1), kernel(0, 2))[0] == [[0], [0], [1]]


def test_kernels_without_nodes():
    graph = chain(2)
    # A copy for who reads it, one of what is read, and one that nothing is known of.
    assert placed(graph, kernel(), kernel(0, after=(0,)), kernel(1, after=(1,)))[2] == [1, 1, 2]
    assert placed(graph, kernel(0), kernel(1, after=(0,)), kernel(after=(1,)))[2] == [0, 1, 1]
    assert placed(graph, kernel(0, 1), kernel())[2] == [0, 0]
    assert placed(graph, kernel(touches=(1,)), kernel(0, 1))[2] == [1, 1]
    empty = GraphBuilder()
    assert placed(empty.build(empty.input((2,))), kernel())[2] == [None]


@settings(max_examples=300, deadline=None)
@given(graphs(), st.data())
def test_whatever_the_compiler_says_the_kernels_can_run(graph, data):
    nodes = st.frozensets(st.integers(0, len(graph.nodes) - 1), max_size=4)
    shown = data.draw(st.lists(st.tuples(nodes, nodes), max_size=5))
    kernels = [kernel(*computes, touches=touches) for computes, touches in shown]
    found = place_nodes(graph, kernels)
    alone = {n for n, node in enumerate(graph.nodes) if node.effects}
    shared = {place for n, several in enumerate(found.places) if n not in alone for place in several}
    for n, node in enumerate(graph.nodes):
        assert found.places[n]
        assert found.source[n] in found.places[n]
        for place in found.places[n]:
            for p in (graph.values[v].producer for v in node.inputs):
                assert p < 0 or place in found.places[p] or found.source[p] < place
    effects = [found.places[n] for n in sorted(alone)]
    assert all(len(places) == 1 and places[0] not in shared for places in effects)
    assert effects == sorted(set(effects))
    used = {place for several in found.places for place in several}
    assert all(host in used for host in found.hosts)
