"""Collect the compiler's report on one kernel, without the device: registers, spills and shared memory by
``ptxas -v``, or VMEM and cycles by libtpu's static profile.

Cycles need ``dump_cycles`` to be called before libtpu is loaded.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuseplan.extend import MissingCompilerError, compile_for

_ARCHITECTURE = {"h200": "sm_90a", "h100": "sm_90a"}
_PROFILE_FLAGS = "--xla_tpu_check_llo_types=false --xla_jf_dump_static_llo_profile_to="
"""The profile checks types that Mosaic's loads of 16 bits do not have, and ends the process for it
(tests/aot/test_compiled.py::test_sixteen_bits_are_estimated)."""

_FUNCTION = re.compile(r"Compiling entry function '(?P<name>[^']+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SERIALIZED = re.compile(r"wgmma.mma_async instructions are serialized .* in the function '(?P<name>[^']+)'")
_KERNEL_HASH = re.compile(r'kernel_hash = "((?:\\.|[^"\\])*)"')
_MOSAIC = "_mosaic_gpu_kernel"
"""What Mosaic GPU adds to a kernel's name."""

_LAUNCH = re.compile(
    r"(?P<name>\S+) grid: \[(?P<grid>[\d, ]+)\] threads: \[(?P<threads>\d+)[\d, ]*\]\s*"
    r"shared_memory: (?P<shared>\d+) bytes"
)
_CYCLES = re.compile(r"estimated_cycles: (\d+)\s+num_equivalent_hlos: (\d+)")
_NOT_ESTIMATED = re.compile(r'hlo_op_name: "(?P<name>[^"]+)"\s+estimated_cycles: 0\s[^{}]*hlo_instruction \{')
"""What takes no time has no cycles either; what could not be estimated is shown with its instruction."""
_VMEM = re.compile(r'"memory_space":"1","offset":"\d+","size":"(\d+)"')


@dataclass(frozen=True, slots=True)
class GpuReport:
    """The resources of one GPU kernel."""

    registers: int
    """Of a thread."""
    spill_bytes: int
    """Stored to local memory by a thread, loads not counted."""
    shared_bytes: int | None
    """None, as ``threads``, of a kernel by Mosaic GPU, which launches it itself."""
    threads: int | None
    serialized: bool
    """Whether ``ptxas`` gives up running the tensor cores beside the rest (C7514)."""


@dataclass(frozen=True, slots=True)
class TpuReport:
    """The resources of one program for a TPU, a kernel of ours or XLA's for the same."""

    vmem_bytes: int | None
    """The most that one of its operations may take; None where the compiler does not say."""
    cycles: int | None
    """Estimated for all of its operations; None where they are not dumped, or one has no estimate."""
    hbm_bytes: int
    """What XLA counts for its own operations; of a custom call, only what it writes."""
    unestimated: tuple[str, ...] = ()
    """The operations that have no estimate."""


def find_ptxas() -> str:
    """The assembler that comes with JAX's CUDA wheels, or on the path.

    Raises ``MissingCompilerError`` where there is none.
    """
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in Path(folder).glob("*/bin/ptxas"):
            return str(path)
    found = shutil.which("ptxas")
    if found is None:
        raise MissingCompilerError("expected ptxas, which comes with pip install 'fuseplan[aot]'")
    return found


def gpu_report(kernel: Callable[..., Any], avals: Sequence[Any], device: str) -> dict[str, GpuReport]:
    """Compile a function for a GPU that need not be there: the resources of each kernel, by name.

    Raises what the compiler raises for a kernel that it refuses.
    """
    with tempfile.TemporaryDirectory() as folder:
        with _printed_by_mosaic() as printed:
            compiled = compile_for(
                kernel,
                *avals,
                device=device,
                xla_dump_to=folder,
                xla_gpu_dump_llvmir=True,
                xla_dump_hlo_pass_re="^$",
                xla_dump_emitter_re="ptx",
            )
            said = _remembered(compiled.as_text(), printed())
        launches = {
            found["name"]: found
            for path in Path(folder).glob("*thunk_sequence.txt")
            for found in _LAUNCH.finditer(path.read_text())
        }
        said += "".join(_assembled(path, device) for path in sorted(Path(folder).glob("*.ptx")))
    serialized = {found["name"] for found in _SERIALIZED.finditer(said)}
    reports = {}
    for name, registers, spill_bytes in _functions(said):
        launch = launches.get(name)
        shared, threads = (int(launch["shared"]), int(launch["threads"])) if launch else (None, None)
        if launch or name.endswith(_MOSAIC):
            report = GpuReport(registers, spill_bytes, shared, threads, name in serialized)
            reports[name.removesuffix(_MOSAIC)] = report
    return reports


_said_of: dict[str, str] = {}
"""What was said of a kernel by Mosaic GPU when it was assembled, which is once a process."""


def _remembered(program: str, said: str) -> str:
    kernel = _KERNEL_HASH.search(program)
    if kernel and said:
        _said_of[kernel[1]] = said
    return _said_of.get(kernel[1], "") if kernel else said


@contextmanager
def _printed_by_mosaic() -> Iterator[Callable[[], str]]:
    """What ``ptxas -v`` says of kernels by Mosaic GPU, which are assembled in this process and printed to
    its standard output: a function that has it, once they are."""
    variable = "MOSAIC_GPU_DUMP_PTXAS"
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)

        def said() -> str:
            file.seek(0)
            return file.read().decode(errors="replace")

        try:
            yield said
        finally:
            os.dup2(kept, 1)
            os.close(kept)
            os.environ.pop(variable) if before is None else os.environ.update({variable: before})


def _assembled(path: Path, device: str) -> str:
    """What ``ptxas -v`` says of a file of PTX."""
    if not path.stat().st_size:
        return ""
    architecture = _ARCHITECTURE[device.partition(":")[0]]
    command = [find_ptxas(), "-v", f"-arch={architecture}", str(path), "-o", os.devnull]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stderr


def _functions(said: str) -> Iterator[tuple[str, int, int]]:
    """Name, registers and bytes of spill stores of each function."""
    starts = [*_FUNCTION.finditer(said)]
    for start, end in zip(starts, [*(s.start() for s in starts[1:]), len(said)], strict=True):
        text = said[start.end() : end]
        spills, registers = _SPILLS.search(text), _REGISTERS.search(text)
        if spills and registers:
            yield start["name"], int(registers.group(1)), int(spills.group(2))


_profiles: list[str] = []


@contextmanager
def dump_cycles() -> Iterator[None]:
    """Within it ``tpu_report`` knows cycles; to be entered before libtpu is loaded, once a process."""
    with tempfile.TemporaryDirectory() as folder:
        before = os.environ.get("LIBTPU_INIT_ARGS")
        os.environ["LIBTPU_INIT_ARGS"] = " ".join(filter(None, (before, _PROFILE_FLAGS + folder)))
        _profiles.append(folder)
        try:
            yield
        finally:
            _profiles.pop()


def tpu_report(
    kernel: Callable[..., Any], avals: Sequence[Any], device: str, in_hbm: bool = False
) -> TpuReport:
    """Compile a function for a TPU that need not be there; with ``in_hbm``, all arrays lie there between
    operations, and XLA leaves none in VMEM.

    Raises what the compiler raises for a kernel that it refuses.
    """
    for folder in _profiles:  # of the last program
        for path in Path(folder).glob("*"):
            path.unlink()
    where: dict[str, Any] = {"xla_msa_enable": False} if in_hbm else {}  # memory space assignment
    compiled = compile_for(kernel, *avals, device=device, **where)
    cycles: int | None = None
    unestimated: tuple[str, ...] = ()
    if _profiles:
        texts = [path.read_text() for path in sorted(Path(_profiles[-1]).glob("*.textproto"))]
        unestimated = tuple(found["name"] for text in texts for found in _NOT_ESTIMATED.finditer(text))
        if not unestimated:
            cycles = sum(int(c) * int(n) for text in texts for c, n in _CYCLES.findall(text))
    vmem = [int(size) for size in _VMEM.findall(compiled.as_text())]
    costs = compiled.cost_analysis() or {}
    return TpuReport(max(vmem, default=None), cycles, int(costs.get("bytes accessed", 0)), unestimated)
