"""A planner of your own: each elementwise operation joins the kernel of its only reader.

fuseplan compare softmax --device h200 --planner-module docs/examples/planner.py --planners into_reader,solver
"""

from fuseplan.extend import OpKind, PriceBook, plan_decided, register_planner


def groups_of(book: PriceBook) -> list[list[int]]:
    """Groups of nodes, which ``plan_decided`` divides into legal kernels."""
    graph = book.graph
    group_of = {node.id: node.id for node in graph.nodes}
    for node in reversed(graph.nodes):
        readers = {reader for v in node.outputs for reader in graph.consumers[v]}
        if node.kind == OpKind.ELEMENTWISE and len(readers) == 1:
            group_of[node.id] = group_of[readers.pop()]
    groups: dict[int, list[int]] = {}
    for n, group in sorted(group_of.items()):
        groups.setdefault(group, []).append(n)
    return list(groups.values())


register_planner("into_reader", lambda graph, pricing, budget: plan_decided(graph, pricing, groups_of))
