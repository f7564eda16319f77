# The openai package: chat, streams, completions, responses, models.
exec "$1/python" "$(dirname "$0")/openai_client.py"
