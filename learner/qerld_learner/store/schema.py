"""Tables of the store (SQLAlchemy Core). Changing one needs a migration in `migrations/versions`; a test compares them.

Token ids are little-endian int32 blobs, log-probabilities float64 blobs; times are UNIX seconds.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)

metadata = MetaData()

runs = Table(
    "runs",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=True),
    Column("name", String(63), nullable=False, unique=True),
    Column("config", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("reason", Text, nullable=False),
    Column("step", Integer, nullable=False),
    Column("live_version", Integer, nullable=False),
    Column("base_model", Text, nullable=False),
    Column("base_sha256", String(64), nullable=False),
    Column("revision", Integer, nullable=False),
    # Groups dropped for zero variance since the last batch.
    Column("zero_variance", Integer, nullable=False, server_default="0"),
    Column("created_at", Float, nullable=False),
)

versions = Table(
    "versions",
    metadata,
    Column("run", String(63), ForeignKey("runs.name"), primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("parent", Integer, nullable=False),
    Column("step", Integer, nullable=False),
    Column("sigma", Float, nullable=False),
    Column("noise_seed", BigInteger, nullable=False),
    Column("noise_relative", Boolean, nullable=False),
    Column("noise_dtype", String(16), nullable=False, server_default="float32"),
    Column("state", String(16), nullable=False),
    Column("adapter_sha256", String(64), nullable=False),
    Column("adapter_bytes", BigInteger, nullable=False),
    # Relative to the state folder; "" once it was collected. A rollback's version shares its ancestor's folder.
    Column("folder", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("live_at", Float),
    Column("pinned", Boolean, nullable=False),
    # A run has a few versions in states that are looked for, and a few with folders, however long it is.
    Index("versions_by_state", "run", "state"),
    Index("versions_by_folder", "run", "folder"),
)

groups = Table(
    "groups",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=True),
    Column("group_id", String(40), nullable=False, unique=True),
    Column("run", String(63), ForeignKey("runs.name"), nullable=False),
    Column("state", String(20), nullable=False),
    Column("prompt_ids", LargeBinary, nullable=False),
    Column("group_size", Integer, nullable=False),
    Column("sampling", Text, nullable=False),
    Column("labels", Text, nullable=False),
    # Seconds after sampling; `deadline` is the moment, set when the last rollout has finished.
    Column("reward_deadline", Float, nullable=False),
    Column("deadline", Float),
    Column("version", Integer, nullable=False),
    Column("outcomes", Integer, nullable=False),
    Column("created_at", Float, nullable=False),
    Index("groups_by_run", "run", "seq"),
    Index("groups_by_run_state", "run", "state", "seq"),
    Index("groups_by_run_version", "run", "state", "version"),
    Index("groups_by_state_deadline", "state", "deadline"),
)

rollouts = Table(
    "rollouts",
    metadata,
    Column("rollout_id", String(48), primary_key=True),
    Column("group_id", String(40), ForeignKey("groups.group_id"), nullable=False),
    Column("run", String(63), nullable=False),
    Column("position", Integer, nullable=False),
    Column("state", String(16), nullable=False),
    Column("completion_ids", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("tokens", Integer, nullable=False),
    Column("turns", Integer, nullable=False),
    Column("spans", Text, nullable=False),
    Column("finish_reason", String(16)),
    Column("text", Text, nullable=False),
    Column("problem", Text, nullable=False),
    Column("finished_at", Float),
    Column("receipt", String(24), nullable=False),
    Column("receipt_at", Float, nullable=False),
    Column("step", Integer),
    Column("version", Integer),
    Column("advantage", Float),
    Column("ratio", Float),
    Column("clipped_share", Float),
    Index("rollouts_by_group", "group_id", "position"),
)

outcomes = Table(
    "outcomes",
    metadata,
    Column("rollout_id", String(48), ForeignKey("rollouts.rollout_id"), primary_key=True),
    Column("kind", String(16), nullable=False),
    Column("reward", Float),
    # Canonical text of the whole outcome: equal text is the same outcome.
    Column("body", Text, nullable=False),
    Column("at", Float, nullable=False),
)

requests = Table(
    "requests",
    metadata,
    Column("run", String(63), primary_key=True),
    Column("request_id", String(128), primary_key=True),
    Column("body_hash", String(64), nullable=False),
    Column("answer", Text, nullable=False),
    Column("at", Float, nullable=False),
)

batches = Table(
    "batches",
    metadata,
    Column("run", String(63), ForeignKey("runs.name"), primary_key=True),
    # The version that the batch will make.
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("parent", Integer, nullable=False),
    Column("step", Integer, nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("group_ids", Text, nullable=False),
    Column("state", String(16), nullable=False),
    # Number of the learner process that may commit it; another process takes over by raising it.
    Column("fence", Integer, nullable=False),
    # Groups that were dropped for zero variance on the way to it.
    Column("zero_variance", Integer, nullable=False, server_default="0"),
    Column("created_at", Float, nullable=False),
    Index("batches_by_state", "run", "state"),
)

reports = Table(
    "reports",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=True),
    Column("run", String(63), ForeignKey("runs.name"), nullable=False),
    Column("step", Integer, nullable=False),
    Column("version", Integer, nullable=False),
    Column("body", Text, nullable=False),
    # Order in which a run's reports became readable; None until the version is live or reverted.
    Column("published", Integer),
    Index("reports_by_run", "run", "published"),
    Index("reports_by_version", "run", "version", unique=True),
)

counters = Table(
    "counters",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("value", Integer, nullable=False),
)
