"""Records of windows that left the KV cache: written behind, read back, forgotten by age."""
