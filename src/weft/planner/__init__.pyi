from .calibrate.report import report_calibrate as report_calibrate, report_fit as report_fit
from .cluster_sim.report import (
    print_report as print_report,
    report_json as report_json,
    write_report as write_report,
)
from .plan_run import plan_for_cluster as plan_for_cluster, write_run_file as write_run_file
from .predict_run import compare_with_prediction as compare_with_prediction
from .search.explain import explain_json as explain_json, explain_row as explain_row
from .search.memory_picture import memory_svg as memory_svg
from .search.report import row_figures as row_figures
from .search.run_precision import run_precision as run_precision
from .simulate_run import (
    SimulateRequest as SimulateRequest,
    make_scenario as make_scenario,
    parse_scale_mode as parse_scale_mode,
    parse_slow as parse_slow,
    parse_slow_link as parse_slow_link,
    require_unique as require_unique,
    simulate_scenario as simulate_scenario,
)
