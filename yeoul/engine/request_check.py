"""What a request holds, checked against the model it is for. Owns token ids and combinations of fields; must not know
what runs or waits.
"""

from __future__ import annotations

from collections.abc import Iterable

from yeoul.errors import RequestError
from yeoul.types import Request


def check_contents(request: Request, vocab_size: int) -> None:
    """Raises RequestError, naming the field: empty prompt, token id outside the logits, fields that clash."""
    params = request.params
    if not request.prompt_token_ids:
        raise RequestError("the prompt is empty", hint="send at least one token", param="prompt")
    check_token_ids("prompt", request.prompt_token_ids, vocab_size)
    check_token_ids("logit_bias", params.logit_bias, vocab_size)
    check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    check_token_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    for word in request.bad_word_ids:
        check_token_ids("bad_words", word, vocab_size)
    if params.bad_words and not request.bad_word_ids:
        raise RequestError("bad_words were not tokenized", hint="see yeoul.text.bad_words", param="bad_words")
    if request.pooling is not None and params.max_tokens != 0:
        raise RequestError("pooling goes with max_tokens 0", param="max_tokens")


def check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raises RequestError for an id that the model does not have."""
    for token_id in token_ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise RequestError(
                f"token id {token_id!r:.40} of {name} is not in the vocabulary (0 to {vocab_size - 1})", param=name
            )
