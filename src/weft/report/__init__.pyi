from .plan_page import plan_page as plan_page, read_figures as read_figures
from .read_run import read_run as read_run
from .run_page import run_page as run_page
from .texts import CATALOGUE as CATALOGUE
from .write_html import page_html as page_html, write_html as write_html
