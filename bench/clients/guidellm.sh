# guidellm, one request after the other, with the prompts of this folder.
set -e
here=$(cd "$(dirname "$0")" && pwd)
out=$(mktemp -d)
cd "$out"
"$1/guidellm" run --backend "kind=openai_http,target=$URL,model=$MODEL,api_key=$OPENAI_API_KEY" \
  --profile kind=synchronous --constraint kind=max_requests,count=4 \
  --data "kind=json_file,path=$here/guidellm_prompts.jsonl" --output kind=console --disable-console-interactive
cd /
rm -r "$out"
echo "synchronous profile, 4 requests"
