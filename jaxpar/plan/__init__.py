"""What does a run cost: read from the program that the compiler made of its step."""
