"""Asynchronous runs against synchronous ones of the same parts: on computation, and on slow tools.

Every arm is `headrace train` on one seed. `headrace bench asynchrony` runs them all, in turns.

Computation (examples/quickstart.toml): learner and actor compete for two cores. The synchronous
loop is measured with one pinned core for each side, and with every core for the side whose turn it
is, which is the most that such a loop can get.

Slow tools (examples/tiny.toml on the domain `waiting`): an episode sleeps for two seconds in the
median and for up to thirty, besides the start of its process. The same tasks wait equally long in
both arms.
"""

import argparse
import tempfile
from pathlib import Path

from headrace.benchrows import store
from headrace.benchruns import FinishedRun, train

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
COMPUTE = [
    "probes.tasks=0",
    "learner.steps=14",
    "learner.checkpoint_every=100",
    "broker.url=nats://127.0.0.1:4224",
]
COMPUTE_ARMS = {
    "asynchronous": ["staleness.max_versions=2"],
    "synchronous, one core each": ["staleness.max_versions=0"],
    "synchronous, all cores in turn": [
        "staleness.max_versions=0",
        "actors.threads=2",
        "learner.threads=2",
    ],
}
SLOW = [
    "probes.tasks=0",
    "learner.steps=24",
    "learner.batch_groups=4",
    "learner.group_size=4",
    "learner.checkpoint_every=100",
    'domains=[{id="waiting"}]',
    "actors.samples_in_flight=128",
    "broker.url=nats://127.0.0.1:4224",
]
SLOW_ARMS = {
    "asynchronous": ["staleness.max_versions=4"],
    "synchronous": ["staleness.max_versions=0"],
}


def measure(
    question: str, file: str, shared: list[str], arms: dict[str, list[str]], seed: int
) -> dict[str, float]:
    """Run every arm once, store a row for each, and return trained samples a second by arm."""
    rates = {}
    for name, overrides in arms.items():
        with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
            where = [f"run.dir={folder}/run", f"run.seed={seed}"]
            finished = train(EXAMPLES / file, [*shared, *overrides, *where])
        rates[name] = finished.samples_per_s()
        store(__file__, row(question, name, finished, rates[name], seed))
    return rates


def row(
    question: str, arm: str, finished: FinishedRun, samples_per_s: float, seed: int
) -> dict[str, object]:
    """One arm's figures."""
    tokens = sum(finished.summary.staleness.values())
    lag = sum(lag * count for lag, count in finished.summary.staleness.items())
    return {
        "question": question,
        "arm": arm,
        "seed": seed,
        "samples_per_s": round(samples_per_s, 3),
        "wall_s": round(finished.summary.wall_s, 1),
        "mean_lag": round(lag / tokens, 2),
        "time_s": {name: round(value, 1) for name, value in finished.summary.time_s.items()},
    }


def main() -> None:
    """Measure both questions and print the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--question", choices=("computation", "slow tools"), help="one of the two")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="one round for each")
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        if arguments.question != "slow tools":
            compare(measure("computation", "quickstart.toml", COMPUTE, COMPUTE_ARMS, seed))
        if arguments.question != "computation":
            compare(measure("slow tools", "tiny.toml", SLOW, SLOW_ARMS, seed))


def compare(rates: dict[str, float]) -> None:
    """Print how the asynchronous arm stands to each of the others."""
    for name, rate in rates.items():
        print(f"{name:<32}{rate:8.2f} samples/s  {rates['asynchronous'] / rate:.2f}")


if __name__ == "__main__":
    main()
