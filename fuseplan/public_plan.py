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

from costmodel.model import CostModel
from fuseplan.memory.allocation import Buffer, arena_bytes
from fuseplan.plan.fusion_plan import FusionPlan
from fuseplan.plan.json_codec import plan_to_json
from fuseplan.report import explain as explanations
from fuseplan.report import text
from fuseplan.report.frames import kernels_frame  # pandas takes a while to import
from fuseplan.report.page import write_plan_page
from fuseplan.runtime.executor import make_runner
from fuseplan.runtime.replan import structure_key
from fuseplan.schedule.structure import Signatures
from fuseplan.targets.detect import local_platform
from fuseplan.verify.plan import checked_plan_from_json, plan_buffers
from fuseplan.verify.report import Verification, verify_plan

if TYPE_CHECKING:
    import pandas as pd


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
        operation).
        """

        return kernels_frame(self)

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
        """The table for notebooks."""
        return text.html_table(self)
