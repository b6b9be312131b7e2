"""Who the requests of a step are: their slots, and whether they are the server's own."""

from __future__ import annotations

from typing import Any, NamedTuple, final

from specgov.client.messages import one_byte_each, two_bytes_each
from specgov.sglang_plugin.slots import SlotTable
from specgov.sglang_plugin.versions import HEALTH_CHECK_ID


class Known(NamedTuple):
    """Slots and generations as ``SlotTable`` gives them, in the wire form of two bytes and one byte each."""

    slots: bytes
    generations: bytes
    warm_up: bool


_NOBODY = Known(b"", b"", warm_up=False)


@final
class Members:
    """Knows the live requests of a step, and looks only at those of a batch that is not the last one's.

    A batch mostly has the same requests as the one before, and to see that costs a fraction of a microsecond,
    where every single request looked at would cost that. So the slot of a request that has finished is free
    for others once the batch changes, or ``forget`` says that there is none.

    Args:
        warm_up_comes: whether the server sends itself a first request, to warm up.

    """

    def __init__(self, *, warm_up_comes: bool) -> None:
        self._slots = SlotTable()
        self._warm_up_comes = warm_up_comes
        self._warm_up_id: str | None = None
        self._live: list[Any] = []
        self._known = _NOBODY

    def of(self, live: list[Any]) -> Known:
        """Who ``live`` are, none of whom has finished."""
        if live != self._live:
            self.forget()
            self._known = self._look(live)
            self._live = list(live)
        return self._known

    def forget(self) -> None:
        """Let go of the requests, which SGLang may have let go of; those that live keep their slots."""
        self._slots.release([r.rid for r in self._live if r.finished_reason is not None])
        self._live, self._known = [], _NOBODY

    def _look(self, live: list[Any]) -> Known:
        ids = [r.rid for r in live]
        slots, generations = self._slots.assign(ids)
        return Known(two_bytes_each(slots), one_byte_each(generations), self._is_warm_up(ids))

    def _is_warm_up(self, ids: list[str]) -> bool:
        """Health checks by their ids; the server's own first request, which comes alone, by being that."""
        if self._warm_up_comes and ids:
            self._warm_up_comes = False
            self._warm_up_id = ids[0] if len(ids) == 1 else None
        if len(ids) == 1 and ids[0] == self._warm_up_id:
            return True
        return (
            bool(ids)
            and ids[0].startswith(HEALTH_CHECK_ID)
            and all(i.startswith(HEALTH_CHECK_ID) for i in ids)
        )
