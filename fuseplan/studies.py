"""Compare planners over many programs and devices: ``fuseplan.study``.

Each planner plans each program for each device, with the rewrites that all planners are given and as traced.
Each plan is a row, which is written to a file at once. Worker processes, one for each lane, plan programs
that they load by name or read as JSON. A lane in this process takes the rest: planners, backends, rules of
operations and programs that another process cannot have, and those of other compilers, which one process at a
time may hold.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import pickle
import signal
import threading
import time
import unicodedata
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, partial
from multiprocessing.connection import Connection
from os import PathLike
from typing import TYPE_CHECKING, Any

import jax

from costmodel.device import DeviceSpec
from costmodel.devices import DEVICES
from costmodel.model import CostModel, plain_device
from fuseplan.bench.machine import machine_columns
from fuseplan.console import Board, board
from fuseplan.frontend.lower import Lowered, lower
from fuseplan.frontend.ops import has_registered_rules
from fuseplan.frontend.program_codec import UnwritableError, program_to_data
from fuseplan.frontend.trace import trace
from fuseplan.frontend.trace_settings import changed_settings, set_trace_settings, trace_settings
from fuseplan.plan.constraints import Constraints
from fuseplan.plan.fusion_plan import FusionPlan
from fuseplan.plan.json_codec import plan_to_json, read_plan
from fuseplan.plan.options import ALL_FEATURES, DEFAULT_DEADLINE_S, Features, Options
from fuseplan.planners import ProgramPlanner, get_planner, is_built_in
from fuseplan.report.comparison import NO_PLAN
from fuseplan.report.frames import figures, study_frame
from fuseplan.runtime.compare import compare_plan, default_planners
from fuseplan.settings import make_options, resolve_device
from fuseplan.support.atomic_file import check_writable
from fuseplan.support.errors import FuseplanError, InvalidArgumentError, short_reason
from fuseplan.support.object_digest import object_digest
from fuseplan.support.progress import Progress, followed
from fuseplan.support.row_file import RowFile
from fuseplan.workloads import load_workload
from fuseplan.workloads.own import OwnWorkload

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class StudyRow:
    """One plan of a study; None where there is none. The columns of ``fuseplan.COLUMNS["study"]``."""

    workload: str
    device: str
    dtype: str
    planner: str
    operations: int | None = None
    kernels: int | None = None
    time_us: float | None = None
    unrewritten_us: float | None = None
    """Of the planner's plan of the program as traced."""
    hbm_bytes: int | None = None
    peak_bytes: int | None = None
    recomputed_flops: int | None = None
    status: str = ""
    bound_us: float | None = None
    planning_s: float | None = None
    notes: str = ""
    """The notes of the plan, or the reason why there is none."""
    deadline_s: float = DEFAULT_DEADLINE_S
    date: str = ""
    """The day on which the row was made."""
    versions: str = ""
    """The versions, the machine, and where they apply JAX's settings and digests of the program, of the
    figures of the device, and of the options."""

    @property
    def task(self) -> tuple[str, str, str, str]:
        """The columns that tell the rows of a study apart."""
        return self.workload, self.device, self.dtype, self.planner


Named = tuple[str, Callable[..., Any], Sequence[Any]]
"""A program: its name, the function, and its arguments, arrays or ``ShapeDtypeStruct``s."""


def study(
    workloads: str | Named | Sequence[str | Named],
    devices: str | DeviceSpec | Sequence[str | DeviceSpec] | None = None,
    planners: str | Sequence[str] | None = None,
    *,
    dtypes: str | Sequence[str] = ("float32",),
    deadline_s: float = DEFAULT_DEADLINE_S,
    constraints: Constraints | None = None,
    features: Features = ALL_FEATURES,
    cost_model: CostModel | None = None,
    processes: int = 1,
    path: str | PathLike[str] | None = None,
) -> pd.DataFrame:
    """Plan programs for devices by planners, and return a frame with a row for each plan.

    Args:
        workloads: programs, each the name of a workload, ``package.module:function`` or ``file.py:function``
            (see ``fuseplan.workloads.load_workload``), or a tuple ``(name, f, args)``. The name has no
            control characters.
        devices: names of ``fuseplan.devices()``, or ``costmodel.DeviceSpec``s; None is this machine's.
        planners: names of ``fuseplan.planner_names()``; None is all, and ``xla`` if its compiler for the
            device is installed.
        dtypes: of the arrays of named workloads. Other programs have their own, and a row for each device and
            planner.
        deadline_s: seconds of each planning, after which the best plan found so far is taken.
        constraints: as for ``make_plan``.
        features: as for ``make_plan``.
        cost_model: as for ``make_plan``; this process plans with it, whatever ``processes`` is.
        processes: the number of processes that plan at a time. With 1, this process plans. With more, a
            script needs the usual ``if __name__ == "__main__":`` around its call.
        path: a CSV file. Each row is appended to it at once, so that an interrupted study continues where it
            stopped: rows that are there are not planned again, unless versions, machine, deadline, options,
            figures of the device, JAX's settings for tracing, the source or state of the cost model, or the
            program of a workload that is not fuseplan's own have changed. A row whose process died is not
            written. Rows of other versions, machines or deadlines are deleted when the first new
            row is written. Several studies may write one file if they agree in these.

    Returns:
        A frame with the columns ``workload, device, dtype, planner, operations, kernels, time_us,
        unrewritten_us, hbm_bytes, peak_bytes, recomputed_flops, status, bound_us, planning_s, notes,
        deadline_s, date, versions``; ``fuseplan.COLUMNS["study"]`` has their dtypes, units and meanings. A
        program that cannot be planned is a row with the status ``NONE`` and the reason in ``notes``.

        On a terminal, stderr shows what is being planned, its stage, the best time and gap so far, and the
        time left.

    Raises:
        UnknownNameError: a workload, device or planner is unknown. Nothing has been planned.
        InvalidArgumentError: there are no workloads, devices or planners, two have one name, an option is
            invalid, or the file at ``path`` is no CSV in UTF-8.
        OutputError: ``path`` cannot be written.
        OtherColumnsError: ``path`` is a file with other columns.

    Example:
        >>> import jax
        >>> x = jax.ShapeDtypeStruct((4096, 1024), "float32")
        >>> frame = study(["softmax", ("mine", jax.nn.relu, [x])], ["h200"], ["greedy", "solver"])
        >>> frame[["workload", "planner", "kernels"]].values.tolist()
        [['softmax', 'greedy', 1], ['softmax', 'solver', 1], ['mine', 'greedy', 1], ['mine', 'solver', 1]]
    """
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
        raise InvalidArgumentError(f"processes expects a number of at least 1, got {processes!r}")
    programs = [_program(workload) for workload in _several("workloads", workloads)]
    given = [None] if devices is None else _several("devices", devices)
    chosen = None if planners is None else _several("planners", planners)
    options = [
        [
            make_options(device, name, deadline_s, False, constraints, features, cost_model=cost_model)
            for name in (default_planners(device) if chosen is None else chosen)
        ]
        for device in map(resolve_device, given)
    ]
    tasks = [
        _Task(program, dtype, option, _versions(program, dtype, option))
        for program in programs
        for dtype in (_several("dtypes", dtypes) if program.has_dtypes else [program.own_dtype])
        for of_device in options
        for option in of_device
    ]
    places = {task.key: task for task in tasks}
    if len(places) < len(tasks):
        twice = next(task for task in tasks if places[task.key] is not task)
        raise InvalidArgumentError(f"expected each row once, got {' '.join(twice.key)} twice: rename one")
    file = None if path is None else _row_file(path, tasks, float(deadline_s))
    found = {} if file is None else {row.task: row for row in file.rows if row.task in places}
    add = _Adder(found, file)
    waiting = [task for task in tasks if task.key not in found]
    with board(len(waiting)) as shown:
        _Study(shown, add).run(waiting, processes)
    return study_frame([asdict(found[task.key]) for task in tasks])


def _several(name: str, given: Any) -> list[Any]:
    """One or more values of an argument, as a list."""
    if isinstance(given, (str, DeviceSpec)) or (name == "workloads" and _is_named_program(given)):
        return [given]
    if not isinstance(given, Iterable):
        raise InvalidArgumentError(f"{name} expects one or more in a list, got {given!r}")
    values = list(given)
    if not values:
        raise InvalidArgumentError(f"{name} expects one or more, got none")
    return values


def _is_named_program(given: Any) -> bool:
    """Whether an argument is one tuple ``(name, f, args)``."""
    return isinstance(given, tuple) and len(given) == 3 and isinstance(given[0], str) and callable(given[1])


# --- tasks -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Program:
    """A program of a study, which is built when it is first planned."""

    name: str
    build: Callable[[str], tuple[Callable[..., Any], Sequence[Any]]]
    """From a dtype to the function and its arguments."""
    is_named: bool
    """Whether another process can load it by its name."""
    has_dtypes: bool
    """Whether it can be built in the dtype that is asked for."""
    is_own: bool
    """Whether it is the user's, so that another program may have the same name."""
    own_dtype: str = ""
    built: dict[str, Lowered | str] = field(default_factory=dict)
    """By dtype, the program, or the reason why there is none. The last dtype only, as programs are large."""

    def lowered(self, dtype: str) -> Lowered | str:
        """The program in that dtype, or the reason why there is none."""
        if dtype not in self.built:
            try:
                f, args = self.build(dtype)
                made: Lowered | str = lower(trace(f, *args))
            except Exception as error:  # hours of other rows are worth more than a traceback
                made = short_reason(error)
            self.built.clear()
            self.built[dtype] = made
        return self.built[dtype]


def _program(workload: str | Named) -> _Program:
    """The program of one entry of ``workloads``. Raises if a name is unknown."""
    if isinstance(workload, str):
        known = load_workload(workload)
        is_own = ":" in workload
        if not isinstance(known, OwnWorkload):
            return _Program(workload, known.build, is_named=True, has_dtypes=True, is_own=is_own)
        program = _Program(workload, lambda _: known.build(), is_named=True, has_dtypes=False, is_own=True)
    else:
        is_named = isinstance(workload, (tuple, list)) and len(workload) == 3 and isinstance(workload[0], str)
        if not (is_named and callable(workload[1]) and isinstance(workload[2], (tuple, list))):
            raise InvalidArgumentError(
                "a workload is the name of one, package.module:function, file.py:function, or a tuple "
                f"(name, f, args) of a text, a function and a tuple of its arguments; got {workload!r}"
            )
        name, f, args = workload
        if any(unicodedata.category(character) in ("Cc", "Cs") for character in name):
            raise InvalidArgumentError(
                f"the name of a workload has no control characters and is text in Unicode, got {name!r}: "
                "rename it"
            )
        program = _Program(name, lambda _: (f, args), is_named=False, has_dtypes=False, is_own=True)
    made = program.lowered("")
    inputs = [made.graph.values[v] for v in made.graph.inputs] if isinstance(made, Lowered) else []
    program.own_dtype = max(inputs, key=lambda value: value.nbytes).dtype if inputs else ""
    program.built = {program.own_dtype: made}
    return program


def _digest_of(lowered: Lowered) -> str:
    """A digest of a program's operations, shapes and dtypes, which does not change with lines of source."""
    graph = lowered.graph
    nodes = [(n.op, n.signature, n.inputs, n.outputs, n.dims, n.roles, n.input_maps) for n in graph.nodes]
    return _digest((graph.values, nodes, graph.inputs, graph.outputs))


def _digest(value: Any) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=6).hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """One row that is asked for."""

    program: _Program
    dtype: str
    options: Options
    versions: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        """As ``StudyRow.task``."""
        return self.program.name, self.options.device.name, self.dtype, self.options.planner

    def __str__(self) -> str:
        workload, device, dtype, planner = self.key
        return f"{workload} on {device}: {planner}" + (f", {dtype}" if dtype not in ("", "float32") else "")

    @property
    def is_portable(self) -> bool:
        """Whether another process has the planner, the backend, the rules and the prices, and may hold the
        compiler."""
        planner, backend = self.options.planner, self.options.device.capabilities
        is_ours = is_built_in(planner) and backend.emitter.partition(".")[0] == "fuseplan"
        is_ours_alone = self.options.device.cost_model is not None or has_registered_rules()
        return is_ours and not is_ours_alone and not isinstance(get_planner(planner), ProgramPlanner)


@cache
def _base_versions() -> str:
    machine = machine_columns()
    names = ("fuseplan", "jax", "python")
    # The machine makes the planning times, and is the device "cpu".
    return "; ".join(
        [*(f"{name} {machine[name]}" for name in names), f"{machine['cpu']}, {machine['cores']} cores"]
    )


def _versions(program: _Program, dtype: str, options: Options) -> str:
    """All that a row depends on beside its key and its deadline."""
    parts = [_base_versions()]
    made = program.lowered(dtype) if program.is_own else ""
    if isinstance(made, Lowered):
        parts.append(f"program {_digest_of(made)}")
    parts += [f"{name} {value}" for name, value in changed_settings().items()]
    device = plain_device(options.device)
    if not _is_known(device):
        parts.append(f"device {_digest(_figures_of(device))}")
    if options.constraints is not None or options.features != ALL_FEATURES:
        parts.append(f"options {_digest((options.constraints, options.features))}")
    if (model := options.device.cost_model) is not None:
        told = object_digest(model, CostModel)
        # No row is continued that may be of another state of the model.
        parts.append(f"cost model {model.name} {told or f'of unknown state {uuid.uuid4().hex[:12]}'}")
    return "; ".join(parts)


def _is_known(device: DeviceSpec) -> bool:
    """Whether the name of a device, perhaps with a backend, tells all of its figures. Those of this machine
    are measured."""
    name, _, backend = device.name.partition(":")
    known = DEVICES.get(name)
    if known is None or device.backend != (backend or known.backend):
        return False
    return replace(device, name=name, backend=known.backend) == known


def _figures_of(device: DeviceSpec) -> list[Any]:
    """The fields that change a plan. The sources of measured figures do not, and have a date."""
    texts = ("description", "sources")
    return [getattr(device, of.name) for of in fields(device) if of.name not in texts]


def _row_file(path: str | PathLike[str], tasks: Iterable[_Task], deadline_s: float) -> RowFile[StudyRow]:
    """The file of rows, without those of other versions or another deadline, and without rows that are asked
    for and depend on something that has changed."""
    expected, base = {task.key: task.versions for task in tasks}, _base_versions()

    def is_kept(row: StudyRow) -> bool:
        if row.deadline_s != deadline_s or not f"{row.versions}; ".startswith(f"{base}; "):
            return False
        return row.versions == expected.get(row.task, row.versions)

    return RowFile(check_writable(path), StudyRow, is_kept)


@dataclass(slots=True)
class _Adder:
    """The rows found so far, and their file."""

    rows: dict[tuple[str, str, str, str], StudyRow]
    file: RowFile[StudyRow] | None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, task: _Task, found: dict[str, Any], is_final: bool = True) -> None:
        """Add the row of a task. One that is not ``is_final`` stays out of the file, whose rows are not
        planned again."""
        workload, device, dtype, planner = task.key
        today = time.strftime("%Y-%m-%d")
        row = StudyRow(
            workload, device, dtype, planner, **found,
            deadline_s=task.options.deadline_s, date=today, versions=task.versions,
        )  # fmt: skip
        with self.lock:
            self.rows[row.task] = row
            if self.file is not None and is_final:
                self.file.add(row)


def _plan(lowered: Lowered | str, options: Options) -> dict[str, Any]:
    """The columns of a row that planning finds."""
    if isinstance(lowered, str):
        return {"status": NO_PLAN, "notes": lowered}
    found: dict[str, Any] = {"operations": len(lowered.graph.nodes)}
    try:
        row = compare_plan(lowered, options)
    except Exception as error:  # hours of other rows are worth more than a traceback
        return found | {"status": NO_PLAN, "notes": short_reason(error)}
    found["notes"] = "; ".join(row.notes)
    if row.plan is None:
        return found | {"status": NO_PLAN}
    unrewritten_us = None if row.unrewritten_ps is None else row.unrewritten_ps / 1e6
    return found | figures(row.plan) | {"unrewritten_us": unrewritten_us, "planning_s": row.plan.planning_s}


# --- lanes -----------------------------------------------------------------------------------


class _Study:
    """The planning of tasks in this process and in others."""

    def __init__(self, shown: Board, add: _Adder) -> None:
        self._shown, self._add = shown, add
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def run(self, tasks: Sequence[_Task], processes: int) -> None:
        """Plan all tasks. What a lane raises, and Ctrl-C, end all lanes."""
        if processes == 1 or len(tasks) < 2:
            for task in tasks:
                self._here(task)
            return
        here: list[_Task] = []
        away: deque[tuple[_Task, _Source]] = deque()
        for task, source in _sources(tasks):
            if source is None:
                here.append(task)
            else:
                away.append((task, source))
        settings = trace_settings()  # of this thread: the lanes have none of their own
        workers = [_Worker(settings) for _ in range(min(processes, len(away)))]
        threads = [
            threading.Thread(target=self._lane, args=(worker, away), daemon=True) for worker in workers
        ]
        try:
            for thread in threads:
                thread.start()
            for task in here:
                if self._error is not None:
                    break
                self._here(task)
            for thread in threads:
                while thread.is_alive() and self._error is None:
                    thread.join(0.2)  # without a timeout it cannot be interrupted on all systems
        finally:
            away.clear()
            # First all: a process that the end of another one ends has not died by itself.
            for worker in workers:
                worker.close()
            for worker in workers:
                worker.end()
            for thread in threads:
                if thread.is_alive():
                    thread.join()
        if self._error is not None:
            raise self._error

    def _here(self, task: _Task) -> None:
        with followed() as progress:
            self._shown.start(id(task), str(task), partial(_told, progress))
            self._add(task, _plan(task.program.lowered(task.dtype), task.options))
        self._shown.done(id(task))

    def _lane(self, worker: _Worker, tasks: deque[tuple[_Task, _Source]]) -> None:
        """Plan tasks in one worker process, until there are no more."""
        try:
            while True:
                try:
                    task, source = tasks.popleft()
                except IndexError:
                    return
                state = _Remote()
                self._shown.start(id(task), str(task), state.told)
                try:
                    self._add(task, worker.plan((source, task.options), state))
                except _DiedError as error:
                    self._add(task, {"status": NO_PLAN, "notes": str(error)}, is_final=False)
                self._shown.done(id(task))
        except BaseException as error:
            with self._lock:
                self._error = self._error or error
            tasks.clear()


@dataclass(slots=True)
class _Remote:
    """The progress of planning in another process, as it last told it."""

    text: str = ""

    def told(self) -> str:
        """As ``_told``."""
        return self.text


def _told(progress: Progress) -> str:
    """The pass that runs, the best plan and its gap, and the time left until the deadline."""
    return ", ".join(filter(None, (str(progress), progress.left)))


_Source = str | tuple[str, str | None]
"""A program for another process: its plan file, or its name and, if it can be built in several, its dtype."""


def _sources(tasks: Sequence[_Task]) -> Iterable[tuple[_Task, _Source | None]]:
    """For each task, its program for another process; None for a task that this process has to plan."""
    written: dict[tuple[int, str], str | None] = {}
    for task in tasks:
        program = task.program
        if not (task.is_portable and _is_picklable(task.options)):
            yield task, None
        elif program.is_named:
            yield task, (program.name, task.dtype if program.has_dtypes else None)
        else:
            place = (id(program), task.dtype)
            if place not in written:
                written[place] = _written(program.lowered(task.dtype), task.options.device)
            yield task, written[place]


def _is_picklable(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError):  # values of the user's own classes, say
        return False
    return True


def _written(lowered: Lowered | str, device: DeviceSpec) -> str | None:
    """A program as JSON: that of a plan without kernels. None if it cannot be written."""
    if isinstance(lowered, str):
        return None
    try:
        program_to_data(lowered)
    except UnwritableError:
        return None
    return plan_to_json(FusionPlan(lowered.graph, device, "", (), program=lowered))


class WorkerError(FuseplanError, RuntimeError):
    """A process of a study cannot start."""


class _DiedError(Exception):
    """A process ended while it planned. The message is the reason in the row."""


class _Worker:
    """A process that plans one task after another. One that dies is replaced at the next task."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._process: Any = None
        self._connection: Connection | None = None
        self._ended = False
        self._starting = threading.Lock()

    def plan(self, message: Any, state: _Remote) -> dict[str, Any]:
        """The columns that planning finds; while it plans, its progress is in ``state``.

        Raises:
            WorkerError: the process cannot start.
            _DiedError: it has died.
            EOFError, OSError: this has ended it.
        """
        connection = self._connection or self._started()
        try:
            connection.send(message)
            while True:
                kind, value = connection.recv()
                if kind == "row":
                    return dict(value)
                state.text = value
        except (EOFError, OSError):
            self._connection = None
            if self._ended:
                raise
            raise _DiedError(
                f"the process that planned it ended with exit code {self._code()}: is there enough memory?"
            ) from None

    def _started(self) -> Connection:
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
        connection, other = context.Pipe()
        with self._starting:
            if self._ended:
                raise EOFError
            process = context.Process(target=_work, args=(other, self._settings), daemon=True)
            process.start()
            self._process = process
        other.close()
        try:
            connection.recv()  # it is ready
        except (EOFError, OSError):
            raise WorkerError(
                f"a process of the study ended with exit code {self._code()} before it could plan. In a "
                'script, call fuseplan.study below `if __name__ == "__main__":`, as each process imports the '
                "script; or leave out processes"
            ) from None
        self._connection = connection
        return connection

    def _code(self) -> int | None:
        self._process.join()
        code: int | None = self._process.exitcode
        return code

    def close(self) -> None:
        """Start no process from now on, and take an end of the process as wanted."""
        with self._starting:
            self._ended = True

    def end(self) -> None:
        """After ``close``: end the process, whatever it does."""
        if self._process is not None:
            self._process.terminate()
            self._process.join()


_TELL_S = 0.25
"""Seconds between two reports of a worker on its progress."""


def _work(connection: Connection, settings: dict[str, Any]) -> None:
    """Plan what arrives, in a worker process, until the other end is closed. ``settings`` are the other
    process's ``trace_settings()``."""
    # Ctrl-C reaches all processes of a terminal: the one that started this ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_trace_settings(settings)
    jax.config.update("jax_platforms", "cpu")  # planning needs no accelerator, which one process may hold
    last: tuple[_Source, Lowered | str] | None = None
    sending = threading.Lock()
    connection.send(("ready", ""))
    while True:
        try:
            source, options = connection.recv()
        except EOFError:
            return
        with followed() as progress, _telling(connection, progress, sending):
            if last is None or last[0] != source:
                last = source, _read(source)
            found = _plan(last[1], options)
        with sending:
            connection.send(("row", found))


def _read(source: _Source) -> Lowered | str:
    """The program of a message, or the reason why there is none."""
    try:
        if isinstance(source, str):
            return read_plan(source).lowered
        name, dtype = source
        workload = load_workload(name)
        f, args = workload.build() if dtype is None else workload.build(dtype)
        return lower(trace(f, *args))
    except Exception as error:  # it is the row's reason
        return short_reason(error)


class _telling:  # noqa: N801  # used as a block
    """Send the progress of planning, as text, while the block runs."""

    def __init__(self, connection: Connection, progress: Progress, sending: threading.Lock) -> None:
        self._connection, self._progress, self._sending = connection, progress, sending
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tell, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        self._thread.join()

    def _tell(self) -> None:
        while not self._ended.wait(_TELL_S):
            try:
                with self._sending:
                    self._connection.send(("progress", _told(self._progress)))
            except OSError:  # the other end is gone, and the planning of no use
                return
