"""KV bookkeeping: block ids, who holds them and how many there are. Plain Python: no tensors."""
