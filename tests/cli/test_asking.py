"""decide, engines and config check against a sidecar that answers what the test says."""

from __future__ import annotations

import errno
import json
import socket
from pathlib import Path

import grpc
import pytest

from specgov.controller.cli.remote import grpc_target, plain
from specgov.proto.v1 import specgov_pb2 as pb
from specgov.proto.v1 import specgov_pb2_grpc as pb_grpc

DECISION = pb.Decision(
    num_steps=3,
    batch_size_min=1,
    batch_size_max=31,
    neighbours=[pb.TierRange(batch_size_min=32, batch_size_max=256, num_steps=0)],
    policy="greedy",
    policy_version="1",
    reason=pb.REASON_POLICY,
    # 8 tokens in 4 ms are 2000 tokens/s; 20 in 8 ms are 2500.
    estimates=[
        pb.TierEstimate(num_steps=0, expected_tokens=8, expected_ms=4),
        pb.TierEstimate(num_steps=3, expected_tokens=20, expected_ms=8),
    ],
)
ENGINE = pb.EngineState(
    info=pb.EngineInfo(engine_id="e1", engine="emulated", model="m", tiers=[0, 3]),
    connected=True,
    mode=pb.MODE_ACTIVE,
    policy="static:3",
    reports=12,
    tier_switches=2,
    policy_failure="ArithmeticError: of the rule",
    last_step=pb.StepSummary(engine_id="e1", step_id=12, batch_size=5, num_steps=3, accept_length=2.5),
)


class Sidecar(pb_grpc.SpeculationControllerServicer, pb_grpc.ControllerAdminServicer):
    """Keeps what it was asked; aborts with ``failure`` where one is given."""

    def __init__(self, failure: tuple[grpc.StatusCode, str] | None = None) -> None:
        self.failure = failure
        self.asked: list[object] = []

    def note(self, request: object, context: grpc.ServicerContext) -> None:
        self.asked.append(request)
        if self.failure is not None:
            context.abort(*self.failure)

    def Decide(self, request, context):  # noqa: N802
        self.note(request, context)
        return DECISION

    def ListEngines(self, request, context):  # noqa: N802
        self.note(request, context)
        return pb.ListEnginesResponse(engines=[ENGINE])

    def GetEngine(self, request, context):  # noqa: N802
        self.note(request, context)
        return pb.GetEngineResponse(engine=ENGINE, last_decisions=[DECISION], estimates={"lambda": 0.25})

    def SetMode(self, request, context):  # noqa: N802
        self.note(request, context)
        return pb.SetModeResponse(engine=pb.EngineState(mode=request.mode))

    def SetPolicy(self, request, context):  # noqa: N802
        self.note(request, context)
        return pb.SetPolicyResponse(engine=pb.EngineState(policy="static", policy_text=request.policy))

    def Watch(self, request, context):  # noqa: N802
        self.note(request, context)
        for step in range(1, 100):
            yield pb.StepSummary(engine_id="e1", step_id=step, num_steps=3, step_ms=4.0)


def test_decide_prints_the_decision_and_a_table_of_tiers(run, serve) -> None:
    ran = run("decide", "--batch-size", "8", "--acceptance", "0.8,0.7", "--target", serve(Sidecar()))
    assert (ran.code, ran.err) == (0, "")
    assert "num_steps 3, by greedy 1" in ran.out
    assert "batch size 32 to 256: num_steps 0" in ran.out
    rows = [line.split() for line in ran.out.splitlines() if line.strip()[:1].isdigit()]
    assert rows == [
        ["0", "8.0", "4.00", "2000", "80.0", "%"],
        ["3", "*", "20.0", "8.00", "2500", "100.0", "%"],
    ]


def test_decide_in_json(run, serve) -> None:
    ran = run("decide", "--batch-size", "8", "--acceptance", "0.8", "--json", "--target", serve(Sidecar()))
    answer = json.loads(ran.out)
    assert (answer["num_steps"], answer["reason"]) == (3, "policy")
    assert [estimate["output_tokens_per_s"] for estimate in answer["estimates"]] == [2000, 2500]
    assert "propensity" not in answer  # absent means unknown


def test_decide_sends_what_was_asked(run, serve) -> None:
    sidecar = Sidecar()
    target = serve(sidecar)
    options = ("--context", "100,200", "--tiers", "0,3", "--profile", "p", "--policy", "static:3")
    run("decide", "--batch-size", "2", "--acceptance", "0.8,0.7", *options, "--target", target)
    run("decide", "--batch-size", "2", "--accept-length", "2.4", "--at-num-steps", "3", "--target", target)
    assert sidecar.asked == [
        pb.DecideRequest(
            batch_size=2,
            seq_len_tokens=[100, 200],
            tiers=[0, 3],
            profile="p",
            policy="static:3",
            by_position=pb.AcceptanceByPosition(probability=[0.8, 0.7]),
        ),
        pb.DecideRequest(
            batch_size=2,
            seq_len_tokens=[512],
            accept_length_at=pb.AcceptLengthAt(accept_length=2.4, num_steps=3),
        ),
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "either --acceptance or --accept-length"),
        (("--accept-length", "2"), "go together"),
        (("--acceptance", "0.5", "--accept-length", "2", "--at-num-steps", "3"), "either"),
        (("--acceptance", "0.5,x"), "--acceptance takes numbers"),
        (("--acceptance", "0.5", "--context", "12.5"), "--context takes whole numbers"),
        (("--acceptance", "0.5", "--tiers", "0,-1"), "must not be negative"),
        (("--acceptance", "0.5", "--context", str(2**64)), "--context must be at most 4294967295"),
        (("--acceptance", "0.5", "--tiers", str(2**32)), "--tiers must be at most 4294967295"),
        (("--batch-size", str(2**32), "--acceptance", "0.5"), "--batch-size must be at most 4294967295"),
        (("--accept-length", "2", "--at-num-steps", str(2**32)), "--at-num-steps must be at most"),
        (("--acceptance", "0.5", "--target", "nowhere"), "--target"),
    ],
)
def test_a_wrong_question_is_exit_code_2(run, options: tuple[str, ...], said: str) -> None:
    ran = run("decide", "--batch-size", "3", *options)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, 2),
        (grpc.StatusCode.NOT_FOUND, 1),
        (grpc.StatusCode.INTERNAL, 1),
        (grpc.StatusCode.UNAVAILABLE, 3),
    ],
)
def test_what_the_sidecar_refuses_is_one_line(run, serve, status: grpc.StatusCode, code: int) -> None:
    target = serve(Sidecar((status, "that is\nwrong")))
    ran = run("decide", "--batch-size", "3", "--acceptance", "0.5", "--target", target)
    assert ran.code == code
    assert ran.err.count("\n") == 1
    assert ("that is wrong" in ran.err) == (code != 3)


def test_nobody_there_is_exit_code_3_with_a_hint(run, tmp_path: Path) -> None:
    ran = run("engines", "--target", f"{tmp_path}/specgov.sock")
    assert ran.code == 3
    assert "specgov serve" in ran.err


def test_no_permission_is_not_nobody_there(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect_ex", lambda _self, _path: errno.EACCES)
    ran = run("engines", "--target", f"{tmp_path}/specgov.sock")
    assert (ran.code, ran.err.count("\n")) == (3, 1)
    assert f"no permission to open unix://{tmp_path}/specgov.sock" in ran.err
    assert "usermod" in ran.err
    assert "specgov serve" not in ran.err


def test_a_server_of_another_kind_is_named_so(run, serve) -> None:
    ran = run("engines", "--target", serve(pb_grpc.SpeculationControllerServicer()))
    assert ran.code == 1
    assert "no Specgov sidecar" in ran.err


def test_engines(run, serve) -> None:
    target = serve(Sidecar())
    ran = run("engines", "--target", target)
    row = next(line.split() for line in ran.out.splitlines() if "e1" in line)
    assert row == ["e1", "m", "yes", "active", "static:3", "3", "5", "12", "2"]
    (engine,) = json.loads(run("engines", "list", "--json", "--target", target).out)
    assert engine["info"]["engine_id"] == "e1"
    assert engine["mode"] == "active"


def test_engines_show(run, serve) -> None:
    target = serve(Sidecar())
    ran = run("engines", "show", "e1", "--target", target)
    failure = "ArithmeticError: of the rule"
    for said in ("e1 (emulated)", "lambda", "0.25", "1..31", "tier switches 2", failure):
        assert said in ran.out
    assert "in shadow" not in ran.out
    assert json.loads(run("engines", "show", "e1", "--json", "--target", target).out)["estimates"] == {
        "lambda": 0.25
    }


def test_engines_show_says_that_nothing_runs_what_is_decided_in_shadow(run, serve) -> None:
    class Shadow(Sidecar):
        def GetEngine(self, request, context):  # noqa: N802
            answer = super().GetEngine(request, context)
            answer.engine.mode = pb.MODE_SHADOW
            return answer

    ran = run("engines", "show", "e1", "--target", serve(Shadow()))
    assert "tier switches 2 (in shadow nothing runs them: " in ran.out


def test_engines_mode_and_policy(run, serve) -> None:
    sidecar = Sidecar()
    target = serve(sidecar)
    assert run("engines", "mode", "e1", "shadow", "--target", target).out == "e1: mode shadow\n"
    assert run("engines", "policy", "e1", "static:3", "--target", target).out == "e1: policy static:3\n"
    assert sidecar.asked == [
        pb.SetModeRequest(engine_id="e1", mode=pb.MODE_SHADOW),
        pb.SetPolicyRequest(engine_id="e1", policy="static:3"),
    ]


def test_the_environment_names_the_sidecar_where_no_option_does(run, serve, tmp_path, monkeypatch) -> None:
    sidecar = Sidecar()
    target = serve(sidecar)
    monkeypatch.setenv("SPECGOV_TARGET", target)
    assert run("engines", "mode", "e1", "shadow").out == "e1: mode shadow\n"
    assert run("engines", "list", "--target", f"unix://{tmp_path}/none.sock").code == 3
    monkeypatch.setenv("SPECGOV_TARGET", " ")  # as good as not set
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert f"unix://{tmp_path}/specgov/specgov.sock" in run("engines", "list").err
    monkeypatch.setenv("SPECGOV_TARGET", "nonsense")
    ran = run("engines", "list")
    assert (ran.code, "--target (or SPECGOV_TARGET) nonsense" in ran.err) == (2, True)


def test_engines_mode_of_all(run, serve) -> None:
    sidecar = Sidecar()
    ran = run("engines", "mode", "all", "shadow", "--target", serve(sidecar))
    assert ran.out == "e1: mode shadow\n"
    assert sidecar.asked == [
        pb.ListEnginesRequest(),
        pb.SetModeRequest(engine_id="e1", mode=pb.MODE_SHADOW),
    ]


class SomeRefuse(Sidecar):
    """Three engines, of which the second's mode cannot be set."""

    def ListEngines(self, request, context):  # noqa: N802
        engines = [pb.EngineState(info=pb.EngineInfo(engine_id=name)) for name in ("e1", "e2", "e3")]
        return pb.ListEnginesResponse(engines=engines)

    def SetMode(self, request, context):  # noqa: N802
        if request.engine_id == "e2":
            context.abort(grpc.StatusCode.NOT_FOUND, "there is no engine 'e2'")
        return super().SetMode(request, context)


def test_an_engine_whose_mode_cannot_be_set_keeps_none_of_the_others_from_theirs(run, serve) -> None:
    ran = run("engines", "mode", "all", "shadow", "--target", serve(SomeRefuse()))
    assert ran.out.splitlines() == [
        "e1: mode shadow",
        "e2: mode not set: there is no engine 'e2'",
        "e3: mode shadow",
    ]
    assert (ran.code, "there is no engine 'e2' (NOT_FOUND)" in ran.err) == (1, True)


def test_a_mode_for_all_where_no_engine_is_known_is_no_success(run, serve, monkeypatch) -> None:
    """An operator who means to switch all off must not take it for done: one that comes may be active."""
    monkeypatch.setattr(Sidecar, "ListEngines", lambda *_: pb.ListEnginesResponse())
    sidecar = Sidecar()
    ran = run("engines", "mode", "all", "shadow", "--target", serve(sidecar))
    assert (ran.code, ran.out, sidecar.asked) == (1, "", [])
    assert "no engine has connected since the sidecar's start, so no mode was set" in ran.err


def test_engines_watch_ends_after_the_lines_that_were_asked_for(run, serve) -> None:
    sidecar = Sidecar()
    target = serve(sidecar)
    ran = run("engines", "watch", "e1", "--every-steps", "10", "--count", "2", "--json", "--target", target)
    assert [json.loads(line)["step_id"] for line in ran.out.splitlines()] == [1, 2]
    assert "step        1" in run("engines", "watch", "--count", "1", "--target", target).out
    assert sidecar.asked[0] == pb.WatchRequest(engine_id="e1", every_steps=10)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--every-steps", "-1", "--every-steps must not be negative"),
        ("--every-steps", str(2**32), "--every-steps must be at most 4294967295"),
        ("--count", "-1", "--count must not be negative"),
    ],
)
def test_engines_watch_refuses_what_cannot_be(run, option: str, value: str, said: str) -> None:
    ran = run("engines", "watch", option, value)
    assert (ran.code, said in ran.err) == (2, True), ran.err


def test_targets() -> None:
    assert grpc_target("/run/s.sock") == grpc_target("unix:///run/s.sock") == "unix:///run/s.sock"
    assert grpc_target("localhost:5000") == "localhost:5000"


def test_messages_as_plain_values() -> None:
    report = pb.StepReport(step_id=2**60, accepted_drafts=b"\x01\x03", cuda_graph_ran=False)
    values = plain(report)
    assert values["step_id"] == 2**60
    assert values["accepted_drafts"] == [1, 3]
    assert values["cuda_graph_ran"] is False
    assert "kv_use_ratio" not in values


def test_config_check(run, tmp_path: Path) -> None:
    file = tmp_path / "specgov.toml"
    file.write_text('policy = "static"\n')
    assert run("config", "check", str(file)).code == 0
    file.write_text('\npolcy = "static"\n')
    ran = run("config", "check", str(file))
    assert ran.code == 1
    assert "line 2" in ran.err
    assert "polcy" in ran.err
    assert run("config", "check", str(tmp_path / "none")).code == 1
