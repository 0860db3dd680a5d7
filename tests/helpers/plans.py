"""The pipeline's stages with the public ``fuseplan.Plan`` as their result."""

from __future__ import annotations

from typing import Any

from fuseplan import Plan, pipeline
from fuseplan.frontend.lower import Lowered


def plan_function(*args: Any, **kwargs: Any) -> tuple[Lowered, Plan]:
    plan = Plan.of(pipeline.plan_function(*args, **kwargs))
    return plan.lowered, plan


def plan_traced(*args: Any, **kwargs: Any) -> tuple[Lowered, Plan]:
    plan = Plan.of(pipeline.plan_traced(*args, **kwargs))
    return plan.lowered, plan


def plan_best(*args: Any, **kwargs: Any) -> tuple[Lowered, Plan]:
    plan = Plan.of(pipeline.plan_best(*args, **kwargs))
    return plan.lowered, plan


def plan_lowered(*args: Any, **kwargs: Any) -> tuple[Lowered, Plan]:
    plan = Plan.of(pipeline.plan_program(*args, **kwargs).required())
    return plan.lowered, plan
