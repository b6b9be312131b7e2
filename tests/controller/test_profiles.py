"""Which step times an engine's rule starts from."""

from __future__ import annotations

import pytest

from specgov.controller.profiles import (
    AUTO,
    NO_PROFILE,
    bundled_profile_for,
    profile_from_wire,
    step_time_for,
)
from specgov.controller.validation import RejectedMessage
from specgov.proto.v1 import specgov_pb2 as pb

LLAMA = "h200-llama-3.1-8b"
MOE = "h200-qwen3-30b-a3b"


def engine(
    model: str = "/models/Llama-3.1-8B-Instruct", gpu: str = "NVIDIA H200", tp: int = 1
) -> pb.EngineInfo:
    return pb.EngineInfo(model=model, gpu=gpu, tensor_parallel_size=tp)


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        (engine(), LLAMA),
        (engine("meta-llama/Llama-3.1-8B"), LLAMA),
        (engine("meta-llama/Llama-3.1-8B/"), LLAMA),
        (engine("Qwen/Qwen3-30B-A3B", "H200"), MOE),
        (engine("meta-llama/Llama-3.1-80B"), None),
        (engine("meta-llama/Llama-3.1-70B-Instruct"), None),
        (engine("/llama-3.1-8b/other-model"), None),
        (engine(gpu="NVIDIA H20"), None),
        (engine(gpu="NVIDIA GH200 480GB"), None),
        (engine(gpu=""), None),
        (engine(tp=2), None),
        (engine(model=""), None),
        (pb.EngineInfo(), None),
    ],
)
def test_a_bundled_profile_is_taken_only_for_its_own_gpu_model_and_parallelism(
    info: pb.EngineInfo, expected: str | None
) -> None:
    found = bundled_profile_for(info)
    assert (found and found.name) == expected


def test_auto_is_no_profile_on_an_engine_that_none_was_made_on() -> None:
    assert step_time_for(engine(gpu="NVIDIA B200"), AUTO, ()) is None
    assert step_time_for(engine(), AUTO, ()) is not None


def test_what_the_engine_names_comes_before_the_configuration() -> None:
    info = engine(gpu="NVIDIA B200")
    info.profile = MOE
    steps = step_time_for(info, NO_PROFILE, (8,))
    assert steps is not None
    own = profile_from_wire(MOE, AUTO).step_time.with_graph_batch_sizes((8,))
    assert steps.step_ms(8, 3, 8 * 512) == own.step_ms(8, 3, 8 * 512)
    info.profile = NO_PROFILE
    assert step_time_for(info, LLAMA, ()) is None
    info.profile = AUTO
    assert step_time_for(info, LLAMA, ()) is None


def test_the_configured_profile_is_for_engines_that_name_none() -> None:
    assert step_time_for(engine(gpu="NVIDIA B200"), MOE, ()) is not None


def test_an_engine_cannot_name_a_file() -> None:
    with pytest.raises(RejectedMessage, match="there is no profile '/etc/passwd'"):
        step_time_for(pb.EngineInfo(profile="/etc/passwd"), AUTO, ())


@pytest.mark.parametrize("configured", [AUTO, NO_PROFILE])
def test_a_question_has_a_profile_in_any_case(configured: str) -> None:
    assert profile_from_wire("", configured).name == LLAMA
