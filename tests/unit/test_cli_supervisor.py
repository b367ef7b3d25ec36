"""`headrace train`'s supervisor on real processes: small scripts stand in for the three roles."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from headrace.broker.server import is_loopback
from headrace.config import load
from headrace.errors import ConfigError
from headrace.monitor.placement import plan_cores, starts_broker
from headrace.monitor.processes import Child, stop_all
from headrace.monitor.supervisor import RestartBudget, Supervisor
from tests.unit.processes import DEADLINE_S, POLL_S, alive, wait_until

FOREVER = "import signal; signal.pause()"
DONE = "pass"


class TurnedClock:
    """A clock that moves when told."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def time(self):
        return self.now

    async def sleep(self, seconds):
        self.now += seconds


@contextmanager
def supervised(tmp_path, *, learner, actor=FOREVER, actors=1):
    """A started supervisor whose roles run the given Python texts; the broker is elsewhere."""
    config = load(
        [],
        [f"run.dir={tmp_path}/run", "broker.url=nats://192.0.2.1:4222", f"actors.count={actors}"],
    )
    texts = {"learner": learner, "actor": actor}
    clock = TurnedClock()
    supervisor = Supervisor(
        config, [], clock, command=lambda role: [sys.executable, "-S", "-c", texts[role]]
    )
    supervisor.start()
    try:
        yield supervisor, clock
    finally:
        supervisor.kill()


def outcome_of(supervisor, clock):
    """Check until the run ends, turning the clock to the end of every pause."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        outcome = supervisor.check()
        if outcome:
            return outcome
        time.sleep(POLL_S)
        clock.now = max([clock.now, *(post.due for post in supervisor.posts if post.due)])
    raise AssertionError("the supervisor saw no end")


def test_the_run_ends_well_when_the_learner_does_and_leaves_no_process(tmp_path):
    with supervised(tmp_path, learner=DONE, actors=2) as (supervisor, clock):
        actors = [post.child.pid for post in supervisor.posts if post.role == "actor"]
        outcome = outcome_of(supervisor, clock)
        supervisor.stop()
        assert (outcome.code, outcome.error) == (0, "")
        assert len(actors) == 2
        assert not any(alive(pid) for pid in actors)


def test_a_deliberate_error_of_the_learner_ends_the_run_with_its_message_and_code(tmp_path):
    text = "import sys; print('headrace: error: model.path is missing'); sys.exit(2)"
    with supervised(tmp_path, learner=text) as (supervisor, clock):
        outcome = outcome_of(supervisor, clock)
        supervisor.stop()
        assert (outcome.code, outcome.error) == (2, "learner-0: model.path is missing")


def test_a_crash_of_the_learner_ends_the_run_and_shows_its_last_words(tmp_path):
    with supervised(tmp_path, learner="raise RuntimeError('bug')") as (supervisor, clock):
        outcome = outcome_of(supervisor, clock)
        supervisor.stop()
        assert outcome.code == 1
        assert outcome.error == (
            "learner-0: ended with exit code 1: RuntimeError: bug "
            f"(all of it in {tmp_path}/run/logs/learner-0.out)"
        )


def test_a_learner_killed_by_a_signal_is_started_again_three_times(tmp_path):
    starts = tmp_path / "starts"
    text = (
        f"import os; os.write(os.open({str(starts)!r}, os.O_APPEND | os.O_CREAT | os.O_WRONLY), "
        "b'x'); os.kill(os.getpid(), 9)"
    )
    with supervised(tmp_path, learner=text) as (supervisor, clock):
        outcome = outcome_of(supervisor, clock)
        supervisor.stop()
        assert starts.read_text() == "xxxx"
        assert outcome.code == 1
        assert "SIGKILL" in outcome.error


def test_a_dead_actor_is_started_again(tmp_path):
    with supervised(tmp_path, learner=FOREVER) as (supervisor, clock):
        post = next(post for post in supervisor.posts if post.role == "actor")
        first = post.child.pid
        os.kill(first, signal.SIGKILL)

        def replaced():
            assert supervisor.check() is None
            clock.now += 1.0
            return post.child.pid not in {None, first}

        wait_until(replaced)


def test_an_actor_that_the_configuration_refuses_ends_the_run(tmp_path):
    text = "import sys; print('headrace: error: another configuration'); sys.exit(2)"
    with supervised(tmp_path, learner=FOREVER, actor=text) as (supervisor, clock):
        outcome = outcome_of(supervisor, clock)
        supervisor.stop()
        assert (outcome.code, outcome.error) == (2, "actor-0: another configuration")


LEAVES_A_GRANDCHILD = """
import os, signal, sys
if os.fork() == 0:
    os.setsid()
    with open(sys.argv[1] + ".new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(sys.argv[1] + ".new", sys.argv[1])
signal.pause()
"""

ADOPTS = """
import sys, time
from pathlib import Path
from headrace.monitor.processes import Child, adopt_orphans, end_orphans, own_children

note = Path(sys.argv[1])
adopt_orphans()
child = Child("actor-0", [sys.executable, "-S", "-c", sys.argv[2], str(note)], note.parent / "out")
child.start()
while not note.exists():
    time.sleep(0.005)
child.end()
assert own_children() == [int(note.read_text())]
assert end_orphans([]) == 1
assert own_children() == []
"""


def test_what_a_killed_process_leaves_behind_in_a_session_of_its_own_is_ended(tmp_path):
    subprocess.run(
        [sys.executable, "-P", "-c", ADOPTS, str(tmp_path / "pid"), LEAVES_A_GRANDCHILD],
        check=True,
        timeout=DEADLINE_S,
    )
    assert not alive(int((tmp_path / "pid").read_text()))


def test_a_child_that_the_process_had_before_the_run_is_left_alone(tmp_path):
    with subprocess.Popen([sys.executable, "-S", "-c", FOREVER]) as other:
        with supervised(tmp_path, learner=DONE) as (supervisor, clock):
            outcome_of(supervisor, clock)
            supervisor.stop()
        assert other.poll() is None
        other.kill()


def test_a_process_that_ignores_the_request_to_stop_is_killed_by_the_deadline(tmp_path):
    ready = tmp_path / "ready"
    text = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"open({str(ready)!r}, 'w').close()\nwhile True: signal.pause()"
    )
    child = Child("actor-0", [sys.executable, "-S", "-c", text], tmp_path / "out")
    child.start()
    wait_until(ready.exists)
    assert [late.name for late in stop_all([child], 0.2)] == ["actor-0"]
    assert child.pid is None


SUPERVISED = """
import sys
from pathlib import Path
from headrace.clock import SystemClock
from headrace.config import load
from headrace.monitor.supervisor import Supervisor, supervise

run = Path(sys.argv[1])
config = load([], [f"run.dir={run}", "broker.url=nats://192.0.2.1:4222"])
text = "import signal; signal.pause()"

def look(supervisor):
    pids = [post.child.pid for post in supervisor.posts]
    if not (run / "pids").exists():
        (run / "new").write_text(" ".join(map(str, pids)))
        (run / "new").rename(run / "pids")

outcome = supervise(
    lambda: Supervisor(
        config, [], SystemClock(), command=lambda role: [sys.executable, "-S", "-c", text]
    ),
    look,
)
sys.exit(outcome.code)
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_whatever_ends_the_supervisor_no_process_stays(tmp_path, number, code):
    with subprocess.Popen([sys.executable, "-P", "-c", SUPERVISED, str(tmp_path)]) as process:
        try:
            wait_until((tmp_path / "pids").exists)
            process.send_signal(number)
            assert process.wait(DEADLINE_S) == code
        finally:
            process.kill()
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    wait_until(lambda: not any(alive(pid) for pid in pids))


def test_restarts_pause_longer_each_time_until_the_budget_is_spent():
    clock = TurnedClock()
    budget = RestartBudget(clock, restarts=3, window_s=100.0)
    assert [budget.spend() for _ in range(4)] == [1.0, 2.0, 4.0, None]
    clock.now = 101.0
    assert budget.spend() == 1.0


def test_learner_and_actors_get_disjoint_cores_where_they_would_fill_the_machine():
    places = plan_cores([0, 1], learner_threads=1, actor_threads=1, actors=1)
    assert places.learner.cores == {0}
    assert places.actors[0].cores == {1}
    crowded = plan_cores([4, 5, 6], learner_threads=2, actor_threads=1, actors=2)
    assert crowded.learner.cores == {4, 5}
    assert [place.cores for place in crowded.actors] == [{6}, {6}]


def test_a_synchronous_run_gives_every_core_to_the_side_whose_turn_it_is():
    places = plan_cores([0, 1], learner_threads=2, actor_threads=2, actors=1, in_turns=True)
    assert not places.learner.cores
    assert places.actors[0].cores == {0, 1}


def test_nothing_is_pinned_with_a_core_to_spare_or_with_one_core():
    for cores in ([0, 1, 2], [0]):
        places = plan_cores(cores, learner_threads=1, actor_threads=1, actors=1)
        assert not places.learner.cores
        assert not places.actors[0].cores


def test_a_port_held_by_something_else_is_refused_and_a_free_one_starts_a_broker():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connections = []

        def answer():
            connection, _ = server.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")
            connections.append(connection)

        import threading

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
            starts_broker(f"nats://127.0.0.1:{port}")
        thread.join()
        connections[0].close()
    assert starts_broker(f"nats://127.0.0.1:{port}")
    assert not starts_broker("nats://192.0.2.1:4222")


@pytest.mark.parametrize(
    ("url", "here"),
    [
        ("nats://localhost:4222", True),
        ("nats://127.1.2.3:4222", True),
        ("nats://[::1]:4222", True),
        ("nats://broker.example:4222", False),
        ("nats://10.0.0.1", False),
    ],
)
def test_a_broker_is_this_machines_own_at_every_loopback_address(url, here):
    assert is_loopback(url) == here


@pytest.mark.parametrize("url", ["nats://", "http://127.0.0.1:4222", "nats://[::1", "nats://h:x"])
def test_an_address_that_is_none_of_a_broker_is_refused(url):
    with pytest.raises(ConfigError, match=r"^broker\.url '"):
        starts_broker(url)
