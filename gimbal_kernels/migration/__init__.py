"""Moving experts between ranks while they serve: planned, staged beside serving, committed by agreement."""

from .plan import MigrationPlan, plan_migration
from .weights import ExpertWeights

__all__ = ["ExpertWeights", "MigrationPlan", "plan_migration"]
