"""How replicas stay together at run time: bucket exchange, local steps, parameter servers,
membership."""
