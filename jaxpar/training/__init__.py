"""How is a run trained unattended: the loop, its folder, its logs, and its recovery."""
