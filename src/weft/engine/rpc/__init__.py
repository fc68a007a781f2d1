"""Modules that live on named workers, called by torch.distributed.rpc."""
