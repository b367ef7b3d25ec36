"""A jail as the keeper sees it, with an ordinary program in nsjail's place."""

import os
import time

import pytest

from headrace.sandbox.process import Jail

MESSAGE = {"id": "j", "output": 100, "verdict": 0, "interactive": False, "wall_s": 10.0}


@pytest.fixture
def start(tmp_path):
    jails = []

    def start(program):
        stdin = os.open("/dev/null", os.O_RDONLY)
        argv = ["/bin/sh", "-c", program]
        jail = Jail({**MESSAGE, "argv": argv}, stdin, None, str(tmp_path))
        os.close(stdin)
        jails.append(jail)
        return jail

    yield start
    for jail in jails:
        jail.destroy()
        for fd in jail.watched():
            os.close(fd)


def test_an_event_of_an_earlier_owner_of_a_descriptor_does_not_block(start):
    jail = start("sleep 5")
    began = time.monotonic()
    for fd in jail.watched():
        jail.on_ready(fd)
    assert time.monotonic() - began < 4
    assert not jail.finished
    assert jail.take_answers() == []


def test_the_first_reason_to_end_a_jail_is_the_one_that_counts(start):
    jail = start("sleep 5")
    jail.kill("timeout")
    jail.kill("cancelled")
    while not jail.finished:
        for fd in jail.watched():
            jail.on_ready(fd)
        jail.on_time(time.monotonic())
    ((answer, fds),) = jail.take_answers()
    os.close(fds[0])
    assert answer["reason"] == "timeout"
