"""A waiter that is woken and cancelled in one turn of the event loop is cancelled: else `close` would wait for ever."""

from __future__ import annotations

import asyncio

import pytest
from qerld_learner.signals import Signal


async def test_a_signal_does_not_swallow_a_cancellation() -> None:
    signal = Signal()
    woken = asyncio.create_task(signal.wait(signal.count, at_most=60))
    await asyncio.sleep(0)
    signal.notify()
    woken.cancel()
    with pytest.raises(asyncio.CancelledError):
        await woken


async def test_a_signal_is_not_missed_and_waits_no_longer_than_told() -> None:
    signal = Signal()
    seen = signal.count
    signal.notify()
    await signal.wait(seen)
    await signal.wait(signal.count, at_most=0.01)
