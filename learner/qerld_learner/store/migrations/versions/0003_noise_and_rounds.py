"""The dtype of a version's noise, and how many groups of equal rewards were dropped since the last batch."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns; versions there are were made in float32."""
    op.add_column("versions", sa.Column("noise_dtype", sa.String(16), nullable=False, server_default="float32"))
    for table in ("runs", "batches"):
        op.add_column(table, sa.Column("zero_variance", sa.Integer(), nullable=False, server_default="0"))


def downgrade() -> None:
    """Drop them."""
    for table in ("batches", "runs"):
        op.drop_column(table, "zero_variance")
    op.drop_column("versions", "noise_dtype")
