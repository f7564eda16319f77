"""What a chat model's text means: reasoning, content, tool calls, read while it comes. Pure state machines."""
