"""How much of a step's communication runs beside computing: read from a profile, and drawn."""
