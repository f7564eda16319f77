"""Measuring: what is asked of an engine or server, how it is driven, and what the times mean."""
