"""Rules by name, and what a user is told who asks for one that cannot be had."""

import contextlib
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest

from specgov.policies import registry
from specgov.policies.registry import describe, make_policy, options, parse_policy, policy_names, register
from specgov.policies.types import BatchView, EngineSpec, PolicyContext, PolicyError


def context(*tiers: int, **engine: int) -> PolicyContext:
    return PolicyContext(EngineSpec(tiers, **engine), np.random.default_rng(0), lambda: 0.0)


class Typed:
    """A rule with an option of every kind.

    More about it.
    """

    name = "typed"
    version = "1"

    @dataclass(frozen=True)
    class Config:
        whole: int = 1
        real: float | None = None
        yes: bool = False
        text: str = "a"

    def __init__(self, context: PolicyContext, config: Config) -> None:
        self.context, self.config = context, config


class Plain:
    name = "plain"
    version = "1"

    @dataclass(frozen=True)
    class Config:
        pass


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two rules above, registered for one test."""
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    module = sys.modules[__name__]
    monkeypatch.setitem(sys.modules, "a_plugin", module)
    register("typed", "a_plugin:Typed")
    register("plain", "a_plugin:Plain")


def test_names() -> None:
    assert policy_names()[:4] == ("static", "threshold", "schedule", "ema")


@pytest.mark.parametrize("name", policy_names())
def test_every_rule_calls_itself_by_its_name_and_describes_itself(name: str) -> None:
    rule, _ = parse_policy(name)
    assert rule.name == name
    assert rule.version
    assert describe(name).endswith(".")
    assert isinstance(options(name), dict)


@pytest.mark.parametrize(
    ("text", "batch_size", "num_steps"),
    [
        ("static", 1, 7),
        ("static:3", 500, 3),
        ("static:num_steps=3", 500, 3),
        (" static : num_steps = 3 ", 500, 3),
        ("threshold:32:3", 31, 3),
        ("threshold:32:3", 32, 0),
        ("threshold:num_steps=1:batch_size=8", 7, 1),
        ("threshold:8:num_steps=1", 8, 0),
        ("schedule:1=7:9=3:65=0", 8, 7),
        ("schedule:1=7:9=3:65=0", 9, 3),
        ("schedule:1=7:9=3:65=0", 65, 0),
    ],
)
def test_a_text_makes_the_rule(text: str, batch_size: int, num_steps: int) -> None:
    policy = make_policy(text, context(0, 1, 3, 7))
    assert policy.choose(BatchView(batch_size)).num_steps_for(batch_size) == num_steps


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unknown policy '': the policies are static, threshold, schedule, ema"),
        ("statics:3", "unknown policy 'statics': the policies are static, threshold, schedule, ema"),
        ("static:7", "policy 'static:7': this engine has no tier 7: its tiers are 0, 1, 3"),
        ("static:-1", "policy 'static:-1': num_steps must be 0 or more, not -1"),
        ("static:x", "policy 'static:x': num_steps must be a whole number, not 'x'"),
        ("static:3:3", "there are too many values, from '3' on: its options are num_steps"),
        ("static:k=3", "there is no option 'k': its options are num_steps"),
        ("threshold:9:batch_size=9", "the option 'batch_size' is given twice"),
        ("threshold:num_steps=1:9", "the value '9' needs a name here, as in num_steps=9"),
        ("threshold:0", "batch_size must be 1 or more, not 0"),
        ("threshold:9:-3", "num_steps must be 0 or more, not -3"),
        ("threshold:9:5", "this engine has no tier 5: its tiers are 0, 1, 3"),
        ("schedule:1=5:9=7:65=0", "this engine has no tier 5, 7: its tiers are 0, 1, 3"),
        ("schedule:2=1", "a schedule begins with batch size 1, as in schedule:1=7:9=3:65=0"),
        ("schedule:1=3:9=1:9=0", "batch sizes must ascend, and 9 follows 9"),
        ("schedule:1=3:9=-1", "num_steps must be 0 or more, not -1 (from batch size 9)"),
        ("schedule:1=3:9", "'9' is not BATCH_SIZE=NUM_STEPS in whole numbers, as in 9=3"),
        ("ema:initial_num_steps=7", "this engine has no tier 7: its tiers are 0, 1, 3"),
        ("ema:ema_alpha=nan", "ema_alpha must be a finite number, not 'nan'"),
        ("ema:ema_alpha=1.5", "slot 1: ema_alpha must lie in 0..1, not 1.5"),
        ("ema:update_interval=0", "slot 1: update_interval must be a whole number from 1 on, not 0"),
        ("ema:config=/nowhere/a.json", "config '/nowhere/a.json' cannot be read: No such file or directory"),
    ],
)
def test_an_error_says_what_is_wrong_and_what_there_is(text: str, message: str) -> None:
    with pytest.raises(PolicyError) as error:
        make_policy(text, context(0, 1, 3))
    assert message in str(error.value)
    assert repr(text) in str(error.value) or "unknown" in message


def test_a_threshold_needs_tier_0() -> None:
    with pytest.raises(PolicyError, match=r"this engine has no tier 0: its tiers are 1, 3"):
        make_policy("threshold:8:3", context(1, 3))


def test_errors_that_need_no_engine_come_before_one_is_known() -> None:
    parse_policy("static:7")
    with pytest.raises(PolicyError, match="whole number"):
        parse_policy("static:seven")


@pytest.mark.usefixtures("typed")
def test_values_of_every_kind() -> None:
    text = "typed:2:real=0.5:yes=TRUE:text=b"
    policy = make_policy(text, context(0))
    assert policy.config == Typed.Config(2, 0.5, True, "b")
    assert describe("typed") == "A rule with an option of every kind."
    assert options("typed") == {"whole": "1", "real": "", "yes": "False", "text": "a"}
    with pytest.raises(PolicyError, match="yes must be true or false, not 'maybe'"):
        make_policy("typed:yes=maybe", context(0))


@pytest.mark.usefixtures("typed")
def test_a_rule_without_options_says_so() -> None:
    with pytest.raises(PolicyError, match="there are too many values, from '1' on: it has no options"):
        parse_policy("plain:1")


@pytest.mark.usefixtures("typed")
def test_registering() -> None:
    register("typed", "a_plugin:Typed")  # the same again is no error
    assert policy_names()[-2:] == ("typed", "plain")
    with pytest.raises(ValueError, match="'typed' is a_plugin:Typed already"):
        register("typed", "a_plugin:Plain")
    with pytest.raises(ValueError, match="a rule's name"):
        register("a:b", "a_plugin:Plain")
    with pytest.raises(ValueError, match=r"package\.module:Class"):
        register("b", "a_plugin.Plain")


@pytest.mark.parametrize("text", ["ema:config=slots.json", "ema:/etc/hostname", "ema:config=x:ema_alpha=0.3"])
def test_a_stranger_names_no_files(text: str) -> None:
    with pytest.raises(PolicyError, match="config may name a file, and none is opened"):
        parse_policy(text, files=False)


@pytest.mark.usefixtures("typed")
def test_a_stranger_may_name_what_is_bundled(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PolicyError, match="text may name a file"):
        parse_policy("typed:text=b", files=False)
    monkeypatch.setattr(Typed.Config, "bundled", staticmethod(lambda: ["b"]), raising=False)
    assert parse_policy("typed:text=b", files=False)[1].text == "b"


def test_a_stranger_may_set_what_is_no_text() -> None:
    assert parse_policy("ema:ema_alpha=0.3", files=False)[1].ema_alpha == 0.3
    assert parse_policy("schedule:1=3:9=0", files=False)[1].starts == ((1, 3), (9, 0))


def test_importing_the_registry_imports_no_rule() -> None:
    code = (
        "import sys, specgov.policies.registry\n"
        "rules = [m for m in sys.modules if m.startswith('specgov.policies.')]\n"
        "print(sorted(rules))"
    )
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert printed.strip() == "['specgov.policies.registry', 'specgov.policies.types']"


EXTREMES = ("0", "-1", "1e-300", "1e300", "1000000000", "4294967296", "999999999999999999999")


@pytest.mark.parametrize("name", policy_names())
def test_an_option_at_an_extreme_is_used_or_refused(name: str) -> None:
    """Peers may ask for any: a rule is made, or PolicyError says why not, and nothing else is raised."""
    for option in options(name):
        for value in EXTREMES:
            with contextlib.suppress(PolicyError):
                make_policy(f"{name}:{option}={value}", context(0, 1, 3, 5))


def test_a_value_that_no_memory_or_machine_number_holds() -> None:
    with pytest.raises(PolicyError, match="a value is too large"):
        make_policy("throughput_aware:window_steps=999999999999999999999", context(0, 1))
