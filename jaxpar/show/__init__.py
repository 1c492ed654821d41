"""How are plans, searches, schedules and sparse patterns shown: pictures and tables."""
