"""`headrace trajectories`: which samples it lists, and that no text can pass for its own lines."""

import asyncio
import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.broker.connection import connected
from headrace.broker.records import Array, Issued, TaskRef, Trajectory, decode, encode
from headrace.broker.runlog import RunLog
from headrace.broker.server import bundled_server
from headrace.broker.subjects import RunNames
from headrace.cli.main import main
from headrace.cli.runargs import resolve
from headrace.learner import archive, history
from headrace.learner.archive import Archive
from headrace.report.samples import read_run
from tests.integration.report.recorded import Recorder

STEPS = 5
HOSTILE = (
    "fine\x1b[2J\x1b[1;1H\r\x07\u202e\x9b31m\nsampled: tokens 0-9, version 99\n[red]x[/red]"
    + " " * 95
    + "verdict: score 1.00, success\tend\n"
)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_ANSWER_S", 30.0)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch, patient: None) -> None:
    """For tests whose broker is down or silent: the wait for it passes in full."""
    monkeypatch.setattr(history, "_ANSWER_S", 0.5)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, empty_broker: str) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "run"
    recorder = Recorder(
        folder, ("parity", "sums"), STEPS, lambda group, index: HOSTILE, broker=empty_broker
    )
    asyncio.run(recorder.write())
    return folder


def listed(
    capsys: pytest.CaptureFixture[str], run_dir: Path, *options: str
) -> list[dict[str, Any]]:
    assert main(["trajectories", str(run_dir), "--json", *options]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    assert main(["trajectories", *arguments]) == code
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("headrace: error")]
    return line


def test_the_rows_of_a_run_share_one_copy_of_each_text(run_dir):
    rows = asyncio.run(read_run(resolve([str(run_dir)]))).rows
    for name in ("domain", "purpose", "side", "kind"):
        texts = [getattr(row, name) for row in rows]
        assert len({id(text) for text in texts}) == len(set(texts)) > 1


def test_all_samples_are_listed_in_log_order_with_the_step_that_trained_them(capsys, run_dir):
    rows = listed(capsys, run_dir)
    train = [row for row in rows if row["purpose"] == "train"]
    assert [row["seq"] for row in rows] == sorted(row["seq"] for row in rows)
    assert len(train) == STEPS * 2 * 4
    assert len(rows) == len(train) + 2 * 6
    assert {row["step"] for row in train} == set(range(1, STEPS + 1))
    assert {row["fate"] for row in rows} == {"trained", "probe"}
    assert all(row["step"] is None for row in rows if row["purpose"] == "probe")


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--domain", "sums"], lambda row: row["domain"] == "sums"),
        (["--purpose", "probe"], lambda row: row["purpose"] == "probe"),
        (["--success"], lambda row: row["success"]),
        (["--failed"], lambda row: not row["success"]),
        (["--side", "environment"], lambda row: row["side"] == "environment"),
        (["--kind", "assertion"], lambda row: row["kind"] == "assertion"),
        (["--version", "2"], lambda row: 2 in row["versions"]),
        (["--group", "7"], lambda row: row["group"] == 7),
        (["--step", "3"], lambda row: row["step"] == 3),
        (["--level", "1"], lambda row: row["level"] == 1),
        (["--min-score", "0.5"], lambda row: (row["score"] or 0) >= 0.5),
        (["--max-score", "0.5"], lambda row: row["score"] is not None and row["score"] <= 0.5),
        (["--failed", "--step", "3"], lambda row: row["step"] == 3 and not row["success"]),
    ],
)
def test_a_filter_lets_through_what_it_names_and_nothing_else(capsys, run_dir, options, wanted):
    everything = listed(capsys, run_dir)
    expected = [row for row in everything if wanted(row)]
    assert 0 < len(expected) < len(everything)
    assert listed(capsys, run_dir, *options) == expected


def test_the_newest_come_last_and_what_the_limit_leaves_out_is_said(capsys, run_dir):
    assert main(["trajectories", str(run_dir), "--limit", "3"]) == 0
    shown = capsys.readouterr()
    head, *lines = shown.out.splitlines()
    assert head.split()[:3] == ["sample", "domain", "level"]
    newest = [row["sample"] for row in listed(capsys, run_dir)][-3:]
    assert [line.split()[0] for line in lines] == newest
    assert "the newest 3 of 52; --limit 0 shows all" in shown.err


def test_a_transcript_shows_roles_versions_executions_checks_and_the_verdict(capsys, run_dir):
    # 8.2 has three pieces that the model sampled: its version changed in the first turn
    assert main(["trajectories", str(run_dir), "8.2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    own = [line for line in lines if line and line[0] not in "│┊"]
    assert [line.split(":")[0] for line in own] == [
        "sample 8.2", "prompt", "sampled", "sampled", "environment", "sampled", "turn 1", "turn 2",
        "execution for tool", "check adds", "verdict",
    ]  # fmt: skip
    assert "│ question 8" in lines
    assert "│ it printed 4" in lines
    (record,) = listed(capsys, run_dir, "8.2")
    pieces = record["segments"]
    assert [piece["version"] for piece in pieces] == [None, 0, 1, None, 1]
    assert pieces[1]["text"] + pieces[2]["text"] == HOSTILE
    assert pieces[0]["start"] == 0
    assert pieces[-1]["end"] == record["tokens"]
    assert all(a["end"] == b["start"] for a, b in pairwise(pieces))
    assert -1 < pieces[1]["logprob_min"] < pieces[1]["logprob_mean"] < 0


def test_no_text_moves_the_cursor_or_passes_for_a_line_of_headraces_own(capsys, run_dir):
    assert main(["trajectories", str(run_dir), "--show"]) == 0
    text = capsys.readouterr().out
    assert all(character.isprintable() or character == "\n" for character in text)
    lines = text.splitlines()
    assert "│ fine\\x1b[2J\\x1b[1;1H\\r\\x07\\u202e\\x9b31m" in lines
    assert not any(line.startswith("sampled: tokens 0-9") for line in lines)
    assert all(len(line) <= 100 for line in lines if line[:1] in {"│", "┊"})
    forged = [line for line in lines if "verdict: score 1.00, success    end" in line]
    assert forged
    assert all(line[0] == "┊" for line in forged), "the padding put it on a line of its own"


def test_show_prints_the_transcripts_that_the_filters_let_through(capsys, run_dir):
    wanted = listed(capsys, run_dir, "--side", "environment")
    assert main(["trajectories", str(run_dir), "--side", "environment", "--show"]) == 0
    text = capsys.readouterr().out
    assert text.count("failed: environment, sandbox_error, attempt 2 of actor a") == len(wanted)
    assert text.count("│ no jail") == len(wanted)
    assert len(listed(capsys, run_dir, "--side", "environment", "--show")) == len(wanted)


def test_without_a_tokenizer_token_ids_are_shown_and_it_is_said(capsys, run_dir, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run_dir, copy)
    settings = [f"model.path={copy / 'nowhere'}"]
    assert main(["trajectories", str(copy), "8.0", *settings]) == 0
    shown = capsys.readouterr()
    assert "no tokenizer.json in a checkpoint of" in shown.err
    assert "\n│ 80 84 68 82 83 72 78 77 220 23\n" in shown.out, "the ids of `question 8`"


def test_the_tokenizer_of_the_newest_checkpoint_comes_first(capsys, run_dir, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run_dir, copy)
    for version in (0, 4):
        shutil.copytree(copy / "model", copy / "checkpoints" / f"step-{version:06d}")
    (copy / "model/tokenizer.json").write_text("not looked at")
    (copy / "checkpoints/step-000000/tokenizer.json").write_text("not looked at")
    assert main(["trajectories", str(copy), "8.0"]) == 0
    assert "│ question 8" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"\xff{", b"{}", b'{"model": 3}'])
def test_a_tokenizer_that_cannot_be_loaded_is_named_and_token_ids_are_shown(
    capsys, run_dir, tmp_path, content
):
    broken = tmp_path / "tokenizer.json"
    broken.write_bytes(content)
    assert main(["trajectories", str(run_dir), "8.0", f"model.path={tmp_path}"]) == 0
    shown = capsys.readouterr()
    assert f"{broken} cannot be loaded (" in shown.err
    assert shown.err.count("\n") == 1
    assert "\n│ 80 84 68 82 83 72 78 77 220 23\n" in shown.out


def test_a_folder_that_is_no_run_is_named(capsys, tmp_path):
    assert "nowhere: neither a TOML file, nor an existing" in refused(capsys, "nowhere")
    assert "not a run folder (it holds no config.json)" in refused(capsys, str(tmp_path))


def test_a_sample_that_is_not_there_is_named_with_what_is(capsys, run_dir):
    folder = str(run_dir)
    assert "no such sample 99.0: its groups are 0 to 21" in refused(capsys, folder, "99.0")
    assert "the indices of group 8 are 0 to 3" in refused(capsys, folder, "8.4")
    assert "the filters exclude it" in refused(capsys, folder, "8.0", "--step", "5")


@pytest.mark.usefixtures("hurried")
def test_a_run_without_samples_says_so(capsys, tmp_path):
    # no broker answers here, as after the end of a run
    recorder = Recorder(tmp_path / "run", ("parity",), 1, lambda group, index: "")
    asyncio.run(recorder.begin())
    assert main(["trajectories", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "run t has no decided sample yet" in shown.err
    assert "no group was issued" in refused(capsys, str(tmp_path / "run"), "0.0")


def test_a_run_that_neither_its_folder_nor_a_broker_knows_is_refused(
    capsys, run_dir, tmp_path, request
):
    (tmp_path / "config.json").write_bytes((run_dir / "config.json").read_bytes())
    assert "has no run 't'" in refused(capsys, str(tmp_path))
    request.getfixturevalue("hurried")
    assert "no broker answers at" in refused(
        capsys, str(tmp_path), "broker.url=nats://127.0.0.1:9", code=1
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--min-score", "high"], "'high' must be a finite number"),
        (["--min-score", "nan"], "'nan' must be a finite number"),
        (["--max-score", "inf"], "'inf' must be a finite number"),
        (["--side", "jail"], "invalid choice: 'jail'"),
        (["--limit", "-1"], "must be 0 or more"),
        (["--limit", "few"], "'few' must be 0 or more, as a whole number"),
        (["--success", "--failed"], "not allowed with"),
    ],
)
def test_a_wrong_filter_is_refused(capsys, run_dir, options, said):
    with pytest.raises(SystemExit, match="2"):
        main(["trajectories", str(run_dir), *options])
    assert said in capsys.readouterr().err


def test_a_domain_that_the_run_does_not_have_is_refused_with_those_that_it_has(capsys, run_dir):
    line = refused(capsys, str(run_dir), "--domain", "partiy")
    assert "--domain 'partiy': the run t has parity, sums" in line


def test_a_filter_that_nothing_matches_says_which_classes_there_are(capsys, run_dir):
    assert main(["trajectories", str(run_dir), "--kind", "timeout"]) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "none of 52 samples of run t matches" in shown.err
    assert "classes of failure: assertion, sandbox_error" in shown.err


def test_a_record_that_does_not_decode_is_shown_as_a_failed_sample(capsys, run_dir, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run_dir, copy, ignore=shutil.ignore_patterns("archive"))
    rewritten = Archive(copy / "archive", "id")
    for entry in archive.read(run_dir / "archive"):
        broken = entry.subject.endswith(".sample.8.0")
        rewritten.add(type(entry)(entry.seq, entry.subject, b"junk") if broken else entry)
    asyncio.run(rewritten.flush())
    (row,) = listed(capsys, copy, "--kind", "corrupt_record")
    assert (row["sample"], row["side"], row["score"]) == ("8.0", "environment", None)


def test_tokens_that_no_vocabulary_has_are_shown_as_numbers(capsys, run_dir, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run_dir, copy, ignore=shutil.ignore_patterns("archive"))
    rewritten = Archive(copy / "archive", "id")
    for entry in archive.read(run_dir / "archive"):
        data = entry.data
        if entry.subject.endswith(".sample.8.0"):
            sample = decode(data, Trajectory, where="8.0")
            tokens = Array.of("int32", [-7, *sample.tokens.numpy().tolist()[1:]])
            data = encode(replace(sample, tokens=tokens))
        rewritten.add(type(entry)(entry.seq, entry.subject, data))
    asyncio.run(rewritten.flush())
    assert main(["trajectories", str(copy), "8.0"]) == 0
    assert "\n│ -7 84 68 82 83 72 78 77 220 23\n" in capsys.readouterr().out


@pytest.mark.nats
async def test_a_run_that_goes_on_is_read_from_its_broker(capsys, tmp_path):
    names = RunNames("t")
    recorder = Recorder(tmp_path / "run", ("parity",), 1, lambda group, index: "hello")
    async with (
        bundled_server(tmp_path / "run/broker") as server,
        connected(server.url, name="t", deadline_s=30) as connection,
    ):
        log = await RunLog.create(connection, names, max_bytes=64 << 20)
        task = TaskRef(domain="parity", level=0, split="train", index=0, hash="h")
        issued = Issued(ordinal=0, task=task, purpose="train", group_size=2, version=0, lineage=1,
                        deadline=1e12, seed=0, seen=0)  # fmt: skip
        await log.append(issued, after=0, message_id="issued-0")
        await log.decide(recorder.sample(0, 0, 0), limit=1 << 20, domain="parity")
        arguments = ["trajectories", str(tmp_path / "run"), f"broker.url={server.url}"]
        assert await asyncio.to_thread(main, [*arguments, "0.0"]) == 0
        assert "│ hello" in capsys.readouterr().out
        assert await asyncio.to_thread(main, [*arguments, "0.1"]) == 2
        assert "it is issued and not decided yet" in capsys.readouterr().err
