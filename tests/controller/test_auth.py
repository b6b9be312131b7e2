"""Tokens of the admin service, and engines and operators at addresses of their own."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from specgov.controller.auth import REFUSAL, TokenError, TokenGate, read_tokens
from specgov.controller.config import ServeConfig
from specgov.controller.listen import ListenError
from specgov.proto.v1 import specgov_pb2 as pb
from specgov.proto.v1 import specgov_pb2_grpc as pb_grpc

Make = Callable[..., Any]
TOKEN = "0123456789abcdef"
OTHER = "fedcba9876543210"
ADMIN_CALLS = {
    "ListEngines": pb.ListEnginesRequest(),
    "GetEngine": pb.GetEngineRequest(engine_id="engine-1"),
    "SetMode": pb.SetModeRequest(engine_id="engine-1", mode=pb.MODE_OFF),
    "SetPolicy": pb.SetPolicyRequest(engine_id="engine-1", policy="static:3"),
}


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.touch(mode=0o600)
    path.write_text(f"{TOKEN}\n\n{OTHER}\n")
    return path


def refusal(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    return raised.value.code(), raised.value.details()


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def test_every_admin_method_wants_a_token(start: Make, tokens: Path) -> None:
    """Read from the protocol, so that a method that is added later is tried too."""
    sidecar = start(admin_token_file=str(tokens))
    methods = pb.DESCRIPTOR.services_by_name["ControllerAdmin"].methods
    assert len(methods) >= len(ADMIN_CALLS)
    for method in methods:
        call = sidecar.channel.unary_stream(f"/specgov.v1.ControllerAdmin/{method.name}")
        status = refusal(lambda call=call: list(call(b"", timeout=60)))
        assert status == (grpc.StatusCode.UNAUTHENTICATED, REFUSAL), method.name
    assert sidecar.metric("specgov_admin_calls_refused_total") == len(methods)


@pytest.mark.parametrize("token", [TOKEN, OTHER])
def test_any_token_of_the_file_opens(start: Make, tokens: Path, token: str) -> None:
    sidecar = start(admin_token_file=str(tokens))
    sidecar.stream()
    for name, request in ADMIN_CALLS.items():
        getattr(sidecar.admin, name)(request, timeout=60, metadata=bearer(token))


@pytest.mark.parametrize(
    "metadata",
    [
        (("authorization", TOKEN),),
        (("authorization", f"Basic {TOKEN}"),),
        (("authorization", f"bearer {TOKEN}"),),
        (("authorization", f"Bearer {TOKEN} "),),
        (("authorization", f"Bearer {TOKEN[:-1]}"),),
        (("authorization", "Bearer "),),
        (("authorization", ""),),
        (("token", f"Bearer {TOKEN}"),),
        (*bearer(OTHER), *bearer(TOKEN)),
    ],
)
def test_what_is_no_token(start: Make, tokens: Path, metadata: Any) -> None:
    sidecar = start(admin_token_file=str(tokens))
    call = sidecar.admin.ListEngines
    status = refusal(lambda: call(pb.ListEnginesRequest(), timeout=60, metadata=metadata))
    assert status[0] == grpc.StatusCode.UNAUTHENTICATED


def test_engines_and_health_need_none(start: Make, tokens: Path) -> None:
    sidecar = start(admin_token_file=str(tokens))
    assert sidecar.stream().call.is_active()
    health_pb2_grpc.HealthStub(sidecar.channel).Check(health_pb2.HealthCheckRequest(), timeout=60)


def test_tokens_are_in_no_log_and_no_status(
    start: Make, tokens: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("DEBUG")
    sidecar = start(admin_token_file=str(tokens))
    wrong = "a-wrong-token-that-is-long"
    said = refusal(lambda: sidecar.admin.ListEngines(pb.ListEnginesRequest(), metadata=bearer(wrong)))
    sidecar.admin.ListEngines(pb.ListEnginesRequest(), metadata=bearer(TOKEN), timeout=60)
    tokens.write_text("short\n")
    sidecar.sidecar._doors.refresh()
    tokens.write_text(f"{OTHER}\n")
    sidecar.sidecar._doors.refresh()
    everything = caplog.text + str(said) + "".join(capfd.readouterr())
    assert "admin call refused" in everything
    assert "new tokens cannot be used" in everything
    for secret in (TOKEN, OTHER, wrong, "short"):
        assert secret not in everything


def test_tokens_are_replaced_without_a_restart(start: Make, tokens: Path) -> None:
    sidecar = start(admin_token_file=str(tokens))
    ask = sidecar.admin.ListEngines
    tokens.write_text(f"{OTHER}\n")
    sidecar.sidecar._doors.refresh()
    ask(pb.ListEnginesRequest(), timeout=60, metadata=bearer(OTHER))
    assert refusal(lambda: ask(pb.ListEnginesRequest(), metadata=bearer(TOKEN)))[0].name == "UNAUTHENTICATED"
    tokens.unlink()  # and one that is gone takes nothing away
    sidecar.sidecar._doors.refresh()
    ask(pb.ListEnginesRequest(), timeout=60, metadata=bearer(OTHER))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "must hold 1 to 64 tokens"),
        (b"\n \n", "must hold 1 to 64 tokens"),
        (b"0123456789abcde\n", "line 1: a token has 16 to 512 characters"),
        (b"0123456789abcdef\n\n" + b"x" * 513, "line 3: a token has 16 to 512 characters"),
        (b"0123456789 abcdef\n", "without blanks"),
        (b"0123456789abcde\x07\n", "line 1: a token has"),
        (b"\xff" * 20, "is not ASCII text"),
        (b"0123456789abcdef\n" * 65, "must hold 1 to 64 tokens"),
    ],
)
def test_files_that_hold_no_tokens(tokens: Path, text: bytes, says: str) -> None:
    tokens.write_bytes(text)
    with pytest.raises(TokenError) as raised:
        read_tokens(str(tokens))
    assert says in str(raised.value)
    assert "0123456789" not in str(raised.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TokenError, match="No such file or directory"):
        TokenGate(str(tmp_path / "none"), on_refused=lambda: None)


def test_a_file_that_everybody_can_read_is_told_of(tokens: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens.chmod(0o640)
    TokenGate(str(tokens), on_refused=lambda: None)
    assert caplog.text == ""
    tokens.chmod(0o644)
    TokenGate(str(tokens), on_refused=lambda: None)
    assert "chmod it to 0600 or 0640" in caplog.text


def test_tokens_do_not_travel_in_clear_text(tokens: Path) -> None:
    plain = {"insecure": True, "admin_token_file": str(tokens)}
    with pytest.raises(ValueError, match="clear text"):
        ServeConfig(listen="0.0.0.0:0", **plain)
    with pytest.raises(ValueError, match=r"admin_listen .*clear text"):
        ServeConfig(admin_listen="0.0.0.0:0", **plain)
    ServeConfig(listen="127.0.0.1:0", **plain)
    ServeConfig(listen="0.0.0.0:0", admin_listen="unix:///tmp/a.sock", **plain)


def test_engines_and_operators_apart(start: Make, tmp_path: Path) -> None:
    operators = tmp_path / "admin.sock"
    sidecar = start(admin_listen=f"unix://{operators}", socket_group=str(os.getgid()))
    sidecar.stream()
    assert stat.S_IMODE(operators.stat().st_mode) == 0o600  # the engines' group does not get in here
    status = refusal(lambda: sidecar.admin.ListEngines(pb.ListEnginesRequest(), timeout=60))
    assert status[0] == grpc.StatusCode.UNIMPLEMENTED
    assert refusal(lambda: ProtoReflectionDescriptorDatabase(sidecar.channel).get_services())[0] == (
        grpc.StatusCode.UNIMPLEMENTED
    )
    with grpc.insecure_channel(f"unix://{operators}") as channel:
        answer = pb_grpc.ControllerAdminStub(channel).ListEngines(pb.ListEnginesRequest(), timeout=60)
        assert [engine.info.engine_id for engine in answer.engines] == ["engine-1"]
        assert set(ProtoReflectionDescriptorDatabase(channel).get_services()) == {
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
            "specgov.v1.ControllerAdmin",
        }
        question = pb.DecideRequest(batch_size=1)
        decide = pb_grpc.SpeculationControllerStub(channel).Decide
        assert refusal(lambda: decide(question, timeout=60))[0] == grpc.StatusCode.UNIMPLEMENTED
        for some in (channel, sidecar.channel):
            health_pb2_grpc.HealthStub(some).Check(health_pb2.HealthCheckRequest(), timeout=60)
    sidecar.sidecar.stop()
    assert not operators.exists()


def test_a_failed_start_leaves_nothing_behind(start: Make, tmp_path: Path) -> None:
    """Whichever step fails: what was bound before it is gone, and the next start finds its place free."""
    taken = start(listen=f"unix://{tmp_path}/taken.sock", metrics="127.0.0.1:0")
    listening, admin = tmp_path / "a.sock", tmp_path / "b.sock"
    failing: list[dict[str, Any]] = [
        {"metrics": str(taken.sidecar.metrics_address)},
        {"admin_listen": f"unix://{tmp_path}/none/b.sock"},
        {"admin_listen": f"unix://{tmp_path}/taken.sock"},
        {"socket_group": "nobody-has-this-name"},
        {"admin_socket_group": "nobody-has-this-name"},
    ]
    for changes in failing:
        settings = {"listen": f"unix://{listening}", "admin_listen": f"unix://{admin}", **changes}
        with pytest.raises(ListenError):
            start(**settings)
        assert not listening.exists(), changes
        assert not admin.exists(), changes
    taken.stream()  # and who was there is undisturbed
    start(listen=f"unix://{listening}", admin_listen=f"unix://{admin}").stream()


def test_a_failed_start_holds_no_folder_and_no_thread(start: Make, tmp_path: Path) -> None:
    taken = start(listen=f"unix://{tmp_path}/taken.sock", metrics="127.0.0.1:0")
    threads = set(threading.enumerate())
    state = {"dir": str(tmp_path / "state")}
    with pytest.raises(ListenError):
        start(state=state, metrics=str(taken.sidecar.metrics_address))
    assert {thread.name for thread in set(threading.enumerate()) - threads} == set()
    start(state=state).stream()  # the folder's lock is free


def test_bad_files_are_found_before_anything_is_bound(start: Make, tmp_path: Path) -> None:
    with pytest.raises(TokenError):
        start(admin_token_file=str(tmp_path / "none"))
    assert not (tmp_path / "specgov.sock").exists()
