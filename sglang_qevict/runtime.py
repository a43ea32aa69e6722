"""The one tiering of this process: SGLang builds the parts, this is where they find each other.

SGLang constructs pool, allocator, cache and attention backend itself and passes none of
them to the next, so the plan has to be kept somewhere from the sizing of the pools to the
construction of the backend.
"""

from __future__ import annotations

from qevict_tiers.config import TieringConfig
from sglang_qevict.capacity import CapacityPlan
from sglang_qevict.state import TieringState

__all__ = ["NAME", "Runtime", "config_of", "runtime"]

NAME = "qevict"
"""Under which attention backend and prefix cache are registered with SGLang."""


class Runtime:
    """What this process tiers: nothing, or one model's KV cache.

    ``metric_labels`` are set first, where SGLang exports metrics. ``plan`` is set when SGLang sizes
    its pools, ``state`` when it builds the backend.
    """

    def __init__(self) -> None:
        self.metric_labels: dict[str, str] | None = None
        self.plan: CapacityPlan | None = None
        self.state: TieringState | None = None

    @property
    def active(self) -> bool:
        """True once pools of a tiered model are being built."""
        return self.plan is not None

    def require_plan(self) -> CapacityPlan:
        """The plan. Raises ``RuntimeError`` before pools are sized."""
        if self.plan is None:
            raise RuntimeError("KV tiering: pools were built without a capacity plan")
        return self.plan

    def require_state(self) -> TieringState:
        """The state. Raises ``RuntimeError`` before the attention backend is built."""
        if self.state is None:
            raise RuntimeError("KV tiering: used before the attention backend was built")
        return self.state


runtime = Runtime()


def config_of(server_args: object) -> TieringConfig | None:
    """The tiering configuration that rides on SGLang's arguments, or None."""
    return getattr(server_args, "_kv_tiering", None)
