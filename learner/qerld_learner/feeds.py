"""What a Sample stream shows of a group: everything so far, then what happens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from .records import GroupOpened, RolloutFinished, RolloutRecord, SampleEvent, TokenDelta
from .signals import Broadcast


@dataclass
class Partial:
    """Tokens of a rollout that is being sampled."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)


class GroupFeed:
    """The events of one group that is being sampled. Readers come and go; sampling does not depend on them."""

    def __init__(self, opened: GroupOpened) -> None:
        self.opened = opened
        self._partial: dict[int, Partial] = {}
        self._finished: dict[int, RolloutRecord] = {}
        self._events: Broadcast[SampleEvent] = Broadcast()

    def restart(self, index: int) -> Partial:
        """Begin a rollout, again from its first token."""
        self._partial[index] = Partial()
        return self._partial[index]

    def grow(self, index: int, ids: tuple[int, ...], logprobs: tuple[float, ...], text: str) -> None:
        """Append tokens to a rollout."""
        partial = self._partial[index]
        begin = len(partial.ids)
        partial.ids.extend(ids)
        partial.logprobs.extend(logprobs)
        partial.text.append(text)
        self._events.publish(TokenDelta(self.opened.rollout_ids[index], index, begin, ids, logprobs, text))

    def finish(self, rollout: RolloutRecord) -> None:
        """Show a rollout that is durable now."""
        self._partial.pop(rollout.index, None)
        self._finished[rollout.index] = rollout
        self._events.publish(RolloutFinished(rollout))

    def close(self) -> None:
        """End the streams: all rollouts are finished, or the learner stops."""
        self._events.close()

    async def events(self) -> AsyncGenerator[SampleEvent, None]:
        """Yield the group from its opening on, whenever the reader came."""
        with self._events.subscribe() as subscription:
            past: list[SampleEvent] = [self.opened]
            past += [RolloutFinished(rollout) for rollout in self._finished.values()]
            past += [self._so_far(index, partial) for index, partial in self._partial.items() if partial.ids]
            for event in past:
                yield event
            while (new := await subscription.get()) is not None:
                yield new

    def _so_far(self, index: int, partial: Partial) -> TokenDelta:
        rollout_id = self.opened.rollout_ids[index]
        ids, logprobs = tuple(partial.ids), tuple(partial.logprobs)
        return TokenDelta(rollout_id, index, 0, ids, logprobs, "".join(partial.text))
