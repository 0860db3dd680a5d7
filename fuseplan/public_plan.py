"""The public ``Plan``: the data of ``fuseplan.plan`` with methods to print, explain, verify, run and save
it."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import fields
from os import PathLike
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from costmodel.device import DeviceSpec
from costmodel.kernel import Cost, KernelSpec
from costmodel.model import CostModel
from fuseplan.codegen.listing import kernel_code
from fuseplan.frontend.lower import Lowered
from fuseplan.memory.allocation import Buffer, arena_bytes
from fuseplan.plan.fusion_plan import FusionPlan, Kernel
from fuseplan.plan.json_codec import plan_to_json
from fuseplan.report import explain as explanations
from fuseplan.report import text
from fuseplan.report.exports import dot_text, write_model_explorer, write_perfetto
from fuseplan.report.figures import roofline_figure, timeline_figure
from fuseplan.report.frames import kernels_frame, operations_frame  # pandas takes a while to import
from fuseplan.report.page import write_plan_page
from fuseplan.report.pictures import plan_html, write_plan_picture
from fuseplan.runtime.executor import make_runner
from fuseplan.runtime.replan import structure_key
from fuseplan.schedule.structure import Signatures
from fuseplan.support.errors import InvalidPlanError
from fuseplan.support.format import counted, time_text
from fuseplan.targets.detect import local_platform
from fuseplan.verify.plan import checked_plan_from_json, plan_buffers
from fuseplan.verify.report import Verification, verify_plan

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


class PlanKernel(Kernel):
    """A kernel of a ``Plan``: what it computes and how (``spec``), what that costs (``cost``), and its code.

    It equals every ``Kernel`` of the same ``spec`` and ``cost``.
    """

    __slots__ = ("_device", "_number", "_program")

    _number: int
    _program: Lowered | None
    _device: DeviceSpec | None

    def __init__(
        self,
        spec: KernelSpec,
        cost: Cost,
        number: int = 0,
        program: Lowered | None = None,
        device: DeviceSpec | None = None,
    ) -> None:
        super().__init__(spec, cost)
        for name, value in (("_number", number), ("_program", program), ("_device", device)):
            object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Kernel):
            return NotImplemented
        return (self.spec, self.cost) == (other.spec, other.cost)

    __hash__ = Kernel.__hash__

    def __copy__(self) -> PlanKernel:
        return self

    def __deepcopy__(self, memo: Any) -> PlanKernel:
        return self  # it cannot change, and JAX's equations cannot be copied

    def __reduce__(self) -> Any:
        return type(self), (self.spec, self.cost)  # nor can they be pickled

    def code(self, compiled: bool = False) -> str:
        """The emitted kernel as text, below lines on its arrays and its modelled figures that begin with
        ``#``.

        Args:
            compiled: return what the device's compiler makes of it: PTX, with registers, spills and shared
                memory; a Mosaic module as MLIR, with VMEM; or XLA's optimized program. The device need not be
                present, but the extra ``aot`` is needed for a GPU or TPU.

        Returns:
            the jaxpr of a Pallas kernel with its grid, blocks and index maps; for a group that XLA compiles,
            such as the loops of a CPU, the jaxpr of the group.

        Raises:
            InvalidPlanError: the plan was read from a file that does not hold its program.
            MissingCompilerError: with ``compiled=True``, the compiler is not installed.
            UnknownNameError: with ``compiled=True``, the compiler has no description of the device.

        Example:
            >>> import fuseplan, jax
            >>> x = jax.ShapeDtypeStruct((4096, 1024), "float32")
            >>> plan = fuseplan.make_plan(jax.nn.softmax, device="h200")(x)
            >>> print(plan.kernels[0].code().splitlines()[2])
            # reads   v0:f32[4096,1024]
        """
        if self._device is None:
            raise InvalidPlanError("expected a kernel of a fuseplan.Plan, got one without a plan")
        if self._program is None:
            raise InvalidPlanError(
                "the code of a kernel is emitted from the plan's program, and the file that the plan was "
                "read from does not hold it: plan the function anew"
            )
        return kernel_code(self, self._number, self._program, self._device, compiled)


class Plan(FusionPlan):
    """A partition of a program's operations into kernels, in an order that can run, with costs and proof.

    ``fuseplan.make_plan`` and ``fuseplan.jit(f).plan`` make plans. The fields and figures are those of
    ``fuseplan.plan.fusion_plan.FusionPlan``.

    Example:
        >>> import fuseplan, jax
        >>> x = jax.ShapeDtypeStruct((4096, 1024), "float32")
        >>> plan = fuseplan.make_plan(jax.nn.softmax, device="h200")(x)
        >>> fuseplan.Plan.from_json(plan.to_json()) == plan
        True
    """

    __slots__ = ()

    kernels: tuple[PlanKernel, ...]
    """In execution order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        kernels = tuple(
            PlanKernel(kernel.spec, kernel.cost, k, self.program, self.device)
            for k, kernel in enumerate(self.kernels)
        )
        object.__setattr__(self, "kernels", kernels)

    @classmethod
    def of(cls, plan: FusionPlan) -> Plan:
        """``plan`` as a ``Plan``."""
        if isinstance(plan, cls):
            return plan
        return cls(**{field.name: getattr(plan, field.name) for field in fields(plan)})

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The place of each temporary in a shared arena and the kernels between which it is in use, ordered
        by first kernel. Computed on each access, in up to 0.2 s."""
        return plan_buffers(self)

    @property
    def arena_bytes(self) -> int:
        """The size of the arena of ``buffers``: ``peak_bytes`` plus alignment and gaps."""
        return arena_bytes(self.buffers)

    @property
    def equal_kernels(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the kernels, in groups that do the same with other arrays; ordered by the first
        number of each group."""
        signatures = Signatures(self.graph)
        groups: dict[Hashable, list[int]] = {}
        for k, kernel in enumerate(self.kernels):
            groups.setdefault(structure_key(kernel.spec, signatures), []).append(k)
        return tuple(map(tuple, groups.values()))

    def __repr__(self) -> str:
        """One line: device, planner, number of kernels, modelled time, status."""
        return (
            f"<fuseplan.Plan {self.device.name} {self.planner}: {counted(len(self.kernels), 'kernel')}, "
            f"{time_text(self.objective_us)} µs, {self.status}>"
        )

    def __str__(self) -> str:
        """A table in 80 columns with a line for each kernel; equal kernels of a long plan share a line."""
        return text.kernel_table(self)

    def summary(self) -> str:
        """A few lines: sizes, time and bytes against the unfused plan, proof, planning time."""
        return text.summary(self)

    def to_frame(self) -> pd.DataFrame:
        """A frame with a row for each kernel, in order.

        Columns: ``kernel, name, ops, n_ops, makes, backend, grid, tile, skipped`` (tiles that a
        mask leaves out), ``time_us, bound_by`` (the largest part of the time), ``parts`` (each part of it,
        in microseconds), ``hbm_bytes, onchip_bytes, flops, intensity`` (flops
        per HBM byte), ``roofline`` (the time that the kernel's arrays and operations need at the
        device's peaks, over its modelled time), ``source`` (``file:line (function)`` of its main
        operation). ``fuseplan.COLUMNS["kernels"]`` has their dtypes and units.
        """
        return kernels_frame(self)

    def ops_frame(self) -> pd.DataFrame:
        """A frame with a row for each operation, in the order of the plan's graph.

        Columns: ``operation, primitive, kind, scope, shape, dtype, flops, read_bytes, write_bytes`` (the last
        two of the operation as a kernel by itself), ``kernel`` (its number), ``role`` (its part in the
        kernel: ``main``, ``prologue``, ``epilogue`` or ``beside``), ``copies`` (how many operations compute
        the same result: more than one if it is rematerialised), ``copy_of`` (the first of these), ``source``.
        ``fuseplan.COLUMNS["operations"]`` has their dtypes and units.

        Example:
            >>> import fuseplan, jax
            >>> x = jax.ShapeDtypeStruct((4096, 1024), "float32")
            >>> frame = fuseplan.make_plan(jax.nn.softmax, device="h200")(x).ops_frame()
            >>> frame[frame.role == "main"].primitive.tolist()
            ['reduce_sum']
        """
        return operations_frame(self)

    def to_model_explorer(
        self, path: str | PathLike[str], node_data_path: str | PathLike[str] | None = None
    ) -> None:
        """Write the graph of operations for Model Explorer, in layers by kernel and by named scope.

        Args:
            path: a JSON file to write, which Model Explorer opens as a model.
            node_data_path: a second JSON file, which it opens as node data: the modelled microseconds of each
                kernel, at its main operation.

        Raises:
            OutputError: a file cannot be written.
            InvalidArgumentError: the two files are one.
        """
        write_model_explorer(self, path, node_data_path)

    def to_perfetto(self, path: str | PathLike[str]) -> None:
        """Write the modelled schedule as a trace, for ui.perfetto.dev or ``chrome://tracing``: a slice for
        each kernel with the parts of its cost, and counters of live temporaries in bytes and of HBM traffic
        in GB/s. All times are modelled. Raises ``OutputError`` if the file cannot be written."""
        write_perfetto(self, path)

    def to_dot(self) -> str:
        """The graph of operations in Graphviz' language DOT, with a cluster for each kernel. Edges between
        kernels are labelled with their bytes; gray edges stay on chip.

        Example:
            >>> import fuseplan, jax
            >>> x = jax.ShapeDtypeStruct((4096, 1024), "float32")
            >>> plan = fuseplan.make_plan(jax.nn.softmax, device="h200")(x)
            >>> plan.to_dot().startswith("digraph {")
            True
        """
        return dot_text(self)

    def to_svg(self, path: str | PathLike[str], title: str = "") -> None:
        """Write a small picture of the plan beside the unfused one, for a document: the kernels of both as
        bars on one scale of modelled time. It follows the reader's light or dark theme, and holds no script,
        font or reference. Raises ``OutputError`` if the file cannot be written."""
        write_plan_picture(self, path, title)

    def roofline_figure(self) -> Figure:
        """Draw attained flops per second (modelled) over flops per HBM byte as a Matplotlib figure: each
        kernel is a dot whose area grows with its time, below the device's roofs. The costliest kernels are
        named.

        Raises ``MissingMatplotlibError`` without the extra ``report``.

        Example:
            >>> import fuseplan, jax
            >>> x = jax.ShapeDtypeStruct((4096, 1024), "float32")
            >>> figure = fuseplan.make_plan(jax.nn.softmax, device="h200")(x).roofline_figure()
            >>> figure.axes[0].get_xlabel()
            'arithmetic intensity, flops per HBM byte'
        """
        return roofline_figure([self])

    def timeline_figure(self) -> Figure:
        """Draw the modelled schedule as a Matplotlib figure: each kernel as wide as its time, above the bytes
        of live temporaries. Raises ``MissingMatplotlibError`` without the extra ``report``."""
        return timeline_figure(self)

    def to_json(self) -> str:
        """The whole plan, graph and device included, as JSON; ``from_json`` reads it."""
        return plan_to_json(self)

    @classmethod
    def from_json(cls, text: str, cost_model: CostModel | None = None) -> Plan:
        """Read and check a plan that ``to_json`` wrote; ``cost_model`` is the one that priced it, if that is
        not fuseplan's own.

        Raises:
            InvalidPlanError: the text is not such a plan, or the plan is not legal; the message names the
                field or kernel.
        """
        return cls.of(checked_plan_from_json(text, cost_model))

    def run(self, *args: Any, interpret: bool = False) -> Any:
        """Run the plan's kernels here on arrays like the arguments of the planned function.

        Kernels for another platform than JAX's default one are left to XLA, which gives the same results.
        With ``interpret=True`` they run in Pallas' interpreter instead, on any platform, slowly.

        Returns:
            the function's result.

        Raises:
            InvalidPlanError: the plan was read from a file that does not hold its program.
            TypeError: the arrays have other shapes or dtypes than the plan.
        """
        program = self.lowered
        inputs = program.graph.inputs[len(program.consts) :]
        arrays = [jnp.asarray(leaf) for leaf in jax.tree.leaves(args)]
        expected = [program.graph.values[v] for v in inputs]
        given = [f"{array.dtype}{list(array.shape)}" for array in arrays]
        wanted = [f"{value.dtype}{list(value.shape)}" for value in expected]
        if given != wanted:
            raise TypeError(f"expected arrays {', '.join(wanted)}, got {', '.join(given) or 'none'}")
        run = make_runner(program, self, platform=local_platform(), interpret=interpret)
        results = jax.jit(run)(*program.consts, *arrays)
        return results if program.out_tree is None else jax.tree.unflatten(program.out_tree, results)

    def verify(self, deadline_s: float = math.inf) -> Verification:
        """Check this plan without the planner that made it: kernels, costs, and the bound anew from
        ``proof``. After ``deadline_s`` seconds the bound is not re-checked. See
        ``fuseplan.verify.report.verify_plan``."""
        return verify_plan(self, deadline_s=deadline_s)

    def to_html(self, path: str | PathLike[str], title: str = "") -> None:
        """Write a page about this plan, beside the unfused one, that needs no network.

        The file is written atomically. Raises ``OutputError`` if it cannot be written.
        """

        write_plan_page(self, path, title)

    def explain(self, a: int | str, b: int | str) -> explanations.Explanation:
        """Why two operations are or are not in one kernel, and the cost of the opposite decision.

        Args:
            a: a node's id (``3`` or ``"n3"``), or the name of an operation (``"exp"``) if only one node has
                it, or only one pair of nodes with an edge.
            b: the same.

        Raises:
            InvalidArgumentError: there is no such node, or the name fits several.
        """
        return explanations.explain(self, a, b)

    def _repr_html_(self) -> str:
        """The summary, pictures of time and memory, and a table of the costliest kernels, for notebooks."""
        return plan_html(self)
