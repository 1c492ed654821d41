"""How a run goes on by itself: the loop, its folder, its logs, and its recovery."""
