"""One transcript as lines of plain text."""

from collections.abc import Iterator, Sequence

from headrace.broker.records import Execution, Failed, Trajectory
from headrace.report.samples import Row, Sample
from headrace.report.transcript import Segment
from headrace.report.untrusted import bordered, word


def render(row: Row, sample: Sample, pieces: Sequence[Segment], width: int) -> list[str]:
    """Lines of a transcript: those behind a border are untrusted text, the others headrace's own.

    Args:
        row: of the sample.
        sample: its record.
        pieces: of a trajectory, as `segments` gives them.
        width: cells of a line of untrusted text.
    """
    task = f"{word(row.domain)} level {row.level} task {row.task}"
    lines = [f"sample {row.name}: {task}, {row.purpose}, {row.fate_told}"]
    for piece in pieces:
        lines += [_heading(piece), *bordered(piece.text, width)]
    if isinstance(sample, Failed):
        lines.append(f"failed: {word(sample.side)}, {word(sample.kind)}, {_attempt(sample)}")
        return lines + (bordered(sample.evidence, width) if sample.evidence else [])
    return [*lines, *_turns(sample), *map(_execution, sample.executions), *_verdict(sample, width)]


def _heading(piece: Segment) -> str:
    heading = f"{piece.role}: tokens {piece.start}-{piece.end}"
    if piece.version is not None:
        heading += (
            f", version {piece.version}, log-probability {piece.logprob_mean:.3f} a token, "
            f"lowest {piece.logprob_min:.3f}"
        )
    return heading


def _attempt(sample: Sample) -> str:
    return f"attempt {sample.attempt} of actor {word(sample.actor) or '-'}"


def _turns(trajectory: Trajectory) -> Iterator[str]:
    for number, turn in enumerate(trajectory.turns, 1):
        yield (
            f"turn {number}: tokens {turn.start}-{turn.end}, ended by {word(turn.stop)}, "
            f"{turn.generate_s:.2f} s to generate, {turn.execute_s:.2f} s to execute"
        )


def _execution(done: Execution) -> str:
    end = f"signal {done.signal}" if done.signal is not None else f"exit {done.exit_code}"
    return (
        f"execution for {word(done.purpose)}: {word(done.status)}, {end}, "
        f"{done.wall_s:.2f} s, {done.cpu_s:.2f} s of CPU, {word(done.isolation)}"
    )


def _verdict(trajectory: Trajectory, width: int) -> Iterator[str]:
    verdict = trajectory.verdict
    for check in verdict.checks:
        yield f"check {word(check.name)}: {'passed' if check.passed else 'not passed'}"
        if check.detail:
            yield from bordered(check.detail, width)
    steps = " ".join(f"{score:.2f}" for score in verdict.step_scores)
    charged = f", {word(verdict.side)}: {word(verdict.kind)}" if verdict.side else ""
    yield (
        f"verdict: score {verdict.score:.2f}, {'success' if verdict.success else 'no success'}"
        f"{charged}; step scores {steps or '-'}; {_attempt(trajectory)}, "
        f"temperature {trajectory.temperature:g}, {trajectory.wall_s:.1f} s"
    )
    if verdict.evidence:
        yield from bordered(verdict.evidence, width)
