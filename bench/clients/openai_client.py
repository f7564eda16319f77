"""What users of the openai package do, whole and streamed; prints what was checked, or fails."""

import os

from openai import BadRequestError, OpenAI

client = OpenAI()
model = os.environ["MODEL"]
messages = [{"role": "user", "content": "What is the capital of France?"}]
ask = {"model": model, "temperature": 0, "max_tokens": 24}

assert model in [one.id for one in client.models.list()]
whole = client.chat.completions.create(messages=messages, **ask)
chunks = list(
    client.chat.completions.create(messages=messages, stream=True, stream_options={"include_usage": True}, **ask)
)
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
assert text == whole.choices[0].message.content and text
assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
done = client.completions.create(prompt="The capital of France is", **ask)
assert done.usage.completion_tokens <= 24 and done.choices[0].text
response = client.responses.create(model=model, input=messages, temperature=0, max_output_tokens=24)
events = list(client.responses.create(model=model, input=messages, temperature=0, max_output_tokens=24, stream=True))
assert response.output_text == text == events[-1].response.output_text
try:
    client.chat.completions.create(messages=[], **ask)
    raise AssertionError("no messages were accepted")
except BadRequestError as error:
    assert error.param == "messages"
print("chat, stream, completions, responses, responses stream, models, error")
