"""A jail as the keeper sees it, with an ordinary program in nsjail's place."""

import os
import signal
import time

import pytest

from headrace.sandbox.process import Jail
from headrace.sandbox.spare import Spare

MESSAGE = {"id": "j", "output": 100, "verdict": 0, "interactive": False, "wall_s": 10.0}


@pytest.fixture
def start(tmp_path):
    jails = []

    def start(program, spare=None):
        stdin = os.open("/dev/null", os.O_RDONLY)
        argv = ["/bin/sh", "-c", program]
        jail = Jail({**MESSAGE, "argv": argv}, stdin, spare or Spare(None), str(tmp_path))
        os.close(stdin)
        jails.append(jail)
        return jail

    yield start
    for jail in jails:
        jail.destroy()
        for fd in jail.watched():
            os.close(fd)


def test_an_event_of_an_earlier_owner_of_a_descriptor_does_not_block(start):
    jail = start("sleep 600")
    began = time.monotonic()
    for fd in jail.watched():
        jail.on_ready(fd)
    assert time.monotonic() - began < 300
    assert not jail.finished
    assert jail.take_answers() == []


def end(jail):
    """Serve a jail until its end; the caller has the deadline."""
    watched = set(jail.watched())
    while not jail.finished:
        for fd in watched:
            jail.on_ready(fd)
        watched -= set(jail.take_closed())
        jail.on_time(time.monotonic())
    ((answer, fds),) = jail.take_answers()
    content = os.pread(fds[0], 1 << 16, 0)
    os.close(fds[0])
    return answer, content


def test_the_first_reason_to_end_a_jail_is_the_one_that_counts(start):
    jail = start("sleep 5")
    jail.kill("timeout")
    jail.kill("cancelled")
    assert end(jail)[0]["reason"] == "timeout"


def test_what_nsjail_logged_is_read_at_its_end(start):
    answer, content = end(start("echo said >&6"))
    assert answer["parts"]["log"] == 5
    assert content == b"said\n"


def test_a_spare_that_died_before_it_was_needed_is_a_run_without_a_report(start):
    spare = Spare(None)
    os.kill(spare.pid, signal.SIGKILL)
    os.waitid(os.P_PID, spare.pid, os.WEXITED | os.WNOWAIT)
    answer, content = end(start("echo never", spare))
    assert (answer["reason"], content) == ("", b"")
    assert os.WTERMSIG(answer["exit"]) == signal.SIGKILL
