"""A `/metrics` endpoint for Prometheus: the state of the run, and its latest step.

Each scrape gets the newest values; what Prometheus stores of them are live curves, by domain.
"""

import re
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headrace.errors import ConfigError
from headrace.monitor.progress import PHASES, Progress

_LABELS = {"success": "domain", "seconds": "part"}
"""Groups of step metrics whose members are values of one label."""
_STOP_S = 5.0


class Prometheus(Collector):
    """See `Exporter`."""

    name = "Prometheus"

    def __init__(self, run: str, address: str, port: int) -> None:
        """Serve until `close`.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        self._info = _gauge("run_info", "Name of the run.", {run: 1.0}, "run")
        # replaced whole by the learner's thread, so that a scrape never sees a half
        self._progress: list[Metric] = []
        self._step: list[Metric] = []
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, address, registry)
        except OSError as error:
            raise ConfigError(
                f"monitor.prometheus_port {port}: {address}:{port} cannot be listened on "
                f"({error.strerror}); choose another, or 0 for none"
            ) from error

    def collect(self) -> Iterator[Metric]:
        """See `Collector`: called by a scrape, in its thread."""
        yield from [self._info, *self._progress, *self._step]

    def step(self, version: int, values: Mapping[str, float], at: float) -> None:
        """See `Exporter`."""
        self._step = step_families(version, values, at)

    def progress(self, progress: Progress) -> None:
        """See `Exporter`."""
        self._progress = list(progress_families(progress))

    def close(self) -> None:
        """See `Exporter`."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_STOP_S)


def progress_families(progress: Progress) -> Iterator[Metric]:
    """The state of a run as metric families."""
    success = progress.success
    yield _gauge("phase", "1 for what the run is doing.", _one_hot(progress.phase), "phase")
    yield _gauge("policy_version", "Newest version visible to actors.", progress.version)
    yield _gauge("planned_steps", "Optimizer steps of the whole run.", progress.total_steps)
    yield _counter("steps", "Optimizer steps in the ledger.", progress.steps)
    yield _counter("groups_issued", "Training groups issued.", progress.issued)
    yield _counter("groups_completed", "Groups whose samples are all there.", progress.complete)
    yield _counter("groups_trained", "Groups in the ledger's batches.", progress.trained)
    yield _counter("groups_filtered", "Groups without reward spread.", progress.filtered)
    yield _gauge("groups_open", "Groups under way.", progress.issued - progress.complete)
    yield _counter(
        "samples", "Judged samples.", {name: s.n for name, s in success.items()}, "domain"
    )
    yield _counter(
        "samples_succeeded", "Successes.", {name: s.ok for name, s in success.items()}, "domain"
    )
    yield _gauge(
        "success_ratio",
        "Moving average of success.",
        {name: s.ema for name, s in success.items()},
        "domain",
    )
    failed = {"environment": progress.failed.environment, "model": progress.failed.model}
    yield _counter("samples_failed", "Samples by the side charged.", failed, "side")
    rates = {
        "generated": progress.generated_tokens_per_s,
        "trained": progress.trained_tokens_per_s,
    }
    for what, rate in rates.items():
        yield _gauge(f"{what}_tokens_per_second", f"Tokens {what} lately.", rate)
    lags = {str(lag): count for lag, count in progress.staleness.items()}
    yield _counter("trained_tokens", "Tokens by lag in versions.", lags, "lag")
    yield _counter("learner_seconds", "Where its time went.", progress.waiting, "activity")
    yield _gauge("actors", "Actors alive.", len(progress.actors))
    versions = {actor.id: actor.version for actor in progress.actors}
    yield _gauge("actor_version", "Version that it serves.", versions, "actor")
    yield _gauge("updated_timestamp_seconds", "When this was true.", progress.updated)


def step_families(version: int, values: Mapping[str, float], at: float) -> list[Metric]:
    """The metrics of one step as gauges `headrace_step_...`.

    `success/<domain>`, `seconds/<part>` and `lag<n>/<name>` become labels; any other `/` a `_`.
    """
    grouped: dict[tuple[str, str], dict[str, float]] = {}
    single: dict[str, float] = {"version": version, "timestamp_seconds": at}
    for name, value in values.items():
        group, slash, member = name.partition("/")
        if lag := re.fullmatch(r"lag(\d+)", group):
            grouped.setdefault((f"lag_{member}", "lag"), {})[lag[1]] = value
        elif slash and group in _LABELS:
            grouped.setdefault((group, _LABELS[group]), {})[member] = value
        else:
            single[name] = value
    families = [_gauge(f"step_{_word(name)}", "Latest step.", v) for name, v in single.items()]
    families += [
        _gauge(f"step_{_word(name)}", f"Latest step, by {label}.", by, label)
        for (name, label), by in grouped.items()
    ]
    return families


Value = float | Mapping[str, float]


def _gauge(name: str, meaning: str, value: Value, label: str = "") -> Metric:
    return _fill(GaugeMetricFamily(f"headrace_{name}", meaning, labels=_labels(label)), value)


def _counter(name: str, meaning: str, value: Value, label: str = "") -> Metric:
    """The client appends `_total` to the name."""
    return _fill(CounterMetricFamily(f"headrace_{name}", meaning, labels=_labels(label)), value)


def _fill(family: "GaugeMetricFamily | CounterMetricFamily", value: Value) -> Metric:
    if isinstance(value, Mapping):
        for key, number in value.items():
            family.add_metric([key], number)
    else:
        family.add_metric([], value)
    return family


def _labels(label: str) -> list[str]:
    return [label] if label else []


def _one_hot(phase: str) -> dict[str, float]:
    return {name: float(name == phase) for name in PHASES}


def _word(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)
