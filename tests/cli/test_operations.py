"""docs/operations.md and what it installs: the commands exist, the files load, every alarm has its row."""

from __future__ import annotations

import configparser
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

from specgov.controller.cli.main import COMMANDS, parse
from specgov.controller.config import load_config

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "operations.md").read_text()
BY_NAME = {command.name: command for command in COMMANDS}


def commands() -> list[str]:
    """Every call of specgov's in the page: in blocks of shell, and in the text."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    lines = [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]
    inline = re.findall(r"`([^`\n]+)`", PAGE)
    found = [
        re.sub(r"^(sudo (-u \w+ )?)?(\S*/bin/)?specgov ", "specgov ", line) for line in (*lines, *inline)
    ]
    return sorted({line for line in found if line.startswith("specgov ")})


@pytest.mark.parametrize("line", commands())
def test_every_command_is_one(line: str) -> None:
    words = shlex.split(line)[1:]
    name = next((name for name in (" ".join(words[:2]), words[0]) if name in BY_NAME), None)
    assert name is not None, f"there is no command {line}"
    arguments = words[len(name.split()) :]
    if arguments or name == "top":
        parse(BY_NAME[name], [word.replace("$SPECGOV_TARGET", "unix:///s") for word in arguments])


def test_the_page_has_commands() -> None:
    assert {"specgov engines mode all shadow", "specgov config check /etc/specgov/specgov.toml"} <= set(
        commands()
    )


def test_the_configuration_starts_in_shadow() -> None:
    config = load_config(DOCS / "systemd" / "specgov.toml")
    assert (config.mode, config.listen) == ("shadow", "unix:///run/specgov/specgov.sock")
    assert config.socket_group == "specgov"
    room_mb = config.decision_log.max_mb * (config.decision_log.keep_files + 1)
    assert f"at most {room_mb / 1000:.1f} GB" in (DOCS / "systemd" / "specgov.toml").read_text()


@pytest.mark.parametrize("block", re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL))
def test_pieces_of_configuration_can_be_used(block: str, tmp_path: Path) -> None:
    file = tmp_path / "specgov.toml"
    file.write_text(block)
    load_config(file)
    assert tomllib.loads(block)


def test_the_service_runs_what_there_is_in_folders_that_it_has() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None, comment_prefixes=("#",))
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DOCS / "systemd" / "specgov.service")
    service = unit["Service"]
    for key in ("ExecStart", "ExecStartPre"):
        _, *words = shlex.split(service[key])
        name = next(name for name in (" ".join(words[:2]), words[0]) if name in BY_NAME)
        parse(BY_NAME[name], words[len(name.split()) :])
    config = load_config(DOCS / "systemd" / "specgov.toml")
    assert str(config.listen).removeprefix("unix://").startswith(f"/run/{service['RuntimeDirectory']}/")
    for kept in (config.state.dir, config.bundles.dir):
        assert str(kept).startswith(f"/var/lib/{service['StateDirectory']}/")
    assert str(config.decision_log.path).startswith(f"/var/log/{service['LogsDirectory']}/")


def test_every_alarm_is_explained() -> None:
    rules = yaml.safe_load((DOCS / "monitoring" / "alerts.yml").read_text())["groups"][0]["rules"]
    section = PAGE.partition("## Alarms")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| Specgov")]
    assert {row[0].strip() for row in rows} == {rule["alert"] for rule in rules}
    assert all(len(row) == 4 and all(cell.strip() for cell in row) for row in rows)


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", PAGE))))
def test_links_lead_somewhere(link: str) -> None:
    assert link.startswith("https://") or (DOCS / link).exists(), link
