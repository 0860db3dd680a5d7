"""An extension of Griffe, which reads docstrings for ``docs/api.md``: the text below ``Example:`` is code.

Griffe knows the section only by the name ``Examples``. ``mkdocs.yml`` names this file; it is no module that
others import.
"""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Names each section ``Example`` of a docstring ``Examples``."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
