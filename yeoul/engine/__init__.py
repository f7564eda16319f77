"""The engine: the step loop and the ways to drive it, offline (`llm`) and from an event loop (`inproc`)."""
