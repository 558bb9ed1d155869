"""Prometheus metrics of the learner. Labels are bounded: never a version, a rollout or a client.

`LearnerMetrics` observes the core (see `observer.Observer`) and the API's interceptor; each instance has its own
registry, so that tests may run several servers in one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.exposition import start_http_server
from qerld_kernels.exclusive import port_error

from qerld_learner.observer import Observer
from qerld_learner.records import GroupState, StepReport

MAX_RUN_LABELS = 100
"""Runs are named by clients; beyond this many the rest share the label "other"."""

RPC_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
PHASE_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900)

STEP_GAUGES: dict[str, str] = {
    "reward_mean": "Mean reward of the last trained batch.",
    "reward_std": "Standard deviation of the rewards of the last trained batch.",
    "entropy": "Mean entropy of the policy at completion tokens, nats.",
    "mismatch_kl": "KL divergence between the server that sampled, noise included, and the trainer, nats a token.",
    "mismatch_kl_k1": "The same by the signed estimator.",
    "logprob_abs_diff": "Mean |difference| of log-probabilities between what sampled and the trainer, nats a token.",
    "ess": "Effective sample size of the importance weights, as a share of the tokens.",
    "correction_limited_share": "Share of tokens at whose importance weight a cap or a mask acted.",
    "update_kl": "KL divergence between the policies before the first and the last update of a step, nats a token.",
    "logprob_gap": "Mean |difference| of log-probabilities between servers and trainer, without noise, nats a token.",
    "behaviour_gap": "The same of trained rollouts, under the versions, noise and temperature that sampled them.",
    "ratio_mean": "Mean importance ratio.",
    "clipped_share": "Share of tokens whose ratio was clipped.",
    "grad_norm": "Gradient norm before clipping.",
    "loss": "Loss of the last step.",
    "sigma": "Standard deviation of the noise of the newest version.",
    "lag_mean": "Mean lag of the trained spans: learner version minus the version that made them.",
    "lag_max": "Largest lag of the trained spans: learner version minus the version that made them.",
    "sampling_rounds": "Rounds of groups_per_step groups that the last batch took, those of equal rewards included.",
    "zero_variance_share": "Share of ready groups whose rewards were all equal, since the batch before.",
}
"""Step metric (as in `qerld.v1.RunReport`) → help of the gauge `qerld_<name>`."""

EVALUATION_GAUGES: dict[str, str] = {
    "eval_accuracy": "Held-out evaluation without noise: mean share of right samples (pass@1).",
    "eval_accuracy_low": "Lower end of its 95% confidence interval.",
    "eval_accuracy_high": "Upper end of its 95% confidence interval.",
    "eval_pass_at_k": "Held-out evaluation: share of problems of which at least one sample is right.",
    "eval_truncated_share": "Held-out evaluation: share of completions that were cut off.",
    "eval_tokens_mean": "Held-out evaluation: mean tokens of a completion.",
    "eval_failed": "1 when the last held-out evaluation failed, see the log; 0 when it worked.",
}
"""The same of reports with a held-out evaluation."""

OPEN_STATES = (
    GroupState.QUEUED,
    GroupState.SAMPLING,
    GroupState.AWAITING_REWARDS,
    GroupState.READY,
    GroupState.BATCHED,
)
REPLICA_STATES = ("serving", "loading", "quarantined", "refused")


class LearnerMetrics(Observer):
    """All metrics of one learner, in `registry`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._runs: set[str] = set()
        self._define_rpc()
        self._define_training()
        self._define_flow()

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, labels: Sequence[str], buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)

    def _define_rpc(self) -> None:
        labels = ("grpc_service", "grpc_method", "grpc_code")
        self._handled = self._counter("grpc_server_handled_total", "RPCs finished, by method and code.", labels)
        self._handling = self._histogram(
            "grpc_server_handling_seconds", "Seconds of RPCs, streams from open to end.", labels[:2], RPC_BUCKETS
        )

    def _define_training(self) -> None:
        run = ("run",)
        self._steps = self._counter("qerld_steps_total", "Learner steps.", run)
        self._phase = self._histogram(
            "qerld_step_phase_seconds", "Seconds of a step by phase.", ("run", "phase"), PHASE_BUCKETS
        )
        self._trained_tokens = self._counter("qerld_trained_tokens_total", "Completion tokens trained.", run)
        self._computed_tokens = self._counter(
            "qerld_computed_tokens_total", "Tokens that the trainer computed, shared prompts once.", run
        )
        gauges = STEP_GAUGES | EVALUATION_GAUGES
        self._step_gauges = {name: self._gauge(f"qerld_{name}", text, run) for name, text in gauges.items()}
        self._live_version = self._gauge("qerld_live_version", "Policy version that is live.", run)
        self._swap = self._histogram(
            "qerld_swap_seconds", "Seconds from a version's commit until it was live.", run, PHASE_BUCKETS
        )
        self._canaries = self._counter("qerld_canaries_total", "Canaries scored, by result.", ("run", "result"))
        self._canary_failures = self._counter("qerld_canary_failures_total", "Canaries that failed.", run)
        self._canary_gap = self._gauge(
            "qerld_canary_gap", "Mean |difference| of log-probabilities in the last canary.", run
        )
        self._reverted = self._counter("qerld_reverted_total", "Versions that were rolled back.", run)
        self._deaths = self._counter("qerld_trainer_deaths_total", "Trainer processes that ended by themselves.")

    def _define_flow(self) -> None:
        self._rollouts = self._counter(
            "qerld_rollouts_total", "Rollouts sampled, by why they ended.", ("run", "finish_reason")
        )
        self._sampled_tokens = self._counter("qerld_sampled_tokens_total", "Completion tokens sampled.", ("run",))
        self._outcomes = self._counter("qerld_outcomes_total", "Outcomes, by answer.", ("run", "answer"))
        self._groups = self._counter("qerld_groups_total", "Groups that left the buffer, by how.", ("run", "how"))
        self._buffer = self._gauge("qerld_buffer_groups", "Groups in the buffer, by state.", ("run", "state"))
        self._capacity = self._gauge("qerld_buffer_capacity_groups", "Groups that the buffer holds.", ("run",))
        self._replicas = self._gauge("qerld_replicas", "Policy servers, by state.", ("state",))
        self._mutations = self._counter("qerld_store_mutations_total", "Mutations committed to the store.")
        self._commit = self._histogram("qerld_store_commit_seconds", "Seconds of a store commit.", (), RPC_BUCKETS)

    def _run(self, run: str) -> str:
        if run not in self._runs and len(self._runs) < MAX_RUN_LABELS:
            self._runs.add(run)
        return run if run in self._runs else "other"

    # From the interceptor

    def observe_rpc(self, service: str, method: str, code: str, seconds: float) -> None:
        """Count one finished RPC."""
        self._handled.labels(service, method, code).inc()
        self._handling.labels(service, method).observe(seconds)

    # From the core

    def step_reported(self, report: StepReport) -> None:
        run, metrics = self._run(report.run), report.metrics
        self._reverted.labels(run).inc(1 if metrics.get("reverted") else 0)
        self._steps.labels(run).inc()
        for phase, seconds in report.phase_seconds.items():
            self._phase.labels(run, phase).observe(seconds)
        for name, gauge in self._step_gauges.items():
            if name in metrics:
                gauge.labels(run).set(metrics[name])
        self._trained_tokens.labels(run).inc(metrics.get("tokens", 0.0))
        self._computed_tokens.labels(run).inc(metrics.get("tokens_computed", 0.0))

    def outcomes_answered(self, run: str, answer: str, count: int) -> None:
        self._outcomes.labels(self._run(run), answer).inc(count)

    def rollout_finished(self, run: str, tokens: int, finish_reason: str) -> None:
        self._rollouts.labels(self._run(run), finish_reason).inc()
        self._sampled_tokens.labels(self._run(run)).inc(tokens)

    def group_closed(self, run: str, how: str) -> None:
        self._groups.labels(self._run(run), how).inc()

    def canary_scored(self, run: str, gap: float, passed: bool) -> None:
        label = self._run(run)
        self._canaries.labels(label, "passed" if passed else "failed").inc()
        self._canary_failures.labels(label).inc(0 if passed else 1)
        self._canary_gap.labels(label).set(gap)

    def version_live(self, run: str, version: int, swap_seconds: float) -> None:
        self._live_version.labels(self._run(run)).set(version)
        self._swap.labels(self._run(run)).observe(swap_seconds)

    def run_deleted(self, run: str) -> None:
        label = self._run(run)
        self._capacity.labels(label).set(0)
        for state in OPEN_STATES:
            self._buffer.labels(label, state.value).set(0)

    def trainer_died(self) -> None:
        self._deaths.inc()

    def writes_committed(self, mutations: int, seconds: float) -> None:
        self._mutations.inc(mutations)
        self._commit.observe(seconds)

    # From the status loop of `api/health.py`

    def set_run(self, run: str, live_version: int, groups: Mapping[str, int], capacity: int) -> None:
        """Set the gauges of one run's buffer; states that are absent are zero."""
        label = self._run(run)
        self._live_version.labels(label).set(live_version)
        self._capacity.labels(label).set(capacity)
        for state in OPEN_STATES:
            self._buffer.labels(label, state.value).set(groups.get(state.value, 0))

    def set_replicas(self, counts: Mapping[str, int]) -> None:
        """Set how many policy servers are in which state."""
        for state in REPLICA_STATES:
            self._replicas.labels(state).set(counts.get(state, 0))


@contextmanager
def metrics_server(metrics: LearnerMetrics, address: str, port: int) -> Iterator[int]:
    """Serve /metrics over HTTP in a thread; yields the port (0 picks a free one).

    Raises:
        PortError: The address is taken or not of this machine.
    """
    server: Any
    try:
        server, thread = start_http_server(port, addr=address, registry=metrics.registry)
    except OSError as error:
        raise port_error("metrics_port", address, port, error) from error
    try:
        yield int(server.server_port)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
