"""Pipeline schedules: tables of who does what in which tick, and their proof."""
