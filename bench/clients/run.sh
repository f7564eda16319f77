#!/bin/sh
# Clients of other projects against a running server: `make clients`. Each gets installed into build/clients, does what
# its users do, and is one line of the result, on stdout. A client that does not install, or fails, does not stop the rest.
#
# PYTHON: the interpreter that has Yeoul; MODEL: what is served; CLIENTS: which ones (default: all).
set -u
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
model=${MODEL:-smollm2-135m}
clients=${CLIENTS:-openai langchain llm lm_eval guidellm}
home=$root/build/clients
bin=$home/bin
logs=$home/logs
mkdir -p "$logs"

[ -x "$bin/python" ] || "$python" -m venv "$home" || exit 1

package() {
  case $1 in
    openai) echo openai ;;
    langchain) echo langchain-openai ;;
    llm) echo llm ;;
    lm_eval) echo "lm-eval[api]" ;;
    guidellm) echo guidellm ;;
  esac
}

version() {
  "$bin/python" -c "import importlib.metadata as m, sys; print(m.version(sys.argv[1].split('[')[0]))" "$(package "$1")"
}

"$python" -c 'from yeoul.cli import main; import sys; sys.exit(main())' serve "$model" --port 0 --max-model-len 2048 \
  --api-key clients-key 2> "$logs/server.log" &
server=$!
trap 'kill $server; wait $server' EXIT
for _ in $(seq 60); do
  url=$(sed -n 's/.* on \(http:[^ ]*\) .*/\1/p' "$logs/server.log")
  [ -n "$url" ] && break
  sleep 1
done
[ -n "$url" ] || { cat "$logs/server.log" >&2; exit 1; }

export OPENAI_BASE_URL="$url/v1" OPENAI_API_KEY=clients-key MODEL="$model" LLM_USER_PATH="$home/llm" URL="$url"
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
failed=0
for client in $clients; do
  if ! "$bin/python" -m pip --disable-pip-version-check install --quiet "$(package "$client")" > "$logs/$client.log" 2>&1; then
    echo "$client: does not install here"
    continue
  fi
  if sh "$here/$client.sh" "$bin" >> "$logs/$client.log" 2>&1; then
    echo "$client $(version "$client"): ok, $(tail -n 1 "$logs/$client.log")"
  else
    echo "$client $(version "$client"): failed, see $logs/$client.log"
    failed=1
  fi
done
exit $failed
