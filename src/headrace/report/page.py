"""One self-contained HTML page about a run, from its folder and its log.

The page is rendered with autoescape, so that text of models can only ever be text; and its policy
names the one style sheet and the one script that may act, by their hashes.
"""

import base64
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from headrace.broker.connection import without_credentials
from headrace.config import Config, to_json
from headrace.monitor.display import duration
from headrace.monitor.metrics import read_rows
from headrace.monitor.progress import Progress, Summary, read_progress, read_summary
from headrace.report import charts, figures
from headrace.report.charts import SHARES
from headrace.report.figures import Picked, Series
from headrace.report.samples import History, read_run
from headrace.report.transcript import Decoder, segments
from headrace.report.untrusted import visible, word

_HERE = Path(__file__).parent
_EACH = 2
_MOST_CHARACTERS = 20_000


@dataclass(frozen=True)
class Chart:
    """A drawing with what it shows."""

    title: str
    caption: str
    svg: Markup
    legend: dict[str, int]
    """Colour by name."""


async def render(config: Config) -> str:
    """The page of a run, finished or not.

    Raises:
        HeadraceError: there is no such run, or its files cannot be read.
    """
    ends = figures.Ends(_EACH)
    history = await read_run(config, ends.offer)
    run_dir = Path(config.run.dir)
    metrics = read_rows(run_dir)
    progress, summary = read_progress(run_dir), read_summary(run_dir)
    train = [row for row in history.rows if row.purpose == "train"]
    last = max([step.version for _, step in history.steps], default=0)
    classes = figures.failure_classes(train)
    decode = Decoder(config)
    return _template(
        run=config.run_name,
        version=installed_version("headrace"),
        written=_moment(time.time()),
        finished=summary is not None,
        state=_state(progress, summary),
        facts=_facts(config, history, progress, summary),
        held_out=_held_out(history),
        binned=figures.bucket_width(last),
        charts=_charts(history, metrics, last),
        **_time(summary.time_s if summary else progress.waiting if progress else {}),
        failures=classes,
        most_failures=max((c.total for c in classes), default=1),
        domains=sorted({row.domain for row in train}),
        train_samples=len(train),
        picked=[_shown(part, decode) for part in ends.picked()],
        token_note=decode.note,
        configuration=_configuration(config),
    )


def _template(**values: Any) -> str:
    style, script = (Markup(_read(name)) for name in ("page.css", "page.js"))
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {
        "share": _share,
        "word": word,
        "clipped": _clipped,
    }
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    template = environment.from_string(_read("page.html"))
    return template.render(policy=policy, style=style, script=script, **values)


def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


def _clipped(text: str) -> str:
    text = visible(text)
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[:_MOST_CHARACTERS]}\n… {len(text) - _MOST_CHARACTERS} characters more"


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def _state(progress: Progress | None, summary: Summary | None) -> str:
    if summary is not None:
        return "finished"
    if progress is None:
        return "nothing written yet"
    return f"not finished: {progress.phase.replace('_', ' ')}, as of {_moment(progress.updated)}"


def _facts(
    config: Config, history: History, progress: Progress | None, summary: Summary | None
) -> list[tuple[str, str]]:
    commit = Path(config.run.dir) / "commit.txt"
    steps = len(history.steps)
    facts = {
        "steps": f"{steps} of {config.learner.steps}",
        "commit": commit.read_text().strip()[:12] if commit.is_file() else "unknown",
        "model": config.model.path,
        "domains": ", ".join(domain.id for domain in config.domains),
        "batch": f"{config.learner.batch_groups} groups of {config.learner.group_size} samples",
        "staleness bound": f"{config.staleness.max_versions} versions",
        "seed": str(config.run.seed),
        "samples": f"{len(history.rows):,} decided",
        "generated": f"{sum(row.sampled for row in history.rows):,} tokens",
    }
    if progress is not None:
        facts["learner started"] = _moment(progress.started)
        facts["groups"] = f"{progress.trained} trained, {progress.filtered} filtered"
    if summary is not None:
        facts["wall time"] = duration(summary.wall_s)
        facts["trained"] = f"{summary.trained_tokens:,} tokens"
        facts["checkpoint"] = summary.checkpoint
    elif progress is not None:
        facts["wall time of this learner"] = duration(progress.updated - progress.started)
    return [(name, value) for name, value in facts.items() if value]


def _held_out(history: History) -> list[tuple[str, list[tuple[str, Any, Markup]]]]:
    shown = []
    for domain, by_version in sorted(figures.probe_rates(history.rows).items()):
        ends = sorted({min(by_version), max(by_version)})
        measured = []
        for version in ends:
            rate, after = by_version[version], version > 0
            drawn = charts.interval((rate.mean, *rate.interval), 0 if after else 6)
            measured.append((f"{version}" if after else "0 (before)", rate, drawn))
        shown.append((domain, measured))
    return shown


def _charts(history: History, metrics: figures.Metrics, last: int) -> list[Chart]:
    width = figures.bucket_width(last)
    rows = history.rows
    success = figures.success_by_version(rows, width)
    held_out = figures.probe_marks(figures.probe_rates(rows))
    sampled = "policy version"
    return [
        _chart("Success in training",
               "training samples, mean over groups with 95 % intervals; squares are held-out tasks",
               [*success, *held_out], last, x=sampled, unit="%", y=SHARES),
        _chart("Mean score", "reward of all training samples",
               figures.score_by_version(rows, width), last, x=sampled, y=SHARES),
        _chart("Entropy of the learner", "mean over the trained tokens, nats",
               [figures.metric(metrics, "entropy", "entropy")], last, zero=True),
        _chart("Surprisal of the sampler", "mean negative log-probability of sampled tokens, nats; "
               "estimates the entropy by domain", figures.surprisal_by_version(rows, width), last,
               x=sampled, zero=True),
        _chart("Staleness", "lag of the trained tokens, versions",
               [figures.mean_lag(metrics), figures.most_lag(metrics)], last, zero=True),
        Chart("Lag of all trained tokens", "share by versions between sampling and training",
              charts.bars(figures.lag_shares(metrics), x="lag"), {}),
        _chart("Sampler and learner: log-probability", "mean absolute difference a token, nats; at "
               "lag 0 the engines alone differ",
               [figures.metric(metrics, "logprob_diff_mean", "all trained tokens"),
                figures.metric(metrics, "lag0/logprob_diff_mean", "lag 0")], last, zero=True),
        _chart("Sampler and learner: KL", "KL(sampler‖learner), nats a token",
               [figures.metric(metrics, "kl", "kl")], last, zero=True),
        _chart("Effective sample size", "share of the trained tokens, of the importance ratios",
               [figures.metric(metrics, "ess", "ess")], last, unit="%", y=SHARES),
        _chart("Truncated ratios", "share of the trained tokens that the loss truncated or clipped",
               [figures.metric(metrics, "truncated_fraction", "truncated")], last, unit="%",
               zero=True),
        _chart("Gradient norm", "before clipping", [figures.metric(metrics, "grad_norm", "norm")],
               last, zero=True),
        _chart("Throughput", "tokens a second of wall time, from step to step",
               figures.throughput(metrics, history), last, zero=True),
    ]  # fmt: skip


def _chart(
    title: str, caption: str, series: Sequence[Series], last: int, *, x: str = "step", **how: Any
) -> Chart:
    colours = charts.colours_of(series)
    return Chart(title, caption, charts.lines(series, x=x, last=last, **how), colours)


def _time(seconds: dict[str, float]) -> dict[str, Any]:
    parts = sorted(((k, v) for k, v in seconds.items() if v > 0), key=lambda part: -part[1])
    total = sum(value for _, value in parts)
    return {
        "time_bar": charts.stack(parts),
        "time_parts": [
            (name, number % charts.COLOURS, duration(value), value / total)
            for number, (name, value) in enumerate(parts)
        ],
    }


def _shown(part: Picked, decode: Decoder) -> dict[str, Any]:
    shown = [(row, sample, segments(sample, decode)) for row, sample in part.samples]
    return {"domain": part.domain, "title": part.title, "shown": shown}


def _configuration(config: Config) -> str:
    broker = msgspec.structs.replace(config.broker, url=without_credentials(config.broker.url))
    return to_json(msgspec.structs.replace(config, broker=broker)).decode()
