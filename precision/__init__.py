"""Dtype policies."""

from .policy import Policy, cast, policy_of

__all__ = ["Policy", "cast", "policy_of"]
