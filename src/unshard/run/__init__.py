"""Running a plan: bytes are copied, gathered, cast and computed, in bounded memory, and published together."""
