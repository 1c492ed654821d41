"""Pipeline schedules: tables of the work in each tick, and their validation."""
