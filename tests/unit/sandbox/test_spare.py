"""Processes that wait to become nsjail, with ordinary programs in nsjail's place."""

import os
import sys
from pathlib import Path

import pytest

from headrace.sandbox.cgroups import Cgroups
from headrace.sandbox.spare import Spare, Spares

LOOK = """
import os
for fd in range(4096):
    try:
        os.fstat(fd)
        os.write(1, b"%d " % fd)
    except OSError:
        pass
"""


def test_a_spare_becomes_a_program_with_these_descriptors_and_no_others():
    ours, theirs = os.pipe()
    null = os.open("/dev/null", os.O_RDWR)
    spare = Spare(None)
    argv = [sys.executable, "-I", "-S", "-c", LOOK]
    spare.become(argv, {0: null, 2: theirs, 1: theirs, 9: null})
    os.close(theirs)
    os.close(null)
    with os.fdopen(ours, "rb") as file:
        assert file.read() == b"0 1 2 9 "
    assert os.waitpid(spare.pid, 0)[1] == 0


def test_a_discarded_spare_is_gone():
    spare = Spare(None)
    spare.discard()
    assert not Path(f"/proc/{spare.pid}").exists()


def test_the_order_to_a_spare_that_died_fails():
    spare = Spare(None)
    os.kill(spare.pid, 9)
    os.waitid(os.P_PID, spare.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(ConnectionError):
        spare.become(["/bin/true"], {})
    spare.discard()


def test_there_are_never_more_spares_than_allowed():
    spares = Spares(Cgroups(0, {}), 2)
    for _ in range(5):
        spares.refill()
    assert len(spares._waiting) == 2
    spares.discard()
    last = spares.take()
    last.discard()
    assert not Path(f"/proc/{last.pid}").exists()
