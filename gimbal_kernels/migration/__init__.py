"""Moving experts between ranks while they serve: planned, staged, committed by agreement (SPEC section 5)."""

from .background import BackgroundMigration
from .migrate import MigrationReport, migrate
from .plan import MigrationPlan, plan_migration
from .verdict import MigrationError
from .weights import ExpertWeights

__all__ = [
    "BackgroundMigration",
    "ExpertWeights",
    "MigrationError",
    "MigrationPlan",
    "MigrationReport",
    "migrate",
    "plan_migration",
]
