"""The sampling that a model file recommends (`general.sampling.*`). Owns the keys and what becomes of bad values; must
not know who uses the defaults. The file is hostile input: a value out of range is a warning and counts as absent.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from yeoul.errors import RequestError
from yeoul.types import SamplingParams

PREFIX = "general.sampling."
KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Keys of the file and the fields of SamplingParams that they are for."""

log = logging.getLogger(__name__)


def read_sampling_defaults(metadata: Mapping[str, object]) -> dict[str, int | float]:
    """Fields of SamplingParams that the file has good values for; empty where it recommends nothing."""
    found = {field: _read(PREFIX + key, field, metadata) for key, field in KEYS.items()}
    return {field: value for field, value in found.items() if value is not None}


def _read(key: str, field: str, metadata: Mapping[str, object]) -> int | float | None:
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, float) and field != "top_k":
        # Files hold float32: 0.7 and not 0.699999988079071 is what was meant.
        value = float(f"{value:.7g}")
    try:
        params = SamplingParams(**{field: value})  # type: ignore[arg-type]  # what it checks
    except RequestError as error:
        log.warning("the model file's %s is ignored: %s", key, error)
        return None
    checked: int | float = getattr(params, field)
    return checked
