"""Dtype policies."""

from .policy import Policy, cast, cast_arguments, policy_of

__all__ = ["Policy", "cast", "cast_arguments", "policy_of"]
