"""What a run would cost on hardware that need not be here.

Read `targets` and `hardware` (what is planned for), `work` and `roofline` (how long a
step takes), `plan` (all of it for one step), then `choices`, `search` and `recipe`.
"""
