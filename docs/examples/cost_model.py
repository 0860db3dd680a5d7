"""Cost models of your own: kernels without a launch cost, and times that were measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

import fuseplan
from costmodel import Cost, DeviceSpec, Graph, KernelSpec


class WithoutLaunches(fuseplan.CostModel):
    """As fuseplan's model, of kernels that start for nothing, as in one persistent kernel."""

    def cost(self, graph: Graph, kernel: KernelSpec, device: DeviceSpec, estimated: Cost) -> Cost:
        return replace(estimated, launch_ps=0)


@dataclass(frozen=True)
class Measured(fuseplan.CostModel):
    """Times of groups that were measured, in microseconds; of other groups, those of fuseplan's model."""

    rows: tuple[tuple[str, float], ...]
    """Pairs of the operations of a group, and its time."""

    def cost(self, graph: Graph, kernel: KernelSpec, device: DeviceSpec, estimated: Cost) -> Cost:
        operations = " ".join(graph.nodes[n].op for n in kernel.nodes)
        known: Mapping[str, float] = dict(self.rows)
        if operations not in known:
            return estimated
        return Cost(memory_ps=round(known[operations] * 1e6))

    def floor_ps(self, graph: Graph, nodes: Sequence[int], device: DeviceSpec, estimated_ps: int) -> int:
        return 0  # A measured time may be below that of the model.


def softmax(x):
    """A softmax of rows."""
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


if __name__ == "__main__":
    x = jax.ShapeDtypeStruct((4096, 1024), "float32")
    plain = fuseplan.make_plan(softmax, device="h200")(x)
    free = fuseplan.make_plan(softmax, device="h200", cost_model=WithoutLaunches())(x)
    print(f"with launches {plain.objective_us:.2f} µs, without {free.objective_us:.2f} µs: {free.status}")

    # What if the whole softmax in one kernel had been measured to be slow?
    whole = " ".join(plain.graph.nodes[n].op for n in plain.kernels[0].spec.nodes)
    slow = Measured(((whole, 100.0),))
    other = fuseplan.make_plan(softmax, device="h200", cost_model=slow)(x)
    print(
        f"{len(plain.kernels)} kernel by the model, {len(other.kernels)} by the measurement: {other.status}"
    )
    assert other.verify()
