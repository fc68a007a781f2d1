from .all_layouts import every_layout as every_layout
from .case import Case as Case
from .coverage import coverage as coverage, coverage_text as coverage_text
from .report import (
    VerifyReport as VerifyReport,
    result_table as result_table,
    write_verified as write_verified,
)
from .training_check import check_deep as check_deep
from .verified_settings import (
    on_cpus as on_cpus,
    verified_precision as verified_precision,
    verified_sync as verified_sync,
)
from .verify_model import verify as verify, verify_case as verify_case
from .verify_run import verify_deep as verify_deep, verify_layouts as verify_layouts
