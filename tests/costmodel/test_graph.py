"""``check_graph`` accepts what the builder makes, and names what is wrong with each mutant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from costmodel import DimRole, Flops, Graph, GraphError, Value, check_graph, dtypes, make_graph
from tests.helpers.graphs import GraphBuilder


def sound() -> Graph:
    """``sum(exp(x) @ w, axis=1)``: v0 x, v1 exp, v2 w, v3 product, v4 sum."""
    b = GraphBuilder()
    x = b.elementwise(b.input((4, 6)), op="exp")
    return b.build(b.reduce(b.matmul(x, b.input((6, 8))), (1,)))


def node(graph: Graph, i: int, **changes: object) -> Graph:
    nodes = list(graph.nodes)
    nodes[i] = replace(nodes[i], **changes)
    return replace(graph, nodes=tuple(nodes))


def value(graph: Graph, i: int, **changes: object) -> Graph:
    values = list(graph.values)
    values[i] = replace(values[i], **changes)
    return replace(graph, values=tuple(values))


P, R = DimRole.PARALLEL, DimRole.REDUCED

MUTANTS: dict[str, tuple[Callable[[Graph], Graph], str]] = {
    "value-id": (lambda g: value(g, 3, id=2), "value 2 stands at position 3"),
    "node-id": (lambda g: node(g, 1, id=7), "node 7 stands at position 1"),
    "input-with-producer": (
        lambda g: value(g, 0, producer=0),
        "v0 is neither an input nor produced, or both",
    ),
    "value-from-nowhere": (lambda g: value(g, 1, producer=-1), "v1 is neither an input nor produced"),
    "input-forgotten": (lambda g: replace(g, inputs=(0,)), "v2 is neither an input nor produced"),
    "role-missing": (lambda g: node(g, 2, roles=(P,)), "n2 reduce_sum: a role for each dimension"),
    "dimension-of-one": (
        lambda g: node(g, 0, dims=(4, 6, 1), roles=(P, P, P)),
        "n0 exp: a dimension of size one",
    ),
    "input-map-missing": (
        lambda g: node(g, 1, input_maps=g.nodes[1].input_maps[:1]),
        "n1 dot_general: a map for each input",
    ),
    "output-map-missing": (lambda g: node(g, 0, output_maps=()), "n0 exp: a map for each output"),
    "used-before-made": (
        lambda g: node(g, 0, inputs=(3,), input_maps=(((0,), (1,)),)),
        "n0 exp: reads a value before it is made",
    ),
    "map-of-another-rank": (
        lambda g: node(g, 0, input_maps=(((0,),),)),
        "n0 exp: v0 has a map of another rank",
    ),
    "map-of-another-extent": (
        lambda g: node(g, 0, input_maps=(((1,), (0,)),)),
        "n0 exp: v0 maps 4 to dimensions of product 6",
    ),
    "shape-of-another-extent": (lambda g: value(g, 4, shape=(5,)), "v4 maps 5 to dimensions of product 4"),
    "made-twice": (
        lambda g: node(g, 1, outputs=(1,), output_maps=(((0,), (2,)),), roles=(P, R, P)),
        "n1 dot_general: v1 is made twice",
    ),
    "another-producer": (lambda g: value(g, 3, producer=0), "n1 dot_general: v3 names another producer"),
    "indexed-by-reduced": (
        lambda g: node(g, 2, roles=(R, P)),
        "n2 reduce_sum: the result is indexed by a reduced dimension",
    ),
    "output-never-made": (lambda g: replace(g, outputs=(9,)), "an output is never made"),
    "consumer-missing": (
        lambda g: replace(g, consumers=((0,), (), *g.consumers[2:])),
        "consumers do not match the nodes' inputs",
    ),
    "consumer-invented": (
        lambda g: replace(g, consumers=((0, 1), *g.consumers[1:])),
        "consumers do not match the nodes' inputs",
    ),
}


def test_a_sound_graph_is_returned_unchanged() -> None:
    graph = sound()
    assert check_graph(graph) is graph


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_refused_by_name(name: str) -> None:
    mutate, message = MUTANTS[name]
    with pytest.raises(GraphError) as caught:
        check_graph(mutate(sound()))
    assert message in str(caught.value)


def test_the_empty_graph_is_sound() -> None:
    assert check_graph(make_graph((), (), (), ())).nodes == ()


def test_an_input_may_be_an_output() -> None:
    check_graph(make_graph([Value(0, (3,), "float32", -1)], (), [0], [0]))


def test_consumers_are_ascending_and_each_once() -> None:
    b = GraphBuilder()
    x = b.input((4,))
    square = b.elementwise(x, x, op="mul")
    graph = b.build(b.elementwise(square, x))
    assert graph.consumers == ((0, 1), (1,), ())


def test_a_reshape_maps_the_merged_dimension_major_first() -> None:
    b = GraphBuilder()
    b.build(b.reshape(b.input((6, 4)), (2, 3, 4)))
    (reshape,) = b.nodes
    assert (reshape.dims, reshape.input_maps, reshape.output_maps) == (
        (2, 3, 4), (((0, 1), (2,)),), (((0,), (1,), (2,)),),
    )  # fmt: skip


def test_a_dimension_of_one_is_indexed_by_nothing() -> None:
    b = GraphBuilder()
    b.build(b.elementwise(b.input((1, 5)), op="neg"))
    assert b.nodes[0].input_maps == (((), (0,)),)


def test_flops_add_and_repeat() -> None:
    flops = Flops(1, 2, 3) + Flops(10, 20, 30)
    assert (flops, flops.total, flops.times(2)) == (Flops(11, 22, 33), 66, Flops(22, 44, 66))


@pytest.mark.parametrize(
    ("dtype", "bits", "short"),
    [
        ("float32", 32, "f32"),
        ("bfloat16", 16, "bf16"),
        ("bool", 8, "bool"),
        ("uint4", 4, "u4"),
        ("complex128", 128, "c128"),
        ("float8_e4m3fn", 8, "f8_e4m3fn"),
        ("float8_e4m3b11fnuz", 8, "f8_e4m3b11fnuz"),
        ("key<fry>", 64, "key<fry>"),
    ],
)
def test_element_types(dtype: str, bits: int, short: str) -> None:
    assert (dtypes.bits(dtype), dtypes.short(dtype)) == (bits, short)


def test_bytes_of_a_packed_type_round_up() -> None:
    assert Value(0, (3,), "int4", -1).nbytes == 2


def test_a_graph_prints_in_jaxpr_notation() -> None:
    assert str(sound()).splitlines() == [
        "in   v0:f32[4,6], v2:f32[6,8]",
        "n0   v1:f32[4,6] = exp v0    [elementwise]",
        "n1   v3:f32[4,8] = dot_general v1 v2    [out_elementwise_fusable]",
        "n2   v4:f32[4] = reduce_sum v3    [reduction]",
        "out  v4",
    ]
