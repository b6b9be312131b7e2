"""``specgov.toml``: defaults, values, overrides, and errors that name file, line and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from specgov.controller.config import ConfigError, ServeConfig, line_of_key, load_config

GOOD = """\
# A comment with a key: policy = 3
policy = "threshold:32:3"
listen = "unix:///run/specgov.sock"
max_streams = 4
log.level = "debug"

[decision_log]
path = "/var/log/decisions.jsonl"   # = path
max_mb = 10
"""


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "specgov.toml"
    path.write_text(text)
    return path


def test_defaults() -> None:
    config = load_config(None)
    assert config == ServeConfig()
    assert (config.ttl_steps, config.ttl_ms, config.decision_log.path) == (50, 1000, None)


def test_values(tmp_path: Path) -> None:
    config = load_config(_file(tmp_path, GOOD))
    assert (config.policy, config.listen, config.max_streams) == (
        "threshold:32:3",
        "unix:///run/specgov.sock",
        4,
    )
    assert (config.log.level, config.log.format) == ("debug", "auto")
    assert (config.decision_log.path, config.decision_log.max_mb) == ("/var/log/decisions.jsonl", 10.0)


def test_options_override_the_file(tmp_path: Path) -> None:
    config = load_config(
        _file(tmp_path, GOOD),
        {"policy": "static:3", "max_streams": None, "log.level": "error", "decision_log.flush_s": 2.0},
    )
    assert (config.policy, config.max_streams) == ("static:3", 4)
    assert (config.log.level, config.decision_log.max_mb, config.decision_log.flush_s) == ("error", 10.0, 2.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("\npolicies = 3\n", "line 2: policies: unknown key: there are listen, socket_group, "),
        (
            "[decision_log]\npath = 'x'\nmax_gb = 1\n",
            "line 3: decision_log.max_gb: unknown key: there are path, ",
        ),
        ("mood = 'shadow'\n", "; did you mean mode?"),
        ("[stat]\ndir = 'x'\n", "; did you mean state?"),
        ("[decision_log]\nmode = 'active'\n", "; mode belongs above the first [table] of the file"),
        ("[decision-log]\npath = 'x'\n", "line 1: decision-log: unknown key"),
        ("decision_log.max_gb = 1\n", "line 1: decision_log.max_gb: unknown key"),
        ("'max_streams' = '4'\n", "line 1: max_streams: Input should be a valid integer, not '4'"),
        ("max_streams = 1.5\n", "line 1: max_streams: Input should be a valid integer"),
        ("max_streams = true\n", "line 1: max_streams: Input should be a valid integer"),
        ("insecure = 1\n", "line 1: insecure: Input should be a valid boolean, not 1"),
        (
            "max_streams = 0\n",
            "line 1: max_streams: Input should be greater than or equal to 1, not 0",
        ),
        ("decision_log = 'file'\n", "line 1: decision_log: Input should be"),
        ("mode = 'on'\n", "line 1: mode: Input should be 'active', 'shadow', 'frozen' or 'off', not 'on'"),
        ("policy = 'best'\n", "line 1: policy: unknown policy 'best'"),
        ("policy = 'static:x'\n", "line 1: policy: policy 'static:x': num_steps must be a whole number"),
        ("profile = 'b200'\n", "line 1: profile: there is no bundled profile 'b200'"),
        ("listen = 'nowhere'\n", "line 1: listen: nowhere: expected HOST:PORT"),
        ("metrics = 'unix:///a'\n", "line 1: metrics: unix:///a: expected HOST:PORT"),
        ("decision_log.max_mb = nan\n", "line 1: decision_log.max_mb: Input should be"),
        ("a = \n", "not TOML: Invalid value (at line 1"),
        ("seed = 1\nseed = 2\n", "not TOML: Cannot overwrite a value (at line 2"),
    ],
)
def test_errors_name_file_line_and_key(tmp_path: Path, text: str, says: str) -> None:
    path = _file(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    assert str(raised.value).startswith(str(path))
    assert says in str(raised.value)


def test_all_errors_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(_file(tmp_path, "seed = 'x'\n[log]\nlevel = 'loud'\ncolour = 1\n"))
    lines = str(raised.value).splitlines()
    assert [line.split(": ")[1] for line in lines] == ["seed", "log.level", "log.colour"]
    assert [line.split(": ")[0].rsplit(" ")[-1] for line in lines] == ["1", "3", "4"]


def test_wrong_option_is_named_as_an_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^option --max-streams: Input should be greater.*not 0$"):
        load_config(_file(tmp_path, GOOD), {"max_streams": 0})


def test_option_inside_what_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line 1: log: Input should be"):
        load_config(_file(tmp_path, "log = 3\n"), {"log.level": "info"})


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml: No such file or directory"):
        load_config(tmp_path / "missing.toml")
    (tmp_path / "specgov.toml").write_bytes(b"policy = '\xff'")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load_config(tmp_path / "specgov.toml")


def test_line_of_key() -> None:
    text = 'a = 1\n[t]\nb = 2\n[t."u v"]\n c . d = 3\n'
    assert line_of_key(text, ["a"]) == 1
    assert line_of_key(text, ["t"]) == 2
    assert line_of_key(text, ["t", "b"]) == 3
    assert line_of_key(text, ["t", "u v", "c", "d"]) == 5
    assert line_of_key(text, ["t", "u v", "x"]) == 4  # the table stands for a key that is missing
    assert line_of_key(text, ["nowhere"]) is None
