"""What the README says is run: every block of Python, in order, as one program."""

import re
from pathlib import Path

from fuseplan import planners

README = Path(__file__).resolve().parent.parent / "README.md"


def test_python_blocks(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(planners, "_PLANNERS", dict(planners._PLANNERS))  # one is registered
    text = README.read_text()
    monkeypatch.chdir(tmp_path)  # a block may write a report
    namespace = {"__name__": "readme"}
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    assert blocks, "the README has no example"
    for block in blocks:
        # Blank lines first, so that a traceback names the README's own line.
        before = text.count("\n", 0, block.start(1))
        exec(compile("\n" * before + block[1], str(README), "exec"), namespace)


def test_links_lead_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README.read_text())
    assert [link for link in links if not (README.parent / link).exists()] == []
