from ._checks import check_gate_biases as check_gate_biases, check_sync as check_sync
from ._registry import make_sync as make_sync, registry as registry
