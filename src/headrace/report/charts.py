"""Charts as SVG.

Every text goes through `Markup.format`, which escapes it. Colours are classes of the page's style
sheet, so that they follow its light and dark theme.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from headrace.report.figures import Point, Series

COLOURS = 8
"""Classes `c0` to `c7` of the style sheet."""

WIDTH, HEIGHT = 480, 230
"""Of a chart, in units of its own."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 38
_WIDEST_BAR = 56.0
_MOST_DOTS, _MOST_BANDS = 40, 4


@dataclass(frozen=True)
class Axis:
    """Range, ticks and meaning of an axis."""

    low: float
    high: float
    ticks: list[float]

    @classmethod
    def over(cls, values: Sequence[float], *, whole: bool = False, count: int = 5) -> "Axis":
        """An axis with round ticks around all values.

        Args:
            values: at least one.
            whole: ticks are whole numbers.
            count: about so many ticks.
        """
        low, high = min(values), max(values)
        if high - low < 1e-12 * max(1.0, abs(high)):
            low, high = low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
        raw = (high - low) / count
        unit = 10.0 ** math.floor(math.log10(raw))
        step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= raw)
        if whole:
            step = max(1.0, round(step))
        first, last = math.floor(low / step), math.ceil(high / step)
        return cls(first * step, last * step, [k * step for k in range(first, last + 1)])

    def place(self, value: float, start: float, end: float) -> float:
        """Where a value lies between two coordinates."""
        share = (value - self.low) / (self.high - self.low)
        return start + min(max(share, 0.0), 1.0) * (end - start)


SHARES = Axis(0.0, 1.0, [0.0, 0.25, 0.5, 0.75, 1.0])


def lines(
    series: Sequence[Series],
    *,
    x: str,
    last: float,
    unit: str = "",
    y: Axis | None = None,
    zero: bool = False,
) -> Markup:
    """Curves over steps or versions; empty where there is no point.

    Args:
        series: the curves. Two of one name have one colour.
        x: what the horizontal axis counts.
        last: its right end; it starts at 0.
        unit: appended to values in the texts that a pointer shows; `%` takes shares.
        y: vertical axis; around the values where not given.
        zero: that axis starts at 0.
    """
    values = [v for s in series for p in s.points for v in (p.y, p.low, p.high) if v is not None]
    if not values:
        return Markup("")
    y = y or Axis.over([*values, 0.0] if zero else values, count=4)
    horizontal = Axis(0.0, max(last, 1.0), _whole_ticks(max(last, 1.0)))
    colours = colours_of(series)
    body = [_grid(horizontal, y, x, unit)]
    curves = [s for s in series if not s.marks]
    bands = [_band(s.points, colours[s.name], horizontal, y) for s in curves]
    if sum(map(bool, bands)) <= _MOST_BANDS:
        body += bands
    body += [_curve(s, colours[s.name], horizontal, y) for s in curves]
    body += [_marks(s.points, colours[s.name], horizontal, y) for s in series if s.marks]
    body.append(_hits(series, horizontal, x, unit))
    return _svg(
        body, Markup("{} by {}").format(", ".join(dict.fromkeys(s.name for s in series)), x)
    )


def colours_of(series: Sequence[Series]) -> dict[str, int]:
    """Colour class by name of a curve, the same wherever the names are the same."""
    names = dict.fromkeys(s.name for s in series)
    return {name: number % COLOURS for number, name in enumerate(names)}


def bars(shares: dict[int, float], *, x: str) -> Markup:
    """Shares of a whole by a small number, as columns with their percentage."""
    if not shares:
        return Markup("")
    y = Axis.over([0.0, 1.1 * max(shares.values())], count=4)  # room for the highest label
    slots = range(max(shares) + 1)
    wide = (WIDTH - _LEFT - _RIGHT) / len(slots)
    body = [_horizontal_lines(y, "%")]
    for slot in slots:
        share = shares.get(slot, 0.0)
        width, middle = min(0.7 * wide, _WIDEST_BAR), _LEFT + (slot + 0.5) * wide
        top = y.place(share, _bottom(), _TOP)
        body.append(
            Markup(
                '<g><title>{x} {slot}: {text}</title><rect class="fill c0" x="{left:.1f}" '
                'y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2"/>'
                '<text class="label" x="{middle:.1f}" y="{over:.1f}">{text}</text>'
                '<text class="tick middle" x="{middle:.1f}" y="{under}">{slot}</text></g>'
            ).format(
                x=x, slot=slot, text=shown(share, "%"), left=middle - width / 2, top=top,
                width=width, height=_bottom() - top, middle=middle,
                over=max(top - 4, _TOP + 8), under=_bottom() + 15,
            )
        )  # fmt: skip
    body.append(_axis_name(x))
    return _svg(body, x)


def stack(parts: Sequence[tuple[str, float]]) -> Markup:
    """One bar of parts of a whole, in the order and colours of `colour % COLOURS`."""
    total = sum(value for _, value in parts)
    if total <= 0:
        return Markup("")
    at, body = 0.0, []
    for number, (name, value) in enumerate(parts):
        width = 1000 * value / total
        body.append(
            Markup(
                '<rect class="fill c{}" x="{:.2f}" y="0" width="{:.2f}" height="30">'
                "<title>{}: {}</title></rect>"
            ).format(number % COLOURS, at, width, name, shown(value / total, "%"))
        )
        at += width
    return Markup(
        '<svg class="stack" viewBox="0 0 1000 30" preserveAspectRatio="none" role="img" '
        'aria-label="shares of the time">{}</svg>'
    ).format(Markup("").join(body))


def interval(rate_low_high: tuple[float, float, float], colour: int) -> Markup:
    """A share in [0, 1] and its interval on a scale from 0 to 100 %."""
    mean, low, high = (10 + 280 * value for value in rate_low_high)
    return Markup(
        '<svg class="interval" viewBox="0 0 300 18" preserveAspectRatio="xMinYMid" role="img" '
        'aria-label="interval">'
        '<line class="gridline" x1="10" x2="290" y1="9" y2="9"/>'
        '<line class="whisker s{c}" x1="{low:.1f}" x2="{high:.1f}" y1="9" y2="9"/>'
        '<circle class="fill c{c}" cx="{mean:.1f}" cy="9" r="5"/></svg>'
    ).format(c=colour, low=low, high=high, mean=mean)


def shown(value: float, unit: str = "") -> str:
    """A number with two or three significant digits; `%` takes a share."""
    if unit == "%":
        return f"{100 * value:.0f} %" if value >= 0.0995 else f"{100 * value:.2g} %"
    size = abs(value)
    text = f"{value:,.0f}" if size >= 100 else f"{value:.3g}"
    return f"{text} {unit}".rstrip()


def _bottom() -> int:
    return HEIGHT - _BOTTOM


def _svg(body: Sequence[Markup], label: Markup | str) -> Markup:
    return Markup(
        '<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>'
    ).format(WIDTH, HEIGHT, label, Markup("").join(body))


def _whole_ticks(last: float) -> list[float]:
    return [tick for tick in Axis.over([0.0, last], whole=True, count=6).ticks if tick <= last]


def _grid(horizontal: Axis, vertical: Axis, x: str, unit: str) -> Markup:
    marks = [
        Markup('<text class="tick middle" x="{:.1f}" y="{}">{}</text>').format(
            horizontal.place(tick, _LEFT, WIDTH - _RIGHT), _bottom() + 15, shown(tick)
        )
        for tick in horizontal.ticks
    ]
    return Markup("").join([_horizontal_lines(vertical, unit), *marks, _axis_name(x)])


def _horizontal_lines(y: Axis, unit: str) -> Markup:
    lines_ = [
        Markup(
            '<line class="gridline" x1="{}" x2="{}" y1="{y:.1f}" y2="{y:.1f}"/>'
            '<text class="tick end" x="{}" y="{text:.1f}">{}</text>'
        ).format(
            _LEFT, WIDTH - _RIGHT, _LEFT - 6,
            f"{100 * tick:.3g} %" if unit == "%" else shown(tick),
            y=y.place(tick, _bottom(), _TOP), text=y.place(tick, _bottom(), _TOP) + 4,
        )
        for tick in y.ticks
    ]  # fmt: skip
    return Markup("").join(lines_)


def _axis_name(x: str) -> Markup:
    return Markup('<text class="axis middle" x="{}" y="{}">{}</text>').format(
        (_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 5, x
    )


def _xy(point: Point, value: float, horizontal: Axis, y: Axis) -> str:
    left = horizontal.place(point.x, _LEFT, WIDTH - _RIGHT)
    return f"{left:.1f},{y.place(value, _bottom(), _TOP):.1f}"


def _band(points: Sequence[Point], colour: int, horizontal: Axis, y: Axis) -> Markup:
    edges = [(p, p.low, p.high) for p in points if p.low is not None and p.high is not None]
    if len(edges) < 2:
        return Markup("")
    there = [_xy(p, high, horizontal, y) for p, _, high in edges]
    back = [_xy(p, low, horizontal, y) for p, low, _ in reversed(edges)]
    return Markup('<polygon class="band c{}" points="{}"/>').format(colour, " ".join(there + back))


def _curve(series: Series, colour: int, horizontal: Axis, y: Axis) -> Markup:
    places = [_xy(p, p.y, horizontal, y) for p in series.points]
    curve = Markup('<polyline class="line s{}" points="{}"/>').format(colour, " ".join(places))
    dots = [
        Markup('<circle class="fill c{}" cx="{}" cy="{}" r="2.4"/>').format(
            colour, *place.split(",")
        )
        for place in places
        if len(places) <= _MOST_DOTS
    ]
    return Markup("").join([curve, *dots])


def _marks(points: Sequence[Point], colour: int, horizontal: Axis, y: Axis) -> Markup:
    drawn = []
    for point in points:
        left, top = _xy(point, point.y, horizontal, y).split(",")
        low, high = (
            _xy(point, point.y if edge is None else edge, horizontal, y).split(",")[1]
            for edge in (point.low, point.high)
        )
        drawn.append(
            Markup(
                '<line class="whisker s{c}" x1="{x}" x2="{x}" y1="{low}" y2="{high}"/>'
                '<rect class="mark s{c}" x="{left:.1f}" y="{top:.1f}" width="9" height="9"/>'
            ).format(c=colour, x=left, low=low, high=high, left=float(left) - 4.5,
                     top=float(top) - 4.5)
        )  # fmt: skip
    return Markup("").join(drawn)


def _hits(series: Sequence[Series], horizontal: Axis, x: str, unit: str) -> Markup:
    """Invisible columns that carry the values of their place as a title."""
    texts: dict[float, list[str]] = {}
    for one in series:
        for point in one.points:
            span = ""
            if point.low is not None and point.high is not None:
                span = f" ({shown(point.low, unit)} to {shown(point.high, unit)})"
            held_out = " held out" if one.marks else ""
            text = f"{one.name}{held_out}: {shown(point.y, unit)}{span}"
            texts.setdefault(point.x, []).append(text)
    places = sorted(texts)
    left_edge, right_edge = float(_LEFT), float(WIDTH - _RIGHT)
    at = [horizontal.place(place, left_edge, right_edge) for place in places]
    edges = [left_edge, *((a + b) / 2 for a, b in pairwise(at)), right_edge]
    columns = [
        Markup(
            '<g class="hit"><rect class="reach" x="{:.1f}" y="{}" width="{:.1f}" height="{}"/>'
            '<line class="hair" x1="{at:.1f}" x2="{at:.1f}" y1="{}" y2="{}"/>'
            "<title>{}</title></g>"
        ).format(
            left, _TOP, max(right - left, 0.1), _bottom() - _TOP, _TOP, _bottom(),
            "\n".join([f"{x} {shown(place)}", *texts[place]]), at=middle,
        )
        for place, middle, (left, right) in zip(places, at, pairwise(edges), strict=True)
    ]  # fmt: skip
    return Markup("").join(columns)
