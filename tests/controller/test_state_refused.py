"""Saved states of another engine, or damaged: set aside, and the engine starts cold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from state_bench import Sidecar, capture_logs, play, the_file

from specgov.controller import state_file

Make = Callable[..., Any]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": "other"}, "model was '' and is 'other'"),
        ({"draft": "other"}, "draft was"),
        ({"gpu": "other"}, "gpu was"),
        ({"tensor_parallel_size": 8}, "tensor_parallel_size was 0 and is 8"),
        ({"tiers": (0, 1, 3)}, "tiers was"),
        ({"graph_batch_sizes": (1, 2, 4)}, "graph_batch_sizes was"),
        ({"max_running_requests": 32}, "max_running_requests was 64 and is 32"),
        ({"profile": "h200-llama-3.1-8b"}, "profile was '' and is 'sha256:"),
    ],
)
def test_another_engine_under_the_same_id_starts_cold(
    sidecar: Make, make_report: Make, tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    first = sidecar()
    play(first.connect(), [make_report(1)])
    first.stop()
    second = sidecar()
    with capture_logs() as logs:
        again = second.connect(**changes)
        second.keeper.save()
    assert again.restored_reports == 0
    (said,) = [entry for entry in logs if entry["level"] == "error"]
    assert problem in said["problem"]
    assert [path.suffix for path in (tmp_path / "states").iterdir() if path.name != "lock"] == [".bad"]


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flip(content: bytes) -> bytes:
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


def newer(content: bytes) -> bytes:
    return content.replace(b"specgov.state 1 ", b"specgov.state 2 ", 1)


def with_document(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def damage(content: bytes) -> bytes:
        document = state_file.from_bytes(content)
        change(document)
        return state_file.to_bytes(document)

    return damage


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut short": cut,
    "one bit": flip,
    "newer": newer,
    "another file": lambda _: b"\x80\x04\x95pickle",
    "no newline": lambda content: content.replace(b"\n", b" ", 1),
    "another engine's": with_document(lambda document: document.update(engine_id="engine-2")),
    "no engine": with_document(lambda document: document.pop("engine_id")),
    "no identity": with_document(lambda document: document.pop("identity")),
    "no policy": with_document(lambda document: document.update(policy=None)),
    "another version": with_document(lambda document: document["policy"].update(version="0")),
    "nothing learnt": with_document(lambda document: document["policy"].update(learnt=None)),
    "less learnt": with_document(lambda document: document["policy"]["learnt"].pop("model")),
    "an older release's": with_document(
        lambda document: document["policy"]["learnt"]["model"]["cost"].pop("_trial")
    ),
    "odd batch": with_document(lambda document: document.update(batch={"batch_size": 1, "x": 2})),
    "odd numbers": with_document(lambda document: document.update(last_step_id="many")),
    "odd hand": with_document(lambda document: document.update(by_hand=[])),
    "policy that is none": with_document(lambda document: document.update(by_hand={"policy": "best"})),
    "policy of a file": with_document(lambda document: document.update(by_hand={"policy": "ppo:/etc"})),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_cannot_be_used_is_set_aside_with_one_error(
    damage: str, sidecar: Make, make_report: Make, tmp_path: Path
) -> None:
    steps = [make_report(step_id) for step_id in range(1, 30)]
    first = sidecar(policy="thompson")
    play(first.connect(), steps)
    first.stop()
    path = the_file(tmp_path / "states")
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with capture_logs() as logs:
        second = sidecar(policy="thompson")
        again = second.connect()
        second.keeper.save()
    (said,) = [entry for entry in logs if entry["level"] == "error"]
    assert said["event"].startswith("saved state cannot be used and is set aside")
    assert said["problem"]
    assert second.keeper.set_aside == 1
    assert not path.exists()
    assert path.with_name(path.name + ".bad").exists()
    assert again.restored_reports == 0
    # Cold is cold: it decides as an engine that was never seen, its generator included.
    assert play(again, steps) == play(
        Sidecar(tmp_path / "fresh", second._make_info, policy="thompson").connect(), steps
    )
    second.stop()
    assert sidecar(policy="thompson").connect().restored_reports == len(steps)  # and it saves again
