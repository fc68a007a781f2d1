from . import algorithms as algorithms
from .algorithm import (
    CollectiveAlgorithm as CollectiveAlgorithm,
    Message as Message,
    Phase as Phase,
)
from .chunk_states import find_algorithm_faults as find_algorithm_faults, run_steps as run_steps
from .draw_svg import collective_svg as collective_svg
from .draw_text import collective_text as collective_text
from .traffic import Links as Links, Traffic as Traffic, traffic_of as traffic_of
