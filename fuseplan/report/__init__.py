"""Show a plan: as text, tables, data frames, explanations, plots and a page.

In: a plan, or several with their names. Out: text (``text``), the reasons behind one decision (``explain``),
pandas frames (``frames``), an HTML file (``page``, with the data of ``page_data``), figures (``plots``), or
the output that ``FUSEPLAN_DEBUG`` asks for (``debug``). Only ``frames``, ``page`` and ``plots`` import
pandas, Jinja or Matplotlib. Open ``text`` first.
"""
