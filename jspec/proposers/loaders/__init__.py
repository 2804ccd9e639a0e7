"""Published heads: from config.json and tensors to a drafter's config and params."""
