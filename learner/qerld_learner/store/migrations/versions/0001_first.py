"""First schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create all tables."""
    op.create_table(
        "counters",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("value", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "requests",
        sa.Column("run", sa.String(length=63), nullable=False),
        sa.Column("request_id", sa.String(length=128), nullable=False),
        sa.Column("body_hash", sa.String(length=64), nullable=False),
        sa.Column("answer", sa.Text(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("run", "request_id"),
    )
    op.create_table(
        "runs",
        sa.Column("seq", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("live_version", sa.Integer(), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("base_sha256", sa.String(length=64), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("seq"),
        sa.UniqueConstraint("name"),
    )
    op.create_table(
        "batches",
        sa.Column("run", sa.String(length=63), nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("parent", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("group_ids", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run"],
            ["runs.name"],
        ),
        sa.PrimaryKeyConstraint("run", "version"),
    )
    op.create_table(
        "groups",
        sa.Column("seq", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("group_id", sa.String(length=40), nullable=False),
        sa.Column("run", sa.String(length=63), nullable=False),
        sa.Column("state", sa.String(length=20), nullable=False),
        sa.Column("prompt_ids", sa.LargeBinary(), nullable=False),
        sa.Column("group_size", sa.Integer(), nullable=False),
        sa.Column("sampling", sa.Text(), nullable=False),
        sa.Column("labels", sa.Text(), nullable=False),
        sa.Column("reward_deadline", sa.Float(), nullable=False),
        sa.Column("deadline", sa.Float(), nullable=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("outcomes", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run"],
            ["runs.name"],
        ),
        sa.PrimaryKeyConstraint("seq"),
        sa.UniqueConstraint("group_id"),
    )
    op.create_index("groups_by_run_state", "groups", ["run", "state", "seq"], unique=False)
    op.create_index("groups_by_state_deadline", "groups", ["state", "deadline"], unique=False)
    op.create_table(
        "reports",
        sa.Column("seq", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("run", sa.String(length=63), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("published", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(
            ["run"],
            ["runs.name"],
        ),
        sa.PrimaryKeyConstraint("seq"),
    )
    op.create_index("reports_by_run", "reports", ["run", "published"], unique=False)
    op.create_index("reports_by_version", "reports", ["run", "version"], unique=True)
    op.create_table(
        "versions",
        sa.Column("run", sa.String(length=63), nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("parent", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("sigma", sa.Float(), nullable=False),
        sa.Column("noise_seed", sa.BigInteger(), nullable=False),
        sa.Column("noise_relative", sa.Boolean(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("adapter_sha256", sa.String(length=64), nullable=False),
        sa.Column("adapter_bytes", sa.BigInteger(), nullable=False),
        sa.Column("folder", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("live_at", sa.Float(), nullable=True),
        sa.Column("pinned", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run"],
            ["runs.name"],
        ),
        sa.PrimaryKeyConstraint("run", "version"),
    )
    op.create_table(
        "rollouts",
        sa.Column("rollout_id", sa.String(length=48), nullable=False),
        sa.Column("group_id", sa.String(length=40), nullable=False),
        sa.Column("run", sa.String(length=63), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("completion_ids", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("turns", sa.Integer(), nullable=False),
        sa.Column("spans", sa.Text(), nullable=False),
        sa.Column("finish_reason", sa.String(length=16), nullable=True),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("problem", sa.Text(), nullable=False),
        sa.Column("finished_at", sa.Float(), nullable=True),
        sa.Column("receipt", sa.String(length=24), nullable=False),
        sa.Column("receipt_at", sa.Float(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=True),
        sa.Column("version", sa.Integer(), nullable=True),
        sa.Column("advantage", sa.Float(), nullable=True),
        sa.Column("ratio", sa.Float(), nullable=True),
        sa.Column("clipped_share", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(
            ["group_id"],
            ["groups.group_id"],
        ),
        sa.PrimaryKeyConstraint("rollout_id"),
    )
    op.create_index("rollouts_by_group", "rollouts", ["group_id", "position"], unique=False)
    op.create_table(
        "outcomes",
        sa.Column("rollout_id", sa.String(length=48), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("reward", sa.Float(), nullable=True),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["rollout_id"],
            ["rollouts.rollout_id"],
        ),
        sa.PrimaryKeyConstraint("rollout_id"),
    )


def downgrade() -> None:
    """Drop all tables."""
    op.drop_table("outcomes")
    op.drop_index("rollouts_by_group", table_name="rollouts")
    op.drop_table("rollouts")
    op.drop_table("versions")
    op.drop_index("reports_by_version", table_name="reports")
    op.drop_index("reports_by_run", table_name="reports")
    op.drop_table("reports")
    op.drop_index("groups_by_state_deadline", table_name="groups")
    op.drop_index("groups_by_run_state", table_name="groups")
    op.drop_table("groups")
    op.drop_table("batches")
    op.drop_table("runs")
    op.drop_table("requests")
    op.drop_table("counters")
