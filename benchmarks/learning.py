"""Does it learn, and what do staleness and its correction do? Held-out success over seeds.

headrace bench learning                  run every arm on every seed, store a row for each run
headrace bench learning --report         table and plot of the stored rows, without running

Every run is `headrace train examples/learn.toml` with one thing changed, to the same number of
trained samples. The control permutes the scores within each group, so that nothing can be learned.
A run that is already complete under runs/learning is neither run nor stored again.
"""

import argparse
import json
import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from headrace.benchrows import store
from headrace.benchruns import FinishedRun, train
from headrace.config import load
from headrace.monitor.progress import Rate, difference, read_summary, wilson
from headrace.report.figures import Point, Series
from headrace.report.panels import panels

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "examples" / "learn.toml"
ROWS = ROOT / "benchmarks" / "results" / "learning.jsonl"
PLOT = ROOT / "docs" / "learning.svg"
ARMS = {
    "η = 0": ["staleness.max_versions=0"],
    "η = 2": [],
    "η = 8": ["staleness.max_versions=8"],
    "η = 8, uncorrected": ["staleness.max_versions=8", 'learner.loss={kind="reinforce"}'],
    "shuffled rewards": ["learner.shuffle_scores=true"],
}
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t at 97.5 % for this many seeds; for more, that of ten is a little wide."""


@dataclass(frozen=True)
class Run:
    """One stored row."""

    arm: str
    seed: int
    before: dict[str, Rate]
    after: dict[str, Rate]
    curves: dict[str, list[tuple[int, float]]]
    """Success of training samples by domain: (step, running average)."""


def measure(arm: str, seed: int) -> None:
    """Run one arm on one seed and store its row."""
    number = list(ARMS).index(arm)
    where = [
        f"run.dir=runs/learning/{number}-{seed}",
        f"run.seed={seed}",
        # a broker of its own, so that another arm may run beside this one
        f"broker.url=nats://127.0.0.1:{4300 + 10 * seed + number}",
    ]
    overrides = [*ARMS[arm], *where]
    if read_summary(Path(load([FILE], overrides).run.dir)) is not None:
        print("already complete")
        return
    store(__file__, row(arm, seed, train(FILE, overrides)))


def row(arm: str, seed: int, finished: FinishedRun) -> dict[str, object]:
    """The figures of one run."""
    summary, rows = finished.summary, finished.rows
    learner = finished.config.learner
    tokens = sum(summary.staleness.values())
    return {
        "arm": arm,
        "seed": seed,
        "steps": summary.steps,
        "trained_samples": summary.trained * learner.group_size,
        "filtered_samples": summary.filtered * learner.group_size,
        "wall_s": round(summary.wall_s, 1),
        "mean_lag": round(sum(k * n for k, n in summary.staleness.items()) / tokens, 2),
        "ess_last": round(_mean(rows, "ess"), 4),
        "entropy_last": round(_mean(rows, "entropy"), 4),
        "logprob_diff_mean": round(statistics.fmean(r["logprob_diff_mean"] or 0 for r in rows), 4),
        "before": {domain: [rate.ok, rate.n] for domain, rate in summary.before.items()},
        "after": {domain: [rate.ok, rate.n] for domain, rate in summary.after.items()},
        "curves": {
            domain: [
                [int(r["step"] or 0), round(r[f"success/{domain}"] or 0.0, 3)]
                for r in rows
                if f"success/{domain}" in r
            ]
            for domain in summary.before
        },
    }


def _mean(rows: list[dict[str, float | None]], name: str) -> float:
    """Mean of a metric over the last quarter of the steps."""
    return statistics.fmean(row[name] or 0.0 for row in rows[-max(1, len(rows) // 4) :])


def stored() -> list[Run]:
    """The newest row of every arm and seed."""
    runs = {}
    for line in ROWS.read_text().splitlines():
        data = json.loads(line)
        before, after = (
            {domain: Rate(n=n, ok=ok) for domain, (ok, n) in data[when].items()}
            for when in ("before", "after")
        )
        curves = {d: [(s, v) for s, v in points] for d, points in data["curves"].items()}
        runs[data["arm"], data["seed"]] = Run(data["arm"], data["seed"], before, after, curves)
    return [runs[key] for key in sorted(runs, key=lambda key: (list(ARMS).index(key[0]), key[1]))]


def table(runs: list[Run]) -> str:
    """Before, after and gain by arm and domain.

    Every seed is asked the same held-out tasks, so that their answers are not so many independent
    ones: the 95 % interval of a share is that of as many answers as there are tasks (Wilson). That
    of the mean gain is Student's over seeds; one seed alone has the interval of the difference of
    its two rates.
    """
    lines = [
        "| arm | domain | before, % | after, % | gain by seed | mean gain, 95 % |",
        "|---|---|---|---|---|---|",
    ]
    for arm, members in _by_arm(runs).items():
        for domain in sorted(members[0].before):
            before = [run.before[domain] for run in members]
            after = [run.after[domain] for run in members]
            gains = [b.mean - a.mean for a, b in zip(before, after, strict=True)]
            low, high = students(gains) if len(gains) > 1 else difference(before[0], after[0])
            lines.append(
                f"| {arm} | {domain} | {_share(before)} | {_share(after)} | "
                f"{', '.join(map(_signed, gains))} | "
                f"{_signed(statistics.fmean(gains))} ({_signed(low)} to {_signed(high)}) |"
            )
    return "\n".join(lines)


def _by_arm(runs: list[Run]) -> dict[str, list[Run]]:
    arms: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        arms[run.arm].append(run)
    return arms


def _share(rates: list[Rate]) -> str:
    mean = statistics.fmean(rate.mean for rate in rates)
    tasks = min(rate.n for rate in rates)
    low, high = wilson(mean * tasks, tasks)
    return f"{100 * mean:.0f} ({100 * low:.0f}-{100 * high:.0f})"


def _signed(value: float) -> str:
    # the same half is not shown as two numbers
    return f"{round(100 * value, 6):+.0f}"


def students(values: list[float]) -> tuple[float, float]:
    """Student's 95 % interval of the mean of at least two values."""
    t = T_95[min(len(values), max(T_95))]
    half = t * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return mean - half, mean + half


def plot(runs: list[Run]) -> str:
    """One panel a domain: success of training samples by step and arm, mean and range of seeds."""
    arms = _by_arm(runs)
    drawn = {}
    for domain in sorted(runs[0].before):
        series = []
        for arm, members in arms.items():
            curves = [dict(run.curves[domain]) for run in members]
            steps = sorted(set.intersection(*[set(curve) for curve in curves]))
            points = []
            for step in steps:
                values = [curve[step] for curve in curves]
                edges = (min(values), max(values)) if len(values) > 1 else ()
                points.append(Point(step, statistics.fmean(values), *edges))
            series.append(Series(arm, points))
        drawn[domain] = series
    last = max(step for run in runs for curve in run.curves.values() for step, _ in curve)
    return panels(drawn, x="optimizer step", last=last)


def main() -> None:
    """Run what is asked for, then print the table and write the plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--report", action="store_true", help="only report the stored rows")
    arguments = parser.parse_args()
    if not arguments.report:
        for seed in arguments.seeds:
            for arm in arguments.arms:
                print(f"{arm}, seed {seed}", flush=True)
                measure(arm, seed)
    runs = stored()
    print(table(runs))
    PLOT.write_text(plot(runs))
    print(f"plot: {PLOT}")


if __name__ == "__main__":
    main()
