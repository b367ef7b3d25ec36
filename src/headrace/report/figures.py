"""The numbers of a run's page: curves, rates and counts from the log's rows and `metrics.jsonl`."""

import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from headrace.actor.passrates import interval
from headrace.broker.records import Trajectory
from headrace.monitor.progress import Rate
from headrace.report.samples import History, Row, Sample

MOST_POINTS = 60
Metrics = Sequence[Mapping[str, float | None]]


@dataclass(frozen=True)
class Point:
    """One value of a curve, perhaps with an interval."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    """One curve."""

    name: str
    points: list[Point]
    marks: bool = False
    """Single measurements, not joined by a line."""


def bucket_width(last: int) -> int:
    """Neighbouring versions that one point stands for, so that a long run stays readable."""
    return max(1, -(-last // MOST_POINTS))


def success_by_version(rows: Iterable[Row], width: int) -> list[Series]:
    """Share of training samples that succeeded, by domain and the version that sampled them.

    Samples of one group are of one task, and alike: every group counts once, however many of its
    samples a version took part in, and the interval rests on groups.
    """

    def point(x: float, chosen: list[Row]) -> Point:
        groups: dict[int, list[float]] = defaultdict(list)
        for row in chosen:
            groups[row.group].append(float(row.success))
        shares = [_mean(group) for group in groups.values()]
        return Point(x, _mean(shares), *interval(shares, len(chosen) // len(groups)))

    return _by_version(rows, width, point)


def score_by_version(rows: Iterable[Row], width: int) -> list[Series]:
    """Mean score of training samples, by domain and version."""
    return _by_version(
        rows, width, lambda x, chosen: Point(x, _mean([row.score or 0.0 for row in chosen]))
    )


def surprisal_by_version(rows: Iterable[Row], width: int) -> list[Series]:
    """Mean of minus the sampler's log-probability of a token: an estimate of its entropy."""

    def point(x: float, chosen: list[Row]) -> Point:
        tokens = sum(row.sampled for row in chosen)
        return Point(x, sum(row.surprisal for row in chosen) / max(tokens, 1))

    return _by_version(rows, width, point)


def _by_version(
    rows: Iterable[Row], width: int, point: Callable[[float, list[Row]], Point]
) -> list[Series]:
    groups: dict[str, dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.purpose == "train" and row.versions:
            groups[row.domain][row.versions[-1] // width].append(row)
    return [
        Series(domain, [point(_middle(key, width), bins[key]) for key in sorted(bins)])
        for domain, bins in sorted(groups.items())
    ]


def probe_rates(rows: Iterable[Row]) -> dict[str, dict[int, Rate]]:
    """Held-out success by domain and version, of the probes that were judged."""
    rates: dict[str, dict[int, Rate]] = defaultdict(dict)
    for row in rows:
        if row.purpose == "probe" and row.score is not None:
            rate = rates[row.domain].setdefault(row.issued_version, Rate())
            rate.n += 1
            rate.ok += row.success
    return dict(rates)


def probe_marks(rates: dict[str, dict[int, Rate]]) -> list[Series]:
    """The same as single marks with their intervals."""
    return [
        Series(
            domain,
            [Point(version, r.mean, *r.interval) for version, r in sorted(by_version.items())],
            marks=True,
        )
        for domain, by_version in sorted(rates.items())
    ]


def metric(metrics: Metrics, key: str, name: str) -> Series:
    """One column of `metrics.jsonl` by step."""
    return _binned(name, [(row["step"], row.get(key)) for row in metrics])


def mean_lag(metrics: Metrics) -> Series:
    """Mean lag of the trained tokens by step, in versions."""
    pairs: list[tuple[float | None, float | None]] = []
    for row in metrics:
        lags = _lags(row)
        total = sum(lags.values())
        mean = sum(lag * n for lag, n in lags.items()) / total if total else None
        pairs.append((row["step"], mean))
    return _binned("mean", pairs)


def most_lag(metrics: Metrics) -> Series:
    """Largest lag of a trained token by step, in versions."""
    return _binned("largest", [(row["step"], max(_lags(row), default=None)) for row in metrics])


def lag_shares(metrics: Metrics) -> dict[int, float]:
    """Share of all trained tokens by lag in versions."""
    totals: Counter[int] = Counter()
    for row in metrics:
        totals.update({lag: int(count) for lag, count in _lags(row).items()})
    whole = totals.total()
    return {lag: totals[lag] / whole for lag in sorted(totals)} if whole else {}


def throughput(metrics: Metrics, history: History) -> list[Series]:
    """Generated and trained tokens a second, over the wall time from one step's end to the next."""
    at = {int(row["step"] or 0): row["time"] for row in metrics}
    ends = {step.version: seq for seq, step in history.steps}
    trained = {int(row["step"] or 0): row.get("tokens") for row in metrics}
    sampled = sorted((row.seq, row.sampled) for row in history.rows)
    made: dict[int, int] = Counter()
    position = 0
    for version in sorted(ends):
        while position < len(sampled) and sampled[position][0] < ends[version]:
            made[version] += sampled[position][1]
            position += 1
    rates: dict[str, list[tuple[float | None, float | None]]] = {"generated": [], "trained": []}
    for version in sorted(at):
        now, before = at[version], at.get(version - 1)
        if now is None or before is None or now <= before:
            continue
        rates["generated"].append((version, made[version] / (now - before)))
        rates["trained"].append((version, (trained[version] or 0.0) / (now - before)))
    return [_binned(name, pairs) for name, pairs in rates.items()]


@dataclass(frozen=True)
class FailureClass:
    """Training samples that one side was charged for, in one class."""

    side: str
    kind: str
    by_domain: dict[str, int]

    @property
    def total(self) -> int:
        """Samples of all domains."""
        return sum(self.by_domain.values())


def failure_classes(rows: Iterable[Row]) -> list[FailureClass]:
    """Failures of training samples by side and class, the most frequent first."""
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for row in rows:
        if row.purpose == "train" and row.side:
            counts[row.side, row.kind][row.domain] += 1
    classes = [FailureClass(side, kind, dict(c)) for (side, kind), c in counts.items()]
    return sorted(classes, key=lambda c: (c.side, -c.total, c.kind))


@dataclass(frozen=True)
class Picked:
    """Samples of one domain, time and outcome."""

    domain: str
    title: str
    samples: list[tuple[Row, Trajectory]]


class Ends:
    """Keeps the first and the last training samples of each domain, successes and failures."""

    def __init__(self, each: int) -> None:
        self._each = each
        self._first: dict[tuple[str, bool], list[tuple[Row, Trajectory]]] = {}
        self._last: dict[tuple[str, bool], deque[tuple[Row, Trajectory]]] = {}

    def offer(self, row: Row, sample: Sample) -> None:
        """Take the next sample."""
        if row.purpose != "train" or not isinstance(sample, Trajectory):
            return
        key = (row.domain, row.success)
        first = self._first.setdefault(key, [])
        if len(first) < self._each:
            first.append((row, sample))
        else:
            self._last.setdefault(key, deque(maxlen=self._each)).append((row, sample))

    def picked(self) -> list[Picked]:
        """What is kept, by domain, successes first, early ones first."""
        found: list[Picked] = []
        for domain, success in sorted(self._first, key=lambda key: (key[0], not key[1])):
            outcome, key = "successes" if success else "failures", (domain, success)
            found.append(Picked(domain, f"early {outcome}", self._first[key]))
            if key in self._last:
                found.append(Picked(domain, f"late {outcome}", list(self._last[key])))
        return found


def _lags(row: Mapping[str, float | None]) -> dict[int, float]:
    return {
        int(match[1]): value
        for key, value in row.items()
        if value and (match := re.fullmatch(r"lag(\d+)/tokens", key))
    }


def _binned(name: str, pairs: list[tuple[float | None, float | None]]) -> Series:
    known = [(int(x), y) for x, y in pairs if x is not None and y is not None]
    width = bucket_width(max((x for x, _ in known), default=0))
    bins: dict[int, list[float]] = defaultdict(list)
    for x, y in known:
        bins[x // width].append(y)
    return Series(name, [Point(_middle(key, width), _mean(bins[key])) for key in sorted(bins)])


def _middle(key: int, width: int) -> float:
    """Where the point of a bin lies: the same place for all curves, which can then be compared."""
    return key * width + (width - 1) / 2


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
