"""Evaluate on the wire, both directions."""

from __future__ import annotations

from qerld.v1 import common_pb2, policy_pb2

from qerld_learner.api import convert
from qerld_learner.api.checks import MAX_GROUP_SIZE, Checks
from qerld_learner.api.requests import PromptLimits, prompt_ids, sampling_at_any_temperature
from qerld_learner.evaluation import Completed, EvaluationSpec
from qerld_learner.run_options import TEMPERATURES

MAX_PROMPTS = 16_384
MAX_COMPLETIONS = 1 << 20


def evaluation_spec(checks: Checks, request: policy_pb2.EvaluateRequest, limits: PromptLimits) -> EvaluationSpec:
    """Return what a request asks for, checked; call it off the event loop, it tokenises."""
    samples = 1 if request.greedy else request.samples or 1
    count = len(request.prompts)
    checks.number("policy.version", request.policy.version, "ListVersions lists them")
    checks.between("samples", samples, 1, MAX_GROUP_SIZE, "ask several times, with other seeds")
    if not 1 <= count <= MAX_PROMPTS:
        checks.add("prompts", f"must have 1 to {MAX_PROMPTS} entries, got {count}; split the request")
    elif count * samples > MAX_COMPLETIONS:
        limit = f"must make at most {MAX_COMPLETIONS} completions, got {count} prompts of {samples} samples"
        checks.add("prompts", f"{limit}; split the request")
    wanted = common_pb2.Sampling(seed=0)
    wanted.MergeFrom(request.sampling)
    sampling = sampling_at_any_temperature(checks, wanted, limits, "sampling")
    if not request.greedy:
        way_out = "leave it unset for the run's, or set greedy for the most probable token"
        checks.between("sampling.temperature", sampling.temperature, *TEMPERATURES, way_out)
    checks.done()
    prompts = tuple(prompt_ids(checks, prompt, limits, f"prompts[{i}]") for i, prompt in enumerate(request.prompts))
    return EvaluationSpec(request.policy.run, request.policy.version, prompts, samples, request.greedy, sampling)


def response(completed: Completed) -> policy_pb2.EvaluateResponse:
    return policy_pb2.EvaluateResponse(
        prompt_index=completed.prompt_index,
        sample_index=completed.sample_index,
        completion=convert.token_ids(completed.ids),
        text=completed.text,
        logprobs=completed.logprobs,
        finish_reason=convert.finish_reason(completed.finish_reason),
    )
