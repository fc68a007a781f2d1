from . import draw as draw, schedules as schedules
from .capture.graph import (
    ForwardGraph as ForwardGraph,
    GraphNode as GraphNode,
    containers_of as containers_of,
    split_points as split_points,
    trace_forward as trace_forward,
)
from .capture.hooks import (
    GROUPED as GROUPED,
    METADATA as METADATA,
    SIMPLE as SIMPLE,
    is_weight as is_weight,
    other_leaves as other_leaves,
    rebuild as rebuild,
    run_op as run_op,
    source_line as source_line,
    tensors_in as tensors_in,
    twin_model as twin_model,
)
from .capture.placeholder import PlaceholderTensor as PlaceholderTensor
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
from .split_model import StageForward as StageForward, split_stages as split_stages
from .timeline import Lane as Lane, Timeline as Timeline
from .weight_versions import (
    update_shares as update_shares,
    versions_used as versions_used,
    weight_updates as weight_updates,
)
