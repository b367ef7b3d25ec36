"""`headrace report`: what the page says, and what it must not let the text of a model do."""

import asyncio
import base64
import hashlib
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from headrace.cli.main import main
from tests.integration.report.recorded import Recorder

HOSTILE = (
    "</pre></details><script>window.ran = 1</script><img src=x onerror='window.ran = 1'>"
    "<style>body { display: none }</style>\x1b[2J\u202e {{ 7 * 7 }}"
)
STEPS = 6


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, empty_broker: str) -> Path:
    """The folder of a run whose report is written."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    recorder = Recorder(
        folder, ("parity", "sums"), STEPS, lambda group, index: HOSTILE, broker=empty_broker
    )
    asyncio.run(recorder.write())
    assert main(["report", str(folder)]) == 0
    return folder


class Elements(HTMLParser):
    """Tags and attributes of a page, and the text of its rows."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs


def test_the_page_holds_every_part_and_figures_of_the_run(written):
    page = (written / "report.html").read_text()
    for part in ("held-out", "curves", "time", "failures", "transcripts", "configuration"):
        assert f'<section id="{part}">' in page
    text = " ".join(re.sub("<[^>]*>", " ", html.unescape(page)).split())
    assert "6 of 6" in text
    assert "wait for samples 50 s 67 %" in text
    # of each group of four, slot 1 fails; every third group loses slot 3 to the environment
    assert re.search(r"environment sandbox_error .* 4 8 %", text)
    assert text.count("2 of 3 67 %") + text.count("3 of 3 100 %") == 4, "by domain, at both ends"
    for title in ("early successes", "late successes", "early failures", "late failures"):
        assert page.count(f"<h4>{title}</h4>") == 2, "one for each domain"


def test_text_of_the_model_is_text_whatever_it_holds(written):
    page = (written / "report.html").read_text()
    elements = Elements(page)
    assert elements.tags.count("script") == 1
    assert elements.tags.count("style") == 1
    assert "img" not in elements.tags
    assert not any(name.startswith("on") for name, _ in elements.attributes)
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert "&lt;img src=x onerror=&#39;window.ran = 1&#39;&gt;" in page
    assert "{{ 7 * 7 }}" in page


def test_the_page_names_no_other_resource_and_no_password(written):
    page = (written / "report.html").read_text()
    linked = [v or "" for k, v in Elements(page).attributes if k in {"src", "href", "action"}]
    assert all(value.startswith(("#", "data:,")) for value in linked)
    assert "secret" not in page
    assert "&#34;url&#34;: &#34;nats://127.0.0.1:" in page


def test_a_run_that_is_not_finished_is_shown_as_it_is(tmp_path, empty_broker):
    recorder = Recorder(
        tmp_path / "run", ("parity",), 2, lambda group, index: "x", broker=empty_broker
    )
    asyncio.run(recorder.write(finished=False))
    other = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "run"), "--output", str(other)]) == 0
    page = other.read_text()
    assert "not finished: training" in page
    assert "0 (before)" in page
    assert not (tmp_path / "run/report.html").exists()


def test_a_run_without_samples_gives_a_page_that_says_so(tmp_path, empty_broker):
    recorder = Recorder(
        tmp_path / "run", ("parity",), 2, lambda group, index: "x", broker=empty_broker
    )
    asyncio.run(recorder.begin())
    assert main(["report", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run/report.html").read_text()
    assert "No sample is decided yet." in page
    assert page.count("no data yet") == 12


def test_what_the_user_got_wrong_is_named(capsys, written, tmp_path, empty_broker):
    url = f"broker.url={empty_broker}"
    wrong = {
        ("nowhere",): "nowhere: neither a TOML file, nor an existing run folder",
        (str(tmp_path),): "not a run folder (it holds no config.json)",
        (str(written), "--output", str(tmp_path / "a/b.html")): "a does not exist; make it",
        (str(written), "--output", str(tmp_path)): "is a folder; name a file",
        (str(written), "--output", ""): "is a folder; name a file",
        (str(written), "--output", str(tmp_path / (250 * "a"))): "File name too long",
        (f"run.dir={tmp_path}/absent", url): "has no run 'absent'",
    }
    for arguments, said in wrong.items():
        assert main(["report", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
    assert list(tmp_path.iterdir()) == []


def test_the_policy_names_the_hashes_of_what_stands_in_the_page(written):
    page = (written / "report.html").read_text()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    for tag in ("style", "script"):
        (body,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{tag}-src &#39;sha256-{digest}&#39;" in policy
    assert policy.startswith("default-src &#39;none&#39;")
    assert "unsafe" not in policy
    assert page.index("Content-Security-Policy") < page.index("<style>"), "it rules what follows"


def test_the_configuration_is_the_resolved_one(written):
    page = html.unescape((written / "report.html").read_text())
    shown = json.loads(page[page.index("<pre>{") + 5 : page.rindex("}") + 1].split("</pre>")[0])
    stored = json.loads((written / "config.json").read_text())
    assert shown.pop("broker").keys() == stored.pop("broker").keys()
    assert shown == stored
