"""What a server that keeps its KV cache in tiers exports, and what is shown of it."""
