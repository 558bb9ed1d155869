"""Held-out evaluation through the running policy server, without noise: exact probability and greedy accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
from qerld.v1 import common_pb2, replica_pb2, replica_pb2_grpc

from qerld_service.quickstart.tasks import Task, reward

DEADLINE = 120.0
PARALLEL = 8


@dataclass(frozen=True)
class Question:
    """A held-out item as token ids; `answer_ids` ends with the end-of-sequence token."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    answer: str


@dataclass(frozen=True)
class HeldOut:
    """Means over the held-out prompts."""

    exact_probability: float
    greedy_accuracy: float
    prompts: int


def questions_of(task: Task, model: Path) -> list[Question]:
    """Tokenise the held-out items as the service does: chat template, then ids."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(model))

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    questions = []
    for item in task.held_out:
        text = tokenizer.apply_chat_template(task.messages(item), tokenize=False, add_generation_prompt=True)
        questions.append(Question(ids(text), (*ids(item.answer), tokenizer.eos_token_id), item.answer))
    return questions


def evaluate(endpoint: str, run: str, version: int, questions: Sequence[Question], max_tokens: int) -> HeldOut:
    """Evaluate one version on a policy server that serves it; raises grpc.RpcError."""
    policy = common_pb2.Policy(run=run, version=version)
    with grpc.insecure_channel(endpoint) as channel, ThreadPoolExecutor(PARALLEL) as pool:
        stub = replica_pb2_grpc.PolicyReplicaServiceStub(channel)
        exact = exact_probabilities(stub, policy, questions)
        greedy = list(pool.map(lambda question: greedy_reward(stub, policy, question, max_tokens), questions))
    return HeldOut(sum(exact) / len(exact), sum(greedy) / len(greedy), len(questions))


def exact_probabilities(
    stub: replica_pb2_grpc.PolicyReplicaServiceStub, policy: common_pb2.Policy, questions: Sequence[Question]
) -> list[float]:
    """Probability of answer and end of sequence, token by token, of each question."""
    items = [
        replica_pb2.ScoreItem(
            prompt=common_pb2.TokenIds(ids=question.prompt_ids),
            completion=common_pb2.TokenIds(ids=question.answer_ids),
        )
        for question in questions
    ]
    answer = stub.Score(replica_pb2.ScoreRequest(policy=policy, items=items), timeout=DEADLINE)
    return [math.exp(sum(item.logprobs)) for item in answer.items]


def greedy_reward(
    stub: replica_pb2_grpc.PolicyReplicaServiceStub, policy: common_pb2.Policy, question: Question, max_tokens: int
) -> float:
    request = replica_pb2.GenerateRequest(
        policy=policy,
        request_id="held-out",
        prompt=common_pb2.TokenIds(ids=question.prompt_ids),
        count=1,
        sampling=common_pb2.Sampling(temperature=1.0, max_tokens=max_tokens, seed=0),
        noise_free=True,
        greedy=True,
    )
    text, stopped = "", False
    for part in stub.Generate(request, timeout=DEADLINE):
        text += part.text
        stopped = stopped or part.finish_reason == common_pb2.FINISH_REASON_STOP
    return reward(question.answer, text, stopped)
