"""Broken signals: what raises an alarm, and what ends it.

While an alarm stands nothing is learnt and the policy is not asked. A report that tells of what cannot have
happened, reports that stopped, a clock that went back and step times that jump end after ``clear_steps``
sound reports in a row.

Zero acceptance is a case of its own, since two things look alike: a broken counter and a useless draft.
Either way the smallest tier is right (the baseline may speculate, which a useless draft makes pure loss), but
there nothing is verified that could end the alarm. So after a wait the smallest tier above 0 is tried for
``PROBE_DECISIONS`` decisions. One accepted draft ends the alarm, in a probe or whenever else; else the next
wait is twice as long, up to a limit, and the probes never cease. The waits shorten again only after drafts
were accepted in ``clear_steps`` steps: a draft that is accepted once in a thousand does not bring the policy
back again and again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from specgov.controller.guard.backoff import Backoff
from specgov.controller.guard.causes import GuardCause
from specgov.controller.guard.config import GuardConfig
from specgov.controller.guard.step_times import StepTimes
from specgov.policies.types import StepObservation

PROBE_DECISIONS = 4


class Alarms:
    """The alarms of one engine.

    Args:
        config: limits.
        clock: seconds, monotonic as far as the machine's is.
        begun, ended: called with an alarm when it begins and when it ends.

    Attributes: times: how often each began. standing: the alarm that stands; zero acceptance first, since it
        asks for more caution.

    """

    def __init__(
        self,
        config: GuardConfig,
        clock: Callable[[], float],
        begun: Callable[[GuardCause], None],
        ended: Callable[[GuardCause], None],
    ) -> None:
        self.times: Counter[GuardCause] = Counter()
        self.standing = GuardCause.NONE
        self._config = config
        self._clock = clock
        self._begun = begun
        self._ended = ended
        self._sound_steps_left: dict[GuardCause, int] = {}
        self._step_times = StepTimes(config.step_time_factor, config.clear_steps)
        self._zeros = 0
        self._steps_with_acceptance = 0
        self._zero_stands = False
        self._zero_wait = Backoff(config.first_backoff_steps, config.largest_backoff_steps)
        self._probes_left = 0
        self._last_step_id = 0
        self._last_report_s: float | None = None

    @property
    def clears_after_steps(self) -> int:
        """Steps until the standing alarm ends, or is put to the test, at the earliest."""
        wait = self._zero_wait.left_steps if self._zero_stands else 0
        return max(wait, *self._sound_steps_left.values(), 0)

    @property
    def silent_s(self) -> float | None:
        """Since the newest report; None before the first."""
        return None if self._last_report_s is None else max(self._clock() - self._last_report_s, 0.0)

    def takes_probe(self) -> bool:
        """Whether the next decision tries the smallest tier above 0; counts it."""
        if not self._zero_stands or self._zero_wait.left_steps:
            return False
        self._probes_left -= 1
        if self._probes_left <= 0:
            self._zero_wait.fail()
            self._probes_left = PROBE_DECISIONS
        return True

    def raise_alarm(self, cause: GuardCause) -> None:
        """Begin an alarm, or begin its end anew."""
        begins = cause not in self._sound_steps_left
        self._sound_steps_left[cause] = self._config.clear_steps
        if begins:
            self._begin(cause)

    def stream_began(self, new_boot: bool) -> None:
        """What went unreported before a stream, or between two boots, is no fault of reporting."""
        self._last_step_id = 0
        if new_boot:
            self._step_times.restart()

    def draft_changed(self) -> None:
        """Other weights: what was seen of acceptance no longer holds."""
        self._zeros = 0
        self._end_zero()
        self._zero_wait.reset()

    def heard_of(self, step: StepObservation) -> None:
        """A step was reported of which nothing but that counts."""
        self._last_step_id, self._last_report_s = step.step_id, self._clock()

    def observe(self, step: StepObservation, accepted_drafts: int, reports_dropped: int) -> bool:
        """Take a step in; whether it is sound and no alarm stands, so that it may be learnt from."""
        sound = self._came_in_time(step, reports_dropped)
        sound &= self._took_a_usual_time(step)
        if self._zero_stands:
            self._zero_wait.step()
        if step.num_steps > 0 and len(step.accepted):
            self._count_acceptance(len(step.accepted), accepted_drafts)
        if self._sound_steps_left and sound:
            self._count_sound_step()
            return False
        return sound and not self._zero_stands

    def _came_in_time(self, step: StepObservation, reports_dropped: int) -> bool:
        now_s, stale_steps = self._clock(), self._config.stale_steps
        last_id, self._last_step_id = self._last_step_id, step.step_id
        last_s, self._last_report_s = self._last_report_s, now_s
        if last_s is not None and now_s < last_s:
            self.raise_alarm(GuardCause.CLOCK_STEPPED)
            return False
        if not last_id:
            return True
        # Prefill and idle iterations have step ids too, and no decode step to report.
        missing = 0 if step.after_prefill or step.after_idle else step.step_id - last_id - 1
        if max(missing, reports_dropped) >= stale_steps:
            self.raise_alarm(GuardCause.REPORTS_STOPPED)
            return False
        return True

    def _took_a_usual_time(self, step: StepObservation) -> bool:
        if step.step_ms is None or not self._step_times.jumps(step.batch_size, step.num_steps, step.step_ms):
            return True
        if self._step_times.alarming:
            self.raise_alarm(GuardCause.STEP_TIME)
        return False

    def _count_acceptance(self, verified: int, accepted_drafts: int) -> None:
        if accepted_drafts:
            self._zeros = 0
            self._end_zero()
            self._steps_with_acceptance += 1
            if self._steps_with_acceptance >= self._config.clear_steps:
                self._zero_wait.reset()
            return
        self._zeros += verified
        if self._zeros >= self._config.zero_acceptance_requests and not self._zero_stands:
            self._zero_stands = True
            self._steps_with_acceptance = 0
            self._probes_left = PROBE_DECISIONS
            self._zero_wait.fail()
            self._begin(GuardCause.ZERO_ACCEPTANCE)

    def _end_zero(self) -> None:
        if self._zero_stands:
            self._zero_stands = False
            self._changed()
            self._ended(GuardCause.ZERO_ACCEPTANCE)

    def _count_sound_step(self) -> None:
        for cause in tuple(self._sound_steps_left):
            self._sound_steps_left[cause] -= 1
            if not self._sound_steps_left[cause]:
                del self._sound_steps_left[cause]
                self._changed()
                self._ended(cause)

    def _begin(self, cause: GuardCause) -> None:
        self.times[cause] += 1
        self._changed()
        self._begun(cause)

    def _changed(self) -> None:
        if self._zero_stands:
            self.standing = GuardCause.ZERO_ACCEPTANCE
        else:
            self.standing = next(iter(self._sound_steps_left), GuardCause.NONE)
