from . import draw as draw, schedules as schedules
from .capture.functions import (
    GROUPED_MM as GROUPED_MM,
    METADATA_FUNCTIONS as METADATA_FUNCTIONS,
    RANDOM_FUNCTIONS as RANDOM_FUNCTIONS,
    function_name as function_name,
    tensors_read as tensors_read,
)
from .capture.graph import (
    ForwardGraph as ForwardGraph,
    GraphNode as GraphNode,
    containers_of as containers_of,
)
from .capture.model_copy import (
    copy_with_tensors as copy_with_tensors,
    is_parameter as is_parameter,
    run_op_without_data as run_op_without_data,
)
from .capture.placeholder import (
    PlaceholderTensor as PlaceholderTensor,
    SkippedShapes as SkippedShapes,
    SkippedWork as SkippedWork,
)
from .capture.source_lines import (
    model_frames as model_frames,
    quoted_line as quoted_line,
    raised_in_torch as raised_in_torch,
    source_line as source_line,
)
from .capture.split_points import split_points as split_points
from .capture.structures import (
    PLAIN_TYPES as PLAIN_TYPES,
    argument as argument,
    argument_at as argument_at,
    map_tensors as map_tensors,
    other_leaves as other_leaves,
    tensors_in as tensors_in,
)
from .capture.tracer import trace_forward as trace_forward
from .draw import perfetto as perfetto, svg as svg, text as text
from .draw.curves import (
    AxisMark as AxisMark,
    ChartAxis as ChartAxis,
    Curve as Curve,
    draw_curves as draw_curves,
    stack_images as stack_images,
)
from .draw.print_picture import print_for_terminal as print_for_terminal
from .draw.style import (
    bytes_text as bytes_text,
    ink as ink,
    kind_name as kind_name,
    number_text as number_text,
    seconds_text as seconds_text,
    shades as shades,
    share_text as share_text,
    unit_of as unit_of,
    whole_step as whole_step,
)
from .draw.svg_image import svg_image as svg_image, svg_text as svg_text
from .plan_stages import (
    check_split_points as check_split_points,
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
)
