"""Client of qerld: sample groups from the live policy, reward them, follow the run. Needs no torch and no vLLM.

The loop of a reward author:

    with Client("localhost:50051") as client:
        client.create_run("sums", RunConfig(max_steps=30), exist_ok=True)
        tasks = (Task(f"{a} + {b} =", {"answer": str(a + b)}) for a, b in pairs)
        for report in client.train("sums", tasks, lambda r: float(r.text.strip() == r.labels["answer"])):
            print(report.step, report.metrics["reward_mean"])
"""

from qerld.v1.common_pb2 import (
    Answer,
    FinishReason,
    Messages,
    Noise,
    NoiseDtype,
    Policy,
    Prompt,
    Rollout,
    Sampling,
    Span,
    TokenIds,
)
from qerld.v1.policy_pb2 import PolicyVersion, VersionState
from qerld.v1.reward_pb2 import (
    Abstention,
    Outcome,
    OutcomeAnswer,
    OutcomeError,
    OutcomeErrorKind,
    Receipt,
    ReceiptState,
    Values,
)
from qerld.v1.rollout_pb2 import Group, GroupState, Segment, Trajectory
from qerld.v1.run_pb2 import (
    AdaptiveNoise,
    AdvantageEstimator,
    Algorithm,
    AlgorithmPreset,
    ImportanceRatio,
    KlEstimator,
    KlPlacement,
    LearningRateSchedule,
    LoraConfig,
    LossAggregation,
    LossClip,
    MismatchCorrection,
    NoiseSchedule,
    OldPolicy,
    Optimizer,
    OptimizerKind,
    Overlong,
    Replica,
    Run,
    RunConfig,
    RunReport,
    RunState,
)

from qerld_client.aio_client import AsyncClient
from qerld_client.errors import (
    AdapterError,
    AlreadyExistsError,
    BusyError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    NotServedError,
    OutcomesRejectedError,
    PreconditionError,
    QerldError,
    UnavailableError,
    Violation,
)
from qerld_client.requests import PromptLike, Rewards, SampledGroup, Task
from qerld_client.retry import RetryPolicy
from qerld_client.sync_client import Client

__all__ = [
    "Abstention",
    "AdapterError",
    "AdaptiveNoise",
    "AdvantageEstimator",
    "Algorithm",
    "AlgorithmPreset",
    "AlreadyExistsError",
    "Answer",
    "AsyncClient",
    "BusyError",
    "Client",
    "DeadlineError",
    "FinishReason",
    "Group",
    "GroupState",
    "ImportanceRatio",
    "InvalidRequestError",
    "KlEstimator",
    "KlPlacement",
    "LearningRateSchedule",
    "LoraConfig",
    "LossAggregation",
    "LossClip",
    "Messages",
    "MismatchCorrection",
    "Noise",
    "NoiseDtype",
    "NoiseSchedule",
    "NotFoundError",
    "NotServedError",
    "OldPolicy",
    "Optimizer",
    "OptimizerKind",
    "Outcome",
    "OutcomeAnswer",
    "OutcomeError",
    "OutcomeErrorKind",
    "OutcomesRejectedError",
    "Overlong",
    "Policy",
    "PolicyVersion",
    "PreconditionError",
    "Prompt",
    "PromptLike",
    "QerldError",
    "Receipt",
    "ReceiptState",
    "Replica",
    "RetryPolicy",
    "Rewards",
    "Rollout",
    "Run",
    "RunConfig",
    "RunReport",
    "RunState",
    "SampledGroup",
    "Sampling",
    "Segment",
    "Span",
    "Task",
    "TokenIds",
    "Trajectory",
    "UnavailableError",
    "Values",
    "VersionState",
    "Violation",
]
