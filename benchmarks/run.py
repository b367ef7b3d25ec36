"""What a whole run cost, read from its folder: time to the first step, waiting, staleness, drift.

headrace train examples/quickstart.toml
headrace bench run runs/quickstart
"""

import argparse
import json
import statistics
from pathlib import Path

from headrace.benchrows import store
from headrace.broker.records import Step, Trajectory, decode
from headrace.learner import archive
from headrace.monitor.progress import read_progress, read_summary


def quantiles(values: list[float]) -> dict[str, float]:
    """Median and 95th percentile."""
    ordered = sorted(values)
    return {
        "p50": round(ordered[len(ordered) // 2], 4),
        "p95": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))], 4),
    }


def main() -> None:
    """Store one row of a finished run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    run = parser.parse_args().run
    summary, progress = read_summary(run), read_progress(run)
    if summary is None or progress is None:
        raise SystemExit(f"{run} holds no finished run")
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    samples = []
    steps = []
    for entry in archive.read(run / "archive"):
        if ".log.step" in entry.subject:
            steps.append(decode(entry.data, Step, where=entry.subject))
        elif ".log.sample." in entry.subject and b"trajectory" in entry.data[:16]:
            samples.append(decode(entry.data, Trajectory, where=entry.subject))
    drift = [row["logprob_diff_mean"] for row in metrics if "logprob_diff_mean" in row]
    third = max(1, len(drift) // 3)
    turns = [turn for sample in samples for turn in sample.turns]
    store(
        __file__,
        {
            "run": summary.run,
            "steps": summary.steps,
            "wall_s": round(summary.wall_s, 1),
            "first_step_s": round(metrics[0]["time"] - progress.started, 1),
            "time_s": {name: round(value, 1) for name, value in summary.time_s.items()},
            "generated_tokens": summary.generated_tokens,
            "trained_tokens": summary.trained_tokens,
            "staleness": summary.staleness,
            "train_tokens_per_s": round(
                sum(row["tokens"] for row in metrics)
                / sum(row["seconds/total"] for row in metrics),
                1,
            ),
            "logprob_diff_mean": round(statistics.fmean(drift), 4),
            "logprob_diff_first_third": round(statistics.fmean(drift[:third]), 4),
            "logprob_diff_last_third": round(statistics.fmean(drift[-third:]), 4),
            "pause_per_update_s": round(metrics[-1].get("actors/pause_s", float("nan")), 3),
            "queue_s": quantiles([sample.queue_s for sample in samples]),
            "generate_s": quantiles([turn.generate_s for turn in turns]),
            "execute_s": quantiles([turn.execute_s for turn in turns]),
            "execution_wall_s": quantiles(
                [run.wall_s for sample in samples for run in sample.executions]
            ),
            "before": {d: [r.ok, r.n] for d, r in summary.before.items()},
            "after": {d: [r.ok, r.n] for d, r in summary.after.items()},
        },
    )


if __name__ == "__main__":
    main()
