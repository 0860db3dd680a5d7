"""The README and the pages of ``docs`` say what is so: their code runs, their commands print what they
show, their tables are made of files, and no other number stands in them."""

import csv
import dataclasses
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer.main

from experiments import readme
from fuseplan.bench.cpu import Row as CpuRow
from fuseplan.bench.machine import machine_columns
from fuseplan.bench.planning import PlanTiming, csv_of
from fuseplan.bench.solver import STAGES, Ablation, SolverTiming, Spread
from fuseplan.cli import app
from fuseplan.studies import StudyRow

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [pytest.param(page, id=str(page.relative_to(ROOT))) for page in readme.documents()]


def fences(text, language):
    return list(re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


def program_of(page):
    """Every block of a page, in order, at its own lines, so that a traceback names these."""
    text, program = page.read_text(), ""
    for block in fences(text, "python"):
        before = text.count("\n", 0, block.start(1))
        program += "\n" * (before - program.count("\n")) + block[1]
    return program


@pytest.mark.parametrize("page", [p for p in PAGES if p.values[0].parent.name != "how-to"])
def test_python_blocks(page, tmp_path, monkeypatch):
    program = program_of(page)
    monkeypatch.chdir(tmp_path)  # a block may write a report
    assert program or page != README, "the README has no example"
    exec(compile(program, str(page), "exec"), {"__name__": "readme"})


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if p.values[0].parent.name == "how-to"])
def test_python_blocks_that_extend_fuseplan(page, tmp_path):
    """In a process of their own: they register planners, rules and backends."""
    file = tmp_path / "page.py"
    file.write_text(program_of(page))
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(file)], cwd=tmp_path, env=env, capture_output=True,
        text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\((?!https?:)([^)#]+)", prose)
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_first_screen_says_what_has_not_been_done():
    first = "\n".join(README.read_text().splitlines()[:24])
    assert "All times for a GPU or a TPU on this page are modelled" in first
    assert len(fences(first, "sh")) == 2


def test_the_readme_is_short_and_has_two_tables_and_a_picture():
    text = README.read_text()
    prose = re.sub(r"<!-- table: .*?<!-- end -->", "", text, flags=re.DOTALL)
    assert len(prose.split()) <= 800, "move what is deep to docs/"
    assert re.findall(r"<!-- table: (\w+) -->", text) == ["headline_cpu", "headline"]
    assert len(re.findall(r"^!\[", text, re.MULTILINE)) == 1


def test_links_of_the_readme_lead_somewhere_on_pypi():
    """The build makes relative links absolute."""
    hook = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]
    readme_hook = hook["fancy-pypi-readme"]
    text = README.read_text()
    for substitution in readme_hook["substitutions"]:
        text = re.sub(substitution["pattern"], substitution["replacement"], text)
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 10
    assert [link for link in links if not link.startswith("https://")] == []


# --- tables ----------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_made_of_their_files(page):
    text = page.read_text()
    assert readme.with_tables(text, page) == text, "python -m experiments.readme --write --tables"
    opened = re.findall(r"<!-- table: (.*?) -->", text)
    assert len(opened) == text.count("<!-- end -->") == len(readme.TABLE.findall(text))


def test_every_table_has_a_page():
    shown = {
        name for page in readme.documents() for name in re.findall(r"<!-- table: (\w+) -->", page.read_text())
    }
    assert shown == set(readme.TABLES)


def test_a_table_that_was_edited_is_noticed():
    text = README.read_text()
    cell = re.search(r"\| `softmax` \| ([\d.]+) \|", text)
    edited = text[: cell.start(1)] + "1.23" + text[cell.end(1) :]
    assert readme.with_tables(edited, README) == text


MACHINE = machine_columns()


def records_of(name):
    """Rows as the command that writes the file of a table writes them."""
    if name == "cpu.csv":
        rows = [
            CpuRow(
                "mlp",
                "met",
                10.0,
                5.0,
                2.0,
                1.9,
                2.1,
                jax_temp_bytes=10**6,
                fuseplan_temp_bytes=10**5,
                predicted_ms=4.0,
                **MACHINE,
            ),
            CpuRow("softmax", jax_ms=2.0, fuseplan_ms=2.0, speedup=1.0, predicted_ms=5.0, **MACHINE),
            CpuRow("nbody", "failed", error="no memory", **MACHINE),
        ]
        return csv_of([dataclasses.asdict(row) for row in rows])
    if name == "planning.csv":
        row = PlanTiming(
            "mlp", "h200", "solver", 10, 9, 3, 2, 40, 2, "OPTIMAL", 0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 1.5, None
        )
        return csv_of([dataclasses.asdict(row) | MACHINE])
    if name == "solver.csv":
        stages, total = tuple((stage, 0.1) for stage in STAGES), Spread(1.5, 1.4, 1.6)
        rows = [
            SolverTiming(
                "mlp",
                "h200",
                10,
                3,
                2,
                40,
                30,
                2,
                12.5,
                "OPTIMAL",
                0.0,
                stages,
                total,
                total,
                None,
                (),
                (("greedy", 0.25),),
                (Ablation("packs", 1.0, 1.0),),
                None,
            ),
            SolverTiming(
                "dag",
                "h200",
                10,
                3,
                2,
                40,
                30,
                2,
                12.5,
                "FEASIBLE",
                3.0,
                stages,
                total,
                total,
                None,
                (),
                (("greedy", 0.0),),
                (Ablation("packs", 1.5, 1.0),),
                None,
            ),
        ]
        return csv_of([row.as_dict() | MACHINE for row in rows])
    raise AssertionError(name)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("cpu", ["| `mlp` | 10 | 5 | 2.00× (1.90–2.10) | 1.0 MB → 100.0 kB | 4 |",
                 "| `softmax` | 2 | 2 | 1.00× | – → – | 5 (off by more than 2×) |",
                 "| `nbody` | – | – | – | – → – | – |"]),
        ("planning", ["| `mlp` | 10 | 2 | 0.10 | 0.20 | 0.30 | 0.40 | 0.50 | 1.50 | – | OPTIMAL |"]),
        ("solver", ["| `mlp` | 10 | – | proven | 1.5 | +25.0 % | – |",
                    "| `dag` | 10 | – | 300.00 % | 1.5 | – | – |"]),
    ],
)  # fmt: skip
def test_measured_tables_are_made_of_what_the_commands_write(tmp_path, table, expected):
    made = readme.TABLES[table]
    assert made.command in made.text(tmp_path)  # there is no file yet
    (tmp_path / made.file).write_text(records_of(made.file))
    text = made.text(tmp_path)
    assert [line for line in expected if line not in text.splitlines()] == []
    assert MACHINE["cpu"] in text
    assert MACHINE["date"][:10] in text
    assert f"JAX {MACHINE['jax']}" in text


@pytest.mark.parametrize("column", ["cpu", "date", "jax", "fuseplan"])
def test_figures_without_machine_version_or_date_are_refused(tmp_path, column):
    rows = list(csv.DictReader(records_of("cpu.csv").splitlines()))
    del rows[-1][column]
    (tmp_path / "cpu.csv").write_text(csv_of([{**dict.fromkeys(rows[0], ""), **row} for row in rows]))
    with pytest.raises(readme.NoProvenanceError, match="every row shall"):
        readme.TABLES["cpu"].text(tmp_path)


def study(tmp_path, **columns):
    """Two workloads for two devices: the solver's plan takes half of greedy's time, and XLA's none on one."""
    times = {"greedy": 20.0, "solver": 10.0, "xla": 8.0}
    fields = {field.name for field in dataclasses.fields(StudyRow)}
    rows = []
    for workload in ("softmax", "mlp"):
        for planner, time_us in times.items():
            row = dict.fromkeys(fields, "") | {"workload": workload, "device": "h200", "dtype": "float32"}
            row |= {
                "planner": planner,
                "time_us": time_us,
                "date": "2026-01-02",
                "versions": "fuseplan 1; jax 2",
            }
            rows.append(row | columns)
    (tmp_path / "greedy_vs_solver.csv").write_text(csv_of(rows))


def test_tables_of_the_study(tmp_path):
    study(tmp_path, unrewritten_us=30.0)
    text = {
        name: readme.TABLES[name].text(tmp_path) for name in ("headline", "planners", "below", "rewriting")
    }
    assert "| `softmax` | 8.00 | 20.00 | 10.00 | – | – | – |" in text["headline"]
    assert "| `greedy` | 2.00 (0 of 2) |" in text["planners"]
    assert "| `xla` | 0.80 (2 of 2) |" in text["planners"]
    assert "| `h200` | 2 of 2 | `softmax` 1.25×, `mlp` 1.25× |" in text["below"]
    assert "| `greedy` | 1.50× |" in text["rewriting"]
    assert all("*fuseplan 1; JAX 2; 2026-01-02." in t for t in text.values())
    assert "Assumed of `tpu_v5e`: `launch_ps`, `vector_flops_per_s`" in text["headline"]
    assert "Assumed" not in text["below"]  # it has no TPU


# --- commands --------------------------------------------------------------------------------

SHOWN = [
    pytest.param(shown, id=f"{page.stem}-{shown.commands.split()[1]}")
    for page in readme.documents()
    for shown in readme.shown_commands(page.read_text())
    if shown.output is not None
]


@pytest.mark.slow
@pytest.mark.one_python  # the plans of another JAX may differ
@pytest.mark.parametrize("shown", SHOWN)
def test_commands_print_what_the_page_shows(shown):
    found = readme.run_commands(shown.commands)
    assert readme.without_seconds(found) == readme.without_seconds(shown.output), (
        "python -m experiments.readme --write"
    )


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_commands_shows_its_output_or_is_run_by_ci(page):
    blocks = fences(page.read_text(), "sh")
    shown = list(readme.shown_commands(page.read_text()))
    assert len(shown) == len(blocks)
    assert [
        s.commands for s in shown if s.output is None and s.commands.strip() not in readme.RUN_BY_CI
    ] == []


def test_the_readme_has_the_commands_of_ci_which_runs_them():
    text, script = README.read_text(), ROOT / ".ci" / "run"
    for command in readme.RUN_BY_CI:
        assert f"\n{command}\n" in text
        assert command in script.read_text()


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_sentences_exist(page):
    """``fuseplan COMMAND --option`` in code between words names a command and options that there are."""
    group = typer.main.get_command(app)
    found = re.findall(r"`(?:\w+=\S+ )?fuseplan ([^`\n]+)`", page.read_text())
    for text in found:
        command, words = group, text.split()
        while words and hasattr(command, "commands"):
            assert words[0] in command.commands, text
            command = command.commands[words.pop(0)]
        options = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
        assert [word for word in words if word.startswith("-") and word not in options] == [], text


def test_only_seconds_may_differ():
    shown = "planner  µs  planning\ngreedy  20.7      17 ms\nsolver  15.5    0.74 s\n  seconds  0.04\n"
    slower = "planner  µs  planning\ngreedy  20.7    1.1 s\nsolver  15.5      12 s\n  seconds  1.7\n"
    assert readme.without_seconds(shown) == readme.without_seconds(slower)
    for other in (shown.replace("15.5", "15.6"), shown.replace("solver", "best"), shown + "note: more\n"):
        assert readme.without_seconds(shown) != readme.without_seconds(other)


@pytest.mark.slow
def test_a_command_that_fails_says_what_it_said():
    with pytest.raises(RuntimeError, match=r"exits with 2: .*nothere"):
        readme.run_commands("fuseplan plan nothere --device h200 | cat")


# --- figures ---------------------------------------------------------------------------------


def test_every_figure_is_there_and_the_exact_ones_are_what_would_be_drawn_now():
    assert readme.stale_figures() == [], "python -m experiments.readme --write --figures"


def test_a_figure_that_was_edited_is_noticed(tmp_path, monkeypatch):
    name = next(name for name, picture in readme.FIGURES.items() if picture.is_exact)
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text((ROOT / name).read_text().replace("</svg>", "<g/></svg>"))
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    monkeypatch.setattr(readme, "FIGURES", {name: readme.FIGURES[name]})
    assert readme.stale_figures() == [name]


def test_every_picture_of_a_page_is_one_of_the_figures():
    shown = {
        (page.parent / link).resolve().relative_to(ROOT).as_posix()
        for page in readme.documents()
        for link in re.findall(r"!\[[^\]]*\]\((?!https?:)([^)]+\.svg)\)", page.read_text())
    }
    assert shown <= set(readme.FIGURES)


# --- numbers in sentences --------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_no_sentence_has_a_number_of_its_own(page):
    assert readme.loose_numbers(page.read_text()) == []


@pytest.mark.parametrize("phrase", readme.FACTS)
def test_facts_are_so(phrase):
    assert readme.FACTS[phrase]()
    assert any(phrase in page.read_text() for page in readme.documents()), "a fact that no page states"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It is 3.5 times as fast.", ["It is 3.5 times as fast."]),
        ("It takes 10 s, or 20 %.", ["It takes 10 s, or 20 %.", "It takes 10 s, or 20 %."]),
        ("| planner | 17 |", ["| planner | 17 |"]),
        ("- 40 % less", ["- 40 % less"]),
        ("an H200, a TPU v5e, GPT-2, x86-64 and float32", []),
        ("exit code `3`, [text](file1.md)", []),
        ("```\n17 µs\n```\n", []),
        ("<!-- table: cpu -->\n| 17 |\n<!-- end -->", []),
        ("with Python 3.11 or newer", []),
        ("with Python 3.12 or newer", ["with Python 3.12 or newer"]),
    ],
)
def test_numbers_are_told_from_names(text, found):
    assert readme.loose_numbers(text) == found
