"""What `weft train` does in every rank: the loop, and what it leaves in the run folder."""
