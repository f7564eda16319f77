"""LangChain's ChatOpenAI: invoke, stream, batch; prints what was checked, or fails."""

import os

from langchain_openai import ChatOpenAI

chat = ChatOpenAI(model=os.environ["MODEL"], temperature=0, max_tokens=24, stream_usage=True)
question = "What is the capital of France?"
whole = chat.invoke(question)
parts = list(chat.stream(question))
assert "".join(part.text for part in parts) == whole.text and whole.text
assert whole.usage_metadata["output_tokens"] > 0
assert (
    sum((part.usage_metadata or {}).get("output_tokens", 0) for part in parts) == whole.usage_metadata["output_tokens"]
)
assert [reply.text for reply in chat.batch([question] * 4)] == [whole.text] * 4
print("invoke, stream with usage, batch")
