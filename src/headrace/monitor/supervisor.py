"""All processes of a run on one machine: started, restarted within bounds, and ended together.

```
            starts, restarts, ends                   writes
 supervisor ----------------------> broker, actors  ------------> logs/
     |                              learner         ------------> progress.json, summary.json
     '------------- reads ------------------------------------------------'
```

The supervisor only spawns public commands and takes no part in the run: whatever it does can be
done by hand in other terminals. One loop, `supervise`: consumes exits of its children and signals
of its own, produces restarts, waits at most `POLL_S`, and is ended by the learner's end, a
deliberate error of a child, a spent restart budget, or a signal.

Which exits end the run: any of the learner's own, and an actor or broker that its configuration
refuses. Which are repaired: a signal to any of them, and failures of actor and broker.
"""

import logging
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from headrace.clock import Clock
from headrace.config import Config
from headrace.errors import ConfigError
from headrace.monitor.placement import headrace_command, place, starts_broker
from headrace.monitor.processes import (
    Child,
    Place,
    adopt_orphans,
    end_orphans,
    own_children,
    stop_all,
)

POLL_S = 0.2
LOOK_S = 1.0
STOP_S = 30.0
BROKER_STOP_S = 10.0
LEARNER_RESTARTS = 3
OTHER_RESTARTS = 5
RESTART_WINDOW_S = 600.0
_STOPPED_ON_REQUEST = {128 + signal.SIGTERM, 128 + signal.SIGINT}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """How a run ended here."""

    code: int
    """Exit code of `headrace train`."""
    error: str = ""
    """One line; empty when nothing went wrong."""


class RestartBudget:
    """How often a process may be started again, and after which pause.

    Pauses double from one second to at most thirty; starts older than the window are forgotten.
    """

    def __init__(self, clock: Clock, restarts: int, window_s: float = RESTART_WINDOW_S) -> None:
        self._clock = clock
        self._restarts = restarts
        self._window_s = window_s
        self._spent: deque[float] = deque()

    def spend(self) -> float | None:
        """Seconds to pause before the next start, or None when the budget is spent."""
        now = self._clock.monotonic()
        while self._spent and self._spent[0] < now - self._window_s:
            self._spent.popleft()
        if len(self._spent) >= self._restarts:
            return None
        self._spent.append(now)
        return min(30.0, 2.0 ** (len(self._spent) - 1))


@dataclass
class Post:
    """One place in the run that a process fills, and its restarts."""

    role: str
    child: Child
    budget: RestartBudget
    due: float | None = None
    """Moment of the next start; None while the process runs."""
    left: bool = False
    """The process ended well and is not started again."""

    @property
    def state(self) -> str:
        """One word for displays."""
        if self.left:
            return "left"
        return "restarting" if self.due is not None else "up"


class Supervisor:
    """Keeps the processes of one run alive until the run ends."""

    def __init__(
        self,
        config: Config,
        items: list[str],
        clock: Clock,
        command: Callable[..., list[str]] = headrace_command,
    ) -> None:
        """Plan the processes; nothing is started yet.

        Args:
            config: resolved configuration.
            items: the arguments from which it was resolved, handed to every command.
            clock: where restarts take their time from.
            command: command line of a role, from its name and the items.

        Raises:
            ConfigError: the broker's port is held by something that is not a broker.
        """
        self._clock = clock
        self._logs = Path(config.run.dir) / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._config = config
        self._items = items
        self._command = command
        # children that this process had before are none of the run's
        self._foreign = own_children()
        self.posts = self._plan()

    def start(self) -> None:
        """Start every process."""
        for post in self.posts:
            post.child.start()

    def check(self) -> Outcome | None:
        """Look once at every process; restart what may be, report what ends the run."""
        for post in self.posts:
            if post.left:
                continue
            if post.due is not None:
                if self._clock.monotonic() >= post.due:
                    post.due = None
                    post.child.start()
                continue
            code = post.child.poll()
            if code is None:
                continue
            self._end_orphans()
            outcome = self._decide(post, code)
            if outcome:
                return outcome
        return None

    def stop(self) -> None:
        """End learner and actors, then the broker, and everything they left behind."""
        work = [post.child for post in self.posts if post.role != "broker"]
        broker = [post.child for post in self.posts if post.role == "broker"]
        for child in stop_all(work, STOP_S) + stop_all(broker, BROKER_STOP_S):
            logger.warning("%s did not stop in time and was killed", child.name)
        self._end_orphans()

    def kill(self) -> None:
        """End everything at once."""
        stop_all([post.child for post in self.posts], 0.0)
        self._end_orphans()

    def _end_orphans(self) -> None:
        end_orphans([*self._foreign, *(post.child.pid for post in self.posts)])

    def _decide(self, post: Post, code: int) -> Outcome | None:
        error = post.child.last_error()
        if post.role == "learner" and (code == 0 or code in _STOPPED_ON_REQUEST):
            return Outcome(code)
        if post.role == "actor" and (code == 0 or code in _STOPPED_ON_REQUEST):
            logger.info("%s left the run", post.child.name)
            post.left = True
            return None
        why = error or _describe(post.child, code)
        lasting = code > 0 if post.role == "learner" else code == ConfigError.exit_code
        pause = None if lasting else post.budget.spend()
        if pause is not None:
            logger.warning("%s: %s; starting it again in %.0f s", post.child.name, why, pause)
            post.due = self._clock.monotonic() + pause
            return None
        if not lasting and post.role == "actor" and self._other_actors(post):
            logger.error("%s: %s; giving it up after its last restart", post.child.name, why)
            post.left = True
            return None
        return Outcome(max(code, 1), f"{post.child.name}: {why}")

    def _other_actors(self, post: Post) -> bool:
        return any(
            other.role == "actor" and not other.left for other in self.posts if other is not post
        )

    def _plan(self) -> list[Post]:
        places = place(self._config)
        posts = []
        if starts_broker(self._config.broker.url):
            posts.append(self._post("broker", 0))
        posts.append(self._post("learner", 0, places.learner))
        posts += [self._post("actor", number, at) for number, at in enumerate(places.actors)]
        return posts

    def _post(self, role: str, number: int, at: Place | None = None) -> Post:
        name = f"{role}-{number}"
        output = self._logs / f"{name}.out"
        restarts = LEARNER_RESTARTS if role == "learner" else OTHER_RESTARTS
        return Post(
            role,
            Child(name, self._command(role, *self._items), output, place=at or Place()),
            RestartBudget(self._clock, restarts),
        )


def supervise(
    plan: Callable[[], Supervisor], look: Callable[[Supervisor], None], first: Child | None = None
) -> Outcome:
    """Run until the run ends or a signal asks to stop; no process is left behind either way.

    Args:
        plan: makes the supervisor, once `first` has ended well.
        look: called every `LOOK_S` seconds and at the end, for displays.
        first: a process to be run to its end before all others.

    Returns:
        The outcome; after a signal its code is 128 + the signal's number.
    """
    adopt_orphans()
    signals = _Signals()
    supervisor: Supervisor | None = None
    try:
        if first is not None:
            first.start()
            while first.poll() is None:
                if signals.first:
                    return Outcome(128 + signals.first)
                time.sleep(POLL_S)
            if code := first.poll():
                error = first.last_error() or _describe(first, code)
                return Outcome(max(code, 1), f"{first.name}: {error}")
        supervisor = plan()
        supervisor.start()
        looked = float("-inf")
        while not signals.first:
            outcome = supervisor.check()
            if outcome or time.monotonic() - looked >= LOOK_S:
                looked = time.monotonic()
                look(supervisor)
            if outcome:
                return outcome
            time.sleep(POLL_S)
        return Outcome(128 + signals.first)
    finally:
        if first is not None:
            first.end()
        if supervisor is not None:
            signals.on_second = supervisor.kill
            supervisor.stop()
        signals.restore()


@dataclass
class _Signals:
    """SIGINT and SIGTERM as flags: the first asks to stop, a second one ends the patience."""

    first: int = 0
    on_second: Callable[[], None] = field(default=lambda: None)

    def __post_init__(self) -> None:
        self._before = {
            number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)
        }

    def restore(self) -> None:
        """Put the former handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.first:
            self.on_second()
        else:
            self.first = number


def _describe(child: Child, code: int) -> str:
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}: {child.last_line()} (all of it in {child.output})"
