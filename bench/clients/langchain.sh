# LangChain's ChatOpenAI.
exec "$1/python" "$(dirname "$0")/langchain_client.py"
