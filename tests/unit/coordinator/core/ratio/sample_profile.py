"""A node profile, an objective and the splits of eight nodes."""

from baton.online_fit import OnlineLinearFit
from baton.role_split import RoleSplit
from baton.slo import Slo
from coordinator.core.estimates.cost_model import NodeCosts
from coordinator.core.ratio.split_forecast import NodeProfile

# 1 ms for each prompt token; a step takes 20 ms, and 1 ms for each sequence
COSTS = NodeCosts(OnlineLinearFit((0.0, 1.024, 0.0)), OnlineLinearFit((0.02, 0.001, 0.0)))
NODE_PROFILE = NodeProfile(COSTS, max_num_seqs=16, cache_tokens=65536, transfer_costs=(0.005, 0.0))
SLO = Slo(1.5, 0.032)
EIGHT = [RoleSplit(prefill, 8 - prefill) for prefill in range(1, 8)]
