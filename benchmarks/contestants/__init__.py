"""What a benchmark's runner starts: one program each, steps on request."""
