"""Snapshots of a workspace: contents by hash, trees as manifests."""

import hashlib
import os
import time
from collections.abc import Callable

import msgspec
from msgspec import Struct

from headrace.errors import CollectionError, SandboxError
from headrace.sandbox import tree
from headrace.sandbox.spec import SandboxSpec

_RACY_NS = 20_000_000
"""A file changed this shortly before it was looked at may change again within one clock tick."""
_DEPTH = 256


class Node(Struct, frozen=True, kw_only=True, array_like=True):
    """One entry of a snapshot's manifest."""

    path: str
    kind: str
    mode: int
    content: str
    """Hash of a file's bytes, or a link's target."""


class Snapshots:
    """The snapshots of one session. Equal contents are kept once, in this process's memory.

    Attributes:
        files_read: files whose contents were read so far; unchanged ones are not read again.
    """

    def __init__(self, now_ns: Callable[[], int] = time.time_ns) -> None:
        """Start without snapshots; `now_ns` is the clock that stamps files, in nanoseconds."""
        self.files_read = 0
        self._now_ns = now_ns
        self._contents: dict[str, bytes] = {}
        self._manifests: dict[str, list[Node]] = {}
        self._known: dict[str, tuple[tuple[int, int], int, str]] = {}

    def take(self, root: int, spec: SandboxSpec) -> str:
        """Record the tree below an open folder; files that did not change are not read again.

        Links are kept as links; FIFOs, sockets and devices are left out.

        Raises:
            CollectionError: the tree is nested too deep.
        """
        nodes = self._scan(root, spec, keep=True)
        return self._store(nodes)

    def restore(self, root: int, snapshot: str, spec: SandboxSpec, *, uid: int | None) -> None:
        """Make the tree below an open folder equal to a snapshot, touching only what differs.

        Raises:
            SandboxError: no such snapshot, or the tree is not equal afterwards.
        """
        wanted = self._manifests.get(snapshot)
        if wanted is None:
            raise SandboxError(f"this session has no snapshot {snapshot!r}")
        try:
            present = {node.path: node for node in self._scan(root, spec, keep=False)}
        except CollectionError:
            tree.clear(root)
            present = {}
        target = {node.path: node for node in wanted}
        self._remove(root, present, target, spec)
        for node in wanted:
            if present.get(node.path) != node:
                self._make(root, node, uid)
        if _digest(self._scan(root, spec, keep=False)) != snapshot:
            raise SandboxError(f"the workspace differs from snapshot {snapshot} after restoring it")

    def _scan(self, root: int, spec: SandboxSpec, *, keep: bool) -> list[Node]:
        rules = tree.Rules(entries=spec.files + 1, depth=_DEPTH)
        now = self._now_ns()
        nodes = []
        known: dict[str, tuple[tuple[int, int], int, str]] = {}
        for entry, folder, name in tree.walk(root, rules):
            if entry.kind == "special":
                continue
            content = ""
            if entry.kind == "link":
                content = os.readlink(name, dir_fd=folder)
            elif entry.kind == "file":
                before = self._known.get(entry.path)
                if before is not None and before[:2] == (entry.identity, entry.size):
                    content = before[2]
                else:
                    self.files_read += 1
                    data = tree.read(folder, name, limit=spec.disk)
                    content = hashlib.sha256(data).hexdigest()
                    if keep:
                        self._contents.setdefault(content, data)
                if now - entry.identity[1] > _RACY_NS and content in self._contents:
                    known[entry.path] = (entry.identity, entry.size, content)
            nodes.append(Node(path=entry.path, kind=entry.kind, mode=entry.mode, content=content))
        self._known = known
        return sorted(nodes, key=lambda node: os.fsencode(node.path))

    def _store(self, nodes: list[Node]) -> str:
        digest = _digest(nodes)
        self._manifests[digest] = nodes
        return digest

    def _remove(
        self, root: int, present: dict[str, Node], target: dict[str, Node], spec: SandboxSpec
    ) -> None:
        """Remove every entry that the target lacks or has as another kind."""
        rules = tree.Rules(entries=spec.files + 1, depth=_DEPTH)
        doomed = []
        for entry, _, _ in tree.walk(root, rules):
            kept = target.get(entry.path)
            if kept is None or kept.kind != entry.kind or _link_differs(present, kept):
                doomed.append((entry.path, entry.kind))
        for path, kind in reversed(doomed):
            *above, name = path.split("/")
            folder = tree.open_folder(root, above)
            try:
                if kind == "folder":
                    os.rmdir(name, dir_fd=folder)
                else:
                    os.unlink(name, dir_fd=folder)
            finally:
                os.close(folder)

    def _make(self, root: int, node: Node, uid: int | None) -> None:
        *above, name = node.path.split("/")
        folder = tree.open_folder(root, above)
        try:
            if node.kind == "file":
                data = self._contents[node.content]
                tree.write(folder, name, data, mode=node.mode, uid=uid)
                return
            if node.kind == "link":
                os.symlink(node.content, name, dir_fd=folder)
            else:
                tree.make_folder(folder, name, mode=node.mode)
            if uid is not None:
                os.chown(name, uid, uid, dir_fd=folder, follow_symlinks=False)
        finally:
            os.close(folder)


def _link_differs(present: dict[str, Node], kept: Node) -> bool:
    return kept.kind == "link" and present[kept.path] != kept


def _digest(nodes: list[Node]) -> str:
    encoded = [(os.fsencode(n.path), n.kind, n.mode, os.fsencode(n.content)) for n in nodes]
    return hashlib.sha256(msgspec.msgpack.encode(encoded)).hexdigest()
