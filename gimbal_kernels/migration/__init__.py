"""Moving experts between ranks while they serve: planned, staged beside serving, committed by agreement."""

from .plan import MigrationPlan, plan_migration

__all__ = ["MigrationPlan", "plan_migration"]
