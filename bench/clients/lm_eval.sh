# lm-eval's local-completions model on a task of six questions in this folder.
set -e
here=$(cd "$(dirname "$0")" && pwd)
tasks=$(mktemp -d)
sed "s#QUESTIONS#$here/lm_eval_questions.jsonl#" "$here/lm_eval_task.yaml" > "$tasks/capitals.yaml"
"$1/lm_eval" --model local-completions --include_path "$tasks" --tasks capitals --model_args \
  "model=$MODEL,base_url=$URL/v1/completions,tokenizer_backend=None,tokenized_requests=False,num_concurrent=4"
rm -r "$tasks"
echo "local-completions, generate_until, 4 concurrent"
