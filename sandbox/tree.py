"""Reading and writing inside a workspace that hostile programs have shaped.

Every step is relative to an open folder and follows no link. Only regular files are read; number,
depth, size and names are bounded.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

from msgspec import Struct

from headrace.errors import CollectionError, SandboxError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LINKLIKE = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO)


class Rules(Struct, frozen=True, kw_only=True):
    """What is collected at most; anything beyond is an error, never silently dropped."""

    entries: int = 4096
    depth: int = 32
    file_bytes: int = 64 << 20
    name_bytes: int = 255


class Entry(Struct, frozen=True, kw_only=True):
    """One entry of a workspace."""

    path: str
    """Relative path; bytes that are not UTF-8 appear as surrogates."""
    kind: str
    """`file`, `folder`, `link` or `special`."""
    size: int
    mode: int
    identity: tuple[int, int]
    """Inode and change time in nanoseconds: both equal means that the contents are."""


def parts(path: str) -> list[str]:
    """Split a relative path.

    Raises:
        SandboxError: it is empty, absolute, climbs, holds NUL, or a part is too long.
    """
    names = path.split("/")
    for name in names:
        if name in {"", ".", ".."} or "\0" in name or len(os.fsencode(name)) > 255:
            raise SandboxError(f"not a plain relative path inside the workspace: {path[:200]!r}")
    return names


def open_folder(root: int, names: list[str]) -> int:
    """Open a folder below `root` without following links; the caller closes it.

    Raises:
        CollectionError: a part is missing, a link, or no folder.
    """
    current = os.dup(root)
    for name in names:
        try:
            below = os.open(name, _FOLDER, dir_fd=current)
        except OSError as error:
            raise CollectionError(f"{'/'.join(names)!r}: {name!r}: {error.strerror}") from error
        finally:
            os.close(current)
        current = below
    return current


def read(root: int, path: str, *, limit: int) -> bytes:
    """Read a regular file.

    Raises:
        CollectionError: missing, not a regular file, or larger than `limit` bytes.
        SandboxError: the path is not a plain relative one.
    """
    *above, name = parts(path)
    folder = open_folder(root, above)
    try:
        fd = os.open(
            name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder
        )
    except OSError as error:
        raise CollectionError(f"{path!r} cannot be read: {error.strerror}") from error
    finally:
        os.close(folder)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise CollectionError(f"{path!r} is not a regular file")
        if status.st_size > limit:
            raise CollectionError(f"{path!r} has {status.st_size} bytes, more than {limit}")
        return file.read(limit)


def write(root: int, path: str, data: bytes, *, mode: int, uid: int | None) -> None:
    """Write a regular file, making folders on the way.

    Args:
        root: open folder.
        path: relative path.
        data: contents.
        mode: permission bits.
        uid: owner of what is made; None leaves it as it is.

    Raises:
        CollectionError: a link or something else than a file or folder is in the way.
        SandboxError: the path is not a plain relative one, or the workspace is full.
    """
    *above, name = parts(path)
    current = os.dup(root)
    try:
        for part in above:
            current = _enter(current, part, uid)
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(name, flags, mode, dir_fd=current)
        with open(fd, "wb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise CollectionError(f"{path!r} exists and is not a regular file")
            if uid is not None:
                os.fchown(fd, uid, uid)
            os.fchmod(fd, mode)
            file.truncate()
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise SandboxError(f"the workspace is full: {path!r} was not written") from error
        raise CollectionError(f"{path!r} cannot be written: {error.strerror}") from error
    finally:
        os.close(current)


def _enter(current: int, part: str, uid: int | None) -> int:
    """Make and open a folder; closes `current` only when it succeeds."""
    try:
        os.mkdir(part, 0o755, dir_fd=current)
        made = True
    except FileExistsError:
        made = False
    below = os.open(part, _FOLDER, dir_fd=current)
    if made and uid is not None:
        os.fchown(below, uid, uid)
    os.close(current)
    return below


def make_folder(root: int, name: str, *, mode: int) -> None:
    """Make a folder, or give an existing one the mode."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, dir_fd=root)
    fd = os.open(name, _FOLDER, dir_fd=root)
    os.fchmod(fd, mode)
    os.close(fd)


def walk(root: int, rules: Rules) -> Iterator[tuple[Entry, int, str]]:
    """Visit every entry below `root` in the order of its names, folders before their contents.

    Yields:
        The entry, the open folder that holds it, and its name there. The folder's descriptor is
        valid until the next step.

    Raises:
        CollectionError: more entries, or deeper, than the rules allow.
    """
    left = rules.entries
    waiting: list[list[str]] = [[]]
    while waiting:
        names = waiting.pop()
        if len(names) > rules.depth:
            raise CollectionError(f"folders are nested deeper than {rules.depth}")
        folder = open_folder(root, names)
        try:
            below: list[list[str]] = []
            for name in sorted(os.listdir(folder), key=os.fsencode):
                left -= 1
                if left < 0:
                    raise CollectionError(f"the workspace has more than {rules.entries} entries")
                entry = _entry(folder, names, name)
                if entry.kind == "folder":
                    below.append([*names, name])
                yield entry, folder, name
            waiting.extend(reversed(below))
        finally:
            os.close(folder)


def _entry(folder: int, above: list[str], name: str) -> Entry:
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
    return Entry(
        path="/".join([*above, name]),
        kind=kinds.get(stat.S_IFMT(status.st_mode), "special"),
        size=status.st_size if stat.S_ISREG(status.st_mode) else 0,
        mode=stat.S_IMODE(status.st_mode),
        identity=(status.st_ino, status.st_ctime_ns),
    )


def collect(root: int, rules: Rules) -> dict[str, bytes]:
    """Read every regular file; links and special files are left out, limits are errors.

    Raises:
        CollectionError: a limit of the rules is exceeded, or a name is not UTF-8.
    """
    files: dict[str, bytes] = {}
    left = rules.file_bytes
    for entry, folder, name in walk(root, rules):
        if entry.kind != "file":
            continue
        try:
            entry.path.encode()
        except UnicodeEncodeError as error:
            raise CollectionError(f"the name {os.fsencode(entry.path)!r} is not UTF-8") from error
        if len(os.fsencode(name)) > rules.name_bytes:
            raise CollectionError(f"the name {name[:80]!r} is longer than {rules.name_bytes} bytes")
        if entry.size > left:
            raise CollectionError(f"the files have more than {rules.file_bytes} bytes together")
        data = read(folder, name, limit=left)
        left -= len(data)
        files[entry.path] = data
    return files


def clear(root: int, keep: frozenset[str] = frozenset()) -> None:
    """Remove everything below an open folder except top-level names, however deep it is nested."""
    serial = 0
    waiting = [name for name in os.listdir(root) if name not in keep]
    while waiting:
        name = waiting.pop()
        status = os.stat(name, dir_fd=root, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode):
            os.unlink(name, dir_fd=root)
            continue
        folder = os.open(name, _FOLDER, dir_fd=root)
        try:
            for below in os.listdir(folder):
                kind = os.stat(below, dir_fd=folder, follow_symlinks=False).st_mode
                if not stat.S_ISDIR(kind):
                    os.unlink(below, dir_fd=folder)
                    continue
                # A nested folder moves up instead of being descended into: depth costs nothing.
                serial += 1
                fresh = f".headrace-removed-{serial}"
                os.rename(below, fresh, src_dir_fd=folder, dst_dir_fd=root)
                waiting.append(fresh)
        finally:
            os.close(folder)
        os.rmdir(name, dir_fd=root)
