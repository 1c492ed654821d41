"""How is anything shown: plans, searches, schedules, sparse patterns and runs.

Pictures are drawn by `picture`, `schedule` and `sparse_attention`; `page` is the frame
of `plan_page` and `run_page`, whose charts are SVG (`chart`) with `hover`. A run is
read by `run_data`.
"""

from jaxpar.lazy import load_modules

load_modules(globals())
