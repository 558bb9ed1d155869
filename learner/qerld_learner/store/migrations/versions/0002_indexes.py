"""Indexes for what the control loops ask at every turn: its cost must not grow with a run's length."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

INDEXES = {
    "batches_by_state": ("batches", ["run", "state"]),
    "groups_by_run": ("groups", ["run", "seq"]),
    "groups_by_run_version": ("groups", ["run", "state", "version"]),
    "versions_by_folder": ("versions", ["run", "folder"]),
    "versions_by_state": ("versions", ["run", "state"]),
}


def upgrade() -> None:
    """Create the indexes."""
    for name, (table, columns) in INDEXES.items():
        op.create_index(name, table, columns)


def downgrade() -> None:
    """Drop them."""
    for name, (table, _columns) in INDEXES.items():
        op.drop_index(name, table_name=table)
