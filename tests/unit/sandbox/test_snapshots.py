"""Snapshots read what changed and nothing else."""

import os
import time

import pytest

from headrace.sandbox.snapshots import Snapshots
from headrace.sandbox.spec import SandboxSpec

SPEC = SandboxSpec()


def much_later():
    """A clock that runs an hour ahead of the files' stamps."""
    return time.time_ns() + 3600 * 10**9


def long_ago():
    """A clock that runs an hour behind."""
    return time.time_ns() - 3600 * 10**9


@pytest.fixture
def workspace(tmp_path):
    for i in range(20):
        (tmp_path / f"f{i}").write_bytes(b"x")
    fd = os.open(tmp_path, os.O_RDONLY)
    yield tmp_path, fd
    os.close(fd)


def test_an_unchanged_tree_is_not_read_again(workspace):
    _, fd = workspace
    snapshots = Snapshots(much_later)
    first = snapshots.take(fd, SPEC)
    read = snapshots.files_read
    assert snapshots.take(fd, SPEC) == first
    assert (read, snapshots.files_read) == (20, 20)


def test_only_the_changed_file_is_read_again(workspace):
    folder, fd = workspace
    snapshots = Snapshots(much_later)
    first = snapshots.take(fd, SPEC)
    (folder / "f7").write_bytes(b"yy")
    assert snapshots.take(fd, SPEC) != first
    assert snapshots.files_read == 21


def test_a_file_that_changed_just_now_is_read_again_although_it_looks_unchanged(workspace):
    _, fd = workspace
    snapshots = Snapshots(long_ago)
    snapshots.take(fd, SPEC)
    snapshots.take(fd, SPEC)
    assert snapshots.files_read == 40
