from .app import main as main
from .doctor_run_check import (
    check_layout_fits as check_layout_fits,
    check_run_file as check_run_file,
)
from .draw import print_for_terminal as print_for_terminal
