# guidellm, one request after the other, with the prompts of this folder.
set -e
here=$(cd "$(dirname "$0")" && pwd)
out=$(mktemp -d)
cd "$out"
"$1/guidellm" benchmark run --target "$URL" --model "$MODEL" --profile synchronous --max-requests 4 \
  --data "$here/guidellm_prompts.jsonl" --backend-kwargs "{\"api_key\": \"$OPENAI_API_KEY\"}" --disable-console-interactive
cd /
rm -r "$out"
echo "synchronous profile, 4 requests"
