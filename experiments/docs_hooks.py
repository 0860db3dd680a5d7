"""Hooks of MkDocs: render the reports of the gallery, and make links out of ``docs`` lead to the repository.

``mkdocs build`` loads this file, as ``mkdocs.yml`` says. It is no module that others import.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent

GALLERY = {
    "layernorm_grad": "the three gradients of a layer norm, on an H200",
    "gpt2_block_grad": "a transformer block of GPT-2 with its gradients, on an H200",
    "causal_attention": "attention with a causal mask: one kernel, on an H200",
    "adam_update": "a step of Adam: many small kernels, on an H200",
}
"""Workloads of the gallery, and what they are."""

_LINK = re.compile(r"(\]\()(?!https?:|#)([^)#]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add a report for each workload of the gallery to the site."""
    for name in GALLERY:
        with tempfile.TemporaryDirectory() as folder:
            page = Path(folder) / "report.html"
            command = ["report", name, "--device", "h200", "--planners", "unfused,greedy,solver"]
            subprocess.run([sys.executable, "-m", "fuseplan", *command, "--out", str(page)], check=True)
            files.append(File.generated(config, f"gallery/{name}.html", content=page.read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Fill in the gallery, and make links to files outside of ``docs`` absolute."""
    shown = [f"- [`{name}`](gallery/{name}.html): {text}" for name, text in GALLERY.items()]
    markdown = markdown.replace("<!-- gallery -->", "\n".join(shown))
    docs = Path(config["docs_dir"])
    folder = (docs / page.file.src_uri).parent

    def absolute(match: re.Match[str]) -> str:
        target = (folder / match[2]).resolve()
        if target.is_relative_to(docs) or not target.exists():
            return match[0]
        kind = "tree" if target.is_dir() else "blob"
        return f"{match[1]}{config['repo_url']}/{kind}/main/{target.relative_to(ROOT)}"

    return _LINK.sub(absolute, markdown)
