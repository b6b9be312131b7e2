"""Each published format, on samples small enough to read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specgov.env.traces import Trace, TraceError, read_servegen_windows, read_trace

SHARED = Path(__file__).parents[3] / "shared/data/traces"

AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,4808,10
2023-11-16 18:15:50.9951690,3180,8
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-12 00:00:10+00:00,200,20
2024-05-12 00:00:12.250000+00:00,300,30
"""
MOONCAKE = """{"timestamp": 0, "input_length": 6755, "output_length": 500, "hash_ids": [0, 1]}
{"timestamp": 3052, "input_length": 7319, "output_length": 490, "hash_ids": [0, 14]}
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,Conversation log
"""
BURSTGPT_SESSIONS = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "19440110.0,1722ac82,43,GPT-4,906,446,1352,Conversation log\n"
    "19440161.5,d5983bf9,2,ChatGPT,36,29,65,Conversation log\n"
)
PLAIN = """# source: a comment
t_s,in_tok,out_tok
0.5,10,1
0.25,20,2
"""


@pytest.mark.parametrize(
    ("text", "arrival_s", "prompt", "output"),
    [
        (AZURE_2023, [0, 4.314579], [4808, 3180], [10, 8]),
        (AZURE_2024, [0, 2.25], [200, 300], [20, 30]),
        (MOONCAKE, [0, 3.052], [6755, 7319], [500, 490]),
        (BURSTGPT, [0, 113], [472, 417], [18, 276]),  # the row of 0 response tokens failed
        (BURSTGPT_SESSIONS, [0, 51.5], [906, 36], [446, 29]),
        (PLAIN, [0, 0.25], [20, 10], [2, 1]),  # put in the order of arrival
    ],
)
def test_formats(tmp_path, text, arrival_s, prompt, output):
    path = tmp_path / "trace"
    path.write_text(text)
    trace = read_trace(path)
    np.testing.assert_allclose(trace.arrival_s, arrival_s, atol=2e-6)
    assert trace.prompt_tokens.tolist() == prompt
    assert trace.output_tokens.tolist() == output


def test_scaling_in_time_and_size():
    trace = Trace(np.array([0.0, 2.0, 4.0]), np.array([10, 20, 3]), np.array([5, 1, 100]))
    assert trace.period_s == 6.0  # a span of 4 s and a mean gap of 2 s
    scaled = trace.scaled(time=0.5, prompt=2.0, output=0.1)
    assert scaled.arrival_s.tolist() == [0, 1, 2]
    assert scaled.prompt_tokens.tolist() == [20, 40, 6]
    assert scaled.output_tokens.tolist() == [1, 1, 10]  # 0.5 rounds to 0, and a request has at least one


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no requests"),
        ("t_s,in_tok,out_tok\n", "no requests"),
        ("time,tokens\n1,2\n", r"trace:1: the columns time,tokens belong to no known format"),
        ("# c\nt_s,in_tok,out_tok\n0,1,2\n1,2\n", r"trace:4: cannot be read"),
        ("t_s,in_tok,out_tok\n0,1,many\n", r"trace:2: .*many"),
        ('{"timestamp": 0, "input_length": 1}\n', r"trace:1: .*output_length"),
    ],
)
def test_what_cannot_be_read(tmp_path, text, message):
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        read_trace(path)


def test_missing_file(tmp_path):
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read_trace(tmp_path / "none.csv")


def test_servegen_windows(tmp_path):
    path = tmp_path / "windows.csv"
    path.write_text(
        "category,t_s,total_rate_rps,mean_client_cv,n_active,top_client_share\n"
        "a,1200,3.0,2.5,4,0.4\nb,0,9,1,1,1\na,600,2.0,1.5,4,0.4\n"
    )
    windows = read_servegen_windows(path, "a")
    assert windows.start_s.tolist() == [0, 600]
    assert windows.end_s == 1200
    assert windows.rate_rps.tolist() == [2, 3]
    assert windows.gap_cv.tolist() == [1.5, 2.5]
    with pytest.raises(TraceError, match="no category 'c'; it has a, b"):
        read_servegen_windows(path, "c")


@pytest.mark.skipif(not SHARED.exists(), reason="the published traces are not here")
def test_published_traces():
    """Number of requests and means as in the folder's own trace_summary.csv."""
    trace = read_trace(SHARED / "trace_azure2023_conv.csv")
    assert len(trace) == 19366
    assert round(trace.prompt_tokens.mean(), 1) == 1154.7
    assert round(trace.output_tokens.mean(), 1) == 211.1
    windows = read_servegen_windows(SHARED / "trace_servegen_windows.csv", "language/m-large")
    assert windows.rate_rps[0] == 212.78
    assert (np.diff(windows.start_s) > 0).all()
