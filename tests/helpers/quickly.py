"""How XLA compiles what stands in for another device: Pallas' interpreter, and loop nests at tiny
sizes. Most of the time of those tests would be LLVM's, and its optimisations are not what they are
about; what XLA itself does to a program stays the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import pytest
from jax._src import compiler

QUICKLY: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}
if jax.__version_info__ < (0, 11):  # the option has gone since
    QUICKLY["xla_cpu_use_fusion_emitters"] = False


def on_both(names: Iterable[str], chosen: Iterable[str]) -> list[Any]:
    """Parameters of which both Pythons run those ``chosen``, some of each kind: what the others check does
    not depend on JAX's version."""
    both = set(chosen)
    return [pytest.param(n, marks=[] if n in both else [pytest.mark.one_python]) for n in names]


def run_quickly(f: Callable[..., Any], *args: Any) -> Any:
    """What ``jax.jit(f)`` gives."""
    return jax.jit(f, compiler_options=QUICKLY)(*args)


@contextmanager
def all_quickly() -> Iterator[None]:
    """Compile all programs for the CPU with the options of ``run_quickly``, for tests that compare numbers
    and look neither at compiled programs nor at times."""
    options_of = compiler.get_compile_options

    def get_compile_options(*args: Any, **how: Any) -> Any:
        backend = how.get("backend")
        if backend is not None and backend.platform == "cpu":
            how["env_options_overrides"] = {**QUICKLY, **(how.get("env_options_overrides") or {})}
        return options_of(*args, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", get_compile_options)
        yield
