"""How each server stream goes on after a break: what to ask for next, and which responses are new.

Pure state, shared by the sync and the asyncio client.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from qerld.v1 import common_pb2, policy_pb2, reward_pb2, rollout_pb2, run_pb2

Request = TypeVar("Request", covariant=True)
Response = TypeVar("Response", contravariant=True)
Item = TypeVar("Item", covariant=True)


class Resume(Protocol, Generic[Request, Response, Item]):
    """State of one stream over all its connections."""

    def request(self) -> Request:
        """Return the request of the next connection."""

    def accept(self, response: Response) -> Item | None:
        """Take a response; return its item, or None when it was seen before."""


class SampleResume:
    """The same request id returns the same group from its start: what was seen is left out.

    Deltas are passed on as they come; their `begin` says when sampling or the stream started again.
    """

    def __init__(self, request: rollout_pb2.SampleRequest) -> None:
        self._request = request
        self._opened = False
        self._finished: set[str] = set()

    def request(self) -> rollout_pb2.SampleRequest:
        return self._request

    def accept(self, response: rollout_pb2.SampleResponse) -> rollout_pb2.SampleResponse | None:
        kind = response.WhichOneof("event")
        rollout_id = response.finished.rollout_id
        if (kind == "opened" and self._opened) or (kind == "finished" and rollout_id in self._finished):
            return None
        self._opened = self._opened or kind == "opened"
        if kind == "finished":
            self._finished.add(rollout_id)
        return response


class PolicyResume:
    """A new connection begins with the live version, which may be the last one seen."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._last: int | None = None

    def request(self) -> policy_pb2.WatchPolicyRequest:
        return policy_pb2.WatchPolicyRequest(run=self._run)

    def accept(self, response: policy_pb2.WatchPolicyResponse) -> policy_pb2.PolicyVersion | None:
        version = response.version.policy.version
        if version == self._last:
            return None
        self._last = version
        return response.version


class ReportsResume:
    """A new connection asks for the reports after the last one seen, so none is missed after the first."""

    def __init__(self, run: str, after_step: int | None) -> None:
        self._request = run_pb2.WatchRunRequest(run=run, after_step=after_step)

    def request(self) -> run_pb2.WatchRunRequest:
        return self._request

    def accept(self, response: run_pb2.WatchRunResponse) -> run_pb2.RunReport | None:
        self._request.after_step = response.report.step
        return response.report


class ReceiptsResume:
    """With rollout ids a new connection asks for those that are not final yet; without, it may miss some."""

    def __init__(self, run: str, rollout_ids: list[str]) -> None:
        self._run = run
        self._open = dict.fromkeys(rollout_ids)

    def request(self) -> reward_pb2.WatchReceiptsRequest:
        return reward_pb2.WatchReceiptsRequest(run=self._run, rollout_ids=list(self._open))

    def accept(self, response: reward_pb2.WatchReceiptsResponse) -> reward_pb2.Receipt | None:
        # The last open id stays in the request: an empty list would watch the whole run.
        if len(self._open) > 1:
            self._open.pop(response.receipt.rollout_id, None)
        return response.receipt


class EvaluateResume:
    """Nothing is stored, so a new connection starts over; completions that were seen are left out."""

    def __init__(self, request: policy_pb2.EvaluateRequest) -> None:
        self._request = request
        self._seen: set[tuple[int, int]] = set()

    def request(self) -> policy_pb2.EvaluateRequest:
        return self._request

    def accept(self, response: policy_pb2.EvaluateResponse) -> policy_pb2.EvaluateResponse | None:
        key = (response.prompt_index, response.sample_index)
        if key in self._seen:
            return None
        self._seen.add(key)
        return response


class DownloadResume:
    """One file of an adapter from a byte on.

    Attributes:
        position: Bytes that are here already.
        sha256: Checksum of the whole file, hexadecimal; "" before the first chunk.
    """

    def __init__(self, policy: common_pb2.Policy, file: str, position: int = 0) -> None:
        self._policy, self._file = policy, file
        self.position = position
        self.sha256 = ""

    def request(self) -> policy_pb2.DownloadAdapterRequest:
        return policy_pb2.DownloadAdapterRequest(policy=self._policy, file=self._file, offset=self.position)

    def accept(self, response: policy_pb2.DownloadAdapterResponse) -> bytes | None:
        self.sha256 = self.sha256 or response.sha256
        self.position += len(response.data)
        return response.data
