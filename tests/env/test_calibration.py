"""Expected values are worked out by hand on made-up recordings; the bundled profiles are made anew."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from specgov.controller.config import DecisionLogConfig
from specgov.controller.decision_log import DecisionLog
from specgov.controller.step_record import StepRecord
from specgov.env.calibration import CalibrationError, Setup, calibrate, gather, write_profile
from specgov.env.recording import RecordingError, read_recording
from specgov.policies.profile import load_profile, parse_profile
from specgov.policies.step_time import DRAFTS, HARDWARE, MODELS
from specgov.policies.types import StepObservation
from specgov.proto.v1 import specgov_pb2 as pb

RECORDED = Path(__file__).parents[3] / "shared" / "data" / "h200"


class Recorder:
    """Writes a recording of steps, one millisecond figure at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[str] = []
        self.step_id, self.now_s = 0, 100.0

    def run(self, context: int, batch: int) -> None:
        self.lines.append(f"#run,{context},{batch}")
        self.batch, self.context = batch, context
        self.step_id += 10

    def step(
        self, ms: float, num_steps: int | None, batch: int | None = None, is_decode: bool = True
    ) -> None:
        self.step_id += 1
        self.now_s += ms / 1e3
        size = self.batch if batch is None else batch
        width = "" if not is_decode else 0 if num_steps is None else num_steps + 1
        total = size * self.context if is_decode else 0
        row = (int(is_decode), size, self.step_id, self.now_s - 0.002, f"{self.now_s:.6f}", width, "", total)
        self.lines.append(",".join(map(str, row)))

    def steps(self, times_ms: Iterable[float], num_steps: int | None) -> None:
        for ms in times_ms:
            self.step(ms, num_steps)

    def save(self) -> Path:
        self.path.write_text("\n".join(self.lines) + "\n")
        return self.path


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path / "steps.csv")


def whole(
    recorder: Recorder,
    step_ms: Callable[[int, int], float],
    batches: tuple[int, ...] = (1, 8),
    tiers: tuple[int | None, ...] = (0, 3),
) -> Path:
    """Ten steps a cell, of which the last seven are used."""
    for batch in batches:
        recorder.run(512, batch)
        for tier in tiers:
            recorder.steps([step_ms(batch, tier or 0)] * 10, tier)
    return recorder.save()


def test_which_steps_are_used(recorder: Recorder) -> None:
    recorder.run(512, 4)
    recorder.step(50, 0, is_decode=False)  # prefill
    recorder.step(50, 0, is_decode=False)  # prefill, contiguous: 4 requests of 512 tokens in 50 ms
    recorder.step(9, 0)  # follows a prefill: not contiguous
    recorder.steps([5, 5], 0)  # not settled
    recorder.steps([5.1, 5.2], 0)  # used
    recorder.step(6, 3)  # the tier changed: not settled
    recorder.steps([6, 6], 3)  # not settled
    recorder.step(6.5, 3)  # used
    recorder.step(6, 3, batch=3)  # a request finished
    recorder.step(6, 3)  # back at 4
    recorder.step_id += 1  # a step is missing
    recorder.step(6, 3)  # not contiguous
    recording = read_recording(recorder.save())
    assert recording.step_ms == pytest.approx([5.1, 5.2, 6.5], abs=1e-3)
    assert recording.num_steps.tolist() == [0, 0, 3]
    assert recording.batch_size.tolist() == [4, 4, 4]
    assert recording.rejected == {
        "batch size changed": 2,
        "not contiguous": 2,
        "prefill": 2,
        "tier not settled": 5,
    }
    assert recording.rows == len(recording.step_ms) + sum(recording.rejected.values())
    assert recording.prefill_tokens.tolist() == [2048]
    assert recording.prefill_ms == pytest.approx([50.0], abs=1e-3)
    assert recording.can_speculate


def test_a_server_without_speculation_is_known_by_its_width(recorder: Recorder) -> None:
    recording = read_recording(whole(recorder, lambda b, k: 5.0, tiers=(None,)))
    assert not recording.can_speculate
    assert set(recording.num_steps) == {0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no steps"),
        ("1,1,1,1.0,1.1,1,,5\n", "line 1: expected a line '#run,context,batch'"),
        ("#run,512\n", "line 1: expected '#run,context,batch'"),
        ("#run,512,1\n1,1,1\n", "line 2: expected 'is_decode,batch"),
        ("#run,512,1\n1,1,1,1.0,nan,1,,5\n", "line 2: a step needs a batch of at least 1 and a finite"),
        ("#run,512,1\n1,0,1,1.0,1.1,1,,5\n", "line 2: a step needs a batch of at least 1"),
        ("#run,512,1\n1,1,1,1.0,1.1,1,,5\n1,1,2,1.0,1.2,0,,5\n", "mixes a server without speculation"),
        ('{"kind": "step"}\n', "line 1: not a decision log"),
        ('{"kind": "log", "schema": "specgov.decision_log", "schema_version": 9}\n', "schema version 9"),
        ('{"kind": "log", "schema": "specgov.decision_log", "schema_version": 1}\n', "holds no steps"),
        (
            '{"kind": "log", "schema": "specgov.decision_log", "schema_version": 1}\n{"kind": "step"}\n',
            "line 2: the",
        ),
    ],
)
def test_a_bad_recording(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(RecordingError, match=message) as raised:
        read_recording(path)
    assert str(path) in str(raised.value)


def test_a_recording_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="cannot read the recording"):
        read_recording(tmp_path / "none.csv")


def test_median_spread_and_outliers(recorder: Recorder) -> None:
    recorder.run(512, 2)
    recorder.steps([4.0] * 3, 0)
    # Median 10 of all eleven; 21 is above twice that, 4.9 below half, 19 and 6 are not. Nine are left.
    recorder.steps([8, 9, 9, 10, 10, 10, 11, 19, 6, 21, 4.9], 0)
    cells, logs, outliers, dropped = gather([read_recording(recorder.save())])
    assert outliers == 2
    assert dropped == []
    assert cells.count.tolist() == [9]
    assert cells.median_ms == pytest.approx([10.0], abs=2e-3)
    # 6 8 9 9 10 10 10 11 19: the quantile 0.1 lies 0.8 of the way from 6 to 8, 0.9 lies 0.2 from 11 to 19.
    assert cells.p10_ms == pytest.approx([7.6], abs=5e-3)
    assert cells.p90_ms == pytest.approx([12.6], abs=5e-3)
    assert len(logs) == 9


def test_a_small_cell_is_dropped_and_named(recorder: Recorder) -> None:
    recorder.run(512, 2)
    recorder.steps([5.0] * 7, 0)  # 4 usable
    cells, _, _, dropped = gather([read_recording(recorder.save())])
    assert len(cells) == 0
    assert dropped == ["context 512, batch size 2, num_steps 0: 4 steps"]


def test_a_batch_is_counted_at_its_padded_size(recorder: Recorder) -> None:
    cells, *_ = gather([read_recording(whole(recorder, lambda b, k: 5.0, batches=(3, 4)))], (1, 4))
    assert cells.batch_size.tolist() == [4, 4]


def test_a_profile_of_a_small_recording(recorder: Recorder, tmp_path: Path) -> None:
    path = whole(recorder, lambda batch, tier: 5 + batch / 8 + tier / 2)
    setup = Setup(name="small", graph_batch_sizes=(1, 8))
    profile = calibrate([read_recording(path)], setup)
    assert profile.tiers == (0, 3)
    assert profile.no_spec_grid is None
    assert profile.tier_0_tax() == {}
    batch = np.array([1, 5, 8])
    assert profile.step_time.step_ms(batch, 0, 8 * 512)[1:] == pytest.approx([6.0, 6.0], abs=2e-3)
    assert profile.step_time.step_ms(1, 3, 512) == pytest.approx(6.625, abs=2e-3)
    # Contexts 0, 512 and far beyond; batch sizes 1, 8 and 16, 32; tiers 0, 3 and 16, 32.
    assert profile.grid.shape == (3, 4, 4)
    assert profile.facts["measured_cells"] == 4
    assert profile.facts["extrapolated_cells"] == 3 * 4 * 4 - 4
    # It survives its file.
    write_profile(profile, tmp_path / "small.json")
    assert load_profile(tmp_path / "small.json").to_json() == profile.to_json()


def test_medians_that_fall_are_smoothed_and_named(recorder: Recorder) -> None:
    # Batch 8 is recorded as cheaper than 1 at num_steps 0: both become the mean of 6 and 5.
    path = whole(recorder, lambda batch, tier: (6.0 if batch == 1 else 5.0) if tier == 0 else 9.0)
    profile = calibrate([read_recording(path)], Setup(graph_batch_sizes=(1, 8)))
    assert profile.grid.step_ms[1, :2, 0] == pytest.approx([5.5, 5.5], abs=2e-3)
    assert profile.grid.median_ms[1, :2, 0] == pytest.approx([6.0, 5.0], abs=2e-3)
    smoothed = {(cell["batch_size"], cell["num_steps"]) for cell in profile.facts["smoothed_cells"]}
    assert {(1, 0), (8, 0)} <= smoothed


@pytest.mark.parametrize(
    ("batches", "tiers", "message"),
    [
        ((1, 8), (3, 5), "missing: num_steps 0, without which no break-even is known"),
        ((1, 8), (0,), "missing: a second tier beside num_steps 0"),
        ((1,), (0, 3), r"num_steps 0 at two or more batch sizes \(at context 512 there are \[1\]\)"),
        ((1, 8), (None,), "no cell with at least 5 usable steps of a server that can speculate"),
    ],
)
def test_too_little_data_is_refused(
    recorder: Recorder, batches: tuple[int, ...], tiers: tuple[int | None, ...], message: str
) -> None:
    recording = read_recording(whole(recorder, lambda b, k: 5.0 + b + k, batches, tiers))
    with pytest.raises(CalibrationError, match=message):
        calibrate([recording])


def test_no_recording_is_too_little() -> None:
    with pytest.raises(CalibrationError, match="no cell"):
        calibrate([])


def test_a_dear_context_does_not_raise_the_next_alone(recorder: Recorder) -> None:
    """A host that was slow for one context: the longer one, of 21 steps, weighs thrice its 7."""
    for context, slow_ms, times in ((512, 2.0, 10), (4096, 0.0, 24)):
        for batch in (1, 8):
            recorder.run(context, batch)
            for tier in (0, 3):
                recorder.steps([5 + slow_ms + batch / 8 + tier] * times, tier)
    grid = calibrate([read_recording(recorder.save())], Setup(graph_batch_sizes=(1, 8))).grid
    assert grid.count[1:3, 0, 0].tolist() == [7, 21]
    # (7 * 7.125 + 21 * 5.125) / 28
    assert grid.step_ms[1:3, 0, 0] == pytest.approx([5.625, 5.625], abs=2e-3)


def test_a_decision_log_that_the_sidecar_wrote(tmp_path: Path) -> None:
    """Two graph sizes, two tiers, ten steps a cell.

    The first follows nothing, two settle, and after the last a step's number is missing, as where a prefill
    comes: six are used, of the very last cell seven.
    """
    path = tmp_path / "decisions.jsonl"
    log = DecisionLog(path, DecisionLogConfig(), wall_clock=lambda: 0.0)
    info = pb.EngineInfo(
        engine_id="e", engine="sglang", engine_version="0.5.17", model="m", draft="eagle3", tiers=[0, 3],
        graph_batch_sizes=[4, 8],
    )  # fmt: skip
    log.stream(info, "greedy")
    step_id = 0
    for batch, padded in ((3, 4), (8, 8)):
        for tier in (0, 3):
            step_id += 1  # a gap, so that the first step of a cell follows nothing
            for index in range(10):
                step_id += 1
                ms = None if index == 0 else 5.0 + padded / 4 + tier
                log.steps("e", [logged(step_id, batch, padded, tier, ms)], None, pb.MODE_ACTIVE)
    log.flush()
    profile = calibrate([read_recording(path)])
    assert profile.graph_batch_sizes == (4, 8)
    assert (profile.engine, profile.draft) == ("sglang-0.5.17", "eagle3")
    assert profile.tiers == (0, 3)
    # 3 requests of 700 tokens in a graph of 4: 525 a place, and 512 is the nearest power of two.
    plane = profile.grid.context_tokens.tolist().index(512.0)
    assert profile.grid.count[plane, :2, :2].tolist() == [[6, 6], [6, 7]]
    assert profile.grid.median_ms[plane, 0, :2].tolist() == [6.0, 9.0]
    assert profile.facts["recordings"][0]["rejected"] == {
        "before a prefill": 3,
        "not contiguous": 4,
        "tier not settled": 8,
    }


def test_a_log_of_unlike_engines_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    log = DecisionLog(path, DecisionLogConfig(), wall_clock=lambda: 0.0)
    for name in ("a", "b"):
        log.stream(pb.EngineInfo(engine_id=name, model=f"model {name}", tiers=[0, 3]), "greedy")
    log.steps("a", [logged(1, 1, 1, 0, 5.0)], None, pb.MODE_ACTIVE)
    log.flush()
    with pytest.raises(RecordingError, match="engines that differ"):
        read_recording(path)


@pytest.mark.parametrize("field", ["engine", "model", "draft", "gpu", "tensor_parallel_size"])
def test_logs_of_unlike_engines_do_not_make_one_profile(tmp_path: Path, field: str) -> None:
    recordings = []
    for number in (1, 2):
        path = tmp_path / f"{number}.jsonl"
        log = DecisionLog(path, DecisionLogConfig(), wall_clock=lambda: 0.0)
        info = pb.EngineInfo(engine_id="e", tiers=[0, 3])
        setattr(info, field, number if field == "tensor_parallel_size" else str(number))
        log.stream(info, "greedy")
        log.steps("e", [logged(1, 1, 1, 0, 5.0)], None, pb.MODE_ACTIVE)
        log.flush()
        recordings.append(read_recording(path))
    with pytest.raises(RecordingError, match=f"1.jsonl and 2.jsonl are of engines that differ in {field}$"):
        calibrate(recordings)


def test_a_log_may_end_in_the_middle_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    log = DecisionLog(path, DecisionLogConfig(), wall_clock=lambda: 0.0)
    log.steps("a", [logged(1, 1, 1, 0, 5.0)], None, pb.MODE_ACTIVE)
    log.flush()
    with path.open("a") as file:
        file.write('{"kind": "st')
    assert read_recording(path).rows == 1


def logged(step_id: int, batch: int, padded: int, tier: int, ms: float | None) -> StepRecord:
    step = StepObservation(
        step_id=step_id,
        batch_size=batch,
        num_steps=tier,
        accepted=np.zeros(batch, np.uint8),
        slots=np.zeros(0, np.uint16),
        generations=np.zeros(0, np.uint8),
        sum_seq_len_tokens=batch * (700 if batch == 3 else 512),
        max_seq_len_tokens=700,
        padded_batch_size=padded,
        step_ms=ms,
    )
    return StepRecord(step, 0, 0, None, 0)


H200 = {
    "h200-llama-3.1-8b": ("llama8b_spec_ctx512", "llama8b_spec_ctx4096", "llama8b_nospec_ctx512"),
    "h200-qwen3-30b-a3b": ("qwen3moe_spec_ctx512", "qwen3moe_nospec_ctx512"),
}


@pytest.mark.skipif(not RECORDED.is_dir(), reason="the recordings behind the bundled profiles are not here")
@pytest.mark.parametrize("name", sorted(H200))
def test_the_bundled_profiles_are_what_calibration_makes(name: str) -> None:
    """Byte for byte, with the facts of the recordings as their description states them."""
    bundled = load_profile(name)
    recordings = [read_recording(RECORDED / f"steps_{part}.csv") for part in H200[name]]
    model = name.removeprefix("h200-")
    setup = Setup(
        name=name,
        hardware=HARDWARE["H200"],
        engine="sglang-0.5.17",
        model=MODELS[model],
        draft=DRAFTS[model],
        draft_name="eagle3-1layer-32k",
        graph_batch_sizes=(1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256),
    )
    made = calibrate(recordings, setup).to_json()
    assert made == bundled.to_json()
    assert parse_profile(made).hash == bundled.hash


def test_deep_tiers_need_no_extrapolated_ones(recorder: Recorder) -> None:
    """num_steps 32 is the largest that can be asked for, so nothing is added beyond it."""
    path = whole(recorder, lambda batch, tier: 5.0 + batch / 8 + tier / 2, tiers=(0, 32))
    assert calibrate([read_recording(path)]).grid.num_steps.tolist() == [0, 32]
