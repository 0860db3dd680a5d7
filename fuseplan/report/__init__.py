"""Report: plans as pandas frames and as an HTML page. Imported only when asked for."""

from __future__ import annotations

from fuseplan.report.frames import compare_frame, devices_frame, figures, kernels_frame, records
from fuseplan.report.page import Page, Study, Table, render_page, write_page, write_plan_page

__all__ = [
    "Page",
    "Study",
    "Table",
    "compare_frame",
    "devices_frame",
    "figures",
    "kernels_frame",
    "records",
    "render_page",
    "write_page",
    "write_plan_page",
]
