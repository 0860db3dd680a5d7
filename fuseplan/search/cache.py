"""The cache of solved components: in memory, and on disk if ``FUSEPLAN_CACHE`` is set.

A component of a graph is solved once in a process: planning again after a change of a shape or of a
constraint solves only the components that the change touches. ``FUSEPLAN_CACHE=1`` keeps solutions in the
cache folder for later processes, ``FUSEPLAN_CACHE=FOLDER`` elsewhere, and ``FUSEPLAN_CACHE=0`` keeps none.
The default writes nothing to disk, since a home folder on a network may not lock files.
``fuseplan.search.component_cache`` makes the keys and checks a recalled solution.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from costmodel.calibrate import cache_path
from fuseplan.plan.fusion_plan import Case
from fuseplan.plan.notes import Note
from fuseplan.search.cache_sqlite import IS_AVAILABLE, Disk
from fuseplan.support.environment import debug_level
from fuseplan.support.lru import LruCache

SCHEMA = 8
"""The version of keys and entries: raised with every change of their content."""

MAX_ENTRIES = 4096
"""In memory. A training step of GPT-2 medium has 29 entries, 20 kB together as text."""

Refusal = tuple[int, str, str]
"""The positions refused, as a mask, the rule and the reason."""


_UNAFFECTED = 7 / 96
"""A component is searched in the same way, however much counted work is left, if it takes up to this part of
it: column generation may do three quarters. Of that it keeps an eighth for plans. Where cases follow, the
prices of the whole component may take a quarter of the rest, half of that for the bound: so its limit first
changes a step when the work reaches an eighth of 21/32 less the work before."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The solution of one component, by position. Masks have a bit a position."""

    groups: tuple[int, ...]
    objectives: tuple[int, int, int]
    """Picoseconds, HBM bytes and kernels of ``groups``."""
    bound_ps: int
    optimal: bool
    duals: tuple[int, ...] = ()
    candidates: int = 1
    """The number of groups that were candidates."""
    note: Note | None = None
    """About a position in the place of a node."""
    refusals: tuple[Refusal, ...] = ()
    slower: tuple[str, ...] = ()
    """Heuristics whose plan is known to take longer than ``bound_ps``."""
    has_too_many_copies: bool = False
    """Whether copies make too many groups: a search with fewer copies is needed."""
    work: int = 0
    """The work of finding it, in units of ``fuseplan.support.work``. It counts when the entry is recalled,
    too, so that as much is left for other components as without a cache."""
    left: int = 0
    """The work that was left when its search began. Where little of it was done, the solution does not depend
    on it (``may_be_found_with``)."""
    cases: tuple[Case, ...] = ()
    """As ``Solved.cases``."""

    def may_be_found_with(self, left: int) -> bool:
        """Whether a search would find the same solution with so much work left."""
        if left == self.left:
            return True
        # A search that begins with nothing left does no work, and is cut short all the same.
        was_cut = self.note is not None and self.note.limit is not None
        return not was_cut and self.work <= _UNAFFECTED * min(left, self.left)

    def to_json(self) -> str:
        """``from_json`` reads it. Masks are hexadecimal: Python prints no integer so long."""
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        data |= {
            "groups": [f"{mask:x}" for mask in self.groups],
            "note": self.note and self.note.to_data(),
            "refusals": [(f"{mask:x}", rule, reason) for mask, rule, reason in self.refusals],
            "cases": [(case.together, case.apart, case.prices_ps) for case in self.cases],
        }
        return json.dumps(data, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Entry:
        """The entry that ``to_json`` wrote; ``ValueError`` if it is none."""
        try:
            read = json.loads(text)
            time_ps, hbm_bytes, kernels = map(_integer, read["objectives"])
            if type(read["optimal"]) is not bool:
                raise ValueError(f"expected true or false, got {read['optimal']!r}")
            return cls(
                tuple(int(mask, 16) for mask in read["groups"]),
                (time_ps, hbm_bytes, kernels),
                _integer(read["bound_ps"]),
                read["optimal"],
                tuple(map(_integer, read["duals"])),
                _integer(read["candidates"]),
                None if read["note"] is None else Note.from_data(read["note"]),
                tuple((int(mask, 16), _text(rule), _text(reason)) for mask, rule, reason in read["refusals"]),
                tuple(map(_text, read["slower"])),
                read["has_too_many_copies"] is True,
                _integer(read["work"]),
                _integer(read["left"]),
                tuple(
                    Case(_pairs(together), _pairs(apart), tuple(map(_integer, prices)))
                    for together, apart, prices in read["cases"]
                ),
            )
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"not an entry: {error!r}") from None


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"expected an integer, got {value!r}")
    return value


def _pairs(values: Any) -> tuple[tuple[int, int], ...]:
    return tuple((_integer(i), _integer(j)) for i, j in values)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected a text, got {value!r}")
    return value


class SolutionCache:
    """Entries by key: the last ``max_entries`` in memory, and, with a disk, those on it."""

    def __init__(self, disk: Disk | None = None, max_entries: int = MAX_ENTRIES) -> None:
        self.disk = disk
        self._entries: LruCache[bytes, Entry] = LruCache(max_entries)

    def __len__(self) -> int:
        return len(self._entries)

    def recall(self, keys: Iterable[bytes]) -> dict[bytes, Entry]:
        """The entries that there are."""
        looked_up = [(key, self._entries.get(key)) for key in keys]
        found = {key: entry for key, entry in looked_up if entry is not None}
        missing = [key for key, entry in looked_up if entry is None]
        if self.disk is not None and missing and (program := program_digest()) is not None:
            named = {_on_disk(program, key): key for key in missing}
            read: dict[bytes, Entry] = {}
            for name, text in self.disk.read(named).items():
                try:
                    read[named[name]] = Entry.from_json(text)
                except ValueError as error:
                    note(f"an entry is ignored: {error}")
            self._entries.update(read.items())
            found |= read
        return found

    def clear(self) -> None:
        """Forget all entries in memory."""
        self._entries.clear()

    def keep(self, entries: Mapping[bytes, Entry]) -> None:
        """Add entries, or replace them."""
        self._entries.update(entries.items())
        if self.disk is not None and entries and (program := program_digest()) is not None:
            self.disk.write({_on_disk(program, key): entry.to_json() for key, entry in entries.items()})


_memory = SolutionCache()
_used: ContextVar[SolutionCache | None] = ContextVar("used", default=None)


def current() -> SolutionCache | None:
    """The cache of this process as the environment has it, or None if nothing is remembered."""
    used = _used.get()
    if used is not None:
        return used
    if setting() == "0":
        return None
    path = cache_file() if setting() else None
    if path is None or _memory.disk is None or _memory.disk.path != path:
        _memory.disk = None if path is None else open_disk(path)
    return _memory


def open_disk(path: Path) -> Disk | None:
    """The file at ``path``, which need not be there yet; None where Python lacks SQLite."""
    if not IS_AVAILABLE:
        note("solutions are kept in memory only: this Python has no sqlite3")
        return None
    return Disk(path, note)


@contextmanager
def using_cache(cache: SolutionCache | None) -> Iterator[SolutionCache | None]:
    """Plan with another cache in this context: ``SolutionCache()`` starts empty and writes no file; None is
    the cache of the environment."""
    token = _used.set(cache)
    try:
        yield cache
    finally:
        _used.reset(token)


def setting() -> str:
    """``FUSEPLAN_CACHE``: ``0``, ``1``, a folder, or nothing."""
    return os.environ.get("FUSEPLAN_CACHE", "").strip()


def cache_file() -> Path:
    """Where solutions are kept, or would be if they were."""
    text = setting()
    folder = cache_path().parent if text in ("", "0", "1") else Path(os.path.expanduser(text))
    return folder / f"solutions-{SCHEMA}.sqlite3"


def note(text: str) -> None:
    """Print to stderr why the cache is not used, if ``FUSEPLAN_DEBUG`` is set."""
    if debug_level() >= 1 and sys.stderr is not None:
        print(f"cache: {text}", file=sys.stderr)


def _on_disk(program: bytes, key: bytes) -> bytes:
    """The key of an entry on disk, which other versions of the program may write too."""
    return hashlib.blake2b(program + key, digest_size=20).digest()


@cache
def program_digest() -> bytes | None:
    """Of all that decides beside the key: the sources here, Python, and the solvers' versions;
    None where they cannot be read. By content, as some packagers give every file one date:
    5 ms, once a process, and only if there is a disk."""
    import numpy

    digest = hashlib.blake2b(repr((SCHEMA, sys.version_info[:3], numpy.__version__)).encode())
    try:
        for name, path in _sources():
            source = path.read_bytes()
            digest.update(f"{name} {len(source)} ".encode() + source)
    except (ImportError, OSError, ValueError) as error:
        note(f"solutions are kept in memory only: {error}")
        return None
    return digest.digest()


def _sources() -> list[tuple[str, Path]]:
    """Names and files of all sources whose change may change a solution."""
    found: list[tuple[str, Path]] = []
    for name in ("costmodel", "fuseplan"):
        spec = importlib.util.find_spec(name)
        folders = (spec and spec.submodule_search_locations) or ()
        here = [(f, path) for f in folders for path in Path(f).rglob("*.py")]
        if not here:
            raise OSError(f"the sources of {name} are not files")
        found += [(f"{name}/{path.relative_to(folder).as_posix()}", path) for folder, path in here]
    # Not to be imported for this: that takes longer than most plans.
    solver = importlib.util.find_spec("ortools")
    if solver is not None and solver.origin is not None:
        found.append(("ortools", Path(solver.origin)))
    return sorted(found)
