"""Where a checkpoint lies: a directory of this machine, or a folder behind an fsspec URL (``s3://``, ``memory://``).

Both have the same methods. A local one is durable: what ``create`` and ``put`` have written is on the disk, and
``put``, ``copy`` and ``rename`` are one moment. Elsewhere each file appears whole or not at all, as object stores have
it; there are no locks there.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import shutil
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from functional_booster import locking

from .tensor_files import PARALLEL

_STRETCH = 4 * 2**20  # bytes that are written at once


class _Early(io.FileIO):
    """A new file whose bytes are on their way to the disk as soon as they are written: a sync at the end waits less."""

    def write(self, data: Any) -> int:
        """Some of the bytes, as any raw file; returns how many."""
        written = super().write(memoryview(data)[:_STRETCH])
        if hasattr(os, "posix_fadvise"):  # on Linux this begins to write what is dirty, and waits for nothing
            os.posix_fadvise(self.fileno(), self.tell() - written, written, os.POSIX_FADV_DONTNEED)
        return written


def _new(path: Path) -> io.BufferedWriter:
    return io.BufferedWriter(_Early(path, "xb"))


@dataclass(frozen=True)
class Local:
    """A directory of this machine."""

    path: Path
    readers: ClassVar[int] = min(8, os.cpu_count() or 1) if PARALLEL else 1  # threads that read at a time

    def __str__(self) -> str:
        return str(self.path)

    def exists(self) -> bool:
        """Whether there is a folder, or a file in its place."""
        return self.path.exists()

    def is_file(self) -> bool:
        """Whether there is a file in the folder's place."""
        return self.path.exists() and not self.path.is_dir()

    def names(self) -> list[str]:
        """The files in it; none where it does not exist."""
        return sorted(file.name for file in self.path.iterdir()) if self.path.is_dir() else []

    def size(self, name: str) -> int | None:
        """Bytes of a file, None where there is none."""
        file = self.path / name
        return file.stat().st_size if file.is_file() else None

    def make(self) -> bool:
        """Make the directory and those above it; whether it is new."""
        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            sync(folder.parent)
        return bool(missing)

    def discard(self) -> None:
        """Remove the directory where it is empty."""
        with contextlib.suppress(OSError):
            self.path.rmdir()

    @contextlib.contextmanager
    def exclusive(self, wait: bool = False) -> Generator[bool]:
        """Hold the folder against other savers; those of this process take turns. Yields whether there surely is no
        other. Raises FileExistsError where another process holds it, unless told to ``wait``.
        """
        with locking.in_turn(self.path), contextlib.ExitStack() as held:
            try:
                alone = held.enter_context(locking.exclusive(self.path, wait=wait))
            except BlockingIOError as error:
                raise FileExistsError(f"{self}: another process is writing there; nothing was changed") from error
            yield alone

    @contextlib.contextmanager
    def exclusive_file(self, name: str) -> Generator[bool]:
        """Hold one file of the folder against other savers of it, and the folder against savers of the whole.

        Waits for those, and for this process's others; other processes may save other files of the folder. Yields and
        raises as ``exclusive``.
        """
        with locking.in_turn(self.path), locking.shared(self.path), contextlib.ExitStack() as held:
            try:
                alone = held.enter_context(locking.marked(self.path / f".{name}.saving"))
            except BlockingIOError as error:
                raise FileExistsError(f"{self}/{name}: another process is writing it; nothing was changed") from error
            yield alone

    def open(self, name: str) -> BinaryIO:
        """A file to read from."""
        return open(self.path / name, "rb", buffering=0)

    @contextlib.contextmanager
    def create(self, name: str) -> Generator[BinaryIO]:
        """A new file to write to, on the disk at the end. Raises FileExistsError where there is one."""
        with _new(self.path / name) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())

    def put(self, name: str, content: bytes) -> None:
        """The whole file, in place of the one that may be there, in one moment."""
        fresh = hidden(name)
        try:
            with self.create(fresh) as stream:
                stream.write(content)
            sync(self.path)  # what the new content speaks of has its names on the disk before
            os.replace(self.path / fresh, self.path / name)
        except BaseException:
            self.remove([fresh])
            raise
        sync(self.path)

    def rename(self, name: str, new: str) -> None:
        """Give a file another name, in place of the one that may have it."""
        os.replace(self.path / name, self.path / new)

    def copy(self, name: str, new: str) -> None:
        """Have a file under another name, too, in place of the one that may have it."""
        fresh = self.path / hidden(new)
        try:
            try:
                os.link(self.path / name, fresh)
            except OSError:  # a file system without links
                shutil.copyfile(self.path / name, fresh)
                sync(fresh)
            os.replace(fresh, self.path / new)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise

    def remove(self, names: Iterable[str]) -> None:
        """Remove those of the files that there are."""
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    def sync(self) -> None:
        """Have its names on the disk: what was removed stays so."""
        sync(self.path)


@dataclass(frozen=True)
class Remote:
    """A folder of an fsspec file system."""

    files: Any
    path: str
    readers: ClassVar[int] = 1  # in memory, all that open a file share its position

    def __str__(self) -> str:
        return self.files.unstrip_protocol(self.path)

    def exists(self) -> bool:
        """Whether there is a folder, or a file in its place."""
        self.files.invalidate_cache()
        return self.files.exists(self.path)

    def is_file(self) -> bool:
        """Whether there is a file in the folder's place."""
        self.files.invalidate_cache()
        return self.files.isfile(self.path)

    def names(self) -> list[str]:
        """The files in it; none where it does not exist."""
        self.files.invalidate_cache()
        try:
            return sorted(name.rstrip("/").rpartition("/")[2] for name in self.files.ls(self.path, detail=False))
        except FileNotFoundError:
            return []

    def size(self, name: str) -> int | None:
        """Bytes of a file, None where there is none."""
        return self.files.size(self._of(name)) if self.files.isfile(self._of(name)) else None

    def make(self) -> bool:
        """Make the folder; whether it is new."""
        made = not self.files.exists(self.path)
        self.files.makedirs(self.path, exist_ok=True)
        return made

    def discard(self) -> None:
        """Remove the folder where it is empty."""
        with contextlib.suppress(OSError):
            if not self.names():
                self.files.rmdir(self.path)

    def exclusive(self, wait: bool = False) -> contextlib.AbstractContextManager[bool]:
        """Yields False: who else is at work here is not known."""
        return contextlib.nullcontext(False)

    def exclusive_file(self, name: str) -> contextlib.AbstractContextManager[bool]:
        """Yields False, as ``exclusive``."""
        return self.exclusive()

    def open(self, name: str) -> BinaryIO:
        """A file to read from."""
        return self.files.open(self._of(name), "rb")

    def create(self, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """A new file to write to, whole at the end."""
        return self.files.open(self._of(name), "wb")

    def put(self, name: str, content: bytes) -> None:
        """The whole file, in place of the one that may be there."""
        self.files.pipe_file(self._of(name), content)

    def rename(self, name: str, new: str) -> None:
        """Give a file another name, in place of the one that may have it."""
        self.copy(name, new)
        self.files.rm_file(self._of(name))

    def copy(self, name: str, new: str) -> None:
        """Have a file under another name, too, in place of the one that may have it."""
        self.files.cp_file(self._of(name), self._of(new))

    def remove(self, names: Iterable[str]) -> None:
        """Remove those of the files that there are."""
        for name in names:
            if self.files.exists(self._of(name)):
                self.files.rm_file(self._of(name))

    def sync(self) -> None:
        """What was done is done."""

    def _of(self, name: str) -> str:
        return f"{self.path}/{name}"


Folder = Local | Remote


def folder(path: str | os.PathLike[str]) -> Folder:
    """The folder of a path, or of an fsspec URL: ``runs/1``, ``file:///runs/1``, ``memory://runs/1``, ``s3://...``.

    Raises ImportError, with the package to install, where the URL's file system needs one; ValueError for a URL of an
    unknown one.
    """
    given = os.fspath(path)
    if "://" not in given:
        return Local(Path(given))
    files, inside = fsspec.url_to_fs(given)
    return Local(Path(inside)) if isinstance(files, LocalFileSystem) else Remote(files, inside.rstrip("/"))


def file(path: str | os.PathLike[str]) -> tuple[Folder, str]:
    """The folder that a file is in, and its name. Raises as ``folder``."""
    place = folder(path)
    if isinstance(place, Local):
        return Local(place.path.parent), place.path.name
    parent, _, name = place.path.rpartition("/")
    return Remote(place.files, parent), name


def hidden(name: str, token: str | None = None) -> str:
    """A name for a file that is to have ``name`` once it is whole."""
    return f".{token or secrets.token_hex(8)}.{name}"


def sync(path: Path) -> None:
    """Have what a file holds, or the names in a directory, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
