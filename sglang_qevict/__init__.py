"""Tiered KV cache for SGLang: the plugin, its CPU platform and its command line."""
