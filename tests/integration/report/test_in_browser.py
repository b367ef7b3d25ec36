"""The page of `headrace report` in a real browser: it shows its figures, and runs nothing else."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli.main import main
from tests.integration.report.browser import MISSING, Browser, program
from tests.integration.report.recorded import Recorder
from tests.integration.report.test_report import HOSTILE

pytestmark = pytest.mark.browser
BOXES = """
[...document.querySelectorAll('%s')].map(e => {
  const box = e.getBoundingClientRect();
  return [box.x, box.y + scrollY, box.width, box.height, getComputedStyle(e).stroke];
})
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, empty_broker: str) -> str:
    """Address of the report of a run whose model wrote HTML."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    text = HOSTILE + " a" * 200 + "b" * 300
    recorder = Recorder(folder, ("parity", "sums"), 6, lambda g, i: text, broker=empty_broker)
    asyncio.run(recorder.write())
    assert main(["report", str(folder)]) == 0
    return (folder / "report.html").as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if program() is None:
        pytest.fail(MISSING, pytrace=False)
    with Browser() as started:
        yield started


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (400, "dark")])
def test_everything_has_a_place_and_nothing_runs_over_the_edge(browser, page, width, scheme):
    opened = browser.open(page, width=width, scheme=scheme)
    browser.evaluate(
        opened, "document.querySelectorAll('details').forEach(d => { d.open = true; })"
    )
    assert browser.evaluate(opened, "document.documentElement.scrollWidth") <= width
    charts = browser.evaluate(opened, BOXES % "figure svg.chart")
    assert len(charts) == 12
    assert all(w > 200 and h > 100 for _, _, w, h, _ in charts)
    lines = browser.evaluate(opened, BOXES % "polyline.line")
    assert len(lines) >= 11
    assert all(x >= 0 and w > 50 and x + w <= width for x, _, w, _, _ in lines)
    assert "none" not in {stroke for *_, stroke in lines}, "each has its colour"
    for parts in ("svg.stack rect", "figure rect.fill", "circle.fill", "svg.bar rect.fill"):
        boxes = browser.evaluate(opened, BOXES % parts)
        assert boxes
        assert all(w > 0 for _, _, w, _, _ in boxes), parts
    background = browser.evaluate(opened, "getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(246, 247, 249)" if scheme == "light" else "rgb(18, 22, 28)")


def test_the_page_asks_for_nothing_complains_of_nothing_and_runs_no_text(browser, page):
    opened = browser.open(page, width=1200)
    assert browser.evaluate(opened, "typeof window.ran") == "undefined"
    shown = browser.evaluate(opened, "document.querySelector('.piece.sampled pre').textContent")
    assert shown.startswith("</pre></details><script>window.ran = 1</script>")
    assert opened.requests == [page]
    assert opened.console == []


def test_values_appear_under_the_pointer(browser, page):
    opened = browser.open(page, width=1200)
    x, y, width, height, _ = browser.evaluate(opened, BOXES % ".hit .reach")[2]
    assert browser.evaluate(opened, "document.getElementById('tip').hidden")
    browser.evaluate(opened, f"scrollTo({{top: {y - 200}, behavior: 'instant'}})")
    top = browser.evaluate(opened, "scrollY")
    browser.call(
        "Input.dispatchMouseEvent", opened.session,
        type="mouseMoved", x=x + width / 2, y=y - top + height / 2,
    )  # fmt: skip
    text = browser.evaluate(opened, "document.getElementById('tip').innerText")
    assert text.startswith("policy version")
    assert "parity: " in text
    assert " % to " in text


def test_even_text_that_were_not_escaped_could_not_run_or_load(browser, page, tmp_path):
    path = Path(page.removeprefix("file://"))
    planted = (
        "<script>window.ran = 1</script><img src='http://127.0.0.1:9/x' onerror='window.ran = 1'>"
        "<p id=planted style='color: rgb(1, 2, 3)'>x</p></main>"
    )
    other = tmp_path / "planted.html"
    other.write_text(path.read_text().replace("</main>", planted))
    opened = browser.open(other.as_uri(), width=1200)
    assert browser.evaluate(opened, "typeof window.ran") == "undefined"
    colour = "getComputedStyle(document.getElementById('planted')).color"
    assert browser.evaluate(opened, colour) != "rgb(1, 2, 3)"
    # and the test above would have seen it
    assert sum("Content Security Policy" in text for text in opened.console) >= 3


def test_on_paper_every_transcript_is_open(browser, page):
    opened = browser.open(page, width=1200)
    closed = "document.querySelectorAll('details:not([open])').length"
    assert browser.evaluate(opened, closed) > 0
    assert browser.evaluate(opened, f"dispatchEvent(new Event('beforeprint')), {closed}") == 0
    assert browser.evaluate(opened, f"dispatchEvent(new Event('afterprint')), {closed}") > 0


def test_without_a_browser_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="apt-get install chromium"):
        Browser()
    assert 'pytest -m "not gpu and not browser"' in MISSING
