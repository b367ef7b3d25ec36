"""The configuration refuses what it does not understand and says where and what instead."""

import re
from pathlib import Path

import msgspec
import pytest

from headrace import configlosses
from headrace.config import Config, difference, fingerprint, from_json, load, to_json
from headrace.configkeys import every_key, markdown
from headrace.errors import ConfigError


def toml(folder, name, text):
    path = folder / name
    path.write_text(text)
    return path


def refusal(files, overrides):
    with pytest.raises(ConfigError) as caught:
        load(files, overrides)
    return str(caught.value)


def test_without_layers_every_key_has_its_default():
    assert load([], []) == Config()


def test_later_files_win_and_overrides_win_over_files(tmp_path):
    first = toml(tmp_path, "a.toml", "[run]\nseed = 1\nname = 'a'\n[learner]\nsteps = 3\n")
    second = toml(tmp_path, "b.toml", "[run]\nseed = 2\n")
    resolved = load([first, second], ["learner.steps=5"])
    assert (resolved.run.seed, resolved.run.name, resolved.learner.steps) == (2, "a", 5)


def test_an_override_is_a_toml_value_or_else_a_plain_string():
    resolved = load(
        [], ["run.dir=/tmp/x", "learner.lr=1e-4", 'actors.pools=["a", "b"]', "run.name=7a"]
    )
    assert resolved.run.dir == "/tmp/x"
    assert resolved.learner.lr == 1e-4
    assert resolved.actors.pools == ["a", "b"]
    assert resolved.run.name == "7a"


def test_the_domains_of_a_later_file_replace_those_of_an_earlier_one(tmp_path):
    first = toml(tmp_path, "a.toml", "[[domains]]\nid = 'parity'\n[[domains]]\nid = 'x'\n")
    second = toml(tmp_path, "b.toml", "[[domains]]\nid = 'arithmetic'\n")
    assert [mix.id for mix in load([first, second], []).domains] == ["arithmetic"]


@pytest.mark.parametrize(
    ("argument", "unknown", "nearest"),
    [
        ("run.sed=1", "run.sed", "run.seed"),
        ("learnr.steps=1", "learnr", "learner"),
        ("learner.loss.capp=1.0", "learner.loss.capp", "learner.loss.cap"),
        ("actors.cuont=2", "actors.cuont", "actors.count"),
        ("staleness.max_version=2", "staleness.max_version", "staleness.max_versions"),
        ("steps=4", "steps", "learner.steps"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_right_one(argument, unknown, nearest):
    message = refusal([], [argument])
    assert f"unknown key {unknown!r}" in message
    assert f"did you mean {nearest!r}?" in message


def test_the_nearest_key_is_one_of_the_chosen_variant():
    message = refusal([], ["learner.loss.kind=grpo", "learner.loss.clip_hihg=0.3"])
    assert "did you mean 'learner.loss.clip_high'?" in message


def test_a_key_like_no_other_is_refused_without_a_guess():
    message = refusal([], ["zzzzqqqq=1"])
    assert "unknown key 'zzzzqqqq'" in message
    assert "did you mean" not in message


def test_an_error_names_the_file_it_came_from(tmp_path):
    good = toml(tmp_path, "good.toml", "[run]\nseed = 1\n")
    bad = toml(tmp_path, "bad.toml", "[run]\nsead = 1\n")
    assert refusal([good, bad], []).startswith(f"{bad}: unknown key 'run.sead'")


def test_an_unknown_key_in_a_list_of_tables_is_found(tmp_path):
    path = toml(tmp_path, "a.toml", "[[domains]]\nid = 'parity'\nwieght = 2.0\n")
    message = refusal([path], [])
    assert "wieght" in message
    assert "weight" in message.partition("did you mean")[2]


@pytest.mark.parametrize(
    ("argument", "place"),
    [
        ("learner.steps=many", "learner.steps"),
        ("learner.steps=1.5", "learner.steps"),
        ("learner.steps=true", "learner.steps"),
        ("learner.lr=fast", "learner.lr"),
        ("run.seed=[1]", "run.seed"),
        ("learner=3", "learner"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_its_place(argument, place):
    message = refusal([], [argument])
    assert message.startswith(f"argument {argument!r}: {place}: Expected ")


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("learner.steps=0", "learner.steps must be at least 1, got 0"),
        ("learner.group_size=1", "learner.group_size must be at least 2, got 1"),
        ("learner.lr=-1e-5", "learner.lr must be at least 0, got -1e-05"),
        ("learner.step_weight=1.5", "learner.step_weight must be from 0 to 1, got 1.5"),
        ("learner.lr=inf", "learner.lr must be finite and at least 0, got inf"),
        ("learner.lr=nan", "learner.lr must be finite and at least 0, got nan"),
        ("learner.weight_decay=-1.0", "learner.weight_decay must be at least 0, got -1.0"),
        ("learner.warmup_steps=-1", "learner.warmup_steps must be at least 0, got -1"),
        ("learner.clip_grad=0.0", "learner.clip_grad must be above 0, got 0.0"),
        ("learner.idle_s=0.0", "learner.idle_s must be above 0, got 0.0"),
        ("learner.betas=[0.9]", "learner.betas must be two numbers from 0 to below 1, got [0.9]"),
        ("learner.betas=[0.9, 1.0]", "from 0 to below 1, got [0.9, 1.0]"),
        ("learner.loss.cap=0.0", "learner.loss.cap must be above 0, got 0.0"),
        ("learner.advantage=group_sdt", "did you mean 'group_std'?"),
        ("staleness.max_versions=-1", "staleness.max_versions must be at least 0, got -1"),
        ("sampling.temperature=0.0", "sampling.temperature must be at least 0.01, got 0.0: the en"),
        ("sampling.temperature=nan", "must be finite and at least 0.01, got nan"),
        ("model.dtype=bfloat61", "did you mean 'bfloat16'?"),
        ("probes.tasks=-1", "probes.tasks must be at least 0, got -1"),
        ("weights.anchor_every=0", "weights.anchor_every must be at least 1, got 0"),
        ("weights.round_s=0.0", "weights.round_s must be above 0, got 0.0"),
        ("weights.bucket_bytes=4095", "weights.bucket_bytes must be at least 4096, got 4095"),
        (
            "broker.log_bytes=67108863",
            "broker.log_bytes must be at least 67108864, got 67108863",
        ),
        ("broker.connect_s=0.0", "broker.connect_s must be above 0, got 0.0"),
        ("actors.max_model_len=15", "actors.max_model_len must be at least 16, got 15"),
        ("actors.kv_cache_bytes=1", "actors.kv_cache_bytes must be at least 1048576, got 1"),
        ('actors.pools=["a b"]', "actors.pools must consist of a-z, 0-9, '-' and '_', got 'a b'"),
        ('actors.pools=["a", "a"]', "actors.pools names 'a' more than once"),
        ("actors.pools=[]", "actors.pools must name at least one pool"),
        ("attempts.max=0", "attempts.max must be at least 1, got 0"),
        ("attempts.slot_deadline_s=0.0", "attempts.slot_deadline_s must be above 0, got 0.0"),
        ("attempts.episode_s=-1.0", "attempts.episode_s must be above 0, got -1.0"),
        ("attempts.ack_wait_s=inf", "attempts.ack_wait_s must be finite and above 0, got inf"),
        ("domains=[{id='a', weight=0.0}]", "domains[0].weight must be above 0, got 0.0"),
        ("domains=[{id='a', level=-1}]", "domains[0].level must be at least 0, got -1"),
        ("domains=[{id='a'}, {id='b', pool='A.b'}]", "domains[1].pool must consist of a-z"),
        ("domains=[{id='a'}, {id='a'}]", "domains names 'a' more than once"),
    ],
)
def test_a_value_out_of_range_is_refused_and_repeated(argument, said):
    assert said in refusal([], [argument])


@pytest.mark.parametrize(
    "argument",
    [
        "sampling.temperature=0.01",
        "learner.lr=0.0",
        "probes.tasks=0",
        "weights.bucket_bytes=4096",
        "broker.log_bytes=67108864",
        "actors.max_model_len=16",
        "actors.kv_cache_bytes=1048576",
        "domains=[{id='a', pool='gpu_0-b'}, {id='b'}]",
    ],
)
def test_the_least_value_that_works_is_taken(argument):
    load([], [argument])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["kind=decoupled_ppo", "clip=0.0"], "learner.loss.clip must be above 0, got 0.0"),
        (["kind=grpo", "clip_low=-1.0"], "learner.loss.clip_low must be above 0, got -1.0"),
        (["kind=cispo", "clip_high=nan"], "loss.clip_high must be finite and above 0, got nan"),
        (["kind=icepop", "low=9.0"], "learner.loss.high must be above 9.0, got 5.0"),
    ],
)
def test_a_loss_refuses_a_parameter_that_makes_no_sense(settings, said):
    assert said in refusal([], [f"learner.loss.{item}" for item in settings])


def test_another_loss_replaces_the_table_and_the_same_loss_adds_to_it(tmp_path):
    first = toml(tmp_path, "a.toml", "[learner.loss]\nkind = 'truncated_is'\ncap = 3.0\n")
    assert load([first], ["learner.loss.kind=grpo"]).learner.loss == configlosses.GRPO()
    same = load([first], ["learner.loss.kind=truncated_is"]).learner.loss
    assert same == configlosses.TruncatedIS(cap=3.0)


def test_a_field_of_the_default_loss_is_set_without_naming_the_loss():
    assert load([], ["learner.loss.cap=3.0"]).learner.loss == configlosses.TruncatedIS(cap=3.0)


def test_an_unknown_loss_is_refused():
    assert "learner.loss" in refusal([], ["learner.loss.kind=gpro"])


def test_a_missing_file_and_a_file_that_is_not_toml_are_named(tmp_path):
    missing = tmp_path / "none.toml"
    assert refusal([missing], []) == f"{missing}: cannot be read: No such file or directory"
    broken = toml(tmp_path, "broken.toml", "[run\n")
    assert refusal([broken], []).startswith(f"{broken}: not TOML: ")


HUGE = {
    "digits": "9" * 5000,
    "hexadecimal digits": "0x" + "f" * 5000,
    "open brackets": "[" * 5000,
    "brackets": "[" * 5000 + "]" * 5000,
}


@pytest.mark.parametrize("value", HUGE.values(), ids=HUGE)
def test_a_value_beyond_what_can_be_read_is_refused_in_a_short_line(value, tmp_path):
    said = refusal([], [f"learner.steps={value}"])
    assert said.startswith("argument 'learner.steps=")
    assert len(said) < 400
    path = toml(tmp_path, "huge.toml", f"[learner]\nsteps = {value}\n")
    said = refusal([path], [])
    assert said.startswith(f"{path}: ")
    assert len(said) < 400


def test_a_stored_configuration_beyond_what_can_be_read_is_refused(tmp_path):
    broken = toml(tmp_path, "broken.json", '{"run": ')
    assert refusal([broken], []).startswith(f"{broken}: not JSON: ")
    path = toml(tmp_path, "config.json", '{"run": ' + "[" * 100_000)
    assert refusal([path], []).startswith(f"{path}: not JSON: ")
    with pytest.raises(ConfigError, match="there: not a resolved configuration"):
        from_json(path.read_bytes(), where="there")


def test_an_override_without_a_value_is_refused():
    assert "section.key=value" in refusal([], ["learner.steps"])


def test_the_resolved_configuration_reads_back_the_same_and_holds_every_default():
    resolved = load([], ["learner.loss.kind=decoupled_ppo", "run.seed=9"])
    data = to_json(resolved)
    assert from_json(data, where="config.json") == resolved
    assert msgspec.json.decode(data)["learner"]["token_budget"] == resolved.learner.token_budget


def test_a_resolved_configuration_that_is_not_one_is_refused_with_its_place():
    with pytest.raises(ConfigError, match=r"^there: "):
        from_json(b"{", where="there")
    with pytest.raises(ConfigError, match=r"unknown key 'run\.sede'"):
        from_json(b'{"run": {"sede": 1}}', where="there")


def test_the_difference_names_exactly_the_values_that_differ():
    old = load([], ["learner.steps=4", "run.seed=1"])
    new = load([], ["learner.steps=5", "run.seed=1", "learner.loss.cap=3.0"])
    assert difference(old, new) == ["learner.loss.cap: 2.0 -> 3.0", "learner.steps: 4 -> 5"]
    assert difference(old, old) == []


def test_the_difference_shows_keys_of_another_loss_as_absent():
    lines = difference(Config(), load([], ["learner.loss.kind=grpo"]))
    assert "learner.loss.cap: 2.0 -> '(absent)'" in lines
    assert "learner.loss.kind: 'truncated_is' -> 'grpo'" in lines


@pytest.mark.parametrize(
    "argument",
    [
        "run.dir=/elsewhere", "run.name=other", "broker.url=nats://h:1", "actors.count=9",
        "learner.max_filtered=999", "learner.idle_s=9",
    ],
)  # fmt: skip
def test_what_may_differ_between_the_processes_of_a_run_leaves_the_fingerprint(argument):
    other = load([], [argument])
    assert fingerprint(other) == fingerprint(Config())
    assert difference(Config(), other) == []


@pytest.mark.parametrize(
    "argument",
    ["run.seed=5", "learner.lr=1e-4", "staleness.max_versions=0", "learner.loss.kind=grpo"],
)
def test_what_decides_what_is_trained_changes_the_fingerprint(argument):
    assert fingerprint(load([], [argument])) != fingerprint(Config())


def test_a_run_is_named_after_its_folder_unless_it_is_given_a_name():
    assert load([], ["run.dir=runs/First"]).run_name == "first"
    assert load([], ["run.dir=runs/First", "run.name=x"]).run_name == "x"


def test_every_key_has_a_meaning_and_a_default_that_the_loader_takes():
    keys = every_key()
    assert all(key.meaning for key in keys), [key.name for key in keys if not key.meaning]
    names = [key.name for key in keys]
    issue_keys = {"run.dir", "run.seed", "actors.count", "learner.steps", "learner.batch_groups"}
    assert issue_keys | {"staleness.max_versions", "model.path", "broker.url"} <= set(names)
    for key in keys:
        if key.default and not re.search(r"\[\]|loss\.", key.name):
            assert load([], [f"{key.name}={key.default}"]) == Config(), key


def test_the_page_of_keys_is_as_the_sources_have_them():
    page = Path(__file__).resolve().parents[2] / "docs/configuration.md"
    assert page.read_text() == markdown(), (
        f"{page.name} is stale: headrace config keys --markdown > docs/configuration.md"
    )


def test_the_page_has_a_row_for_every_key_with_bars_escaped():
    rows = [line for line in markdown().splitlines() if line.startswith("| `")]
    cells = [re.split(r"(?<!\\\\) \| ", row.strip("| ")) for row in rows]
    assert [row[0].strip("`") for row in cells] == [key.name for key in every_key()]
    assert all(row[-1] for row in cells)


def test_where_metrics_go_may_differ_between_the_processes_of_a_run():
    other = load([], ["monitor.prometheus_port=9000", "monitor.wandb_project=p"])
    assert fingerprint(other) == fingerprint(Config())
    assert difference(Config(), other) == []


@pytest.mark.parametrize(
    ("argument", "named"),
    [
        ("monitor.prometheus_port=70000", "prometheus_port must be from 0 to 65535, got 70000"),
        ("monitor.wandb_mode=ofline", "did you mean 'offline'?"),
        ("monitor.wandb=x", "unknown key 'monitor.wandb'"),
    ],
)
def test_a_wrong_monitor_key_is_named(argument, named):
    with pytest.raises(ConfigError, match=re.escape(named)):
        load([], [argument])
