"""What the doctor says, with a made-up SGLang; tests/sglang asks the real one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import grpc
import pytest

from specgov.controller.config import ServeConfig
from specgov.controller.server import Sidecar
from specgov.proto.v1 import specgov_pb2 as pb
from specgov.proto.v1 import specgov_pb2_grpc as pb_grpc
from specgov.sglang_plugin import doctor, engine_probe, versions
from specgov.sglang_plugin.compatibility import KnownFunction
from specgov.sglang_plugin.doctor import diagnose, main, split_arguments
from specgov.sglang_plugin.errors import PluginError
from specgov.sglang_plugin.report import Check, exit_code, print_checks


class EAGLEWorkerV2:
    pass


class MultiLayerEagleWorkerV2:
    pass


@dataclass
class Record:
    """SGLang's arguments; ``--NAME`` sets one to True, ``--NAME=VALUE`` to a value."""

    speculative_algorithm: Any = "EAGLE"
    speculative_adaptive: Any = True
    speculative_num_steps: Any = 3
    speculative_eagle_topk: Any = 1
    speculative_adaptive_config: Any = None
    enable_multi_layer_eagle: Any = False
    disaggregation_mode: Any = "null"
    refuses: str = ""

    def check_server_args(self) -> None:
        if self.refuses:
            raise ValueError(self.refuses)


def prepare_server_args(arguments: list[str]) -> Record:
    record = Record()
    for argument in arguments:
        name, equals, value = argument.removeprefix("--").partition("=")
        if name == "unknown":
            print("usage: ...\nsglang: error: unrecognized arguments: --unknown", file=sys.stderr)
            raise SystemExit(2)
        given = int(value) if value.isdigit() else value or None
        setattr(record, name.replace("-", "_"), given if equals else True)
    return record


class Algorithm:
    @classmethod
    def from_string(cls, name: str) -> Algorithm:
        return cls()

    def create_worker(self, record: Record) -> type:
        return MultiLayerEagleWorkerV2 if record.enable_multi_layer_eagle else EAGLEWorkerV2


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a made-up SGLang of a release in the place of the real one."""

    def put(release: str = "0.5.23") -> None:
        modules: dict[str, dict[str, Any]] = {
            "sglang": {},
            "sglang.srt": {},
            "sglang.srt.plugins": {"load_plugins": lambda: None},
            "sglang.srt.server_args": {"prepare_server_args": prepare_server_args, "ServerArgs": Record},
            "sglang.srt.speculative": {},
            "sglang.srt.speculative.spec_info": {"SpeculativeAlgorithm": Algorithm},
        }
        for name, contents in modules.items():
            module = ModuleType(name)
            vars(module).update(contents)
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(versions, "installed_version", lambda: release)
        monkeypatch.setattr(versions, "engine_tiers", _tiers)
        monkeypatch.setattr(versions, "adaptive_unsupported_reason", lambda record: None)
        monkeypatch.setattr(engine_probe, "hooks", lambda version: [Check.fine("hook", "")])
        monkeypatch.setattr(engine_probe, "registration", lambda environment: Check.fine("plugin", ""))

    return put


def _tiers(path: str | None) -> tuple[int, ...]:
    if path is not None:
        raise FileNotFoundError(2, "No such file or directory", path)
    return (0, 1, 3)


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[str]:
    class Controller(pb_grpc.SpeculationControllerServicer):
        def Decide(self, request: Any, context: Any) -> pb.Decision:  # noqa: N802
            return pb.Decision(num_steps=1)

    server = grpc.server(futures.ThreadPoolExecutor(1))
    pb_grpc.add_SpeculationControllerServicer_to_server(Controller(), server)
    target = f"unix://{tmp_path}/s"
    server.add_insecure_port(target)
    server.start()
    yield target
    server.stop(0).wait()


def run(target: str, *arguments: str, **environment: str) -> dict[str, Check]:
    checks = diagnose(arguments, {"SPECGOV_TARGET": target, **environment})
    assert len({check.name for check in checks}) == len(checks)
    return {check.name: check for check in checks}


def failed(checks: dict[str, Check]) -> list[str]:
    return [name for name, check in checks.items() if check.outcome == "FAILED"]


def test_a_server_that_will_be_governed(sglang: Any, sidecar: str) -> None:
    sglang()
    checks = run(sidecar)
    assert failed(checks) == []
    assert checks["worker"].found.startswith(f"EAGLEWorkerV2 ({__name__}), by --speculative-algorithm EAGLE;")
    assert checks["governed"].found == "adaptive is live: tiers 0, 1, 3, starting with 3"
    assert checks["sidecar"].found.endswith("answers at " + sidecar + " and speaks this protocol")


@pytest.mark.parametrize(
    ("arguments", "names", "said"),
    [
        (["--speculative-eagle-topk=4"], ["governed"], "--speculative-eagle-topk is 4"),
        (["--enable-multi-layer-eagle"], ["worker", "governed"], "--enable-multi-layer-eagle"),
        (["--refuses=no LoRA here", "--enable-lora"], ["arguments", "governed"], "LoRA"),
        (["--speculative-adaptive="], ["governed"], "add --speculative-adaptive"),
        (["--speculative-algorithm="], ["adaptive"], "does not speculate"),
        (["--speculative-adaptive-config=gone.json"], ["tiers"], "gone.json"),
        (["--unknown"], ["arguments"], "sglang: error: unrecognized arguments: --unknown"),
        (["--refuses=too few GPUs"], ["arguments"], "SGLang refuses them: too few GPUs"),
    ],
)
def test_each_mistake_is_named_with_a_remedy(
    arguments: list[str], names: list[str], said: str, sglang: Any, sidecar: str
) -> None:
    sglang()
    checks = run(sidecar, *arguments)
    assert failed(checks) == names
    assert said in " ".join(f"{checks[name].found} {checks[name].remedy}" for name in names)
    assert all(checks[name].remedy for name in names)


def test_initial_steps_count_where_a_buffer_is_sized_for_them(sglang: Any, sidecar: str) -> None:
    sglang("0.5.17")
    assert failed(run(sidecar)) == []
    checks = run(sidecar, "--speculative-num-steps=1")
    assert "start with the largest tier, 3" in checks["governed"].remedy
    sglang("0.5.19")
    assert failed(run(sidecar, "--speculative-num-steps=1")) == []


def test_tiers_that_the_server_does_not_prepare(sglang: Any, sidecar: str) -> None:
    sglang()
    checks = run(sidecar, SPECGOV_TIERS="0,5")
    assert failed(checks) == ["governed"]
    assert "SPECGOV_TIERS names 5" in checks["governed"].found


def test_a_prefill_worker_has_nothing_to_be_governed(sglang: Any, sidecar: str) -> None:
    sglang()
    checks = run(sidecar, "--disaggregation-mode=prefill")
    assert (failed(checks), checks["adaptive"].outcome) == ([], "not checked")


def test_simulated_acceptance_needs_real_tokens(sglang: Any, sidecar: str) -> None:
    sglang()
    assert failed(run(sidecar, SGLANG_SIMULATE_ACC_LEN="2")) == ["simulated acceptance"]
    real = {"SGLANG_SIMULATE_ACC_LEN": "2", "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token"}
    assert failed(run(sidecar, **real)) == []


def test_without_sglang_the_rest_is_still_checked(monkeypatch: pytest.MonkeyPatch, sidecar: str) -> None:
    def missing() -> str:
        raise PluginError("SGLang is not installed in this environment")

    monkeypatch.setattr(versions, "installed_version", missing)
    assert failed(run(sidecar)) == ["SGLang"]


def test_an_sglang_without_tier_zero(sglang: Any, sidecar: str) -> None:
    sglang("0.5.13")
    assert failed(run(sidecar)) == ["SGLang"]


def test_settings_that_leave_the_plugin_off(sglang: Any) -> None:
    sglang()
    checks = {check.name: check for check in diagnose([], {})}
    assert "SPECGOV_TARGET is not set" in checks["settings"].found
    assert checks["sidecar"].outcome == "not checked"
    assert "the mode is off" in diagnose([], {"SPECGOV_TARGET": "unix:///s", "SPECGOV_MODE": "off"})[0].found
    assert "SPECGOV_TIERS" in diagnose([], {"SPECGOV_TARGET": "unix:///s", "SPECGOV_TIERS": "x"})[0].found


def test_a_sidecar_that_is_not_there_or_speaks_otherwise(sglang: Any, tmp_path: Path) -> None:
    sglang()
    target = f"unix://{tmp_path}/t"
    check = run(target)["sidecar"]
    assert check.outcome == "FAILED"
    assert check.remedy == f"start one: specgov serve --listen {target}"
    other = grpc.server(futures.ThreadPoolExecutor(1))
    other.add_insecure_port(target)
    other.start()
    try:
        check = run(target)["sidecar"]
        assert "does not speak this protocol" in check.found
    finally:
        other.stop(0).wait()


def test_a_profile_that_the_sidecar_does_not_know(sglang: Any, tmp_path: Path) -> None:
    """Its engine would be refused at each attempt to connect."""
    sglang()
    real = Sidecar(ServeConfig(listen=f"unix://{tmp_path}/r"))
    real.start()
    try:
        check = run(real.target, SPECGOV_PROFILE="h100")["sidecar"]
        assert (check.outcome, check.remedy) == ("FAILED", "correct SPECGOV_PROFILE")
        assert "there is no profile 'h100'; there are h200-llama-3.1-8b, " in check.found
        for known in ("none", "h200-llama-3.1-8b"):
            assert run(real.target, SPECGOV_PROFILE=known)["sidecar"].outcome == "ok"
    finally:
        real.stop()


def test_the_plugin_must_be_installed_and_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = SimpleNamespace(value="specgov.sglang_plugin.plugin:load")
    monkeypatch.setattr(engine_probe.importlib.metadata, "entry_points", lambda group: [ours])
    assert engine_probe.registration({}).outcome == "ok"
    assert engine_probe.registration({"SGLANG_PLUGINS": "other, specgov"}).outcome == "ok"
    assert "leaves it out" in engine_probe.registration({"SGLANG_PLUGINS": "other"}).found
    monkeypatch.setattr(engine_probe.importlib.metadata, "entry_points", lambda group: [])
    assert engine_probe.registration({}).outcome == "FAILED"


def test_hooks_are_imported_and_their_signatures_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("made_up_sglang")
    source = "class S:\n  def f(self, batch: int, more=None): ...\n  @property\n  def tiers(self): ...\n"
    exec(source, vars(module))  # a class whose module can be imported
    monkeypatch.setitem(sys.modules, "made_up_sglang", module)

    def check(name: str, use: str, *needs: str) -> Check:
        known = KnownFunction(f"made_up_sglang.S.{name}", None, None, use, "a role", needs)
        return engine_probe._hook(known)

    assert check("f", "wrap", "self", "batch") == Check.fine("hook", "S.f(self, batch, more=None)")
    assert check("tiers", "implement", "self") == Check.fine("policy", "S.tiers(self)")
    assert "is not what the plugin needs: (self, result)" in check("f", "wrap", "self", "result").found
    assert "made_up_sglang.S.g is not there" in check("g", "wrap", "self").found


def test_the_program(sglang: Any, sidecar: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    sglang()
    monkeypatch.setattr(doctor.os, "environ", {})
    assert main(["--target", sidecar, "--", "--tp=2"]) == 0
    assert capsys.readouterr().out.endswith("checks, 0 failed\n")
    assert main(["--target", sidecar, "--", "--unknown"]) == 1
    assert main(["--tp=2"]) == 2
    assert "usage" in capsys.readouterr().err
    assert split_arguments(["--", "--", "x"], "") == (None, ["--", "x"])


def test_a_long_remedy_stays_in_its_column(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    checks = [Check.failed("a", "word " * 20, "do it"), Check.fine("name", "x")]
    assert print_checks(checks) == exit_code(checks) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("a     FAILED       word word")
    assert all(line.startswith(" " * 19 + "w") for line in lines[1:2])
    assert lines[-2] == "name  ok           x"


def test_an_exception_without_words_is_shown_by_its_line() -> None:
    with pytest.raises(AssertionError) as raised:
        exec(compile("assert numbers == []", "args.py", "exec"), {"numbers": [1]})  # no source to show
    assert engine_probe.in_short(raised.value) == "AssertionError in args.py, line 1"
    with pytest.raises(KeyError) as shown:
        raise KeyError
    text = engine_probe.in_short(shown.value)
    assert text.startswith("KeyError in test_doctor.py, line ")
    assert text.endswith(": raise KeyError")
    assert engine_probe.in_short(ValueError("two\nlines")) == "two lines"
    assert engine_probe.in_short(ValueError()) == "ValueError"
