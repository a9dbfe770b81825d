"""Pure gating: logits to an assignment, losses, balance, expert tables. No ranks, no files."""

if __name__ != "moe_tp.routing":
    raise ImportError(
        f"this folder is the package moe_tp.routing and was imported as {__name__!r}, which would "
        "make a second copy of every class; write 'import moe_tp.routing'"
    )

from moe_tp.routing.assignment import Assignment, RoutingFunction, assign
from moe_tp.routing.balance import bias_rate_at, update_bias
from moe_tp.routing.config import RouterConfig, switch_config
from moe_tp.routing.losses import (
    load_balance_loss,
    pooled_load_balance_loss,
    sequence_counts,
    z_loss,
)
from moe_tp.routing.metrics import LoadMetrics, load_metrics, router_entropy
from moe_tp.routing.noise import jitter_input
from moe_tp.routing.replay import RoutingRecord
from moe_tp.routing.route import route
from moe_tp.routing.scores import router_logits
from moe_tp.routing.table import ExpertTable, balanced_table, first_table, slots_of_ids

__all__ = [
    "Assignment",
    "ExpertTable",
    "LoadMetrics",
    "RouterConfig",
    "RoutingFunction",
    "RoutingRecord",
    "assign",
    "balanced_table",
    "bias_rate_at",
    "first_table",
    "jitter_input",
    "load_balance_loss",
    "load_metrics",
    "pooled_load_balance_loss",
    "route",
    "router_entropy",
    "router_logits",
    "sequence_counts",
    "slots_of_ids",
    "switch_config",
    "update_bias",
    "z_loss",
]
