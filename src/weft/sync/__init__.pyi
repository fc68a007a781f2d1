from ._registry import make_sync as make_sync, registry as registry
