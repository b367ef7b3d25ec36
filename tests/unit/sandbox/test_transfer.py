"""Files in memory that carry inputs into a sandbox."""

import fcntl
import os

import pytest

from headrace.sandbox.transfer import memory_file


def test_nobody_can_change_what_a_memory_file_holds():
    fd = memory_file(b"input")
    try:
        assert os.read(fd, 99) == b"input"
        with pytest.raises(PermissionError):
            os.write(fd, b"more")
    finally:
        os.close(fd)


@pytest.mark.parametrize("step", [(os, "write"), (os, "lseek"), (fcntl, "fcntl")])
def test_a_memory_file_that_cannot_be_finished_leaves_no_descriptor(step, monkeypatch):
    def fail(*_):
        raise OSError("no")

    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patch:
        patch.setattr(*step, fail)
        with pytest.raises(OSError, match="no"):
            memory_file(b"input")
    assert os.listdir("/proc/self/fd") == before
