"""Show a plan: as text, tables, data frames, explanations, figures and a page.

In: a plan, or several with their names. Out: text (``text``), the reasons behind one decision (``explain``),
pandas frames (``frames``), an HTML file (``page``, with the data of ``page_data``), figures and pictures
(``figures``, ``pictures``), files for other viewers (``exports``), or the output that ``FUSEPLAN_DEBUG``
asks for (``debug``). Only ``frames``, ``page`` and ``figures`` import pandas, Jinja or Matplotlib. Open
``text`` first.
"""
