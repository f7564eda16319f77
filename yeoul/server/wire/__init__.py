"""OpenAI's JSON on one side, Request and TokenOutput on the other: pure functions; no I/O, no framework."""
