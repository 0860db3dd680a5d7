"""Store texts by key in an SQLite file that several processes may use at once.

Nothing here raises, since a lost entry costs only time: a file that is locked, read-only or on a full disk is
left alone; a damaged file, or one of another layout, is set aside and a new one begun. Every text carries a
checksum of its key and itself; a text that does not match is ignored.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import sqlite3
except ImportError:  # Python can be built without it.
    IS_AVAILABLE = False
else:
    IS_AVAILABLE = True

LAYOUT = 1
"""Of the table: a file of another layout is set aside."""

MAX_ENTRIES = 50_000
"""On disk, some 50 MB; beyond, the oldest go."""

WAIT_S = 0.25
"""For another process to finish its transaction, which takes milliseconds."""

_CHUNK = 500
"""Keys a question: SQLite of old allows 999."""

_SUFFIXES = ("", "-wal", "-shm", "-journal", ".broken")
"""Of the file, those that SQLite keeps beside it, and the one that is set aside."""


class Disk:
    """Reads and writes in one short transaction each; no file is open in between."""

    def __init__(self, path: Path, note: Callable[[str], None] = lambda text: None) -> None:
        self.path = path
        self._note = note

    def read(self, keys: Iterable[bytes]) -> dict[bytes, str]:
        """The texts that there are."""
        wanted, found = list(keys), {}
        if not self._is_there():
            return {}
        with self._contained(), self._connected() as db:
            for i in range(0, len(wanted), _CHUNK):
                part = wanted[i : i + _CHUNK]
                marks = ",".join("?" * len(part))
                rows = db.execute(f"SELECT key, text, checksum FROM solved WHERE key IN ({marks})", part)
                for key, text, checksum in rows:
                    if isinstance(text, bytes) and checksum == checksum_of(key, text):
                        found[key] = text.decode()
                    else:
                        self._note(f"{self.path}: an entry whose checksum is wrong is ignored")
        return found

    def write(self, texts: Mapping[bytes, str]) -> None:
        """Add texts, or replace them."""
        now = int(time.time())
        rows = [
            (key, now, data, checksum_of(key, data))
            for key, data in ((key, text.encode()) for key, text in texts.items())
        ]
        with self._contained():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._connected() as db, db:
                db.execute("BEGIN IMMEDIATE")
                db.executemany("INSERT OR REPLACE INTO solved VALUES (?, ?, ?, ?)", rows)
                (count,) = db.execute("SELECT COUNT(*) FROM solved").fetchone()
                if count > MAX_ENTRIES:
                    # A tenth more than needed, so that not every planning has to.
                    surplus = count - MAX_ENTRIES + MAX_ENTRIES // 10
                    db.execute(
                        "DELETE FROM solved WHERE key IN (SELECT key FROM solved ORDER BY written LIMIT ?)",
                        (surplus,),
                    )

    def count(self) -> int:
        """How many texts there are; 0 if that cannot be told."""
        found = 0
        if self._is_there():
            with self._contained(), self._connected() as db:
                (found,) = db.execute("SELECT COUNT(*) FROM solved").fetchone()
        return found

    def size_bytes(self) -> int:
        """Of the file, and of those beside it that belong to it."""
        total = 0
        for path in self._files():
            with suppress(OSError):
                total += path.stat().st_size
        return total

    def clear(self) -> bool:
        """Remove the file; whether nothing is left of it."""
        for path in self._files():
            with suppress(OSError):
                path.unlink(missing_ok=True)
        return not any(map(os.path.lexists, self._files()))

    def _is_there(self) -> bool:
        return os.path.exists(self.path)  # of Path, it raises where a folder may not be entered

    def _files(self) -> list[Path]:
        return [self.path.with_name(self.path.name + suffix) for suffix in _SUFFIXES]

    @contextmanager
    def _contained(self) -> Iterator[None]:
        """Whatever fails inside ends there."""
        try:
            yield
        except sqlite3.OperationalError as error:  # locked, read-only, no space left
            self._note(f"{self.path} is not used: {error}")
        except sqlite3.DatabaseError as error:
            self._note(f"{self.path} is damaged, and set aside: {error}")
            self._set_aside()
        except (OSError, ValueError) as error:
            self._note(f"{self.path} is not used: {error}")

    def _set_aside(self) -> None:
        """Keep the damaged file under another name."""
        path, *sides, broken = self._files()
        with suppress(OSError):
            os.replace(path, broken)
            for side in sides:
                side.unlink(missing_ok=True)

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        db = sqlite3.connect(self.path, timeout=WAIT_S, isolation_level=None)
        try:
            with db:  # Another process may be about to create the table.
                db.execute("BEGIN")
                tables = db.execute("SELECT name FROM sqlite_master").fetchall()
                (layout,) = db.execute("PRAGMA user_version").fetchone()
            if layout == 0 and not tables:
                _create(db)
            elif layout != LAYOUT or ("solved",) not in tables:
                raise sqlite3.DatabaseError(f"layout {layout}, not {LAYOUT}")
            # Losing the last plans with the power is no loss.
            db.execute("PRAGMA synchronous = OFF")
            yield db
        finally:
            db.close()


def _create(db: sqlite3.Connection) -> None:
    with db:
        db.execute("BEGIN IMMEDIATE")  # another process may be about to do the same
        db.execute(
            "CREATE TABLE IF NOT EXISTS solved "
            "(key BLOB PRIMARY KEY, written INTEGER, text BLOB, checksum BLOB) WITHOUT ROWID"
        )
        db.execute(f"PRAGMA user_version = {LAYOUT}")
    with suppress(sqlite3.OperationalError):
        # Readers need not wait for a writer. While another process reads it cannot be set.
        db.execute("PRAGMA journal_mode = WAL")


def checksum_of(key: bytes, data: bytes) -> bytes:
    """The checksum that an entry of the file is stored with."""
    return hashlib.blake2b(key + data, digest_size=16).digest()
