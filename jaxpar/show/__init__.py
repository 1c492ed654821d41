"""Every picture and table: of plans, searches, schedules and sparse patterns."""
