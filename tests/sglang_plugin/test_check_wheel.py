"""Wheels are judged by what they hold, without running any of it.

The wheels are of a made-up SGLang, with exactly what the plugin needs; one thing at a time is broken.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from specgov.sglang_plugin import check_wheel as checker
from specgov.sglang_plugin import versions
from specgov.sglang_plugin.check_wheel import check_wheel
from specgov.sglang_plugin.compatibility import KnownFunction, compatibility, parse_version, satisfies
from specgov.sglang_plugin.errors import PluginError
from specgov.sglang_plugin.wheel import Wheel

RELEASES = tuple(".".join(map(str, release)) for release in compatibility().releases)
SCHEDULER = "sglang.srt.managers.scheduler"
RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver"


def sources(release: str) -> dict[str, str]:
    """The sources of a wheel of ``release``, by module: each function with its listed signature."""
    version, known = parse_version(release), compatibility()
    tree: dict[str, dict[str, list[str]]] = {}
    for function in known.functions:
        if function.is_in(version):
            module, owner, name = _split(function.name)
            lines = tree.setdefault(module, {}).setdefault(owner, [])
            lines.append(f"def {name}({_bare(function.signature_in(version))}): ...")
    for kind in known.classes:
        if kind.is_in(version):
            module, _, name = kind.name.rpartition(".")
            lines = tree.setdefault(module, {}).setdefault(name, [])
            lines += [f"{attribute} = None" for attribute in kind.attributes]
    return {
        module: "\n".join(_block(owner, lines) for owner, lines in t.items()) for module, t in tree.items()
    }


def write_wheel(folder: Path, release: str, modules: dict[str, str], package: str = "sglang") -> Path:
    path = folder / f"{package}-{release}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        for module, source in modules.items():
            file.writestr(module.replace(".", "/") + ".py", source)
    return path


def _split(dotted: str) -> tuple[str, str, str]:
    """Module, class ("" for none) and name."""
    before, _, name = dotted.rpartition(".")
    module, _, owner = before.rpartition(".")
    return (module, owner, name) if owner[0].isupper() else (before, "", name)


def _bare(signature: str) -> str:
    return signature.replace("HookType.AFTER", "None")


def _block(owner: str, lines: list[str]) -> str:
    if not owner:
        return "\n".join(lines)
    return "\n    ".join([f"class {owner}:", *(lines or ["pass"])])


def failures(path: Path) -> list[str]:
    return [f"{check.name}: {check.found}" for check in check_wheel(path) if check.outcome == "FAILED"]


def test_the_file_covers_every_supported_release_and_every_hook() -> None:
    known = compatibility()
    assert known.releases == tuple((0, 5, patch) for patch in range(14, 24))
    assert (known.releases[0], known.releases[-1]) == (versions.OLDEST, versions.NEWEST)
    names = {function.name for function in known.functions}
    assert {
        target if target != versions.POLICY_CLASS else f"{target}.__init__" for target in versions.TARGETS
    } <= names
    for function in known.functions:
        assert all(satisfies(text, function) for text in function.signatures.values()), function.name
        assert min(function.signatures) == (function.since or versions.OLDEST)


@pytest.mark.parametrize("release", RELEASES)
def test_a_wheel_with_all_that_is_needed_passes(release: str, tmp_path: Path) -> None:
    assert failures(write_wheel(tmp_path, release, sources(release))) == []


def test_a_newer_release_is_judged_by_what_is_needed_and_says_what_changed(tmp_path: Path) -> None:
    modules = sources("0.5.23")
    modules[SCHEDULER] = modules[SCHEDULER].replace(
        "(self, batch, result)", "(self, batch, result, stream=None)"
    )
    checks = {check.name: check for check in check_wheel(write_wheel(tmp_path, "0.6.0", modules))}
    assert "not among those that were read" in checks["release"].found
    assert checks["Scheduler.process_batch_result"].outcome == "ok"
    assert "which was (self, batch, result); still" in checks["Scheduler.process_batch_result"].found


def test_what_moved_is_named_with_where_it_is_now(tmp_path: Path) -> None:
    modules = sources("0.5.23")
    modules["sglang.srt.managers.receiving"] = modules.pop(RECEIVER)
    (failure,) = failures(write_wheel(tmp_path, "0.6.0", modules))
    assert failure.startswith("SchedulerRequestReceiver._broadcast_reqs_across_ranks: ")
    assert failure.endswith("moved to sglang.srt.managers.receiving?")


def test_what_was_moved_and_is_imported_in_its_old_place_is_found(tmp_path: Path) -> None:
    modules = sources("0.5.23")
    modules["sglang.srt.managers.receiving"] = modules[RECEIVER]
    modules[RECEIVER] = "from ..receiving import SchedulerRequestReceiver"
    assert failures(write_wheel(tmp_path, "0.6.0", modules)) == []


@pytest.mark.parametrize(
    ("module", "old", "new", "named"),
    [
        (
            SCHEDULER,
            "(self, batch, result)",
            "(self, result, batch)",
            "Scheduler.process_batch_result: (self",
        ),
        (SCHEDULER, "waiting_queue = None", "queue = None", "Scheduler: lacks waiting_queue"),
        (
            "sglang.srt.speculative.adaptive_spec_params",
            "get_steps_for_batch(self, batch_size)",
            "get_steps_for_batch(self, batch_size, mode=None)",
            "AdaptiveSpeculativeParams.get_steps_for_batch: (self, batch_size, mode=None) is not",
        ),
        (
            "sglang.srt.speculative.adaptive_runtime_state",
            "candidate_steps = None",
            "candidate_steps = None\n    def reset(self): ...",
            "AdaptiveSpecPolicy: has reset too",
        ),
        (
            "sglang.srt.plugins.hook_registry",
            "*, source=None)",
            "*, source)",
            "HookRegistry.register: (cls, target, hook, hook_type=None, *, source) is not",
        ),
        ("sglang.srt.managers.io_struct", "PauseGenerationReqInput", "Pause", "PauseGenerationReqInput"),
    ],
)
def test_what_the_plugin_could_not_work_with_is_named(
    module: str, old: str, new: str, named: str, tmp_path: Path
) -> None:
    modules = sources("0.5.23")
    assert old in modules[module]
    modules[module] = modules[module].replace(old, new)
    (failure,) = failures(write_wheel(tmp_path, "0.6.0", modules))
    assert failure.startswith(named)


def test_attributes_are_found_in_methods_and_in_bases(tmp_path: Path) -> None:
    source = (
        "class Base:\n  a: int\nclass C(Base):\n  def f(self):\n    self.b, self.c.d, other.e = 1, 2, 3\n"
    )
    with Wheel(write_wheel(tmp_path, "1.0.0", {"sglang.m": source})) as wheel:
        assert wheel.attributes("sglang.m.C") == {"a", "b", "f"}
        assert wheel.attributes("sglang.m.None") is None


def test_a_release_without_tier_zero_fails(tmp_path: Path) -> None:
    (failure,) = failures(write_wheel(tmp_path, "0.5.13", sources("0.5.14")))
    assert failure.startswith("release: 0.5.13 cannot turn speculation off")


def test_the_release_with_a_launcher_of_its_own_is_the_doctors_affair(tmp_path: Path) -> None:
    (check,) = check_wheel(write_wheel(tmp_path, "0.5.9", sources("0.5.14")))
    assert check.outcome == "not checked"
    assert check.found.startswith("0.5.9 has no plugins: specgov sglang doctor checks the hooks")


def test_files_that_are_no_wheel_of_sglang(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PluginError, match=r"a wheel of vllm, not of SGLang"):
        check_wheel(write_wheel(tmp_path, "0.9.0", {}, package="vllm"))
    text = tmp_path / "sglang-0.5.23-py3-none-any.whl"
    text.write_text("no zip")
    assert checker.main([str(text)]) == 1
    assert "cannot be read as a wheel" in capsys.readouterr().err
    assert checker.main([]) == 2
    broken = write_wheel(tmp_path, "0.5.23", {SCHEDULER: "def"})
    assert checker.main([str(broken)]) == 1
    assert "scheduler.py cannot be read as Python" in capsys.readouterr().err


def test_the_program_prints_each_check_and_fails_where_one_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    modules = sources("0.5.23")
    assert checker.main([str(write_wheel(tmp_path, "0.5.23", modules))]) == 0
    assert capsys.readouterr().out.endswith("checks, 0 failed\n")
    del modules[RECEIVER]
    assert checker.main([str(write_wheel(tmp_path, "0.5.23", modules))]) == 1
    assert capsys.readouterr().out.endswith("checks, 1 failed\n")


@pytest.mark.parametrize(
    ("use", "signature", "expected"),
    [
        ("wrap", "a, b", True),
        ("wrap", "a, b, c", True),
        ("wrap", "b, a", False),
        ("wrap", "a", False),
        ("wrap", "*args, **kwargs", True),
        ("wrap", "a, *rest", True),
        ("wrap", "x, *rest", False),
        ("call", "a, b, c=(1, 2)", True),
        ("call", "a, b, c", False),
        ("call", "a, b, *, c=None", True),
        ("call", "a, b, *, c", False),
        ("implement", "a, b=None", True),
        ("implement", "a, b, c=None", False),
        ("implement", "a, b, **more", False),
    ],
)
def test_signatures_and_uses(use: str, signature: str, expected: bool) -> None:
    # By hand: what is wrapped may take more, what is called only optional ones, what is implemented none.
    function = KnownFunction("m.f", None, None, use, "", ("a", "b"))
    assert satisfies(signature, function) is expected
