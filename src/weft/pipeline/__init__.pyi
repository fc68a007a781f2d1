from . import draw as draw, schedules as schedules
from .capture.functions import (
    GROUPED as GROUPED,
    METADATA as METADATA,
    RANDOM as RANDOM,
    name_of as name_of,
    tensors_read as tensors_read,
)
from .capture.graph import (
    ForwardGraph as ForwardGraph,
    GraphNode as GraphNode,
    containers_of as containers_of,
)
from .capture.model_copy import is_weight as is_weight, run_op as run_op, twin_model as twin_model
from .capture.placeholder import (
    PlaceholderTensor as PlaceholderTensor,
    SkippedShapes as SkippedShapes,
    SkippedWork as SkippedWork,
)
from .capture.source_lines import source_line as source_line
from .capture.split_points import split_points as split_points
from .capture.structures import (
    SIMPLE as SIMPLE,
    argument as argument,
    argument_at as argument_at,
    other_leaves as other_leaves,
    rebuild as rebuild,
    tensors_in as tensors_in,
)
from .capture.tracer import trace_forward as trace_forward
from .draw import perfetto as perfetto, svg as svg, text as text
from .draw.console import print_for_terminal as print_for_terminal
from .draw.curves import (
    AxisMark as AxisMark,
    ChartAxis as ChartAxis,
    Curve as Curve,
    draw_curves as draw_curves,
    stack_images as stack_images,
)
from .draw.style import (
    number_text as number_text,
    seconds_text as seconds_text,
    share_text as share_text,
)
from .plan_stages import (
    check_cut as check_cut,
    choose_schedule as choose_schedule,
    make_stages as make_stages,
    schedule_of as schedule_of,
)
from .schedules._parts import ScheduleSummary as ScheduleSummary
from .simulator import (
    cost_rows as cost_rows,
    simulate as simulate,
    split_backwards as split_backwards,
)
from .split_model import split_stages as split_stages
from .timeline import Lane as Lane, Timeline as Timeline
from .weight_versions import (
    update_shares as update_shares,
    versions_used as versions_used,
    weight_updates as weight_updates,
)
