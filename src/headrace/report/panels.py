"""Charts side by side in one SVG file that stands alone, for documents."""

from collections.abc import Mapping, Sequence
from importlib.resources import files

from markupsafe import Markup

from headrace.report import charts
from headrace.report.figures import Series

_TITLE, _GAP, _LEGEND = 26, 20, 34
_STYLE = """
svg { font: 13px system-ui, sans-serif; font-variant-numeric: tabular-nums; }
.title { fill: var(--ink); font-weight: 600; } .entry { fill: var(--ink); }
"""


def panels(series: Mapping[str, Sequence[Series]], *, x: str, last: float) -> str:
    """One panel for each entry, with shares on a common axis from 0 to 100 % and one legend.

    Args:
        series: curves by the panel's title; equal names have equal colours in all panels.
        x: what the horizontal axis counts.
        last: its right end.
    """
    width = len(series) * (charts.WIDTH + _GAP) - _GAP
    height = _TITLE + charts.HEIGHT + _LEGEND
    body = []
    for number, (title, curves) in enumerate(series.items()):
        left = number * (charts.WIDTH + _GAP)
        chart = charts.lines(curves, x=x, last=last, unit="%", y=charts.SHARES)
        place = Markup('<svg x="{}" y="{}" width="{}" height="{}" ').format(
            left, _TITLE, charts.WIDTH, charts.HEIGHT
        )
        body.append(Markup('<text class="title" x="{}" y="17">{}</text>').format(left + 52, title))
        body.append(Markup(chart.replace("<svg ", place, 1)))
    colours = charts.colours_of([one for curves in series.values() for one in curves])
    at = 52.0
    for name, colour in colours.items():
        body.append(
            Markup(
                '<line class="line s{}" x1="{:.0f}" x2="{:.0f}" y1="{y}" y2="{y}"/>'
                '<text class="entry" x="{:.0f}" y="{under}">{}</text>'
            ).format(colour, at, at + 28, at + 36, name, y=height - 12, under=height - 8)
        )
        at += 60 + 7.5 * len(name)
    style = Markup(_variables() + _STYLE)  # both are constants of this package
    return Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" height="{h}">'
        '<style>{}</style><rect width="100%" height="100%" style="fill: var(--card)"/>{}</svg>\n'
    ).format(style, Markup("").join(body), w=width, h=height)


def _variables() -> str:
    """The rules of the report's style sheet that charts use, its two themes included."""
    sheet = files("headrace.report").joinpath("page.css").read_text()
    start = sheet.index(".gridline {")
    return sheet[: sheet.index("* { box-sizing")] + sheet[start : sheet.index(".stack {")]
