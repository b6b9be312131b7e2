"""Whether a step took a time of the order of the steps before it."""

from __future__ import annotations

from dataclasses import dataclass

_SEEN_BEFORE = 8
"""Steps of a kind before one of them can be judged."""
_RATE = 1 / 8
"""How fast a kind's usual time follows."""
_SCORE_OF_ALARM = 3.0
_SCORE_DECAY = 1 / 16


class StepTimes:
    """The usual step time by octave of the batch size and tier: within such a kind times differ little.

    A step that is ``factor`` times slower or faster than usual jumps, and moves nothing. One such step is a
    stall that any server has; three of them, less one for 16 sound steps between, are an alarm.
    ``believed_after`` of them in a row are how the server is now: then what was usual is forgotten.
    """

    def __init__(self, factor: float, believed_after: int) -> None:
        self._factor = factor
        self._believed_after = believed_after
        self._usual: dict[tuple[int, int], _Usual] = {}
        self._score = 0.0
        self._jumps_in_a_row = 0

    def jumps(self, batch_size: int, num_steps: int, step_ms: float) -> bool:
        """Take a step in; whether its time jumps."""
        kind = (batch_size.bit_length(), num_steps)
        usual = self._usual.get(kind)
        if usual is None:
            self._usual[kind] = _Usual(step_ms)
        elif usual.seen < _SEEN_BEFORE:
            usual.seen += 1
            # The geometric mean: a first step that compiles takes a thousand times as long as the rest.
            usual.ms *= (step_ms / usual.ms) ** (1 / usual.seen)
        elif usual.ms / self._factor <= step_ms <= usual.ms * self._factor:
            usual.ms += (step_ms - usual.ms) * _RATE
        else:
            return self._jump()
        if self._score:
            self._score = max(self._score - _SCORE_DECAY, 0.0)
            self._jumps_in_a_row = 0
        return False

    @property
    def alarming(self) -> bool:
        """Whether there were so many jumps of late that the clock is not to be trusted."""
        return self._score >= _SCORE_OF_ALARM

    def restart(self) -> None:
        """Forget what was usual."""
        self._usual.clear()
        self._score = 0.0
        self._jumps_in_a_row = 0

    def _jump(self) -> bool:
        self._score += 1.0
        self._jumps_in_a_row += 1
        if self._jumps_in_a_row >= self._believed_after:
            self.restart()
        return True


@dataclass(slots=True)
class _Usual:
    ms: float
    seen: int = 1
