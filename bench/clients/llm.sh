# The llm command line tool, with the server as an OpenAI-compatible model.
set -e
mkdir -p "$LLM_USER_PATH"
cat > "$LLM_USER_PATH/extra-openai-models.yaml" <<YAML
- model_id: yeoul
  model_name: $MODEL
  api_base: $URL/v1
  api_key_name: openai
YAML
"$1/llm" keys set openai --value "$OPENAI_API_KEY"
streamed=$("$1/llm" -m yeoul -o temperature 0 -o max_tokens 24 "What is the capital of France?")
whole=$("$1/llm" -m yeoul --no-stream -o temperature 0 -o max_tokens 24 "What is the capital of France?")
echo "$streamed"
[ -n "$streamed" ]
[ "$streamed" = "$whole" ]
echo "prompt, streamed and whole"
