"""The demo: a small published model, prompts for it, and a comparison of n-gram drafters."""
