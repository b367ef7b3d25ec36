"""A run is named by files or a folder, and by settings, in any order."""

import pytest

from headrace.cli.runargs import resolve
from headrace.config import load, to_json
from headrace.errors import ConfigError


def a_file(tmp_path, text="[learner]\nsteps = 3\n"):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return str(path)


def a_run_folder(tmp_path, *settings):
    folder = tmp_path / "stored"
    folder.mkdir()
    config = load([], [f"run.dir={folder}", *settings])
    (folder / "config.json").write_bytes(to_json(config))
    return folder, config


def test_settings_win_wherever_they_stand(tmp_path):
    path = a_file(tmp_path)
    for items in (["learner.steps=5", path], [path, "learner.steps=5"]):
        assert resolve(items).learner.steps == 5


def test_a_run_folder_gives_the_configuration_that_it_holds(tmp_path):
    folder, config = a_run_folder(tmp_path, "learner.steps=6", "learner.loss.kind=grpo")
    assert resolve([str(folder)]) == config
    assert resolve([str(folder), "broker.url=nats://h:9"]).broker.url == "nats://h:9"


def test_a_run_folder_that_was_moved_is_used_where_it_is_and_keeps_its_name(tmp_path):
    folder, config = a_run_folder(tmp_path)
    moved = tmp_path / "moved"
    folder.rename(moved)
    resolved = resolve([str(moved)])
    assert resolved.run.dir == str(moved)
    assert resolved.run_name == config.run_name == "stored"


def test_a_run_folder_is_the_same_however_its_path_is_written(tmp_path, monkeypatch):
    _, config = a_run_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert resolve(["./stored/"]) == config


def test_a_run_folder_called_like_a_number_stays_a_path(tmp_path):
    folder, _ = a_run_folder(tmp_path)
    number = tmp_path / "2026"
    folder.rename(number)
    assert resolve([str(number)]).run.dir == str(number)


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("nonesuch.toml", "nonesuch.toml: cannot be read"),
        ("nonesuch", "neither a TOML file, nor an existing run folder, nor section.key=value"),
        ("run.sede=1", "did you mean 'run.seed'?"),
    ],
)
def test_what_names_no_run_is_refused(item, said):
    with pytest.raises(ConfigError) as caught:
        resolve([item])
    assert said in str(caught.value)


def test_a_folder_that_is_no_run_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        resolve([str(tmp_path)])


def test_a_run_folder_is_given_alone(tmp_path):
    folder, _ = a_run_folder(tmp_path)
    with pytest.raises(ConfigError, match="give it alone"):
        resolve([str(folder), a_file(tmp_path)])


def test_a_setting_longer_than_a_file_name_is_a_setting(tmp_path):
    name = 300 * "a"
    assert resolve([f"model.path={name}"]).model.path == name


def test_an_argument_longer_than_a_file_name_is_refused_like_any_other():
    with pytest.raises(ConfigError, match="neither a TOML file, nor an existing run folder"):
        resolve([300 * "a"])
