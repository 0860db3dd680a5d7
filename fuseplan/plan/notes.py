"""The notes of a plan: its own, and the figures of its device that are assumed."""

from __future__ import annotations

from costmodel.device import DeviceSpec
from fuseplan.plan.fusion_plan import FusionPlan


def assumed_text(device: DeviceSpec) -> str:
    """The figures of a device that are assumed, in a sentence; empty where none is."""
    if not device.assumed:
        return ""
    figures = f"assumed of {device.name}, not measured or published: {', '.join(device.assumed)}"
    return figures + (" (`fuseplan calibrate` measures this CPU)" if device.platform == "cpu" else "")


def all_notes(plan: FusionPlan) -> tuple[str, ...]:
    """The plan's notes, and the figures of its device that are assumed."""
    assumed = assumed_text(plan.device)
    return (*plan.notes, *([assumed] if assumed else []))
