"""Scheduling: sequences and what each step computes of them. Plain Python: no arrays, no clocks, no executor."""
